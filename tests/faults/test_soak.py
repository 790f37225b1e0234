"""The soak: mixed, seeded faults for minutes. The run goes on and learns; memory and descriptors stay flat.

Environments raise in 1 % of their episodes, and some hang; processes of environments, rewards and rollouts are killed.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.metrics import read_metrics

SHORT_S, LONG_S = 35.0, 900.0  # of each task: before every change, and before a release
STILL_S, GROWTH = 60.0, 1.05
FAULTY = """
import os, random, time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Faulty(CartPoleEnv):
    def reset(self, *, seed=None, options=None):
        self.draw = random.Random(os.urandom(8))
        self.fails_at = self.draw.randrange(30) if self.draw.random() < 0.02 else -1
        self.steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        if self.steps == self.fails_at:
            with open("faults", "a") as faults:
                faults.write("env\\n")
            if self.draw.random() < 0.05:
                time.sleep(1000)
            raise RuntimeError("a cable broke")
        return super().step(action)

gymnasium.register("Faulty-v0", Faulty, max_episode_steps=200)

def score(response, answer, metadata):
    if random.random() < 0.003:
        with open("faults", "a") as faults:
            faults.write("reward\\n")
        time.sleep(1000)
    return float(response == answer)
"""
TASKS = {
    "embodied": (
        "embodied.yaml",
        "env.id=faulty:Faulty-v0",
        "env.num_workers=2",
        "env.step_timeout_s=2",
        "env.restarts=100000",
        "env.num_envs=8",
        "env.rollout_steps=64",
        "data.mini_batch_size=128",
        "algorithm.ppo_epochs=4",
        "actor.optim.lr=3e-3",
    ),
    "reasoning": ("reasoning.yaml", "reward.type=faulty:score", "reward.num_workers=2", "reward.timeout_s=2"),
}
ENDLESS = "runner.max_steps=1000000", "runner.save_interval=20", "runner.trace_steps=0"
APART = {
    "embodied": "{actor_critic: 0, 'rollout,env': 1}",
    "reasoning": "{'actor,critic': 0, 'rollout,reward': 1}",
}


@dataclass(frozen=True)
class Sample:
    seconds: float
    rss: int
    descriptors: int
    steps: int


def soak(start, folder: Path, seed: int, seconds: float, *words: str, apart: bool) -> tuple[list[Sample], int]:
    """Kills a random process of the run, which is none of a learner, every few seconds; returns samples of the
    launcher and the number of kills."""
    (folder / "faulty.py").write_text(FAULTY)
    run = start(*words, *ENDLESS)
    launcher, draw, samples, kills = psutil.Process(run.pid), random.Random(seed), list[Sample](), 0
    metrics = folder / "out" / "metrics.jsonl"
    while not metrics.exists() or not metrics.stat().st_size:
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.1)
    began = last_kill = moved = time.monotonic()
    pause, size = draw.uniform(2, 8), 0
    while (now := time.monotonic()) - began < seconds:
        assert run.poll() is None, run.communicate()[1]
        if metrics.stat().st_size != size:
            size, moved = metrics.stat().st_size, now
        assert now - moved < STILL_S, "no step for a minute"
        lines = metrics.read_bytes().count(b"\n")
        samples.append(Sample(now - began, launcher.memory_info().rss, launcher.num_fds(), lines))
        if now - last_kill > pause and (victims := _victims(launcher, apart)):
            draw.choice(victims).kill()
            kills, last_kill, pause = kills + 1, now, draw.uniform(2, 8)
        time.sleep(0.5)
    children = launcher.children(recursive=True)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 143, errors
    assert not psutil.wait_procs(children, 10)[1]
    return samples, kills


def _victims(launcher: psutil.Process, apart: bool) -> list[psutil.Process]:
    """Processes of environments and rewards; `apart`: the hosts under Ray that have no learner."""
    found = []
    for child in launcher.children(recursive=True):
        try:
            words = " ".join(child.cmdline())
            parent = child.parent()
        except psutil.NoSuchProcess:
            continue
        if apart:
            in_host = parent is not None and "HostActor" in " ".join(parent.cmdline())
            found += [parent] if in_host and parent not in found else []  # only rollouts have children here
        elif "env" in words or "scor" in words:
            found.append(child)
    return found


def flat(samples: list[Sample]) -> None:
    """Compares the second fifth of the time with the last one."""
    fifth = len(samples) // 5
    early, late = samples[fifth : 2 * fifth], samples[-fifth:]
    for name in ("rss", "descriptors"):
        before, after = (statistics.median(getattr(one, name) for one in part) for part in (early, late))
        print(f"{name}: {before:,.0f} -> {after:,.0f}")
        assert after < before * GROWTH + (2 if name == "descriptors" else 0), f"{name} grew"


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    ("seconds", "apart"), [(SHORT_S, False), pytest.param(LONG_S, True, marks=pytest.mark.release)], ids=["ci", "long"]
)
def test_soak(start, folder: Path, monkeypatch, name: str, seconds: float, apart: bool) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    ray = "cluster.runtime=ray", "cluster.devices_per_node=2", f"cluster.component_placement={APART[name]}"
    words = (*TASKS[name], *ray, "cluster.restarts=100000") if apart else TASKS[name]
    samples, kills = soak(start, folder, 1, seconds, *words, apart=apart)
    faults = (folder / "faults").read_text().split()
    rows = read_metrics(folder / "out")
    print(f"{name}: {len(rows)} steps, {len(faults)} faults of code, {kills} kills in {seconds:.0f} s")
    assert faults, "no fault was injected"
    assert kills, "nothing was killed"
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert Checkpoint.open(sorted(Path(folder, "out/checkpoints").glob("step-*"))[-1]).step == rows[-1]["step"]
    flat(samples)
