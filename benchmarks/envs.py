"""Environment steps per second of simulation alone: no policy, no learner.

Two questions for each task. How much of the physics' speed is left after observations, rewards, ends and checks: our
environments beside `mujoco.rollout`, MuJoCo's own loop over `mj_step` in C on all cores, from the same first states
under the same actions, without ends (so without resets), and without handing anything back between steps. That limit is
`mj_step` alone: ours also waits for all environments before the next actions, and for Ant and Humanoid it computes the
contact forces of bodies (`mj_rnePostConstraint`, some 0.5 % of a step), which these tasks observe. And how fast others
are at the same task, with ends and resets: Gymnasium's `make_vec` with a process per environment (16 at most), and
EnvPool, which brings a MuJoCo of its own, where it is installed. Actions are uniformly random.

    python benchmarks/envs.py [--rounds 8] [--num-envs 64] [--steps 64] [--tasks Ant-v5 ...] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import numpy as np
from _common import Entry, Lap, Turns, machine, new_parser, print_verdict, race, ratios, write_json

from rl_platform.envs.embodied.descriptions import EnvDescription, make_env
from rl_platform.envs.embodied.mujoco.native import NativeEnvs
from rl_platform.envs.embodied.vector import VectorEnv

TASKS = ("HalfCheetah-v5", "Ant-v5", "Humanoid-v5")
END_WHEN_UNHEALTHY = ("Ant-v5", "Hopper-v5", "Humanoid-v5", "Walker2d-v5")
OTHERS = ("HalfCheetah-v5", "HumanoidStandup-v5", "Pusher-v5", "Reacher-v5", "Swimmer-v5")
OURS, OURS_ENDLESS, BARE = "rl_platform", "rl_platform without ends", "mj_step"
GYMNASIUM, ENVPOOL = "gymnasium async", "envpool"
STEPS, SECONDS = "steps", "seconds"
MOST_PROCESSES = 16  # of Gymnasium: one per environment
TARGETS = {BARE: 0.85, GYMNASIUM: 3.0, ENVPOOL: 1.0}


def actions_of(settings: argparse.Namespace) -> list[np.ndarray]:
    """Of a few laps, [steps, num_envs, A] float32 each; the same for every contestant."""
    space = make_env(EnvDescription(settings.task)).action_space
    shape = (settings.steps, settings.num_envs, *space.shape)
    return [np.random.default_rng(lap).uniform(space.low, space.high, shape).astype(np.float32) for lap in range(4)]


def laps(
    turns: Turns,
    settings: argparse.Namespace,
    run: Callable[[np.ndarray], object],
    prepare: Callable[[], object] = lambda: None,
    chosen: Sequence[np.ndarray] = (),
    num_envs: int | None = None,
) -> None:
    """`run` gets the actions of a lap, or `chosen` in another form. `prepare` is not timed."""
    chosen = chosen or actions_of(settings)
    steps = settings.steps * (num_envs or settings.num_envs)
    numbers = None
    for lap in itertools.count():
        turns.next(numbers)
        prepare()
        began = time.perf_counter()
        run(chosen[lap % len(chosen)])
        numbers = {STEPS: steps, SECONDS: time.perf_counter() - began}


def stepping(step: Callable[[np.ndarray], object]) -> Callable[[np.ndarray], None]:
    def run(chosen: np.ndarray) -> None:
        for action in chosen:
            step(action)

    return run


def endless(task: str) -> EnvDescription:
    """The task without terminations and truncations."""
    healthy = {"terminate_when_unhealthy": False} if task in END_WHEN_UNHEALTHY else {}
    return EnvDescription(task, healthy, max_episode_steps=1_000_000)


def ours(turns: Turns, settings: argparse.Namespace) -> None:
    envs = VectorEnv(EnvDescription(settings.task), settings.num_envs)
    envs.reset(range(settings.num_envs))
    laps(turns, settings, stepping(envs.step))


def ours_endless(turns: Turns, settings: argparse.Namespace) -> None:
    envs = VectorEnv(endless(settings.task), settings.num_envs)
    laps(turns, settings, stepping(envs.step), lambda: envs.reset(range(settings.num_envs)))


def bare(turns: Turns, settings: argparse.Namespace) -> None:
    import mujoco
    from mujoco.rollout import Rollout

    inner = make_env(endless(settings.task)).unwrapped
    model, data = inner.model, inner.data
    count, threads = settings.num_envs, len(os.sched_getaffinity(0))
    initial = []
    for seed in range(count):
        inner.reset(seed=seed)
        initial.append(np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_FULLPHYSICS)))
        mujoco.mj_getState(model, data, initial[-1], mujoco.mjtState.mjSTATE_FULLPHYSICS)
    states, models = np.array(initial), [model] * count
    memories = [mujoco.MjData(model) for _ in range(threads)]
    pool = Rollout(nthread=threads)

    # [steps, num_envs, A] -> [num_envs, physics steps, A]
    controls = [chosen.swapaxes(0, 1).repeat(inner.frame_skip, axis=1) for chosen in actions_of(settings)]

    def run(chosen: np.ndarray) -> None:
        pool.rollout(models, memories, states, chosen, skip_checks=True, nstep=chosen.shape[1], chunk_size=1)

    laps(turns, settings, run, chosen=[np.ascontiguousarray(chosen, np.float64) for chosen in controls])


def gymnasium_async(turns: Turns, settings: argparse.Namespace) -> None:
    import gymnasium

    count = min(settings.num_envs, MOST_PROCESSES)
    # forked, as in a script of one's own: processes of a race would start such children anew, each with its imports
    with closing(
        gymnasium.make_vec(settings.task, count, vectorization_mode="async", vector_kwargs={"context": "fork"})
    ) as envs:
        envs.reset(seed=0)
        fewer = [chosen[:, :count] for chosen in actions_of(settings)]
        laps(turns, settings, stepping(envs.step), chosen=fewer, num_envs=count)


def envpool(turns: Turns, settings: argparse.Namespace) -> None:
    import envpool

    threads = len(os.sched_getaffinity(0))
    envs = envpool.make(settings.task, env_type="gymnasium", num_envs=settings.num_envs, num_threads=threads)
    envs.reset()
    laps(turns, settings, stepping(lambda action: envs.step(action.astype(np.float64))))


def contestants(settings: argparse.Namespace) -> dict[str, Entry]:
    found = {
        BARE: Entry(bare, settings, 1),
        OURS_ENDLESS: Entry(ours_endless, settings, 1),
        OURS: Entry(ours, settings, 1),
        GYMNASIUM: Entry(gymnasium_async, settings, 1),
    }
    if importlib.util.find_spec("envpool"):
        found[ENVPOOL] = Entry(envpool, settings, 1)
    return found


def timed(laps: Sequence[Lap]) -> list[Lap]:
    """Without what was not timed."""
    return [lap._replace(seconds=lap.numbers[SECONDS]) for lap in laps]


def report(task: str, found: Mapping[str, Sequence[Lap]]) -> None:
    print(f"\n{task:<34} {'median':>8} {'fastest':>8} steps per second")
    for name, done in found.items():
        rates = [lap.numbers[STEPS] / lap.seconds for lap in done]
        print(f"{name:<34} {statistics.median(rates):8.0f} {max(rates):8.0f}")
    for name, target in TARGETS.items():
        if name in found:
            mine = OURS_ENDLESS if name == BARE else OURS
            print_verdict(f"{mine} in multiples of {name}", ratios(found[mine], found[name], STEPS), target)


def main() -> None:
    parser = new_parser(__doc__, rounds=8)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=64, help="of every environment in a lap")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=[*END_WHEN_UNHEALTHY, *OTHERS])
    options = parser.parse_args()
    if options.quick:
        options.num_envs, options.steps, options.rounds = 8, 8, 2
    found = machine(("gymnasium", "mujoco", "numpy"))
    if not importlib.util.find_spec("envpool"):
        print("envpool is not installed: left out")
    everything = {}
    for task in options.tasks:
        settings = argparse.Namespace(task=task, num_envs=options.num_envs, steps=options.steps)
        assert NativeEnvs.of(make_env(EnvDescription(task)), 1, 1) is not None, f"{task} is stepped by Gymnasium"
        laps_of = race(contestants(settings), options.warm_up, options.rounds)
        everything[task] = {name: timed(done) for name, done in laps_of.items()}
        report(task, everything[task])
    write_json(options.json, {"benchmark": "envs", "options": vars(options), "machine": found, "laps": everything})


if __name__ == "__main__":
    main()
