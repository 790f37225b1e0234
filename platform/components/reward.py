"""The reward component: gives every trajectory its reward, all at once or as they stream in.

A `Scorer` scores responses: processes with a verifier (`envs/reasoning/scoring.py`, `verifiers.py`), a reward model
(`reward_models/`), a server or a judge (`envs/reasoning/servers/`), or several of them
(`weighted_rewards/`). Shaping of rewards (KL, length, whitening) belongs to the algorithm, not here.
"""

from __future__ import annotations

import queue
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import torch

from rl_platform.components.read_ahead import ReadAhead
from rl_platform.config.schema import Config
from rl_platform.config.schema.data import Data, QuestionTask
from rl_platform.config.schema.reward import Scoring
from rl_platform.envs.reasoning.score import Score
from rl_platform.envs.reasoning.scoring import ScoringPool
from rl_platform.envs.reasoning.verifiers import DECIDING, ScoreItem, VerifierSpec
from rl_platform.errors import ChannelClosed, problems_of
from rl_platform.extras import required
from rl_platform.models.tokenizer import Tokenizer, load_tokenizer
from rl_platform.records import Trajectory
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.host import ComponentContext

if TYPE_CHECKING:
    from rl_platform.envs.reasoning.servers.http_scorer import HttpScorer
    from rl_platform.envs.reasoning.servers.reward_server import Server


class Scorer(Protocol):
    """Scores responses; thread-safe."""

    def submit(self, items: Sequence[ScoreItem]) -> list[Future[Score]]:
        """Returns a future per response. The score of a response that cannot be scored is invalid, and no exception."""
        ...

    def close(self) -> None:
        """Fails the futures that are not done."""
        ...


