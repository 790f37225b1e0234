"""Training runs of the Megatron backend in several layouts, to be compared to plain torch. No test by itself.

`main(rank, folder, *layouts)` is one of several gloo processes. It goes on from the states that plain torch has saved
in the folder, and saves its own there. The layout "fused" has the layers of Megatron's specification for Transformer
Engine, with the stand-in of `fused_stand_in`.
"""

from __future__ import annotations

import copy
import json
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from script_modules import module_of
from torch import Tensor, nn

from rl_platform.algorithms.action_levels import denominators_of
from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.metrics import Metrics, Sums
from rl_platform.config.schema.models import Lora, Model, Optim, Parallel
from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.models.adapters.lora import add_adapters
from rl_platform.models.causal_lm import export_causal_lm, load_causal_lm
from rl_platform.models.forward import TokenPolicy, TokenValues
from rl_platform.models.language import LanguageModel
from rl_platform.models.pretrained.model_folder import PACKAGED, model_folder
from rl_platform.models.tokenizer import load_tokenizer
from rl_platform.records import RolloutBatch

ranks = module_of(Path(__file__).with_name("ranks.py"))
LAYOUTS = {
    "one": Parallel(),
    "tp2": Parallel(tensor=2),
    "tp2 sp": Parallel(tensor=2, sequence=True),
    "fused": Parallel(tensor=2, sequence=True),
    "pp2": Parallel(pipeline=2),
    "dp2": Parallel(),
    "tp2 pp2": Parallel(tensor=2, pipeline=2, sequence=True),
    "tp2 dp2": Parallel(tensor=2),
    "pp2 dp2": Parallel(pipeline=2),
    "pp2 vp2": Parallel(pipeline=2, virtual_pipeline=2),
    "ep2": Parallel(expert=2),
    "tp2 ep2": Parallel(tensor=2, sequence=True, expert=2),
    "pp2 vp2 ep2": Parallel(pipeline=2, virtual_pipeline=2, expert=2),
    "cp2": Parallel(context=2),
    "tp2 cp2": Parallel(tensor=2, sequence=True, context=2),
    "pp2 cp2": Parallel(pipeline=2, context=2),
    "cp2 dp2 ep2": Parallel(context=2, expert=2),
    "real tp3": Parallel(tensor=3, sequence=True),  # the model has 9 heads
}
CPU: dict[str, Any] = {"horizon": 32, "device": torch.device("cpu")}
LLAMA = {"actor": "actor", "critic": "critic"}
DEEP = {"deep actor": "actor", "deep critic": "critic"}  # of four layers, for two stages of two parts
EXPERTS = {"experts": "actor", "experts critic": "critic"}  # Qwen3-MoE
MIXTURES = {"shared experts": "actor", "mixtral": "actor", "latent": "actor", "latent critic": "critic"}
DEEP_MIXTURES = {"deep latent": "actor"}
FAMILIES = {  # transformers' names, and what these models have beside the sizes in `model`
    "experts": ("qwen3_moe", {"num_experts": 4, "norm_topk_prob": True}),
    "experts critic": ("qwen3_moe", {"num_experts": 4, "norm_topk_prob": False}),
    "shared experts": (
        "qwen2_moe",
        {"num_experts": 4, "norm_topk_prob": False, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0]},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "latent": (  # as Moonlight and DeepSeek-V3
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.4,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
        },
    ),
    "latent critic": (  # as DeepSeek-V2-Lite
        "deepseek_v2",
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "q_lora_rank": None,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.5,
                "mscale_all_dim": 0.707,
            },
        },
    ),
}
DENSE = {**LLAMA, "qwen2": "actor", "qwen3": "actor", "kl": "kl"}
WINDOWS = {"mistral": "actor"}
BALANCED = {"balanced": "actor"}  # with a load-balancing loss
BALANCE = 0.3
REPLAYED = {"replayed": "replay", "latent replayed": "replay"}  # with the routes of another pass
LORA = {"actor lora": "actor", "qwen3 lora": "actor", "latent lora": "actor", "critic lora": "critic"}
ADAPTERS = {  # of the kinds in LORA
    # two parts of a fused layer
    "actor lora": Lora(rank=3, alpha=20.0, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]),
    "qwen3 lora": Lora(rank=2, alpha=6.0),
    "latent lora": Lora(
        rank=2, alpha=4.0, target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "up_proj"]
    ),
    "critic lora": Lora(rank=3, alpha=5.0),
}
KINDS = {
    **DENSE,
    **DEEP,
    **EXPERTS,
    **MIXTURES,
    **DEEP_MIXTURES,
    **BALANCED,
    **REPLAYED,
    **WINDOWS,
    **LORA,
}  # what is trained -> the kind of batch and loss in `ranks`
TEXTS = (
    "The capital of France is Paris, and that of Italy is Rome. Two and two are",
    "Once upon a time there was a robot that",
)
KINDS_OF = {  # in the other layouts: LLAMA
    "one": [*KINDS],
    "tp2 sp": ["actor", "qwen3", "kl", "shared experts", "latent critic", "qwen3 lora"],
    "pp2": [*LLAMA, "actor lora", "balanced"],  # a latent model: in "pp2 vp2 ep2"
    "tp2": [*LLAMA, "actor lora"],
    "tp2 dp2": ["actor"],
    "dp2": [*LLAMA, "experts", "critic lora"],
    "tp2 pp2": ["actor"],
    "pp2 dp2": ["actor"],
    "pp2 cp2": ["actor"],
    "pp2 vp2": [*DEEP],
    "ep2": ["experts", "mixtral", "balanced"],
    "tp2 ep2": ["experts", "latent lora"],
    "pp2 vp2 ep2": [*DEEP_MIXTURES],
    "cp2": [*LLAMA, "kl", "actor lora", "latent"],
    "tp2 cp2": ["balanced"],
    "cp2 dp2 ep2": ["experts"],
    "fused": ["critic", "qwen2", "qwen3", "experts", "shared experts", "qwen3 lora"],
}
SPLIT = {kind for layout, kinds in KINDS_OF.items() if layout not in ("one", "fused") for kind in kinds} - {*LLAMA}
# A step that is not finite: layouts of one dimension are left out, as those of two dimensions contain them.
POISONED = {
    "one": ["actor", "critic", "deep actor", "experts"],
    "tp2 ep2": ["experts"],
    "tp2 pp2": ["actor"],
    "tp2 dp2": ["actor"],
    "pp2 dp2": ["actor"],
    "pp2 vp2 ep2": [*DEEP_MIXTURES],
    "tp2 cp2": ["balanced"],
    "pp2 cp2": ["actor"],
    "cp2 dp2 ep2": ["experts"],
}


