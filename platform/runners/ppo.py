"""The PPO loop that embodied and reasoning runs share.

    sync weights -> collect (generate and score, or act and simulate) -> [reference log-probs] [log-probs] [values]
                 -> advantages and returns -> PF-PPO if configured -> [critic epochs] [actor epochs]
                 -> validate, log, checkpoint

Neighbours in brackets run side by side where their components share no device. `train` is the loop, `PPO.update` one
step of it from a rollout batch to updated models. `task_runner.py` has the interface of the two tasks. The mathematics
is in `rl_platform.algorithms`; the runtime decides in which processes components run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.algorithms.advantages import VARIANTS, advantages, reverse_kl
from rl_platform.algorithms.kl import KLController, sequence_mean_kl
from rl_platform.algorithms.reward_sums import outcome_scores
from rl_platform.algorithms.rewards import penalized
from rl_platform.algorithms.rollout_metrics import rollout_metrics
from rl_platform.algorithms.statistics import masked_mean
from rl_platform.algorithms.validation import check_batch
from rl_platform.config.schema import Config
from rl_platform.errors import Diverged
from rl_platform.extras import is_present, required
from rl_platform.interrupts import StepDropped, stopping_after_step
from rl_platform.records import RolloutBatch, StateDict
from rl_platform.reporter import Reporter, Sample
from rl_platform.rng import generator
from rl_platform.runners.component_groups import LearnerGroup
from rl_platform.runners.last_step import LastStep
from rl_platform.runners.phases import ComponentTimings, Phase, Phases
from rl_platform.runners.rollouts import Collected, Rollouts, check_trainable
from rl_platform.runners.state import RunState
from rl_platform.runners.step_callbacks import Callback, stopped_by
from rl_platform.runners.task_runner import Learners, Metrics, TaskRunner
from rl_platform.runtime.cpu import compute_alone
from rl_platform.runtime.worker_group import Handle

if TYPE_CHECKING:
    from rl_platform.runners.watching.stragglers import Stragglers
    from rl_platform.runners.watching.utilization import Utilization

WATCHING = "rl_platform.runners.watching"  # an extra
MakePPO = Callable[[Config, Learners, Reporter], "PPO"]
LEFT = "left"  # result of `train` if the run moves to another placement
# The tests and the guide of NeMo-RL call a run above these values unhealthy.
MISMATCH_LIMITS = {"mismatch/prob_error": 1.05, "mismatch/k3": 1e-3}


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
    True: the loop saves the step and returns LEFT, and the run can continue with other worker groups.

    Returns what ended the run: `max_steps`, `max_epochs` or `callback NAME`. After a signal or the error of a callback,
    saves the step and raises Interrupted or that error.
    """
    loop = _Loop(config, runner, reporter, state, (ppo_of or PPO)(config, runner.learners, reporter))
    untrained = loop.start()
    with stopping_after_step(config.runner.stop_grace_s, reporter.note) as stop:
        if loop.step == 0:
            stop.step = 1
            reporter.step(0, untrained)
        while not loop.over:
            stop.step = loop.step + 1
            try:
                with loop.last_step.saved_by(stop):
                    rollout = loop.rollouts.take(loop.step)  # with staleness, during the update of an earlier step
            except StepDropped:
                loop.last_step.save()
                break
            metrics = rollout.metrics | loop.update(rollout)  # advantages and returns, critic epochs, actor epochs
            metrics |= loop.sync_weights()
            loop.over = not loop.rollouts.more(loop.step)
            metrics |= loop.validate(rollout.samples)
            loop.log(metrics, rollout.samples, callbacks)
            left = not (loop.over or stop.due()) and leaves(loop.step)
            stopped = stop.due()  # also by a signal during `leaves`, which may take seconds
            if loop.over or stopped or left or _due(loop.step, config.runner.save_interval):
                loop.checkpoint()
            else:
                loop.keep_state()
            if left:
                return LEFT
            loop.over = loop.over or stopped
    reason = loop.reason or ("max_steps" if loop.step >= config.runner.max_steps else "max_epochs")
    if reason == "max_epochs":
        reporter.note(f"the run ends after step {loop.step}, before runner.max_steps, by runner.max_epochs")
    runner.finish(loop.step)
    return reason


