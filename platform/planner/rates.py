"""Rates that a device reaches: shares of its data sheet, or measurements of `rl_platform.launch.tools.calibrate`.

The cache folder has one JSON file for each measured machine. A measurement holds for plans on the same kind of device.
For a CPU these are the same processor, number of cores and version of torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from rl_platform.config.schema import Config
from rl_platform.disk import cache_folder
from rl_platform.errors import ConfigError, Problem
from rl_platform.placement.estimates.hardware import Device, processor
from rl_platform.placement.inventory import Inventory, cpu_count
from rl_platform.planner.lengths import Lengths, expected

FORM = 3  # version of the file's form
FOLDER = "machines"
OPTION = "--plan=calibrate"

Points = Sequence[tuple[int, float]]
Overhead = tuple[float, float]
"""Seconds of a call or an optimizer step, and of each of its rows, beside products and traffic."""
OVERHEADS = Literal["generate", "evaluate", "train", "advantages"]

TRAINING_SHARE = 0.4  # of the peak arithmetic, reached by forward and backward passes
# the same of a CPU's peak at its reported clock: about two thirds of the peak, at a clock that is a third higher
CPU_SHARE = 0.85
STREAM_SHARE = 0.7  # of the peak bandwidth, reached by reading weights and caches
TRANSFER_SHARE = 0.7  # of a link's bandwidth, reached by collectives
HOST_LINK = 20e9  # bytes/s between a GPU and pinned host memory, one way: PCIe 4.0 x16
TRANSFER_S = 50e-6  # an empty collective or broadcast
LAUNCH_S = 250e-6  # launches of the operators of one layer, for any batch; measured on a CPU core
POLICY_LAYER_S = 20e-6  # the same of a layer of a small policy, whose loops are compiled on a CPU
ENV_STEP_S = 15e-6  # a step of one environment: MuJoCo's HalfCheetah, on the cores of a laptop
ACT_S = 100e-6  # the policy's forward for one step of all environments
# beside the work of a language model: a response, an optimizer step, and a PPO step; on a core of an AMD EPYC
CPU_OVERHEADS: Mapping[str, Overhead] = {"generate": (0.0, 3e-4), "train": (5e-3, 0.0), "advantages": (0.02, 0.0)}
DISK = 500e6  # bytes/s of a checkpoint
START_S = 10.0  # from the command to the first step, without reading the weights

Measured = dict[str, Any]  # the stored measurement of a machine
ENVIRONMENT = {"id", "backend", "kwargs", "tasks", "pixels", "num_envs", "num_workers"}  # keys of a measurement

_Positive = Annotated[float, Field(gt=0)]
_Least = Annotated[float, Field(ge=0)]
_Rows = Annotated[int, Field(gt=0)]
_Points = Annotated[list[tuple[_Rows, _Positive]], Field(min_length=1)]


class _Stored(BaseModel):
    """The part of a machine's file that a plan reads."""

    date: str
    matrix: dict[str, Annotated[dict[_Rows, _Points], Field(min_length=1)]]
    memory: _Positive
    host: _Positive = HOST_LINK  # measured on GPUs
    elements: _Least
    launch: _Least
    decode_layer: _Least
    decode_sequence: _Least
    overheads: dict[OVERHEADS, tuple[_Least, _Least]]
    disk: _Positive
    start: _Least
    all_reduce: dict[_Rows, _Least]
    environments: dict[str, dict[str, _Positive]]
    policies: dict[str, dict[Literal["collect", "evaluate", "update"], _Positive]]
    prompts: dict[str, Annotated[list[_Rows], Field(min_length=1)]]


@dataclass(frozen=True)
class Rates:
    """The rates of one device. Times are in seconds, bandwidths in bytes/s.

    matrix: FLOP/s of a product by type, width of the matrix and number of rows, in ascending order.
    passes: share of `matrix` that forward and backward passes reach. elements: seconds of a forward and backward pass
    for each byte of the tensors between its products.
    memory, link, network, host: bandwidth of device memory, between devices, between nodes, to host memory.
    transfer: an empty collective.
    launch: the operators of one layer; policy_layer: of one layer of an embodied policy;
    decode_layer: of one layer in the generation engine.
    decode_sequence: overhead of one running sequence for each token. overheads: of the phases of language models.
    env_step: a step of one environment on one worker; act: the policy's forward for one step of all environments.
    collect, evaluate, update: of an embodied policy in one process, 0 if not measured: a step of all environments with
    its actions, the log-probs of a row, and an optimizer step.
    source: the source of the rates in words, for the plan.
    """

    matrix: Mapping[str, Mapping[int, Points]]
    passes: float
    memory: float
    link: float
    network: float
    host: float = HOST_LINK
    transfer: float = TRANSFER_S
    launch: float = LAUNCH_S
    policy_layer: float = LAUNCH_S
    decode_layer: float = LAUNCH_S
    decode_sequence: float = 0.0
    elements: float = 0.0
    overheads: Mapping[str, Overhead] = field(default_factory=dict)
    env_step: float = ENV_STEP_S
    act: float = ACT_S
    collect: float = 0.0
    evaluate: float = 0.0
    update: float = 0.0
    disk: float = DISK
    start: float = START_S
    source: str = ""

    def overhead(self, phase: OVERHEADS, calls: float, rows: float) -> float:
        """Returns the seconds of `calls` calls or optimizer steps with `rows` rows in all."""
        call, row = self.overheads.get(phase, (0.0, 0.0))
        return calls * call + rows * row

    def flops(self, dtype: str, rows: float, width: int) -> float:
        """Returns the FLOP/s of a pass with `rows` rows through matrices of this width, interpolated between the
        measured widths and numbers of rows."""
        widths = self.matrix[dtype if dtype in self.matrix else "float32"]
        points = [(known, _between(points, max(rows, 1.0))) for known, points in sorted(widths.items())]
        return self.passes * _between(points, max(width, 1.0))


