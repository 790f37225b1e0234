"""The `runner` section: the run as a whole."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_platform.config.schema.base import Section, key


class Runner(Section):
    """`runner`: the run as a whole."""

    task_type: Literal["embodied", "reasoning"] = Field(description="which loop")
    experiment_name: str = key("ppo", "name of the run", min_length=1)
    output_dir: str = key(
        "runs/${runner.experiment_name}", "for metrics, checkpoints, config and samples", min_length=1
    )
    max_steps: int = key(100, "PPO steps", ge=1)
    max_epochs: int | None = key(None, "reasoning: passes over the data; null: only max_steps counts", ge=1)
    seed: int = key(1, "of every random generator of the run", ge=0)
    val_check_interval: int = key(0, "steps between validations; 0: at start and end", ge=0)
    save_interval: int = key(0, "steps between checkpoints; 0: only at the end", ge=0)
    keep_checkpoints: int = key(2, "newest checkpoints kept", ge=1)
    resume: str = key("auto", "auto, never, or the path of a checkpoint")
    logger_backends: list[Literal["tensorboard", "wandb"]] = key(["tensorboard"], "beside metrics.jsonl")
    log_samples: int = key(2, "reasoning: generated texts written per step", ge=0)
    max_staleness: int = key(
        0, "1: a rollout is collected while the one before is trained on, with weights one update old", ge=0, le=1
    )
    trace_steps: int = key(5, "first steps of a launch whose timeline is written to trace.json; 0: none", ge=0)
    accelerate: Literal["auto", "off"] = key(
        "auto", "off: plain torch and numpy instead of compiled loops and repacked weights"
    )
    deadline_s: float = key(600.0, "longest wait between components before the run ends", gt=0)
    stop_grace_s: float = key(
        20.0, "after SIGTERM or SIGHUP: longest wait for the end of the step, which is saved", ge=0
    )
