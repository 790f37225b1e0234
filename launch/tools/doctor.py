"""`rl-platform doctor`: what this machine and this installation offer, what is missing for what, and how to get it.

It starts no run and imports neither torch nor another large library. Not covered: whether a config fits the machine
(`platform-launch --plan`), and other machines of a cluster.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

from rl_platform.disk import cache_folder
from rl_platform.launch.tools.installed import Row, features, packages
from rl_platform.placement.estimates.hardware import cpu_flags, processor
from rl_platform.placement.inventory import ask_driver, cpu_count, detect_accelerators
from rl_platform.redact import redacted

GIB = 2**30
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
LEAST_FREE = 2 * GIB  # of a disk
LEAST_SHARED = GIB  # of /dev/shm: Ray's object store
LEAST_FILES = 4096  # open at the same time: Ray
RESOLVE_S = 1.0
STATES = {
    "ok": ("ok", "green"),
    "note": ("note", "cyan"),
    "missing": ("missing", "yellow"),
    "problem": ("PROBLEM", "red"),
}
Check = Callable[[], Iterator[Row]]


def diagnose() -> dict[str, list[Row]]:
    """Returns the rows of each section."""
    checks: dict[str, Check] = {
        "machine": _machine,
        "gpus": _gpus,
        "packages": packages,
        "features": features,
        "network": _network,
        "folders": _folders,
    }
    with ThreadPoolExecutor(len(checks), thread_name_prefix="doctor") as pool:
        rows = pool.map(lambda check: list(check()), checks.values())
        return dict(zip(checks, rows, strict=True))


def show(as_json: bool) -> None:
    """Prints the report."""
    sections = diagnose()
    problems = [row for rows in sections.values() for row in rows if row.state == "problem"]
    if as_json:
        content = {title: [asdict(row) for row in rows] for title, rows in sections.items()}
        print(redacted(json.dumps({"problems": len(problems), **content}, indent=2, ensure_ascii=False)))
        return
    console = Console()
    for title, rows in sections.items():
        console.print(Text(title, style="bold"))
        width = max(len(row.name) for row in rows)
        for row in rows:
            word, colour = STATES[row.state]
            line = (
                Text("  ").append(word.ljust(8), style=colour).append(f"{row.name.ljust(width)}  {redacted(row.text)}")
            )
            console.print(line, soft_wrap=True)
            if row.fix:
                console.print(Text(f"{' ' * (width + 12)}-> {row.fix}", style="dim"), soft_wrap=True)
    missing = sum(row.state == "missing" for rows in sections.values() for row in rows)
    verdict = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}" if problems else "no problem"
    print(f"{verdict}; {missing} optional part{' is' if missing == 1 else 's are'} missing")


def _machine() -> Iterator[Row]:
    libc = " ".join(platform.libc_ver())
    text = f"{platform.system()} {platform.release()} {platform.machine()}, {libc}, Python {platform.python_version()}"
    yield Row("system", text, "ok" if sys.platform == "linux" else "note")
    instructions = sorted(set(INSTRUCTIONS) & cpu_flags(), key=INSTRUCTIONS.index)
    yield Row("CPU", f"{processor()}; {', '.join(instructions) or 'unknown instruction sets'}")
    usable, physical, logical = cpu_count(), psutil.cpu_count(logical=False), psutil.cpu_count()
    quota = _cpu_quota()
    text = f"{usable} usable of {logical} ({physical} physical)"
    if quota is not None and quota < usable:
        fix = f"OMP_NUM_THREADS={max(1, round(quota))}: more threads than the limit wait for each other"
        yield Row("cores", f"{text}, limited by a cgroup to {quota:g}", "problem", fix, quota)
    else:
        yield Row("cores", f"{text}, no cgroup limit below that", value=usable)
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        yield Row("OMP_NUM_THREADS", threads, "note")
    memory, limit = psutil.virtual_memory(), _memory_limit()
    text = f"{_gib(memory.total)}, {_gib(memory.available)} free"
    limited = f", limited by a cgroup to {_gib(limit)}" if limit is not None and limit < memory.total else ""
    yield Row("memory", text + limited, value=min(memory.total, limit or memory.total))
    if os.path.isdir("/dev/shm"):
        usage = shutil.disk_usage("/dev/shm")
        fix = "a container gets more with --shm-size=8g" if usage.free < LEAST_SHARED else ""
        text = f"{_gib(usage.total)}, {_gib(usage.free)} free, for Ray's object store and environments"
        yield Row("/dev/shm", text, "problem" if fix else "ok", fix, usage.free)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < LEAST_FILES
    yield Row("open files", str(files), "note" if few else "ok", "ulimit -n 65536, for Ray" if few else "", files)


def _gpus() -> Iterator[Row]:
    try:
        result = ask_driver("name,memory.total,memory.used,driver_version")
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Row("nvidia-smi", f"gives no answer: {error}", "problem", "restart the driver, or ask the administrator")
        return
    usable, note = detect_accelerators()
    if result is None and not usable:
        yield Row("GPUs", "none: nvidia-smi is not installed. Everything runs on the CPU", "note")
        return
    if result is not None and result.returncode:
        text = " ".join((result.stdout or result.stderr).split())
        yield Row("nvidia-smi", f"failed: {text}", "problem", "check the driver; in a container, start it with GPUs")
        return
    for number, line in enumerate(result.stdout.strip().splitlines() if result else ()):
        parts = [part.strip() for part in line.split(",")]
        text = "{}, {} MiB, {} MiB in use, driver {}".format(*parts) if len(parts) == 4 else line
        yield Row(f"GPU {number}", text)
    yield Row("visible", f"{len(usable)}{f'; {note}' if note else ''}", "ok" if usable else "note", value=len(usable))
    with suppress(PackageNotFoundError):
        if usable and "+cpu" in version("torch"):
            fix = "pip install --force-reinstall torch, from PyPI"
            yield Row("torch", f"{version('torch')} is a build for CPUs", "problem", fix)


def _unreachable(address: str) -> str:
    """Returns why nothing answers at HOST:PORT; empty if something does."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return "that is not HOST:PORT"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=RESOLVE_S).close()
    except (OSError, OverflowError, ValueError) as error:
        return f"nothing answers there ({getattr(error, 'strerror', None) or error})"
    return ""


