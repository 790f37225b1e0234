"""The acceptance of a GPU machine: one command, one page. Random weights, no network.

    python benchmarks/gpu.py                        # every part that has not finished; at most 25 minutes
    python benchmarks/gpu.py attention rollout      # these parts
    python benchmarks/gpu.py --again tests          # a part that has finished before
    python benchmarks/gpu.py --small --output /tmp/gpu      # all parts with tiny shapes on a CPU, to test them

Each part runs in a process of its own for a limited time. If a part fails, its reason is stored and the next part
starts. A later call skips parts that passed or missed a target, and runs all others. Parts whose packages are
missing are left out and named. The page is OUTPUT/gpu.md; OUTPUT/gpu.json has the same numbers for the next call. The
text of OUTPUT/gpu_notes.txt, written by hand, stands above the numbers: the conditions of a run, for example.

Exit code 0: all parts passed or were left out; 1: a part did not pass or had no time, or there is no GPU; 2: invalid
arguments. Not covered: several GPUs, several nodes, downloads, learning results (`acceptance.py`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from difflib import get_close_matches
from importlib import import_module
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "results"
NOTES = "gpu_notes.txt"
MINUTES = 25.0
FINISHED = ("passed", "missed")
PACKAGES = ("torch", "transformers", "megatron-core", "ray", "sglang", "mujoco", "mujoco-warp", "triton", "numpy")
NO_GPU = "gpu.py: torch sees no GPU on this machine. --small runs all parts in small on the CPU."
CARD = """
import json, torch
found = {}
if torch.cuda.is_available():
    card = torch.cuda.get_device_properties(0)
    found = {"GPU": card.name, "memory": f"{card.total_memory / 2**30:.0f} GiB", "CUDA": torch.version.cuda}
print(json.dumps(found))
"""


class Refused(Exception):
    """The arguments are invalid, or the stored results are damaged."""


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="without names: every part; --list prints them")
    parser.add_argument("--again", nargs="+", metavar="PART", default=[], help="run these, although they have finished")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU; the speeds mean nothing")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="start only parts that end within these minutes")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FOLDER", help="folder of gpu.md and gpu.json")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter that can import vllm")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    return parser.parse_args(words)


def check(options: argparse.Namespace) -> None:
    """Raises Refused with every problem of the command line."""
    from gpu_parts.table import NAMES

    problems = []
    for name in dict.fromkeys(name for name in [*options.parts, *options.again] if name not in NAMES):
        near = get_close_matches(name, NAMES, 1)
        problems.append(f"{name}: no such part{f'; {near[0]}?' if near else '.'} There are {', '.join(NAMES)}")
    if not 0 < options.minutes <= 24 * 60:
        problems.append(f"--minutes {options.minutes:g}: a number above 0 and up to 1440 is allowed")
    if options.vllm_python and not os.access(options.vllm_python, os.X_OK):
        problems.append(f"--vllm-python {options.vllm_python}: not a program that can be run")
    if options.small and options.output.resolve() == OUTPUT:
        problems.append("--small needs an --output FOLDER of its own: its numbers do not describe this machine")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / ".gpu.writable").touch()
        (options.output / ".gpu.writable").unlink()
    except OSError as error:
        problems.append(f"--output {options.output}: not a folder to write into ({error.strerror})")
    if problems:
        raise Refused("\n".join(problems))


def machine(small: bool) -> dict[str, str]:
    """Returns what the numbers depend on: GPU, memory, versions, cores. Raises SystemExit without a GPU.

    Another process reads the GPU, because this one must not initialise CUDA.
    """
    found: dict[str, str] = {"GPU": "none (small run)"} if small else {}
    if not small:
        asked = subprocess.run([sys.executable, "-c", CARD], capture_output=True, text=True, check=False)
        if asked.returncode:
            raise SystemExit(f"gpu.py: torch cannot be used: {asked.stderr.strip().splitlines()[-1]}")
        card = json.loads(asked.stdout.strip().splitlines()[-1])
        if not card:
            raise SystemExit(NO_GPU)
        found |= card
    found["Python"] = platform.python_version()
    found["system"] = f"{platform.platform()}, {os.cpu_count()} cores"
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str:
    """Returns the commit of the code, with + if files differ from it; "" without git."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def read(path: Path, found: dict[str, str], small: bool) -> dict[str, Any]:
    """Returns the stored results; none if they are of another GPU, of other versions or of the other size.

    Raises Refused for a damaged file.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["small"] == small and content["machine"] == found:
            return dict(content["parts"])
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"{path}: not written by this command ({type(error).__name__}: {error}); remove it") from None
    print(f"{path} has results of another machine or size: all parts run again")
    return {}


def hand_written(path: Path) -> str:
    """Returns the notes for the page; none without the file. Raises Refused for a file that cannot be read."""
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: the notes cannot be read ({error})") from None


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    if options.small:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch reads it
    try:
        from gpu_parts.page import counts, page_of
        from gpu_parts.process import PRELOADED, run_part
        from gpu_parts.table import PARTS
    except ModuleNotFoundError as error:
        print(f"gpu.py: {error}: docs/gpu.md says what to install", file=sys.stderr)
        return 1
    if options.list:
        for part in PARTS:
            print(f"{part.name:<18} {part.limit_s:>4} s at most  {part.what}")
        return 0
    try:
        check(options)
        found = machine(options.small)
        results = read(options.output / "gpu.json", found, options.small)
        notes = hand_written(options.output / NOTES)
    except Refused as refused:
        print(f"gpu.py: {refused}", file=sys.stderr)
        return 2

    if options.small:
        for name in PRELOADED:
            with suppress(ImportError):
                import_module(name)
    set_forkserver_preload(PRELOADED)

    def write() -> None:
        content = {"small": options.small, "machine": found, "parts": results}
        (options.output / "gpu.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (options.output / "gpu.md").write_text(page_of(content, notes), encoding="utf-8")

    end = time.monotonic() + 60 * options.minutes
    wanted, waiting = {*options.parts, *options.again}, []
    for part in PARTS:
        done = results.get(part.name, {}).get("state") in FINISHED
        if (wanted and part.name not in wanted) or (done and part.name not in options.again):
            continue
        stamp = {"date": date.today().isoformat(), "commit": commit()}
        if reason := part.missing(options.vllm_python):
            results[part.name] = {"state": "left out", "reason": reason}
        elif time.monotonic() + part.limit(options.small) > end:
            waiting.append(part.name)
            continue
        else:
            print(f"{part.name}: {part.what} ...", flush=True)
            results[part.name] = stamp | run_part(part, options.small, options.vllm_python, part.limit(options.small))
        line = results[part.name]
        print(f"{part.name}: {line['state']} {line.get('reason') or line.get('error') or ''}".rstrip(), flush=True)
        write()
    write()
    print(f"{counts(results)} {options.output / 'gpu.md'}")
    if waiting:
        print(f"no time for {', '.join(waiting)}: run the same command again")
    ran = [results[part.name]["state"] for part in PARTS if part.name in results]
    return int(bool(waiting) or any(state not in ("passed", "left out") for state in ran))


if __name__ == "__main__":
    sys.exit(main())
