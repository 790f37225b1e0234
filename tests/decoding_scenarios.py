"""Generations in which rows of a decoding step come, go and move, for accelerated and plain engines.

tests/gpu/test_decode.py runs them on a GPU, tests/unit/accel/test_cuda_decode.py in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_platform.acceleration import accelerating
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.models.language import LanguageModel
from rl_platform.records import SamplingParams, Weights

VOCABULARY = 61
EOS = (0, 1)


def causal_lm(
    kind: str = "llama",
    *,
    heads: int = 4,
    key_heads: int = 2,
    head_dim: int = 16,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
    **options: object,
) -> Any:
    """Returns a tiny model with random weights, biases and norms included. options: further settings of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 8 * heads,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,  # distributions far from uniform
    }
    settings |= dict.fromkeys(("sliding_window", "bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(kind, **settings | options)
    plain = AutoModelForCausalLM.from_config(config).eval()
    for parameter in plain.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return plain


def weights_of(network: Any, version: int = 0) -> Weights:
    """Returns the weights by reference, as an actor publishes them."""
    state = LanguageModel(network).state_dict(keep_vars=True)
    return Weights(version, {name: tensor.detach() for name, tensor in state.items()})


def engine_for(
    network: Any, device: torch.device, *, fast: bool, max_running: int = 5, dtype: torch.dtype = torch.float32
) -> TorchRolloutEngine:
    with accelerating("auto" if fast else "off"):
        engine = TorchRolloutEngine(network.config, EOS, max_running, device, dtype)
        engine.receive(weights_of(network))
    return engine


def prompts(lengths: Sequence[int], shared: int = 0, samples: int = 1) -> list[Request]:
    numbers = torch.Generator().manual_seed(4)
    prefix = tuple(torch.randint(2, VOCABULARY, (shared,), generator=numbers).tolist())
    texts = [prefix + tuple(torch.randint(2, VOCABULARY, (length,), generator=numbers).tolist()) for length in lengths]
    return [Request(index, texts[index // samples], 100 + index) for index in range(len(texts) * samples)]


@dataclass
class Arriving:
    """Requests that arrive one every second step."""

    left: list[Request]
    longest: int
    steps: int = field(default=0)

    def take(self, idle: bool) -> list[Request]:
        self.steps += 1
        count = 3 if self.steps == 1 else int(idle or self.steps % 2)
        taken, self.left = self.left[:count], self.left[count:]
        return taken


def answers(
    engine: TorchRolloutEngine,
    requests: Sequence[Request],
    sampling: SamplingParams,
    arrivals: Arriving | None = None,
    on_finished: Callable[[Completion], None] = lambda completion: None,
) -> dict[int, Completion]:
    found: dict[int, Completion] = {}

    def finish(completion: Completion) -> None:
        found[completion.index] = completion
        on_finished(completion)

    engine.generate(requests, sampling, finish, arrivals)
    return found


def check_equal(found: dict[int, Completion], wanted: dict[int, Completion]) -> int:
    """Checks tokens, reasons and log-probs; returns the number of tokens."""
    assert found.keys() == wanted.keys()
    for index, completion in wanted.items():
        assert found[index].token_ids == completion.token_ids, index
        assert found[index].finish_reason == completion.finish_reason
        difference = torch.tensor(found[index].log_probs) - torch.tensor(completion.log_probs)
        assert difference.abs().max() < 1e-3
    return sum(len(completion.token_ids) for completion in wanted.values())


def teacher_forced(network: Any, request: Request, completion: Completion) -> Tensor:
    """Returns the completion's log-probs, from one forward pass of transformers on the device of `network`."""
    distribution = teacher_forced_logits(network, request, completion).log_softmax(-1)
    written = torch.tensor(completion.token_ids, device=network.device)
    return distribution.gather(1, written[:, None]).squeeze(1)


def teacher_forced_logits(network: Any, request: Request, completion: Completion) -> Tensor:
    """Returns the logits [n,V] float32 of the completion's n tokens."""
    network.set_attn_implementation("eager")
    tokens = torch.tensor([request.token_ids + completion.token_ids], device=network.device)
    with torch.no_grad():
        return network(tokens).logits[0, len(request.token_ids) - 1 : -1].float()
