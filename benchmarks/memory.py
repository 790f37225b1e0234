"""Peak memory of a run by owner, beside the plan's estimate.

    python benchmarks/memory.py                       # all cases; writes docs/results/memory.md
    python benchmarks/memory.py --only ppo --output /tmp/page.md

A case is a process of its own under the local runtime. A thread reads the resident set and the used bytes of the heap
every 10 ms. At each new maximum it sums the bytes of the live tensors of every owner. Activations are the used bytes
beyond these tensors and beyond the least such rest of the run. The estimate is that of `--plan` for the mean lengths of
the run. Linux with glibc only. Not covered: GPUs, runs of several processes, child processes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import mmap
import re
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _common import machine, write_page

from rl_platform.launch.placed_config import load
from rl_platform.launch.plans.plan_forms import plan
from rl_platform.metrics import read_metrics

ROOT = Path(__file__).parents[1]
INTERVAL_S = 0.01
QUIET = ("runner.logger_backends=[]", "runner.save_interval=0", "runner.val_check_interval=0")
# owner -> what the plan counts it as
OWNERS = {
    "parameters": "weights",
    "bfloat16 copies": "",
    "optimizer moments": "optimizer",
    "gradients": "gradients",
    "activations": "activations",
    "packed copies": "",
    "generation cache": "kv_cache",
    "libraries, interpreter, data": "processes",
    "freed, kept by the allocator": "",
}
WITH = {
    "bfloat16 copies": "in activations",
    "packed copies": "in activations",
    "freed, kept by the allocator": "in activations",
}


@dataclass(frozen=True)
class Case:
    """A config with overrides, and its number of PPO steps."""

    config: str
    overrides: tuple[str, ...]
    steps: int


FEW = ("data.val_size=32",)
CASES = {
    "reasoning/ppo": Case("reasoning/ppo.yaml", FEW, 2),
    "reasoning/ppo, bfloat16": Case("reasoning/ppo.yaml", (*FEW, "actor.model.dtype=bfloat16"), 2),
    "reasoning/ppo_tiny": Case("reasoning/ppo_tiny.yaml", (), 10),
    "embodied/ppo": Case("embodied/ppo.yaml", ("env.evaluation.video=false",), 6),
}


class _MallInfo(ctypes.Structure):
    """mallinfo2 of glibc; `uordblks`: the bytes in use."""

    _before = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")
    _fields_ = tuple((name, ctypes.c_size_t) for name in (*_before, "uordblks", "fordblks", "keepcost"))


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _MallInfo


def allocated() -> int:
    """Returns the bytes of the heap that are in use."""
    return int(_mallinfo().uordblks)


def resident() -> int:
    """Returns the bytes of the resident set."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def resident_heap() -> int:
    """Returns the bytes of the heap that are resident."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    return sum(int(size) * 1024 for size in re.findall(r"\[heap\]\n(?:.*\n)*?Rss:\s*(\d+) kB", maps))


@dataclass(frozen=True)
class Sample:
    """Bytes: the resident set, the resident part of the heap, the used part of the heap, and live tensors by owner."""

    resident: int
    heap: int
    used: int
    owned: Mapping[str, int]


class Census:
    """Live tensors by owner at the largest resident set. `watch` must be called before a component is built."""

    def __init__(self) -> None:
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self.generators: weakref.WeakSet[Any] = weakref.WeakSet()
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self.least: int | None = None  # bytes in use beyond the owners' tensors, when least is computed
        self.peak = Sample(0, 0, 0, {})
        self.fullest = self.peak  # with the most bytes in use

    def watch(self) -> None:
        from rl_platform.engines.rollout.kv_cache import KVCache
        from rl_platform.engines.rollout.torch import TorchRolloutEngine
        from rl_platform.engines.training.fsdp import FSDPEngine

        for kind, instances in (
            (FSDPEngine, self.engines),
            (TorchRolloutEngine, self.generators),
            (KVCache, self.caches),
        ):
            _register(kind, instances)

    def sample(self, number: int) -> None:
        size, used = resident(), allocated()
        if size > self.peak.resident * 1.001:
            self.peak = Sample(size, resident_heap(), used, self._owned())
        if used > self.fullest.used * 1.001:
            self.fullest = Sample(size, resident_heap(), used, self._owned())
        if number % 20 == 0 and self.engines and all(_trained(one) for one in self.engines):
            rest = used - sum(self._owned().values())
            self.least = rest if self.least is None else min(self.least, rest)

    def owners(self, sample: Sample) -> dict[str, int]:
        """Returns the bytes of every owner in a sample."""
        rest = sample.used - sum(sample.owned.values())
        least = rest if self.least is None else min(self.least, rest)
        free = max(0, sample.heap - sample.used)
        known = {**sample.owned, "activations": rest - least, "freed, kept by the allocator": free}
        return known | {"libraries, interpreter, data": sample.resident - sum(known.values())}

    def _owned(self) -> dict[str, int]:
        seen: set[int] = set()
        sums: dict[str, int] = {}
        for owner, tensors in self._tensors():
            sums[owner] = sums.get(owner, 0) + sum(_new_bytes(tensors, seen))
        return sums

    def _tensors(self) -> Iterator[tuple[str, Iterable[Any]]]:
        for engine in list(self.engines):
            parameters = list(engine.model.parameters())
            yield "parameters", [*parameters, *engine.model.buffers()]
            yield "gradients", [one.grad for one in parameters if one.grad is not None]
            if engine.optimizer is not None:
                yield (
                    "optimizer moments",
                    [value for state in engine.optimizer.state.values() for value in state.values()],
                )
        for generator in list(self.generators):
            parameters = list(generator.model.parameters())
            yield "bfloat16 copies", [one for one in parameters if one.element_size() == 2]
            yield "parameters", [one for one in parameters if not one.is_meta]
            yield "packed copies", [one.packed.weight for one in generator._decoder.linears if one.packed is not None]
        for cache in list(self.caches):
            yield "generation cache", [cache.tails, *(s for pool in cache.pools.values() for s in pool.segments)]


def _trained(engine: Any) -> bool:
    """Whether a learner has made an optimizer step; true for a reference."""
    optimizer = engine.optimizer
    return optimizer is None or any(state["step"] > 0 for state in optimizer.state.values())


def _new_bytes(tensors: Iterable[Any], seen: set[int]) -> Iterator[int]:
    for tensor in tensors:
        mkldnn = tensor.is_mkldnn
        place = id(tensor) if mkldnn else tensor.untyped_storage().data_ptr()
        if place not in seen:
            seen.add(place)
            yield tensor.numel() * tensor.element_size() if mkldnn else tensor.untyped_storage().nbytes()


def _register(kind: Any, instances: weakref.WeakSet[Any]) -> None:
    original = kind.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        instances.add(self)

    kind.__init__ = init


def measure(words: Sequence[str], output: str) -> None:
    """Runs a training command in this process and writes what its memory was."""
    from rl_platform.launch.cli import main as cli
    from rl_platform.runtime import cpu

    census, over = Census(), threading.Event()
    census.watch()

    def watch() -> None:
        number = 0
        while not over.wait(INTERVAL_S):
            with contextlib.suppress(RuntimeError):  # a dictionary or a set grew meanwhile
                census.sample(number)
            number += 1

    watcher = threading.Thread(target=watch, daemon=True)
    keep = cpu.keep_freed_memory

    def keep_and_watch() -> None:
        keep()
        watcher.start()  # a thread that exists earlier has a heap of its own

    cpu.keep_freed_memory = keep_and_watch
    sys.argv = ["platform-launch", *words]
    try:
        cli()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        over.set()
        watcher.join()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    highest = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    assert highest is not None
    content = {"peak": int(highest[1]) * 1024}
    for name, sample in (("resident", census.peak), ("in use", census.fullest)):
        content[name] = {"sampled": sample.resident, "used": sample.used, "owners": census.owners(sample)}
    Path(output).write_text(json.dumps(content), encoding="utf-8")


@dataclass(frozen=True)
class Result:
    """Bytes of a run: its peak, the parts of the peak by owner, the most that is in use at once, and the plan's."""

    name: str
    peak: int
    owners: Mapping[str, int]
    in_use: int
    planned: int
    planned_parts: Mapping[str, int]


