"""The `runner` section: the run as a whole."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_platform.config.schema.section import Section, UserPath, key

LOGGERS = ("tensorboard", "wandb", "trackio")


class WarmStart(Section):
    """`runner.warm_start`: behaviour cloning before the first PPO step, and demonstrations in PPO's loss."""

    demonstrations: UserPath = Field(
        min_length=1, description="HDF5 file of robomimic's layout, or folder of a LeRobot data set; on every machine"
    )
    observations: list[str] = key(
        [],
        "names of the parts of an observation in the file, joined in this order; empty: the only one, of LeRobot "
        "observation.state",
    )
    updates: int = key(2000, "optimizer steps on demonstrations before the first PPO step", ge=1)
    mini_batch_size: int = key(256, "demonstrated steps behind one optimizer step", ge=1)
    lr: float = key(1e-3, "learning rate of these optimizer steps", gt=0)
    nll_coef: float = key(
        0.0, "factor of the demonstrated actions' mean negative log-likelihood in PPO's loss; 0: cloning alone", ge=0
    )


class Runner(Section):
    """`runner`: the run as a whole."""

    task_type: Literal["embodied", "reasoning"] = Field(
        description="embodied (policies in simulation) or reasoning (language models)"
    )
    experiment_name: str = key("ppo", "name of the run", min_length=1)
    output_dir: UserPath = key(
        "runs/${runner.experiment_name}", "folder of metrics, checkpoints, config and samples", min_length=1
    )
    max_steps: int = key(100, "PPO steps", ge=1)
    max_epochs: int | None = key(None, "reasoning: passes over the data; null: only max_steps counts", ge=1)
    seed: int = key(1, "seed of all random generators", ge=0)
    val_check_interval: int = key(0, "steps between validations; 0: one at the start, one at the end", ge=0)
    save_interval: int = key(0, "steps between checkpoints; 0: one at the end", ge=0)
    keep_checkpoints: int = key(2, "newest checkpoints to keep", ge=1)
    resume: UserPath = key("auto", "checkpoint to resume: auto (the newest in output_dir), never, or a path")
    warm_start: WarmStart | None = key(None, "embodied: clone demonstrations before PPO; null: start untrained")
    trust_checkpoint: bool = key(
        False,
        "embodied: resume although the environments' states hold classes of their own, whose loading may run code",
    )
    logger_backends: list[str] = key(
        ["tensorboard"], f"loggers in addition to metrics.jsonl: {', '.join(LOGGERS)}, or module:Class"
    )
    callbacks: list[str] = key(
        [], "functions, as module:function, that are called after each step and may stop the run"
    )
    log_samples: int = key(2, "reasoning: number of generated texts to log per step", ge=0)
    max_staleness: int = key(
        0, "largest number of updates by which generation is ahead of training; 0: they alternate", ge=0
    )
    stale: Literal["wait", "drop"] = key(
        "wait",
        "responses that were begun for an earlier step and are more than max_staleness updates old, as those that "
        "dynamic sampling carries or partial rollouts continue: wait (they are trained on) or drop (counted)",
    )
    record_failure: bool = key(True, "a step whose update fails is kept in recordings/failed, for rl-platform replay")
    trace_steps: int = key(5, "steps after the start whose timeline is written to trace.json; 0: none", ge=0)
    accelerate: Literal["auto", "off"] = key(
        "auto", "auto: compiled loops and repacked weights; off: plain torch and numpy"
    )
    matmul_precision: Literal["auto", "highest", "high"] = key(
        "auto",
        "precision of float32 products on GPUs: highest (float32) or high (TF32: factors with 11 significant bits); "
        "auto: high if actor.model.dtype is float32. CPUs always use float32",
    )
    deterministic: bool = key(
        False,
        "GPUs use only kernels that repeat their results, so a resumed run equals an uninterrupted one bit for bit; "
        "this is slower. CPUs always repeat their results",
    )
    deadline_s: float = key(
        600.0, "longest wait of one component for another, in seconds; the run fails after it", gt=0
    )
    stop_grace_s: float = key(20.0, "seconds after SIGTERM or SIGHUP to finish and save the running step", ge=0)