class LanguageReward:
    """Scores trajectories by their text. A response without a score (timeout, exception, crash, refused) comes back
    with `valid=False`, reward 0, and its cause in `outcome` and `verdict`.

    `metric` is 1 for a full score and 0 otherwise with the built-in verifiers and with programs, the score itself with
    all others. Of several functions it is that of the first of these, or the sum if there is none.
    """

    def __init__(self, context: ComponentContext, config: Config) -> None:
        self._label, self._model = context.label, config.actor.model
        reward = config.reward
        self._verdict = next((name for name, part in reward.by_label.items() if part.type in DECIDING), None)
        self._at_once = max(part.at_once for _, part in reward.parts)
        self._scorer = _scorer(context, config)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Returns the trajectories in their order, with reward, metric and valid set."""
        futures = self._submit(trajectories)
        scores = [future.result() for future in futures]
        return [self._scored(trajectory, score) for trajectory, score in zip(trajectories, scores, strict=True)]

    def stream(self, source: Channel[Trajectory], sink: Channel[Trajectory]) -> int:
        """Scores the trajectories of `source` until it closes, and puts each into `sink` as soon as it has its score.

        The order may change. Other ranks may read from `source` (see `ReadAhead`) and write to `sink`, which stays
        open. Returns the number of trajectories.
        """
        done: queue.SimpleQueue[tuple[Trajectory, Future[Score]] | int] = queue.SimpleQueue()
        ahead = ReadAhead(self._at_once)

        def scored(trajectory: Trajectory, future: Future[Score]) -> None:
            done.put((trajectory, future))

        with ThreadPoolExecutor(1, thread_name_prefix=f"{self._label}-sink") as executor:
            writer = executor.submit(self._write, done, sink, ahead)
            writer.add_done_callback(lambda _: ahead.close())
            count = 0
            try:
                while (room := ahead.room()) and (arrived := _next(source, room)):
                    ahead.read(len(arrived))
                    futures = self._submit(arrived)
                    count += len(arrived)
                    for trajectory, future in zip(arrived, futures, strict=True):
                        future.add_done_callback(partial(scored, trajectory))
            finally:
                done.put(count)
        writer.result()
        return count

    def close(self) -> None:
        """Ends scoring processes, or requests under way."""
        self._scorer.close()

    def _submit(self, trajectories: Sequence[Trajectory]) -> list[Future[Score]]:
        """Returns a future per trajectory. It is done for an agent that returned a reward, and for one that failed or
        whose tool failed: such a response has no score."""
        given = [None if one.conversation is None else one.conversation.reward for one in trajectories]
        given = [reward if one.valid else 0.0 for one, reward in zip(trajectories, given, strict=True)]
        left = [one for one, reward in zip(trajectories, given, strict=True) if reward is None]
        scored = iter(self._scorer.submit([_item(one) for one in left]))
        return [next(scored) if reward is None else _done(Score(reward)) for reward in given]

    def _write(
        self,
        done: queue.SimpleQueue[tuple[Trajectory, Future[Score]] | int],
        sink: Channel[Trajectory],
        ahead: ReadAhead,
    ) -> None:
        """Puts scored trajectories into `sink`, as many as the number that `stream` puts into `done` at its end."""
        written = 0
        expected: int | None = None
        while written != expected:
            message = done.get()
            if isinstance(message, int):
                expected = message
                continue
            trajectory, future = message
            sink.put(self._scored(trajectory, future.result()))
            ahead.finished()
            written += 1

    def _scored(self, trajectory: Trajectory, score: Score) -> Trajectory:
        if not trajectory.valid:  # a tool failed in it, so its result is unknown
            return replace(trajectory, reward=0.0, metric=0.0)
        metric = score.value
        if self._verdict is not None and score.valid:  # an agent's own reward has no parts
            metric = float({"": score.value, **dict(score.parts)}.get(self._verdict, score.value) >= 1.0)
        steps = tuple((self._token_at(trajectory.token_ids, end), reward) for end, reward in score.steps)
        scored = replace(trajectory, reward=score.value, metric=metric, valid=score.valid, step_rewards=steps)
        return replace(scored, reward_parts=score.parts, outcome=score.reason, verdict=score.detail)

    def _token_at(self, token_ids: Sequence[int], end: int) -> int:
        """Returns the position of the token with which the text reaches `end` characters."""
        counts = range(1, len(token_ids))
        return bisect_left(counts, end, key=lambda count: len(self._tokenizer.decode(token_ids[:count])))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """Most verifiers reward no steps."""
        return load_tokenizer(self._model)


def _scorer(context: ComponentContext, config: Config) -> Scorer:
    reward = config.reward
    if not reward.functions:
        return _scorer_of(context, config, reward)
    with required("rl_platform.components.weighted_rewards", "reward.functions"):
        from rl_platform.components.weighted_rewards.weighted_scorer import WeightedScorer

    with ExitStack() as made:  # closes the first ones if a later one cannot be built
        scorers: dict[str, Scorer] = {}
        for (key, function), label in zip(reward.parts, reward.labels, strict=True):
            with problems_of(key, "reward"):
                scorers[label] = _scorer_of(context, config, function)
            made.callback(scorers[label].close)
        made.pop_all()
    return WeightedScorer(scorers, {function.label: function.weight for function in reward.functions})


def _scorer_of(context: ComponentContext, config: Config, scoring: Scoring) -> Scorer:
    if scoring.asks_server:
        return http_scorer(config.data, scoring)
    if scoring.type == "model":
        from rl_platform.components.reward_models.model_scorer import ModelScorer

        device = torch.device("cuda", context.accelerators[0]) if context.accelerators else torch.device("cpu")
        return ModelScorer(config.data, scoring, device)
    return process_scorer(config.data, scoring)


def process_scorer(data: Data, scoring: Scoring) -> ScoringPool[ScoreItem] | HttpScorer:
    """Returns the scorer of a verifier or of programs. Raises ConfigError or WorkerError if it cannot be loaded."""
    if scoring.type == "code":
        with required("rl_platform.envs.reasoning.sandbox", "reward.type"):
            from rl_platform.envs.reasoning.sandbox.code_scorer import code_scorer

        return code_scorer(scoring)
    spec = verifier_spec(data, scoring)
    return ScoringPool(spec, num_workers=scoring.num_workers, timeout_s=scoring.timeout_s)


def http_scorer(data: Data, scoring: Scoring) -> HttpScorer:
    """Returns the scorer of a server. Raises Unreachable or ConfigError if no such server is at its `url`."""
    with required("rl_platform.envs.reasoning.servers", "reward.type"):
        from rl_platform.envs.reasoning.servers.http_scorer import HttpScorer
        from rl_platform.envs.reasoning.servers.judge import JudgeServer
        from rl_platform.envs.reasoning.servers.reward_server import RewardServer

    if scoring.judge is not None:
        server: Server = JudgeServer(scoring.judge, scoring.timeout_s)
    elif scoring.model is not None:
        with required("rl_platform.components.reward_models", "reward.type"):
            from rl_platform.components.reward_models.classifier_server import ClassifierServer

        server = ClassifierServer(data, scoring.model, scoring.timeout_s)
    else:
        server = RewardServer(scoring.url or "", scoring.timeout_s)
    size = scoring.max_batch_size if scoring.judge is None else 1
    return HttpScorer(server, batch_size=size, num_workers=scoring.num_workers, retries=scoring.retries)


def verifier_spec(data: Data, scoring: Scoring) -> VerifierSpec:
    """Returns the verifier that the scoring processes of a function build."""

    def of(task: QuestionTask) -> VerifierSpec:
        return VerifierSpec(scoring.type, task.type, task.name, task.params, exact=scoring.exact)

    if data.sources:
        return VerifierSpec(scoring.type, sources={source.label: of(source) for source in data.sources})
    return VerifierSpec(scoring.type) if data.task is None else of(data.task)


def _item(trajectory: Trajectory) -> ScoreItem:
    prompt, conversation = trajectory.prompt, trajectory.conversation
    last_turn = None if conversation is None else conversation.turns[-1]
    return ScoreItem(trajectory.text, prompt.text, prompt.answer, prompt.metadata, last_turn, prompt.messages)


def _done(score: Score) -> Future[Score]:
    future = Future[Score]()
    future.set_result(score)
    return future


def _next(source: Channel[Trajectory], most: int) -> list[Trajectory]:
    """Returns the next batch, empty when the channel is closed; raises the error that it was closed with."""
    try:
        return source.get_many(most)
    except ChannelClosed:
        return []
