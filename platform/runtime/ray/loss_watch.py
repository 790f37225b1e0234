"""Notices that Ray's own processes are gone: the head (GCS), or the raylet of this node.

Ray itself waits a minute for its head and then ends the process with exit code 1, in C++, where no error can be caught.
Looks with TCP connections, which the kernel accepts for a process that is busy. Not covered: a process that is stopped.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType

import ray

from rl_platform.errors import RayLost

LOOK_S = 0.5
CONNECT_S = 2.0
LOST_S = 4.0  # without an answer; a head that is started again by its cluster may be back by then
HOST_LOST_S = 7.0  # later than the launcher, which reports the reason
INTERRUPT_S = 2.0  # an interruption that code in between has lost is repeated
LEAVE_S = 8.0  # for the launcher to end after the loss


class RayLostInterrupt(KeyboardInterrupt):
    """Ends whatever the main thread waits for, as Ctrl-C does."""


def watch(addresses: Mapping[str, str], patience_s: float, lost: Callable[[str], None], over: threading.Event) -> None:
    """Calls `lost(reason)` in a thread of its own, once, if one of `addresses` (by name) does not answer for
    `patience_s` seconds; ends when `over` is set."""

    def look() -> None:
        answered = dict.fromkeys(addresses, time.monotonic())
        while not over.wait(LOOK_S):
            for name, address in addresses.items():
                if answers(address, CONNECT_S):
                    answered[name] = time.monotonic()
                elif time.monotonic() - answered[name] > patience_s:
                    lost(f"{name} at {address} is gone: it has not answered for {patience_s:g} s")
                    return

    threading.Thread(target=look, name="ray watch", daemon=True).start()


class LauncherWatch:
    """Interrupts the launcher's main thread when Ray is lost, and ends the process if the interrupt does not end it."""

    def __init__(self) -> None:
        self.lost: RayLost | None = None
        self._over = threading.Event()
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            signal.signal(signal.SIGUSR1, self._interrupt)  # stays: a late signal must not end the process
        watch(launcher_addresses(), LOST_S, self._end, self._over)

    def stop(self) -> None:
        self._over.set()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._over.is_set():
            raise RayLostInterrupt

    def _end(self, reason: str) -> None:
        self.lost = RayLost(reason)
        until = time.monotonic() + LEAVE_S
        while time.monotonic() < until:
            if self._main and not self._over.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            if self._over.wait(INTERRUPT_S):
                return
        print(
            f"RayLost: {reason}\n    the same command resumes from the newest checkpoint", file=sys.stderr, flush=True
        )
        os._exit(RayLost.exit_code)


def watch_head() -> None:
    """Ends this process, which a Ray that has no head any more would keep for a minute."""
    head = {"Ray's head": ray.get_runtime_context().gcs_address}
    watch(head, HOST_LOST_S, lambda reason: os._exit(1), threading.Event())


def launcher_addresses() -> dict[str, str]:
    """Returns the addresses of the processes without which the launcher cannot continue."""
    context = ray.get_runtime_context()
    node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    return {"Ray's head": context.gcs_address, "Ray's raylet": raylet}


def answers(address: str, timeout_s: float) -> bool:
    """Returns whether a connection to the address is accepted."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError:
        return False
    return True
