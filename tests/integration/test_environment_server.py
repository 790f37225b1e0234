"""Environments of a server give the results of local ones. Servers refuse bad input; trainers survive their restart."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
from served import ROBOT, TOKEN, Record, Served
from waiting import until

from rl_platform.envs.embodied.descriptions import EnvDescription, PixelFormat
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.pictures.video import Video
from rl_platform.envs.embodied.remote import environment_server, remote_workers, wire
from rl_platform.envs.embodied.vector import StepResult, VectorEnv
from rl_platform.errors import ConfigError, Deadline, Unreachable, WorkerDied, WorkerError
from rl_platform.metrics import read_metrics

CARTPOLE = "CartPole-v1"
OWN = """
import sys
import gymnasium
import numpy as np

class Modules(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.array([name in sys.modules for name in ("torch", "pydantic", "yaml")], np.float32), {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}
"""

ARM = """
import gymnasium
import numpy as np

class Arm(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)

    def __init__(self, most=1.0):
        self.action_space = gymnasium.spaces.Box(-most, most, (1,), np.float32)
"""
GOALS = """
import gymnasium
import numpy as np

class Goal(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, goal):
        self.goal = goal

    def reset(self, *, seed=None, options=None):
        return np.full(1, self.goal, np.float32), {}

    def step(self, action):
        return self.reset()[0], float(self.goal), False, False, {}
"""

BLIND = """
import os
import gymnasium
import numpy as np

if "MUJOCO_GL" in os.environ:  # as MuJoCo's import without the library
    raise ImportError("there is no libEGL")

class Blind(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return np.ones(1, np.float32), {}

    def step(self, action):
        return self.reset()[0], 1.0, False, False, {}
"""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts of servers of other tests, whose ports may be used again."""
    monkeypatch.setattr(remote_workers, "_known", {})


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("cartpole"), "--env", CARTPOLE)
    yield server
    assert server.end() == 0


@pytest.fixture
def serve(tmp_path: Path, closes) -> Callable[..., Served]:
    """serve("--env", ID): a server in the folder of the test, with which it ends."""
    return lambda *arguments, **options: closes(Served(tmp_path, *arguments, **options))


def _steps(envs: VectorEnv, shape: int | tuple[int, ...], dtype: type = np.int64) -> None:
    for _ in range(3):
        envs.step(np.zeros(shape, dtype))


def _equal(first: StepResult, second: StepResult) -> None:
    for name in ("observations", "rewards", "terminated", "truncated", "invalid", "final_observations"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
    assert first.episodes == second.episodes


@pytest.mark.parametrize(("workers", "stages"), [(1, 1), (2, 2)])
def test_the_same_numbers_as_in_this_process(cartpole: Served, workers: int, stages: int, closes) -> None:
    here, there = EnvDescription(CARTPOLE, max_episode_steps=50), cartpole.description(CARTPOLE, max_episode_steps=50)
    assert inspect_env(here).spaces == inspect_env(there).spaces
    first, second = (closes(VectorEnv(each, 4, workers, stages=stages)) for each in (here, there))
    assert np.array_equal(first.reset([1, 2, 3, 4]), second.reset([1, 2, 3, 4]))
    draw = np.random.default_rng(0)
    for number in range(120):
        idle = np.array([number % 3 == 0, False])[: 4 // stages] if stages == 2 else None
        for stage in range(stages):
            actions = draw.integers(0, 2, 4 // stages)
            for envs in (first, second):
                envs.send(actions, stage, idle)
        for stage in range(stages):
            _equal(first.receive(stage), second.receive(stage))


def test_batched_physics_and_several_servers(serve) -> None:
    servers = [serve("--env", "HalfCheetah-v5") for _ in range(2)]
    description = servers[0].description("HalfCheetah-v5")
    both = EnvDescription(
        "HalfCheetah-v5", addresses=(servers[0].address, servers[1].address), token_file=description.token_file
    )
    with closing(VectorEnv(EnvDescription("HalfCheetah-v5"), 4, 2)) as first, closing(VectorEnv(both, 4, 2)) as second:
        assert np.array_equal(first.reset([1, 2, 3, 4]), second.reset([1, 2, 3, 4]))
        draw = np.random.default_rng(0)
        for _ in range(30):
            actions = draw.uniform(-1, 1, (4, 6)).astype(np.float32)
            _equal(first.step(actions), second.step(actions))
        assert all("has 2 environments" in server.log.read_text() for server in servers)


def test_images_of_a_server_are_those_of_this_machine(serve, drawing: dict[str, str], monkeypatch) -> None:
    for name, value in drawing.items():
        monkeypatch.setenv(name, value)
    server = serve("--env", "InvertedPendulum-v5", "--pixels", '{"width": 24, "height": 20}')
    here, there = (
        EnvDescription("InvertedPendulum-v5", pixels=PixelFormat(24, 20)),
        server.description("InvertedPendulum-v5"),
    )
    assert inspect_env(there).spaces.images
    with closing(VectorEnv(here, 2, 1, worker_variables=drawing)) as first, closing(VectorEnv(there, 2, 1)) as second:
        assert np.array_equal(first.reset([1, 2]), second.reset([1, 2]))
        for number in range(40):
            _equal(*(envs.step(np.full((2, 1), 0.1 * (number % 7), np.float32)) for envs in (first, second)))


def test_several_tasks_of_a_server_have_their_instructions_and_metrics(command, serve, tmp_path: Path) -> None:
    (tmp_path / "goals.py").write_text(GOALS)
    tasks = '[{"name": "one", "kwargs": {"goal": 1}}, {"name": "two", "kwargs": {"goal": 2}}]'
    servers = [serve("--env", "goals.py:Goal", "--tasks", tasks) for _ in range(2)]
    token = servers[0].description("x").token_file
    names = {"tasks": ({}, {}), "task_names": ("one", "two")}
    served = servers[0].description("goals.py:Goal", max_episode_steps=3, **names)
    envs = VectorEnv(served, 3, numbers=[1, 4, 5])
    assert envs.reset([0, 0, 0])[:, 0].tolist() == [2, 1, 2]
    envs.close()
    run = [
        "embodied.yaml",
        "runner.max_steps=2",
        "env.id=goals.py:Goal",
        f"env.address='{servers[0].address},{servers[1].address}'",
        f"env.token_file={token}",
        "env.num_workers=2",
        "env.max_episode_steps=3",
        "env.evaluation.episodes=4",
        "runner.output_dir=goals",
    ]
    ended = command(*run, "env.tasks=[{name: one}, {name: two}]")
    assert ended.code == 0, ended.err
    for row in read_metrics(Path("goals/metrics.jsonl"))[1:]:
        for kind in ("env", "val") if "val/return" in row else ("env",):
            assert [row[f"{kind}/{name}/return"] for name in ("one", "two")] == [3.0, 6.0]
    for given, shown in (("[{name: two}, {name: one}]", "two, one"), ("[]", "none")):
        ended = command(*run, f"env.tasks={given}")
        assert ended.code == 2, ended.err
        told = " ".join(ended.err.split())
        assert f"env.tasks: the server at {servers[0].address} has other tasks, or another order" in told
        assert shown in told
        assert "env.tasks: [{name: one}, {name: two}], or other --tasks of the server" in told


def test_the_file_runs_where_only_numpy_and_gymnasium_are(serve, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    venv.create(tmp_path / "bare", with_pip=False)
    packages = next((tmp_path / "bare").glob("lib/*/site-packages"))
    for name in ("numpy", "numpy.libs", "gymnasium", "cloudpickle", "farama_notifications", "typing_extensions.py"):
        source = Path(np.__file__).parents[1] / name
        if source.exists():
            (packages / name).symlink_to(source)
    python = str(tmp_path / "bare" / "bin" / "python")
    server = serve("--env", "own.py:Modules", python=python)
    with closing(VectorEnv(server.description("own.py:Modules", max_episode_steps=5), 1)) as envs:
        assert envs.reset([0]).tolist() == [[0.0, 0.0, 0.0]]
        assert envs.step(np.zeros(1, np.int64)).rewards.tolist() == [0.0]


def test_a_run_is_that_of_local_processes_and_resumes_with_new_episodes(command, cartpole: Served) -> None:
    settings = ["embodied.yaml", "runner.max_steps=2", "env.num_workers=2", f"env.id={CARTPOLE}"]
    served = [f"env.address={cartpole.address}", f"env.token_file={cartpole.description('x').token_file}"]
    local = command(*settings, "runner.output_dir=local")
    assert local.code == 0, local.err
    remote = command(*settings, *served, "runner.output_dir=remote")
    assert remote.code == 0, remote.err
    first, second = (read_metrics(Path(name) / "metrics.jsonl") for name in ("local", "remote"))
    for one, other in zip(first, second, strict=True):
        compared = {name for name in one if not name.startswith(("time/", "perf/", "memory/"))} & other.keys()
        assert {"val/return", "actor/approx_kl"} & compared
        assert {name: one[name] for name in compared} == {name: other[name] for name in compared}
    assert TOKEN not in Path("remote/config.yaml").read_text()
    resumed = command(*settings, *served, "runner.output_dir=remote", "runner.max_steps=3")
    assert resumed.code == 0, resumed.err
    assert "a resumed run begins new episodes" in resumed.out + resumed.err
    assert [row["step"] for row in read_metrics(Path("remote/metrics.jsonl"))] == [0, 1, 2, 3]


def test_a_policy_of_a_simulation_is_evaluated_on_a_server(command, serve) -> None:
    """As on a robot: the server has one environment, the run had four."""
    settings = ["embodied.yaml", "runner.max_steps=1", f"env.id={CARTPOLE}", "env.evaluation.episodes=3"]
    assert command(*settings).code == 0
    server = serve("--env", CARTPOLE, "--instances", "1")
    served = [f"env.address={server.address}", f"env.token_file={server.description('x').token_file}"]
    rows = []
    for keys in ([], [*served, "env.num_workers=1"], [f"env.python={sys.executable}", "env.num_workers=1"]):
        ended = command("--eval", "out", "env.evaluation.video=false", *keys)
        assert ended.code == 0, ended.err
        rows.append(json.loads(Path("out/evaluation/step-00000001.json").read_text())["rows"])
    assert [row["returns"] for row in rows[1] if row["actions"] == "deterministic"] == [rows[0][0]["returns"]]
    assert rows[2] == rows[0]
    ended = command("--eval", "out", "env.evaluation.video=false", *served)
    assert ended.code == 2
    assert "env.num_workers=1" in ended.err


def test_a_run_draws_the_episodes_of_its_evaluation(command, cartpole: Served) -> None:
    settings = ["embodied.yaml", "runner.max_steps=1", "env.num_workers=1", f"env.id={CARTPOLE}"]
    settings += ["env.evaluation={episodes: 2, video: true}"]
    served = [f"env.address={cartpole.address}", f"env.token_file={cartpole.description('x').token_file}"]
    for name, more in (("local", []), ("remote", served)):
        ended = command(*settings, *more, f"runner.output_dir={name}")
        assert ended.code == 0, ended.err
        assert "no video" not in ended.out + ended.err
    for file in ("evaluation", "evaluation-worst"):
        here, there = (Path(name, f"{file}.json").read_text() for name in ("local", "remote"))
        assert here == there
        videos = [imageio.mimread(Path(name, f"{file}.mp4")) for name in ("local", "remote")]
        assert len(videos[0]) > 5
        assert np.array_equal(*videos)


def test_a_run_goes_on_without_videos_if_the_server_has_no_graphics_library(
    command, serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    (tmp_path / "blind.py").write_text(BLIND)
    server = serve("--env", "blind.py:Blind")
    token = server.description("x").token_file
    settings = ["env.id=blind.py:Blind", f"env.address={server.address}", f"env.token_file={token}"]
    settings += ["env.num_workers=1", "env.max_episode_steps=5", "env.evaluation={episodes: 2, video: true}"]
    ended = command("embodied.yaml", "runner.max_steps=1", *settings)
    assert ended.code == 0, ended.err
    assert "no video: blind.py:Blind: env.id: its module cannot be imported (ImportError at " in ended.out
    assert "blind.py:7: there is no libEGL)" in ended.out


def test_a_run_takes_the_last_environment_from_a_drawing(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_workers, "RECONNECT_S", 5.0)
    server = serve("--env", CARTPOLE, "--instances", "1")
    there, variables = server.description(CARTPOLE), {"SDL_VIDEODRIVER": "dummy"}
    with ThreadPoolExecutor(1) as thread:
        start = partial(VectorEnv, there, 1, 1, render_mode="rgb_array", worker_variables=variables)
        drawing = thread.submit(start).result()
        thread.submit(drawing.reset, [0]).result()
        envs = VectorEnv(there, 1, 1)
        envs.reset([0])
        with pytest.raises(WorkerDied, match="during render"):
            thread.submit(drawing.render).result()
        _steps(envs, 1)
        envs.close()


def test_pictures_of_mujoco_are_those_of_this_machine(serve, drawing: dict[str, str], monkeypatch) -> None:
    for name, value in drawing.items():
        monkeypatch.setenv(name, value)
    server = serve("--env", "Reacher-v5")
    pictures = []
    there = server.description("Reacher-v5")
    facts = inspect_env(there)
    assert (facts.render_modes, facts.render_rate) == (
        ("rgb_array",),
        inspect_env(EnvDescription("Reacher-v5")).render_rate,
    )
    for description in (EnvDescription("Reacher-v5"), there):
        with closing(VectorEnv(description, 1, 1, render_mode="rgb_array")) as envs:
            envs.reset([3])
            frames = [envs.render()]
            envs.step(np.ones((1, 2), np.float32))
            pictures.append([*frames, envs.render()])
    (first, second), remote = pictures
    assert not np.array_equal(first, second)
    assert np.array_equal(pictures[0], remote)


def test_a_robot_is_not_drawn_because_it_would_move(serve, tmp_path: Path) -> None:
    (tmp_path / "robot.py").write_text(
        ROBOT.replace("    def __init__(", "    metadata = {'render_modes': ['rgb_array']}\n\n    def __init__(", 1)
    )
    server = serve("--env", "robot.py:Robot", "--kwargs", f'{{"record": "{tmp_path / "record"}"}}')
    there = server.description("robot.py:Robot", max_episode_steps=5)
    assert inspect_env(there).render_modes == ()
    assert "cannot draw" in Video(there).refusal
    with pytest.raises(ConfigError, match="draws no pictures"):
        VectorEnv(there, 1, 1, render_mode="rgb_array")


def test_evaluations_use_the_only_robot(command, serve, tmp_path: Path) -> None:
    (tmp_path / "robot.py").write_text(ROBOT)
    record = Record(tmp_path / "record")
    kwargs = f'{{"record": "{record}"}}'
    server = serve("--env", "robot.py:Robot", "--kwargs", kwargs, "--instances", "1")
    ended = command(
        "embodied.yaml",
        "runner.max_steps=2",
        "runner.val_check_interval=1",
        "env.id=robot.py:Robot",
        f"env.address={server.address}",
        f"env.token_file={server.description('x').token_file}",
        "env.num_envs=1",
        "env.num_workers=1",
        "env.max_episode_steps=10",
        "env.rollout_steps=32",
        "data.mini_batch_size=16",
        "env.evaluation.episodes=1",
        "runner.output_dir=robot",
    )
    assert ended.code == 0, ended.err
    rows = read_metrics(Path("robot/metrics.jsonl"))
    assert [row["env/failures"] for row in rows[1:]] == [0.0, 0.0]
    assert [row["episode/invalid"] for row in rows[1:]] == [1.0, 1.0]  # the step after each evaluation
    assert record.words().count("stop") >= 3  # before each change of the connection
    # the server ends the robot after the run has closed the connection
    until(lambda: record.words()[-2:] == ["stop", "close"])


def _problem(description: EnvDescription) -> tuple[str, str, str]:
    with pytest.raises(ConfigError) as refused:
        inspect_env(description)
    (problem,) = refused.value.problems
    return problem.key, problem.message, problem.hint


def test_what_is_wrong_is_said_with_the_line_to_type(
    cartpole: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = cartpole.description(CARTPOLE)
    (tmp_path / "other").write_text("another token of many letters")
    (tmp_path / "short").write_text("short")
    for name in ("other", "short"):
        (tmp_path / name).chmod(0o600)

    def changed(**changes: object) -> EnvDescription:
        fields = {"id": CARTPOLE, "addresses": good.addresses, "token_file": good.token_file} | changes
        return EnvDescription(**fields)

    key, message, hint = _problem(changed(token_file=str(tmp_path / "other")))
    assert (key, "wrong token" in message) == ("env.token_file", True)
    assert "--token-file" in hint
    assert _problem(changed(token_file=str(tmp_path / "short")))[:2] == (
        "env.token_file",
        "holds a token of 5 characters; at least 16 are needed",
    )
    assert "cannot be read" in _problem(changed(token_file=str(tmp_path / "none")))[1]
    shared = tmp_path / "shared"
    shared.write_text(TOKEN)
    for mode in (0o640, 0o604, 0o620):
        shared.chmod(mode)
        _, message, _ = _problem(changed(token_file=str(shared)))
        assert message == f"other users or its group may read or change it: chmod 600 {shared}"
    monkeypatch.delenv(wire.TOKEN_VARIABLE, raising=False)
    assert "RL_PLATFORM_ENV_TOKEN" in _problem(changed(token_file=None))[2]
    monkeypatch.setenv(wire.TOKEN_VARIABLE, TOKEN)
    assert inspect_env(changed(token_file=None)).spaces.observation_size == 4
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    key, message, hint = _problem(changed(addresses=(f"127.0.0.1:{port}",)))
    assert (key, "no environment server answers" in message) == ("env.address", True)
    assert f"python server.pyz --env CartPole-v1 --port {port} --token-file token" in hint
    assert "no environment server answers" in _problem(changed(addresses=("a..b:5555",)))[1], "no name of a host"
    assert _problem(changed(id="Pendulum-v1")) == (
        "env.id",
        f"the server at {cartpole.address} has another environment",
        "env.id=CartPole-v1",
    )
    monkeypatch.setattr(wire, "VERSION", 4)
    remote_workers._known.clear()
    key, message, hint = _problem(changed())
    assert "protocol version 3; this platform has version 4" in message
    assert "rl-platform environment-server server.pyz" in hint


def test_garbage_is_refused_and_others_are_still_served(cartpole: Served) -> None:
    host, port = "127.0.0.1", cartpole.port
    for data in (b"\x80\x04cos\nsystem\n(S'true'\ntR.", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 5000):
        with socket.create_connection((host, port), timeout=20) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda s=sock: s.recv(4096), b""))
        assert answer.startswith(b"RLPE")
        # the first is too short to be a claim
        assert (b'"wrong token"' in answer) == (len(data) > 100)
    until(lambda: "is refused: wrong token" in cartpole.log.read_text())
    # with the token: too large, of another kind, with a wrong request
    for kind, size, text, reason in (
        (wire.Kind.OPEN, 1 << 50, b"{}", "the limits are"),
        (wire.Kind.STEP, 0, b"{}", "unexpected message"),
        (wire.Kind.REFUSED, 0, b'{"arrays": []}', "unexpected message"),
        (wire.Kind.OPEN, 0, b'{"arrays": [], "num_envs": -1}', "num_envs: -1"),
        (wire.Kind.OPEN, 0, b'{"arrays": [], "num_envs": 100000}', "restarts: None"),
    ):
        with socket.create_connection((host, port), timeout=20) as sock:
            wire.claim(sock, TOKEN)
            wire.receive(sock, (wire.Kind.WELCOME,))
            sock.sendall(struct.pack("!4sIIQ", b"RLPE", kind, len(text), size) + text)
            refused = wire.receive(sock, (wire.Kind.REFUSED,))
            assert reason in refused.fields["reason"]
    envs = VectorEnv(cartpole.description(CARTPOLE), 1)
    assert envs.reset([0]).shape == (1, 4)
    envs.close()


def test_a_server_at_an_ipv6_address(serve) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = serve("--env", CARTPOLE, "--host", "::1")
    assert server.address == f"[::1]:{server.port}"
    assert "not encrypted" not in server.log.read_text()
    envs = VectorEnv(server.description(CARTPOLE), 1)
    assert envs.reset([0]).shape == (1, 4)
    envs.close()
    assert server.end() == 0
    remote_workers._known.clear()
    key, message, hint = _problem(server.description(CARTPOLE))
    assert (key, "no environment server answers" in message) == ("env.address", True)
    assert f"--env CartPole-v1 --host ::1 --port {server.port} --token-file token" in hint


def test_too_many_open_files_do_not_end_the_server(serve) -> None:
    server = serve("--env", CARTPOLE)
    before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir(f"/proc/{server.pid}/fd")) + 1
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used, before[1]))
    with socket.create_connection(("127.0.0.1", server.port)):
        until(lambda: "cannot be accepted: [Errno 24]" in server.log.read_text())
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
    assert inspect_env(server.description(CARTPOLE)).spaces.observation_size == 4
    assert server.end() == 0


def test_more_environments_than_there_are(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_workers, "RECONNECT_S", 1.0)
    server = serve("--env", CARTPOLE, "--instances", "2")
    description = server.description(CARTPOLE)
    with pytest.raises(ConfigError, match="3 environments in one connection; this server has 2"):
        VectorEnv(description, 3)
    code = (
        "import sys, pickle; from rl_platform.envs.embodied.vector import VectorEnv\n"
        f"envs = VectorEnv(pickle.loads({pickle.dumps(description)!r}), 2)\n"
        "envs.reset([0, 1]); print('ready', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "ready\n"
    with pytest.raises(Unreachable, match="2 of 2 environments are in use, 1 more were requested"):
        VectorEnv(description, 1)
    other.communicate()
    envs = VectorEnv(description, 1)
    envs.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_returns_costs_episodes_and_not_the_run(serve, number: int) -> None:
    server = serve("--env", CARTPOLE)
    with closing(VectorEnv(server.description(CARTPOLE), 4, 2, restarts=4)) as envs:
        envs.reset([1, 2, 3, 4])
        for _ in range(3):
            assert not envs.step(np.zeros(4, np.int64)).invalid.any()
        server.end(number)
        server = serve("--env", CARTPOLE, port=server.port)
        results = [envs.step(np.zeros(4, np.int64)) for _ in range(3)]
        assert sum(result.failures for result in results) == 2  # one for each connection
        assert results[0].invalid.all()
        assert not results[2].invalid.any()
        assert np.isfinite([result.observations for result in results]).all()


def test_a_server_that_stays_away_ends_the_run(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_workers, "RECONNECT_S", 1.0)
    server = serve("--env", CARTPOLE)
    envs = VectorEnv(server.description(CARTPOLE), 2, restarts=4)
    envs.reset([1, 2])
    server.end()
    with pytest.raises(Unreachable, match="was not available for 1 s: Connection refused"):
        _steps(envs, 2)
    remote_workers._known.clear()
    with pytest.raises(ConfigError, match="no environment server answers"):
        inspect_env(server.description(CARTPOLE))


def test_without_restarts_the_lost_connection_is_the_error(serve) -> None:
    server = serve("--env", CARTPOLE)
    envs = VectorEnv(server.description(CARTPOLE), 2)
    envs.reset([1, 2])
    server.end()
    with pytest.raises(WorkerDied, match=r"environment server 127.*the connection was lost"):
        _steps(envs, 2)


class Malicious:
    """A server that has the token, grants everything, and answers commands with `data`."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers, self._listener = answers, socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self, facts: dict[str, object], connections: int = 1) -> None:
        for _ in range(connections):
            sock, _ = self._listener.accept()
            assert wire.greet(sock, TOKEN) == ""
            wire.send(sock, wire.Kind.WELCOME, facts)
            try:
                wire.receive(sock, (wire.Kind.OPEN,))
            except EOFError:
                continue
            wire.send(sock, wire.Kind.GRANTED)
            wire.send(sock, wire.Kind.DONE)
            for answer in self._answers:
                sock.recv(1 << 16)
                sock.sendall(answer)
            self.kept = sock
        self._listener.close()


def _answer(fields: dict[str, object] | None = None, **arrays: np.ndarray) -> bytes:
    one, two = socket.socketpair()
    with one, two:
        wire.send(one, wire.Kind.DONE, fields, arrays)
        return two.recv(1 << 20)


OBSERVATIONS = {"observations": np.zeros((1, 4), np.float32)}
FLAGS = dict.fromkeys(("terminated", "truncated", "invalid"), np.zeros(1, bool))
STEP = OBSERVATIONS | FLAGS | {"rewards": np.zeros(1)}
END = STEP | {"terminated": np.ones(1, bool), "returns": np.zeros(1), "lengths": np.ones(1, np.int64)}
END |= dict.fromkeys(("success_once", "success_at_end"), np.zeros(1, np.int8))


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (b"", Deadline, "did not finish its step within 1 s"),  # silent
        (_answer(**STEP)[:-1], Deadline, "did not finish its step within 1 s"),
        (b"HTTP/1.1 500 Internal Server Error\r\n", WorkerDied, "not a message"),
        (_answer(**OBSERVATIONS), WorkerDied, "an answer without results"),
        (_answer(**STEP | {"rewards": np.array([np.nan])}), WorkerDied, "not finite"),
        (_answer(**STEP | {"observations": np.zeros((1, 5), np.float32)}), WorkerDied, "the limits are|instead of"),
        (_answer(**STEP | {"terminated": np.ones(1, bool)}), WorkerDied, "an answer without results"),
        (_answer(**END), WorkerDied, "without their last observations"),
        (_answer(**END, final_observations=np.zeros((2, 4), np.float32)), WorkerDied, "the limits are"),
        (_answer(**END, final_observations=np.full((1, 4), np.inf, np.float32)), WorkerDied, "not finite"),
        (_answer({"replaced": [7]}, **STEP), WorkerDied, "replacements of environments that are not there"),
    ],
)
def test_answers_of_a_wrong_server_do_not_reach_the_learner(
    cartpole: Served, answer: bytes, error: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(wire.TOKEN_VARIABLE, TOKEN)
    inspect_env(cartpole.description(CARTPOLE))
    facts = remote_workers._known[cartpole.address, CARTPOLE]
    server = Malicious([_answer(**OBSERVATIONS), answer])
    thread = threading.Thread(target=server.serve, args=(facts.fields(), 2), daemon=True)
    thread.start()
    envs = VectorEnv(EnvDescription(CARTPOLE, addresses=(server.address,)), 1, step_timeout_s=1.0)
    envs.reset([0])
    began = time.monotonic()
    with pytest.raises(error, match=reason):
        envs.step(np.zeros(1, np.int64))
    assert time.monotonic() - began < 10


def test_an_environment_that_raises_is_replaced_on_its_server(serve, tmp_path: Path) -> None:
    (tmp_path / "robot.py").write_text(ROBOT)
    record = Record(tmp_path / "record")
    kwargs = f'{{"record": "{record}", "raises_at": 3}}'
    server = serve("--env", "robot.py:Robot", "--kwargs", kwargs)
    with closing(VectorEnv(server.description("robot.py:Robot", max_episode_steps=100), 1, restarts=1)) as envs:
        envs.reset([0])
        results = [envs.step(np.zeros((1, 1), np.float32)) for _ in range(4)]
        assert [result.failures for result in results] == [0, 0, 1, 0]
        assert [bool(result.invalid[0]) for result in results] == [False, False, True, False]
        words = record.words()
        assert words[words.index("stop") - 1 : words.index("stop") + 2] == ["step", "stop", "close"]
        with pytest.raises(WorkerError, match="the arm is not plugged in"):
            _steps(envs, (1, 1), np.float32)


def test_a_server_whose_tasks_have_other_bounds_of_actions_does_not_start(cartpole: Served, tmp_path: Path) -> None:
    (tmp_path / "arm.py").write_text(ARM)
    tasks = '[{"name": "wide"}, {"name": "fine", "kwargs": {"most": 0.1}}]'
    command = [sys.executable, str(cartpole.log.parent / "server.pyz"), "--env", "arm.py:Arm", "--tasks", tasks]
    command += ["--token-file", "token"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "--tasks: task fine has other spaces than wide" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --env"),
        (("--env", "CartPole"), "did you mean CartPole-v"),
        (("--env", CARTPOLE, "--kwargs", "speed=2"), "as --kwargs '{\"speed\": 0.5}'"),
        (("--env", CARTPOLE, "--kwargs", '{"speed": 2}'), "--kwargs: CartPole-v1 cannot be built"),
        (("--env", CARTPOLE, "--port", "70000"), "--port 70000: out of range"),
        (("--env", CARTPOLE, "--instances", "0"), "--instances 0: out of range"),
        (("--env", CARTPOLE, "--silence-s", "nan"), "--silence-s nan: out of range"),
        (
            ("--env", CARTPOLE, "--pixels", "64"),
            '--pixels 64: not a size of images; as --pixels \'{"width": 64, "height"',
        ),
        (("--env", CARTPOLE, "--pixels", '{"width": 4, "height": 64}'), "from 8 to 1024"),
        (("--env", CARTPOLE, "--tasks", "{"), "--tasks {: not a JSON list of tasks"),
        (("--env", CARTPOLE, "--tasks", '[{"name": "a"}, {"name": "a"}]'), "each with another name"),
        (("--env", CARTPOLE, "--tasks", '[{"name": "a", "instruction": "go"}]'), "not a JSON list of tasks"),
        (("--env", CARTPOLE, "--tasks", '[{"name": "pick cube"}]'), "another name without spaces"),
        (("--env", CARTPOLE, "--tasks", "{}"), "not a JSON list of tasks"),
        (
            ("--env", CARTPOLE, "--tasks", '[{"name": "a"}, {"name": "b", "kwargs": {"speed": 2}}]'),
            "--tasks: b: CartPole-v1 cannot be built",
        ),
        (("--env", CARTPOLE, "--pixels", '{"width": 64, "height": 64}'), "--pixels"),
        (("--env", CARTPOLE, "--step-timeout-s", "0"), "--step-timeout-s 0.0: out of range"),
        (("--env", CARTPOLE, "--host", "256.1.1.1"), "--host is an address of this machine, or 0.0.0.0 for all"),
        (("--env", CARTPOLE, "--port", "{used}"), "name another port"),
        (("--env", CARTPOLE, "--token-file", "no/such/folder"), "no/such/folder: No such file or directory"),
        (("--env", "missing.py:Robot"), "there is no file"),
    ],
)
def test_wrong_arguments_of_the_server_end_with_exit_code_2(
    arguments: tuple[str, ...], message: str, cartpole: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    token = () if "--token-file" in arguments else ("--token-file", "token")
    arguments = tuple(each.replace("{used}", str(cartpole.port)) for each in arguments)
    with pytest.raises(SystemExit) as ended:
        environment_server.main([*token, *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
