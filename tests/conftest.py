"""The real command, in this process or in one of its own, and a small config of each task."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from child_forks import forked_children
from forked import Forked
from launcher_forks import Launcher, Launchers
from ray_cluster import ray_cluster
from ray_forks import RayForks
from script_modules import module_of
from sglang_engine import ENGINE_IMPORTS
from tiny_configs import EMBODIED, REASONING

if CHECKS_SHAPES := all(importlib.util.find_spec(name) for name in ("jaxtyping", "beartype")):
    from shapes import check_shapes, new_test, unchecked_shapes

    check_shapes()  # without the two packages tests run as well, but for unit/test_shapes.py

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("no deadline", deadline=None)  # other processes may use the cores
    settings.load_profile("no deadline")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; runs started here inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # there is another one beside it
SHARED_MEMORY = Path("/dev/shm")  # tests sync thousands of files, which a disk makes slow
if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED_MEMORY))
gc.disable()  # thousands of tests are collected, and none of them is garbage
gc.set_threshold(50_000, 20, 20)  # later: torch and transformers are not looked through again and again


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    assert gc.isenabled(), "an earlier test disabled garbage collection: the process would take more and more memory"
    if CHECKS_SHAPES:
        new_test()


# `pytest -m fast`: these folders and files cover the core. Tests among them that start Ray or ranks, or that take
# several seconds, are marked `slow` and left out.
TESTS = Path(__file__).parent
FAST = (
    "unit/algorithms",
    "unit/config",
    "unit/placement",
    "unit/models",
    "unit/components",
    "unit/runners",
    "unit/runtime/test_channel.py",
    "unit/runtime/test_local.py",
    "unit/engines/test_training.py",
    "unit/engines/test_rollout.py",
    "unit/engines/test_sampling.py",
    "unit/engines/test_state_files.py",
    "unit/launch/test_cli.py",
    "unit/envs_reasoning/test_prompts.py",
    "unit/test_checkpoint.py",
    "unit/test_layout.py",
    "unit/test_metrics.py",
    "unit/test_rng.py",
    "integration/test_two_steps.py",
)

NOT_FAST = (  # in these folders: tests of extras and of other parts that most changes of the core never touch
    "unit/algorithms/test_action_levels.py",
    "unit/components/test_action_chunks.py",
    "unit/components/test_agent_tools.py",
    "unit/components/test_agents.py",
    "unit/components/test_classifier_server.py",
    "unit/components/test_complete_weights.py",
    "unit/components/test_conversations.py",
    "unit/components/test_demonstrations.py",
    "unit/components/test_device_rollout.py",
    "unit/components/test_env_ranks.py",
    "unit/components/test_loss_controls.py",
    "unit/components/test_model_scorer.py",
    "unit/components/test_partial_rollout.py",
    "unit/components/test_policy_kinds.py",
    "unit/components/test_process_rewards.py",
    "unit/components/test_read_ahead.py",
    "unit/components/test_recurrent.py",
    "unit/components/test_turn_tool.py",
    "unit/components/test_weighted_scorer.py",
    "unit/config/test_configs.py",
    "unit/config/test_explain.py",
    "unit/config/test_rules.py",
    "unit/models/test_action_token_policy.py",
    "unit/models/test_chunk_policy.py",
    "unit/models/test_classifier.py",
    "unit/models/test_families.py",
    "unit/models/test_flow_policy.py",
    "unit/models/test_lerobot_normalizer.py",
    "unit/models/test_lora.py",
    "unit/models/test_pretrained.py",
    "unit/models/test_probe.py",
    "unit/models/test_recurrent_policy.py",
    "unit/models/test_routers.py",
    "unit/models/test_smolvla.py",
    "unit/models/test_vision.py",
    "unit/models/test_vla.py",
    "unit/models/test_weight_parts.py",
    "unit/placement/test_bad_placements.py",
    "unit/placement/test_engine_memory.py",
    "unit/placement/test_memory.py",
    "unit/placement/test_model_shape.py",
    "unit/placement/test_placement_page.py",
    "unit/placement/test_vlm_shape.py",
    "unit/runners/test_hang_watch.py",
    "unit/runners/test_partial_rollouts.py",
    "unit/runners/test_streamed_evaluation.py",
)
# Files of about a minute or more run first: at the end, the other processes would have no work beside them.
LONG = (
    "unit/test_types.py",
    "unit/test_benchmarks.py",
    "unit/engines/test_megatron.py",
    "faults/test_worker_faults.py",
    "faults/test_soak.py",
    "integration/test_learning.py",
    "integration/test_policy_kinds.py",
    "integration/test_ray_runs.py",
    "integration/test_reallocation.py",
    "integration/test_replay.py",
    "integration/test_signals.py",
    "integration/test_placement_shapes.py",
    "integration/test_resharding.py",
)
# What environment workers of tests import. Without the library that is to draw, MuJoCo is imported by the worker.
ENVIRONMENT_IMPORTS = """
import contextlib, gymnasium.envs.classic_control.cartpole, rl_platform.envs.embodied.processes.worker_process
with contextlib.suppress(Exception):
    import gymnasium.envs.mujoco.mujoco_env
