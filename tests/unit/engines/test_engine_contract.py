"""What every rollout engine promises, the built-in one, SGLang's and vLLM's, really running on a CPU; and what engines
in processes of their own do: ways of weights into the process, what becomes of it when it dies."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import tiny_families
import torch
from sglang_engine import ENGINE_ENV, needs_sglang
from vllm_engine import ENGINE_ENV as VLLM_ENV
from vllm_engine import VLLM_PYTHON, needs_vllm
from waiting import assert_gone
from weight_senders import SendingProcess

from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.hosted.hosted_engine import HostedEngine
from rl_platform.engines.rollout.sglang.program import SGLangSetup
from rl_platform.engines.rollout.sglang.sglang_client import SGLangEngine
from rl_platform.engines.rollout.sglang.shared_weights import SharedWeights
from rl_platform.engines.rollout.stopping.stop_texts import StopTexts
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.engines.rollout.vllm.client import VLLMEngine, VLLMSetup
from rl_platform.errors import ConfigError
from rl_platform.records import Prompt, SamplingParams, Trajectory, Weights
from rl_platform.runners.collection.cut_generation import generate_until
from rl_platform.runtime.weights.group import WeightsOffer, offer_fields

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("forked_engines")]
ENGINES = ["torch", pytest.param("sglang", marks=needs_sglang), pytest.param("vllm", marks=needs_vllm)]
only_hosted = pytest.mark.parametrize("backend", ENGINES[1:], indirect=True)
only_sglang = pytest.mark.parametrize("backend", ENGINES[1:2], indirect=True)
Engine = HostedEngine | TorchRolloutEngine
BLOCK = 32  # tokens of a block of vLLM's cache, which shares whole blocks only
RUNNING = 16  # requests at the same time
LONG = SamplingParams(50, temperature=1.0)


def setup_for(config: Any) -> SGLangSetup:
    description = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    return SGLangSetup(description, "cpu", 1, "float32", RUNNING, 4096, 0.1, seed=0)


def vllm_setup_for(config: Any) -> VLLMSetup:
    description = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    blocks = {"block_size": BLOCK}
    return VLLMSetup(description, 1, "float32", RUNNING, 64, 0.1, seed=0, python=VLLM_PYTHON, extra=blocks)


@pytest.fixture(scope="module", params=ENGINES)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def plain(shared: ModuleType, backend: str) -> Any:
    """vLLM's attention on a CPU has no heads of less than 32 numbers."""
    return shared.causal_lm(head_dim=32 if backend == "vllm" else 8)


@pytest.fixture(scope="module")
def engine(backend: str, shared: ModuleType, plain: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if backend == "torch":
        yield TorchRolloutEngine(copy.deepcopy(plain.config), (), RUNNING, torch.device("cpu"))
        return
    log = tmp_path_factory.mktemp(backend) / "engine.log"
    running: HostedEngine
    if backend == "sglang":
        running = SGLangEngine("rollout[0]", setup_for(plain.config), (shared.NEVER,), ENGINE_ENV, log)
    else:
        running = VLLMEngine("rollout[0]", vllm_setup_for(plain.config), (shared.NEVER,), VLLM_ENV, log)
    family = psutil.Process(running.process_id).children(recursive=True)
    assert len(family) >= (2 if backend == "sglang" else 1), "a guard, and SGLang's scheduler"
    yield running
    children = psutil.Process(running.process_id).children(recursive=True)
    running.close()
    running.close()
    assert_gone(children)  # what the engine started is gone with it


@pytest.fixture
def fresh(shared: ModuleType, plain: Any, engine: Engine) -> Engine:
    """The engine with the weights of `plain` and no EOS."""
    engine.eos = of(engine, shared.NEVER)
    engine.receive(Weights(engine.version + 1, shared.state_of(copy.deepcopy(plain))))
    return engine


@pytest.fixture(scope="module")
def learner() -> Iterator[SendingProcess]:
    """Another process, which learns."""
    process = SendingProcess()
    yield process
    process.kill()


def of(engine: Engine, *eos: int) -> Any:
    """Ids that end a response, as this engine keeps them."""
    return type(engine.eos)(eos)


def assert_generates_with(engine: Engine, trainer: Any, shared: ModuleType) -> None:
    requests = shared.prompts()
    for index, completion in shared.answers(engine, requests, SamplingParams(8)).items():
        expected = shared.teacher_forced(copy.deepcopy(trainer), requests[index], completion)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)


