"""Rules between the kind of an embodied policy, the images it sees and the keys that only some kinds read."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.action_level_rules import CHUNKS, broken_action_level_rules
from rl_platform.config.language_model_rules import broken_language_model_rules
from rl_platform.config.recurrent_rules import RECURRENT, broken_recurrent_rules, idle_recurrent_keys
from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config

TYPE, PIXELS = "actor.model.type", "env.pixels"
_TASK, _TASKS = "runner.task_type", "env.tasks"
_GAUSSIAN = ("initial_log_std", "log_std", "action_distribution")
_MLP = ("hidden_sizes", "activation", *_GAUSSIAN)
_LANGUAGE = ("path", "random_init", "tokenizer")
_VLA = ("instruction", "action_bins", "backbone_layers", "train_backbone")
POLICY_KEYS = ("cnn", *RECURRENT, *_MLP, *_VLA, "num_action_chunks")  # of `model`, that only embodied policies read


def idle_embodied_keys(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Keys of an embodied config that do nothing, the reason, and the keys that decide it."""
    kind, switches = config.actor.model.type, (TYPE, _TASK)
    if kind == "vla":
        for name in _MLP:
            yield f"actor.model.{name}", f"{TYPE} vla chooses bins from the states of its language model", switches
        if config.env.tasks:
            yield "actor.model.instruction", f"each task has an instruction of its own ({_TASKS})", (_TASKS, *switches)
        if config.actor.lora is not None:
            reason = "adapters (actor.lora) are trained in place of the language model's own weights"
            yield "actor.model.train_backbone", reason, ("actor.lora", *switches)
    else:
        for name in (*_LANGUAGE, *_VLA):
            yield f"actor.model.{name}", f"{TYPE} {kind} is no language model", switches
        reason = f"{TYPE} {kind} has no layers whose activations fill the memory"
        yield "actor.gradient_checkpointing", reason, switches
    if kind in ("mlp", "gru"):
        yield "actor.model.cnn", f"{TYPE} {kind} has no convolutions", switches
    yield from idle_recurrent_keys(config)
    if config.env.pixels is not None:
        for name in ("normalize_observations", "clip_observations"):
            yield f"env.{name}", f"pictures ({PIXELS}) are divided by 255 in the model instead", (PIXELS, _TASK)


def broken_embodied_rules(config: Config) -> Iterator[BrokenRule]:
    """The rules that an embodied `config` breaks. What only the environment tells is checked when it is built."""
    yield from broken_action_level_rules(config)
    yield from broken_recurrent_rules(config)
    env, cnn = config.env, config.actor.model.cnn
    if config.actor.training_backend == "megatron":
        message = "Megatron trains bare transformers only, an embodied policy is a small network or has one around it"
        hint = "actor.training_backend: fsdp"
        yield BrokenRule("actor.training_backend", message, (_TASK,), hint)
    if not len(cnn.channels) == len(cnn.kernels) == len(cnn.strides):
        message = (
            f"every layer has channels, a kernel and a stride: there are {len(cnn.channels)} channels, "
            f"{len(cnn.kernels)} kernels and {len(cnn.strides)} strides"
        )
        yield BrokenRule("actor.model.cnn", message, (TYPE, _TASK))
    if env.pixels is not None and env.num_workers == 0:
        message = f"{PIXELS} are drawn in processes of their own: a graphics library that crashes cannot end the run"
        yield BrokenRule("env.num_workers", message, (PIXELS, _TASK), "env.num_workers: 2, about one per core")
    if config.actor.model.type == "vla":
        yield from _broken_vla_rules(config)
    yield from _broken_task_rules(config)
    if env.backend == "mujoco_warp":
        reason = "MuJoCo Warp steps all environments of one task at once, and draws no pictures"
        for key, value in (("env.num_workers", env.num_workers), (PIXELS, env.pixels), (_TASKS, env.tasks)):
            if value:
                yield BrokenRule(key, reason, ("env.backend", _TASK), "env.backend: mujoco")


def _broken_task_rules(config: Config) -> Iterator[BrokenRule]:
    env, count = config.env, len(config.env.tasks)
    for index, task in enumerate(env.tasks):
        if task.name in (other.name for other in env.tasks[:index]):
            message = f"there is a task {task.name} already: metrics are named by it"
            yield BrokenRule(f"{_TASKS}[{index}].name", message, (_TASK,))
        if task.instruction is not None and config.actor.model.type != "vla":
            message = f"{TYPE} {config.actor.model.type} reads no instruction: it knows of tasks what it observes"
            yield BrokenRule(f"{_TASKS}[{index}].instruction", message, (TYPE, _TASK), f"{TYPE}: vla")
    if count and env.num_envs % count:
        message = f"{count} tasks (env.tasks) cannot share {env.num_envs} environments evenly"
        yield BrokenRule("env.num_envs", message, (_TASKS, _TASK), f"a multiple of {count}")
    if count and env.evaluation.episodes % count:
        message = f"{count} tasks (env.tasks) cannot have an equal number of {env.evaluation.episodes} episodes"
        yield BrokenRule("env.evaluation.episodes", message, (_TASKS, _TASK), f"a multiple of {count}")


def _broken_vla_rules(config: Config) -> Iterator[BrokenRule]:
    model, algorithm = config.actor.model, config.algorithm
    yield from broken_language_model_rules("actor.model", model)
    untold = [index for index, task in enumerate(config.env.tasks) if task.instruction is None]
    for index in untold:
        message = f"{TYPE} vla reads the instruction of each task"
        yield BrokenRule(f"{_TASKS}[{index}].instruction", message, (TYPE, _TASK), "as: open the drawer")
    if model.instruction is None and not config.env.tasks:
        message = f"{TYPE} vla reads an instruction"
        yield BrokenRule("actor.model.instruction", message, (TYPE, _TASK), "as: keep the pole upright")
    if model.num_action_chunks > 1:
        yield BrokenRule(CHUNKS, f"{TYPE} vla chooses one action at a time", (TYPE, _TASK), f"{CHUNKS}: 1")
    for name in ("logprob_type", "entropy_type"):
        if getattr(algorithm, name) == "token_level":
            key = f"algorithm.{name}"
            message = f"{TYPE} vla has one log-prob and one entropy per action, the sums over its components"
            yield BrokenRule(key, message, (TYPE, _TASK), f"{key}: chunk_level")
