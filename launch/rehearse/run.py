"""`platform-launch --rehearse`: runs a config for real, in small, on CPU workers of this machine."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from rl_platform.config import LoadedConfig, load_config
from rl_platform.config.schema import Config
from rl_platform.envs.reasoning.question import Split
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.errors import ConfigError, Problem
from rl_platform.interrupts import shutting_down
from rl_platform.launch.output import output_path
from rl_platform.launch.rehearse import findings, materials
from rl_platform.launch.rehearse.report import RehearsalReport
from rl_platform.launch.rehearse.runs import RunFailed, Runs, Timed
from rl_platform.launch.rehearse.scores import scoring_server
from rl_platform.launch.rehearse.shrink import Materials, flat, shrunk
from rl_platform.launch.session import spaces_of
from rl_platform.placement.scheduler import Placement

DEADLINE_S = 300.0  # of one of the two runs


def rehearse(loaded: LoadedConfig, placement: Placement, parent: str | None = None) -> None:
    """Rehearses a valid config and prints the report. parent: folder for the temporary files of the rehearsal.

    Raises the errors that a run would end with, and RehearsalFailed for functions of the user with wrong results.
    """
    config, console, began = loaded.config, Console(), time.monotonic()
    phases: list[Timed] = []

    with shutting_down(), ExitStack() as stack:
        folder = stack.enter_context(_folder(parent))

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            start = time.monotonic()
            with console.status(name):
                yield
            phases.append(Timed(name, time.monotonic() - start))
            console.print(f"{name}: {phases[-1].seconds:.1f} s", highlight=False)

        with phase("check sizes and functions"):
            known = materials.architectures(config)
            findings.check_sizes(config, placement, known)
            findings.check_functions(config)
            questions = _world(config)
        with phase("write small models and data"):
            stands = _materials(config, known, folder, stack)
            small, changes = shrunk(config, placement, stands)
            longest = small.data.max_prompt_length + small.data.max_response_length
            materials.write_models(config, known, stands, longest)
            missing = materials.write_questions(config, stands)
            path = folder / "config.yaml"
            path.write_text(LoadedConfig(small, {}).resolved_yaml(), encoding="utf-8")
            _check_small(path)
        if config.runner.task_type == "reasoning":
            with phase("score a few responses"):
                findings.check_reward(config, questions or build_questions(small.data, small.runner.seed))
        runs = Runs(folder, path, DEADLINE_S)
        with phase("start, first step, checkpoint"):
            runs.until_killed()
        with phase("resume, second step, export"):
            runs.to_the_end()
        unscored = sum(step.get("reward/unscored", 0.0) for step in runs.metrics())
        if unscored:
            raise RunFailed(f"{unscored:.0f} responses of the small run got no score (metric reward/unscored)", 70)
        phases += _inside(runs)
        written = [(key, where) for key, where in loaded.sources.items() if key in flat(config.model_dump(mode="json"))]
        changed = {each.key for each in changes}
        report = RehearsalReport(
            config.runner.experiment_name,
            [(key, where) for key, where in written if key not in changed],
            changes,
            _absent(loaded, placement, missing, stands),
            phases,
            time.monotonic() - began,
        )
    report.print(console)
    target = output_path(config).with_name(f"{output_path(config).name}-rehearsal.txt")
    try:
        report.write(target)
    except OSError as error:
        console.print(f"the report was not written to {target}: {error.strerror}", soft_wrap=True, highlight=False)
    else:
        console.print(str(target), soft_wrap=True, highlight=False)


@contextmanager
def _folder(parent: str | None) -> Iterator[Path]:
    """A temporary folder that is removed at the end."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="rl-rehearse-", dir=parent))
    except OSError as error:
        key, value = ("--rehearse-in", parent) if parent else ("TMPDIR", tempfile.gettempdir())
        message = f"no folder can be made there: {error.strerror}"
        hint = "an existing folder that you may write to"
        raise ConfigError([Problem(key, message, value=value, hint=hint)]) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _materials(config: Config, known: dict[str, materials.Architecture], folder: Path, stack: ExitStack) -> Materials:
    wanted = config.rollout.backend
    installed = wanted in ("auto", "torch") or importlib.util.find_spec(wanted) is not None
    url = None
    if config.reward.type == "http" and not _answers(config.reward.url or ""):
        url = stack.enter_context(scoring_server())
    return Materials(
        folder,
        real_tokenizer=materials.has_real_tokenizers(config, known),
        backend=wanted if installed else "torch",
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


def _check_small(path: Path) -> None:
    """Loads the small config as its run will. A problem in it is one of the rules of this package."""
    try:
        load_config(path)
    except ConfigError as error:
        raise AssertionError(f"the small config breaks a rule that the config keeps: {error}") from error


def _inside(runs: Runs) -> list[Timed]:
    """The seconds of the phases inside the runs, over all steps."""
    seconds: dict[str, float] = {}
    for step in runs.metrics():
        for name, value in step.items():
            if name.startswith("time/") and name != "time/step":
                seconds[name.removeprefix("time/")] = seconds.get(name.removeprefix("time/"), 0.0) + value
    return [Timed(f"  {name}", value) for name, value in seconds.items()]


def _world(config: Config) -> Split | None:
    """Builds what the real run asks: its questions, or one of its environments. None: a file is not on this machine."""
    if config.runner.task_type == "embodied":
        spaces_of(config)
        return None
    task = config.data.task
    files = () if task is None or task.type != "jsonl" else (task.path, task.val_path)
    if not all(Path(path).is_file() for path in files if path is not None):
        return None
    return build_questions(config.data, config.runner.seed)


def _absent(loaded: LoadedConfig, placement: Placement, missing: list[str], stands: Materials) -> list[tuple[str, str]]:
    """What a rehearsal on CPU workers of one machine does not show for this config."""
    config = loaded.config
    absent = [(path, "not on this machine: sums with the same columns stood in") for path in missing]
    absent += [("rollout.backend: auto", note.partition(" is ")[2]) for note in loaded.notes if "backend auto" in note]
    if not stands.real_tokenizer:
        absent.append(("tokenizer", "not on this machine: bytes and the model's special tokens stood in"))
    if stands.reward_url is not None:
        absent.append((f"reward.url: {config.reward.url}", "no answer: a server of the rehearsal scored"))
    gpus = any(placement.accelerators.values()) and not placement.emulated
    if gpus:
        absent += [("NCCL, CUDA IPC", "gloo and shared memory carried tensors"), ("GPU kernels, GPU memory", "CPU")]
    nodes = {slot.node for slots in placement.components.values() for slot in slots}
    if len(nodes) > 1:
        absent.append((f"{len(nodes)} nodes", "one machine: no network between processes"))
    return absent