class _Loop:
    """The parts of `train`. step: number of steps that are done; over: no other step follows; reason: of a callback."""

    def __init__(self, config: Config, runner: TaskRunner, reporter: Reporter, state: RunState, ppo: PPO) -> None:
        self.config, self.runner, self.reporter, self.state, self.ppo = config, runner, reporter, state, ppo
        if config.runner.task_type == "embodied":
            compute_alone()  # a step computes a few thousand numbers here; starting a thread pool would take longer
        self.rollouts = _rollouts(runner, config)
        self.last_step = LastStep(config.runner.stop_grace_s, runner, ppo, self.rollouts, state)
        self.step, self.over, self.reason = 0, False, ""
        self.stragglers: Stragglers | None = None  # None: not installed
        self.utilization: Utilization | None = None

    def start(self) -> Metrics:
        """Loads the checkpoint and sends the weights to the rollout. Returns metrics of step 0 if the run is at it."""
        with self.reporter.phase("load"):
            self.step = self.state.restore(self.runner, self.ppo, self.rollouts)
            self._check_samples()
            for rollout in self.rollouts.ready:
                check_trainable(rollout.batch, self.config)
        metrics = self.runner.warm_start() if self.step == 0 else {}
        with self.reporter.phase("sync weights"):
            self.rollouts.start(self.step, self.ppo.version(self.step))
        self.timings = ComponentTimings(self.config, self.runner.groups)
        if is_present(WATCHING):
            from rl_platform.runners.watching.stragglers import Stragglers
            from rl_platform.runners.watching.utilization import Utilization

            self.stragglers = Stragglers(self.runner.groups, self.reporter.note)
            self.utilization = Utilization(self.config, self.runner.groups)
        if self.step == 0:
            metrics |= self._validation()
        self.over = not self.rollouts.more(self.step)
        return metrics

    def update(self, rollout: Collected) -> Metrics:
        """Trains the models on a rollout, which makes it the next step that is done."""
        metrics = self.ppo.update(rollout.batch, self.step)
        if self.utilization is not None:
            metrics |= self.utilization.metrics(rollout.batch, self.ppo.trains_actor(self.step))
        metrics |= self.runner.trained(rollout.batch)
        self.step += 1
        self.reporter.samples(self.step, rollout.samples)
        return metrics

    def sync_weights(self) -> Metrics:
        """Sends the weights to the rollout if the step trained the actor."""
        if not self.ppo.trains_actor(self.step - 1):
            return {}
        with self.reporter.phase("sync weights"):
            return self.rollouts.publish(self.step, self.ppo.version(self.step))

    def validate(self, samples: Sequence[Sample]) -> Metrics:
        """Validates at its interval and after the last step; logs the tokens of the samples then and after step 1."""
        validates = self.over or _due(self.step, self.config.runner.val_check_interval)
        if validates:
            self.rollouts.settle()
        if samples and self.ppo.logged is not None and (self.step == 1 or validates):
            with self.reporter.phase("log tokens"):
                self.runner.log_tokens(self.step, self.ppo.logged)
        return self._validation() if validates else {}

    def log(self, metrics: Metrics, samples: Sequence[Sample], callbacks: Sequence[Callback]) -> None:
        """Calls the callbacks and reports the step, which a callback makes the last one: it is validated then. Saves
        the step before it raises the error of a callback."""
        validated = self.over or _due(self.step, self.config.runner.val_check_interval)
        try:
            stopping = stopped_by(callbacks, self.step, dict(metrics))
        except BaseException:
            self.reporter.step(self.step, metrics | self.timings.since_last())
            self.checkpoint()
            raise
        if stopping:
            self.reason, self.over = f"callback {', '.join(stopping)}", True
            if not validated:
                metrics = metrics | self.validate(samples)
        self.reporter.step(self.step, metrics | self.timings.since_last())
        if stopping:
            self.reporter.note(f"stopped after step {self.step} by {self.reason}")
        if self.stragglers is not None:
            self.stragglers.look()

    def checkpoint(self) -> None:
        with self.reporter.phase("checkpoint"):
            self.rollouts.settle()
            self._check_samples()
            self.state.save(self.step, self.runner, self.state.read(self.runner, self.ppo, self.rollouts))
        self.last_step.forget()

    def keep_state(self) -> None:
        """Copies the state in memory if the step was a long one, so that a stop can drop the next step."""
        if not self.config.runner.max_staleness:
            self.last_step.keep(self.step)

    def _validation(self) -> Metrics:
        with self.reporter.phase("validate"):
            return self.runner.validate(self.step)

    def _check_samples(self) -> None:
        self.runner.check_samples([rollout.batch for rollout in self.rollouts.ready])


