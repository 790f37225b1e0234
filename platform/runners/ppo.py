"""The PPO loop that embodied and reasoning runs share.

    sync weights -> collect (generate and score, or act and simulate) -> [reference log-probs] [log-probs] [values]
                 -> advantages and returns -> PF-PPO if configured -> [critic epochs] [actor epochs]
                 -> validate, log, checkpoint

Neighbours in brackets run side by side where their components share no device. `train` is the loop, `PPO.update` one
step of it from a rollout batch to updated models, and `TaskRunner` what differs between the two tasks. The mathematics
is in `rl_platform.algorithms`; the runtime decides in which processes components run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from rl_platform.algorithms.advantages import VARIANTS, advantages, reverse_kl
from rl_platform.algorithms.groups import outcome_scores
from rl_platform.algorithms.kl import KLController, sequence_mean_kl
from rl_platform.algorithms.rewards import penalized
from rl_platform.algorithms.rollout_metrics import rollout_metrics
from rl_platform.algorithms.statistics import masked_mean
from rl_platform.algorithms.validation import check_batch
from rl_platform.config.schema import Config
from rl_platform.errors import Diverged
from rl_platform.extras import required
from rl_platform.interrupts import stopping_after_step
from rl_platform.records import RolloutBatch, StateDict, Weights
from rl_platform.reporter import Reporter
from rl_platform.rng import generator
from rl_platform.runners.component_groups import ActorGroup, LearnerGroup, ReferenceGroup
from rl_platform.runners.phases import ComponentTimings, Phase, Phases, TakingTurns
from rl_platform.runners.recovery import EnvPart
from rl_platform.runners.rollouts import Collected, Rollouts
from rl_platform.runners.state import RunState
from rl_platform.runners.step_callbacks import Callback, stopped_by
from rl_platform.runners.stragglers import Stragglers
from rl_platform.runners.utilization import Utilization
from rl_platform.runtime.cpu import compute_alone
from rl_platform.runtime.weights_token import WeightsToken
from rl_platform.runtime.worker_group import Handle, WorkerGroup

Metrics = dict[str, float]
MakePPO = Callable[[Config, "Learners", Reporter], "PPO"]
LEFT = "left"  # result of `train` if the run moves to another placement
# The tests and the guide of NeMo-RL call a run above these values unhealthy.
MISMATCH_LIMITS = {"mismatch/prob_error": 1.05, "mismatch/k3": 1e-3}


@dataclass(frozen=True)
class Learners:
    """The worker groups that hold models.

    critic None: values come from the actor, or the estimator needs none. reference None: there are no KL terms, or with
    `reference_is_base` they compare to the actor without its adapters. turns None: all are on the same devices and stay
    there.
    """

    actor: ActorGroup
    critic: LearnerGroup | None = None
    reference: ReferenceGroup | None = None
    reference_is_base: bool = False
    turns: TakingTurns | None = None


class TaskRunner(Protocol):
    """The interface of the two tasks: collection of experience, validation, and parts of a checkpoint."""

    learners: Learners
    groups: Mapping[str, WorkerGroup]

    def warm_start(self) -> Metrics:
        """Trains the new models before the first step (`runner.warm_start`)."""

    def publish(self, version: int) -> Weights | WeightsToken:
        """Returns the present weights of the actor. They stay readable while the models are trained."""

    def receive(self, weights: Weights | WeightsToken) -> Metrics:
        """Sends published weights to the rollout."""

    def update(self, weights: Weights | WeightsToken) -> bool:
        """Sends published weights to the rollout while it generates; returns False if it does not generate."""

    def collect(self, step: int) -> Collected:
        """Returns one rollout batch, scored."""

    def trained(self, batch: RolloutBatch) -> Metrics:
        """Counts the rows of `batch` after its update; returns metrics of the responses that are in flight."""

    def check_samples(self, waiting: Sequence[RolloutBatch]) -> None:
        """Compares the counts while nothing is generated. waiting: rollouts that were collected and not trained on.

        Raises Unaccounted if responses were lost or trained on twice.
        """

    def validate(self, step: int) -> Metrics: ...

    def log_tokens(self, step: int, batch: RolloutBatch) -> None:
        """Reports the tokens of a batch that was trained on."""

    def exhausted(self) -> bool:
        """Returns whether the data is used up (`runner.max_epochs`)."""

    def learned_parts(self) -> Mapping[str, WorkerGroup]:
        """Components that are trained, by the name of their checkpoint part: all their ranks write it."""

    def parts(self) -> Mapping[str, EnvPart]:
        """Returns the other components with state, by the name of their checkpoint part."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...

    def finish(self, step: int) -> None:
        """Writes the trained model after the last step."""


