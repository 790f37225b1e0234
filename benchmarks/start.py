"""Seconds from the start of the command to the log of the first PPO step, under Ray and under the local runtime.

Every lap is a run of its own in a fresh folder, from an idle machine's point of view: Ray is started too. CPU seconds
are those of the launcher and everything it started, and tell more than the clock on a busy machine. Not covered:
clusters that run already, large models.

    python benchmarks/start.py [--rounds 3] [--runtime ray] [--json FILE]
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from _common import machine, new_parser, write_json

ROOT = Path(__file__).parents[1]
CONFIGS = ("configs/reasoning/ppo_tiny.yaml", "configs/embodied/cartpole.yaml")
TARGET_S, PATIENCE_S = 15.0, 300.0
CODE = "from rl_platform.launch.cli import main; main()"


def start(config: str, runtime: str) -> tuple[float, float]:
    """Wall seconds and CPU seconds until the first step is logged; the run is stopped then."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"runner.output_dir={folder}/run", f"cluster.runtime={runtime}"]
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(ROOT / config), *overrides], stdout=subprocess.DEVNULL, cwd=folder
        )
        try:
            while not _first_step_logged(Path(folder, "run", "metrics.jsonl")):
                if process.poll() is not None or time.perf_counter() - began > PATIENCE_S:
                    raise SystemExit(f"{config} did not get to its first step")
                time.sleep(0.02)
            return time.perf_counter() - began, _cpu_seconds(psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def _first_step_logged(path: Path) -> bool:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return any(json.loads(line)["step"] >= 1 for line in lines if line.endswith("}"))


def _cpu_seconds(process: psutil.Process) -> float:
    total = 0.0
    for member in [process, *process.children(recursive=True)]:
        try:
            times = member.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def main() -> None:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--runtime", choices=("ray", "local"), help="only this one")
    options = parser.parse_args()
    about = machine(())
    found = {}
    for runtime in [options.runtime] if options.runtime else ["local", "ray"]:
        for config in CONFIGS:
            laps = [start(config, runtime) for _ in range(options.rounds)]
            seconds, cpu = zip(*laps, strict=True)
            middle = statistics.median(seconds)
            spread = f"{middle:5.1f} s ({min(seconds):.1f} - {max(seconds):.1f}), CPU {statistics.median(cpu):.1f} s"
            verdict = f"; target {TARGET_S:g} s: {'met' if middle <= TARGET_S else 'missed'}"
            print(f"{runtime:<6} {config:<34} {spread}{verdict}")
            found[f"{runtime} {config}"] = laps
    write_json(options.json, {"options": vars(options), "machine": about, "laps": found})


if __name__ == "__main__":
    main()