def changed(plain: Any) -> Any:
    trainer = copy.deepcopy(plain)
    for parameter in trainer.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return trainer


def test_greedy_decoding_equals_transformers(shared: ModuleType, plain: Any, fresh: Engine) -> None:
    requests, alike = shared.prompts(), copy.deepcopy(plain)
    alike.set_attn_implementation("eager")  # who publishes a model's weights has it attend in the platform's own way
    completions = shared.answers(fresh, requests, SamplingParams(10, temperature=0.0))
    for request in requests:
        prompt = torch.tensor([request.token_ids])
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 10, "do_sample": False}
        expected = alike.generate(prompt, **options)[0, len(request.token_ids) :]
        assert completions[request.index].token_ids == tuple(expected.tolist())
        assert completions[request.index].finish_reason == "length"


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_log_probs_equal_teacher_forced_ones(temperature: float, shared: ModuleType, plain: Any, fresh: Engine) -> None:
    requests = shared.prompts(shared=3)
    sampling = SamplingParams(12, temperature, top_p=0.9, top_k=20)
    for index, completion in shared.answers(fresh, requests, sampling).items():
        expected = shared.teacher_forced(copy.deepcopy(plain), requests[index], completion, temperature or 1.0)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)


def test_a_response_ends_with_the_token_that_completes_a_text(shared: ModuleType, fresh: Engine) -> None:
    """Also if the first part of the text was sampled before the response was cut."""

    def decode(tokens: Sequence[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    requests, greedy = shared.prompts(), SamplingParams(6, temperature=0.0)
    whole = shared.answers(fresh, requests, greedy)
    tokens = whole[3].token_ids
    place = next(n for n in range(2, 7) if decode(tokens[n - 2 : n]) not in decode(tokens[: n - 1]))
    fresh.stop_texts = StopTexts(["no such text", decode(tokens[place - 2 : place])], decode)
    try:
        completion = shared.answers(fresh, requests, greedy)[3]
        prompt = requests[3]
        going_on = Request(0, (*prompt.token_ids, *tokens[: place - 1]), prompt.seed, 4, sampled=place - 1)
        (rest,) = shared.answers(fresh, [going_on], greedy).values()
    finally:
        fresh.stop_texts = None
    assert (completion.token_ids, completion.finish_reason) == (tokens[:place], "stop")
    torch.testing.assert_close(torch.tensor(completion.log_probs), torch.tensor(whole[3].log_probs[:place]))
    assert (rest.token_ids, rest.finish_reason) == (tokens[place - 1 : place], "stop")


def test_an_eos_is_part_of_the_response(shared: ModuleType, fresh: Engine) -> None:
    requests, greedy = shared.prompts(), SamplingParams(5, temperature=0.0)
    first = shared.answers(fresh, requests, greedy)[3].token_ids[0]
    fresh.eos = of(fresh, first)
    completion = shared.answers(fresh, requests, greedy)[3]
    assert (completion.token_ids, completion.finish_reason) == ((first,), "stop")
    assert len(completion.log_probs) == 1


@only_hosted
def test_samples_of_a_prompt_share_its_computation_until_the_weights_change(
    shared: ModuleType, plain: Any, fresh: SGLangEngine | VLLMEngine
) -> None:
    prompt = shared.prompts((40,))[0].token_ids
    shareable = BLOCK if isinstance(fresh, VLLMEngine) else len(prompt) - 1
    before = fresh.cached_tokens()
    shared.answers(fresh, [shared.Request(0, prompt, 0)], SamplingParams(2))
    requests = [shared.Request(index, prompt, index) for index in range(4)]
    shared.answers(fresh, requests, SamplingParams(2))
    assert fresh.cached_tokens() - before >= 4 * shareable
    trainer = changed(plain)
    fresh.receive(Weights(fresh.version + 1, shared.state_of(trainer)))
    completion = shared.answers(fresh, requests[:1], SamplingParams(8))[0]
    expected = shared.teacher_forced(trainer, requests[0], completion)
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)


def test_new_weights_and_none_of_the_old(shared: ModuleType, plain: Any, fresh: Engine) -> None:
    requests, greedy = shared.prompts(), SamplingParams(6, temperature=0.0)
    before = shared.answers(fresh, requests, greedy)  # their prompts are in the prefix cache now
    trainer = changed(plain)
    fresh.receive(Weights(77, shared.state_of(trainer)))
    assert fresh.version == 77
    after = shared.answers(fresh, requests, greedy)
    assert after != before
    for request in requests:
        expected = shared.teacher_forced(copy.deepcopy(trainer), request, after[request.index])
        torch.testing.assert_close(torch.tensor(after[request.index].log_probs), expected, rtol=0, atol=1e-4)


class ArrivingAfter:
    """Requests that arrive after an event."""

    longest = 128

    def __init__(self, event: threading.Event, requests: Sequence[Request]) -> None:
        self.event, self.left = event, [*requests]

    def take(self, idle: bool) -> list[Request]:
        if idle and self.left:
            assert self.event.wait(300)
        taken = [*self.left] if self.event.is_set() else []
        self.left = self.left[len(taken) :]
        return taken


def while_it_generates(
    engine: Engine, requests: Any, sampling: SamplingParams, act: Any, again: bool = False
) -> list[Completion]:
    """Returns what comes back when `act()` is called after the first response. The second half of the requests arrives
    after the call: on a busy machine the thread that calls may be later than all responses of the first half.

    again: all requests are there from the beginning, and `act()` is called until the end."""
    completions: list[Completion] = []
    first, acted = threading.Event(), threading.Event()

    def keep(completion: Completion) -> None:
        completions.append(completion)
        first.set()

    half = len(requests) if again else len(requests) // 2
    late = ArrivingAfter(acted, requests[half:])
    thread = threading.Thread(target=engine.generate, args=(requests[:half], sampling, keep, late))
    thread.start()
    assert first.wait(300)
    act()
    acted.set()
    while again and thread.is_alive():
        thread.join(0.1)
        act()
    thread.join(300)
    return completions


def test_weights_that_come_while_it_generates_mix_in_no_response(shared: ModuleType, plain: Any, fresh: Engine) -> None:
    requests = shared.prompts((4,) * 64)
    trainer = changed(plain)
    finished_before: list[int] = []

    def update() -> None:
        fresh.receive(Weights(5, shared.state_of(trainer)))

    completions = while_it_generates(fresh, requests, LONG, update)
    assert sorted(completion.index for completion in completions) == list(range(64))
    for completion in completions:
        request = requests[completion.index]
        gaps = [
            (shared.teacher_forced(copy.deepcopy(model), request, completion) - torch.tensor(completion.log_probs))
            .abs()
            .max()
            for model in (plain, trainer)
        ]
        assert min(gaps) < 1e-4
        finished_before.append(int(gaps[0] < gaps[1]))
    assert sum(finished_before) < 64, "some were generated with the new weights"


def test_abort_returns_what_there_is(shared: ModuleType, plain: Any, fresh: Engine) -> None:
    # so many that some wait, however late the abort comes on a busy machine
    requests = shared.prompts((4,) * 256)
    completions = while_it_generates(fresh, requests, LONG, fresh.abort, again=True)
    assert sorted(completion.index for completion in completions) == list(range(256))
    cut = [completion for completion in completions if completion.finish_reason == "abort"]
    assert cut
    assert all(len(completion.token_ids) < 50 for completion in cut)
    assert len(shared.answers(fresh, requests[:3], SamplingParams(4))) == 3


def test_many_requests_of_mixed_lengths_are_all_answered_once(shared: ModuleType, fresh: Engine) -> None:
    requests = shared.prompts([1 + index % 13 for index in range(200)])
    assert len(shared.answers(fresh, requests, SamplingParams(8))) == 200


def test_requests_that_arrive_wait_for_no_earlier_one(shared: ModuleType, plain: Any, fresh: Engine) -> None:
    """Agents call while others are generated."""
    requests, busy = shared.prompts((4,) * 12), list[int]()

    class Watched(shared.Arriving):  # type: ignore[name-defined, misc]
        def take(self, idle: bool) -> list[Request]:
            taken: list[Request] = super().take(idle)
            busy.extend(request.index for request in taken if not idle)
            return taken

    completions: list[Completion] = []
    fresh.generate((), LONG, completions.append, Watched(requests))
    assert sorted(completion.index for completion in completions) == list(range(12))
    assert busy, "some arrived while others were generated"
    for completion in completions:
        expected = shared.teacher_forced(copy.deepcopy(plain), requests[completion.index], completion)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)


