"""The soak: mixed, seeded faults. The run goes on and learns; memory and descriptors stay flat. And a long run without
faults, in which nothing grows.

Environments raise in 1 % of their episodes, and some hang; processes of environments, rewards and rollouts are killed.
The short soak lasts RL_PLATFORM_SOAK_STEPS steps (default 100), the long one 15 minutes. Before a change only the
short one of environments runs, before a release the other ones, too.
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from waiting import assert_gone

from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.metrics import read_metrics

SHORT_STEPS, LONG_S = int(os.environ.get("RL_PLATFORM_SOAK_STEPS", "100")), 900.0  # before a change, before a release
# Steps between two kills of the short soak, and seconds between two of the long one, drawn evenly. The long soak
# restarts whole hosts of Ray, which takes longer than a step: with a kill in every step, a run would not learn.
PAUSE_STEPS, PAUSE_S = (10, 40), (5.0, 25.0)
STILL_S, GROWTH = 60.0, 1.05
# The metric of the reward, its lowest mean at the end of a long soak, and the highest possible one. After LEARNT steps,
# means over 60 steps of undisturbed runs of three seeds are at least 199.97 and 0.9986.
BANDS = {"embodied": ("episode/return", 190.0, 200.0), "reasoning": ("reward/raw_mean", 0.97, 1.0)}
LEARNT = 200
FAULTY = """
import os, random, time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Faulty(CartPoleEnv):
    def reset(self, *, seed=None, options=None):
        self.draw = random.Random(os.urandom(8))
        self.fails_at = self.draw.randrange(30) if self.draw.random() < FAULTY_EPISODES else -1
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
    return sum(character.isdigit() for character in response) / 3
