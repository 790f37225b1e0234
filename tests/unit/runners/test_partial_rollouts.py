"""Prompts that take several steps: each is trained on once, whatever is cut, killed, saved or comes twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_platform.config.schema import Config
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.sampling import uniforms
from rl_platform.envs.reasoning.prompts import PromptLoader
from rl_platform.errors import CheckpointError, WorkerDied
from rl_platform.records import Prompt, SamplingParams, Trajectory
from rl_platform.rng import derive_seed
from rl_platform.runners.collection.cut_generation import generate_until, share_of
from rl_platform.runners.collection.partial_rollouts import PartialRollouts
from rl_platform.runners.reasoning import restore
from rl_platform.runners.recovery import Recovery
from rl_platform.runners.sample_ledger import SampleLedger
from rl_platform.runtime.channel import Channel

LONGEST = 12
KEY = "rollout.partial_rollout"


class Engine:
    """Every response has a length of its own; those that are admitted grow by a token at a time."""

    version, slots = 0, 5

    def __init__(self, length: Any) -> None:
        self.length = length

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, on_finished: Any) -> None:
        self.aborted = False
        waiting, running = list(requests), []
        while (waiting or running) and not self.aborted:
            while waiting and len(running) < self.slots:
                running.append((waiting.pop(0), []))
            for request, tokens in list(running):
                tokens.append(self.version)
                if len(tokens) >= min(request.limit(sampling), self.length(request)):
                    running.remove((request, tokens))
                    on_finished(self.completion(request, tokens, "length"))
        for request, tokens in [*running, *((request, []) for request in waiting)]:
            on_finished(self.completion(request, tokens, "abort"))

    def abort(self) -> None:
        self.aborted = True

    def completion(self, request: Request, tokens: list[int], reason: Any) -> Completion:
        return Completion(request.index, tuple(tokens), (-1.0,) * len(tokens), reason)


class Reward:
    def stream(self, source: Any, sink: Any) -> Any:
        return Call(lambda: None)


class Call:
    def __init__(self, function: Any) -> None:
        self.function = function

    def wait(self) -> list[Any]:
        return [self.function()]

    def settle(self) -> None: ...


class Rollout:
    """Ranks that work one after the other; now and then one dies with some of its responses delivered."""

    name = "rollout"

    def __init__(self, draw: random.Random, ranks: int, deaths: float) -> None:
        self.draw, self.world_size, self.deaths = draw, ranks, deaths
        self.engine = Engine(lambda request: 1 + draw.randrange(LONGEST))

    def generate_until(self, groups: Any, needed: int, sampling: Any, step: int, whole: Any, cut: Any, version: int):
        self.engine.version = version
        for rank in range(self.world_size):
            found: list[Trajectory] = []
            share, quota = share_of(groups, needed, rank, self.world_size)
            params = SamplingParams(LONGEST)
            generate_until(self.engine, share, quota, params, (), lambda *_: 0, found.append)  # type: ignore[arg-type]
            dies = self.draw.random() < self.deaths
            for one in found[: self.draw.randrange(len(found) + 1)] if dies else found:
                cut.put(replace(one, reward=1.0) if one.complete else one)
            if dies:
                cut.close(WorkerDied("a process"))
                break
        return Call(lambda: None)


class Runtime:
    restarts = 0

    def channel(self, name: str, capacity: int, *users: Any) -> Channel[Any]:
        return Channel(name, 4096, 5.0)

    def restart(self, error: WorkerDied, settle: Any) -> list[Any]:
        settle()
        self.restarts += 1
        return []


class Reporter:
    def progress(self, done: int, total: int, unit: str) -> None: ...


def parts(seed: int, prompts: int, ranks: int = 1, deaths: float = 0.0, **keys: Any) -> tuple[PartialRollouts, Any]:
    config = Config(
        runner={
            "task_type": "reasoning",
            "max_steps": keys.get("steps", 6),
            "max_epochs": keys.get("epochs"),
            "max_staleness": keys.get("ahead", 0),
            "stale": keys.get("stale", "wait"),
        },
        cluster={"component_placement": {"actor,rollout,reward": "all"}},
        algorithm={"group_size": keys.get("samples", 2), "rollout_is": {}},
        data={"train_batch_size": keys.get("batch", 3), "max_response_length": LONGEST},
        rollout={"partial_rollout": {"prompts_in_flight": keys.get("batch", 3) + keys.get("more", 3)}},
    )
    data = [Prompt(index, str(index), "", (index,)) for index in range(prompts)]
    loader = PromptLoader(data, 64, seed)
    rollout, runtime = Rollout(random.Random(seed), ranks, deaths), Runtime()
    recovery = Recovery(runtime, rollout)  # type: ignore[arg-type]
    groups: Any = {"reward": Reward(), "rollout": rollout}
    collects = PartialRollouts(config, runtime, recovery, groups, Reporter(), loader, SampleLedger())  # type: ignore
    return collects, data


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    prompts=st.integers(1, 40),
    ranks=st.integers(1, 4),
    deaths=st.sampled_from([0.0, 0.0, 0.3]),
    batch=st.integers(1, 5),
    more=st.integers(1, 12),
    samples=st.integers(1, 3),
    steps=st.integers(1, 6),
)
def test_each_prompt_that_is_begun_is_trained_on_once_and_none_is_left(
    seed, prompts, ranks, deaths, batch, more, samples, steps
) -> None:
    partial, data = parts(seed, prompts, ranks, deaths, batch=batch, more=more, samples=samples, steps=steps)
    trained: Counter[int] = Counter()
    names: list[tuple[int, int]] = []
    for step in range(steps):
        partial.recovery.version = step
        found, metrics = partial.collect(step)
        assert len(found) == batch * samples
        for place in range(0, len(found), samples):
            group = found[place : place + samples]
            assert len({one.prompt.index for one in group}) == 1
            trained[group[0].prompt.index] += 1
        for one in found:
            assert one.complete
            assert one.reward == 1.0, "every complete response went through the reward, and only these"
            assert 1 <= len(one.token_ids) == len(one.log_probs) <= LONGEST
            segments = one.segments or ((one.weights_version, len(one.token_ids)),)
            assert [version for version, count in segments for _ in range(count)] == list(one.token_ids)
        open_names = [(one.prompt.index, one.sample) for group in partial.open for one in group]
        assert len(set(open_names)) == len(open_names) == metrics["partial_rollout/open_prompts"] * samples
        names += open_names
    assert partial.open == []
    begun = steps * batch
    expected: Counter[int] = Counter()
    reference = PromptLoader(data, begun, seed)
    for prompt in reference.next_batch():
        expected[prompt.index] += 1
    assert trained == expected


@pytest.mark.parametrize(("prompts", "steps"), [(12, 4), (13, 5), (3, 1), (1, 1), (16, 6)])
def test_the_last_step_of_an_epoch_leaves_nothing_behind(prompts: int, steps: int) -> None:
    partial, data = parts(3, prompts, steps=100, epochs=1, more=4)
    trained: Counter[int] = Counter()
    count = 0
    while partial.loader.epoch < 1 or partial.open:
        trained.update({one.prompt.index for one in partial.collect(count)[0]})
        count += 1
    assert count == steps
    assert all(trained[prompt.index] >= 1 for prompt in data)


def test_what_is_open_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    """The same engine goes on with the same responses: resumed or not, the same is trained on."""

    def whole_run(resumed_at: int | None) -> list[Trajectory]:
        partial, data = parts(7, 20, batch=3, more=4)
        trained: list[Trajectory] = []
        for step in range(6):
            if step == resumed_at:
                state = {"loader": partial.loader.state_dict(), "partial": partial.state_dict()}
                assert state["partial"]["open"], "else nothing is shown"
                torch.save(state, tmp_path / "state.pt")
                state = torch.load(tmp_path / "state.pt", weights_only=True)
                later, _ = parts(7, 20, batch=3, more=4)
                later.groups = partial.groups  # the engine's own random numbers
                later.recovery = partial.recovery
                later.loader.load_state_dict(state["loader"])
                restore(later, state["partial"], {prompt.index: prompt for prompt in data}, KEY)
                partial = later
            partial.recovery.version = step
            trained += partial.collect(step)[0]
        return trained

    expected = whole_run(None)
    assert any(one.segments for one in expected)
    assert whole_run(2) == whole_run(4) == expected


class DrawingEngine(Engine):
    """Tokens and lengths are made of the random numbers of a request alone."""

    def __init__(self) -> None:
        super().__init__(lambda request: 1 + request.seed % LONGEST)

    def completion(self, request: Request, tokens: list[int], reason: Any) -> Completion:
        return super().completion(request, (uniforms(request.seed, len(tokens)) * 1e9).int().tolist(), reason)


class MortalRollout(Rollout):
    """Two ranks. Rank 1 dies in each step once, when rank 0 has delivered all of its responses."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), 2, 0.0)
        self.engine, self.dead = DrawingEngine(), set[int]()

    def generate_until(self, groups: Any, needed: int, sampling: Any, step: int, whole: Any, cut: Any, version: int):
        self.engine.version = version

        def seed(prompt: Prompt, sample: int) -> int:
            return derive_seed(step, prompt.index, sample)

        for rank in range(2):
            if rank and step in self.dead:
                self.dead.discard(step)
                cut.close(WorkerDied("a process"))
                break
            share, quota = share_of(groups, needed, rank, 2)
            params = SamplingParams(LONGEST)
            generate_until(self.engine, share, quota, params, (), seed, cut.put)  # type: ignore[arg-type]
        return Call(lambda: None)