def test_it_wakes_with_the_weights_it_had(shared: ModuleType, fresh: Engine) -> None:
    requests, greedy = shared.prompts(), SamplingParams(6, temperature=0.0)
    before = shared.answers(fresh, requests, greedy)
    fresh.offload()
    assert {i: c.token_ids for i, c in shared.answers(fresh, requests, greedy).items()} == {
        i: c.token_ids for i, c in before.items()
    }


@only_hosted
def test_one_that_is_killed_is_started_again_and_asked_again(
    shared: ModuleType, plain: Any, fresh: HostedEngine, learner: SendingProcess
) -> None:
    """SGLang's successor joins a new group to get the weights."""
    if isinstance(fresh, SGLangEngine):
        fresh.receive(learner.offer(shared.state_of(plain), fresh.version + 1))
    requests, restarts = shared.prompts((4,) * 64), fresh.restarts
    version, victim = fresh.version, fresh.process_id
    completions = while_it_generates(fresh, requests, LONG, lambda: os.kill(victim, signal.SIGKILL))
    assert fresh.restarts == restarts + 1
    assert fresh.process_id != victim
    assert fresh.version == version
    assert sorted(completion.index for completion in completions) == list(range(64)), "each once"
    for completion in completions[-3:]:
        expected = shared.teacher_forced(copy.deepcopy(plain), requests[completion.index], completion)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)


