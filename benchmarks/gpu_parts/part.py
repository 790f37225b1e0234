"""A part of the acceptance, its settings, and the numbers that it reports."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Target:
    """A bound of a number. speed: the number is a speed, so a small run on the CPU is not compared with the bound."""

    sign: str
    bound: float
    speed: bool = False

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"

    def met(self, value: float) -> bool:
        return value >= self.bound if self.sign == ">=" else value <= self.bound


def at_most(bound: float) -> Target:
    return Target("<=", bound)


def fast(bound: float) -> Target:
    """Returns the target of a speed of at least `bound`."""
    return Target(">=", bound, speed=True)


@dataclass(frozen=True)
class Figure:
    """A measured number. met: whether it meets its target; None without a target, or if a small run ignores it."""

    what: str
    value: float
    unit: str = ""
    target: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Setup:
    """Settings of a part. folder: an empty folder for its files. small: tiny shapes on the CPU."""

    small: bool
    folder: Path
    vllm_python: str | None = None

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu") if self.small else torch.device("cuda", 0)

    @property
    def start(self) -> str:
        """The start method of further processes. A process that uses CUDA must not fork, so a server forks them."""
        return "fork" if self.small else "forkserver"

    def seconds(self, call: Callable[[], object], rounds: int = 5, warm_up: int = 2) -> float:
        """Returns the median seconds of a call, including the kernels and copies that it launches on the device."""
        if self.small:
            rounds, warm_up = 1, 0
        laps = []
        for number in range(warm_up + rounds):
            self.wait()
            began = time.perf_counter()
            call()
            self.wait()
            if number >= warm_up:
                laps.append(time.perf_counter() - began)
        return statistics.median(laps)

    def wait(self) -> None:
        """Waits until the device has finished."""
        if not self.small:
            import torch

            torch.cuda.synchronize()


class Report:
    """Writes each number to a file at once, so that the numbers of a stopped part are not lost."""

    def __init__(self, path: Path, small: bool) -> None:
        self.path, self.small = path, small

    def __call__(self, what: str, value: float, unit: str = "", target: Target | None = None) -> None:
        judged = target is not None and not (self.small and target.speed)
        met = target.met(value) if target is not None and judged else None
        figure = Figure(what, value, unit, "" if target is None else str(target), met)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(figure)) + "\n")

    def rate(self, what: str, count: float, seconds: float, unit: str, target: Target | None = None) -> None:
        self(what, count / seconds if seconds else math.inf, unit, target)


Measure = Callable[[Setup, Report], None]
LONGEST_S = 8 * 60


@dataclass(frozen=True)
class Part:
    """A part of the acceptance. It runs in a process of its own for at most `limit_s` seconds on a GPU.

    needs: modules of other packages that it imports, beside torch. what: its description on the page.
    """

    name: str
    what: str
    measure: Measure
    limit_s: int
    needs: tuple[str, ...] = ()

    def limit(self, small: bool) -> int:
        """Returns the time limit in seconds. A small run takes a few, but the machine may be busy."""
        return LONGEST_S if small else self.limit_s

    def missing(self, setup_vllm: str | None) -> str:
        """Returns why the part is left out; "" if it can run."""
        if self.name == "vllm" and not setup_vllm:
            return "no --vllm-python"
        absent = [name for name in self.needs if not installed(name)]
        return f"not installed: {', '.join(absent)}" if absent else ""


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
