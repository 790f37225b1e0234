"""Training with bfloat16 products equals float32 training up to rounding, and uses every change of the weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl_platform import acceleration
from rl_platform.accel import bfloat16_products
from rl_platform.accel.bfloat16_products import product, rounded
from rl_platform.accel.bfloat16_training import Bfloat16Engine, trains_in_bfloat16
from rl_platform.accel.openmp_team import has_team
from rl_platform.algorithms.losses import actor_loss, critic_loss
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.config.schema.models import Optim, Trainable
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.build import training_engine
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.models import language
from rl_platform.models.forward import TokenPolicy, TokenValues
from rl_platform.models.language import LanguageModel
from rl_platform.records import RolloutBatch, SamplingParams, Weights

pytestmark = pytest.mark.skipif(not has_team(), reason="torch computes without libgomp here")
CPU, HALF = torch.device("cpu"), torch.bfloat16
VOCABULARY, LENGTHS, PREFIX = 61, (11, 9, 11, 6), 3
OPTIM = Optim(lr=1e-2, clip_grad=0.5)
CLOSE = 0.03  # of the norm of a gradient; each factor of a product is rounded to 1 in 256
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def network(kind: str = "llama", **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **LLAMA | options), dtype=torch.float32)


def model(values: bool = False, **options: Any) -> TokenPolicy | TokenValues:
    built = LanguageModel(network(**options), value_head=values)
    if values:
        torch.nn.init.normal_(built.head.weight)
    return TokenValues(built) if values else TokenPolicy(built, temperature=0.7)


def engine(cls: type[FSDPEngine], values: bool = False, **options: Any) -> FSDPEngine:
    dtype = HALF if cls is Bfloat16Engine else torch.float32
    return cls(model(values, **options), OPTIM, dtype=dtype, horizon=1, device=CPU)


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    """Rows of several lengths with a common prefix."""
    draw = torch.Generator().manual_seed(1)
    lengths, columns = torch.tensor(LENGTHS), torch.arange(max(LENGTHS))
    mask = (columns >= 5) & (columns < lengths[:, None])
    tokens = torch.randint(VOCABULARY, mask.shape, generator=draw)
    tokens[:, :PREFIX] = 7
    some = partial(torch.randn, mask.shape, generator=draw)
    return neutral_batch(
        mask,
        inputs={"tokens": tokens, "lengths": lengths},
        log_probs=0.1 * some() - 4.1,
        advantages=some(),
        values=some(),
        returns=some(),
    )


@dataclass
class Step:
    before: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, float]
    after: Tensor


def step(trained: FSDPEngine, batch: RolloutBatch, micro_batches: MicroBatches) -> Step:
    """One step with its gradients before they are clipped, and the outputs before and after it."""
    values = isinstance(trained.model, TokenValues)
    gradients: dict[str, Tensor] = {}
    clipped = trained._clipped_gradient_norm

    def recorded() -> Tensor:
        named = trained.model.named_parameters()
        gradients.update({name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None})
        return clipped()

    def outputs() -> Tensor:
        found = trained.evaluate(batch, micro_batches)
        result = found.values if values else found.log_probs
        assert result is not None
        return result

    trained._clipped_gradient_norm = recorded  # type: ignore[method-assign]
    before = outputs()
    loss = partial(critic_loss if values else actor_loss, algorithm=Algorithm())
    metrics = trained.step(batch, loss, micro_batches)
    assert metrics is not None
    return Step(before, gradients, metrics.finalize(), outputs())


def test_without_bfloat16_instructions_torch_computes_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own products take up to eighty times as long there."""
    gemm, calls = bfloat16_products._gemm(), list[int]()
    if gemm is None:
        pytest.skip("this build of torch has no MKL")

    def counted(*arguments: object) -> None:
        calls.append(1)
        gemm(*arguments)

    for name, value in {"_has_amx": False, "_torch_is_faster": False, "_gemm": counted}.items():
        monkeypatch.setattr(bfloat16_products, name, lambda value=value: value)
    monkeypatch.setattr(bfloat16_products.dot_kernel, "covers", lambda *_: False)
    left, right = torch.randn(5, 32).to(HALF), torch.randn(7, 32).to(HALF)
    exact = left.float() @ right.float().t()
    torch.testing.assert_close(product(left, right.t(), torch.empty(5, 7)), exact)
    result = rounded(left, right.t())
    assert result.dtype == HALF
    torch.testing.assert_close(result, exact.to(HALF), rtol=2**-7, atol=2**-7)
    assert len(calls) == 2


