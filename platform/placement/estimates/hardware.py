"""Memory, arithmetic and bandwidth of GPUs and of machines without one, for estimates.

Numbers of GPUs are from data sheets, for dense arithmetic; memory is the part that the driver leaves. Between nodes a
usual network card per GPU is assumed. Neither torch nor CUDA is used.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from rl_platform.placement.inventory import Inventory, ask_driver

GIB = 2**30
_TERA, _GIGA = 1e12, 1e9
ASSUMED = "h100"  # its speed is assumed for a GPU without a name


@dataclass(frozen=True)
class Device:
    """One resource of a placement: a GPU, or a whole node without any (`kind` "cpu").

    memory: bytes, None when unknown. bf16, fp32: FLOPS. hbm: bytes/s of its own memory. link, network: bytes/s to a
    device of the same and of another node, one way.
    """

    kind: str
    memory: int | None
    bf16: float
    fp32: float
    hbm: float
    link: float
    network: float
    known: bool = True  # False: the speed of ASSUMED

    def flops(self, dtype: str) -> float:
        return self.bf16 if dtype == "bfloat16" else self.fp32


GPUS = {
    kind: Device(kind, int(memory * GIB), bf16 * _TERA, fp32 * _TERA, hbm * _GIGA, link * _GIGA, network * _GIGA)
    for kind, memory, bf16, fp32, hbm, link, network in (  # in GiB, TFLOPS and GB/s
        ("a10", 22, 125, 31.2, 600, 32, 3),
        ("a100-40gb", 39, 312, 19.5, 1555, 300, 25),
        ("a100-80gb", 79, 312, 19.5, 2039, 300, 25),
        ("b200", 178, 2250, 75, 8000, 900, 50),
        ("h100", 79, 989, 67, 3350, 450, 50),
        ("h20", 95, 148, 44, 4000, 450, 50),
        ("h200", 140, 989, 67, 4800, 450, 50),
        ("l4", 22, 121, 30.3, 300, 32, 3),
        ("l40s", 44, 362, 91.6, 864, 32, 12),
        ("mi300x", 191, 1307, 163.4, 5300, 448, 50),
        ("rtx4090", 23, 165, 82.6, 1008, 32, 3),
    )
}
CPUINFO = Path("/proc/cpuinfo")
_CORE_BYTES, _MOST_BYTES, _ASSUMED_CORES = 5e9, 100e9, 8  # of a core of a server; bandwidth is shared by the socket
# float32 operations of a core in a clock cycle, by the flags of Linux, the fastest first: multiply-adds of two units
_CYCLE = (("avx512f", 64), ("avx2", 32), ("asimd", 16), ("sse2", 8))
_HALF_WIDTH = "25"  # the family of AMD's Zen 3 and 4, which compute AVX-512 in two parts
_TIMES_IN_BFLOAT16 = (("amx_bf16", 16), ("avx512_bf16", 2))
_ASSUMED_FLOPS = 32 * 2.5e9  # of a core with AVX2
_ETHERNET = 1.25e9


@dataclass(frozen=True)
class Devices:
    """The devices of a cluster: `main` on all nodes except for those in `others`. host: the CPU of a node."""

    main: Device
    others: Mapping[int, Device] = field(default_factory=dict)
    host: Device | None = None

    def on(self, nodes: Iterable[int]) -> Device:
        """Returns the device on these nodes. That of several kinds has the least memory and the lowest rates."""
        if not self.others:
            return self.main
        kinds = {device.kind: device for device in (self.others.get(node, self.main) for node in nodes)}
        first, *more = kinds.values() or [self.main]
        if not more:
            return first
        memory = min((each.memory for each in kinds.values() if each.memory is not None), default=None)
        names = ("bf16", "fp32", "hbm", "link", "network")
        rates = {name: min(getattr(each, name) for each in kinds.values()) for name in names}
        return Device(", ".join(sorted(kinds)), memory, **rates)


def devices_of(inventory: Inventory) -> Devices:
    """Returns the devices of a cluster whose node groups may name other GPUs."""
    main = device_of(inventory)
    others = {
        number: GPUS[node.gpu] for number, node in enumerate(inventory.nodes) if node.gpu and node.gpu != main.kind
    }
    return Devices(main, others, _cpu(inventory))


def peak_flops(inventory: Inventory, dtype: str) -> float | None:
    """Returns the FLOPS of a device of this cluster in this type; None for a CPU and an unknown GPU."""
    device = device_of(inventory)
    return device.flops(dtype) if device.known and device.kind != "cpu" else None


def device_of(inventory: Inventory) -> Device:
    """Returns the device that `inventory` counts: its named GPU, this machine's GPU, a node's CPU or a share of it.

    A GPU without a name has an unknown memory and the speed of `ASSUMED`; `known` is False.
    """
    if not inventory.num_accelerators or inventory.is_emulated:
        return _cpu(inventory)
    if inventory.gpu:
        return GPUS[inventory.gpu]
    name, memory = _driver() if any(node.device_ids for node in inventory.nodes) else ("", None)
    kind = _kind(name, memory)
    if kind:
        return GPUS[kind]
    return replace(GPUS[ASSUMED], kind=name or "GPU of unknown kind", memory=memory, known=False)


def _cpu(inventory: Inventory) -> Device:
    node = inventory.nodes[0]
    share = max(1, node.num_accelerators) if node.emulated else 1  # a node group may have none
    cores = (node.cpus or _ASSUMED_CORES) / share
    memory = node.memory // share if node.memory else None
    own, times = _core() if node.cpus else (_ASSUMED_FLOPS, 1)  # a detected node is like this machine
    bandwidth = min(cores * _CORE_BYTES, _MOST_BYTES)
    return Device("cpu", memory, cores * own * times, cores * own, bandwidth, bandwidth, _ETHERNET)


def _cpu_facts() -> dict[str, str]:
    """Returns what /proc/cpuinfo says about the first CPU; nothing on other systems than Linux."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def processor() -> str:
    """Returns the name of this machine's processor."""
    return _cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """Returns the names of the instruction sets of this machine's processor, as Linux calls them."""
    facts = _cpu_facts()
    return {*facts.get("flags", facts.get("Features", "")).split()}