@only_sglang
def test_it_sleeps_right_after_its_last_answer(fresh: SGLangEngine, shared: ModuleType) -> None:
    requests = shared.prompts((4,) * 8)
    before = shared.answers(fresh, requests, SamplingParams(8, temperature=0.0))
    for _ in range(3):
        fresh.offload()
        after = shared.answers(fresh, requests, SamplingParams(8, temperature=0.0))
        assert {index: one.token_ids for index, one in after.items()} == {
            index: one.token_ids for index, one in before.items()
        }


@needs_sglang
def test_an_architecture_that_sglang_has_not(shared: ModuleType, tmp_path: Path) -> None:
    setup = setup_for(shared.causal_lm().config)
    setup.model_config["architectures"] = ["NobodysForCausalLM"]
    with pytest.raises(ConfigError) as caught:
        SGLangEngine("rollout[3]", setup, (), ENGINE_ENV, tmp_path / "engine.log")
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("rollout.backend", "sglang")
    assert "no model of architecture NobodysForCausalLM" in problem.message


@needs_sglang
def test_experts_reach_sglang_and_it_reports_those_that_it_selects(shared: ModuleType, tmp_path: Path, closes) -> None:
    """The second time most of a prompt's routes come from the prefix cache. All equal those of the torch engine."""
    network = tiny_families.tiny("qwen3_moe", norm_topk_prob=True)
    weights = Weights(0, shared.state_of(copy.deepcopy(network)))
    description = network.config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    setup = replace(setup_for(network.config), model_config=description, reports_routes=True)
    engine = closes(SGLangEngine("rollout[0]", setup, (shared.NEVER,), ENGINE_ENV, tmp_path / "engine.log"))
    alike = TorchRolloutEngine(network.config, (shared.NEVER,), RUNNING, torch.device("cpu"), records_routes=True)
    engine.receive(weights)
    alike.receive(weights)
    for _ in range(2):
        for index, completion in shared.answers(engine, shared.prompts(shared=6), SamplingParams(8)).items():
            request = shared.prompts(shared=6)[index]
            expected = shared.teacher_forced(copy.deepcopy(network), request, completion)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)
            going_on = replace(request, index=0, token_ids=request.token_ids + completion.token_ids)
            routes = shared.answers(alike, [going_on], SamplingParams(1))[0].routes[:-1]
            assert torch.equal(completion.routes.sort().values, routes.sort().values)
    requests = shared.prompts((4,) * 64)
    for completion in while_it_generates(engine, requests, LONG, engine.abort, again=True):
        if completion.token_ids:
            assert len(completion.routes) == 4 + len(completion.token_ids) - 1


