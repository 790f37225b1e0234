"""The `env` section: the simulation, its pictures and its tasks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_platform.config.schema.base import Section


class Pixels(Section):
    """`env.pixels`: what MuJoCo draws instead of what the environment observes."""

    width: int = Field(default=64, ge=8, le=1024, description="of a picture, in pixels")
    height: int = Field(default=64, ge=8, le=1024, description="of a picture, in pixels")
    camera: str | None = Field(
        default=None, min_length=1, description="name of a camera of the model; null: the environment's usual view"
    )
    frame_stack: int = Field(default=3, ge=1, description="latest pictures in one observation, so that motion shows")
    grayscale: bool = Field(default=False, description="one channel per picture instead of three")


class Evaluation(Section):
    """`env.evaluation`: episodes without exploration."""

    episodes: int = Field(default=10, ge=1, description="episodes per evaluation")
    seed: int = Field(default=10_000, ge=0, description="seed of the first episode; the others follow")
    deterministic: bool = Field(default=True, description="mean or most likely action instead of a sampled one")
    video: bool = Field(default=False, description="write a video of the first episode")


class EnvTask(Section):
    """An entry of `env.tasks`: one of several tasks in a run."""

    name: str = Field(pattern=r"^[\w.-]+$", description="in the names of its metrics, as `val/<name>/success_once`")
    instruction: str | None = Field(default=None, min_length=1, description="vla: the text for the language model")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="added to env.kwargs; what is in both counts here")


class Env(Section):
    """`env`: the simulation."""

    group_name: str | None = Field(default=None, description="name of the worker group in logs")
    id: str = Field(default="", description="a registered Gymnasium id; embodied: required")
    backend: Literal["mujoco", "mujoco_warp"] = Field(
        default="mujoco",
        description="physics of Gymnasium's MuJoCo tasks: mujoco_warp steps them in float32, on a GPU if there is one",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to gymnasium.make")
    tasks: list[EnvTask] = Field(
        default_factory=list, description="tasks that the environments share in turns; none: all do the same"
    )
    pixels: Pixels | None = Field(
        default=None, description="MuJoCo: observe pictures; null: what the environment observes"
    )
    num_envs: int = Field(default=8, ge=1, description="environments stepped together")
    num_workers: int = Field(default=0, ge=0, description="processes that step the environments; 0: this one")
    pipeline_stages: int = Field(
        default=1,
        ge=1,
        description="equal parts of the environments: the policy acts for one while the others are stepped",
    )
    rollout_steps: int = Field(default=128, ge=1, description="steps per environment and PPO step")
    max_episode_steps: int | None = Field(
        default=None, ge=1, description="null: as registered; an environment without a limit is refused"
    )
    normalize_observations: bool = Field(default=True, description="running mean and variance, saved with checkpoints")
    normalize_rewards: bool = Field(
        default=True, description="divide by the running deviation of the discounted return"
    )
    clip_observations: float = Field(default=10.0, gt=0, description="normalised observations beyond this are clipped")
    clip_rewards: float = Field(default=10.0, gt=0, description="normalised rewards beyond this are clipped")
    step_timeout_s: float = Field(
        default=60.0, gt=0, description="with num_workers: an environment whose step takes longer has failed"
    )
    restarts: int = Field(
        default=10,
        ge=0,
        description="how often environments that raise, hang or die are replaced, for each env rank; 0: the first "
        "ends the run",
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="episodes without exploration")
