"""Tokens per second and model FLOPs utilisation (MFU) of an optimizer step on one GPU, next to a plain FSDP loop.

The model has the shape of Qwen2.5-1.5B and random weights, so nothing is downloaded. It computes in bfloat16 over
float32 master weights; a GPU of less than 75 GiB recomputes the layers. A step is: log-probabilities of the responses,
the clipped policy loss, backward, gradient clipping and AdamW. Three cases:

* equal: rows of one length, so nothing can be saved.
* chat: the same rows with a common beginning, like a chat template's. Ours computes it once for a micro-batch.
* mixed: lengths from an eighth of it to all of it. The plain loop pads the rows, ours packs them.

The plain loop is transformers with FSDP2, its scaled-dot-product attention and the fused AdamW. MFU counts the products
of real tokens, twice as many in the backward as in the forward, and only the logits of responses. A common beginning
counts once in a micro-batch; recomputation does not count. Contestants run one after another, each in a process of
its own, because two of them do not fit one GPU. If one fails (out of memory, say), its reason is printed and the
others are measured; the file is written after each. Not covered: several GPUs, generation.

    python benchmarks/training_gpu.py [--rows 32] [--length 2048] [--micro-tokens 16384] [--rounds 5] [--json FILE]
    python benchmarks/training_gpu.py --dry-run     # a tiny shape, on a CPU: whether it runs
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from _common import machine, new_parser, write_json
from _language import BACKENDS, batch, gpu_shape, network, row_lengths, training_engine

if TYPE_CHECKING:
    import torch

    from rl_platform.engines.training.base import TrainingEngine
    from rl_platform.records import RolloutBatch

PLAIN = "plain FSDP"
CASES = ("equal", "chat", "mixed")
ROOMY = 75 * 2**30  # bytes
BEGINNING = 16  # the share of a row that is common in the case chat: 1 / BEGINNING
NO_GPU = "training_gpu.py: torch sees no GPU on this machine. --dry-run tries the script out on the CPU."


def lengths_of(settings: argparse.Namespace, case: str) -> list[int]:
    return row_lengths(settings.rows, settings.length, mixed=case == "mixed")


def shuffled(settings: argparse.Namespace, case: str) -> RolloutBatch:
    """The rows in a random order."""
    lengths = random.Random(0).sample(lengths_of(settings, case), settings.rows)
    rows = batch(lengths, gpu_shape(settings.dry_run)["vocab_size"])
    common = settings.length // BEGINNING if case == "chat" else 0
    rows.inputs["tokens"][:, :common] = rows.inputs["tokens"][:1, :common]
    return rows


def device_of(settings: argparse.Namespace) -> torch.device:
    import torch

    return torch.device("cpu") if settings.dry_run else torch.device("cuda", 0)


def recomputes(settings: argparse.Namespace) -> bool:
    """Returns whether the backward pass computes the layers again, because the GPU cannot hold their activations."""
    import torch

    return settings.dry_run or torch.cuda.get_device_properties(0).total_memory < ROOMY


def engine_of(settings: argparse.Namespace, backend: str, device: torch.device | None = None) -> TrainingEngine:
    """device None: the GPU, or the CPU in a dry run."""
    import torch

    shape, device = gpu_shape(settings.dry_run), device or device_of(settings)
    return training_engine(
        backend, shape, dtype=torch.bfloat16, device=device, recompute=recomputes(settings), drawn_on=device
    )


def step_of(engine: TrainingEngine, settings: argparse.Namespace, case: str) -> Callable[[], float]:
    """An optimizer step of ours that returns the gradient norm."""
    from rl_platform.algorithms.losses import actor_loss
    from rl_platform.config.schema.algorithm import Algorithm
    from rl_platform.engines.training.base import MicroBatches

    rows, loss = shuffled(settings, case), partial(actor_loss, algorithm=Algorithm())
    limit = MicroBatches(tokens=settings.micro_tokens)

    def step() -> float:
        metrics = engine.step(rows, loss, limit)
        assert metrics is not None
        return metrics.finalize()["grad_norm"]

    return step


def plain(settings: argparse.Namespace, case: str) -> Callable[[], float]:
    """The same step as one would write it: padded rows, micro-batches of equally many."""
    import torch

    device = device_of(settings)
    model = network(gpu_shape(settings.dry_run), device)
    if recomputes(settings):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = _sharded(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    rows = shuffled(settings, case).to(device)
    actions = rows.action_mask.sum()

    def step() -> float:
        for part in _parts(rows, max(1, settings.micro_tokens // settings.length)):
            tokens, mask = part.inputs["tokens"], part.action_mask
            present = (torch.arange(tokens.shape[1], device=device) < part.inputs["lengths"][:, None]).long()
            row, column = mask.nonzero(as_tuple=True)
            outputs = model(input_ids=tokens, attention_mask=present, use_cache=False)
            logits = outputs.logits[row, column - 1].float()
            log_probs = logits.gather(1, tokens[row, column][:, None]).squeeze(1) - logits.logsumexp(-1)
            ratio, advantages = (log_probs - part.log_probs[mask]).exp(), part.advantages[mask]
            losses = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
            (losses.sum() / actions).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm.full_tensor())

    return step


def _parts(rows: RolloutBatch, size: int) -> Iterator[RolloutBatch]:
    import torch

    for start in range(0, len(rows), size):
        yield rows.select(torch.arange(start, min(start + size, len(rows)), device=rows.action_mask.device))


def _sharded(model: Any, device: torch.device) -> Any:
    """FSDP2 with one rank: bfloat16 parameters in forward and backward, float32 ones in the optimizer."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model.train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def measure(name: str, settings: argparse.Namespace, case: str) -> dict[str, Any]:
    """Seconds of every measured step, the first one's gradient norm, and the peak memory on the GPU in bytes."""
    import torch

    step = plain(settings, case) if name == PLAIN else step_of(engine_of(settings, name), settings, case)
    on_gpu = not settings.dry_run
    seconds, norms = [], []
    for _ in range(settings.warm_up + settings.rounds):
        began = time.perf_counter()
        norms.append(step())
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    memory = torch.cuda.max_memory_allocated() if on_gpu else None
    return {"seconds": seconds[settings.warm_up :], "grad_norm": norms[0], "peak_bytes": memory}