@needs_sglang
def test_sglang_without_room_for_keys_and_values(shared: ModuleType, tmp_path: Path) -> None:
    less_than_none = {"mem_fraction_static": -1.0}  # whatever other processes free while it starts
    setup = replace(setup_for(shared.causal_lm().config), cache_tokens=None, extra=less_than_none)
    with pytest.raises(ConfigError) as caught:
        SGLangEngine("rollout[3]", setup, (), ENGINE_ENV, tmp_path / "engine.log")
    (problem,) = caught.value.problems
    assert problem.key == "rollout.gpu_memory_utilization"
    assert "rollout[3]: no room is left for keys and values" in problem.message


def test_responses_that_are_cut_go_on_under_other_weights(shared: ModuleType, plain: Any, fresh: Engine) -> None:
    count = 10 * RUNNING  # the last ones have not begun when the first ones are complete
    prompts = [Prompt(one.index, "", "", one.token_ids) for one in shared.prompts((4,) * count)]
    open_ones = [[Trajectory(prompt, 0, (), (), "abort", -1)] for prompt in prompts]
    trainer = changed(plain)
    models, completions = [plain, trainer], []
    fresh.eos = of(fresh, 1, 2, 3, 4)  # some end soon
    for version in (1000, 1001):
        fresh.receive(Weights(version, shared.state_of(models[version - 1000])))
        delivered: list[Trajectory] = []
        needed = 6 if version == 1000 else len(open_ones)
        generate_until(fresh, open_ones, needed, LONG, fresh.eos, lambda *_: 3, delivered.append)
        assert sorted(one.prompt.index for one in delivered) == sorted(group[0].prompt.index for group in open_ones)
        completions += [one for one in delivered if one.complete]
        open_ones = [[one] for one in delivered if not one.complete]
        assert bool(open_ones) == (version == 1000), "some are cut, and the second time none"
    assert sorted(one.prompt.index for one in completions) == list(range(count))
    assert any(one.segments for one in completions)
    for one in completions:
        start = 0
        whole = shared.Completion(0, one.token_ids, one.log_probs, "length")
        for version, count in one.segments or ((one.weights_version, len(one.token_ids)),):
            request = shared.Request(0, one.prompt.token_ids, 0)
            expected = shared.teacher_forced(copy.deepcopy(models[version - 1000]), request, whole)
            part = slice(start, start + count)
            torch.testing.assert_close(torch.tensor(one.log_probs[part]), expected[part], rtol=0, atol=1e-4)
            start += count


@pytest.mark.parametrize("backend", ENGINES[:2], indirect=True)
def test_weights_by_a_process_group(shared: ModuleType, plain: Any, fresh: Engine, learner: SendingProcess) -> None:
    for version in (2000, 2001):  # the second time with the group that is there
        trainer = changed(plain)
        offer = learner.offer(shared.state_of(trainer), version)
        fresh.receive(offer)
        assert fresh.version == version
        assert_generates_with(fresh, trainer, shared)
    assert learner.groups[-1].name == learner.groups[-2].name


@pytest.mark.parametrize("backend", ENGINES[2:], indirect=True)
def test_vllm_fetches_weights_that_are_offered_by_a_group(shared: ModuleType, plain: Any, fresh: VLLMEngine) -> None:
    trainer, state = changed(plain), offer_fields(shared.state_of(plain), {})
    weights = Weights(4000, shared.state_of(trainer))
    offer = WeightsOffer(4000, state["tensors"], "cpu", lambda: weights, pytest.fail, pytest.fail)
    assert fresh.receive(offer).bytes == weights.bytes
    assert_generates_with(fresh, trainer, shared)


@only_sglang
def test_weights_through_a_file_where_shared_memory_is_full(
    shared: ModuleType, plain: Any, fresh: SGLangEngine, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(fresh, "_shared", SharedWeights())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    trainer = changed(plain)
    fresh.receive(Weights(3000, shared.state_of(trainer)))
    assert "no room for the weights in shared memory" in caplog.text
    assert_generates_with(fresh, trainer, shared)
