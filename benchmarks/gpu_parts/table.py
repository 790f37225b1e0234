"""All parts in the order in which they run: first the results that others rely on, last the longest parts.

A part imports its module in its own process, so a missing package leaves out the parts that need it and no others.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

from gpu_parts.part import Measure, Part, Report, Setup

MODEL = ("accelerate", "psutil", "pydantic", "safetensors", "transformers", "xxhash", "yaml")
RUN = (*MODEL, "gymnasium", "rich")
MUJOCO = ("glfw", "imageio", "mujoco")  # Gymnasium's tasks import all of them


def late(module: str, function: str, **options: str) -> Measure:
    """Returns the function of a module of this package, which is imported when the function is called."""
    return partial(_call, module, function, options)


def _call(module: str, function: str, options: dict[str, str], setup: Setup, report: Report) -> None:
    getattr(import_module(f"gpu_parts.{module}"), function)(setup, report, **options)


PARTS = (
    Part("tests", "the tests in tests/gpu", late("suite", "measure"), 180, (*MODEL, "pytest")),
    Part("equality", "results on the GPU compared with the CPU", late("equality", "measure"), 120, MODEL),
    Part(
        "equality-megatron",
        "an optimizer step of Megatron compared with the CPU",
        late("equality", "megatron"),
        90,
        (*MODEL, "megatron.core"),
    ),
    Part(
        "offload",
        "offload and onload of weights and optimizer state, compared with the link",
        late("weights", "offload"),
        60,
        MODEL,
    ),
    Part("ipc", "weights that another process reads on the same GPU (CUDA IPC)", late("weights", "ipc"), 60, MODEL),
    Part("weights", "new weights for the generator in the trainer's process", late("weights", "sync"), 90, MODEL),
    Part("weights-ray", "new weights through Ray's object store", late("weights", "by_ray"), 120, (*RUN, "ray")),
    Part("attention", "packed attention by prefix and length", late("attention", "measure"), 90),
    Part("rollout", "the torch engine by length", late("rollout", "measure"), 150, MODEL),
    Part("ppo-float32", "ppo_tiny.yaml, killed and resumed", late("runs", "ppo", dtype="float32"), 120, RUN),
    Part("ppo-bfloat16", "ppo_tiny.yaml, killed and resumed", late("runs", "ppo", dtype="bfloat16"), 120, RUN),
    Part("embodied", "cartpole.yaml with the policy on the GPU", late("runs", "embodied"), 90, RUN),
    Part("mujoco-warp", "HalfCheetah on the GPU", late("runs", "warp"), 170, (*RUN, *MUJOCO, "mujoco_warp")),
    Part("training-fsdp", "optimizer steps of a 1.5 B model", late("training", "measure", backend="fsdp"), 180, RUN),
    Part(
        "training-megatron",
        "the same with Megatron",
        late("training", "measure", backend="megatron"),
        180,
        (*RUN, "megatron.core"),
    ),
    Part("sglang", "SGLang in the platform compared with SGLang alone", late("rollout", "sglang"), 300, ("sglang",)),
    Part("vllm", "vLLM in the platform", late("rollout", "vllm"), 240, MODEL),
    Part("recipe", "five steps of the recipe qwen2.5_0.5b_gsm8k, random weights", late("runs", "recipe"), 300, RUN),
)
NAMES = tuple(part.name for part in PARTS)
