"""The torch engine against transformers, with pages of several sizes. test_engine_contract.py has what all promise."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import decoding_scenarios
import pytest
import torch
from torch import Tensor

from rl_platform import acceleration
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.batch import ContinuousBatch
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.models.language import LanguageModel
from rl_platform.records import SamplingParams, Weights

VOCABULARY = 47
NEVER = VOCABULARY + 1  # an EOS id that no model can sample
LENGTHS = (3, 11, 1, 7, 7, 20, 5, 2, 9, 14, 1, 6, 4)


PAGES = [
    pytest.param((4, True), id="4"),
    pytest.param((64, True), id="64", marks=pytest.mark.slow),
    pytest.param((4, False), id="4-uncompiled", marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True, params=PAGES)
def page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a page: the sequences here fill several, or none. And whether running ones attend in a compiled loop
    where there is one."""
    size, compiled = request.param
    monkeypatch.setattr("rl_platform.engines.rollout.kv_cache.PAGE", size)
    if not compiled:
        monkeypatch.setattr("rl_platform.accel.build.decode_attention", lambda: None)


def causal_lm(kind: str = "llama", tied: bool = True, head_dim: int = 8) -> Any:
    """A tiny model whose head may be tied."""
    options = {"tie_word_embeddings": tied, "max_position_embeddings": 64, "initializer_range": 0.3}
    return decoding_scenarios.causal_lm(kind, head_dim=head_dim, vocabulary=VOCABULARY, **options)


def state_of(plain: Any) -> dict[str, Tensor]:
    """The weights of a transformers model as an actor publishes them: by reference."""
    return {name: tensor.detach() for name, tensor in LanguageModel(plain).state_dict(keep_vars=True).items()}


def engine_for(plain: Any, eos: Sequence[int] = (NEVER,), max_running: int = 64) -> TorchRolloutEngine:
    engine = TorchRolloutEngine(copy.deepcopy(plain.config), eos, max_running, torch.device("cpu"))
    engine.receive(Weights(0, state_of(plain)))
    return engine


def prompts(lengths: Sequence[int] = LENGTHS, shared: int = 0) -> list[Request]:
    numbers = torch.Generator().manual_seed(4)
    prefix = tuple(range(1, shared + 1))
    return [
        Request(index, prefix + tuple(torch.randint(VOCABULARY, (length,), generator=numbers).tolist()), 100 + index)
        for index, length in enumerate(lengths)
    ]


def answers(engine: TorchRolloutEngine, requests: Sequence[Request], sampling: SamplingParams) -> dict[int, Completion]:
    completions: list[Completion] = []
    engine.generate(requests, sampling, completions.append)
    assert sorted(completion.index for completion in completions) == sorted(request.index for request in requests)
    return {completion.index: completion for completion in completions}


