"""Responses that are cut when enough prompts are complete, and that go on under other weights where they stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.records import Prompt, SamplingParams, Trajectory, Weights
from rl_platform.runners.collection.cut_generation import continued, generate_until, share_of

LONGEST = 30


@pytest.fixture(scope="module")
def shared(script: Callable[[Path], ModuleType]) -> ModuleType:
    """Models, prompts and checks that the torch engine is tested with."""
    return script(Path(__file__).parents[1] / "engines" / "test_rollout.py")


def not_begun(count: int, samples: int = 1) -> list[list[Trajectory]]:
    prompts = [Prompt(index, str(index), "", (1 + index, 2, 3)) for index in range(count)]
    return [[Trajectory(prompt, sample, (), (), "abort", -1) for sample in range(samples)] for prompt in prompts]


def after(groups: Sequence[Sequence[Trajectory]], found: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """`groups` with what was delivered in its place; each unfinished response was delivered once."""
    names = [(one.prompt.index, one.sample) for one in found]
    assert sorted(names) == sorted((o.prompt.index, o.sample) for group in groups for o in group if not o.complete)
    by_name = dict(zip(names, found, strict=True))
    return [[by_name.get((one.prompt.index, one.sample), one) for one in group] for group in groups]


def complete(groups: Sequence[Sequence[Trajectory]]) -> list[int]:
    return [group[0].prompt.index for group in groups if all(one.complete for one in group)]


class TestTorchEngine:
    """With the real engine: tokens, log-probs and versions."""

    def cut_twice(self, shared: ModuleType) -> tuple[list[list[Trajectory]], list[Any]]:
        """Eight groups of two after two calls, each of which completes two groups, under weights 0 and 1."""
        models = [shared.causal_lm()]
        models.append(copy.deepcopy(models[0]))
        torch.manual_seed(1)
        for parameter in models[1].parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
        eos = (0, 1, 2)
        engine = shared.engine_for(copy.deepcopy(models[0]), eos, max_running=6)
        groups = not_begun(8, 2)
        for version in range(2):
            engine.receive(Weights(version, shared.state_of(models[version])))
            found: list[Trajectory] = []
            waiting = [group for group in groups if not all(one.complete for one in group)]

            def seed(prompt: Prompt, sample: int, version: int = version) -> int:
                return 100 * version + 10 * prompt.index + sample

            generate_until(engine, waiting, 2, SamplingParams(LONGEST, 1.0), eos, seed, found.append)
            by_prompt = {group[0].prompt.index: group for group in after(waiting, found)}
            groups = [by_prompt.get(group[0].prompt.index, group) for group in groups]
        return groups, models

    def test_each_token_has_the_log_prob_of_the_weights_that_its_segment_names(self, shared: ModuleType) -> None:
        groups, models = self.cut_twice(shared)
        assert len(complete(groups)) >= 4
        mixed = 0
        for one in (one for group in groups for one in group):
            segments = one.segments or ((one.weights_version, len(one.token_ids)),)
            assert sum(count for _, count in segments) == len(one.token_ids) == len(one.log_probs)
            assert [version for version, _ in segments] in ([0], [1], [0, 1], [-1])
            assert one.weights_version == segments[0][0]
            assert len(one.token_ids) <= LONGEST
            mixed += len(segments) == 2
            start = 0
            request = Request(0, one.prompt.token_ids, 0)
            for version, count in segments:
                if count == 0:
                    continue
                whole = Completion(0, one.token_ids, one.log_probs, "length")
                expected = shared.teacher_forced(copy.deepcopy(models[version]), request, whole)
                part = slice(start, start + count)
                torch.testing.assert_close(torch.tensor(one.log_probs[part]), expected[part], rtol=0, atol=1e-4)
                start += count
        assert mixed >= 3, "else nothing was continued"

    def test_the_same_responses_are_cut_again(self, shared: ModuleType) -> None:
        assert self.cut_twice(shared)[0] == self.cut_twice(shared)[0]

    @pytest.mark.parametrize("needed", [0, 1, 2, 4])
    def test_responses_beyond_a_smaller_limit_are_shortened(self, shared: ModuleType, needed: int) -> None:
        """A run is resumed with a smaller data.max_response_length: they asked for less than no token."""
        groups = not_begun(4, 2)
        segments = ((3, 4), (4, 3), (5, 2))
        long = replace(groups[0][0], token_ids=(5,) * 9, log_probs=(-1.0,) * 9, segments=segments, weights_version=3)
        exact = replace(long, sample=1, token_ids=(5,) * 6, log_probs=(-1.0,) * 6, segments=())
        groups[0] = [long, exact]
        engine = shared.engine_for(shared.causal_lm(), (), max_running=3)
        found: list[Trajectory] = []
        generate_until(engine, groups, needed, SamplingParams(6), (), lambda *_: 5, found.append)
        first, second = after(groups, found)[0]
        assert (first.token_ids, first.log_probs, first.finish_reason) == ((5,) * 6, (-1.0,) * 6, "length")
        assert (first.segments, first.weights_version) == (((3, 4), (4, 2)), 3)
        assert second == replace(exact, finish_reason="length")
        assert len(complete(after(groups, found))) >= max(needed, 1)
        assert any(one.token_ids for group in after(groups, found)[1:] for one in group) == (needed > 1)
        assert all(len(one.token_ids) <= 6 for one in found)

    def test_when_all_are_needed_nothing_is_cut(self, shared: ModuleType) -> None:
        engine = shared.engine_for(shared.causal_lm(), (0, 1), max_running=3)
        found: list[Trajectory] = []
        generate_until(engine, not_begun(4), 4, SamplingParams(9), (0, 1), lambda *_: 5, found.append)
        assert all(one.complete and one.token_ids for one in found)
        assert len(found) == 4

    def test_a_rank_that_need_not_complete_any_gives_back_what_it_got(self, shared: ModuleType) -> None:
        found: list[Trajectory] = []
        engine = shared.engine_for(shared.causal_lm())
        generate_until(engine, not_begun(2), 0, SamplingParams(9), (), lambda *_: 5, found.append)
        assert found == [one for group in not_begun(2) for one in group]


@given(groups=st.integers(1, 40), ranks=st.integers(1, 9), data=st.data())
def test_ranks_share_groups_and_what_is_needed(groups: int, ranks: int, data: Any) -> None:
    needed = data.draw(st.integers(0, groups))
    everything = not_begun(groups)
    shares = [share_of(everything, needed, rank, ranks) for rank in range(ranks)]
    assert sorted(g[0].prompt.index for share, _ in shares for g in share) == list(range(groups))
    assert sum(quota for _, quota in shares) == needed
    assert all(quota <= len(share) for share, quota in shares)


@settings(max_examples=200)
@given(pieces=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6))
def test_segments_add_up_and_name_each_version_once_in_a_row(pieces: list[tuple[int, int]]) -> None:
    one = not_begun(1)[0][0]
    expected: list[int] = []
    for version, count in pieces:
        one = continued(one, Completion(0, (9,) * count, (-1.0,) * count, "abort"), version, 99, (7,))
        expected += [version] * count
    segments = one.segments or (((one.weights_version, len(expected)),) if expected else ())
    assert [version for version, count in segments for _ in range(count)] == expected
    assert len(one.token_ids) == len(one.log_probs) == len(expected)
    assert all(first[0] != second[0] for first, second in pairwise(segments))
    assert not expected or one.weights_version == expected[0]


@pytest.mark.parametrize(
    ("tokens", "reason"), [((5, 7), "stop"), ((5, 6, 6), "length"), ((5,), "abort"), ((), "abort")]
)
def test_one_that_was_stopped_at_its_last_token_is_complete(tokens: tuple[int, ...], reason: str) -> None:
    completion = Completion(0, tokens, (-1.0,) * len(tokens), "abort")
    assert continued(not_begun(1)[0][0], completion, 0, 3, (7,)).finish_reason == reason
