"""Reasoning runs: prompts stream through rollout and reward into rollout batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor

from rl_platform.algorithms.advantages import VARIANTS
from rl_platform.algorithms.shaping import ShapedRewards
from rl_platform.components.actor import LanguageActor
from rl_platform.components.critic import LanguageCritic
from rl_platform.components.reference import LanguageReference
from rl_platform.components.reward import LanguageReward
from rl_platform.components.rollout import LanguageRollout
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import estimator_needs
from rl_platform.config.schema.rollout import Sampling
from rl_platform.envs.reasoning.prompts import PromptLoader, build_prompts, notes_on
from rl_platform.envs.reasoning.question import Split
from rl_platform.envs.reasoning.verifiers import DECIDING
from rl_platform.errors import CheckpointError
from rl_platform.extras import find, required
from rl_platform.models.build import check_vocabulary
from rl_platform.models.tokenizer import Tokenizer, load_tokenizer
from rl_platform.placement.offload_order import OffloadOrder
from rl_platform.records import Message, Prompt, RolloutBatch, StateDict, Trajectory, Weights
from rl_platform.reporter import Reporter, Token
from rl_platform.runners.component_groups import LearnerGroup, TypedGroups
from rl_platform.runners.phases import TakingTurns, with_turns
from rl_platform.runners.recovery import EnvPart, Recovery
from rl_platform.runners.rollouts import Collected
from rl_platform.runners.sample_ledger import SampleLedger, held_rows
from rl_platform.runners.scored_responses import ScoredResponses
from rl_platform.runners.task_runner import Learners
from rl_platform.runners.trajectories import (
    by_source,
    check_any_scored,
    cut_ends,
    function_metrics,
    process_rewards,
    program_metrics,
    rollout_batch,
    samples_of,
    shaped_rewards,
    source_metrics,
    training_rows,
    trajectory_metrics,
    unscored_notes,
    validation_metrics,
)
from rl_platform.runtime import ComponentSpec, Runtime
from rl_platform.runtime.weights_token import WeightsToken, merge_published

if TYPE_CHECKING:
    from rl_platform.runners.collection.dynamic_sampling import DynamicSampler
    from rl_platform.runners.collection.partial_rollouts import PartialRollouts
    from rl_platform.runners.collection.streamed_evaluation import StreamedEvaluation

COLLECTION = "rl_platform.runners.collection"  # an extra


class ReasoningRunner:
    """`loss_type: actor`: language-model actor, separate critic, verified rewards."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        reporter: Reporter,
        output_dir: Path,
        questions: Split,
        turns: OffloadOrder,
    ) -> None:
        config = with_turns(config, turns)
        self.config, self.runtime, self.reporter, self.output_dir = config, runtime, reporter, output_dir
        self.tokenizer = load_tokenizer(config.actor.model)
        with_tools = _length_with_tools(config, self.tokenizer)
        train = build_prompts(questions.train, self.tokenizer, config.data, with_tools)
        validation = build_prompts(questions.validation, self.tokenizer, config.data, with_tools)
        check_vocabulary(config, self.tokenizer, [*train.prompts, *validation.prompts])
        for note in notes_on(questions, train, validation):
            reporter.note(note)
        self.validation = validation.prompts
        self.prompts = {prompt.index: prompt for prompt in train.prompts}
        data, options = config.data, config.algorithm.dynamic_sampling
        weights = {source.label: source.weight for source in data.sources if source.weight}
        prompts_per_round = data.train_batch_size
        self.selected: Callable[[Sequence[Trajectory]], Tensor] | None = None  # of `algorithm.sample_filter`
        if config.algorithm.sample_filter is not None:
            with required(VARIANTS, "algorithm.sample_filter"):
                from rl_platform.algorithms.variants.filters import selection
            self.selected = selection(config.algorithm.sample_filter)
        self.sampler: DynamicSampler | None = None
        if options is not None:
            with required(COLLECTION, "algorithm.dynamic_sampling"):
                from rl_platform.runners.collection.dynamic_sampling import DynamicSampler
            group_size, prompts_per_round = config.algorithm.group_size, options.prompts_per_round or prompts_per_round
            mini_batch = math.lcm(data.mini_batch_size, config.mini_batch_size("critic"))
            self.sampler = DynamicSampler(options, data.train_batch_size, group_size, mini_batch)
        self.loader = PromptLoader(train.prompts, prompts_per_round, config.runner.seed, data.shuffle, weights)

        components: dict[str, type] = {"actor": LanguageActor, "rollout": LanguageRollout, "reward": LanguageReward}
        if config.critic.use_critic_model:
            components["critic"] = LanguageCritic
        if config.has_reference:
            components["reference"] = LanguageReference
        scores_apart = {"reward"} if config.reward.classifier is None else set()  # in processes, or at a server
        self.groups = runtime.start(
            {name: ComponentSpec(cls, {"config": config}, name in scores_apart) for name, cls in components.items()}
        )
        self.typed = cast(TypedGroups, self.groups)
        if config.has_reference and config.algorithm.full_kl:
            head = self.typed["reference"].head().wait()[0]
            self.typed["actor"].receive_reference_head(head).wait()
        self.warned_of_clipped_scores = False
        self.noted_causes: set[str] = set()  # of responses without a score
        self.recovery = Recovery(runtime, self.typed["rollout"], self._idle)
        self.ledger = SampleLedger()
        self.partial: PartialRollouts | None = None
        if config.rollout.partial_rollout is not None:
            with required(COLLECTION, "rollout.partial_rollout"):
                from rl_platform.runners.collection.partial_rollouts import PartialRollouts
            self.partial = PartialRollouts(
                config, runtime, self.recovery, self.groups, reporter, self.loader, self.ledger
            )
        self.turns = TakingTurns(turns, self.groups)
        self.responses = ScoredResponses(config, runtime, self.typed, self.recovery, self.turns, reporter)
        actor, critic, reference = self.typed["actor"], self.typed.get("critic"), self.typed.get("reference")
        self.learners = Learners(actor, critic, reference, actor if config.reference_is_base else None, self.turns)
        streaming: Callable[..., StreamedEvaluation | None] = find(
            COLLECTION, "streamed_evaluation.streaming", lambda *_: None
        )
        self.streaming = streaming(config, turns, self.groups, self._batch)

    def warm_start(self) -> dict[str, float]:
        return {}

    def publish(self, version: int) -> Weights | WeightsToken:
        self.turns.before("sync weights")
        copy = self.config.runner.max_staleness > 0
        return merge_published(self.typed["actor"].publish(version, copy, on_request=not copy).wait())

    def _idle(self) -> None:
        """Returns when no learner works: its ranks may have to gather the weights that are requested next."""
        if self.streaming is not None:
            self.streaming.settle()

    def receive(self, weights: Weights | WeightsToken) -> dict[str, float]:
        return self.recovery.sync(weights)

    def update(self, weights: Weights | WeightsToken) -> bool:
        return self.responses.update(weights)

    def collect(self, step: int) -> Collected:
        metrics: dict[str, float] = {}
        with self.reporter.phase("generate"):
            if self.partial is not None:
                self.turns.before("generate")
                trajectories, metrics = self.partial.collect(step)
                self._check_scores(trajectories)
            elif self.sampler is None:
                trajectories = self._round(step, 0)
            else:
                if self.config.runner.stale == "drop":
                    self.ledger.dropped(self.sampler.drop(self.config.oldest_version(step)))
                trajectories, metrics = self.sampler.fill(step, partial(self._round, step))
                self.ledger.rejected(self.sampler.left_out)
        rows = training_rows(trajectories, math.lcm(*map(self.config.mini_batch_size, self.learned_parts())))
        shaped = self._shaped(rows, None if self.selected is None else self.selected(rows))
        self._warn_of_clipped_scores(int(shaped.metrics.get("reward/out_of_range", 0)))
        batch = self._batch(rows, shaped)
        if self.streaming is not None:
            with self.reporter.phase("evaluate"):  # the parts that are not done yet
                batch = batch.with_fields(self.streaming.fields(batch))
        if any(trajectory.step_rewards for trajectory in trajectories):
            process, process_metrics = process_rewards(rows, batch.action_mask)
            batch, metrics = replace(batch, rewards=batch.rewards + process), metrics | process_metrics
        if estimator_needs(self.config.algorithm.adv_type).greedy:
            batch, baselines = self._with_baselines(batch, trajectories, step)
            metrics |= baselines
        samples = samples_of(trajectories[: self.config.runner.log_samples], self.tokenizer)
        conversation_metrics: Callable[[Sequence[Trajectory]], dict[str, float]] = find(
            "rl_platform.components.agents", "conversation_metrics.conversation_metrics", lambda _: {}
        )
        metrics |= trajectory_metrics(trajectories) | conversation_metrics(trajectories)
        metrics |= source_metrics(trajectories) | function_metrics(trajectories, self.config.reward.labels)
        metrics |= program_metrics(trajectories)
        if self.config.updates_at_once:
            metrics["staleness/mixed_frac"] = sum(bool(one.segments) for one in trajectories) / len(trajectories)
        return Collected(batch, metrics | shaped.metrics | self.recovery.metrics(), samples)

    def _with_baselines(
        self, batch: RolloutBatch, trajectories: Sequence[Trajectory], step: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Returns the batch with the reward of one greedy response per prompt, which is scored and not trained on."""
        with required(COLLECTION, "algorithm.adv_type"):
            from rl_platform.runners.collection.greedy_baselines import with_baselines

        prompts = list({trajectory.prompt.index: trajectory.prompt for trajectory in trajectories}.values())
        sampling = self.config.rollout.sampling.changed({"temperature": 0.0})
        with self.reporter.phase("generate"):
            greedy = self.responses.generate(prompts, 1, sampling, "baseline", step)
        self._check_scores(greedy)
        return with_baselines(batch, greedy, self._shaped(greedy))

    def _shaped(self, trajectories: Sequence[Trajectory], kept: Tensor | None = None) -> ShapedRewards:
        return shaped_rewards(trajectories, self.config.algorithm, self.config.data.max_response_length, kept)

    def _batch(self, trajectories: Sequence[Trajectory], shaped: ShapedRewards | None = None) -> RolloutBatch:
        """Returns the batch of `trajectories`. `shaped` None: for evaluations, which read no rewards."""
        batch = rollout_batch(trajectories, shaped or self._shaped(trajectories), self.tokenizer.pad_token_id)
        if self.config.algorithm.bootstrap_truncated:
            batch = replace(batch, bootstrapped=cut_ends(trajectories, batch.action_mask))
        return batch

    def _round(self, step: int, number: int) -> list[Trajectory]:
        """Returns scored responses to the next batch of prompts. Rounds of a step draw different random numbers."""
        purpose = f"train-{number}" if number else "train"
        samples, sampling = self.config.algorithm.group_size, self.config.rollout.sampling
        prompts = self.loader.next_batch()
        self.ledger.issue((prompt.index for prompt in prompts), samples)
        if self.streaming is not None:
            self.streaming.begin(prompts, samples)
        on_arrival = None if self.streaming is None else self.streaming.add
        trajectories = self.responses.generate(prompts, samples, sampling, purpose, step, on_arrival)
        self._check_scores(trajectories)
        return trajectories

    def _check_scores(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises as `check_any_scored`. Reports the first response without a score of every cause."""
        check_any_scored(trajectories, self.config.reward)
        for cause, text in unscored_notes(trajectories).items():
            if cause not in self.noted_causes:
                self.noted_causes.add(cause)
                self.reporter.note(text)

    def trained(self, batch: RolloutBatch) -> dict[str, float]:
        self.ledger.trained(batch.trajectory_ids)
        return self.ledger.metrics()

    def check_samples(self, waiting: Sequence[RolloutBatch]) -> None:
        held = held_rows(waiting)
        unfinished = [] if self.partial is None else self.partial.open
        carried = [] if self.sampler is None else self.sampler.carried
        held.update(one.prompt.index for group in (*unfinished, *carried) for one in group)
        self.ledger.check(held)

    def validate(self, step: int) -> dict[str, float]:
        trajectories = self.answers(self.config.rollout.val_sampling, step)
        metrics = validation_metrics(trajectories, validation_metric(self.config))
        metrics |= function_metrics(trajectories, self.config.reward.labels, "val/")
        for label, part in by_source(trajectories).items():
            metrics |= validation_metrics(part, validation_metric(self.config), f"{label}/")
        return metrics

    def log_tokens(self, step: int, batch: RolloutBatch) -> None:
        """Reports the tokens of a batch with the log-probs before and after the update.

        Those after it are computed if those before it were, by the same call.
        """
        algorithm, after = self.config.algorithm, None
        if algorithm.old_log_probs == "recompute" and not algorithm.full_kl_in_reward:
            self.turns.before("log-probs")
            after = self.typed["actor"].evaluate(batch).wait()[0]["log_probs"]
        tokens_of: Callable[..., Iterable[Token]] = find(
            "rl_platform.runners.watching", "token_log.tokens_of", lambda *_: ()
        )
        tokens = tokens_of(batch, after, lambda token: self.tokenizer.decode([token], special=True))
        self.reporter.tokens(step, list(tokens))

    def answers(self, sampling: Sampling, step: int) -> list[Trajectory]:
        """Returns one scored response to each validation prompt, in the order of the prompts."""
        trajectories = self.responses.generate(self.validation, 1, sampling, "validate", step)
        self._check_scores(trajectories)
        return trajectories

    def exhausted(self) -> bool:
        epochs = self.config.runner.max_epochs
        left = self.partial is not None and self.partial.open
        return epochs is not None and self.loader.epoch >= epochs and not left

    def learned_parts(self) -> Mapping[str, LearnerGroup]:
        groups = {"actor": self.learners.actor, "critic": self.learners.critic}
        return {name: group for name, group in groups.items() if group is not None}

    def parts(self) -> Mapping[str, EnvPart]:
        return {}

    def state_dict(self) -> StateDict:
        state = {"loader": self.loader.state_dict(), "samples": self.ledger.state_dict()}
        if self.partial is not None:
            state["partial_rollouts"] = self.partial.state_dict()
        return state if self.sampler is None else state | {"dynamic_sampling": self.sampler.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        self.loader.load_state_dict(state["loader"])
        if "samples" in state:
            self.ledger.load_state_dict(state["samples"])
        restore(self.sampler, state.get("dynamic_sampling"), self.prompts, "algorithm.dynamic_sampling")
        restore(self.partial, state.get("partial_rollouts"), self.prompts, "rollout.partial_rollout")

    def finish(self, step: int) -> None:
        """Writes the trained model as a Hugging Face folder."""
        with self.reporter.phase("export"):
            folder = self.typed["actor"].export(str(self.output_dir / "model")).wait()[0]
        self.reporter.note(f"trained model, loadable by transformers: {folder}")

    def _warn_of_clipped_scores(self, count: int) -> None:
        if count and not self.warned_of_clipped_scores:
            self.warned_of_clipped_scores = True
            self.reporter.note(
                f"{count} scores of a rollout were clipped: they lie outside algorithm.reward_scaling.source_min and "
                "source_max. The metric reward/out_of_range counts them in every step"
            )


def restore(
    part: DynamicSampler | PartialRollouts | None, state: StateDict | None, prompts: Mapping[int, Prompt], key: str
) -> None:
    """Loads responses that wait for a later step. `state` None: the checkpoint has none; `part` None: this run has no
    `key` of the config, which makes them wait.

    Raises CheckpointError if responses of the checkpoint would be lost.
    """
    if part is not None and state is not None:
        part.load_state_dict(state, prompts)
    elif state is not None and (waiting := sum(map(len, state.values()))):
        raise CheckpointError(
            f"the checkpoint holds {waiting} prompts whose responses are not trained on yet: resume with {key}, or "
            "start anew in another runner.output_dir"
        )


def _length_with_tools(config: Config, tokenizer: Tokenizer) -> Callable[[Sequence[Message]], int] | None:
    """Returns the function of `build_prompts` if the first call of every trajectory describes tools, else None.

    An environment adds its first observation to the question, whose length is not known before it is reset.
    """
    agent = config.rollout.agent
    if agent is None or not agent.tools or agent.environment is not None:
        return None
    with required("rl_platform.components.agents", "rollout.agent"):
        from rl_platform.components.agents.tool_loop import length_with_tools
    return length_with_tools(agent, tokenizer, config.data.use_chat_template)


def validation_metric(config: Config) -> str:
    """Returns `val/accuracy` if a verifier has scores 0 and 1, else `val/score`."""
    return "val/accuracy" if any(part.type in DECIDING for _, part in config.reward.parts) else "val/score"