def flops(settings: argparse.Namespace, case: str) -> float:
    """Of one optimizer step: forward and backward of all real tokens, attention over half of the pairs."""
    from rl_platform.placement.estimates.component_shapes import from_options
    from rl_platform.placement.estimates.model_shape import ModelShape

    shape = from_options(gpu_shape(settings.dry_run))
    assert isinstance(shape, ModelShape)
    lengths = lengths_of(settings, case)
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    if case == "chat":  # a micro-batch computes the common beginning once
        rows, common = settings.rows, settings.length // BEGINNING
        repeated = rows - -(-rows // max(1, settings.micro_tokens // settings.length))
        tokens, squares = tokens - repeated * common, squares - repeated * common**2
    products = tokens * shape.layers * shape.matrices_per_layer + squares * shape.layers * shape.attention_width
    products += sum(length - length // 4 for length in lengths) * shape.hidden * shape.vocabulary
    return 3 * 2 * products


def peak_flops() -> float | None:
    """Of this machine's GPU in bfloat16, by its data sheet; None for one that is not in the table."""
    from rl_platform.placement.estimates import hardware
    from rl_platform.placement.inventory import Inventory

    found = hardware.device_of(Inventory.detected())
    return found.bf16 if found.known and found.kind != "cpu" else None


def report(case: str, settings: argparse.Namespace, found: dict[str, dict[str, Any]], peak: float | None) -> None:
    tokens = sum(lengths_of(settings, case))
    for name, one in found.items():
        if "error" in one:
            print(f"\n{case} lengths: {name} failed: {one['error']}")
    found = {name: one for name, one in found.items() if "error" not in one}
    norms = {name: round(one["grad_norm"], 4) for name, one in found.items()}
    print(f"\n{case} lengths, {tokens:,} tokens a step; gradient norms of the first step: {norms}")
    for name, one in found.items():
        seconds = statistics.median(one["seconds"])
        one |= {"tokens_per_s": tokens / seconds, "mfu": peak and flops(settings, case) / seconds / peak}
        mfu = f"MFU {100 * one['mfu']:.1f} %" if one["mfu"] else "MFU not known: no peak of this device"
        memory = f", {one['peak_bytes'] / 2**30:.1f} GiB" if one["peak_bytes"] else ""
        print(f"  {name}: {seconds:.3g} s, {one['tokens_per_s']:,.0f} tokens/s per GPU, {mfu}{memory}")
    for name in [name for name in BACKENDS if {name, PLAIN} <= found.keys()]:
        ratio = statistics.median(found[PLAIN]["seconds"]) / statistics.median(found[name]["seconds"])
        print(f"  {name}: {ratio:.2f} times the speed of the plain loop")


def measured(name: str, settings: argparse.Namespace, case: str) -> dict[str, Any]:
    """`measure` in a process of its own on a GPU, whose memory is free again for the next one; or why it failed."""
    if settings.dry_run:
        return measure(name, settings, case)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(measure, name, settings, case).result()
    except Exception as error:  # the others' numbers are worth having without it
        traceback.print_exception(error)
        return {"error": f"{type(error).__name__}: {error}"}


def about_machine(settings: argparse.Namespace) -> dict[str, Any]:
    """With the GPU, and Transformer Engine where it is: Megatron's numbers depend on it."""
    import torch

    from rl_platform.engines.training.megatron.supported import transformer_engine_installed

    fused = ("transformer-engine",) if transformer_engine_installed() else ()
    found = machine(("torch", "transformers", "megatron-core", *fused))
    if not settings.dry_run:
        found |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
        print(f"{found['gpu']}, CUDA {found['cuda']}")
    return found


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    parser.add_argument("--rows", type=int, default=32, help="sequences of the mini-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the longest, prompt included")
    parser.add_argument("--micro-tokens", type=int, default=16_384, help="tokens of a forward and backward")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU; its numbers mean nothing")
    settings = parser.parse_args()
    settings.dry_run |= settings.quick
    if settings.dry_run:
        settings.rows, settings.length, settings.micro_tokens, settings.rounds = 4, 32, 64, 1
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: Megatron would take a GPU that is there
    else:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit(NO_GPU)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    content = {"benchmark": "training_gpu", "options": vars(settings), "found": results}
    content["machine"] = about_machine(settings)
    peak = None if settings.dry_run else peak_flops()
    for case in CASES:
        found = results[case] = {}
        for name in (PLAIN, *BACKENDS):
            found[name] = measured(name, settings, case)
            write_json(settings.json, content)
        report(case, settings, found, peak)
    write_json(settings.json, content)


if __name__ == "__main__":
    main()
