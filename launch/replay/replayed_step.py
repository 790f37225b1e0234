"""Runs a recorded PPO step again on the CPU of this machine, in one process, and compares its numbers.

Only the models are started: no rollout, reward or environment. A recording of several ranks or of a GPU is replayed by
one rank of plain torch, whose numbers differ by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from torch import Tensor

from rl_platform.components.actor import EmbodiedActor
from rl_platform.components.critic import LanguageCritic
from rl_platform.components.reference import LanguageReference
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import Cluster
from rl_platform.config.schema.models import Parallel
from rl_platform.errors import ConfigError, PlatformError, Problem
from rl_platform.launch.replay.engine_difference import (
    ComparedActor,
    ComparedActorGroup,
    LayerDifferences,
    explanation,
    worst_row,
)
from rl_platform.launch.replay.recorded_step import EVALUATED, PHASES, Numbers, RecordedPPO, batch_of, without_phases
from rl_platform.launch.replay.recordings import StepRecording
from rl_platform.launch.runtime_choice import runtime_for
from rl_platform.launch.start_checks.env_spaces import spaces_of
from rl_platform.placement.estimates.recomputation import with_recomputation
from rl_platform.placement.grammar import read
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.scheduler import schedule
from rl_platform.records import StateDict
from rl_platform.reporter import Reporters
from rl_platform.runners.task_runner import Learners
from rl_platform.runtime import ComponentSpec, Runtime
from rl_platform.runtime.cpu import compute_alone


class NumbersDiffer(PlatformError):
    """A replay gave other numbers than its recording."""

    exit_code = 1


@dataclass(frozen=True)
class Difference:
    """largest: of the absolute differences, infinite where only one of two numbers is finite; at: its index."""

    phase: str
    name: str
    largest: float
    at: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        place = f"{self.name}{self.at}"
        return (
            f"{self.phase}: {place}: recorded {self.recorded}, replayed {self.replayed} (difference {self.largest:.3g})"
        )


def replay(folder: Path, phase: str | None, tolerance: float) -> Iterator[str]:
    """Yields lines for the terminal. Raises NumbersDiffer if a difference is larger than `tolerance`."""
    recording = StepRecording.open(folder)
    recorded, error = recording.record["numbers"], recording.record["error"]
    yield f"step {recording.step} of {recording.config.runner.experiment_name}, {phase or 'all phases'}"
    if error:
        yield f"the recorded step failed: {error}"
    if (first := first_not_finite(recording.record)) is not None:
        yield f"first number that is not finite: {first}"
    expected = {name: values for name, values in recorded.items() if phase is None or _belongs(name, phase)}
    if not expected:
        allowed = ", ".join(_phases_of(recording))
        raise ConfigError(
            [Problem("--phase", "the recorded step has no such phase", value=str(phase), allowed=allowed)]
        )
    _check_models(recording, phase)
    with TemporaryDirectory() as scratch:
        replayed, replayed_error, layers = numbers_of(recording, phase, Path(scratch))
    differences = []
    for name, values in expected.items():
        parted = list(compare(name, values, replayed.get(name, {})))
        differences += parted
        largest = max((one.largest for one in parted), default=0.0)
        state = "equal" if not parted else f"{len(parted)} differ, by at most {largest:.3g}"
        yield f"  {name:32} {len(values):4} tensors   {state}"
    batch, log_probs = batch_of(recording.record["inputs"]), recorded.get("log-probs", {}).get("log_probs")
    if log_probs is not None and phase in (None, "log-probs") and recording.config.runner.task_type == "reasoning":
        yield from explanation(recording.config, batch, log_probs, layers)
    if phase is None and bool(replayed_error) != bool(error):  # the texts name files of the failure
        yield f"the replayed step {'failed: ' + replayed_error if replayed_error else 'did not fail'}"
        if not differences:
            raise NumbersDiffer("the step ended otherwise than it was recorded")
    beyond = [one for one in differences if one.largest > tolerance]
    if beyond:
        raise NumbersDiffer(f"first difference: {beyond[0]}")
    yield "all numbers are equal" if not differences else f"all differences are at most {tolerance:g}"


def _check_models(recording: StepRecording, phase: str | None) -> None:
    """Raises ConfigError if the state of a model before the step is not known."""
    models = ["actor", "critic"] if recording.config.critic.use_critic_model else ["actor"]
    of_phase = {"advantages": [], "critic": ["critic"], "values": models[-1:], None: models}

    def unknown(name: str | None) -> list[str]:
        return [] if recording.models is None else sorted({*of_phase.get(name, ["actor"])} - {*recording.models})

    if missing := unknown(phase):
        message = (
            f"the step had changed the {' and the '.join(missing)} before it failed, and no checkpoint precedes it"
        )
        allowed = ", ".join(name for name in _phases_of(recording) if not unknown(name))
        hint = f"rl-platform record RUN --step {recording.step} records it whole"
        raise ConfigError([Problem("--phase", message, value=phase or "all", allowed=allowed, hint=hint)])


def numbers_of(
    recording: StepRecording, phase: str | None, scratch: Path
) -> tuple[Numbers, str, LayerDifferences | None]:
    """Runs the step, or one phase from the recorded results of those before it. Returns numbers and error, and the
    layers of both engines in the row whose log-probs differ most.

    A failed step writes files into `scratch`.
    """
    config = on_this_cpu(recording.config, scratch)
    if config.runner.task_type == "embodied":
        compute_alone()
    placement = schedule(config.cluster, inventory := inventory_for(config.cluster))
    config = with_recomputation(config, placement, inventory)
    kept: list[StateDict] = []
    only = phase if phase in ("critic", "actor") else None
    with closing(Reporters([])) as reporter, runtime_for(config, placement) as runtime:
        learners = _learners(config, runtime, recording, placement.layout.policy)
        step = recording.step - 1
        ppo = RecordedPPO(config, learners, reporter, step, kept.append, only)
        ppo.load_state_dict(recording.record["ppo"])
        batch, error, layers = batch_of(recording.record["inputs"]), "", None
        log_probs = _numbers(recording, "log-probs").get("log_probs")
        if log_probs is not None and phase in (None, "log-probs") and config.runner.task_type == "reasoning":
            row = worst_row(batch, log_probs)
            layers = None if row is None else cast(ComparedActorGroup, learners.actor).layers(row).wait()[0]
        try:
            if phase is None:
                ppo.update(without_phases(batch, tuple(EVALUATED)), step)
            elif only is not None:
                if "training" in recording.record:
                    ppo._train(batch_of(recording.record["training"]), step)
            else:
                evaluated = {key: value for name in EVALUATED for key, value in _numbers(recording, name).items()}
                vars(batch).update(evaluated)
                ppo.record = {"numbers": ppo.numbers}
                if phase == "advantages":
                    batch, _ = ppo._penalize(batch)
                    batch, _ = ppo._correct_mismatch(batch)
                    ppo._estimate(batch)
                else:
                    embodied = config.runner.task_type == "embodied"  # one forward gives log-probs and values
                    ppo._evaluate(without_phases(batch, ("log-probs", "values") if embodied else (phase,)))
        except PlatformError as failed:
            error = str(failed)
        return dict(ppo.numbers), error, layers


def on_this_cpu(config: Config, output: Path) -> Config:
    """Returns the config with its models in one process on the CPU, and without the parts that generate."""
    alone = {"parallel": Parallel(), "offload": False, "cpu_offload": False, "training_backend": "fsdp"}
    placed, _ = read(config.cluster.component_placement)
    names = ["actor_critic" if any("actor_critic" in entry.components for entry in placed) else "actor"]
    names += ["critic"] if config.critic.use_critic_model else []
    names += ["reference"] if config.has_reference else []
    return config.changed(
        {
            "runner.output_dir": str(output),
            "cluster": Cluster(component_placement={",".join(names): "0"}, runtime="local"),
            "actor.device": "cpu",
            **{f"{role}.{name}": value for role in ("actor", "critic") for name, value in alone.items()},
            "reference.offload": False,
        }
    )


def _learners(config: Config, runtime: Runtime, recording: StepRecording, actor: str) -> Learners:
    """Starts the models with the state before the step. actor: the component that trains the policy."""
    if config.runner.task_type == "embodied":
        specs = {actor: ComponentSpec(EmbodiedActor, {"config": config, "spaces": spaces_of(config)})}
    else:
        specs = {actor: ComponentSpec(ComparedActor, {"config": config})}
        if config.critic.use_critic_model:
            specs["critic"] = ComponentSpec(LanguageCritic, {"config": config})
        if config.has_reference:
            specs["reference"] = ComponentSpec(LanguageReference, {"config": config})
    groups = runtime.start(specs)
    if config.has_reference and config.algorithm.full_kl:
        groups[actor].receive_reference_head(groups["reference"].head().wait()[0]).wait()
    if recording.before is not None:
        for part, name in (("actor", actor), ("critic", "critic")):
            if name in groups and part in recording.before.parts:
                groups[name].load_state(str(recording.before.file(part))).wait()
    base = groups[actor] if config.reference_is_base else None
    return Learners(groups[actor], groups.get("critic"), groups.get("reference"), base)


def _numbers(recording: StepRecording, phase: str) -> dict[str, Tensor]:
    numbers: dict[str, Tensor] = recording.record["numbers"].get(phase, {})
    return numbers


def _phases_of(recording: StepRecording) -> list[str]:
    """Returns the phases that the recorded step has run, at least in part."""
    return [name for name in PHASES if any(_belongs(key, name) for key in recording.record["numbers"])]


def _belongs(name: str, phase: str) -> bool:
    return name == phase or name.startswith(f"train {phase},")


def compare(phase: str, recorded: dict[str, Tensor], replayed: dict[str, Tensor]) -> Iterator[Difference]:
    """Yields the tensors that are not equal bit by bit, NaN being equal to NaN."""
    for name, ours in recorded.items():
        theirs = replayed.get(name)
        if theirs is None or theirs.shape != ours.shape:
            shown = "nothing" if theirs is None else f"shape {list(theirs.shape)}"
            yield Difference(phase, name, float("inf"), "", f"shape {list(ours.shape)}", shown)
            continue
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        if bool(same.all()):
            continue
        gap = (ours.double() - theirs.double()).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0.0)
        at = torch.unravel_index(gap.argmax(), gap.shape)
        index = [int(axis) for axis in at]
        values = (f"{tensor[tuple(index)].item():.9g}" for tensor in (ours, theirs))
        yield Difference(phase, name, float(gap.max()), str(index) if index else "", *values)


def first_not_finite(record: StateDict) -> str | None:
    """Returns the first number of a record, in the order of the step, that is infinite or NaN."""
    for phase, values in {"inputs": record["inputs"], **record["numbers"]}.items():
        for name, tensor in values.items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                return f"{phase}: {name}{(~tensor.isfinite()).nonzero()[0].tolist()}"
            if name == "gradient_not_finite":
                return f"{phase}: its gradient"
    return None
