"""Dynamic sampling: which groups are kept, how steps are filled, what is carried on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_platform.config.schema.algorithm import DynamicSampling
from rl_platform.errors import CheckpointError, DataError
from rl_platform.records import Conversation, Prompt, Trajectory
from rl_platform.runners.collection.dynamic_sampling import DynamicSampler, samples_differ, split_groups
from rl_platform.runners.reasoning import ReasoningRunner

MIXED, RIGHT, WRONG = (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)


def prompt(index: int) -> Prompt:
    return Prompt(index, str(index), "", (index,), {"what": object()})


def group(index: int, metrics: tuple[float, ...], valid: bool = True) -> list[Trajectory]:
    return [
        Trajectory(prompt(index), sample, (1, 2), (-0.5, -1.5), "stop", 3, "text", metric, metric, valid)
        for sample, metric in enumerate(metrics)
    ]


def rounds(*contents: list[tuple[float, ...]]) -> Callable[[int], list[Trajectory]]:
    """`generate` of a sampler: the groups of each round in turn, their prompts numbered through."""
    numbers, left = itertools.count(), iter(contents)
    return lambda _: [trajectory for metrics in next(left) for trajectory in group(next(numbers), metrics)]


def sampler(groups: int = 2, group_size: int = 2, mini_batch_size: int = 2, **options: Any) -> DynamicSampler:
    return DynamicSampler(DynamicSampling(**options), groups, group_size, mini_batch_size)


def indices(trajectories: list[Trajectory]) -> list[int]:
    return list(dict.fromkeys(trajectory.prompt.index for trajectory in trajectories))


def test_golden() -> None:
    groups = [[1.0] * 4, [1.0, 0, 0, 0], [0.0, 0], [0.35] * 8, [0.1] * 8]
    assert [samples_differ(metrics, 1e-6) for metrics in groups] == [False, True, False, False, False]


def test_a_lone_success_is_kept_with_its_failures() -> None:
    """A filter per sample by the spread of the others would keep the three failures only."""
    trajectories, _ = sampler(1, 4).fill(0, rounds([(1.0, 0.0, 0.0, 0.0)]))
    assert [trajectory.metric for trajectory in trajectories] == [1, 0, 0, 0]


def test_tolerance() -> None:
    assert not samples_differ([0.1, 0.1 + 1e-7], 1e-6)
    assert samples_differ([0.1, 0.1 + 1e-7], 0.0)
    assert samples_differ([1e6, 1e6 + 1e-3], 1e-6)  # float32 would not see it
    assert not samples_differ([], 0.0)


def test_refills_until_the_step_is_full_in_the_order_of_prompts() -> None:
    trajectories, metrics = sampler(3).fill(0, rounds([RIGHT, MIXED, WRONG], [WRONG, MIXED, RIGHT], [MIXED] * 3))
    assert indices(trajectories) == [1, 4, 6]
    assert len(trajectories) == 6
    assert metrics == {
        "dynamic_sampling/rounds": 3,
        "dynamic_sampling/generated": 9,
        "dynamic_sampling/kept": 5,
        "dynamic_sampling/surplus": 2,
        "dynamic_sampling/all_correct": 2,
        "dynamic_sampling/all_wrong": 2,
        "dynamic_sampling/metric_mean": 0.5,
    }


def test_surplus_comes_first_in_the_next_step() -> None:
    carrying = sampler(2)
    carrying.fill(0, rounds([MIXED, MIXED, MIXED]))
    trajectories, metrics = carrying.fill(1, lambda _: group(7, MIXED) + group(8, MIXED))
    assert indices(trajectories) == [2, 7]
    assert metrics["dynamic_sampling/rounds"] == metrics["dynamic_sampling/surplus"] == 1
    assert indices([trajectory for carried in carrying.carried for trajectory in carried]) == [8]


def test_surplus_is_dropped_where_asked() -> None:
    dropping = sampler(2, surplus="drop")
    _, metrics = dropping.fill(0, rounds([MIXED, MIXED, MIXED]))
    assert metrics["dynamic_sampling/surplus"] == 1
    assert dropping.carried == []


def test_carried_groups_of_older_weights_are_removed_and_returned() -> None:
    carrying = sampler(1)
    carrying.fill(0, rounds([MIXED, MIXED, MIXED]))  # of weights 3
    fresh = [replace(trajectory, weights_version=4) for trajectory in group(9, MIXED)]
    half = [replace(fresh[0], prompt=prompt(8)), replace(group(8, MIXED)[1])]
    carrying.carried += [half, fresh]
    assert carrying.drop(3) == []
    assert indices(carrying.drop(4)) == [1, 2, 8]
    assert carrying.carried == [fresh]


def test_the_raw_metric_decides_and_not_the_reward() -> None:
    equal = [Trajectory(prompt(0), n, (1,), (0.0,), "stop", 0, reward=float(n), metric=1.0) for n in range(2)]
    unlike = [Trajectory(prompt(1), n, (1,), (0.0,), "stop", 0, reward=1.0, metric=float(n)) for n in range(2)]
    assert indices(sampler(1).fill(0, lambda _: equal + unlike)[0]) == [1]


def test_responses_without_a_score_say_nothing() -> None:
    half = [*group(0, (1.0,)), Trajectory(prompt(0), 1, (1,), (0.0,), "stop", 0, metric=0.0, valid=False)]
    nothing = group(1, MIXED, valid=False)
    trajectories, metrics = sampler(1).fill(0, lambda _: half + nothing + group(2, MIXED))
    assert indices(trajectories) == [2]
    assert (metrics["dynamic_sampling/all_correct"], metrics["dynamic_sampling/all_wrong"]) == (1, 0)


def test_a_filter_of_the_user_reads_scored_responses_only(tmp_path: Path) -> None:
    """Its result may be NumPy's bool."""
    (tmp_path / "own.py").write_text(
        "import numpy as np\ndef mixed(group): return np.std([t.reward for t in group]) > 0\n"
    )
    half = [*group(0, (1.0,)), Trajectory(prompt(0), 1, (1,), (0.0,), "stop", 0, metric=0.0, valid=False)]
    nothing = group(1, MIXED, valid=False)
    own = sampler(1, filter=f"{tmp_path / 'own.py'}:mixed")
    assert indices(own.fill(0, lambda _: half + nothing + group(2, MIXED))[0]) == [2]