def teacher_forced(plain: Any, request: Request, completion: Completion, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the completion in one forward pass of transformers."""
    plain.set_attn_implementation("eager")
    tokens = torch.tensor([request.token_ids + completion.token_ids])
    with torch.no_grad():
        distribution = (plain(tokens).logits[0] / temperature).log_softmax(-1)
    start = len(request.token_ids)
    return distribution[start - 1 : -1].gather(1, tokens[0, start:, None]).squeeze(1)


# OLMo 2 with transformers' modules
@pytest.mark.parametrize(
    "kind",
    ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2", "qwen3", "mistral", "olmo2"))],
)
@pytest.mark.parametrize("shared", [0, 6])
def test_greedy_decoding_equals_transformers(kind: str, shared: int) -> None:
    requests = prompts(shared=shared)
    completions = answers(engine_for(causal_lm(kind), max_running=4), requests, SamplingParams(10, temperature=0.0))
    assert [completions[request.index].token_ids for request in requests] == by_transformers(kind, shared)
    assert {completion.finish_reason for completion in completions.values()} == {"length"}


@cache
def by_transformers(kind: str, shared: int) -> list[tuple[int, ...]]:
    """Ten tokens after each prompt; they do not depend on pages."""
    plain, found = causal_lm(kind), []
    for request in prompts(shared=shared):
        prompt = torch.tensor([request.token_ids])
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 10, "do_sample": False}
        found.append(tuple(plain.generate(prompt, **options)[0, len(request.token_ids) :].tolist()))
    return found


HOT = SamplingParams(16, temperature=1.3)
SOME_STOP_EARLY = tuple(range(5))


@pytest.fixture(scope="module")
def alone() -> dict[int, Completion]:
    """The answer to each request when it is the only one."""
    engine = engine_for(causal_lm(), SOME_STOP_EARLY)
    return {request.index: answers(engine, [request], HOT)[request.index] for request in prompts(LENGTHS * 2)}


class Arriving:
    """Requests that arrive one every second step, the first ones with a common prefix that the last ones lack."""

    longest = 128

    def __init__(self, requests: Sequence[Request]) -> None:
        self.left, self.steps = list(requests), 0

    def take(self, idle: bool) -> list[Request]:
        self.steps += 1
        count = 6 if self.steps == 1 else int(idle or self.steps % 2)
        taken, self.left = self.left[:count], self.left[count:]
        return taken


def arriving() -> list[Request]:
    other = [replace(request, index=len(LENGTHS) + request.index) for request in prompts()]
    return prompts(shared=40) + other


@cache
def arriving_alone() -> dict[int, Completion]:
    engine = engine_for(causal_lm())
    return {request.index: answers(engine, [request], HOT)[request.index] for request in arriving()}


class TestIndependence:
    """A response depends on its own request alone."""

    @pytest.mark.parametrize("max_running", [2, 64])
    @pytest.mark.slow
    def test_arrival_during_the_generation(self, max_running: int) -> None:
        plain, requests, expected = causal_lm(), arriving(), arriving_alone()
        for first in (0, len(LENGTHS)):  # given at once, of which the prefix is computed; the others arrive
            completions: list[Completion] = []
            engine = engine_for(plain, max_running=max_running)
            engine.generate(requests[:first], HOT, completions.append, Arriving(requests[first:]))
            assert len(completions) == len(requests)
            for completion in completions:
                assert completion.token_ids == expected[completion.index].token_ids
                assert torch.allclose(
                    torch.tensor(completion.log_probs), torch.tensor(expected[completion.index].log_probs), atol=1e-5
                )

    @pytest.mark.parametrize("max_running", [1, 3, 64])
    def test_of_the_number_of_slots(self, max_running: int, alone: dict[int, Completion]) -> None:
        completions = answers(engine_for(causal_lm(), SOME_STOP_EARLY, max_running), prompts(LENGTHS * 2), HOT)
        lengths = {len(completion.token_ids) for completion in completions.values()}
        assert len(lengths) > 3, "responses of one length would exercise no slot twice"
        for index, together in completions.items():
            assert (together.token_ids, together.finish_reason) == (alone[index].token_ids, alone[index].finish_reason)
            assert together.log_probs == pytest.approx(alone[index].log_probs, abs=1e-4)

    def test_equal_prompts_differ_by_their_seeds(self) -> None:
        prompt = (5, 6, 7)
        requests = [Request(0, prompt, 1), Request(1, prompt, 2), Request(2, prompt, 1)]
        completions = answers(engine_for(causal_lm()), requests, HOT)
        assert completions[0].token_ids == completions[2].token_ids != completions[1].token_ids


class TestEnds:
    def test_one_token(self) -> None:
        plain, requests = causal_lm(), prompts()
        completions = answers(engine_for(plain, max_running=2), requests, SamplingParams(1, temperature=0.0))
        ends = {(len(c.token_ids), len(c.log_probs), c.finish_reason) for c in completions.values()}
        assert ends == {(1, 1, "length")}

    def test_a_request_with_a_lower_limit_gets_the_beginning_of_what_it_would_get(self) -> None:
        plain, sampling = causal_lm(), SamplingParams(6)
        requests = prompts()
        cut = [replace(request, max_new_tokens=1 + request.index % 9) for request in requests]
        whole, limited = (answers(engine_for(plain, max_running=3), asked, sampling) for asked in (requests, cut))
        for request in cut:
            expected = whole[request.index].token_ids[: min(1 + request.index % 9, 6)]
            assert limited[request.index].token_ids == expected
            assert limited[request.index].finish_reason == "length"

    def test_eos_as_last_token_allowed_is_a_stop(self) -> None:
        plain, requests = causal_lm(), prompts()
        greedy = SamplingParams(4, temperature=0.0)
        tokens = answers(engine_for(plain), requests, greedy)[5].token_ids
        eos = next(token for token in tokens if tokens.index(token) > 0)
        place = tokens.index(eos) + 1
        completion = answers(engine_for(plain, (eos,)), requests, SamplingParams(place, temperature=0.0))[5]
        assert (len(completion.token_ids), completion.finish_reason) == (place, "stop")

    def test_nothing_to_do(self) -> None:
        assert answers(engine_for(causal_lm()), [], SamplingParams(4)) == {}

    def test_finished_responses_do_not_wait_for_others(self) -> None:
        plain, requests = causal_lm(), prompts()
        seen: list[int] = []

        def stop_after_two(completion: Completion) -> None:
            seen.append(completion.index)
            if len(seen) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine_for(plain, max_running=1).generate(requests, SamplingParams(3), stop_after_two)
        assert seen == [0, 1]


class TestWeights:
    greedy = SamplingParams(6, temperature=0.0)

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("by", ["reference", "copy"])
    def test_new_weights_are_used_by_every_layer(self, by: str, tied: bool) -> None:
        plain, requests = causal_lm(tied=tied), prompts()
        engine = engine_for(plain)
        before = answers(engine, requests, self.greedy)
        trainer = plain if by == "reference" else copy.deepcopy(plain)
        for parameter in trainer.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
        engine.receive(Weights(1, state_of(trainer)))
        assert engine.version == 1
        after = answers(engine, requests, self.greedy)
        assert after != before
        for request in requests:
            expected = teacher_forced(copy.deepcopy(trainer), request, after[request.index])
            torch.testing.assert_close(torch.tensor(after[request.index].log_probs), expected, rtol=0, atol=1e-4)

    def test_a_reference_takes_no_memory(self) -> None:
        plain = causal_lm()
        engine = engine_for(plain)
        own = engine.model.state_dict(keep_vars=True)
        assert all(own[name].data_ptr() == tensor.data_ptr() for name, tensor in state_of(plain).items())

    def test_a_copy_does_not_touch_the_trainer(self) -> None:
        plain = causal_lm()
        engine, kept = engine_for(copy.deepcopy(plain)), copy.deepcopy(state_of(plain))
        engine.receive(Weights(1, state_of(plain)))
        answers(engine, prompts(), self.greedy)
        assert all(torch.equal(kept[name], tensor) for name, tensor in state_of(plain).items())

    def test_without_packed_matrices_the_result_is_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain, requests = causal_lm(), prompts()
        packed = engine_for(plain)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        unpacked = engine_for(plain)
        unpacked._pack()
        assert all(linear.packed is None for linear in unpacked._decoder.linears)
        packed._pack()
        if packed._decoder.linears[0].packed is None:
            pytest.skip("this build of torch has no oneDNN: there is nothing to compare")
        assert sum(len(linear.layers) for linear in packed._decoder.linears) == 2 * 7 + 1  # both layers and the head
        assert all(linear.packed is not None for linear in packed._decoder.linears)
        actual, expected = (answers(engine, requests, self.greedy) for engine in (packed, unpacked))
        assert {i: c.token_ids for i, c in actual.items()} == {i: c.token_ids for i, c in expected.items()}

    def test_packed_matrices_are_freed_with_their_generation(self) -> None:
        plain = causal_lm()
        engine = engine_for(plain)
        engine._pack()
        if engine._decoder.linears[0].packed is None:
            pytest.skip("this build of torch has no oneDNN: there is nothing to free")
        answers(engine, prompts(), self.greedy)
        assert all(linear.packed is None for linear in engine._decoder.linears)

    @pytest.mark.parametrize("tied", [True, False])
    def test_weights_of_another_type_are_converted_and_follow_updates(self, tied: bool) -> None:
        """Matrices of layers are converted when they are packed, and are references until then."""
        plain, requests = causal_lm(tied=tied), prompts()
        packs = acceleration.find("packed_linear_class", torch.device("cpu"), torch.bfloat16) is not None
        engine = TorchRolloutEngine(copy.deepcopy(plain.config), (NEVER,), 4, torch.device("cpu"), torch.bfloat16)
        for version in range(2):
            for parameter in plain.parameters():
                parameter.data.mul_(1 - 0.5 * version)
            engine.receive(Weights(version, state_of(plain)))
            own = engine.model.state_dict(keep_vars=True)
            for name, tensor in state_of(plain).items():
                referenced = packs and "_proj.weight" in name
                assert own[name].dtype == (torch.float32 if referenced else torch.bfloat16), name
                assert (own[name].data_ptr() == tensor.data_ptr()) == referenced, name
            assert {parameter.dtype for parameter in plain.parameters()} == {torch.float32}
            assert (own["head.weight"].data_ptr() == own["backbone.embed_tokens.weight"].data_ptr()) == tied
            errors = []
            for index, completion in answers(engine, requests, SamplingParams(6)).items():
                expected = teacher_forced(copy.deepcopy(plain), requests[index], completion)
                errors.append((torch.tensor(completion.log_probs) - expected).abs())
            assert torch.cat(errors).mean() < 0.06  # other weights are off by more than 0.3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("continues", [True, False], ids=["continue", "abort"])
def test_weights_that_arrive_while_responses_are_generated(continues: bool, temperature: float) -> None:
    """Each token has the log-prob of the weights that made it, and its version says which these are."""
    models = [causal_lm("llama"), causal_lm("llama")]
    for parameter in models[1].parameters():
        parameter.data.mul_(0.9)
    engine = TorchRolloutEngine(copy.deepcopy(models[0].config), (NEVER,), 3, torch.device("cpu"), continues=continues)
    engine.receive(Weights(7, state_of(copy.deepcopy(models[0]))))
    requests = [replace(request, max_new_tokens=4 + request.index % 5) for request in prompts()]
    completions: dict[int, Completion] = {}

    def on_finished(completion: Completion) -> None:
        if not completions:
            engine.receive(Weights(8, state_of(models[1])))
        completions[completion.index] = completion

    engine.generate(requests, SamplingParams(30, temperature=temperature), on_finished)
    assert sorted(completions) == [request.index for request in requests]
    for request in requests:
        completion = completions[request.index]
        assert len(completion.token_ids) == len(completion.log_probs) == request.max_new_tokens
        assert sum(count for _, count in completion.segments) == request.max_new_tokens
        first = 0
        for version, count in completion.segments:
            expected = teacher_forced(models[version - 7], request, completion, temperature)[first : first + count]
            found = torch.tensor(completion.log_probs[first : first + count])
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
            first += count
    versions = [tuple(version for version, _ in completion.segments) for completion in completions.values()]
    assert versions[0] == (7,)
    assert ((7, 8) in versions) == continues, "else a response has one version"
    assert (8,) in versions
    again = answers(engine, requests, SamplingParams(30, temperature=temperature))
    assert all(completion.segments == ((8, len(completion.token_ids)),) for completion in again.values())


def test_a_continued_response_draws_other_numbers_and_ends_where_it_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = causal_lm("llama")
    engine = TorchRolloutEngine(copy.deepcopy(plain.config), (5,), 64, torch.device("cpu"), continues=True)
    engine.receive(Weights(0, state_of(plain)))
    version, step = 0, ContinuousBatch.step

    def updated(batch: ContinuousBatch) -> None:
        nonlocal version
        step(batch)
        version += 1
        engine.receive(Weights(version, state_of(plain)))  # after every token

    monkeypatch.setattr(ContinuousBatch, "step", updated)
    found = answers(engine, prompts(), SamplingParams(12, temperature=2.0))
    for completion in found.values():
        assert len(completion.token_ids) <= 12
        assert (completion.token_ids[-1] == 5) == (completion.finish_reason == "stop")
        assert 5 not in completion.token_ids[:-1]
        assert len(completion.segments) == len(completion.token_ids)
    long = max(found.values(), key=lambda completion: len(completion.token_ids))
    assert len(set(long.token_ids)) > 2, "the same random number at every token would repeat itself"
