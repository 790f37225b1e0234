"""Simulators: to which one an id belongs, the versions that were tried, and the line that installs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MANIPULATION = "manipulation"  # of `rl-platform environment`
_MUJOCO_3 = {"mujoco": "3.3.0"}


@dataclass(frozen=True)
class Simulator:
    """part: of the ids and backends of its tasks. versions: of its packages, the first is its own. made: whether
    `rl-platform environment manipulation` installs it. also: further packages to install. page: its installation, if
    that is not a line."""

    name: str
    part: str
    versions: Mapping[str, str] = field(default_factory=dict)
    made: bool = False
    also: str = ""
    page: str = ""

    @property
    def packages(self) -> str:
        """Arguments of `pip install`."""
        return " ".join([*(f"{name}=={number}" for name, number in self.versions.items()), self.also]).strip()

    def install_line(self, python: str | None = None) -> str:
        """Returns how to get the simulator. python: `env.python`, a path that need not exist; None: a new one."""
        if self.page:
            return f"install {self.name} ({self.page}), and set env.python to its interpreter"
        if self.made:
            return f"run `rl-platform environment {MANIPULATION}` once, then set env.python={MANIPULATION}"
        python = python or f"{self.part}/bin/python"
        folder, then = Path(python).parent.parent, f"env.python={python}"
        return f"`python3.11 -m venv {folder} && {python} -m pip install {self.packages}`, then {then}"

    def other_versions(self) -> list[str]:
        """Returns the packages of this interpreter of other minor versions than were tried, as `mujoco 4.0.0`.

        Raises PackageNotFoundError if the simulator is not installed.
        """
        others = []
        for package, tried in self.versions.items():
            try:
                number = version(package)
            except PackageNotFoundError:
                if package == next(iter(self.versions)):
                    raise
                continue
            if number.split(".")[:2] != tried.split(".")[:2]:
                others.append(f"{package} {number}")
        return others


_ALL = (
    Simulator("robosuite", "robosuite", {"robosuite": "1.5.2"} | _MUJOCO_3, made=True),
    Simulator("Meta-World", "metaworld", {"metaworld": "3.1.1"} | _MUJOCO_3, made=True),
    Simulator("Gymnasium-Robotics", "gymnasium_robotics", {"gymnasium-robotics": "1.4.2"} | _MUJOCO_3, made=True),
    Simulator("dm-control", "dm_control", {"dm_control": "1.0.28"} | _MUJOCO_3, made=True),
    Simulator("ManiSkill", "maniskill", {"mani-skill": "3.0.1"}),
    Simulator("LIBERO", "libero", {"hf-libero": "0.1.4"}),
    Simulator("MuJoCo Playground", "playground", {"playground": "0.2.0"}, also="gymnasium"),
    Simulator("Isaac Lab", "isaac_lab", page="https://isaac-sim.github.io/IsaacLab"),
)
SIMULATORS = {simulator.part: simulator for simulator in _ALL}


def simulator_of(name: str) -> Simulator | None:
    """Returns the simulator of an id or backend; None: none of these."""
    return next((simulator for part, simulator in SIMULATORS.items() if part in name), None)


def named_simulator(name: str) -> Simulator | None:
    """Returns the simulator of this name or package, whatever its case and marks; None: none of these."""
    for simulator in _ALL:
        if _letters(name) in map(_letters, (simulator.name, simulator.part, *list(simulator.versions)[:1])):
            return simulator
    return None


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