"""
# What a run of a rehearsal or of a sweep imports.
RUN_IMPORTS = "from launcher_forks import import_for_runs; import_for_runs()"
MISSING = [name for name in (*FAST, *NOT_FAST, *LONG) if not (TESTS / name).exists()]
assert not MISSING, MISSING


@cache
def is_fast(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / name) for name in FAST) and path not in {TESTS / name for name in NOT_FAST}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m fast`, files without a fast test are not even imported."""
    other = collection_path.name.startswith("test_") and not is_fast(collection_path)
    return True if other and config.option.markexpr == "fast" else None


def order_of(paths: list[Path]) -> dict[Path, float]:
    """Returns the position of each file. Files that mostly wait for runs alternate with files that compute."""
    order: dict[Path, float] = {}
    paths = sorted(paths, key=lambda path: path not in {TESTS / name for name in LONG})
    for waits in (False, True):
        group = [path for path in paths if path.is_relative_to(TESTS / "unit") != waits]
        order |= {path: place / len(group) for place, path in enumerate(group)}
    return order


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = order_of(list(dict.fromkeys(item.path for item in items)))
    items.sort(key=lambda item: order[item.path])
    for item in items:
        if is_fast(item.path) and not any(item.get_closest_marker(name) for name in ("slow", "release", "gpu")):
            item.add_marker("fast")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Compiles the test files as pytest does, before several processes start, each of which would compile all."""
    from _pytest.assertion import rewrite

    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS or sys.dont_write_bytecode:
        return
    for path in TESTS.rglob("test_*.py"):
        folder = rewrite.get_cache_dir(path)
        compiled = folder / (path.stem + rewrite.PYC_TAIL)
        if rewrite.try_makedirs(folder) and rewrite._read_pyc(path, compiled) is None:
            status, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, compiled)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes for `pytest` and `pytest -m fast` without paths, each file in one of them; otherwise this one.

    The fast tests keep two cores busy with two processes. Unit tests compute nearly all of their time. Tests of whole
    runs wait for a third to a half of their time; this counts the processor time of the runs as computing.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return {"fast": 2, "not release": 4}.get(config.option.markexpr, 0) if whole else 0


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def any_shapes() -> Iterator[None]:
    """The test passes tensors that the signatures forbid."""
    with unchecked_shapes() if CHECKS_SHAPES else nullcontext():
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sets one thread, as the processes of a run do: the rounding of sums depends on the number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hides the measurements of this machine, which plans read."""
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with `reasoning.yaml` and `embodied.yaml`; runs write to `out`."""
    (tmp_path / "reasoning.yaml").write_text(REASONING)
    (tmp_path / "embodied.yaml").write_text(EMBODIED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def scored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A reward that a random model earns now and then: without any there is nothing to learn and to compare."""
    function = "def score(response, answer, metadata):\n    return float(len(response.encode()) % 3 == 0)\n"
    (folder / "length_score.py").write_text(function)
    monkeypatch.syspath_prepend(folder)
    return "reward.type=length_score:score"


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """command("embodied.yaml", "runner.max_steps=2"): `platform-launch` in this process, which saves its start."""
    from rl_platform.launch.cli import main

    yield from _in_this_process(main, "platform-launch", monkeypatch, capsys)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """tool("plot", "out"): `rl-platform` in this process."""
    from rl_platform.launch.cli import tools

    yield from _in_this_process(tools, "rl-platform", monkeypatch, capsys)


