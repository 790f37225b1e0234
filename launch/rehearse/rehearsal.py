"""`platform-launch --rehearse`: runs a config for real, in small, on CPU workers of this machine."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from rl_platform.config import LoadedConfig, load_config
from rl_platform.config.rollout_backend import HOSTED
from rl_platform.config.schema import Config
from rl_platform.envs.reasoning.question import Split
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.errors import ConfigError, DataError, PlatformError, Problem
from rl_platform.interrupts import shutting_down
from rl_platform.launch.output import output_path
from rl_platform.launch.rehearse import findings, materials
from rl_platform.launch.rehearse.rehearsal_report import RehearsalReport, written_lines
from rl_platform.launch.rehearse.rehearsal_sizes import Materials
from rl_platform.launch.rehearse.rehearsed_runs import CpuSeconds, RunFailed, Runs, Timed
from rl_platform.launch.rehearse.scores import scoring_server
from rl_platform.launch.rehearse.shrink import Change, shrunk
from rl_platform.launch.rehearse.small_models import Architecture
from rl_platform.launch.start_checks.env_spaces import spaces_of
from rl_platform.launch.start_checks.preflight import rollout_engine_problems
from rl_platform.launch.start_checks.user_code_checks import check_tests
from rl_platform.placement.scheduler import Placement

DEADLINE_S = 1800.0  # of one of the two runs; waits inside them have deadlines of their own
_PREFIX, _LOCK = "rl-rehearse-", ".lock"  # of temporary folders, and a file in each
_JUST_MADE_S = 3600.0  # age up to which a folder without a lock file may be that of a rehearsal that starts
LEAST_FREE = 2**20  # bytes of a disk; with less it is full


def rehearse(loaded: LoadedConfig, placement: Placement, parent: str | None = None) -> None:
    """Rehearses a valid config and prints the report. parent: folder for the temporary files of the rehearsal.

    Raises the errors that a run would end with, and RehearsalFailed for functions of the user with wrong results.
    """
    config, console, began = loaded.config, Console(), time.monotonic()
    output = output_path(config)  # maybe on a disk that only the cluster has: no folder is made here for its report
    target = (output.parent if output.parent.is_dir() else Path.cwd()) / f"{output.name}-rehearsal"
    phases: list[Timed] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        start = time.monotonic()
        with console.status(name):
            yield
        phases.append(Timed(name, time.monotonic() - start))
        console.print(f"{name}: {phases[-1].seconds:.1f} s", highlight=False)

    with shutting_down(), ExitStack() as stack, CpuSeconds() as cpu:
        folder = stack.enter_context(_folder(parent))
        with phase("check sizes and functions"):
            known = materials.architectures(config)
            findings.check_sizes(config, placement, known)
            findings.check_functions(config)
            questions = _world(config)
        stands = _materials(config, known, folder, stack)
        runs = Runs(folder, DEADLINE_S, target.with_name(f"{target.name}.log"), cpu)
        with phase("write small models and data"):
            small, changes, missing = _write_small(config, placement, known, stands, runs.config)
        if config.runner.task_type == "reasoning":
            with phase("score a few responses"):
                findings.check_reward(config, questions or build_questions(small.data, small.runner.seed))
        try:
            with phase("start, first step, checkpoint"):
                runs.until_killed()
        except RunFailed as failure:
            if stands.backend not in HOSTED or " did not start: " not in failure.output:
                raise
            # it may be built for GPUs only
            reason = f"{stands.backend} does not start on the CPU of this machine, see {runs.kept.name}"
            stands = replace(stands, backend="torch", why_backend=reason)
            small, changes, missing = _write_small(config, placement, known, stands, runs.config)
            with phase("the same with the torch engine"):
                runs.until_killed()
        with phase("resume, second step, export"):
            runs.to_the_end()
        if unscored := sum(step.get("reward/unscored", 0.0) for step in runs.metrics()):
            raise RunFailed(f"{unscored:.0f} responses of the small run got no score (metric reward/unscored)", 70)
        inside = runs.inside()
    report = RehearsalReport(
        config.runner.experiment_name,
        written_lines(loaded, changes),
        _absent(loaded, placement, missing, stands),
        phases,
        inside,
        time.monotonic() - began,
        cpu.total(),
    )
    report.print(console)
    try:
        report.write(target)
    except OSError as error:
        console.print(f"the report was not written to {target}: {error.strerror}", soft_wrap=True, highlight=False)
    else:
        console.print(f"{target}.txt and .json", soft_wrap=True, highlight=False)


@contextmanager
def _folder(parent: str | None) -> Iterator[Path]:
    """Makes a temporary folder that is removed at the end."""
    try:
        _remove_stale(Path(parent or tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = _locked(folder)
    except OSError as error:
        key, value = ("--rehearse-in", parent) if parent else ("TMPDIR", tempfile.gettempdir())
        message = f"no folder can be made there: {error.strerror}"
        hint = "an existing folder that you may write to"
        raise ConfigError([Problem(key, message, value=value, hint=hint)]) from error
    try:
        yield folder
    except PlatformError:
        raise
    except Exception as error:  # a full disk: each library has an error of its own
        if shutil.disk_usage(folder).free >= LEAST_FREE:
            raise
        message = f"the disk of {folder} is full. Free space, or name a folder on another disk: --rehearse-in"
        raise DataError(message) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Locks the folder as long as this process lives, so that a later rehearsal does not take it for a stale one. None
    if another process holds the lock or there is no lock file."""
    try:
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def _remove_stale(parent: Path) -> None:
    """Deletes this user's folders of rehearsals that were killed. Those without a lock file may be just being made, so
    they count as stale after an hour."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            status = folder.lstat()
        except OSError:
            continue
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            continue
        if not (folder / _LOCK).exists() and time.time() - status.st_mtime < _JUST_MADE_S:
            continue
        if (lock := _locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _materials(config: Config, known: dict[str, Architecture], folder: Path, stack: ExitStack) -> Materials:
    engine = next(rollout_engine_problems(config, on_gpu=False), None)
    url = None
    servers = [url for _, part in config.reward.parts if (url := part.address)]
    if not all(map(_answers, servers)):
        url = stack.enter_context(scoring_server())
    return Materials(
        folder,
        real_tokenizer=materials.has_real_tokenizers(config, known),
        backend=config.rollout.backend if engine is None else "torch",
        why_backend="" if engine is None else f"{engine.value}: {engine.message}",
        megatron=importlib.util.find_spec("megatron") is not None,
        reward_url=url,
    )


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=2.0).close()
    except OSError:
        return False
    return True


def _write_small(
    config: Config, placement: Placement, known: dict[str, Architecture], stands: Materials, path: Path
) -> tuple[Config, list[Change], list[str]]:
    """Writes the small config to `path`, its models and questions. Returns it, its changes and the files that are not
    on this machine."""
    small, changes = shrunk(config, placement, stands)
    materials.write_models(config, known, stands, small.data.longest_sequence)
    missing = materials.write_questions(config, stands)
    path.write_text(LoadedConfig(small, {}).resolved_yaml(with_secrets=True), encoding="utf-8")
    try:
        load_config(path)
    except ConfigError as error:  # a mistake of this package, not of the user
        raise AssertionError(f"the small config breaks a rule that the config keeps: {error}") from error
    return small, changes, missing


def _world(config: Config) -> Split | None:
    """Builds the questions of the real run, or one of its environments. None: a file is not on this machine."""
    if config.runner.task_type == "embodied":
        spaces_of(config)
        return None
    files = [path for _, task in config.data.tasks for path in (task.path, task.val_path)]
    if not all(Path(path).exists() for path in files if path is not None):
        return None
    questions = build_questions(config.data, config.runner.seed)
    check_tests(config, questions)
    return questions


def _absent(loaded: LoadedConfig, placement: Placement, missing: list[str], stands: Materials) -> list[tuple[str, str]]:
    """Returns what a rehearsal on CPU workers of one machine does not show for this config."""
    config = loaded.config
    absent = [(path, "not on this machine: sums with the same columns stood in") for path in missing]
    absent += [("rollout.backend: auto", note.partition(" is ")[2]) for note in loaded.notes if "backend auto" in note]
    if not stands.real_tokenizer:
        absent.append(("tokenizer", "not on this machine: bytes and the model's special tokens stood in"))
    if stands.reward_url is not None:
        urls = ", ".join(url for _, part in config.reward.parts if (url := part.address))
        absent.append((f"reward.url: {urls}", "no answer: the rehearsal scored with a server of its own"))
    if placement.on_accelerators:
        absent += [("NCCL, CUDA IPC", "gloo and shared memory carried tensors"), ("GPU kernels, GPU memory", "CPU")]
    nodes = {slot.node for slots in placement.components.values() for slot in slots}
    if len(nodes) > 1:
        absent.append((f"{len(nodes)} nodes", "one machine: no network between processes"))
    return absent