@cache
def _core() -> tuple[float, int]:
    """Returns the float32 FLOPS of one CPU that the system counts, and the factor for bfloat16, by /proc/cpuinfo.

    The clock is the one reported, in a virtual machine the base clock. CPUs of one core share its units.
    """
    facts, flags = _cpu_facts(), cpu_flags()
    cycle = next((count for flag, count in _CYCLE if flag in flags), 0)
    if cycle > 32 and (facts.get("vendor_id"), facts.get("cpu family")) == ("AuthenticAMD", _HALF_WIDTH):
        cycle = 32
    try:
        clock = float(facts.get("cpu MHz", 2500)) * 1e6
        threads = max(1.0, int(facts.get("siblings", 1)) / int(facts.get("cpu cores", 1)))
    except (ValueError, ZeroDivisionError):
        return _ASSUMED_FLOPS, 1
    times = next((count for flag, count in _TIMES_IN_BFLOAT16 if flag in flags), 1)
    return (cycle * clock / threads or _ASSUMED_FLOPS), times


def _driver() -> tuple[str, int | None]:
    """Returns name and bytes of this machine's first GPU from nvidia-smi, or empty and None."""
    try:
        answer = ask_driver("name,memory.total")
    except (OSError, subprocess.TimeoutExpired):
        answer = None
    if answer is None:
        return "", None
    name, _, mebibytes = answer.stdout.strip().partition("\n")[0].partition(",")
    return name.strip(), int(mebibytes) * 2**20 if mebibytes.strip().isdigit() else None


def _kind(name: str, memory: int | None) -> str:
    """Returns the table's kind for a driver's name ("NVIDIA H100 80GB HBM3"), "" if there is none."""
    words = name.lower().replace("-", " ").replace("geforce rtx ", "rtx").split()
    if "a100" in words:
        return "a100-80gb" if memory is not None and memory > 60 * GIB else "a100-40gb"
    return next((kind for kind in GPUS if kind in words), "")
