"""Training runs that one process and two gloo processes must finish with the same numbers. Not a test by itself.

`main(rank, folder)` is one of several processes; a test that calls `run(folder)` is the single one. Both
save the states they reach into the folder and go on from the states the other kind has saved there.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from rl_platform.algorithms.losses import actor_critic_loss, actor_loss, critic_loss
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.config.schema.models import Optim
from rl_platform.engines.swap import storages
from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.engines.training.offload import OffloadingEngine
from rl_platform.engines.training.state_files import _Reader, read, write
from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.models.forward import EmbodiedActorCritic, TokenPolicy, TokenValues
from rl_platform.models.language import LanguageModel
from rl_platform.models.policy import ActorCriticPolicy, PolicyConfig
from rl_platform.records import RolloutBatch

KINDS = ("actor", "critic", "embodied")
ALGORITHM = Algorithm(entropy_bonus=0.01, value_clip=0.5, loss_agg_func="seq-mean-token-mean", target_kl=1.0)
OPTIM = Optim(lr=1e-2, eps=1e-4, weight_decay=0.1, clip_grad=0.5)  # eps: noise of a vanishing gradient makes no step
LENGTHS = (5, 17, 9, 3, 30, 6, 4)  # odd, so that two ranks get unequally many rows
KL = ALGORITHM.model_copy(update={"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.3})
REFERENCE_WIDTH = 12  # another than the actor's
PLANS = (MicroBatches(), MicroBatches(rows=2), MicroBatches(tokens=36))
UNPACKED = (MicroBatches(rows=1),)


def model(kind: str, layers: int = 2) -> nn.Module:
    """`kl`: an actor that is compared to a reference over the whole vocabulary."""
    torch.manual_seed(7)
    if kind == "embodied":
        return EmbodiedActorCritic(ActorCriticPolicy((5,), ActionSpace("continuous", 3), PolicyConfig((16, 16))))
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    network = LlamaForCausalLM(config)
    if kind in ("actor", "kl"):
        policy = TokenPolicy(LanguageModel(network), temperature=0.8, entropy_gradient=True)
        policy.reference_head = torch.randn(31, REFERENCE_WIDTH) if kind == "kl" else None
        return policy
    return TokenValues(LanguageModel(network, value_head=True))


def engine(kind: str, optim: Optim = OPTIM, **options: Any) -> FSDPEngine:
    return FSDPEngine(model(kind), optim, dtype=torch.float32, horizon=32, device=torch.device("cpu"), **options)


def loss(kind: str) -> Any:
    functions = {"actor": actor_loss, "kl": actor_loss, "critic": critic_loss, "embodied": actor_critic_loss}
    return partial(functions[kind], algorithm=KL if kind == "kl" else ALGORITHM)


def batch(kind: str, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> RolloutBatch:
    """Random numbers in every field; the second row does not count."""
    numbers = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    shape = (rows, 1 if kind == "embodied" else max(lengths))
    mask = torch.ones(shape, dtype=torch.bool)
    inputs = {
        "observations": torch.randn(*shape, 5, generator=numbers),
        "actions": torch.randn(*shape, 3, generator=numbers),
    }
    if kind != "embodied":
        positions = torch.arange(shape[1])
        mask = (positions >= 2) & (positions < torch.tensor(lengths)[:, None])
        inputs = {"tokens": torch.randint(31, shape, generator=numbers), "lengths": torch.tensor(lengths)}
    sample_mask = torch.ones(rows, dtype=torch.bool)
    sample_mask[1:2] = False

    def noise() -> Tensor:
        return torch.randn(shape, generator=numbers)

    return RolloutBatch(
        inputs=inputs,
        action_mask=mask,
        sample_mask=sample_mask,
        group_ids=torch.arange(rows),
        rewards=noise(),
        rollout_log_probs=noise(),
        log_probs=noise() - 3,
        values=noise(),
        advantages=noise(),
        returns=noise(),
        reference_states=torch.randn(*shape, REFERENCE_WIDTH, generator=numbers) if kind == "kl" else None,
    )


def outputs(trained: FSDPEngine, kind: str) -> dict[str, Tensor]:
    model_outputs = trained.evaluate(batch(kind), MicroBatches(rows=2))
    return {name: tensor for name, tensor in vars(model_outputs).items() if tensor is not None}


def steps(
    trained: FSDPEngine, kind: str, first: int, last: int, plans: tuple[MicroBatches, ...] = PLANS
) -> list[dict[str, float] | None]:
    """Optimizer steps, each with other data and other micro-batches; their metrics."""
    finalized = []
    for step in range(first, last):
        metrics = trained.step(batch(kind, step), loss(kind), plans[step % len(plans)])
        finalized.append(None if metrics is None else metrics.finalize())
    return finalized


def parameters(trained: FSDPEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trained.weights().items()}


def run(folder: Path) -> dict[str, Any]:
    """Everything the tests compare, by kind of model."""
    results: dict[str, Any] = {"in order": in_order()}
    for kind in KINDS:
        trained = engine(kind)
        report: dict[str, Any] = {"start": outputs(trained, kind)}
        report["metrics"] = steps(trained, kind, 0, 3)
        report["parameters"] = parameters(trained)
        report["outputs"] = outputs(trained, kind)
        write(trained.sharded_state(), folder / f"{kind}-{trained.world_size}")
        report["few rows"] = trained.step(batch(kind, 3, (6, 4, 5)), loss(kind), MicroBatches(rows=1)).finalize()
        report["one row"] = trained.step(batch(kind, 4, (6,)), loss(kind), MicroBatches()).finalize()
        report["continued"] = parameters(trained)
        results[kind] = report
    return results


def in_order() -> dict[str, Any]:
    """A step whose rows are not balanced over the ranks."""
    trained = engine("actor", balance=False)
    metrics = steps(trained, "actor", 0, 1)
    return {"metrics": metrics[0], "parameters": parameters(trained)}


def resumed(folder: Path, world_size: int) -> dict[str, Any]:
    """Go on from what `world_size` ranks have saved."""
    results = {}
    for kind in KINDS:
        trained = engine(kind)
        outputs(trained, kind)
        read(trained.sharded_state(), folder / f"{kind}-{world_size}")
        evaluated = outputs(trained, kind)
        trained.step(batch(kind, 3, (6, 4, 5)), loss(kind), MicroBatches(rows=1))
        trained.step(batch(kind, 4, (6,)), loss(kind), MicroBatches())
        results[kind] = {"outputs": evaluated, "continued": parameters(trained)}
    return results


def bytes_of_ranks(folder: Path) -> list[int]:
    """How much of the tensors in a state each rank has written."""
    metadata = _Reader(folder).read_metadata()
    sizes: dict[str, int] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        for chunk in tensor.chunks:
            file = metadata.storage_data[MetadataIndex(name, chunk.offsets)].relative_path
            sizes[file] = sizes.get(file, 0) + math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
    return [sizes[file] for file in sorted(sizes)]


def poisoned(kind: str) -> dict[str, Any]:
    """A step that is not finite in one row, so on one rank: what it changed, and that training goes on after it.

    Sequences stand alone in their micro-batches here, unlike in `run`.
    """
    trained = engine(kind)
    metrics = steps(trained, kind, 0, 2, UNPACKED)
    before = tensors(trained)
    spoiled = batch(kind, 5)
    spoiled.advantages[3] = spoiled.returns[3] = float("nan")
    answer = trained.step(spoiled, loss(kind), MicroBatches(rows=2))
    after = tensors(trained)
    return {
        "metrics": metrics,
        "answer": answer,
        "unchanged": len(before) == len(after) and all(torch.equal(*pair) for pair in zip(before, after, strict=True)),
        "next": steps(trained, kind, 2, 3, UNPACKED)[0],
        "parameters": parameters(trained),
    }


def tensors(trained: FSDPEngine) -> list[Tensor]:
    """This rank's own part of parameters and Adam state, copied."""
    states = [value for state in trained.optimizer.state.values() for value in state.values()]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in [*trained.parameters, *states]]
    return [tensor.detach().clone() for tensor in local]


