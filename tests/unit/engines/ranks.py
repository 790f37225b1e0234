"""Training runs that one process and several gloo processes must finish with the same numbers. No test by itself.

`main(rank, folder)` is one of two FSDP ranks. It saves the states that it reaches into the folder, and goes on from the
states that one process has saved there. Tests and the scripts beside it use the runs for other engines too.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from rl_platform.algorithms.losses import actor_critic_loss, actor_loss, critic_loss
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.config.schema.models import Lora, Optim
from rl_platform.engines.offloading.offload import OffloadingEngine
from rl_platform.engines.offloading.swap import storages
from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.engines.training.state_files import _Reader, read, write
from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.models.adapters.lora import add_adapters, without_adapters
from rl_platform.models.attention import Features
from rl_platform.models.context.context_parallel import ContextParallel, UlyssesAttention
from rl_platform.models.forward import EmbodiedActorCritic, TokenPolicy, TokenValues
from rl_platform.models.language import LanguageModel
from rl_platform.models.packed import pack
from rl_platform.models.policy import ActorCriticPolicy, PolicyConfig
from rl_platform.records import RolloutBatch

KINDS = ("actor", "critic", "embodied")
LORA = Lora(rank=3, alpha=5.0, target_modules=["q_proj", "v_proj", "down_proj"])
BALANCED = {"router_aux_loss_coef": 0.3}
SINGLE = {
    **{kind: {} for kind in KINDS},
    "actor lora": {"lora": LORA},
    "critic lora": {"lora": LORA},
    "experts": BALANCED,
}
# what two ranks train; the first word is the kind
VARIANTS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in KINDS},
    "actor context": {"context": 2},
    "critic context": {"context": 2},
    "actor offload": {"cpu_offload": True},
    "critic lora": {"lora": LORA},
    "actor lora, context, layers twice": {"lora": LORA, "context": 2, "gradient_checkpointing": True},
    "experts": BALANCED,
    "experts context, layers twice": {**BALANCED, "context": 2, "gradient_checkpointing": True},
}
ALGORITHM = Algorithm(entropy_bonus=0.01, value_clip=0.5, loss_agg_func="seq-mean-token-mean", target_kl=1.0)
OPTIM = Optim(lr=1e-2, eps=1e-4, weight_decay=0.1, clip_grad=0.5)  # eps: noise of a vanishing gradient makes no step
LENGTHS = (5, 17, 9, 3, 30, 6, 4)  # odd, so that two ranks get unequally many rows
KL = ALGORITHM.model_copy(update={"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.3})
REFERENCE_WIDTH = 12  # another than the actor's
PLANS = (MicroBatches(), MicroBatches(rows=2), MicroBatches(tokens=36))
WHOLE = MicroBatches()
PARTLY_UNPACKED = (MicroBatches(rows=1), WHOLE, WHOLE)


def model(kind: str, layers: int = 2) -> nn.Module:
    """`kl`: an actor that is compared to a reference over the whole vocabulary."""
    torch.manual_seed(7)
    if kind == "embodied":
        return EmbodiedActorCritic(ActorCriticPolicy((5,), ActionSpace("continuous", 3), PolicyConfig((16, 16))))
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    family = "llama"
    if kind == "experts":
        family, mixture = "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        sizes |= {**mixture, "head_dim": 4}
    network: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    if kind in ("actor", "kl", "experts"):
        policy = TokenPolicy(LanguageModel(network), temperature=0.8, entropy_gradient=True)
        policy.reference_head = torch.randn(31, REFERENCE_WIDTH) if kind == "kl" else None
        return policy
    return TokenValues(LanguageModel(network, value_head=True))


def engine(kind: str, optim: Optim = OPTIM, lora: Lora | None = None, **options: Any) -> FSDPEngine:
    network = model(kind)
    if lora is not None:
        add_adapters(network.model.backbone, lora, 3, "actor.lora")
        network.model.head.requires_grad_(kind == "critic")
    options = {"dtype": torch.float32, "horizon": 32, "device": torch.device("cpu")} | options
    return FSDPEngine(network, optim, **options)


def loss(kind: str) -> Any:
    functions = {
        "actor": actor_loss,
        "kl": actor_loss,
        "experts": actor_loss,
        "replay": actor_loss,
        "critic": critic_loss,
        "embodied": actor_critic_loss,
    }
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
    if kind == "replay":  # equal for equal prefixes, and two of the first four experts in each of four layers
        first = inputs["tokens"] + positions
        inputs["routes"] = (first[:, :, None, None] + torch.arange(4)[:, None] + torch.arange(2)).remainder(4).short()
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


def outputs(trained: Any, kind: str, plan: MicroBatches = WHOLE) -> dict[str, Tensor]:
    model_outputs = trained.evaluate(batch(kind), plan)
    return {name: tensor for name, tensor in vars(model_outputs).items() if tensor is not None}


def steps(
    trained: Any, kind: str, first: int, last: int, plans: tuple[MicroBatches, ...] = PLANS
) -> list[dict[str, float] | None]:
    """Optimizer steps, each with other data and other micro-batches; their metrics."""
    finalized = []
    for step in range(first, last):
        metrics = trained.step(batch(kind, step), loss(kind), plans[step % len(plans)])
        finalized.append(None if metrics is None else metrics.finalize())
    return finalized


def parameters(trained: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trained.weights().items()}


def run(trained: Any, kind: str, folder: Path | None = None) -> dict[str, Any]:
    """Three updates and two odd ones. The state after three is written to `folder`."""
    adapted = any(".lora_" in name for name, _ in trained.model.named_parameters())
    with without_adapters(trained.model) if adapted else nullcontext():  # then it is the reference's forward
        report: dict[str, Any] = {"start": outputs(trained, kind)}
    report["begin"] = parameters(trained)
    report["metrics"] = steps(trained, kind, 0, 3)
    report["parameters"] = parameters(trained)
    report["gathered"] = {name: tensor.clone() for names, tensor in trained.gathered(torch.bfloat16) for name in names}
    report["outputs"] = outputs(trained, kind, MicroBatches(rows=2))
    if folder is not None:
        write(trained.sharded_state(), folder)
    report["odd"] = odd_steps(trained, kind)
    report["continued"] = parameters(trained)
    return report


def odd_steps(trained: Any, kind: str) -> list[dict[str, float]]:
    """Fewer rows than micro-batches for everyone, and a rank without any."""
    few = trained.step(batch(kind, 3, (6, 4, 5)), loss(kind), MicroBatches(rows=1))
    return [few.finalize(), trained.step(batch(kind, 4, (6,)), loss(kind), MicroBatches()).finalize()]


def resumed(trained: Any, kind: str, folder: Path) -> dict[str, Any]:
    """Loads a state over that of a further step, then trains on as `run` did."""
    steps(trained, kind, 5, 6, (WHOLE,))
    read(trained.sharded_state(), folder)
    evaluated = outputs(trained, kind)
    odd_steps(trained, kind)
    return {"outputs": evaluated, "continued": parameters(trained)}


def in_order() -> dict[str, Any]:
    """A step whose rows are not balanced over the ranks."""
    trained = engine("actor", balance=False)
    metrics = steps(trained, "actor", 0, 1)
    return {"metrics": metrics[0], "parameters": parameters(trained)}


def bytes_of_ranks(folder: Path) -> list[int]:
    """How much of the tensors in a state each rank has written."""
    metadata = _Reader(folder).read_metadata()
    sizes: dict[str, int] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        for chunk in tensor.chunks:
            file = metadata.storage_data[MetadataIndex(name, chunk.offsets)].relative_path
            sizes[file] = sizes.get(file, 0) + math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
    return [sizes[file] for file in sorted(sizes)]


def poisoned(trained: Any, kind: str) -> dict[str, Any]:
    """Three steps, and before the last one a step that is not finite in one row, so on one rank.

    In the first step sequences stand alone in their micro-batches, unlike in `run`.
    """
    metrics = steps(trained, kind, 0, 2, PARTLY_UNPACKED)
    before = tensors(trained)
    spoiled = batch(kind, 5)
    spoiled.advantages[3] = spoiled.returns[3] = float("nan")
    answer = trained.step(spoiled, loss(kind), MicroBatches(rows=2))
    after = tensors(trained)
    return {
        "answer": answer,
        "unchanged": len(before) == len(after) and all(torch.equal(*pair) for pair in zip(before, after, strict=True)),
        "metrics": metrics + steps(trained, kind, 2, 3, PARTLY_UNPACKED),
        "parameters": parameters(trained),
    }


def tensors(trained: Any) -> list[Tensor]:
    """This rank's parts of parameters and optimizer state, copied."""
    return [part.clone() for sharded in trained.sharded_state().values() for _, part in sharded.destinations]