def train(
    config: Config,
    runner: TaskRunner,
    reporter: Reporter,
    state: RunState,
    callbacks: Sequence[Callback] = (),
    ppo_of: MakePPO | None = None,
    leaves: Callable[[int], bool] = lambda step: False,
) -> str:
    """Runs PPO steps from the step of `state` until `runner.max_steps` or until a callback returns True.

    ppo_of: makes the object that updates the models; None: `PPO`. leaves: called after each step but the last one;
    True: the loop saves the step and returns LEFT, and the run can go on with other worker groups.

    Returns what ended the run: `max_steps`, `max_epochs` or `callback NAME`. After a signal or the error of a callback,
    saves the step and raises Interrupted or that error.
    """
    if config.runner.task_type == "embodied":
        compute_alone()  # a step computes a few thousand numbers here; starting a thread pool would take longer
    ppo = (ppo_of or PPO)(config, runner.learners, reporter)
    steps = config.runner.max_steps
    rollouts = Rollouts(runner, config.runner.max_staleness, steps, config.updates_at_once)
    with reporter.phase("load"):
        step = state.restore(runner, ppo, rollouts)
        runner.check_samples([rollout.batch for rollout in rollouts.ready])
    started = runner.warm_start() if step == 0 else {}
    with reporter.phase("sync weights"):
        rollouts.start(step, ppo.version(step))
    stragglers = Stragglers(runner.groups, reporter.note)
    timings, utilization = ComponentTimings(config, runner.groups), Utilization(config, runner.groups)
    untrained = started | validate(runner, reporter, 0) if step == 0 else None

    def save() -> None:
        with reporter.phase("checkpoint"):
            rollouts.settle()
            runner.check_samples([rollout.batch for rollout in rollouts.ready])
            state.save(step, runner, ppo, rollouts)

    reason = ""
    last = not rollouts.more(step)
    with stopping_after_step(config.runner.stop_grace_s, reporter.note) as stop:
        if untrained is not None:
            stop.step = 1
            reporter.step(0, untrained)
        while not last:
            stop.step = step + 1
            # 1. collect a rollout; with staleness, the next ones are collected during the update
            rollout = rollouts.take(step)
            # 2. advantages and returns, critic epochs, actor epochs
            metrics = rollout.metrics | ppo.update(rollout.batch, step)
            metrics |= utilization.metrics(rollout.batch, ppo.trains_actor(step)) | runner.trained(rollout.batch)
            step += 1
            reporter.samples(step, rollout.samples)
            # 3. send the new weights to the rollout
            if ppo.trains_actor(step - 1):
                with reporter.phase("sync weights"):
                    metrics |= rollouts.publish(step, ppo.version(step))
            # 4. validate, log, checkpoint
            last = not rollouts.more(step)
            validates = last or due(step, config.runner.val_check_interval)
            if validates:
                rollouts.settle()
            if rollout.samples and ppo.logged is not None and (step == 1 or validates):
                with reporter.phase("log tokens"):
                    runner.log_tokens(step, ppo.logged)
            if validates:
                metrics |= validate(runner, reporter, step)
            reporter.step(step, metrics | timings.since_last())
            try:
                if stopping := stopped_by(callbacks, step, metrics):
                    reason, last = f"callback {', '.join(stopping)}", True
                    reporter.note(f"stopped after step {step} by {reason}")
            except BaseException:
                save()
                raise
            stragglers.look()
            left = not (last or stop.due()) and leaves(step)
            stopped = stop.due()  # also by a signal during `leaves`, which may take seconds
            if last or stopped or left or due(step, config.runner.save_interval):
                save()
            if left:
                return LEFT
            last = last or stopped
    runner.finish(step)
    return reason or ("max_steps" if step >= steps else "max_epochs")


def validate(runner: TaskRunner, reporter: Reporter, step: int) -> Metrics:
    with reporter.phase("validate"):
        return runner.validate(step)


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


