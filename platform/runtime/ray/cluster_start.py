"""Starts or joins the Ray cluster under a run, while the launcher reads models.

A cluster that the run starts writes its files to a temporary folder. It has no dashboard, no autoscaler and a
bounded object store. It ends with the run and leaves no process. Its ports are bound to the loopback interface. Its
token is new for each run. Only the user can enter the folder of its files. Runs on one cluster are separate: each has
its own names and its own placement group.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import torch

from rl_platform.config.schema.cluster import Cluster
from rl_platform.disk import private
from rl_platform.environment_variables import changed_variables
from rl_platform.errors import PlacementError, Problem, RayLost, WorkerDied
from rl_platform.interrupts import HELD_FROM_CHILDREN
from rl_platform.runtime.child import Child, Death

STORE_SHARE = 8  # the object store gets this fraction (1 / n) of the free memory
KNOCK_S = 5.0
STARTS = 3  # a node of Ray gives up if a helper process needs over 15 s to start, as on a crowded machine
_GUARD = """
import os, psutil, shutil, sys, time
os.read(int(sys.argv[1]), 1)  # until the launcher has ended
time.sleep(2)
for fact in sys.argv[3:]:
    pid, created = fact.split(":")
    try:
        process = psutil.Process(int(pid))
        if process.create_time() == float(created):
            process.kill()
    except psutil.Error:
        pass