def offloaded() -> dict[str, Any]:
    """Three updates of an actor that leaves its device after every one: what it held then, and what it learned."""
    trained = OffloadingEngine(engine("actor"), torch.device("cpu"))
    metrics, held = [], []
    for step in range(3):
        metrics += steps(trained, "actor", step, step + 1)
        trained.offload(weights=True)
        here = storages([tensor for part in trained.offloadable() for tensor in part], torch.device("cpu"))
        held.append(sum(storage.nbytes() for storage in here.values()))
    evaluated = outputs(trained, "actor", MicroBatches(rows=2))  # as in `run`: other rows may round otherwise
    return {"metrics": metrics, "held": held, "outputs": evaluated, "parameters": parameters(trained)}


def exchanged_attention(features: Features | None) -> dict[str, Tensor]:
    """Attention with one key head for four query heads, over 11 tokens that two ranks share; with its gradients."""
    packed = pack([torch.arange(7), torch.arange(4) + 2])
    numbers = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, heads, 11, 6, generator=numbers, requires_grad=True) for heads in (4, 1, 1)]
    expected = packed.attention(0, *whole, 0.4, features)
    weights = torch.randn(expected.shape, generator=numbers)
    (expected * weights).sum().backward()
    sinks = None if features is None or features.sinks is None else features.sinks
    context = ContextParallel(dist.group.WORLD)
    mine, heads = slice(6 * context.rank, 6 * context.rank + 6), slice(2 * context.rank, 2 * context.rank + 2)
    of_sinks = [] if sinks is None else [sinks.grad[heads].clone()]
    own = [F.pad(tensor.detach(), (0, 0, 0, 1))[:, :, mine].requires_grad_() for tensor in whole]
    if sinks is not None:
        sinks.grad = None
    output = UlyssesAttention(packed.attention, context, 11, 6)(0, *own, 0.4, features)
    (output * F.pad(weights, (0, 0, 0, 0, 0, 1))[mine]).sum().backward()
    gradients = [*(F.pad(tensor.grad, (0, 0, 0, 1))[:, :, mine] for tensor in whole), *of_sinks]
    actual = [*(tensor.grad for tensor in own), *([] if sinks is None else [sinks.grad[heads]])]
    return {
        "actual": torch.cat([output.flatten(), *(tensor.flatten() for tensor in actual)]),
        "expected": torch.cat([F.pad(expected, (0, 0, 0, 0, 0, 1))[mine].flatten(), *(g.flatten() for g in gradients)]),
    }


def preload() -> None:
    """What all ranks import, before they are forked."""
    import torch.distributed.fsdp  # noqa: F401

    engine("critic", lora=LORA)


def main(rank: int, folder: Path) -> None:
    results: dict[str, Any] = {"in order": in_order(), "offloaded": offloaded(), "attention": exchanged_attention(None)}
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.1], requires_grad=True)
    results["attention with features"] = exchanged_attention(Features(3, 1.5, sinks))
    for name, options in VARIANTS.items():
        kind = name.split(maxsplit=1)[0]
        report = run(engine(kind, **options), kind, folder / f"{name} 2")
        report["resumed"] = resumed(engine(kind, **options), kind, folder / f"{single(name)} 1")
        if name in KINDS or "context" in name:
            report["poisoned"] = poisoned(engine(kind, **options), kind)
        results[name] = report
    results["bfloat16"] = run(engine("actor", dtype=torch.bfloat16), "actor")
    torch.save(results, folder / f"rank{rank}.pt")


def single(variant: str) -> str:
    """What one process trains to the numbers of this variant."""
    kind = variant.split(maxsplit=1)[0]
    return f"{kind} lora" if "lora" in variant else kind