class PPO:
    """Updates the models with a scored rollout batch."""

    def __init__(self, config: Config, learners: Learners, reporter: Reporter) -> None:
        self.algorithm, self.learners, self.reporter = config.algorithm, learners, reporter
        self.phases = Phases(config, learners.turns, reporter)
        self.seed, self.warned_of_mismatch = config.runner.seed, False
        self.log_samples = config.runner.log_samples
        self.logged: RolloutBatch | None = None  # the first rows of the last update, of a reasoning run
        self.kl_controller = KLController(config.algorithm.kl_ctrl)
        # the correction gives weight 0 to log-probs that are not finite, and counts them
        self.tolerated = ("rollout_log_probs",) if config.algorithm.rollout_is is not None else ()

    def trains_actor(self, step: int) -> bool:
        return step >= self.algorithm.policy_training_start_step

    def version(self, step: int) -> int:
        """Returns the version of the actor's weights at the beginning of `step`: the number of its updates so far."""
        return max(0, step - self.algorithm.policy_training_start_step)

    def update(self, batch: RolloutBatch, step: int) -> Metrics:
        """Updates the models in PPO step `step` (from 0), after collection; returns the metrics.

        Raises Diverged when no action in the batch counts or its numbers are not finite, DataError when its fields do
        not belong together.
        """
        self._check(batch, step)
        # before a KL penalty enters the rewards
        scores = outcome_scores(batch.rewards, batch.mask) if self.algorithm.use_pf_ppo else None
        batch = self._evaluate(batch)
        batch, metrics = self._penalize(batch)
        batch, weights = self._correct_mismatch(batch)
        batch = self._estimate(batch)
        metrics |= self._measure(batch, step) | weights
        if batch.ends is None:
            self.logged = batch.select(torch.arange(min(self.log_samples, len(batch))))
        batch = replace(batch, token_versions=None)  # the updates read none
        if scores is not None:
            with required(VARIANTS, "algorithm.use_pf_ppo"):
                from rl_platform.algorithms.variants.pf_ppo import apply_pf_ppo
            batch, filtration = apply_pf_ppo(batch, scores, self.algorithm.pf_ppo, generator(self.seed, "pf_ppo", step))
            metrics |= filtration
        if batch.ends is not None:
            batch = batch.flatten()  # one row per transition
        return metrics | self._train(batch, step)

    def _check(self, batch: RolloutBatch, step: int) -> None:
        check_batch(batch, self.tolerated)
        if not bool(batch.mask.any()):
            raise Diverged(
                f"step {step}: no action of the rollout counts, so there is nothing to learn from: all responses were "
                "masked out, without a score or truncated (algorithm.overlong.filter)"
            )

    def _evaluate(self, batch: RolloutBatch) -> RolloutBatch:
        """Returns the batch with log pi_old, log pi_ref and V. Keeps fields that the collection has filled."""
        algorithm, learners, stage = self.algorithm, self.learners, list[Phase]()
        if algorithm.old_log_probs == "rollout":
            batch = replace(batch, log_probs=batch.rollout_log_probs)
        # the reference comes first: the actor computes a full KL from the reference's states
        if learners.reference is not None and batch.reference_log_probs is None:
            stage.append(_evaluation("reference", "reference", learners.reference.evaluate, batch))
        if learners.reference_is_base:
            stage.append(_evaluation("reference", "actor", learners.actor.evaluate_reference, batch))
        if algorithm.old_log_probs == "recompute" and batch.log_probs is None:
            stage.append(_evaluation("log-probs", "actor", learners.actor.evaluate, batch))
        if learners.critic is not None and batch.values is None:
            stage.append(_evaluation("values", "critic", learners.critic.evaluate, batch))
        batch = replace(batch, **self.phases.run(stage))
        check_batch(batch, self.tolerated)  # a KL penalty would spread numbers that are not finite into the rewards
        return batch

    def _penalize(self, batch: RolloutBatch) -> tuple[RolloutBatch, Metrics]:
        """Returns the batch with rewards r_t - beta K_t if `use_kl_in_reward` is on, and adapts beta."""
        metrics: Metrics = {}
        if self.algorithm.use_kl_in_reward:
            coefficient = self.kl_controller.coefficient
            batch, kl = penalized(batch, self.algorithm, coefficient)
            mean = sequence_mean_kl(kl, batch.mask)
            self.kl_controller.update(mean, len(batch))
            metrics = {"reward/kl": mean, "reward/kl_coef": coefficient}
        if not self.algorithm.full_kl_in_loss:
            batch = replace(batch, reference_states=None)  # large, and the updates would compute a KL for nothing
        return batch, metrics

    def _estimate(self, batch: RolloutBatch) -> RolloutBatch:
        """Returns the batch with advantages and returns."""
        with self.reporter.phase("advantages"):
            estimated, returns = advantages(batch, self.algorithm)
        if batch.ends is None:  # only the estimator reads these two; `flatten` drops them in an embodied run
            batch = replace(batch, bootstrapped=None, end_values=None)
        batch = replace(
            batch, advantages=estimated, returns=returns, baselines=None, squared_probs=None, kl_penalties=None
        )
        check_batch(batch, self.tolerated)
        return batch

    def _measure(self, batch: RolloutBatch, step: int) -> Metrics:
        """Returns metrics of the rollout. Reports once in a run that the two engines differ by more than rounding."""
        recomputed = self.algorithm.old_log_probs == "recompute"
        metrics = rollout_metrics(batch if recomputed else replace(batch, log_probs=None))  # else nothing to compare
        if self.algorithm.distillation_coef:
            metrics["distillation/reverse_kl"] = float(masked_mean(reverse_kl(batch), batch.mask))
        if batch.versions is not None:
            age = (self.version(step) - batch.versions).float()
            metrics |= {"staleness/mean": age.mean().item(), "staleness/max": age.max().item()}
        if batch.token_versions is not None:
            ages = (self.version(step) - batch.token_versions).float()
            metrics["staleness/token_mean"] = float(masked_mean(ages, batch.mask))
        if metrics.get("staleness/max", 0.0) == 0.0:
            self._warn_of_mismatch(metrics)
        return metrics

    def _warn_of_mismatch(self, metrics: Metrics) -> None:
        passed = {name: metrics[name] for name, limit in MISMATCH_LIMITS.items() if metrics.get(name, 0.0) > limit}
        if passed and not self.warned_of_mismatch:
            self.warned_of_mismatch = True
            values = ", ".join(
                f"{name} {value:.3g} (limit {MISMATCH_LIMITS[name]:g})" for name, value in passed.items()
            )
            advice = "" if self.algorithm.rollout_is else "; algorithm.rollout_is corrects for it"
            message = "rollout and training engine give the same tokens different probabilities"
            self.reporter.note(f"{message}: {values}{advice}")

    def _correct_mismatch(self, batch: RolloutBatch) -> tuple[RolloutBatch, Metrics]:
        """Returns the batch with importance weights w_t = pi_old / pi_rollout of `rollout_is`, and their metrics."""
        if (correction := self.algorithm.rollout_is) is None:
            return batch, {}
        with required(VARIANTS, "algorithm.rollout_is"):
            from rl_platform.algorithms.variants.importance_weights import mismatch_weights
        weights, metrics = mismatch_weights(batch.log_probs, batch.rollout_log_probs, batch.mask, correction)
        return replace(batch, loss_weights=weights), metrics

    def _train(self, batch: RolloutBatch, step: int) -> Metrics:
        """Trains all epochs of the critic, then all epochs of the actor."""
        stage: list[Phase] = []
        if self.learners.critic is not None:
            stage.append(_training("critic", self.learners.critic, batch, step))
        if self.trains_actor(step):
            rows, correction = batch, self.algorithm.rollout_is
            if correction is not None and correction.denominator == "kept":
                with required(VARIANTS, "algorithm.rollout_is"):
                    from rl_platform.algorithms.variants.importance_weights import without_rejected
                rows = without_rejected(batch, values_too=self.learners.critic is None)
            stage.append(_training("actor", self.learners.actor, rows, step))
        return self.phases.run(stage)

    def state_dict(self) -> StateDict:
        return {"kl_controller": self.kl_controller.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        self.kl_controller.load_state_dict(state["kl_controller"])


def _evaluation(name: str, component: str, call: Callable[[RolloutBatch], Handle], batch: RolloutBatch) -> Phase:
    return Phase(name, component, lambda earlier: call(replace(batch, **earlier)))


def _training(name: str, group: LearnerGroup, batch: RolloutBatch, step: int) -> Phase:
    return Phase(f"train {name}", name, lambda _: group.update(batch, step))