def test_a_death_changes_no_response() -> None:
    """The random numbers of a step are used once in each response, also if the step is repeated."""

    def whole_run(deaths: set[int]) -> tuple[list[Trajectory], int]:
        collects, _ = parts(3, 40, batch=4, more=6)
        rollout = MortalRollout()
        rollout.dead |= deaths
        collects.groups = {"reward": Reward(), "rollout": rollout}
        trained: list[Trajectory] = []
        for step in range(6):
            collects.recovery.version = step
            trained += collects.collect(step)[0]
        return trained, collects.runtime.restarts

    expected, _ = whole_run(set())
    found, restarts = whole_run({0, 2, 3})
    assert restarts == 3
    assert any(one.segments for one in expected)
    assert all(len(set(one.token_ids)) == len(one.token_ids) for one in found)
    assert found == expected


def test_checkpoints_that_do_not_fit() -> None:
    partial, data = parts(7, 20)
    partial.collect(0)
    state, prompts = partial.state_dict(), {prompt.index: prompt for prompt in data}
    other, _ = parts(7, 20, samples=1)
    with pytest.raises(CheckpointError, match=r"2 responses each, algorithm.group_size is 1"):
        restore(other, state, prompts, KEY)
    with pytest.raises(CheckpointError, match=r"3 prompts whose responses .* rollout.partial_rollout"):
        restore(None, state, prompts, KEY)
    restore(None, {"open": []}, prompts, KEY)
    restore(None, None, prompts, KEY)
    restore(other, None, prompts, KEY)
    assert other.open == []