def _network() -> Iterator[Row]:
    address = os.environ.get("RAY_ADDRESS")
    current = _read(os.path.join(tempfile.gettempdir(), "ray", "ray_current_cluster")).strip()
    text = f"RAY_ADDRESS is {address}" if address else "RAY_ADDRESS is not set"
    text += f"; a cluster was started here at {current}" if current else "; no cluster here"
    if address and address not in ("auto", "local") and (reason := _unreachable(address.removeprefix("ray://"))):
        yield Row(
            "Ray address", f"{text}; {reason}", "problem", "unset RAY_ADDRESS, or set it to HOST:PORT of the head"
        )
    else:
        yield Row("Ray address", text)
    yield _token()
    addresses = {
        name: [each.address for each in own if each.family == socket.AF_INET]
        for name, own in psutil.net_if_addrs().items()
    }
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    usable = {name: own for name, own in addresses.items() if own and name in up}
    outside = {name: own for name, own in usable.items() if not any(each.startswith("127.") for each in own)}
    text = ", ".join(f"{name} {' '.join(own)}" for name, own in usable.items()) or "none"
    fix = "" if outside else "a cluster of several machines needs another interface than the loopback"
    yield Row("interfaces", text, "ok" if outside else "note", fix)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if (value := os.environ.get(variable)) is not None:
            names = [name.strip() for name in value.lstrip("^=").split(",")]
            unknown = [] if value.startswith("^") else [n for n in names if not _names_one(n, usable, variable, value)]
            fix = f"{variable} names one of {', '.join(usable)}" if unknown else ""
            text = f"{value}{': no such interface' if unknown else ''}"
            yield Row(variable, text, "problem" if unknown else "ok", fix)
    cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if cards:
        yield Row("InfiniBand", ", ".join(cards))
    host, address = socket.gethostname(), _resolved()
    if address is None:
        fix = "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface"
        yield Row("host name", f"{host} does not resolve within {RESOLVE_S:g} s", "problem", fix)
    elif address.startswith("127.") and outside:
        fix = f"before a run over several machines: export GLOO_SOCKET_IFNAME={next(iter(outside))}"
        yield Row("host name", f"{host} is {address}, which other machines cannot reach", "note", fix)
    else:
        yield Row("host name", f"{host} is {address}")


