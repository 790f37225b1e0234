"""The rollout component: every prompt and sample answered once, by whichever rank, with the same tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from rl_platform.components.actor import LanguageActor
from rl_platform.components.rollout import LanguageRollout
from rl_platform.config.schema.rollout import Sampling, ValSampling
from rl_platform.errors import ChannelClosed, ConfigError
from rl_platform.models.tokenizer import ByteTokenizer, stops
from rl_platform.records import Prompt, Trajectory, WeightsReceived

PROMPTS = [Prompt(index, text, "", tuple(text.encode())) for index, text in enumerate(["12+3", "7", "100-1", "5*5"])]


class Sink(list):
    """What a channel is to a component that only puts."""

    put = list.append


def generated(context: Any, config: Any, world_size: int = 1, sampling: Sampling | None = None) -> list[Trajectory]:
    weights = LanguageActor(context(), config).publish(7)
    sink = Sink()
    for rank in range(world_size):
        rollout = LanguageRollout(context("rollout", rank, world_size), config)
        assert rollout.receive(weights) == WeightsReceived(7, bytes=0, buckets=0)
        rollout.generate(PROMPTS, 3, sampling or config.rollout.sampling, "train", 4, sink)
    return sorted(sink, key=lambda trajectory: (trajectory.prompt.index, trajectory.sample))


def test_every_sample_of_every_prompt_once(context, reasoning) -> None:
    found = generated(context, reasoning())
    assert [(t.prompt.index, t.sample) for t in found] == [(index, sample) for index in range(4) for sample in range(3)]
    for trajectory in found:
        assert trajectory.weights_version == 7
        assert 1 <= len(trajectory.token_ids) == len(trajectory.log_probs) <= 8
    assert len({trajectory.token_ids for trajectory in found}) == 12


def test_a_prompt_that_comes_twice_in_a_batch_gets_other_responses(context, reasoning) -> None:
    """At the end of an epoch, or where data are fewer than a batch. The first ones are as if it came once."""
    config, sink = reasoning(), Sink()
    rollout = LanguageRollout(context("rollout"), config)
    rollout.receive(LanguageActor(context(), config).publish(7))
    rollout.generate([*PROMPTS, PROMPTS[1]], 3, config.rollout.sampling, "train", 4, sink)
    found = {(t.prompt.index, t.sample): t.token_ids for t in sink}
    assert len(found) == len(set(found.values())) == 15
    for trajectory in generated(context, config):
        assert found[trajectory.prompt.index, trajectory.sample] == trajectory.token_ids


def test_newer_weights_may_arrive_before_the_first_token(context, reasoning, monkeypatch: pytest.MonkeyPatch) -> None:
    config, sink, actor = reasoning(), Sink(), LanguageActor(context(), reasoning())
    rollout, left = LanguageRollout(context("rollout"), config), [actor.publish(8)]
    rollout.receive(actor.publish(7))
    receiving = rollout._receiving

    class Updates:
        def get(self, key: int, timeout: float) -> Any:
            if not left:
                raise ChannelClosed("no more")
            return left.pop()

    @contextmanager
    def received(updates: Any) -> Iterator[None]:
        with receiving(updates):
            while rollout.loaded != 8:
                time.sleep(0.001)
            yield

    monkeypatch.setattr(rollout, "_receiving", received)
    rollout.generate(PROMPTS, 1, config.rollout.sampling, "train", 4, sink, version=7, updates=Updates())
    assert [trajectory.weights_version for trajectory in sink] == [8] * len(PROMPTS)


@pytest.mark.parametrize("world_size", [2, 5, 13])
def test_ranks_share_the_work_and_change_no_token(world_size: int, context, reasoning) -> None:
    config = reasoning(rollout={"max_running_requests": 2})
    alone, together = generated(context, reasoning()), generated(context, config, world_size)
    assert [trajectory.token_ids for trajectory in alone] == [trajectory.token_ids for trajectory in together]


def test_limits_of_training_and_validation(context, reasoning) -> None:
    greedy = generated(context, reasoning(), sampling=ValSampling(max_new_tokens=2))
    assert {len(trajectory.token_ids) for trajectory in greedy} <= {1, 2}
    assert len({trajectory.token_ids for trajectory in greedy[:3]}) == 1  # samples of one prompt do not differ


def test_lengths_that_the_model_does_not_read(context, reasoning) -> None:
    config = reasoning(data={"mini_batch_size": 4, "max_prompt_length": 30, "max_response_length": 8})
    with pytest.raises(ConfigError) as caught:
        generated(context, config)
    for word in ("data.max_prompt_length", "data.max_response_length", "38 tokens", "32"):
        assert word in str(caught.value)


def test_a_response_ends_at_a_text_of_several_tokens(context, reasoning) -> None:
    whole = generated(context, reasoning())
    stop = next(one.token_ids[1:3] for one in whole if all(32 < token < 127 for token in one.token_ids[1:3]))
    found = generated(context, reasoning(rollout={"stop": ["no such text", bytes(stop).decode()]}))
    for one, before in zip(found, whole, strict=True):
        pairs = list(pairwise(before.token_ids))
        place = pairs.index(stop) + 2 if stop in pairs else len(before.token_ids)
        assert (one.token_ids, one.log_probs) == (before.token_ids[:place], before.log_probs[:place])
        assert one.finish_reason == ("stop" if stop in pairs else before.finish_reason)
    assert found != whole


def test_stop_texts_with_special_tokens() -> None:
    class Chat(ByteTokenizer):
        """`#` is a special token."""

        def decode(self, token_ids):
            return super().decode(token for token in token_ids if token != ord("#"))

    assert stops(Chat(), ["#", "a", "ab"]) == ([ord("#"), ord("a")], ["a", "ab"])
    with pytest.raises(
        ConfigError, match=r"rollout.stop: a special token among others: of its 2 tokens .* shows \"b\""
    ):
        stops(Chat(), ["#b"])


def test_a_response_ends_at_a_text_that_stops_it(context, reasoning) -> None:
    whole = generated(context, reasoning())
    stop = next(bytes([token]) for one in whole for token in one.token_ids[1:4] if 32 <= token < 127)
    found = generated(context, reasoning(rollout={"stop": [stop.decode()]}))
    shorter = 0
    for one, before in zip(found, whole, strict=True):
        place = before.token_ids.index(stop[0]) + 1 if stop[0] in before.token_ids else len(before.token_ids)
        assert one.token_ids == before.token_ids[:place]
        assert one.finish_reason == ("stop" if one.token_ids[-1] in (stop[0], 258) else "length")
        shorter += len(one.token_ids) < len(before.token_ids)
    assert shorter