def result_of(name: str, case: Case) -> Result:
    """Runs the case and plans it for its mean lengths."""
    config = str(ROOT / "configs" / case.config)
    with tempfile.TemporaryDirectory() as folder:
        output, run = Path(folder, "memory.json"), Path(folder, "run")
        words = [config, *QUIET, *case.overrides, f"runner.max_steps={case.steps}", f"runner.output_dir={run}"]
        command = [sys.executable, str(Path(__file__)), "--child", str(output), *words]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if ended.returncode:
            raise SystemExit(f"{name}: the run ended with exit code {ended.returncode}")
        measured = json.loads(output.read_text(encoding="utf-8"))
        lengths = [*lengths_of(read_metrics(run))]
    memory = planned(case, lengths)
    resident, used = measured["resident"], measured["in use"]
    in_use = used["sampled"] - used["owners"]["freed, kept by the allocator"]
    return Result(name, measured["peak"], resident["owners"], in_use, memory["peak"], parts_of(memory))


def planned(case: Case, lengths: Iterable[str]) -> dict[str, Any]:
    """Returns the plan's bytes of the node; `lengths`: overrides."""
    loaded = load(str(ROOT / "configs" / case.config), [*case.overrides, *lengths])
    (device,) = json.loads(plan("json", loaded))["devices"]
    memory: dict[str, Any] = device["memory_bytes"]
    return memory


