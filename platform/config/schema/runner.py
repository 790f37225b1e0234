"""The `runner` section: the run as a whole."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_platform.config.schema.base import Section


class Runner(Section):
    """`runner`: the run as a whole."""

    task_type: Literal["embodied", "reasoning"] = Field(description="which loop")
    experiment_name: str = Field(default="ppo", min_length=1, description="name of the run")
    output_dir: str = Field(
        default="runs/${runner.experiment_name}",
        min_length=1,
        description="for metrics, checkpoints, config and samples",
    )
    max_steps: int = Field(default=100, ge=1, description="PPO steps")
    max_epochs: int | None = Field(
        default=None, ge=1, description="reasoning: passes over the data; null: only max_steps counts"
    )
    seed: int = Field(default=1, ge=0, description="of every random generator of the run")
    val_check_interval: int = Field(default=0, ge=0, description="steps between validations; 0: at start and end")
    save_interval: int = Field(default=0, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(default=2, ge=1, description="newest checkpoints kept")
    resume: str = Field(default="auto", description="auto, never, or the path of a checkpoint")
    logger_backends: list[Literal["tensorboard", "wandb"]] = Field(
        default=["tensorboard"], description="beside metrics.jsonl"
    )
    log_samples: int = Field(default=2, ge=0, description="reasoning: generated texts written per step")
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=1,
        description="1: a rollout is collected while the one before is trained on, with weights one update old",
    )
    trace_steps: int = Field(
        default=5, ge=0, description="first steps of a launch whose timeline is written to trace.json; 0: none"
    )
    accelerate: Literal["auto", "off"] = Field(
        default="auto", description="off: plain torch and numpy instead of compiled loops and repacked weights"
    )
    deadline_s: float = Field(default=600.0, gt=0, description="longest wait between components before the run ends")
    stop_grace_s: float = Field(
        default=20.0, ge=0, description="after SIGTERM or SIGHUP: longest wait for the end of the step, which is saved"
    )