def test_a_prompt_that_was_generated_twice_has_two_groups() -> None:
    again = [replace(trajectory, sample=trajectory.sample + 2) for trajectory in group(5, MIXED)]
    found = split_groups([*group(5, MIXED), *again], 2)
    assert [[trajectory.sample for trajectory in one] for one in found] == [[0, 1], [2, 3]]


class TestExhausted:
    def test_error_says_what_was_generated(self) -> None:
        with pytest.raises(DataError) as caught:
            sampler(2, max_rounds=2).fill(4, rounds([MIXED, RIGHT], [WRONG, (0.5, 0.5)]))
        for words in ("step 4: 2 rounds", "1 of 2 groups", "4 groups generated", "1 were all right", "1 all wrong"):
            assert words in str(caught.value)

    def test_fill_with_rejected(self) -> None:
        filling = sampler(4, max_rounds=2, on_exhausted="fill_with_rejected")
        trajectories, metrics = filling.fill(0, rounds([RIGHT, MIXED, WRONG], [WRONG, MIXED, RIGHT]))
        assert indices(trajectories) == [1, 4, 0, 2]
        assert metrics["dynamic_sampling/surplus"] == 0

    def test_train_partial_fills_mini_batches_and_carries_the_rest(self) -> None:
        partial = sampler(8, 2, 4, max_rounds=1, on_exhausted="train_partial")
        trajectories, metrics = partial.fill(0, rounds([MIXED, MIXED, RIGHT, MIXED]))
        assert indices(trajectories) == [0, 1]
        assert metrics["dynamic_sampling/surplus"] == len(partial.carried) == 1

    def test_train_partial_needs_one_mini_batch(self) -> None:
        with pytest.raises(DataError, match="do not fill a mini-batch of 8 rows"):
            sampler(8, 2, 8, max_rounds=1, on_exhausted="train_partial").fill(0, rounds([MIXED, RIGHT]))