def matrix_of(tree: Measured, share: float = 1.0) -> dict[str, dict[int, Points]]:
    """Returns the stored FLOP/s of a machine, times the share of one device."""
    return {
        dtype: {int(width): [(rows, rate * share) for rows, rate in points] for width, points in widths.items()}
        for dtype, widths in tree.items()
    }


def _between(points: Points, at: float) -> float:
    """Returns the value at `at` of ascending points: linear in the logarithm, and constant beyond both ends."""
    for (fewer, low), (more, high) in itertools.pairwise(points):
        if at <= more:
            share = math.log(max(at, fewer) / fewer) / math.log(more / fewer)
            return low + share * (high - low)
    return points[-1][1]


def data_sheet(device: Device) -> Rates:
    """Returns the rates of a device's data sheet times the usual shares."""
    cpu = device.kind == "cpu"
    return Rates(
        matrix={"float32": {1: [(1, device.fp32)]}, "bfloat16": {1: [(1, device.bf16)]}},
        passes=CPU_SHARE if cpu else TRAINING_SHARE,
        memory=device.hbm * STREAM_SHARE,
        policy_layer=POLICY_LAYER_S if cpu else LAUNCH_S,
        overheads=CPU_OVERHEADS if cpu else {},
        link=device.link * TRANSFER_SHARE,
        network=device.network * TRANSFER_SHARE,
    )


def measured_rates(tree: Measured, device: Device, config: Config, share: float) -> Rates:
    """Returns the rates of a device of a measured machine.

    share: its part of the machine, as a CPU worker has a part of the cores.
    """
    names = ("launch", "decode_layer", "decode_sequence", "overheads", "disk", "start")
    rates = replace(
        data_sheet(device),
        matrix=matrix_of(tree["matrix"], share),
        passes=1.0,
        elements=tree["elements"] / share,
        memory=tree["memory"] * share,
        host=tree.get("host", HOST_LINK),
        source=f"rates of this machine, measured on {tree['date']}",
        **{name: tree[name] for name in names},
    )
    if (measured := tree["environments"].get(fingerprint(config, "env"))) is not None:
        rates = replace(rates, env_step=measured["step"])
    if share == 1:
        rates = replace(rates, **tree["policies"].get(fingerprint(config, "policy"), {}))
    if tree["all_reduce"]:
        (_, least), *_, (size, most) = [(int(size), seconds) for size, seconds in tree["all_reduce"].items()]
        rates = replace(rates, transfer=least, link=size / max(most - least, 1e-9))
    return rates


def measured_lengths(tree: Measured, config: Config) -> Lengths:
    """Returns the sampled prompts of the config's data, and responses as before a measurement."""
    known, prompts = expected(config), tree["prompts"].get(fingerprint(config, "data"))
    return known if prompts is None else replace(known, prompts=tuple(prompts), prompt_source="a sample of the data")


def fingerprint(config: Config, kind: str) -> str:
    """Returns the key of a config's measurement. kind: env (its environments), policy (its embodied policy in them) or
    data (its prompts)."""
    if kind == "env":
        text = config.env.model_dump_json(include=ENVIRONMENT)
    elif kind == "policy":
        keys = {"model", "lora", "training_backend", "gradient_checkpointing", "micro_batch_size"}
        text = config.env.model_dump_json(include={*ENVIRONMENT, "sequence_length", "max_episode_steps"})
        text += config.actor.model_dump_json(include=keys) + config.algorithm.loss_type
        text += str(config.mini_batch_size("actor"))
    else:
        keys = {"system_prompt", "prompt_template", "use_chat_template", "max_prompt_length", "task", "sources"}
        model = config.actor.model.model_dump_json(include={"path", "tokenizer"})
        text = config.data.model_dump_json(include=keys) + model
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def machine_file(kind: str) -> Path:
    """Returns the file of this machine's measurement. kind: the kind of its devices."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    name = f"{processor()} {cpu_count()} cores" if kind == "cpu" else kind
    return cache_folder() / FOLDER / (re.sub(r"[^a-z0-9.]+", "-", f"{name} torch {torch}".lower()).strip("-") + ".json")


def stored_machine(device: Device, inventory: Inventory) -> Measured | None:
    """Returns the measurement for a device; None if there is none to read, or it is a CPU of another machine.

    Raises ConfigError if the file cannot be read or has another form.
    """
    if not device.known or (device.kind == "cpu" and inventory.nodes[0].cpus is None):
        return None
    try:
        file = machine_file(device.kind)
        tree: Measured = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, PermissionError, RuntimeError):  # RuntimeError: no home folder
        return None
    except (OSError, ValueError) as error:
        raise ConfigError([_unreadable(file, str(error))]) from error
    if reason := unusable(tree):
        raise ConfigError([_unreadable(file, reason)])
    return tree


def unusable(tree: object) -> str:
    """Returns why a plan cannot use the content of a file; empty if it can."""
    if not isinstance(tree, dict) or tree.get("form") != FORM:
        return "it is of another version"
    try:
        _Stored.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return ""


def _unreadable(file: Path, why: str) -> Problem:
    hint = f"delete it, or measure again with {OPTION}"
    return Problem(OPTION, f"the measurement of this machine cannot be read: {why}", value=str(file), hint=hint)
