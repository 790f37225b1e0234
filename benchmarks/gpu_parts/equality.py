"""Compares results of the device with those of the CPU: training, generation, an embodied step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from _language import batch, gpu_shape, network, training_engine
from torch import Tensor

from gpu_parts.part import Report, Setup, at_most
from rl_platform.algorithms.losses import actor_critic_loss, actor_loss
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.config.schema.models import Actor, Optim
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.engines.training import build
from rl_platform.engines.training.base import MicroBatches
from rl_platform.models.forward import EmbodiedActorCritic
from rl_platform.models.language import LanguageModel
from rl_platform.models.policy import ActorCriticPolicy, PolicyConfig
from rl_platform.records import RolloutBatch, SamplingParams, Weights

LENGTHS = (90, 40, 64, 128)
CPU = torch.device("cpu")
EXACT, ROUNDED = at_most(1e-3), at_most(0.05)  # kernels sum in different orders; bfloat16 has three digits


def measure(setup: Setup, report: Report) -> None:
    training(setup, report, "fsdp", torch.float32, EXACT)
    training(setup, report, "fsdp", torch.bfloat16, ROUNDED)
    generation(setup, report)
    embodied(setup, report)


def megatron(setup: Setup, report: Report) -> None:
    training(setup, report, "megatron", torch.float32, EXACT)
    training(setup, report, "megatron", torch.bfloat16, ROUNDED)


def training(setup: Setup, report: Report, backend: str, dtype: torch.dtype, target: Any) -> None:
    """Compares log-probs before a step, and the step's gradient norm, with FSDP's on the CPU in float32."""
    shape = gpu_shape(dry_run=True)
    rows = batch(LENGTHS, shape["vocab_size"])

    def results(backend: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
        engine = training_engine(backend, shape, dtype=dtype, device=device)
        log_probs = engine.evaluate(rows, MicroBatches()).log_probs
        metrics = engine.step(rows, partial(actor_loss, algorithm=Algorithm()), MicroBatches(tokens=200))
        assert log_probs is not None
        assert metrics is not None
        return log_probs[rows.action_mask], metrics.finalize()["grad_norm"]

    (expected, norm), (found, own_norm) = results("fsdp", torch.float32, CPU), results(backend, dtype, setup.device)
    name = f"{backend}, {str(dtype).removeprefix('torch.')}"
    report(f"{name}: largest difference of a log-prob", float((found - expected).abs().max()), "nats", target)
    report(f"{name}: relative difference of the gradient norm", abs(own_norm / norm - 1), "", target)


def generation(setup: Setup, report: Report) -> None:
    """Compares log-probs of the torch engine with those of transformers for the same tokens on the CPU."""
    plain, trained = (network(gpu_shape(dry_run=True)).eval() for _ in range(2))  # the same weights
    engine = TorchRolloutEngine(trained.config, (), 4, setup.device)
    engine.receive(Weights(0, LanguageModel(trained).state_dict()))
    draw = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(500, (length,), generator=draw).tolist()) for length in (5, 70, 200, 33, 8, 64)]
    done: list[Completion] = []
    requests = [Request(index, prompt, seed=index) for index, prompt in enumerate(prompts)]
    engine.generate(requests, SamplingParams(12 if setup.small else 80), done.append)
    worst = 0.0
    for one in done:
        prompt = prompts[one.index]
        with torch.inference_mode():
            logits = plain(torch.tensor([prompt + one.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None]).squeeze(1)
        worst = max(worst, float((torch.tensor(one.log_probs) - expected).abs().max()))
    report("responses that the torch engine did not return", len(prompts) - len(done), "", at_most(0))
    report("torch engine, float32: largest difference of a log-prob", worst, "nats", EXACT)


def embodied(setup: Setup, report: Report) -> None:
    """Compares one optimizer step of a policy and value network."""
    from rl_platform.envs.embodied.spaces import ActionSpace

    numbers = torch.Generator().manual_seed(0)
    shape = (64, 1)
    values = {name: torch.randn(shape, generator=numbers) for name in ("advantages", "returns", "values", "log_probs")}
    rows = RolloutBatch(
        inputs={
            "observations": torch.randn(*shape, 17, generator=numbers),
            "actions": torch.randn(*shape, 6, generator=numbers),
        },
        action_mask=torch.ones(shape, dtype=torch.bool),
        sample_mask=torch.ones(64, dtype=torch.bool),
        group_ids=torch.arange(64),
        rewards=torch.zeros(shape),
        rollout_log_probs=values["log_probs"] - 8.0,
        log_probs=values["log_probs"] - 8.0,
        advantages=values["advantages"],
        returns=values["returns"],
        values=values["values"],
    )
    loss = partial(actor_critic_loss, algorithm=Algorithm(loss_type="actor_critic"))

    def learned(device: torch.device) -> tuple[dict[str, Tensor], float]:
        torch.manual_seed(0)
        policy = ActorCriticPolicy((17,), ActionSpace("continuous", 6), PolicyConfig((256, 256)))
        engine = build.training_engine(
            Actor(optim=Optim(lr=1e-3)),
            EmbodiedActorCritic(policy),
            dtype=torch.float32,
            horizon=1,
            device=device,
            nominal=False,
        )
        metrics = engine.step(rows, loss, MicroBatches())
        assert metrics is not None
        return {name: tensor.cpu() for name, tensor in engine.weights().items()}, metrics.finalize()["grad_norm"]

    (expected, norm), (found, own_norm) = learned(CPU), learned(setup.device)
    worst = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
    report("embodied step: relative difference of the gradient norm", abs(own_norm / norm - 1), "", EXACT)
    report("embodied step: largest difference of a weight", worst, "", EXACT)
