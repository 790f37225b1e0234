"""Training runs of FSDP2 with shared tokens, adapters and offload, to be compared to one plain process. No test.

`main(rank, folder)` is one of several gloo processes. It goes on from the states that plain torch has saved
in the folder, and saves its own there.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rl_platform.config.schema.models import Lora
from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.engines.training.state_files import read, write
from rl_platform.models.context_parallel import ContextParallel, UlyssesAttention
from rl_platform.models.lora import add_adapters, without_adapters
from rl_platform.models.packed import pack

_spec = importlib.util.spec_from_file_location("training_ranks", Path(__file__).with_name("ranks.py"))
assert _spec is not None
assert _spec.loader is not None
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)

LORA = Lora(rank=3, alpha=5.0, target_modules=["q_proj", "v_proj", "down_proj"])
KINDS = ("actor", "critic")
VARIANTS: dict[tuple[str, str], dict[str, Any]] = {  # (kind, name): what two ranks train
    ("actor", "context"): {"context": 2},
    ("critic", "context"): {"context": 2},
    ("actor", "offload"): {"cpu_offload": True},
    ("critic", "lora"): {"lora": LORA},
    ("actor", "lora, context, layers twice"): {"lora": LORA, "context": 2, "gradient_checkpointing": True},
}


def model(kind: str, lora: Lora | None) -> nn.Module:
    built = ranks.model(kind)
    if lora is not None:
        add_adapters(built.model.backbone, lora, 3, "actor.lora")
        built.model.head.requires_grad_(kind == "critic")
    return built


def engine(
    kind: str, *, lora: Lora | None = None, dtype: torch.dtype = torch.float32, optim: Any = ranks.OPTIM, **options: Any
) -> FSDPEngine:
    return FSDPEngine(model(kind, lora), optim, dtype=dtype, horizon=32, device=torch.device("cpu"), **options)


def run(trained: FSDPEngine, kind: str, folder: Path | None = None) -> dict[str, Any]:
    """Three updates and two odd ones: fewer rows than micro-batches for everyone, and one row."""
    report: dict[str, Any] = {"first": first_outputs(trained, kind), "begin": ranks.parameters(trained)}
    report["metrics"] = ranks.steps(trained, kind, 0, 3)
    report["parameters"] = ranks.parameters(trained)
    report["outputs"] = ranks.outputs(trained, kind)
    if folder is not None:
        write(trained.sharded_state(), folder)
    report["odd"], report["continued"] = go_on(trained, kind)
    return report


def first_outputs(trained: FSDPEngine, kind: str) -> dict[str, Tensor]:
    """The very first forward; with adapters it is the reference's, which they are off in."""
    if all(parameter.requires_grad for parameter in trained.model.parameters()):
        return ranks.outputs(trained, kind)
    with without_adapters(trained.model):
        return ranks.outputs(trained, kind)


def go_on(trained: FSDPEngine, kind: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    few = trained.step(ranks.batch(kind, 3, (6, 4, 5)), ranks.loss(kind), MicroBatches(rows=1))
    one = trained.step(ranks.batch(kind, 4, (6,)), ranks.loss(kind), MicroBatches())
    return [few.finalize(), one.finalize()], ranks.parameters(trained)


def resumed(trained: FSDPEngine, kind: str, folder: Path) -> dict[str, Any]:
    ranks.steps(trained, kind, 5, 6)  # what is loaded replaces all of it
    read(trained.sharded_state(), folder)
    return {"outputs": ranks.outputs(trained, kind), "continued": go_on(trained, kind)[1]}


def exchanged_attention() -> dict[str, Tensor]:
    """Attention with one key head for four query heads, over 11 tokens that two ranks share; with its gradients."""
    packed = pack([torch.arange(7), torch.arange(4) + 2])
    numbers = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, heads, 11, 6, generator=numbers, requires_grad=True) for heads in (4, 1, 1)]
    expected = packed.attention(0, *whole, 0.4)
    weights = torch.randn(expected.shape, generator=numbers)
    (expected * weights).sum().backward()
    context = ContextParallel(dist.group.WORLD)
    mine = slice(6 * context.rank, 6 * context.rank + 6)
    own = [F.pad(tensor.detach(), (0, 0, 0, 1))[:, :, mine].requires_grad_() for tensor in whole]
    output = UlyssesAttention(packed.attention, context, 11)(0, *own, 0.4)
    (output * F.pad(weights, (0, 0, 0, 0, 0, 1))[mine]).sum().backward()
    gradients = [F.pad(tensor.grad, (0, 0, 0, 1))[:, :, mine] for tensor in whole]
    assert all(tensor.grad is not None for tensor in own)
    return {
        "actual": torch.cat([output.flatten(), *(tensor.grad.flatten() for tensor in own)]),
        "expected": torch.cat([F.pad(expected, (0, 0, 0, 0, 0, 1))[mine].flatten(), *(g.flatten() for g in gradients)]),
    }


def preload() -> None:
    """What all ranks import, before they are forked."""
    ranks.preload()
    model("critic", LORA)


def main(rank: int, folder: Path) -> None:
    results: dict[str, Any] = {"attention": exchanged_attention()}
    for (kind, name), options in VARIANTS.items():
        report = run(engine(kind, **options), kind, folder / f"{kind} {name}")
        trained = "lora" if "lora" in options else "plain"
        report["resumed"] = resumed(engine(kind, **options), kind, folder / f"{kind} {trained}")
        if "context" in name:  # one sequence at a time
            report["unpacked"] = ranks.steps(engine(kind, **options), kind, 0, 3, ranks.UNPACKED)
        results[f"{kind} {name}"] = report
    results["bfloat16"] = run(engine("actor", dtype=torch.bfloat16), "actor")
    torch.save(results, folder / f"rank{rank}.pt")
