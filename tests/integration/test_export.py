"""The exported folder of a run: transformers loads it, and it says what the platform's own engine says."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.models.tokenizer import ByteTokenizer
from rl_platform.records import SamplingParams, Weights

PROMPTS = ["12", "7", "00", "94 and more", "5", "a longer one"]
LENGTH = 12


def greedy_by_the_platform(weights: dict[str, torch.Tensor], prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    config = AutoConfig.from_pretrained("out/model")
    engine = TorchRolloutEngine(config, ByteTokenizer.eos_token_ids, max_running=4, device=torch.device("cpu"))
    engine.receive(Weights(0, weights))
    found: dict[int, Completion] = {}
    requests = [Request(index, prompt, seed=0) for index, prompt in enumerate(prompts)]
    engine.generate(requests, SamplingParams(LENGTH, temperature=0.0), lambda done: found.update({done.index: done}))
    return [found[index].token_ids for index in range(len(prompts))]


def test_greedy_output_of_the_export_is_the_platforms(command, final_state):
    positions = "actor.model.random_init.max_positions=64"
    assert command("reasoning.yaml", positions, "actor.optim.lr=0.02", "runner.max_steps=3").code == 0
    actor = final_state("out", 3)["actor"]["model"]
    weights = {name.removeprefix("model."): tensor for name, tensor in actor.items()}
    weights["head.weight"] = weights["backbone.embed_tokens.weight"]  # tied: saved once

    model = AutoModelForCausalLM.from_pretrained("out/model").eval()
    prompts = [tuple(ByteTokenizer().encode(prompt)) for prompt in PROMPTS]
    platform = greedy_by_the_platform(weights, prompts)
    for prompt, expected in zip(prompts, platform, strict=True):
        tokens = torch.tensor([prompt])
        said = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=LENGTH, pad_token_id=256
        )
        assert tuple(said[0, len(prompt) :].tolist()) == expected
    assert len(set(platform)) > 1


def test_an_export_can_be_trained_on(command):
    assert command("reasoning.yaml", "runner.max_steps=1", "runner.output_dir=first").code == 0
    model = f"actor.model={{path: {Path('first/model').absolute()}, tokenizer: bytes}}"
    ended = command("reasoning.yaml", "runner.max_steps=1", model)
    assert ended.code == 0, ended.err