def _token() -> Row:
    """Returns the state of Ray's token: whether there is one, never its text."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if os.environ.get("RAY_AUTH_TOKEN"):
        token = "in RAY_AUTH_TOKEN"
    else:
        token = f"in {path}" if path.is_file() else ""
    text = f"RAY_AUTH_MODE is {mode or 'not set'}; a token is {token or 'not set'}"
    if mode == "token" and not token:
        return Row("Ray token", text, "problem", "copy the token of the cluster to ~/.ray/auth_token")
    if path.is_file() and path.stat().st_mode & 0o077:
        return Row("Ray token", f"{text}, which others can read", "problem", f"chmod 600 {path}")
    return Row("Ray token", f"{text}. A Ray that a run starts has its own")


def _names_one(name: str, usable: Mapping[str, object], variable: str, value: str) -> bool:
    """NCCL compares the beginning of names, unless the list begins with `=`; gloo the whole name."""
    if variable.startswith("NCCL") and not value.startswith("="):
        return any(each.startswith(name) for each in usable)
    return name in usable


def _resolved() -> str | None:
    """Returns the address of this machine's name, None if there is none in time."""
    addresses: list[str] = []

    def resolve() -> None:
        with suppress(OSError):
            addresses.append(socket.gethostbyname(socket.gethostname()))

    thread = threading.Thread(target=resolve, name="host name", daemon=True)
    thread.start()
    thread.join(RESOLVE_S)
    return addresses[0] if addresses else None


def _folders() -> Iterator[Row]:
    hub = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    places = {
        "runs": (Path("runs").absolute(), "runner.output_dir"),
        "models": (cache_folder().absolute(), "RL_PLATFORM_CACHE"),
        "Hugging Face": (Path(os.environ.get("HF_HOME") or hub).absolute(), "HF_HOME"),
        "temporary": (Path(tempfile.gettempdir()), "TMPDIR"),
    }
    for name, (path, setting) in places.items():
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            yield Row(name, f"{existing} is not a writable folder", "problem", f"{setting} names another one")
            continue
        free = shutil.disk_usage(existing).free
        little = free < LEAST_FREE
        text = f"{path}, {_gib(free)} free{'' if path == existing else ', will be made'}"
        yield Row(
            name, text, "problem" if little else "ok", f"free space, or another {setting}" if little else "", free
        )


def _cgroups(controller: str) -> list[Path]:
    """Returns the folders of this process's control groups, the innermost first: of the controller, or of version 2."""
    root = Path("/sys/fs/cgroup")
    groups = {
        names: path for line in _read("/proc/self/cgroup").splitlines() for _, names, path in [line.split(":", 2)]
    }
    first = next((path for names, path in groups.items() if controller in names.split(",")), None)
    base = root if first is None else root / controller
    inner = base / (first or groups.get("", "")).lstrip("/")
    return [folder for folder in (inner, *inner.parents) if folder == base or base in folder.parents]


def _cpu_quota() -> float | None:
    """Returns the cores that the control groups allow, None for no limit."""
    quotas = []
    for folder in _cgroups("cpu"):
        words = _read(folder / "cpu.max").split()
        words = words or [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
        if len(words) == 2 and words[0].isdecimal():
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _memory_limit() -> int | None:
    """Returns the bytes that the control groups allow, None for no limit."""
    texts = (
        _read(folder / name).strip()
        for folder in _cgroups("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    )
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
