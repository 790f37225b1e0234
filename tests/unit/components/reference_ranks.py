"""References in several layouts, to be compared with one plain process. No test by itself.

`main(rank, folder, *layouts)` is one of several gloo processes and saves what it found into the folder,
where `save_models` has been.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from neutral_batches import neutral_batch
from torch import Tensor

from rl_platform.components.reference import LanguageReference
from rl_platform.config.schema import Config
from rl_platform.records import RolloutBatch
from rl_platform.runtime.host import ComponentContext

SIZES: dict[str, Any] = {"vocab_size": 259, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 40}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
LENGTHS = {"uneven": (5, 17, 9, 3, 30, 6, 4), "one row": (6,), "two rows": (4, 30)}
MEGATRON = {"training_backend": "megatron"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "context": {"parallel": {"context": 2}},
    "cpu_offload": {"cpu_offload": True},
    "megatron": MEGATRON,
    "megatron dp2": MEGATRON,
    "tp2": MEGATRON | {"parallel": {"tensor": 2}},
    "tp2 sp": MEGATRON | {"parallel": {"tensor": 2, "sequence": True}},
    "pp2": MEGATRON | {"parallel": {"pipeline": 2}},
    "pp2 vp2": MEGATRON | {"parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    "ep2": MEGATRON | {"parallel": {"expert": 2}},
}
MODELS = {"pp2 vp2": "deep", "ep2": "experts"}  # of the other layouts: small
FORWARDS: dict[str, dict[str, Any]] = {  # how rows stand beside each other in a forward pass
    "packed": {},
    "one by one": {"logprob_forward_micro_batch_size": 1},
    "by threes": {"logprob_forward_micro_batch_size": 3},
}
LEAVING = ("dp2", "tp2", "pp2")


def save_models(folder: Path) -> None:
    """Tied; of four layers, for two stages of two parts; a mixture of experts."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(7)
    sizes = SIZES | {"num_hidden_layers": 2, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "small")
    sizes |= {"num_hidden_layers": 4, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "deep")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **EXPERTS)).save_pretrained(folder / "experts")


def config(folder: Path, layout: str, *, full: bool = False, offload: bool = False, forward: str = "packed") -> Config:
    """A KL term, and the actor's layout. `layout` may be `plain MODEL`."""
    model = layout.removeprefix("plain ") if layout.startswith("plain ") else MODELS.get(layout, "small")
    algorithm = {"use_kl_loss": True, "kl_loss_type": "full" if full else "k3"} | FORWARDS[forward]
    return Config(
        runner={"task_type": "reasoning"},
        cluster={"component_placement": {"actor,critic,reference,rollout,reward": "all"}},
        data={"mini_batch_size": 4, "max_prompt_length": 2, "max_response_length": 28},
        actor={"model": {"path": str(folder / model), "tokenizer": "bytes"}, **LAYOUTS.get(layout, {})},
        critic={"use_critic_model": True},
        rollout={"sampling": {"temperature": 0.8}},
        reference={"offload": offload},
        algorithm=algorithm,
    )


def batch(name: str) -> RolloutBatch:
    """Two prompt tokens and up to 28 sampled ones."""
    lengths, numbers = LENGTHS[name], torch.Generator().manual_seed(3)
    shape = (len(lengths), max(lengths))
    positions = torch.arange(shape[1])
    return neutral_batch(
        (positions >= 2) & (positions < torch.tensor(lengths)[:, None]),
        inputs={"tokens": torch.randint(256, shape, generator=numbers), "lengths": torch.tensor(lengths)},
    )


def reference(folder: Path, layout: str, **options: Any) -> LanguageReference:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    context = ComponentContext(name="reference", rank=rank, world_size=size, accelerators=(), seed=3)
    return LanguageReference(context, config(folder, layout, **options))


def report(folder: Path, layout: str) -> dict[str, Any]:
    """All answers of one layout: by forward and batch, of a full KL, after it has been away; and what it holds."""
    found: dict[str, Any] = {}
    for forward in FORWARDS:
        asked = reference(folder, layout, forward=forward)
        found[forward] = {name: asked.evaluate(batch(name)) for name in LENGTHS}
    parameters, state, gradients = asked.engine.offloadable()
    found["held"] = sum(_bytes(tensor) for tensor in parameters)
    found["others"] = len(state) + len(gradients) + sum(getattr(p, "main_grad", None) is not None for p in parameters)
    found["others"] += sum(parameter.grad is not None for parameter in parameters) + len(asked.engine.sharded_state())
    full = reference(folder, layout, full=True)
    found["full"] = full.evaluate(batch("uneven")) | {"head": full.head().clone()}
    if layout in LEAVING:
        found["away"] = away(folder, layout)
    return found


def away(folder: Path, layout: str) -> dict[str, Any]:
    """Bytes that are left on the device while it is away, and what it says each time it comes back."""
    leaving = reference(folder, layout, offload=True)
    parameters = leaving.engine.offloadable()[0]
    found: dict[str, Any] = {"bytes": [], "answers": []}
    for _ in range(2):
        found["bytes"].append(sum(_storage(tensor).nbytes() for tensor in parameters))
        found["answers"].append(leaving.evaluate(batch("uneven"))["reference_log_probs"])
        leaving.offload(weights=True)
    return found


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return math.prod(local.shape) * local.element_size()


def preload() -> None:
    """What all ranks import, before they are forked."""
    from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM  # noqa: F401

    import rl_platform.engines.training.megatron.engine  # noqa: F401


def main(rank: int, folder: Path, *layouts: str) -> None:
    from megatron.core import parallel_state

    for layout in layouts:
        torch.save(report(folder, layout), folder / f"{layout}-{rank}.pt")
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
