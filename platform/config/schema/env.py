"""The `env` section: the simulation, its images and its tasks."""

from __future__ import annotations

from pydantic import Field

from rl_platform.config.schema.section import Section, UserPath, key
from rl_platform.user_code import is_named


class Pixels(Section):
    """`env.pixels`: rendered images as observations of a MuJoCo environment."""

    width: int = key(64, "width of an image in pixels", ge=8, le=1024)
    height: int = key(64, "height of an image in pixels", ge=8, le=1024)
    camera: str | None = key(None, "name of a camera of the model; null: the default view", min_length=1)
    frame_stack: int = key(3, "consecutive images in one observation", ge=1)
    grayscale: bool = key(False, "one channel per image instead of three")


class Evaluation(Section):
    """`env.evaluation`: episodes without exploration."""

    episodes: int = key(10, "episodes per evaluation", ge=1)
    seed: int = key(10_000, "seed of the first episode; each further episode adds 1", ge=0)
    deterministic: bool = key(True, "take the mean or most likely action; false: sample")
    video: bool = key(False, "draw the best and the worst episode of an evaluation, beside training")


class EnvTask(Section):
    """An entry of `env.tasks`: one of several tasks in a run."""

    name: str = Field(
        pattern=r"^[\w.-]+$", description="name of the task in metrics, for example `val/<name>/success_once`"
    )
    instruction: str | None = key(None, "vla, pi0, smolvla, vlm_tokens: text for the language model", min_length=1)
    kwargs: dict[str, object] = Field(
        default_factory=dict, description="arguments added to env.kwargs; they override equal names"
    )


class Env(Section):
    """`env`: the simulation."""

    group_name: str | None = key(None, "name of the worker group in logs")
    id: str = key("", "registered Gymnasium id; required for embodied runs, unless backend is a class")
    backend: str = key(
        "mujoco",
        "physics of Gymnasium's MuJoCo tasks: mujoco, or mujoco_warp (float32, on a GPU if there is one); or a class "
        "that steps all environments: module:Class or path/to/file.py:Class",
    )
    on_device: bool = key(
        True,
        "mujoco_warp: a rollout stays on the device of the simulation if the policy is there too; false: observations "
        "and actions of every step pass through main memory",
    )
    kwargs: dict[str, object] = Field(
        default_factory=dict, description="arguments of gymnasium.make, or of the class in backend"
    )
    tasks: list[EnvTask] = Field(
        default_factory=list, description="several tasks, assigned to the environments in turn; empty: one task"
    )
    pixels: Pixels | None = key(
        None, "MuJoCo: rendered images as observations; null: the environment's own observations"
    )
    python: UserPath | None = key(
        None,
        "interpreter of the processes that step the environments, as path/to/venv/bin/python, or the name of an "
        "environment that `rl-platform environment NAME` made; null: the platform's own",
        min_length=1,
    )
    address: str | None = key(
        None,
        "host:port of an environment server (`rl-platform environment-server`), or several, separated by commas; "
        "null: no server",
        min_length=1,
    )
    token_file: UserPath | None = key(
        None,
        "file with the servers' token, on every machine; null: the environment variable RL_PLATFORM_ENV_TOKEN",
        min_length=1,
    )
    num_envs: int = key(8, "environments stepped together", ge=1)
    num_workers: int = key(
        0,
        "processes that step the environments, or connections to the servers of address; 0: the env rank itself",
        ge=0,
    )
    pipeline_stages: int = key(
        1, "equal parts of the environments; the policy acts for one part while the others are stepped", ge=1
    )
    rollout_steps: int = key(128, "steps per environment and PPO step", ge=1)
    max_episode_steps: int | None = key(
        None, "time limit of an episode; null: as registered (an environment without a limit is refused)", ge=1
    )
    normalize_observations: bool = key(
        True, "normalise observations by their running mean and variance, saved in checkpoints"
    )
    normalize_rewards: bool = key(True, "divide rewards by the running standard deviation of the discounted return")
    clip_observations: float = key(10.0, "largest absolute value of a normalised observation", gt=0)
    clip_rewards: float = key(10.0, "largest absolute value of a normalised reward", gt=0)
    step_timeout_s: float = key(
        60.0, "with num_workers: longest step of an environment in seconds; a longer one is a failure", gt=0
    )
    restarts: int = key(
        10,
        "largest number of environments replaced after a failure, per env rank; 0: the first failure ends the run",
        ge=0,
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="episodes without exploration")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The servers in `address`."""
        return tuple(part.strip() for part in self.address.split(",")) if self.address else ()

    @property
    def name(self) -> str:
        """The name of the environment: `id`, or the class of the user in `backend`."""
        return self.backend if is_named(self.backend) else self.id
