"""Steps per second of simulators in another interpreter (`env.python`), beside the same simulator without the platform.

Both contestants have the same number of processes with the same number of environments each. Alone, every process steps
its environments in a loop of its own, by the simulator's own functions; there is no waiting between processes, and
nothing is handed back. Ours is `VectorEnv.step`: all environments are awaited before the next actions, observations are
joined into one array, and ends, numbers that are not finite and success are checked. Actions are uniformly random.

`sleep` is an environment whose step waits 1 ms: its ratio is the overhead of a step of that length. It needs no
simulator, the others need `rl-platform environment manipulation`, and ManiSkill, which only `--tasks` runs, the setup
of docs/maniskill.md in the current folder. Seconds of the processor are those of all processes
of a contestant; other load on the machine hardly changes them. `--tcp` adds a contestant whose environments are those
of a server on the loopback interface (`env.address`), with as many connections as there are workers.

    python benchmarks/env_python.py [--rounds 6] [--num-envs 64] [--workers 8] [--steps 20] [--tasks sleep ...] [--tcp]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _common import Entry, Turns, machine, new_parser, print_verdict, race, rate, ratios, write_json

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.processes.interpreter import executable
from rl_platform.envs.embodied.remote import single_file
from rl_platform.envs.embodied.remote.wire import TOKEN_VARIABLE
from rl_platform.envs.embodied.vector import VectorEnv

ALONE, OURS, TCP = "alone", "rl_platform", "rl_platform over TCP"
STEPS, CPU = "steps", "cpu_seconds"
FOLDER = Path(__file__).parent
SUITES = "rl_platform.envs.embodied.suites"
MANISKILL = "maniskill/bin/python"
CAMERA = {"cameras": ["agentview"], "size": 84}


class Task(NamedTuple):
    """env: ours. alone: code that defines `make()`, `low`, `high` and `ended(result of env.step)`. python: of both.

    aim: steps per second in multiples of those of the simulator alone. draws: whether MuJoCo draws images, by EGL
    unless MUJOCO_GL names another library.
    """

    env: EnvDescription
    alone: str
    python: str = "manipulation"
    aim: float = 0.9
    draws: bool = False


def gymnasium_task(module: str, env_id: str, kwargs: dict[str, object]) -> Task:
    """A task that both sides make by `gymnasium.make`."""
    return Task(
        EnvDescription(f"{module}:{env_id}", kwargs),
        f"""
        import gymnasium, {module}
        make = lambda: gymnasium.make({env_id!r}, disable_env_checker=True, **{kwargs!r})
        low, high = make().action_space.low, make().action_space.high
        ended = lambda result: result[2] or result[3]
        """,
    )


def dm_control_task(domain: str, task: str) -> Task:
    return Task(
        EnvDescription(f"{SUITES}.dm_control:Suite", {"domain": domain, "task": task}),
        f"""
        from dm_control import suite
        make = lambda: suite.load({domain!r}, {task!r})
        low, high = make().action_spec().minimum, make().action_spec().maximum
        ended = lambda result: result.last()
        """,
    )


def maniskill_task() -> Task:
    given = {"task": "PushCube-v1", "control_mode": "pd_ee_delta_pos"}
    return Task(
        EnvDescription(f"{SUITES}.maniskill:ManiSkillTask", given),
        """
        import gymnasium, mani_skill.envs, torch
        from mani_skill.envs.utils.system import backend
        from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper
        torch.set_num_threads(1)
        backend.parse_backend_device_id = lambda name: (name, None)
        make = lambda: CPUGymWrapper(gymnasium.make(
            "PushCube-v1", num_envs=1, sim_backend="physx_cpu", render_backend="pci:0", obs_mode="state",
            control_mode="pd_ee_delta_pos", reward_mode="normalized_dense"))
        low, high = make().action_space.low, make().action_space.high
        ended = lambda result: result[2] or result[3]
        """,
        python=MANISKILL,
    )


TASKS = {
    "sleep": Task(
        EnvDescription(f"{FOLDER}/_sleep.py:Sleep", max_episode_steps=1_000_000),
        f"""
        import sys
        sys.path.insert(0, {str(FOLDER)!r})
        from _sleep import Sleep as make
        low, high = make.action_space.low, make.action_space.high
        ended = lambda result: False
        """,
        python=sys.executable,
        aim=0.95,
    ),
    "dm-control walker": dm_control_task("walker", "walk"),
    "dm-control cheetah": dm_control_task("cheetah", "run"),
    "Meta-World reach": gymnasium_task("metaworld", "Meta-World/MT1", {"env_name": "reach-v3", "seed": 1}),
    "Gymnasium-Robotics FetchReach": gymnasium_task("gymnasium_robotics", "FetchReachDense-v4", {}),
    "Gymnasium-Robotics AdroitHandDoor": gymnasium_task("gymnasium_robotics", "AdroitHandDoor-v1", {}),
    "robosuite Lift": Task(
        EnvDescription(f"{SUITES}.robosuite:Task", {"task": "Lift"}),
        """
        import robosuite
        make = lambda: robosuite.make(
            "Lift", robots="Panda", horizon=200, has_renderer=False, has_offscreen_renderer=False,
            use_camera_obs=False, reward_shaping=True, control_freq=20, hard_reset=False, seed=0)
        low, high = make().action_spec
        ended = lambda result: result[2]
        """,
    ),
    "ManiSkill PushCube": maniskill_task(),
    "robosuite Lift, camera": Task(
        EnvDescription(
            f"{SUITES}.robosuite:Task", {"task": "Lift", **CAMERA, "observations": ["robot0_proprio-state"]}
        ),
        f"""
        import robosuite
        make = lambda: robosuite.make(
            "Lift", robots="Panda", horizon=200, has_renderer=False, has_offscreen_renderer=True, use_camera_obs=True,
            camera_names={CAMERA["cameras"]}, camera_heights={CAMERA["size"]}, camera_widths={CAMERA["size"]},
            reward_shaping=True, control_freq=20, hard_reset=False, seed=0)
        low, high = make().action_spec
        ended = lambda result: result[2]
        """,
        draws=True,
    ),
}
# The program of a process of the simulator alone, after the code of its task. Its arguments are its number of
# environments and a seed. A line of its input is a number of steps; it answers with a line when they are done.
LOOP = """
import sys
import numpy as np
envs = [make() for _ in range(int(sys.argv[1]))]
draw = np.random.default_rng(int(sys.argv[2]))
for env in envs:
    env.reset()