def model(kind: str) -> nn.Module:
    """Returns a copy: ranks need not build what is built before they are forked."""
    torch.manual_seed(7)
    return copy.deepcopy(built(kind))


@cache
def built(kind: str) -> nn.Module:
    """Like `ranks.model`; qwen2 has biases, qwen3 norms in its attention, all an output matrix of their own."""
    layers = 4 if kind.startswith("deep ") else 2
    if kind in BALANCED:
        return model("shared experts")
    if kind in REPLAYED:
        mixture: Any = model({"replayed": "shared experts", "latent replayed": "latent"}[kind])
        return TokenPolicy(mixture.model, temperature=0.8, entropy_gradient=True, router_replay=True)
    if kind in ADAPTERS:
        adapted: Any = model(kind.removesuffix(" lora"))
        add_adapters(adapted.model.backbone, ADAPTERS[kind], 3, "actor.lora")
        adapted.model.head.requires_grad_(KINDS[kind] == "critic")
        return adapted
    if kind in LLAMA or kind in DEEP or kind == "kl":
        return ranks.model(KINDS[kind], layers)
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    name = kind.removeprefix("deep ")
    family, options = FAMILIES.get(name, (name, {}))
    if name in FAMILIES:
        sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 12, **options}
    if family.startswith("qwen3"):
        sizes["head_dim"] = 8
    if family == "mistral":
        sizes["sliding_window"] = 5  # tokens; sequences have up to 30
    network: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    with torch.no_grad():  # biases start at 0 and norms at 1, which would hide a wrong share
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
        for buffer in corrections(network):
            buffer.copy_(0.2 * torch.randn(buffer.shape))
    if KINDS[kind] == "critic":
        return TokenValues(LanguageModel(network, value_head=True))
    return TokenPolicy(LanguageModel(network), temperature=0.8, entropy_gradient=True)


