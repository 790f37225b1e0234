"""The `env` section: the simulation, its pictures and its tasks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_platform.config.schema.base import Section, key


class Pixels(Section):
    """`env.pixels`: what MuJoCo draws instead of what the environment observes."""

    width: int = key(64, "of a picture, in pixels", ge=8, le=1024)
    height: int = key(64, "of a picture, in pixels", ge=8, le=1024)
    camera: str | None = key(None, "name of a camera of the model; null: the environment's usual view", min_length=1)
    frame_stack: int = key(3, "latest pictures in one observation, so that motion shows", ge=1)
    grayscale: bool = key(False, "one channel per picture instead of three")


class Evaluation(Section):
    """`env.evaluation`: episodes without exploration."""

    episodes: int = key(10, "episodes per evaluation", ge=1)
    seed: int = key(10_000, "seed of the first episode; the others follow", ge=0)
    deterministic: bool = key(True, "mean or most likely action instead of a sampled one")
    video: bool = key(False, "write a video of the first episode")


class EnvTask(Section):
    """An entry of `env.tasks`: one of several tasks in a run."""

    name: str = Field(pattern=r"^[\w.-]+$", description="in the names of its metrics, as `val/<name>/success_once`")
    instruction: str | None = key(None, "vla: the text for the language model", min_length=1)
    kwargs: dict[str, Any] = Field(default_factory=dict, description="added to env.kwargs; what is in both counts here")


class Env(Section):
    """`env`: the simulation."""

    group_name: str | None = key(None, "name of the worker group in logs")
    id: str = key("", "a registered Gymnasium id; embodied: required")
    backend: Literal["mujoco", "mujoco_warp"] = key(
        "mujoco", "physics of Gymnasium's MuJoCo tasks: mujoco_warp steps them in float32, on a GPU if there is one"
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to gymnasium.make")
    tasks: list[EnvTask] = Field(
        default_factory=list, description="tasks that the environments share in turns; none: all do the same"
    )
    pixels: Pixels | None = key(None, "MuJoCo: observe pictures; null: what the environment observes")
    num_envs: int = key(8, "environments stepped together", ge=1)
    num_workers: int = key(0, "processes that step the environments; 0: this one", ge=0)
    pipeline_stages: int = key(
        1, "equal parts of the environments: the policy acts for one while the others are stepped", ge=1
    )
    rollout_steps: int = key(128, "steps per environment and PPO step", ge=1)
    max_episode_steps: int | None = key(None, "null: as registered; an environment without a limit is refused", ge=1)
    normalize_observations: bool = key(True, "running mean and variance, saved with checkpoints")
    normalize_rewards: bool = key(True, "divide by the running deviation of the discounted return")
    clip_observations: float = key(10.0, "normalised observations beyond this are clipped", gt=0)
    clip_rewards: float = key(10.0, "normalised rewards beyond this are clipped", gt=0)
    step_timeout_s: float = key(60.0, "with num_workers: an environment whose step takes longer has failed", gt=0)
    restarts: int = key(
        10,
        "how often environments that raise, hang or die are replaced, for each env rank; 0: the first ends the run",
        ge=0,
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="episodes without exploration")