"""
TASKS = {
    "embodied": (
        "embodied.yaml",
        "env.id=faulty:Faulty-v0",
        "env.num_workers=2",
        "env.step_timeout_s=2",
        "env.restarts=100000",
        "runner.trust_checkpoint=true",  # the environments hold a random.Random
        "env.num_envs=8",
        "env.rollout_steps=64",
        "data.mini_batch_size=128",
        "algorithm.ppo_epochs=4",
        "actor.optim.lr=3e-3",
    ),
    "reasoning": ("reasoning.yaml", "reward.type=faulty:score", "reward.num_workers=2", "reward.timeout_s=2"),
}
# The short soak compares no rewards, so its steps are small: a quarter of the environment steps, with four times as
# many faulty episodes, and one epoch. Shorter timeouts notice sooner what hangs.
SMALL_STEPS = {
    "embodied": ("env.rollout_steps=16", "algorithm.ppo_epochs=1", "env.step_timeout_s=1"),
    "reasoning": ("data.mini_batch_size=8", "algorithm.ppo_epochs=1", "reward.timeout_s=0.5"),
}
FAULTY_EPISODES = {True: 0.02, False: 0.08}  # by whether the soak is long
ENDLESS = "runner.max_steps=1000000", "runner.trace_steps=0"
APART = {
    "embodied": "{actor_critic: 0, 'rollout,env': 1}",
    "reasoning": "{'actor,critic': 0, 'rollout,reward': 1}",
}


@dataclass(frozen=True)
class Sample:
    """A launcher at one moment. cpu_s: processor time so far."""

    steps: int
    rss: int
    descriptors: int
    threads: int
    cpu_s: float

    @classmethod
    def of(cls, launcher: psutil.Process, metrics: Path) -> Sample:
        with launcher.oneshot():
            steps, times = metrics.read_bytes().count(b"\n"), launcher.cpu_times()
            return cls(
                steps,
                launcher.memory_info().rss,
                launcher.num_fds(),
                launcher.num_threads(),
                times.user + times.system,
            )


def soak(start, folder: Path, seed: int, *words: str, long: bool) -> tuple[list[Sample], int]:
    """Kills a random process of the run, which is none of a learner, after drawn pauses, but not twice in a step;
    returns samples of the launcher and the number of kills. The length of the short soak does not depend on how fast
    the machine is: it ends after `SHORT_STEPS` steps, when there were kills and faults."""
    (folder / "faulty.py").write_text(f"FAULTY_EPISODES = {FAULTY_EPISODES[long]}\n{FAULTY}")
    output = folder / "output"
    run = start(*words, *ENDLESS, output=output)
    launcher, draw, samples, kills = psutil.Process(run.pid), random.Random(seed), list[Sample](), 0
    metrics = folder / "out" / "metrics.jsonl"
    run.until(lambda: metrics.exists() and metrics.stat().st_size)
    began = moved = time.monotonic()
    steps, due = 0, (moved + draw.uniform(*PAUSE_S)) if long else draw.randint(*PAUSE_STEPS)
    while True:
        now = time.monotonic()
        assert run.poll() is None, output.read_text()[-3000:]
        samples.append(Sample.of(launcher, metrics))
        if moving := samples[-1].steps > steps:
            steps, moved = samples[-1].steps, now
        assert now - moved < STILL_S, "no step for a minute"
        if now - began > LONG_S if long else steps > SHORT_STEPS and kills and (folder / "faults").exists():
            break
        if moving and (now if long else steps) >= due and (victims := _victims(launcher, apart=long)):
            draw.choice(victims).kill()
            kills, due = kills + 1, (now + draw.uniform(*PAUSE_S)) if long else steps + draw.randint(*PAUSE_STEPS)
        time.sleep(0.5 if long else 0.03)
    children = launcher.children(recursive=True)
    run.send_signal(signal.SIGTERM)
    # a run that is just starting again ends by the signal itself
    assert run.wait(120) in (143, -signal.SIGTERM), output.read_text()[-3000:]
    assert_gone(children)
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
        elif "from rl_platform.envs." in words:
            found.append(child)
    return found


def flat(samples: list[Sample], *names: str) -> None:
    """Compares the second fifth of the time with the last one."""
    fifth = len(samples) // 5
    early, late = samples[fifth : 2 * fifth], samples[-fifth:]
    for name in names:
        before, after = (statistics.median(getattr(one, name) for one in part) for part in (early, late))
        print(f"{name}: {before:,.0f} -> {after:,.0f}")
        assert after < before * GROWTH + (0 if name == "rss" else 2), f"{name} grew"


def in_band(rows: list[dict[str, float]], metric: str, lowest: float, highest: float) -> None:
    """Compares the mean of the last fifth of the steps with undisturbed runs."""
    assert len(rows) * 4 // 5 > LEARNT, f"{len(rows)} steps are too few to compare"
    found = [value for row in rows[-len(rows) // 5 :] if math.isfinite(value := row.get(metric, math.nan))]
    print(f"{metric}: {statistics.mean(found):.3f} over the last {len(found)} steps")
    assert lowest <= statistics.mean(found) <= highest


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["embodied", pytest.param("reasoning", marks=pytest.mark.release)])
@pytest.mark.parametrize(
    "long", [False, pytest.param(True, marks=pytest.mark.release)], ids=["short", "long, with hosts apart"]
)
def test_soak(start, folder: Path, monkeypatch, name: str, long: bool) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    ray = "cluster.runtime=ray", "cluster.devices_per_node=2", f"cluster.component_placement={APART[name]}"
    more = (
        ("runner.save_interval=5", *ray, "cluster.restarts=100000")
        if long
        else ("runner.save_interval=20", *SMALL_STEPS[name])
    )
    words = *TASKS[name], *more
    samples, kills = soak(start, folder, 1, *words, long=long)
    faults = (folder / "faults").read_text().split()
    rows = read_metrics(folder / "out")
    print(f"{name}: {len(rows)} steps, {len(faults)} faults of code, {kills} kills")
    assert faults, "no fault was injected"
    assert kills, "nothing was killed"
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert Checkpoint.open(sorted(Path(folder, "out/checkpoints").glob("step-*"))[-1]).step == rows[-1]["step"]
    flat(samples, "rss", "descriptors")
    if long:
        in_band(rows, *BANDS[name])


SMALLEST = (
    "embodied.yaml",
    "runner.max_steps=5000",
    "runner.save_interval=500",
    "env.num_envs=1",
    "env.rollout_steps=8",
    "data.mini_batch_size=8",
    "algorithm.ppo_epochs=1",
)


@pytest.mark.release
def test_nothing_grows_with_the_steps(start, folder: Path) -> None:
    """Over 5,000 steps: memory, descriptors, threads and the processor time of a step."""
    output, metrics, samples = folder / "output", folder / "out" / "metrics.jsonl", list[Sample]()
    run = start(*SMALLEST, output=output)
    launcher = psutil.Process(run.pid)
    while run.poll() is None:
        if metrics.exists():
            with suppress(psutil.Error):  # it has just ended
                samples.append(Sample.of(launcher, metrics))
        time.sleep(0.1)
    assert run.returncode == 0, output.read_text()[-3000:]
    assert len(read_metrics(folder / "out")) == 5001
    flat(samples, "rss", "descriptors", "threads")
    fifth = len(samples) // 5
    early, late = (
        (part[-1].cpu_s - part[0].cpu_s) / (part[-1].steps - part[0].steps)
        for part in (samples[fifth : 2 * fifth], samples[-fifth:])
    )
    print(f"processor time of a step: {1000 * early:.2f} -> {1000 * late:.2f} ms")
    assert late < 1.25 * early, "a step takes longer"
