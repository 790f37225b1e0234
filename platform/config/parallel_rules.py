"""Rules of the training backends: which keys of a layout they read, and which layouts cannot be."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.fsdp_rules import broken_fsdp_rules, idle_fsdp_keys, laid_out
from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config


def idle_parallel_keys(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Keys of the layout that do nothing, the reason, and the keys that decide it."""
    yield from idle_fsdp_keys(config)
    for role, section in laid_out(config).items():
        backend, tensor = f"{role}.training_backend", f"{role}.parallel.tensor"
        if section.training_backend != "megatron":
            for name in ("tensor", "pipeline", "virtual_pipeline", "expert", "sequence"):
                reason = f"only {backend} megatron splits a model; fsdp shards it over all ranks"
                yield f"{role}.parallel.{name}", reason, (backend,)
            if role != "reference":
                yield f"{role}.kernels", f"only {backend} megatron has other layers than transformers'", (backend,)
            continue
        pipeline, interleaved = f"{role}.parallel.pipeline", f"{role}.parallel.virtual_pipeline"
        if section.parallel.tensor == 1:
            yield f"{role}.parallel.sequence", f"tensor ranks share the tokens, and {tensor} is 1", (tensor,)
        if section.parallel.pipeline == 1:
            yield interleaved, f"stages work on their parts in turns, and {pipeline} is 1", (pipeline,)


def broken_parallel_rules(config: Config) -> Iterator[BrokenRule]:
    """What fsdp alone can do, and an interleaved schedule with nothing to interleave."""
    yield from broken_fsdp_rules(config)
    for role, section in laid_out(config).items():
        interleaved = section.parallel.pipeline > 1 and section.parallel.virtual_pipeline > 1 and role != "reference"
        if interleaved and section.micro_batch_size is None and section.max_tokens_per_micro_batch is None:
            message = "without a limit a mini-batch is one micro-batch, and stages that take turns need several"
            rows = f"{role}.micro_batch_size"
            yield BrokenRule(f"{role}.parallel.virtual_pipeline", message, (rows,), hint=f"set {rows}, or the tokens")