@pytest.mark.parametrize("ahead", [1, 2])
def test_responses_that_became_too_old_begin_again(ahead: int) -> None:
    steps = 30
    ages: dict[str, list[int]] = {}
    for stale in ("wait", "drop"):
        partial, _ = parts(5, 40, batch=2, more=9, steps=steps, ahead=ahead, stale=stale)
        trained = 0
        for step in range(steps):
            version = partial.recovery.version = max(0, step - ahead)
            found, _ = partial.collect(step)
            partial.ledger.trained(one.prompt.index for one in found)
            trained += len(found)
            ages.setdefault(stale, []).extend(step - one.weights_version for one in found)
            assert all(one.token_ids[0] == one.weights_version <= version for one in found)
            partial.ledger.check(Counter(one.prompt.index for group in partial.open for one in group))
        assert partial.open == []
        counts = partial.ledger.state_dict()["counts"]
        assert counts["issued"] == counts["trained"] + counts["dropped"]
        assert trained == counts["trained"] == steps * 2 * 2
        assert (counts["dropped"] > 0) == (stale == "drop")
    assert max(ages["drop"]) == ahead < max(ages["wait"])


def test_metrics_count_what_is_stale() -> None:
    partial, _ = parts(1, 30, samples=1, more=3)
    shares = []
    for step in range(6):
        partial.recovery.version = step
        found, metrics = partial.collect(step)
        tokens = [token for one in found for token in one.token_ids]  # the engine writes its version
        assert metrics["staleness/stale_token_frac"] == pytest.approx(sum(t < step for t in tokens) / len(tokens))
        mixed = sum(len(set(one.token_ids)) > 1 for one in found)
        assert metrics["partial_rollout/continued_frac"] == mixed / len(found)
        shares.append(metrics["staleness/stale_token_frac"])
    assert shares[0] == 0 < max(shares)
