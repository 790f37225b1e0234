"""The PPO loop that embodied and reasoning runs share.

    sync weights -> collect (generate and score, or act and simulate) -> [reference log-probs] [log-probs] [values]
                 -> advantages and returns -> PF-PPO if asked -> [critic epochs] [actor epochs]
                 -> validate, log, checkpoint

Neighbours in brackets run side by side where their components share no device. What differs between the tasks is behind
`Task`; where components run is the runtime's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rl_platform.algorithms.advantages import advantages
from rl_platform.algorithms.kl import kl_controller, sequence_mean_kl
from rl_platform.algorithms.mismatch import mismatch_weights
from rl_platform.algorithms.pf_ppo import apply_pf_ppo, row_scores
from rl_platform.algorithms.rewards import penalized
from rl_platform.algorithms.summary import rollout_metrics
from rl_platform.algorithms.validation import check_batch
from rl_platform.config.schema import Config
from rl_platform.errors import Diverged
from rl_platform.interrupts import stopping_after_step
from rl_platform.metrics import Reporter
from rl_platform.records import RolloutBatch, WeightsReceived
from rl_platform.rng import generator
from rl_platform.runners.phases import Phase, Phases
from rl_platform.runners.rollouts import Collected, Rollouts
from rl_platform.runners.state import RunState
from rl_platform.runners.timings import ComponentTimings
from rl_platform.runners.turns import TakingTurns
from rl_platform.runtime.cpu import compute_alone
from rl_platform.runtime.worker_group import Handle, WorkerGroup

Metrics = dict[str, float]
# Above these NeMo-RL's own tests and guide call a run unhealthy.
MISMATCH_LIMITS = {"mismatch/prob_error": 1.05, "mismatch/k3": 1e-3}


@dataclass(frozen=True)
class Learners:
    """The worker groups that hold models. critic None: values come from the actor, or the estimator needs none;
    reference None: no KL terms, or they compare to the actor without its adapters, with `reference_is_base`.
    turns None: all are on the same devices, which nobody leaves for others."""

    actor: WorkerGroup
    critic: WorkerGroup | None = None
    reference: WorkerGroup | None = None
    reference_is_base: bool = False
    turns: TakingTurns | None = None


class Task(Protocol):
    """What a runner adds to the loop: where experience comes from and what validation means."""

    learners: Learners
    groups: Mapping[str, WorkerGroup]

    def sync_weights(self, version: int) -> Metrics:
        """The rollout uses the actor's weights as they are now."""

    def collect(self, step: int) -> Collected:
        """One rollout batch, scored."""

    def validate(self, step: int) -> Metrics: ...

    def exhausted(self) -> bool:
        """Whether the data is used up (`runner.max_epochs`)."""

    def learned_parts(self) -> Mapping[str, WorkerGroup]:
        """Components that are trained, by the name of their checkpoint part: all their ranks write it."""

    def parts(self) -> Mapping[str, WorkerGroup]:
        """Other components with state, by the name of their checkpoint part."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def finish(self) -> None:
        """After the last step: exports, videos."""


def train(config: Config, task: Task, reporter: Reporter, state: RunState) -> None:
    """Run PPO steps until `runner.max_steps`, from the step `state` was resumed at.

    After a signal, saves at the end of the step and raises Interrupted.
    """
    if config.runner.task_type == "embodied":
        compute_alone()  # some thousand numbers a step: waking a team for them takes longer than computing
    ppo = PPO(config, task.learners, reporter)
    rollouts = Rollouts(task, ahead=config.runner.max_staleness > 0)
    with reporter.phase("load"):
        step, steps = state.restore(task, ppo, rollouts), config.runner.max_steps
    with reporter.phase("sync weights"):
        task.sync_weights(ppo.version(step))
    timings = ComponentTimings(config, task.groups)
    if step == 0:
        reporter.step(0, validate(task, reporter, 0))
    last = step >= steps or (task.exhausted() and not rollouts.pending)
    with stopping_after_step(config.runner.stop_grace_s, reporter.note) as stop:
        while not last:
            stop.step = step + 1
            rollout = rollouts.take(step)
            if step + 1 < steps and not task.exhausted():
                rollouts.begin(step + 1)
            metrics = rollout.metrics | ppo.update(rollout.batch, step)
            step += 1
            reporter.samples(step, rollout.samples)
            rollouts.settle()
            if ppo.trains_actor(step - 1):
                with reporter.phase("sync weights"):
                    metrics |= task.sync_weights(ppo.version(step))
            last = step >= steps or (task.exhausted() and not rollouts.pending)
            if last or due(step, config.runner.val_check_interval):
                metrics |= validate(task, reporter, step)
            reporter.step(step, metrics | timings.since_last())
            stopped = stop.due()
            if last or stopped or due(step, config.runner.save_interval):
                with reporter.phase("checkpoint"):
                    state.save(step, task, ppo, rollouts)
            last = last or stopped
    task.finish()


def validate(task: Task, reporter: Reporter, step: int) -> Metrics:
    with reporter.phase("validate"):
        return task.validate(step)


def sync_metrics(received: Sequence[WeightsReceived]) -> Metrics:
    """What the rollout's ranks got from other processes, all of them together."""
    return {
        "weights/bytes": float(sum(found.bytes for found in received)),
        "weights/buckets": float(sum(found.buckets for found in received)),
    }


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