def lengths_of(rows: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yields overrides with the mean lengths of a reasoning run as limits."""
    for key, metric in (
        ("data.max_prompt_length", "len/prompt_mean"),
        ("data.max_response_length", "len/response_mean"),
    ):
        values = [row[metric] for row in rows if metric in row]
        if values:
            yield f"{key}={math.ceil(max(values))}"


def parts_of(memory: Mapping[str, Any]) -> dict[str, int]:
    """Returns the planned bytes: lasting ones of all components, passing ones of the component with most of them."""
    components = memory["components"].values()
    lasting = {name: sum(one[name] for one in components) for name in ("weights", "optimizer")}
    passing = ("gradients", "activations", "kv_cache")
    most = max(components, key=lambda one: sum(one[name] for name in passing))
    return lasting | {name: most[name] for name in passing} | {"processes": memory["processes"]}


def table(result: Result) -> Iterator[str]:
    yield "| owner | measured | plan |"
    yield "|---|---|---|"
    for owner, part in OWNERS.items():
        planned = gigabytes(result.planned_parts[part]) if part else WITH[owner]
        measured = gigabytes(result.owners.get(owner, 0))
        if measured != "0.00" or (part and planned != "0.00"):  # owners of nothing have no line
            yield f"| {owner} | {measured} | {planned} |"
    error = result.planned / result.peak - 1
    planned = f"**{gigabytes(result.planned)}** ({error:+.0%})"
    yield f"| **peak of the resident set** | **{gigabytes(result.peak)}** | {planned} |"
    yield f"| most in use at once | {gigabytes(result.in_use)} | |"


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}"


def page(results: Sequence[Result]) -> str:
    where = machine(["torch"])
    made = f"Made with `python benchmarks/memory.py`, {where['cpu']}, {where['cores']} cores, torch "
    made += f"{where['versions']['torch']}, {datetime.now(UTC).date().isoformat()}."
    lines = ["# Memory of a run", "", made, ""]
    lines += [
        "GB (10^9 bytes) by owner at the largest resident set of the run, beside [--plan](../placement.md) for the",
        "mean lengths of the run. The resident set never shrinks: the last row is the most that is in use at once.",
        "",
    ]
    for result in results:
        lines += [f"## {result.name}", "", *table(result), ""]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        measure(sys.argv[3:], sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=CASES, default=[*CASES])
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/memory.md")
    given = parser.parse_args()
    results = []
    for name in given.only:
        results.append(result_of(name, CASES[name]))
        print(f"{name}: {gigabytes(results[-1].peak)} GB, planned {gigabytes(results[-1].planned)}", flush=True)
    write_page(given.output, page(results))
    print(page(results))


if __name__ == "__main__":
    main()