shutil.rmtree(sys.argv[2], ignore_errors=True)
"""
ENDING_S = 5.0  # for Ray's processes to end by themselves
# Processes that Ray has no option against. Each takes a second of processor time at the start, and about 50 MB.
UNUSED = (
    "start_monitor",  # the autoscaler of a cluster, which would request more machines
    "start_log_monitor",  # sends what processes print to the launcher, which ignores it (`log_to_driver`)
    "start_api_server",  # of the dashboard, also without a dashboard
)
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
OWN_SETTINGS = {  # read by Ray's processes when they start
    "RAY_enable_metrics_collection": "0",  # Ray would collect them for its dashboard, which is off
    "RAY_task_events_report_interval_ms": "0",
    "RAY_worker_register_timeout_seconds": "1800",  # else 60; Ray waits without end for a process that needs longer
    "RAY_worker_niceness": "0",  # 15 by default: computing processes would have the lowest priority
    "MALLOC_ARENA_MAX": "1",  # `keep_freed_memory` is too late: Ray's threads have created theirs
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's only switch for loopback addresses, read when Ray is imported
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}


@contextmanager
def ray_in_background(cluster: Cluster, hosts: int) -> Iterator[Callable[[], None]]:
    """Starts Ray for this number of hosts, and returns a function that waits until it runs.

    That function raises the error that prevented Ray's start, RayLost after `cluster.start_timeout_s`. Ray ends with
    the block.
    """
    ray, entered, over = ray_cluster(cluster, hosts), Future[None](), threading.Event()
    limit_s = min(cluster.start_timeout_s, threading.TIMEOUT_MAX)

    def enter() -> None:
        try:
            ray.__enter__()
        except BaseException as error:
            entered.set_exception(error)
        else:
            entered.set_result(None)
            over.wait()  # Ray's processes end with the thread that has started them

    def wait() -> None:
        if not concurrent.futures.wait([entered], limit_s).done:
            raise RayLost(f"Ray did not start within {limit_s:g} s (cluster.start_timeout_s)")
        entered.result()

    threading.Thread(target=enter, name="ray start", daemon=True).start()  # if it hangs, the command ends without it
    try:
        yield wait
    finally:
        given_up = isinstance(sys.exception(), RayLost)
        try:
            if concurrent.futures.wait([entered], 0 if given_up else limit_s).done and entered.exception() is None:
                ray.__exit__(*sys.exc_info())
        finally:
            over.set()


@contextmanager
def ray_cluster(cluster: Cluster, processes: int = 1) -> Iterator[None]:
    """Connects to Ray: joins it at `cluster.address`, or starts it for this block and this number of processes."""
    settings = dict(SETTINGS)
    if cluster.address is None:
        threads = max(1, torch.get_num_threads() // processes)  # else 1; see `prepare_process`
        settings |= OWN_SETTINGS | {"OMP_NUM_THREADS": str(threads)}
    with changed_variables({name: value for name, value in settings.items() if name not in os.environ}):
        if cluster.address is None:
            with _started(processes):
                yield
            return
        with _joined(cluster.address):
            yield


@contextmanager
def _joined(address: str) -> Iterator[None]:
    try:
        _knock(address)
        _connect(address=address)
    except (OSError, ValueError, RuntimeError) as error:
        hint = "`ray status` on that machine shows whether a cluster runs there"
        message = f"no Ray cluster can be joined: {' '.join(str(error).split())}"
        raise PlacementError([Problem("cluster.address", message, value=address, hint=hint)]) from error
    try:
        yield
    finally:
        _disconnect()


@contextmanager
def _started(processes: int) -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="rl-", dir="/tmp" if os.path.isdir("/tmp") else None)  # sockets need short paths
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(_token(folder))
        stack.callback(_end_processes, folder)
        for left in reversed(range(STARTS)):
            try:
                with _without_unused_processes():
                    _connect(
                        address="local",
                        num_cpus=min(processes, os.cpu_count() or 1),  # processes that start at once, before the hosts
                        num_gpus=torch.cuda.device_count(),
                        include_dashboard=False,
                        object_store_memory=_store_bytes(),
                        _temp_dir=os.path.join(folder, "ray"),  # in a private folder: Ray's are open to all users
                    )
                break
            except Exception as error:
                if not left:
                    raise WorkerDied(f"Ray did not start on this machine: {' '.join(str(error).split())}") from error
                _end_processes(folder)
        with _guarded(folder, _processes(folder)):
            yield


@contextmanager
def _without_unused_processes() -> Iterator[None]:
    """Starts a Ray in this block without the processes in `UNUSED`."""
    from ray._private.node import Node

    replaced = {name: vars(Node)[name] for name in UNUSED if name in vars(Node)}  # another version may lack one
    for name in replaced:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in replaced.items():
            setattr(Node, name, method)


def _end_processes(folder: str) -> None:
    """Ends the processes of the Ray whose files are in `folder`, whatever state they are in."""
    started = _processes(folder)
    _disconnect()
    _, left = psutil.wait_procs(started, 0 if _is_lost() else ENDING_S)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, ENDING_S)


@contextmanager
def _token(folder: str) -> Iterator[None]:
    """Gives the Ray that starts in this block a new token, in a file in `folder`: processes must read it to join."""
    path = os.path.join(folder, "token")
    with private(Path(path)) as file:
        file.write(secrets.token_hex(32))
    try:
        with changed_variables({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path, "RAY_AUTH_TOKEN": None}):
            _read_token()
            yield
    finally:
        if not _is_lost():
            _read_token()


def _read_token() -> None:
    """Makes Ray read mode and token again: it reads them once per process, and a process may have several runs."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")  # first: threads of Ray may read a token while the mode requires one
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _guarded(folder: str, processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Starts a process that ends Ray's processes and removes its files if the launcher is killed."""
    facts = [f"{process.pid}:{process.create_time()}" for process in processes if process.is_running()]
    guard = Child(_GUARD, Death.NEVER, [folder, *facts])
    try:
        yield
    finally:
        guard.kill()


def _knock(address: str) -> None:
    """Raises OSError if nothing listens at the address. Ray would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()


def _connect(**options: object) -> None:
    """Connects with Ctrl-C blocked. Ray's processes inherit that, so only the command handles it and saves."""
    import ray
    from ray._private import auto_init_hook

    auto_init_hook.enable_auto_connect = False  # a call after the end of this one would start another Ray
    ray.shutdown()  # of one that was lost; else it does nothing
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_FROM_CHILDREN)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _disconnect() -> None:
    """Disconnects without waiting: Ray would wait for processes that have ended."""
    import ray

    if not _is_lost():
        ray.shutdown()


def _is_lost() -> bool:
    return isinstance(sys.exception(), RayLost)


def _processes(folder: str) -> list[psutil.Process]:
    """Returns the processes of the Ray whose files are in `folder`: those with it in their command, and what they have
    started. Other children of the launcher, such as a tracker's, work on after the end of Ray."""
    processes: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended
            if any(folder in part for part in child.cmdline()):
                processes += [child, *child.children(recursive=True)]
    return processes


def _store_bytes() -> int:
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else psutil.virtual_memory().total
    available: int = psutil.virtual_memory().available
    return max(100 * 2**20, min(available // STORE_SHARE, shared * 9 // 10))
