"""All parts in the order in which they run: first the results that others rely on, last the longest parts."""

from __future__ import annotations

from functools import partial

from gpu_parts import attention, equality, rollout, runs, suite, training, weights
from gpu_parts.part import Part

PARTS = (
    Part("tests", "the tests in tests/gpu", suite.measure, 180, ("pytest",)),
    Part("equality", "results on the GPU compared with the CPU", equality.measure, 120),
    Part(
        "equality-megatron",
        "an optimizer step of Megatron compared with the CPU",
        equality.megatron,
        90,
        ("megatron.core",),
    ),
    Part("offload", "offload and onload of weights and optimizer state, compared with the link", weights.offload, 60),
    Part("ipc", "weights that another process reads on the same GPU (CUDA IPC)", weights.ipc, 60),
    Part("weights", "new weights for the generator in the trainer's process", weights.sync, 90),
    Part("weights-ray", "new weights through Ray's object store", weights.by_ray, 120, ("ray",)),
    Part("attention", "packed attention by prefix and length", attention.measure, 90),
    Part("rollout", "the torch engine by length", rollout.measure, 150),
    Part("ppo-float32", "ppo_tiny.yaml, killed and resumed", partial(runs.ppo, dtype="float32"), 120),
    Part("ppo-bfloat16", "ppo_tiny.yaml, killed and resumed", partial(runs.ppo, dtype="bfloat16"), 120),
    Part("embodied", "cartpole.yaml with the policy on the GPU", runs.embodied, 90, ("gymnasium",)),
    Part("mujoco-warp", "HalfCheetah on the GPU", runs.warp, 170, ("gymnasium", "mujoco", "mujoco_warp")),
    Part("training-fsdp", "optimizer steps of a 1.5 B model", partial(training.measure, backend="fsdp"), 180),
    Part(
        "training-megatron",
        "the same with Megatron",
        partial(training.measure, backend="megatron"),
        180,
        ("megatron.core",),
    ),
    Part("sglang", "SGLang in the platform compared with SGLang alone", rollout.sglang, 300, ("sglang",)),
    Part("vllm", "vLLM in the platform", rollout.vllm, 240),
    Part("recipe", "five steps of the recipe qwen2.5_0.5b_gsm8k, random weights", runs.recipe, 300),
)
NAMES = tuple(part.name for part in PARTS)
