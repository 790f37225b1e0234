"""Derives the share of a GPU that SGLang or vLLM takes for weights, keys and values.

Without `rollout.gpu_memory_utilization` the share is the memory estimate for all of its running sequences, limited by
the memory that other components leave on that GPU. Without `rollout.max_running_requests` the number of sequences is
the largest that fits, up to MOST_RUNNING.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rl_platform.config.rollout_backend import HOSTED
from rl_platform.config.schema import Config
from rl_platform.config.schema.rollout import RUNNING
from rl_platform.errors import ConfigError, Problem
from rl_platform.placement.estimates.component_shapes import shapes
from rl_platform.placement.estimates.hardware import GIB, Device, devices_of
from rl_platform.placement.estimates.memory import COMMUNICATOR, PROCESS_ON_GPU, Counted, MemoryModel
from rl_platform.placement.estimates.occupancy import NEARLY_FULL, Crowd, chosen_order, crowds_of
from rl_platform.placement.estimates.step_moves import phases_of
from rl_platform.placement.estimates.workload import rows_of_rollout, running_sequences
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.offload_order import OffloadOrder
from rl_platform.placement.scheduler import Placement

MOST_RUNNING = 256  # sequences of an engine without `rollout.max_running_requests`
MARGIN = 1.1  # for pages that are not full, which the estimate leaves out


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each GPU of one engine, and their `share` of it. sequences: the number that fits at the same time."""

    share: float
    weights: int
    cache: int
    sequences: int
    wanted: int

    def __str__(self) -> str:
        room = f"{self.sequences} of {self.wanted}" if self.sequences < self.wanted else f"all {self.wanted}"
        return (
            f"rollout.gpu_memory_utilization {self.share:.2f}, from the estimate: {self.weights / GIB:.1f} GiB of "
            f"weights and {self.cache / GIB:.1f} GiB of keys and values, for {room} running sequences"
        )


def engine_memory(config: Config, placement: Placement, inventory: Inventory) -> EngineMemory | None:
    """Returns None if the config sets the share, without SGLang, vLLM or a GPU, or for an unknown GPU or model.

    Raises ConfigError if the other components leave no memory for a single sequence.
    """
    known_shapes = shapes(config)[0]
    device = devices_of(inventory).on(placement.layout.parts["rollout"].nodes)
    if not derives_memory(config, device, placement.layout.parts["rollout"].per_rank) or "rollout" not in known_shapes:
        return None
    assert device.memory is not None
    memory = MemoryModel(config, known_shapes, placement.layout, on_gpu=True)
    order = chosen_order(config, placement, known_shapes, inventory)
    return derived_memory(config, memory, order, crowds_of(config, placement, inventory), device.memory)


def derives_memory(config: Config, device: Device, gpus: int) -> bool:
    """Returns whether the share of the engine on `device` follows from the estimate. gpus: of a rank."""
    hosted = config.rollout.backend in HOSTED and config.rollout.gpu_memory_utilization is None
    return hosted and device.memory is not None and gpus > 0


def derived_memory(
    config: Config, memory: MemoryModel, order: OffloadOrder, crowds: Iterable[Crowd], capacity: int
) -> EngineMemory:
    """Returns the share of an engine without `rollout.gpu_memory_utilization`, on GPUs of `capacity` bytes.

    Raises ConfigError if the other components leave no memory for a single sequence.
    """
    rollout, part = config.rollout, memory.layout.parts["rollout"]
    together = [crowd for crowd, _ in crowds if any(name == "rollout" for name, _, _ in crowd)]
    room = min(_room(crowd, memory, order, capacity, part.per_rank) for crowd in together)
    whole, estimated = memory.rank("rollout"), running_sequences(config, part.ranks)
    weights, each = whole.weights // part.per_rank, whole.kv_cache // part.per_rank // estimated
    wanted = estimated
    if rollout.max_running_requests is None:
        wanted = min(MOST_RUNNING, rows_of_rollout(config, part.ranks))
    taken = min(int(MARGIN * (weights + each * wanted)), room)
    sequences = min(wanted, max(0, taken - weights) // each)
    if sequences == 0:
        raise ConfigError([_no_room(room, weights, each)])
    return EngineMemory(taken / capacity, weights, taken - weights, sequences, wanted)


def with_engine_memory(config: Config, derived: EngineMemory | None) -> Config:
    """Returns the config with the derived share, and with the number of running sequences if it has none."""
    if derived is None:
        return config
    running = config.rollout.max_running_requests or max(derived.sequences, min(RUNNING, derived.wanted))
    return config.changed({"rollout.gpu_memory_utilization": derived.share, "rollout.max_running_requests": running})


def _room(crowd: Sequence[Counted], memory: MemoryModel, order: OffloadOrder, capacity: int, per_rank: int) -> int:
    """Returns the bytes of a GPU that its occupants leave to each engine, without its process and activations."""
    others = [one for one in crowd if one[0] != "rollout"]
    usage = memory.usage(others, order)
    used = usage.peak
    if "rollout" in order.leaving:  # it stays while others work, but without this memory
        held = next(moves.held for moves in phases_of(order) if moves.phase == "generate")
        used = usage.processes + sum(one.held(held.get(name, "all")) for name, one in usage.components.items())
        used += usage.components["reward"].passing if "reward" in usage.components else 0
    engines = sum(ranks for name, _, ranks in crowd if name == "rollout")
    own = (
        PROCESS_ON_GPU + memory.communicators("rollout") * COMMUNICATOR + memory.rank("rollout").activations // per_rank
    )
    return max(0, (int(NEARLY_FULL * capacity) - used) // engines - own)


def _no_room(room: int, weights: int, each: int) -> Problem:
    message = (
        f"the other components leave {room / GIB:.1f} GiB of a GPU to the engine, which needs {weights / GIB:.1f} GiB "
        f"for weights and {each / GIB:.2f} GiB for the keys and values of one sequence"
    )
    hint = "rollout.offload: true, fewer components on these GPUs, or more GPUs per rank; --plan shows the memory"
    return Problem("rollout.gpu_memory_utilization", message, hint=hint)