def corrections(network: nn.Module) -> list[Tensor]:
    """Returns the buffers that change which experts a token goes to."""
    return [tensor for name, tensor in network.named_buffers() if name.endswith("correction_bias")]


class BalancedEngine(FSDPEngine):
    """Adds the load-balancing loss as one would write it: sequences alone, each with its routers' logits."""

    def step(self, mini_batch: RolloutBatch, loss: Any, micro_batches: MicroBatches) -> Any:
        logits: list[Tensor] = []
        routers = [module for name, module in self.model.named_modules() if name.endswith("mlp.gate")]
        hooks = [router.register_forward_hook(lambda *call: logits.append(call[2][0])) for router in routers]
        sequences, total = int(mini_batch.sample_mask.sum()), 0.0

        def balanced(outputs: ModelOutputs, part: RolloutBatch, denominators: Any) -> Any:
            nonlocal total
            part_loss, metrics = loss(outputs, part, denominators)
            for one in logits if bool(part.sample_mask[0]) else ():
                probabilities = one.softmax(-1)
                chosen = torch.zeros_like(one).scatter(1, probabilities.topk(2).indices, 1.0)
                balance = one.shape[1] * (chosen.mean(0) / 2 * probabilities.mean(0)).sum() / sequences
                part_loss, total = part_loss + BALANCE * balance, total + float(balance) / len(routers)
            logits.clear()
            return part_loss, metrics

        metrics = super().step(mini_batch, balanced, MicroBatches(rows=1))
        for hook in hooks:
            hook.remove()
        return metrics.merge(Metrics(means={("router_aux_loss",): Sums(torch.tensor([total]), 1.0)}))


def plain(kind: str, **options: Any) -> FSDPEngine:
    if kind in BALANCED:
        return BalancedEngine(model(kind), ranks.OPTIM, dtype=torch.float32, **CPU, **options)
    return FSDPEngine(model(kind), ranks.OPTIM, dtype=torch.float32, **CPU, **options)


