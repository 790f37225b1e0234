"""On a GPU: who leaves gives its memory back, to other processes too, and comes back with the same bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch

from rl_platform.algorithms.losses import actor_loss
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.config.schema.models import Actor, Model, Optim, RandomLM
from rl_platform.engines.offloading.offload import OffloadingEngine
from rl_platform.engines.offloading.swap import Swap
from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.build import training_engine
from rl_platform.models.causal_lm import load_causal_lm
from rl_platform.models.forward import TokenPolicy
from rl_platform.models.language import LanguageModel
from rl_platform.records import RolloutBatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
MIB = 2**20
WORKSPACE = 72 * MIB  # of libraries, at most: on an H200 cuBLAS takes 32 MiB for each of the two threads that compute
WIDE = RandomLM(hidden_size=512, num_layers=8, num_heads=8, intermediate_size=2048, max_positions=64)  # 29 M parameters


def test_the_memory_is_free_and_the_content_comes_back() -> None:
    device = torch.device("cuda", 0)
    tensor = torch.randn(64, MIB, device=device)  # 256 MiB
    expected = tensor.cpu()
    before = torch.cuda.mem_get_info(device)[0]
    swap = Swap(lambda: [tensor], device)
    swap.leave()
    assert torch.cuda.mem_get_info(device)[0] - before >= 250 * MIB, "as every process on this GPU sees it"
    swap.enter()
    assert torch.equal(tensor.cpu(), expected)


def engine(*, offload: bool) -> Any:
    network = load_causal_lm(Model(random_init=WIDE, tokenizer="bytes"), 259, 258, seed=1)
    return training_engine(
        Actor(offload=offload, optim=Optim(lr=1e-3)),
        TokenPolicy(LanguageModel(network), temperature=1.0),
        dtype=torch.float32,
        horizon=32,
        device=torch.device("cuda", 0),
        nominal=False,
    )


def batch() -> RolloutBatch:
    numbers = torch.Generator().manual_seed(0)
    shape = (8, 32)
    return neutral_batch(
        (torch.arange(32) >= 4).expand(shape).contiguous(),
        inputs={"tokens": torch.randint(256, shape, generator=numbers), "lengths": torch.full((8,), 32)},
        log_probs=torch.full(shape, -5.5),
        advantages=torch.randn(shape, generator=numbers),
    )


def test_a_trained_model_leaves_nothing_behind_and_learns_the_same() -> None:
    loss, learned = partial(actor_loss, algorithm=Algorithm()), []
    for offload in (True, False):
        torch.cuda.empty_cache()
        start = torch.cuda.memory_allocated()
        trained = engine(offload=offload)
        for _ in range(3):
            trained.evaluate(batch(), MicroBatches())
            trained.step(batch(), loss, MicroBatches())
            if isinstance(trained, OffloadingEngine):
                weights = sum(parameter.nbytes for parameter in trained.model.parameters())
                assert torch.cuda.memory_allocated() - start >= 3 * weights, "with both moments"
                trained.offload(weights=True)
                assert torch.cuda.memory_allocated() - start <= WORKSPACE
        learned.append({name: tensor.cpu().clone() for name, tensor in trained.weights().items()})
        del trained
    for name, tensor in learned[1].items():
        torch.testing.assert_close(learned[0][name], tensor, rtol=1e-5, atol=1e-6)  # kernels may sum in any order