def recomputed() -> dict[str, Any]:
    """Three updates of an actor whose layers are computed again in the backward."""
    trained = engine("actor", gradient_checkpointing=True)
    return {"metrics": steps(trained, "actor", 0, 3), "parameters": parameters(trained)}


def offloaded() -> dict[str, Any]:
    """Three updates of an actor that leaves its device after every one: what it held then, and what it learned."""
    trained = OffloadingEngine(engine("actor"), torch.device("cpu"))
    metrics, held = [], []
    for step in range(3):
        metrics += steps(trained, "actor", step, step + 1)
        trained.offload(weights=True)
        here = storages([tensor for part in trained.offloadable() for tensor in part], torch.device("cpu"))
        held.append(sum(storage.nbytes() for storage in here.values()))
    return {"metrics": metrics, "held": held, "outputs": outputs(trained, "actor"), "parameters": parameters(trained)}


def preload() -> None:
    """What all ranks import, before they are forked."""
    import torch.distributed.fsdp  # noqa: F401

    for kind in KINDS:
        model(kind)


def main(rank: int, folder: Path) -> None:
    results: dict[str, Any] = {
        "run": run(folder),
        "resumed": resumed(folder, 1),
        "poisoned": {kind: poisoned(kind) for kind in KINDS},
    }
    results["recomputed"] = recomputed()
    results["offloaded"] = offloaded()
    torch.save(results, folder / f"rank{rank}.pt")