def megatron(
    kind: str, layout: str = "one", optim: Optim = ranks.OPTIM, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    network = model(kind)
    assert isinstance(network, TokenPolicy | TokenValues)
    options |= {"router_aux_loss_coef": BALANCE} if kind in BALANCED else {}
    return engine_of(network, layout, optim, dtype, **options)


def engine_of(
    network: TokenPolicy | TokenValues,
    layout: str = "one",
    optim: Optim = ranks.OPTIM,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    from rl_platform.engines.training.megatron.engine import MegatronEngine

    return MegatronEngine(network, optim, dtype=dtype, parallel=LAYOUTS[layout], **CPU, **options)


@cache
def real_model() -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    """SmolLM2-135M, its tokenizer, the tokens of `TEXTS`, and their logits by transformers in float64."""
    config = Model(path=PACKAGED)
    network: Any = load_causal_lm(config, 0, 0, 0)
    tokenizer = load_tokenizer(config)
    texts = [torch.tensor(tokenizer.encode(text)) for text in TEXTS]
    with torch.no_grad():
        whole = [network.double()(text[None]).logits[0] for text in texts]
    return network.float(), tokenizer, texts, whole  # the same weights again


def real(layout: str) -> dict[str, Any]:
    """Compares SmolLM2-135M in a layout without stages with transformers in float64.

    Returns the largest difference of log-probs, and of logits at the first token of a text and after it. On the first
    rank also the tensors of an exported folder that differ from those of the folder that was read.

    States of a first token are hundreds of times as large as others, and rounded as much more coarsely. Of some sixty
    first tokens, logits of transformers in float32 are up to 1.4e-4 (on average 5.4e-5) from those in float64; with its
    row-parallel matrices cut in three, as tensor ranks do, up to 1.55e-4 (6.1e-5), and no less if the three parts are
    added in float64, or norms or any one kind of matrix computed in it. Only float64 in all matrices helps (5.4e-5).
    """
    network, tokenizer, texts, whole = real_model()
    lengths = tuple(len(text) for text in texts)
    batch = ranks.batch("actor", 0, lengths)
    tokens = batch.inputs["tokens"] = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    batch.sample_mask[:] = True
    engine = engine_of(TokenPolicy(LanguageModel(network), 1.0), layout)
    log_probs = engine.evaluate(batch, MicroBatches()).log_probs
    errors = []
    for row, logits in enumerate(whole):
        following = tokens[row, 1 : len(logits)]
        expected = logits[:-1].log_softmax(-1).gather(1, following[:, None]).squeeze(1)
        errors.append(float((log_probs[row, 2 : len(logits)] - expected[1:]).abs().max()))
    per_token = (logits_of(engine, batch) - torch.cat(whole)).abs().amax(dim=1).split(lengths)
    report: dict[str, Any] = {"log_probs": max(errors)}
    report["first logits"] = max(float(differences[0]) for differences in per_token)
    report["logits"] = max(float(differences[1:].max()) for differences in per_token)
    weights = {name.removeprefix("model."): tensor for name, tensor in engine.weights().items()}
    if engine.rank == 0:
        with TemporaryDirectory() as folder:
            export_causal_lm(weights, engine.model.model.config, tokenizer, Path(folder))
            ours, theirs = (load_file(Path(name) / "model.safetensors") for name in (folder, model_folder(PACKAGED)))
        assert ours.keys() == theirs.keys()
        report["changed"] = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    return report


@torch.no_grad()
def logits_of(engine: Any, batch: RolloutBatch) -> Tensor:
    """Returns all logits [N,vocabulary] of the batch's tokens, sequence after sequence.

    The engine itself never makes them: these are its last hidden states times its own rows of the output matrix.
    """
    logits: list[Tensor] = []

    def keep(rows: list[int], part: RolloutBatch, packed: Any, hidden: Tensor, **_: Any) -> None:
        weight = engine.last.shared_embedding_or_output_weight()
        shares = engine.tensor.gather(engine._gathered(hidden)[:, 0] @ weight.T)
        length = len(packed.tokens) - packed.padding
        logits.append(torch.cat(shares, dim=-1)[:length, : engine.model.model.config.vocab_size])

    engine._run(engine._parts(batch, MicroBatches()), keep, forward_only=True)
    return logits[0]


def padded(kind: str) -> dict[str, Any]:
    """Three updates as one would write them: transformers on padded rows, a loss, clipping, AdamW. No engine."""
    batches, options = KINDS[kind], ranks.OPTIM
    network: Any = model(kind)
    network.model.backbone.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(
        network.parameters(), options.lr, options.betas, options.eps, options.weight_decay, fused=True
    )
    reports = []
    for step in range(3):
        rows = ranks.batch(batches, step)
        outputs = padded_outputs(network, rows)
        loss, metrics = ranks.loss(batches)(outputs, rows, denominators_of(rows, CPU["horizon"], nominal=False))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(network.parameters(), options.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        reports.append(metrics.finalize() | {"grad_norm": float(norm)})
    return {"metrics": reports, "parameters": {name: tensor.detach() for name, tensor in network.state_dict().items()}}


def padded_outputs(network: Any, rows: RolloutBatch) -> ModelOutputs:
    """[B,T] of transformers' own attention; padding stands right of the tokens and is masked."""
    tokens, mask = rows.inputs["tokens"], rows.action_mask
    present = (torch.arange(tokens.shape[1]) < rows.inputs["lengths"][:, None]).long()
    states = network.model.backbone(input_ids=tokens, attention_mask=present, use_cache=False).last_hidden_state
    scores = network.model.head(states).roll(1, dims=1)  # what predicts each position stands before it
    if isinstance(network, TokenValues):
        return ModelOutputs(values=torch.where(mask, scores.squeeze(-1), 0.0))
    distribution = (scores / network.temperature).log_softmax(-1)
    log_probs = distribution.gather(-1, tokens[..., None]).squeeze(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return ModelOutputs(torch.where(mask, log_probs, 0.0), torch.where(mask, entropy, 0.0))


def report(kind: str, layout: str, folder: Path) -> dict[str, Any]:
    """Everything the tests compare of one model in one layout."""
    batches = KINDS[kind]
    kernels = "transformer_engine" if layout == "fused" else "torch"
    engine = megatron(kind, layout, gradient_checkpointing=layout == "tp2 pp2", kernels=kernels)
    results = ranks.run(engine, batches, folder / f"{layout}-{kind}")
    if layout == "fused":
        return results | {"names": [name for name, _ in engine.stages[0].named_parameters()]}
    results["held"] = held(engine, batches)
    if layout != "one" or kind not in SPLIT:  # models of SPLIT resume in their other layouts
        results["resumed"] = ranks.resumed(engine, batches, folder / f"torch-{kind}")
    if kind in POISONED.get(layout, ()):
        results["poisoned"] = ranks.poisoned(megatron(kind, layout), batches)
    if layout in ("dp2", "tp2 dp2") and kind in LLAMA:
        results["half"] = half_precision(kind, layout)
    return results


def half_precision(kind: str, layout: str) -> dict[str, float]:
    """Of a bfloat16 engine: by parameter, how far this rank's float32 masters are from what the engine started from;
    and the gradient norm of an optimizer step."""
    engine, whole = megatron(kind, layout, dtype=torch.bfloat16), model(kind).state_dict()
    errors = {}
    for key, tensor in engine.sharded_state().items():
        name = key.removeprefix("model.")
        for offsets, part in tensor.parts if key.startswith("model.") else ():
            if part.dtype == torch.float32 and part.numel():
                place = tuple(slice(first, first + size) for first, size in zip(offsets, part.shape, strict=True))
                errors[name] = float((part - whole[name][place]).abs().max())
    (metrics,) = ranks.steps(engine, KINDS[kind], 0, 1)
    return errors | {"grad_norm": metrics["grad_norm"]}


def held(engine: Any, batches: str) -> dict[str, int]:
    """What this rank holds of the model, and how many of 7 packed tokens its first norm sees."""
    seen = []
    layers = [layer for stage in engine.stages for layer in stage.decoder.layers]
    hook = layers[0].input_layernorm.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    engine.evaluate(ranks.batch(batches, 0, (7,)), MicroBatches())
    hook.remove()
    states = [state for part in engine.optimizer.chained_optimizers for state in part.optimizer.state.values()]
    moments = [state["exp_avg"].numel() for state in states]
    parameters = [parameter.numel() for stage in engine.stages for parameter in stage.parameters()]
    return {"layers": len(layers), "tokens": seen[0], "moments": sum(moments), "parameters": sum(parameters)}


def import_for(*layouts: str) -> None:
    """What ranks of these layouts import, before they are forked, and the models that they copy."""
    import rl_platform.engines.training.megatron.engine  # noqa: F401

    for layout in layouts:
        if layout.startswith("real"):
            real_model()
            continue
        for kind in KINDS_OF.get(layout, LLAMA):
            model(kind)


def preload() -> None:
    import_for(*(layout for job in sys.argv[2:] for layout in json.loads(job)[2]))


def main(rank: int, folder: Path, *layouts: str) -> None:
    from megatron.core import parallel_state

    for layout in layouts:
        if layout.startswith("real"):
            torch.save(real(layout), folder / f"{layout}-rank{rank}.pt")
            parallel_state.destroy_model_parallel()
            continue
        reports = {kind: report(kind, layout, folder) for kind in KINDS_OF.get(layout, LLAMA)}
        torch.save(reports, folder / f"{layout}-rank{rank}.pt")
        parallel_state.destroy_model_parallel()