@pytest.mark.parametrize("micro_batches", [MicroBatches(), MicroBatches(rows=2)], ids=["whole", "split"])
@pytest.mark.parametrize("values", [False, True], ids=["actor", "critic"])
def test_a_step_is_that_of_float32_up_to_rounding(
    values: bool, micro_batches: MicroBatches, batch: RolloutBatch
) -> None:
    half, exact = (step(engine(cls, values), batch, micro_batches) for cls in (Bfloat16Engine, FSDPEngine))
    torch.testing.assert_close(half.before, exact.before, rtol=0.03, atol=0.03)
    assert half.gradients.keys() == exact.gradients.keys()
    for name, gradient in exact.gradients.items():
        assert (half.gradients[name] - gradient).norm() <= CLOSE * gradient.norm(), name
    assert half.metrics["grad_norm"] == pytest.approx(exact.metrics["grad_norm"], rel=CLOSE)
    assert half.metrics.keys() == exact.metrics.keys()
    moved = (exact.after - exact.before).norm()
    assert (half.after - exact.after).norm() < 0.2 * moved, "the outputs after the step are those of old weights"


@pytest.mark.parametrize("values", [False, True], ids=["actor", "critic"])
def test_a_micro_batch_without_actions_changes_nothing(values: bool, batch: RolloutBatch) -> None:
    mask = batch.action_mask.clone()
    mask[1:3] = False
    batch = replace(batch, action_mask=mask)
    half, exact = (step(engine(cls, values), batch, MicroBatches(rows=1)) for cls in (Bfloat16Engine, FSDPEngine))
    for name, gradient in exact.gradients.items():
        assert (half.gradients[name] - gradient).norm() <= CLOSE * gradient.norm(), name


def test_a_forward_pass_leaves_no_copies_of_matrices_and_no_padded_attention(batch: RolloutBatch) -> None:
    trained = engine(Bfloat16Engine)
    trained.model(batch, entropy=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        outputs = trained.model(batch, entropy=True)
    assert outputs.log_probs.requires_grad
    tokens, actions = sum(LENGTHS) - (len(LENGTHS) - 1) * PREFIX, int(batch.action_mask.sum())
    width, gates = LLAMA["hidden_size"], 2 * LLAMA["intermediate_size"]
    # float32: the residual stream, twice. bfloat16: queries, keys and values (twice the width), attention, gates
    layer = tokens * (2 * width * 4 + (2 * width + width + gates) * 2)
    rest = actions * VOCABULARY * 4 + 6 * tokens * width * 4 + 2048  # logits; states of the last norm, small tensors
    kept = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    assert kept <= LLAMA["num_hidden_layers"] * layer + rest


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_gets_the_gradient_of_both_its_uses(tied: bool, batch: RolloutBatch) -> None:
    half, exact = (
        step(engine(cls, tie_word_embeddings=tied), batch, MicroBatches()).gradients
        for cls in (Bfloat16Engine, FSDPEngine)
    )
    name = "model.backbone.embed_tokens.weight"
    assert half.keys() == exact.keys()
    assert (half[name] - exact[name]).norm() <= CLOSE * exact[name].norm()


def test_chunks_of_log_probs_change_nothing_but_rounding(batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = step(engine(Bfloat16Engine), batch, MicroBatches())
    monkeypatch.setattr(language, "TOKENS_PER_CHUNK", 4)
    chunked = step(engine(Bfloat16Engine), batch, MicroBatches())
    torch.testing.assert_close(chunked.before, whole.before)
    for name, gradient in whole.gradients.items():
        assert (chunked.gradients[name] - gradient).norm() <= 0.01 * gradient.norm(), name


def test_a_loaded_state_is_used_at_once(batch: RolloutBatch) -> None:
    trained, fresh = engine(Bfloat16Engine), engine(Bfloat16Engine)
    after = step(trained, batch, MicroBatches()).after
    fresh.evaluate(batch, MicroBatches())
    saved = trained.sharded_state()
    for name, target in fresh.sharded_state().items():
        for (_, part), (_, source) in zip(target.parts, saved[name].parts, strict=True):
            part.copy_(source)
    assert torch.equal(fresh.evaluate(batch, MicroBatches()).log_probs, after)


def test_a_gradient_that_is_not_finite_changes_nothing(batch: RolloutBatch) -> None:
    trained = engine(Bfloat16Engine)
    before = copy.deepcopy(trained.weights())
    broken = replace(batch, advantages=torch.full_like(batch.action_mask, torch.nan, dtype=torch.float32))
    assert trained.step(broken, partial(actor_loss, algorithm=Algorithm()), MicroBatches()) is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.weights().items())
    assert all(parameter.grad is None for parameter in trained.parameters)


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_entropies_are_those_of_float32(entropy_gradient: bool, batch: RolloutBatch) -> None:
    results = []
    for cls in (Bfloat16Engine, FSDPEngine):
        trained = engine(cls)
        trained.model.entropy_gradient = entropy_gradient
        loss = partial(actor_loss, algorithm=Algorithm(entropy_bonus=0.5 if entropy_gradient else 0.0))
        metrics = trained.step(batch, loss, MicroBatches())
        assert metrics is not None
        results.append(metrics.finalize())
    for name in ("actor/entropy", "grad_norm"):
        assert results[0][name] == pytest.approx(results[1][name], rel=CLOSE)


def test_generation_rounds_where_training_does() -> None:
    """Logits of 10 to 20, which bfloat16 rounds by up to 0.06; the layers themselves add little."""
    plain = network(vocab_size=997, initializer_range=0.02, tie_word_embeddings=False)
    plain.lm_head.weight.data *= 60
    state = {name: tensor.detach() for name, tensor in LanguageModel(plain).state_dict().items()}
    generator = TorchRolloutEngine(copy.deepcopy(plain.config), (), 8, CPU, HALF)
    generator.receive(Weights(0, state))
    completions: list[Completion] = []
    requests = [Request(index, (1, 2, 3, index), seed=index) for index in range(8)]
    generator.generate(requests, SamplingParams(24), completions.append)
    completions.sort(key=lambda completion: completion.index)
    tokens = torch.tensor([(1, 2, 3, each.index, *each.token_ids) for each in completions])
    generated = torch.tensor([each.log_probs for each in completions])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, :4] = False
    rows = neutral_batch(mask, inputs={"tokens": tokens, "lengths": torch.full((8,), tokens.shape[1])})
    policy = TokenPolicy(LanguageModel(plain), temperature=1.0)
    trained = Bfloat16Engine(policy, OPTIM, dtype=HALF, horizon=1, device=CPU)
    log_probs = trained.evaluate(rows, MicroBatches()).log_probs
    assert log_probs is not None
    assert (log_probs[:, 4:] - generated).abs().mean() < 0.013  # 0.009; 0.020 with rounded logits and residuals