class PPO:
    """From a scored rollout batch to updated models."""

    def __init__(self, config: Config, learners: Learners, reporter: Reporter) -> None:
        self.algorithm, self.learners, self.reporter = config.algorithm, learners, reporter
        self.phases = Phases(config, learners.turns, reporter)
        self.seed, self.warned_of_mismatch = config.runner.seed, False
        self.kl_controller = kl_controller(config.algorithm.kl_ctrl)
        # the correction gives weight 0 to what is not finite, and counts it
        self.tolerated = ("rollout_log_probs",) if config.algorithm.rollout_is is not None else ()

    def trains_actor(self, step: int) -> bool:
        return step >= self.algorithm.policy_training_start_step

    def version(self, step: int) -> int:
        """Of the actor's weights at the beginning of `step`: how many updates made them."""
        return max(0, step - self.algorithm.policy_training_start_step)

    def update(self, batch: RolloutBatch, step: int) -> Metrics:
        """All of PPO step `step` (from 0) after collection.

        Raises Diverged when no action in the batch counts or its numbers are not finite, DataError when its fields do
        not belong together.
        """
        check_batch(batch, self.tolerated)
        if not bool(batch.mask.any()):
            raise Diverged(
                f"step {step}: no action of the rollout counts, so there is nothing to learn from: all responses were "
                "masked out, without a score or truncated (algorithm.overlong.filter)"
            )
        scores = row_scores(batch.rewards, batch.mask) if self.algorithm.use_pf_ppo else None  # without a KL penalty
        batch, metrics = self._estimate(batch)
        recomputed = self.algorithm.old_log_probs == "recompute"
        metrics |= rollout_metrics(batch if recomputed else replace(batch, log_probs=None))  # nothing to compare
        if batch.versions is not None:
            age = (self.version(step) - batch.versions).float()
            metrics |= {"staleness/mean": age.mean().item(), "staleness/max": age.max().item()}
        if metrics.get("staleness/max", 0.0) == 0.0:
            self._warn_of_mismatch(metrics)
        if (correction := self.algorithm.rollout_is) is not None:
            weights, measured = mismatch_weights(batch.log_probs, batch.rollout_log_probs, batch.mask, correction)
            batch = replace(batch, loss_weights=weights)
            metrics |= measured
        if scores is not None:
            batch, found = apply_pf_ppo(batch, scores, self.algorithm.pf_ppo, generator(self.seed, "pf_ppo", step))
            metrics |= found
        if batch.ends is not None:
            batch = batch.flatten()
        actor, critic = self.learners.actor, self.learners.critic
        training: list[Phase] = []
        if critic is not None:
            training.append(Phase("train critic", "critic", lambda _: critic.update(batch, step)))
        if self.trains_actor(step):
            kept = batch
            if correction is not None and correction.denominator == "kept":
                kept = without_rejected(batch, values_too=critic is None)
            training.append(Phase("train actor", "actor", lambda _: actor.update(kept, step)))
        return metrics | self.phases.run(training)

    def _estimate(self, batch: RolloutBatch) -> tuple[RolloutBatch, Metrics]:
        """The batch with log-probs, values, advantages and returns. What the collection has evaluated stays."""
        metrics: Metrics = {}
        if self.algorithm.old_log_probs == "rollout":
            batch = replace(batch, log_probs=batch.rollout_log_probs)
        batch = replace(batch, **self.phases.run(self._evaluations(batch)))
        check_batch(batch, self.tolerated)  # before a KL penalty spreads what is wrong with log-probs into the rewards
        if self.algorithm.use_kl_in_reward:
            coefficient = self.kl_controller.coefficient
            batch, kl = penalized(batch, self.algorithm, coefficient)
            measured = sequence_mean_kl(kl, batch.mask)
            self.kl_controller.update(measured, len(batch))
            metrics |= {"reward/kl": measured, "reward/kl_coef": coefficient}
        if not self.algorithm.full_kl_in_loss:
            batch = replace(batch, reference_states=None)  # large, and the updates would compare to it for nothing
        with self.reporter.phase("advantages"):
            estimated, returns = advantages(batch, self.algorithm)
        if batch.ends is None:  # what only the estimator reads; `flatten` drops it elsewhere
            batch = replace(batch, bootstrapped=None, end_values=None)
        batch = replace(batch, advantages=estimated, returns=returns, kl_penalties=None)
        check_batch(batch, self.tolerated)
        return batch, metrics

    def _evaluations(self, batch: RolloutBatch) -> list[Phase]:
        """The reference first: a full KL is measured by the actor, from the reference's states."""
        learners, phases = self.learners, []
        if learners.reference is not None and batch.reference_log_probs is None:
            phases.append(_evaluation("reference", "reference", learners.reference.evaluate, batch))
        if learners.reference_is_base:
            phases.append(_evaluation("reference", "actor", learners.actor.evaluate_reference, batch))
        if self.algorithm.old_log_probs == "recompute" and batch.log_probs is None:
            phases.append(_evaluation("log-probs", "actor", learners.actor.evaluate, batch))
        if learners.critic is not None and batch.values is None:
            phases.append(_evaluation("values", "critic", learners.critic.evaluate, batch))
        return phases

    def _warn_of_mismatch(self, metrics: Metrics) -> None:
        """Once in a run: the two engines differ by more than rounding does."""
        passed = {name: metrics[name] for name, limit in MISMATCH_LIMITS.items() if metrics.get(name, 0.0) > limit}
        if passed and not self.warned_of_mismatch:
            self.warned_of_mismatch = True
            found = ", ".join(f"{name} {value:.3g} (limit {MISMATCH_LIMITS[name]:g})" for name, value in passed.items())
            advice = "" if self.algorithm.rollout_is else "; algorithm.rollout_is corrects for it"
            message = "rollout and training engine give the same tokens different probabilities"
            self.reporter.note(f"{message}: {found}{advice}")

    def state_dict(self) -> dict[str, Any]:
        return {"kl_controller": self.kl_controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_controller.load_state_dict(state["kl_controller"])


def without_rejected(batch: RolloutBatch, *, values_too: bool) -> RolloutBatch:
    """The batch whose policy terms count positions with a weight only. `values_too`: the batch trains a value head as
    well, whose loss still counts every position."""
    assert batch.loss_weights is not None
    weighted = batch.loss_weights > 0
    found = replace(batch, action_mask=batch.action_mask & weighted)
    if batch.entropy_units is not None:
        found = replace(found, entropy_units=batch.entropy_units * weighted)
    if values_too and batch.values is not None and batch.value_mask is None:
        found = replace(found, value_mask=batch.action_mask)
    return found


def _evaluation(name: str, component: str, call: Callable[[RolloutBatch], Handle], batch: RolloutBatch) -> Phase:
    return Phase(name, component, lambda known: call(replace(batch, **known)))
