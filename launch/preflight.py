"""What is checked before anything starts: engines and runtime that exist here, folders, memory, disk, the environment's id.

Everything found at one level is reported together. Cheap checks come first: the expensive ones import transformers or build an
environment, and are not reached by a config that fails the cheap ones.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import psutil

from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, Problem
from rl_platform.placement.scheduler import Placement

BYTES_TRAINED = 16  # per parameter: float32 weight, gradient and two Adam moments
BYTES_FROZEN = 4


def check_available(config: Config, placement: Placement) -> None:
    """Raises ConfigError for what this version or this machine cannot run, though the config is valid."""
    problems = []
    for name in ("actor", "critic"):
        backend = getattr(config, name).training_backend
        if backend != "fsdp" and name in placement.components:
            problems.append(
                Problem(f"{name}.training_backend", "this version trains with fsdp only", value=backend, hint="fsdp")
            )
    if config.rollout.backend != "torch":
        hint = "rollout.backend=torch"
        problems.append(
            Problem(
                "rollout.backend", "this version generates with torch only", value=config.rollout.backend, hint=hint
            )
        )
    if config.cluster.runtime == "ray" or not placement.fits_one_process:
        reason = placement.one_process_obstacle or "cluster.runtime is ray"
        hint = "place every model on one GPU or on the CPU of this machine, as in actor,critic,rollout,reward: 0"
        problems.append(Problem("cluster", f"this version runs in one process ({reason})", hint=hint))
    for name in ("env", "rollout"):
        if config.runner.task_type == "embodied" and placement.world_size(name) != 1:
            hint = "env.num_workers shares the environments among processes"
            message = "an embodied run has one rank of it"
            problems.append(
                Problem(
                    "cluster.component_placement",
                    f"{name}: {message}",
                    value=str(placement.world_size(name)),
                    hint=hint,
                )
            )
    if "wandb" in config.runner.logger_backends and importlib.util.find_spec("wandb") is None:
        problems.append(
            Problem("runner.logger_backends", "wandb is not installed", value="wandb", hint="pip install wandb")
        )
    if problems:
        raise ConfigError(problems)


def prepare_output(config: Config) -> Path:
    """The run's folder, made if need be. Raises ConfigError when it cannot be written or holds something else."""
    folder = Path(config.runner.output_dir).expanduser().absolute()
    key = "runner.output_dir"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([Problem(key, f"cannot be made: {error.strerror}", value=str(folder))]) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError([Problem(key, "is not writable", value=str(folder))])
    if any(folder.iterdir()):
        if not (folder / "config.yaml").is_file():
            message = "is not empty and holds no run of this platform; nothing was written"
            raise ConfigError([Problem(key, message, value=str(folder), hint="name another folder")])
        if config.runner.resume == "never":
            message = "holds a run already, and runner.resume is never"
            raise ConfigError(
                [
                    Problem(
                        key,
                        message,
                        value=str(folder),
                        hint="runner.resume=auto goes on with it; or name another folder",
                    )
                ]
            )
    return folder


def check_memory(config: Config, placement: Placement) -> int:
    """Raises ConfigError when the models cannot fit into this machine's memory. Returns the bytes a checkpoint takes.

    Counts weights, gradients and optimizer state; activations and caches come on top.
    """
    if config.runner.task_type == "embodied":
        return 0
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from rl_platform.models.pretrained import load_config
    from rl_platform.models.tokenizer import load_tokenizer

    def parameters(key: str) -> int:
        section = getattr(config, key).model or config.actor.model
        tokenizer = load_tokenizer(section)
        model_config = load_config(section, tokenizer.vocab_size, tokenizer.eos_token_ids[0], f"{key}.model")
        with init_empty_weights():
            network = AutoModelForCausalLM.from_config(model_config)
        return sum(parameter.numel() for parameter in network.parameters())

    needs = {name: parameters(name) * BYTES_TRAINED for name in ("actor", "critic") if name in placement.components}
    needs |= {name: parameters(name) * BYTES_FROZEN for name in ("reference",) if name in placement.components}
    if not any(placement.accelerators.values()):
        needs["rollout (repacked weights)"] = parameters("actor") * BYTES_FROZEN
        available = psutil.virtual_memory().available
        if sum(needs.values()) > available:
            parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needs.items())
            message = (
                f"the models need {sum(needs.values()) / 2**30:.1f} GiB ({parts}), {available / 2**30:.1f} GiB are free"
            )
            raise ConfigError(
                [Problem("actor.model", message, value=config.actor.model.path or "", hint="a smaller model, or a GPU")]
            )
    return sum(needs[name] for name in ("actor", "critic") if name in needs) * 3 // 4