class TestCoverage:
    def test_a_llama_in_bfloat16_gets_the_engine_unless_acceleration_is_off(self) -> None:
        options: dict[str, Any] = {"dtype": HALF, "horizon": 1, "device": CPU, "nominal": False}
        assert type(training_engine(Trainable(), model(), **options)) is Bfloat16Engine
        assert type(training_engine(Trainable(gradient_checkpointing=True), model(), **options)) is FSDPEngine
        with acceleration.accelerating("off"):
            assert type(training_engine(Trainable(), model(), **options)) is FSDPEngine

    def test_other_types_and_devices_are_left_to_torch(self) -> None:
        assert trains_in_bfloat16(model(), CPU, HALF)
        assert not trains_in_bfloat16(model(), CPU, torch.float32)
        assert not trains_in_bfloat16(model(), torch.device("cuda"), HALF)

    @pytest.mark.parametrize(
        "options",
        [{"kind": "qwen2"}, {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}],
        ids=str,
    )
    def test_other_models_are_left_to_torch(self, options: dict[str, Any]) -> None:
        assert not trains_in_bfloat16(model(**options), CPU, HALF)

    def test_a_reference_computes_as_the_actor_and_a_partly_frozen_model_does_not(self, batch: RolloutBatch) -> None:
        reference = model().requires_grad_(False)
        assert trains_in_bfloat16(reference, CPU, HALF)
        frozen = Bfloat16Engine(reference, OPTIM, dtype=HALF, horizon=1, device=CPU)
        actor = engine(Bfloat16Engine).evaluate(batch, MicroBatches()).log_probs
        assert torch.equal(frozen.evaluate(batch, MicroBatches()).log_probs, actor)
        partly = model()
        partly.model.backbone.embed_tokens.weight.requires_grad_(False)
        assert not trains_in_bfloat16(partly, CPU, HALF)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("library", ["torch's", "MKL's"])
def test_products_of_both_libraries(library: str, add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if library == "torch's":
        monkeypatch.setattr(bfloat16_products, "_gemm", lambda: None)
    exact = library == "MKL's"
    tolerance = (1e-5, 1e-5) if exact and bfloat16_products._gemm() is not None else (0.01, 0.02)
    close = partial(torch.testing.assert_close, rtol=tolerance[0], atol=tolerance[1])
    draw = torch.Generator().manual_seed(2)
    left, right, more = (torch.randn(*shape, generator=draw).to(HALF) for shape in ((5, 7), (7, 3), (5, 6)))
    start = torch.randn(5, 3, generator=draw)
    expected = left.float() @ right.float() + (start if add else 0)
    for first in (left, left.t().contiguous().t()):
        for second in (right, right.t().contiguous().t()):
            close(product(first, second, start.clone(), add=add, exact=exact), expected)
    half = more[:, :3]  # columns of a wider matrix
    close(product(half.t(), left, torch.zeros(3, 7), exact=exact), half.float().t() @ left.float())


@pytest.mark.parametrize("amx", [False, True])
def test_logits_of_generation_are_not_rounded(amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16_products, "_has_amx", lambda: amx)
    draw = torch.Generator().manual_seed(3)
    layer = nn.Linear(64, 100, bias=False).to(HALF).requires_grad_(False)
    layer.weight.copy_(torch.randn(100, 64, generator=draw))
    states = torch.randn(5, 64, generator=draw).to(HALF)
    head = acceleration.find("float32_head", layer, CPU, HALF)
    assert head is not None
    expected = states.float() @ layer.weight.float().t()
    torch.testing.assert_close(head(states), expected, rtol=1e-5, atol=1e-4)
