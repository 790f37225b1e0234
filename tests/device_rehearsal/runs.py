"""What the engines of these tests train and generate with: small models and the same numbers on every device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from neutral_batches import neutral_batch
from torch import Tensor

from rl_platform.algorithms.losses import actor_critic_loss, actor_loss, critic_loss
from rl_platform.components.policy_rollout import Observations, PolicyInference
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.config.schema.models import Optim, Parallel
from rl_platform.engines.offloading.offload import OffloadingEngine
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.engines.training.base import Loss, MicroBatches, TrainingEngine
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.models import packed
from rl_platform.models.forward import EmbodiedActorCritic, TokenPolicy, TokenValues
from rl_platform.models.language import LanguageModel
from rl_platform.models.policy import ActorCriticPolicy, PolicyConfig
from rl_platform.records import RolloutBatch, SamplingParams, Weights

OPTIM = Optim(lr=1e-3, clip_grad=1.0)
MICRO_BATCHES = MicroBatches(tokens=64)
LENGTHS = (32, 30, 20, 17, 12, 9, 9, 8)
OBSERVATIONS = Observations(
    torch.randn(10, 17, generator=torch.Generator().manual_seed(2)).numpy(), draw=("step", 0), valued=True
)
Report = dict[str, Tensor]

SILU = PolicyConfig([64, 64], "silu")  # tanh is computed by another formula on a CPU


def language_model(layers: int = 2, *, value_head: bool = False, tied: bool = False) -> LanguageModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=259,
        num_hidden_layers=layers,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LanguageModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32), value_head=value_head)


def sequences(of: Sequence[int] = LENGTHS) -> RolloutBatch:
    """Sequences of these lengths with a common prefix of four tokens."""
    numbers = torch.Generator().manual_seed(0)
    shape = (len(of), max(of))
    lengths, places = torch.tensor(of), torch.arange(max(of))
    tokens = torch.randint(256, shape, generator=numbers)
    tokens[:, :4] = torch.arange(4)
    return neutral_batch(
        (places >= 5) & (places < lengths[:, None]),
        inputs={"tokens": tokens, "lengths": lengths},
        log_probs=torch.full(shape, -5.5),
        reference_log_probs=torch.full(shape, -5.4),
        advantages=torch.randn(shape, generator=numbers),
        values=torch.zeros(shape),
        returns=torch.randn(shape, generator=numbers),
    )


def language_task(kind: str, layers: int = 2) -> tuple[TokenPolicy | TokenValues, Loss]:
    """Returns model and loss of an "actor", with KL and entropy in its loss, or of a "critic"."""
    if kind == "critic":
        return TokenValues(language_model(layers, value_head=True)), partial(critic_loss, algorithm=Algorithm())
    terms = Algorithm(use_kl_loss=True, kl_loss_coef=0.1, entropy_bonus=0.01, target_kl=10.0)
    policy = TokenPolicy(language_model(layers, tied=True), 0.9, entropy_gradient=True)
    return policy, partial(actor_loss, algorithm=terms)


def language_engine(
    kind: str, device: torch.device, *, backend: str = "fsdp", layers: int = 2, **options: Any
) -> tuple[TrainingEngine, Loss]:
    model, loss = language_task(kind, layers)
    options = {"dtype": torch.float32, "horizon": max(LENGTHS), "device": device} | options
    if backend == "fsdp":
        return FSDPEngine(model, OPTIM, **options), loss
    from rl_platform.engines.training.megatron.engine import MegatronEngine

    return MegatronEngine(model, OPTIM, parallel=Parallel(), **options), loss


def embodied_engine(device: torch.device) -> tuple[TrainingEngine, Loss]:
    policy = gaussian_policy()
    engine = FSDPEngine(EmbodiedActorCritic(policy), OPTIM, dtype=torch.float32, horizon=1, device=device)
    return engine, partial(actor_critic_loss, algorithm=Algorithm(loss_type="actor_critic", huber_delta=10.0))


def gaussian_policy() -> ActorCriticPolicy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ActorCriticPolicy((17,), ActionSpace("continuous", 6), SILU)


def transitions(count: int = 64) -> RolloutBatch:
    numbers = torch.Generator().manual_seed(0)
    zeros = torch.zeros(count, 1)
    return neutral_batch(
        torch.ones(count, 1, dtype=torch.bool),
        inputs={
            "observations": torch.randn(count, 1, 17, generator=numbers),
            "actions": torch.randn(count, 1, 6, generator=numbers),
        },
        rewards=zeros,
        rollout_log_probs=zeros,
        log_probs=zeros.clone(),
        advantages=torch.randn(count, 1, generator=numbers),
        values=zeros.clone(),
        returns=torch.randn(count, 1, generator=numbers),
    )


def rollout_engine(
    model: LanguageModel, device: torch.device, dtype: torch.dtype = torch.float32
) -> TorchRolloutEngine:
    engine = TorchRolloutEngine(model.config, [258], 6, device, dtype)
    engine.receive(Weights(0, _state(model, device)))
    return engine


def _state(model: LanguageModel, device: torch.device) -> dict[str, Tensor]:
    model.to(device)
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


def generated(device: torch.device, dtype: torch.dtype) -> Report:
    """Generates with pages, shared prefixes and filters; again with other weights and after an offload."""
    numbers = torch.Generator().manual_seed(3)
    engine, report = rollout_engine(language_model(), device, dtype), {}
    common = tuple(range(20))
    prompts = [common + tuple(torch.randint(250, (n,), generator=numbers).tolist()) for n in (5, 30, 70, 3, 5)]

    def keep(completion: Completion) -> None:
        report[f"tokens {completion.index}"] = torch.tensor(completion.token_ids)
        report[f"log-probs {completion.index}"] = torch.tensor(completion.log_probs)

    requests = [Request(index, prompt, 100 + index) for index, prompt in enumerate(prompts)]
    engine.generate(requests, SamplingParams(50, temperature=0.8, top_p=0.95, top_k=50), keep)
    engine.receive(Weights(1, _state(language_model(tied=True), device)))
    engine.offload()
    engine.generate([Request(len(prompts), prompts[0], 100)], SamplingParams(4, temperature=0.0), keep)
    return report


def acted(device: torch.device) -> Report:
    actions = PolicyInference(gaussian_policy(), device, seed=1, rows=4).act(OBSERVATIONS)
    arrays = {"actions": actions.array, "log-probs": actions.log_probs, "values": actions.values}
    return {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}


def sharing_short_prefixes() -> AbstractContextManager[object]:
    """GPUs share long prefixes only. The results equal those of a CPU, bit by bit, if both share the same."""
    return patch.dict(packed.SHARED, cuda=packed.SHARED["cpu"])


def trained(
    engine: TrainingEngine, loss: Loss, batch: RolloutBatch, micro_batches: MicroBatches = MICRO_BATCHES
) -> Report:
    """Evaluates and steps twice; returns all outputs, metrics and the weights on the CPU."""
    report: Report = {}
    for number in range(2):
        outputs = vars(engine.evaluate(batch, micro_batches))
        report |= {f"{name} {number}": tensor for name, tensor in outputs.items() if tensor is not None}
        metrics = engine.step(batch, loss, micro_batches)
        assert metrics is not None
        report |= {f"{name} {number}": torch.tensor(value) for name, value in metrics.finalize().items()}
        if isinstance(engine, OffloadingEngine):
            engine.offload(weights=True)
    return report | {name: tensor.cpu().clone() for name, tensor in engine.weights().items()}


def assert_same(found: Report, expected: Report) -> None:
    """Asserts that all tensors are equal, bit by bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name}: {(found[name] - tensor).abs().max()} apart"