print(flush=True)
for line in sys.stdin:
    for actions in draw.uniform(low, high, (int(line), len(envs), *np.shape(low))):
        for env, action in zip(envs, actions):
            if ended(env.step(action)):
                env.reset()
    print(flush=True)
"""


class Alone:
    """Processes that step the simulator without the platform."""

    def __init__(self, task: Task, num_envs: int, workers: int) -> None:
        share, code = num_envs // workers, textwrap.dedent(task.alone) + LOOP
        self._processes = [
            subprocess.Popen(
                [executable(task.python), "-c", code, str(share), str(seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in range(workers)
        ]
        self.pids = [process.pid for process in self._processes]
        self._wait()

    def steps(self, count: int) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
        self._wait()

    def _wait(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit(f"the simulator alone ended with exit code {process.wait()}")


def laps(turns: Turns, settings: argparse.Namespace, steps: Callable[[], None], processes: Sequence[int]) -> None:
    """A lap is a call of `steps`. processes: those whose CPU seconds are counted."""
    numbers = None
    while True:
        turns.next(numbers)
        cpu_began = cpu_seconds(processes)
        steps()
        numbers = {STEPS: settings.steps * settings.num_envs, CPU: cpu_seconds(processes) - cpu_began}


def cpu_seconds(processes: Sequence[int]) -> float:
    """Returns the CPU seconds of these processes (Linux), without those of their children."""
    stats = [Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split() for pid in processes]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def alone(turns: Turns, settings: argparse.Namespace) -> None:
    processes = Alone(TASKS[settings.task], settings.num_envs, settings.workers)
    laps(turns, settings, lambda: processes.steps(settings.steps), processes.pids)


def ours(turns: Turns, settings: argparse.Namespace) -> None:
    task = TASKS[settings.task]
    stepped(turns, settings, replace(task.env, python=task.python))


def over_tcp(turns: Turns, settings: argparse.Namespace) -> None:
    task = TASKS[settings.task]
    os.environ[TOKEN_VARIABLE] = "only for this benchmark"
    with tempfile.TemporaryDirectory() as folder:
        single_file.write(file := Path(folder) / "server.pyz")
        command = [executable(task.python), str(file), "--env", task.env.id, "--kwargs", json.dumps(task.env.kwargs)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().rpartition("env.address=")[2].strip()
            stepped(turns, settings, replace(task.env, kwargs={}, addresses=(address,)), server.pid)
        finally:
            server.terminate()
            server.wait()


def stepped(turns: Turns, settings: argparse.Namespace, env: EnvDescription, server: int | None = None) -> None:
    """Laps of a `VectorEnv`. server: the process whose children step its environments."""
    envs = VectorEnv(env, settings.num_envs, settings.workers)
    envs.reset(range(settings.num_envs))
    shape = (settings.steps, settings.num_envs, *envs.spaces.policy_action_shape)
    actions = np.random.default_rng(0).uniform(envs.spaces.action_low, envs.spaces.action_high, shape)

    def steps() -> None:
        for action in actions:
            envs.step(action)

    children = (
        []
        if server is None
        else [
            pid
            for file in Path(f"/proc/{server}/task").glob("*/children")
            for pid in map(int, file.read_text(encoding="utf-8").split())
        ]
    )
    laps(turns, settings, steps, [os.getpid(), *envs.worker_pids, *children])


def observed(task: Task) -> str:
    """Returns what an environment observes, as `image 84 x 84 x 3 and 50 numbers`."""
    spaces = inspect_env(replace(task.env, python=task.python)).spaces
    images = [spaces.observation_shape] if spaces.images else [part.shape for part in spaces.image_parts]
    numbers = spaces.observation_size - sum(map(math.prod, images))
    texts = [f"image {' x '.join(map(str, shape))}" for shape in images]
    return " and ".join(texts + [f"{numbers} numbers"] * (numbers > 0))


def main() -> None:
    parser = new_parser(__doc__, rounds=6)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="of every environment in a lap")
    default = [name for name, task in TASKS.items() if task.python != MANISKILL]
    parser.add_argument("--tasks", nargs="+", default=default, choices=TASKS)
    parser.add_argument("--tcp", action="store_true", help="also over TCP, on the loopback interface")
    options = parser.parse_args()
    if options.quick:
        options.num_envs, options.workers, options.steps, options.rounds = 4, 2, 5, 2
    found, observations, everything = machine(("gymnasium", "numpy")), {}, {}
    for name in options.tasks:
        if TASKS[name].draws:
            os.environ.setdefault("MUJOCO_GL", "egl")
            os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
        observations[name] = observed(TASKS[name])
        settings = argparse.Namespace(
            task=name, num_envs=options.num_envs, workers=options.workers, steps=options.steps
        )
        entries = {ALONE: Entry(alone, settings, 1), OURS: Entry(ours, settings, 1)}
        if options.tcp:
            entries[TCP] = Entry(over_tcp, settings, 1)
        done = race(entries, options.warm_up, options.rounds)
        print(f"\n{name}, {observations[name]}")
        print(f"{rate(done[OURS], STEPS):,.0f} steps/s, alone {rate(done[ALONE], STEPS):,.0f}")
        for who, each in done.items():
            cpu = statistics.median(lap.numbers[CPU] / lap.numbers[STEPS] for lap in each)
            print(f"{who}: {1e6 * cpu:.0f} microseconds of CPU for a step of an environment")
        print_verdict("ours in multiples of it", ratios(done[OURS], done[ALONE], STEPS), TASKS[name].aim)
        if options.tcp:
            print_verdict("over TCP in multiples of ours", ratios(done[TCP], done[OURS], STEPS), TASKS[name].aim)
        everything[name] = done
    about = {"options": vars(options), "machine": found, "observations": observations}
    write_json(options.json, {"benchmark": "env_python", **about, "laps": everything})


if __name__ == "__main__":
    main()