def _rollouts(runner: TaskRunner, config: Config) -> Rollouts:
    ahead, steps = config.runner.max_staleness, config.runner.max_steps
    if not ahead:
        return Rollouts(runner, steps)
    with required("rl_platform.runners.collection", "runner.max_staleness"):
        from rl_platform.runners.collection.rollouts_ahead import RolloutsAhead
    return RolloutsAhead(runner, ahead, steps, config.updates_at_once)


def _due(step: int, interval: int) -> bool:
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
            self.logged = batch.select(_rows_of(batch, self.log_samples))
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
            reason = "all responses were masked out, without a score or truncated (algorithm.overlong.filter)"
            if "observations" in batch.inputs:
                reason = "in every step of the environments an observation or a reward was not finite (episode/invalid)"
            raise Diverged(f"step {step}: no action of the rollout counts, so there is nothing to learn from: {reason}")

    def _evaluate(self, batch: RolloutBatch) -> RolloutBatch:
        """Returns the batch with log pi_old, log pi_ref and V. Keeps fields that the collection has filled."""
        algorithm, learners = self.algorithm, self.learners
        stage: list[Phase[Tensor]] = []
        if algorithm.old_log_probs == "rollout":
            batch = replace(batch, log_probs=batch.rollout_log_probs)
        # the reference comes first: the actor computes a full KL from the reference's states
        if learners.reference is not None and batch.reference_log_probs is None:
            stage.append(_evaluation("reference", "reference", learners.reference.evaluate, batch))
        if learners.base is not None:
            stage.append(_evaluation("reference", "actor", learners.base.evaluate_reference, batch))
        if algorithm.old_log_probs == "recompute" and batch.log_probs is None:
            stage.append(_evaluation("log-probs", "actor", learners.actor.evaluate, batch))
        if learners.critic is not None and batch.values is None:
            stage.append(_evaluation("values", "critic", learners.critic.evaluate, batch))
        evaluated: dict[str, Tensor] = self.phases.run(stage)
        batch = batch.with_fields(evaluated)
        check_batch(batch, self.tolerated)  # a KL penalty would spread numbers that are not finite into the rewards
        return batch

    def _penalize(self, batch: RolloutBatch) -> tuple[RolloutBatch, Metrics]:
        """Returns the batch with rewards r_t - beta K_t if `use_kl_in_reward` is on, and adapts beta."""
        metrics: Metrics = {}
        if self.algorithm.use_kl_in_reward:
            coefficient = self.kl_controller.coefficient
            batch, kl = penalized(batch, self.algorithm, coefficient)
            mean = sequence_mean_kl(kl, batch.mask)
            self.kl_controller.update(mean, len(batch.trajectory_ids))
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
        assert batch.log_probs is not None
        weights, metrics = mismatch_weights(batch.log_probs, batch.rollout_log_probs, batch.mask, correction)
        return replace(batch, loss_weights=weights), metrics

    def _train(self, batch: RolloutBatch, step: int) -> Metrics:
        """Trains all epochs of the critic, then all epochs of the actor."""
        stage: list[Phase[float]] = []
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


def _rows_of(batch: RolloutBatch, trajectories: int) -> Tensor:
    """Returns the indices of the rows of the first trajectories, without rows that only fill a mini-batch."""
    if batch.continues is None:
        return torch.arange(min(trajectories, len(batch)))
    numbers = (~batch.continues).cumsum(0)  # of each row's trajectory, from 1
    rows = (numbers <= trajectories) & (batch.sample_mask | ~batch.continues)
    return rows.nonzero().flatten()


def _evaluation(
    name: str, component: str, call: Callable[[RolloutBatch], Handle[dict[str, Tensor]]], batch: RolloutBatch
) -> Phase[Tensor]:
    return Phase(name, component, lambda earlier: call(batch.with_fields(earlier)))


def _training(name: str, group: LearnerGroup, batch: RolloutBatch, step: int) -> Phase[float]:
    return Phase(f"train {name}", name, lambda _: group.update(batch, step))
