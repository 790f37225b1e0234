"""The packed forward equals transformers run sequence by sequence: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rl_platform.algorithms.kl import full_kl
from rl_platform.models import language, packed
from rl_platform.models.forward import TokenPolicy, TokenValues
from rl_platform.models.language import full_kl_of_states
from rl_platform.models.packed import common_prefix, pack, similar
from rl_platform.records import RolloutBatch

SEQUENCES = {  # name: (sequences, prompt lengths, tokens of the shared prefix)
    "nothing shared": ([[1, 2, 3, 4, 5], [7, 8, 9], [3, 3, 3, 3, 3, 3, 3, 9]], [2, 1, 5], 0),
    "shared prefix": ([[5, 6, 7, 8, 1, 2, 3], [5, 6, 7, 8, 9], [5, 6, 7, 8, 4, 4]], [5, 4, 4], 4),
    "equal": ([[4, 9, 2, 7, 7]] * 3, [2, 3, 1], 4),
    "prefix of another": ([[4, 9, 2, 7], [4, 9, 2, 7, 1, 1, 5], [4, 9, 2, 7, 1]], [2, 2, 2], 3),
    "one token of its own": ([[6, 5, 4, 3], [6, 5, 4, 30], [6, 5, 4, 20]], [3, 3, 3], 3),
    "actions in the prefix": ([[6, 5, 4, 3, 2], [6, 5, 4, 3, 9]], [1, 3], 4),
    "one sequence": ([[3, 1, 4, 1, 5, 9]], [3], 0),
}
cases = pytest.mark.parametrize(("sequences", "prompts", "shared"), SEQUENCES.values(), ids=SEQUENCES.keys())
TEMPERATURE = 0.7


@pytest.fixture(params=[0, 2**60], ids=["many groups", "one group"], autouse=True)
def _groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of unlike length are computed apart, or all together."""
    monkeypatch.setitem(packed.SPLIT, "cpu", request.param)


def actions(batch: RolloutBatch) -> list[tuple[int, slice, slice]]:
    """(row, its action positions, the positions they are predicted at)."""
    positions = []
    for row, length in enumerate(batch.inputs["lengths"].tolist()):
        start = int(batch.action_mask[row].nonzero()[0])
        positions.append((row, slice(start, length), slice(start - 1, length - 1)))
    return positions