def _in_this_process(
    main: Callable[[], None], program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    from rl_platform.interrupts import SIGNALS

    hook = sys.unraisablehook
    before = {number: signal.getsignal(number) for number in SIGNALS}
    folders = set[Path]()

    def run(*arguments: str | Path) -> Ended:
        folders.add(Path.cwd())
        monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        return Ended(int(ended.value.code or 0), written.out, written.err)

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)
    sys.unraisablehook = hook
    for name, module in list(sys.modules.items()):  # the next test's folder may have a module of the same name
        if (file := getattr(module, "__file__", None)) and Path(file).parent in folders:
            del sys.modules[name]


@pytest.fixture
def closes() -> Iterator[Callable[[Any], Any]]:
    """closes(made): the same, which is closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda made: stack.enter_context(closing(made))


@pytest.fixture(scope="session")
def launchers() -> Iterator[Launchers]:
    """Starts `platform-launch` as processes of their own, without the seconds that imports take."""
    with Launchers() as started:
        yield started


@pytest.fixture
def start(folder: Path, launchers: Launchers) -> Iterator[Callable[..., Launcher]]:
    """start("embodied.yaml"): `platform-launch` as a process of its own, killed at the end if it still runs.

    output: a file for what it writes. code: another program that launches.
    """
    started: list[Launcher] = []

    def run(*arguments: str | Path, **options: Any) -> Launcher:
        started.append(launchers.start(folder, *map(str, arguments), **options))
        return started[-1]

    yield run
    for launcher in started:
        launcher.kill()
        launcher.wait()


@pytest.fixture(scope="session")
def ray_forks(launchers: Launchers) -> Iterator[RayForks]:
    with RayForks(launchers) as forks:
        yield forks


@pytest.fixture(scope="module")
def forked_workers(ray_forks: RayForks) -> Iterator[None]:
    """Ray that this process starts has workers that need not import."""
    with ray_forks.start_workers():
        yield


@pytest.fixture(scope="module")
def address(forked_workers: None) -> Iterator[str]:
    """A Ray cluster that the runs of this module join one after the other: none waits for a start of its own."""
    with ray_cluster(2, store_mib=256) as address:
        yield address


@pytest.fixture
def joins(address: str) -> str:
    """Of a run that joins this cluster."""
    return f"cluster.address={address}"


@pytest.fixture(scope="session", autouse=True)
def forked_environments() -> Iterator[None]:
    """Environment workers that this process starts are forks of one that has imported gymnasium and MuJoCo."""
    with forked_children("processes.worker_process", ENVIRONMENT_IMPORTS):
        yield


@pytest.fixture(scope="session")
def forked_runs() -> Iterator[None]:
    """Runs of rehearsals and sweeps that this process starts are forks of one that has imported for them."""
    with forked_children("launch.cli import main", RUN_IMPORTS, others=["TMPDIR", "TORCHINDUCTOR_CACHE_DIR"]):
        yield


@pytest.fixture(scope="session")
def forked_engines() -> Iterator[None]:
    """SGLang engines that this process starts are forks of one that has imported SGLang, which takes ten seconds."""
    with forked_children("rollout.sglang.program", ENGINE_IMPORTS, others=["SGLANG_CPU_OMP_THREADS_BIND"]):
        yield


@pytest.fixture(scope="session")
def drawing() -> dict[str, str]:
    """Environment variables with which this machine draws what MuJoCo simulates; the test is skipped without any."""
    from rl_platform.envs.embodied.descriptions import EnvDescription, PixelFormat
    from rl_platform.envs.embodied.pictures.drawing import CannotDraw, with_drawing
    from rl_platform.envs.embodied.vector import VectorEnv

    def start(variables: dict[str, str]) -> dict[str, str]:
        pendulum = EnvDescription("InvertedPendulum-v5", pixels=PixelFormat(24, 20))
        envs = VectorEnv(pendulum, 1, 1, worker_variables=variables)
        envs.reset([0])
        envs.close()
        return variables

    try:
        return with_drawing(True, start)
    except CannotDraw as error:
        pytest.skip(f"this machine draws nothing without a screen: {error}")


@pytest.fixture(scope="session")
def script() -> Callable[[Path], ModuleType]:
    """script(path): a file beside the tests as a module, although tests are no package."""
    return module_of


@pytest.fixture(scope="session")
def two_ranks(launchers: Launchers) -> Callable[[Path, Path], None]:
    """two_ranks(script, folder): `main(rank, folder)` of the script in two processes, until both have ended well."""

    def run(path: Path, folder: Path) -> None:
        Forked(path, launchers).run((2, folder, []), timeout=500)

    return run
