"""What a runtime of processes needs of the system that runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_platform.runtime.host import PlacedHost
from rl_platform.runtime.ray.channel_proxy import Link
from rl_platform.runtime.ray.worker_proxy import Send


@dataclass(frozen=True)
class ProcessInfo:
    """What a process says of itself when it has come up."""

    pid: int
    address: str
    code: str


class Fleet(Protocol):
    """The system that runs the processes."""

    link: Link

    def start(self, hosts: Sequence[PlacedHost]) -> Mapping[str, Send]:
        """One process for each host, by its name; ways to call it. Raises PlacementError or Deadline."""

    def launch(self, host: str, name: str) -> Send:
        """A process, called `name`, for a host whose process died, at the same place. Does not wait for it."""

    def stop(self, timeout: float) -> None:
        """Ends every process it started and gives back what it reserved; again: does nothing."""