@given(
    seed=st.integers(0, 99),
    groups=st.integers(1, 6),
    group_size=st.integers(2, 4),
    share=st.sampled_from([0.0, 0.2, 1.0]),
    surplus=st.sampled_from(["carry", "drop"]),
    on_exhausted=st.sampled_from(["error", "train_partial", "fill_with_rejected"]),
)
def test_whole_groups_termination_and_conservation(seed, groups, group_size, share, surplus, on_exhausted) -> None:
    def steps() -> list[Any]:
        draw, numbers = random.Random(seed), itertools.count()
        filled = sampler(groups, group_size, group_size, surplus=surplus, on_exhausted=on_exhausted, max_rounds=3)
        found: list[Any] = []
        for step in range(4):
            carried = len(filled.carried)
            called = []

            def generate(number: int, called: list[int] = called) -> list[Trajectory]:
                called.append(number)
                metrics = [(float(draw.random() < share),) + (0.0,) * (group_size - 1) for _ in range(groups)]
                return [trajectory for m in metrics for trajectory in group(next(numbers), m)]

            try:
                trajectories, counts = filled.fill(step, generate)
            except DataError:
                assert on_exhausted != "fill_with_rejected"
                return found
            assert called == list(range(len(called)))
            assert len(called) <= 3
            whole = split_groups(trajectories, group_size)
            assert all([t.sample for t in samples] == list(range(group_size)) for samples in whole)
            assert len(whole) == groups or on_exhausted == "train_partial"
            if on_exhausted != "fill_with_rejected":
                assert all(samples_differ([t.metric for t in samples], 1e-6) for samples in whole)
                # issued = trained + surplus
                assert carried + counts["dynamic_sampling/kept"] == len(whole) + counts["dynamic_sampling/surplus"]
            found.append(indices(trajectories))
        return found

    assert steps() == steps()


def test_carried_groups_survive_a_checkpoint(tmp_path: Any) -> None:
    before, after = sampler(1), sampler(1)
    talk = Conversation(("a", "b"), (False, True), 1)
    generate = rounds([MIXED, MIXED, MIXED])
    before.fill(0, lambda step: [replace(trajectory, conversation=talk) for trajectory in generate(step)])
    torch.save(before.state_dict(), tmp_path / "state.pt")
    prompts = {index: prompt(index) for index in range(3)}
    after.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), prompts)

    def plain(groups: list[list[Trajectory]]) -> list[Any]:
        return [{**vars(t), "prompt": t.prompt.index} for samples in groups for t in samples]

    assert plain(after.carried) == plain(before.carried)
    assert len(after.carried) == 2
    assert after.carried[0][0].prompt is prompts[1]
    assert after.carried[0][0].conversation == talk


def test_carried_groups_of_another_size_are_refused() -> None:
    before = sampler(1)
    before.fill(0, rounds([MIXED, MIXED]))
    with pytest.raises(CheckpointError, match=r"groups of 2 samples.*group_size is 4"):
        sampler(1, 4).load_state_dict(before.state_dict(), {1: prompt(1)})


def test_carried_groups_are_not_lost_without_dynamic_sampling() -> None:
    before = sampler(1)
    before.fill(0, rounds([MIXED, MIXED, MIXED]))
    loader = SimpleNamespace(load_state_dict=lambda state: None)
    without = SimpleNamespace(loader=loader, sampler=None, partial=None, prompts={})
    state = {"loader": {}, "dynamic_sampling": before.state_dict()}
    with pytest.raises(CheckpointError, match=r"holds 2 prompts whose responses .* algorithm.dynamic_sampling, or"):
        ReasoningRunner.load_state_dict(without, state)  # type: ignore[arg-type]
    ReasoningRunner.load_state_dict(without, {**state, "dynamic_sampling": {"carried": []}})  # type: ignore[arg-type]