def one_by_one(plain: Any, batch: RolloutBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B,T] of transformers."""
    log_probs, entropies = torch.zeros(batch.action_mask.shape), torch.zeros(batch.action_mask.shape)
    for row, here, before in actions(batch):
        tokens = batch.inputs["tokens"][row, : here.stop]
        distribution = (plain(tokens[None], use_cache=False).logits[0, before] / temperature).log_softmax(-1)
        log_probs[row, here] = distribution.gather(1, tokens[here, None]).squeeze(1)
        entropies[row, here] = -(distribution.exp() * distribution).sum(-1)
    return log_probs, entropies


def weights_like(batch: RolloutBatch) -> Tensor:
    """A loss weight per position, so that no two positions can be swapped unnoticed."""
    return torch.randn(1000, generator=torch.Generator().manual_seed(3))[: batch.action_mask.sum()]


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(
            actual[name], gradient, rtol=1e-4, atol=1e-5 * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


@cases
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_log_probs_entropies_and_gradients(kind, sequences, prompts, shared, both, token_batch, gradients) -> None:
    plain, model = both(kind)
    batch = token_batch(sequences, prompts)
    weights = weights_like(batch)
    log_probs, entropies = one_by_one(plain, batch, TEMPERATURE)
    (weights @ log_probs[batch.action_mask] + 0.3 * weights.flip(0) @ entropies[batch.action_mask]).backward()

    outputs = TokenPolicy(model, TEMPERATURE, entropy_gradient=True)(batch, entropy=True)
    actual = weights @ outputs.log_probs[batch.action_mask]
    (actual + 0.3 * weights.flip(0) @ outputs.entropy[batch.action_mask]).backward()

    torch.testing.assert_close(outputs.log_probs, log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs.entropy, entropies, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model), gradients(plain))


@cases
def test_values_and_gradients(sequences, prompts, shared, both, token_batch, gradients) -> None:
    plain, model = both("qwen2", value_head=True)
    torch.nn.init.normal_(model.head.weight)
    batch = token_batch(sequences, prompts)
    weights = weights_like(batch)
    expected = torch.zeros(batch.action_mask.shape)
    for row, here, before in actions(batch):
        hidden = plain.model(batch.inputs["tokens"][row, None, : here.stop]).last_hidden_state[0]
        expected[row, here] = (hidden @ model.head.weight.detach()[0] + model.head.bias.detach())[before]
    (weights @ expected[batch.action_mask]).backward()

    values = TokenValues(model)(batch).values
    (weights @ values[batch.action_mask]).backward()

    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    actual = gradients(model)
    assert actual.pop("head.weight").abs().sum() > 0
    assert actual.pop("head.bias").abs().sum() > 0
    assert_same_gradients(actual, gradients(plain.model))


@cases
def test_the_longest_shared_prefix_is_computed_once(sequences, prompts, shared) -> None:
    packed = pack([torch.tensor(sequence) for sequence in sequences])
    assert packed.attention.prefix == shared
    assert len(packed.tokens) == sum(len(sequence) for sequence in sequences) - shared * (len(sequences) - 1)
    for row, sequence in enumerate(sequences):
        index = packed.flat_index[row, : len(sequence)]
        assert packed.tokens[index].tolist() == sequence
        assert packed.positions[index].tolist() == list(range(len(sequence)))


def test_sequences_of_about_the_same_length_are_computed_together() -> None:
    assert similar([3, 9, 3, 10], 0, worth=60) == [[3, 1], [0, 2]]
    assert similar([3, 9, 3, 10], 0, worth=1000) == [[0, 1, 2, 3]]
    assert similar([3, 9, 3, 10], 0, worth=0) == [[3], [1], [0, 2]]
    assert similar([9, 10], prefix=90, worth=50) == [[1], [0]], "a long prefix makes padding dear"
    assert similar([9, 10], prefix=0, worth=50) == [[0, 1]]


def test_sequences_of_one_token() -> None:
    sequences = [torch.tensor([3]), torch.tensor([3]), torch.tensor([3, 4])]
    assert common_prefix(sequences) == 0
    assert pack(sequences).tokens.tolist() == [3, 3, 3, 4]


@pytest.mark.parametrize("value_head", [False, True])
def test_padding_changes_nothing(value_head: bool, both, token_batch, gradients) -> None:
    sequences, prompts, _ = SEQUENCES["shared prefix"]
    results = []
    for padding in (0, 37):
        _, model = both(value_head=value_head)
        if value_head:
            torch.nn.init.ones_(model.head.weight)
        batch = token_batch(sequences, prompts, padding)
        outputs = TokenValues(model)(batch) if value_head else TokenPolicy(model, 1.0)(batch)
        result = outputs.values if value_head else outputs.log_probs
        assert result.shape == batch.action_mask.shape
        assert not result[~batch.action_mask].any()
        result.square().sum().backward()
        results.append((result[:, :7].detach(), gradients(model)))
    (narrow, narrow_gradients), (wide, wide_gradients) = results
    assert torch.equal(narrow, wide)
    assert all(torch.equal(narrow_gradients[name], wide_gradients[name]) for name in narrow_gradients)


def test_chunks_that_are_computed_twice_change_nothing(both, token_batch, gradients, monkeypatch) -> None:
    sequences, prompts, _ = SEQUENCES["nothing shared"]
    batch = token_batch(sequences, prompts)
    recomputed = []
    original = language.checkpoint
    monkeypatch.setattr(language, "checkpoint", lambda *a, **k: recomputed.append(1) or original(*a, **k))
    results = []
    for chunk in (1024, 3):
        monkeypatch.setattr(language, "TOKENS_PER_CHUNK", chunk)
        _, model = both()
        outputs = TokenPolicy(model, TEMPERATURE, entropy_gradient=True)(batch, entropy=True)
        (outputs.log_probs.sum() + outputs.entropy.square().sum()).backward()
        results.append((outputs, gradients(model)))
    assert len(recomputed) == 3  # 8 actions in chunks of 3, and none for the chunk that stands alone
    (whole, whole_gradients), (parts, part_gradients) = results
    torch.testing.assert_close(parts.log_probs, whole.log_probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(parts.entropy, whole.entropy, rtol=0, atol=1e-6)
    assert_same_gradients(part_gradients, whole_gradients)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_change_no_kl_over_the_vocabulary(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.Generator().manual_seed(0)
    states, weight, reference_states, reference_weight = (
        torch.randn(shape, generator=numbers) for shape in ((7, 4), (11, 4), (7, 6), (11, 6))
    )
    leaves = [states.requires_grad_(), weight.requires_grad_()]
    logits, reference_logits = F.linear(states, weight) / 0.7, F.linear(reference_states, reference_weight) / 0.7
    expected = full_kl(logits, reference_logits)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    monkeypatch.setattr(language, "TOKENS_PER_CHUNK", chunk)
    divergence = full_kl_of_states(states, weight, reference_states, reference_weight, temperature=0.7)
    torch.testing.assert_close(divergence, expected)
    torch.testing.assert_close(torch.autograd.grad(divergence.square().sum(), leaves), gradients)
    with torch.no_grad():
        torch.testing.assert_close(full_kl_of_states(states, weight, reference_states, reference_weight, 0.7), expected)


def test_logged_entropy_has_no_gradient(both, token_batch) -> None:
    batch = token_batch(*SEQUENCES["nothing shared"][:2])
    _, model = both()
    assert not TokenPolicy(model, 1.0)(batch, entropy=True).entropy.requires_grad
    assert TokenPolicy(model, 1.0)(batch).entropy is None


def test_values_start_at_zero(both, token_batch) -> None:
    batch = token_batch(*SEQUENCES["shared prefix"][:2])
    _, model = both(value_head=True)
    assert model.head.weight.dtype == torch.float32
    assert not TokenValues(model)(batch).values.any()
