"""Builds this rank's part of a language model in Megatron-Core: a pipeline stage split over tensor-parallel ranks.

The model is a transformers model of the Llama family. Its layers are Megatron's local ones, which need neither
Transformer Engine nor a GPU, or Transformer Engine's linear layers and norms. Both use the packed attention of
`local_layers`. Not covered: context parallelism, fp8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_platform.config.schema.models import Optim, Parallel
from rl_platform.engines.training.megatron.local_layers import PackedCoreAttention, PackedRotary, RMSNorm
from rl_platform.engines.training.megatron.mixture import Mixture
from rl_platform.engines.training.megatron.supported import is_latent
from rl_platform.engines.training.megatron.weight_map import head_size, padded
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.attention import window_of

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import PretrainedConfig, PreTrainedModel


def build_stage(
    backbone: PreTrainedModel,
    parallel: Parallel,
    dtype: torch.dtype,
    device: torch.device,
    *,
    chunk: int,
    value_head: bool,
    gradient_checkpointing: bool,
    fused: bool,
) -> GPTModel:
    """Returns a GPTModel, [N] tokens -> hidden states [N,1,H], with undefined weights.

    Megatron's parallel state must be initialised. `backbone`: the transformers model. `chunk`: the index of the part
    among this rank's `parallel.virtual_pipeline` parts. The first part of the pipeline reads tokens. The last one has
    an `output_layer` for the caller to apply: this rank's rows of the output matrix or a float32 scalar head. `fused`:
    use Transformer Engine's layers.

    Raises ConfigError if `fused` and Transformer Engine cannot be imported.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    config = backbone.config
    settings = _settings(config, parallel, dtype, gradient_checkpointing)
    place = chunk if parallel.virtual_pipeline > 1 else None
    stage: Any = GPTModel(
        settings,
        _specification(settings, backbone, place, fused=fused),
        vocab_size=padded(config.vocab_size, parallel.tensor),
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage() and chunk == 0,
        post_process=parallel_state.is_pipeline_last_stage() and chunk == parallel.virtual_pipeline - 1,
        share_embeddings_and_output_weights=config.tie_word_embeddings and not value_head,
        vp_stage=place,
    )
    if value_head and stage.post_process:
        stage.output_layer = nn.Linear(config.hidden_size, 1, dtype=torch.float32, device=device)
    stage.rotary_pos_emb = PackedRotary(backbone.rotary_emb.inv_freq)
    stage._postprocess = _hidden_states
    return stage.to(device)


def _hidden_states(hidden_states: Tensor, **_: object) -> Tensor:
    """Returns hidden states in place of logits, which Megatron would compute for all tokens at once."""
    return hidden_states


def _settings(
    config: PretrainedConfig, parallel: Parallel, dtype: torch.dtype, gradient_checkpointing: bool
) -> TransformerConfig:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    interleaved, mixture, latent = parallel.virtual_pipeline > 1, Mixture.of(config), is_latent(config)
    kind = MLATransformerConfig if latent else TransformerConfig
    return kind(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=latent or config.model_type in ("qwen3", "qwen3_moe"),
        add_qkv_bias=config.model_type == "qwen2" or getattr(config, "qkv_bias", False),
        add_bias_linear=False,
        normalization="RMSNorm",
        activation_func=nn.functional.silu,
        gated_linear_unit=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        # one message at a time per direction: of two stages each is both next and previous of the other
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        sequence_parallel=parallel.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=parallel.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # variable lengths require it, also without experts
        # Megatron marks shared parameters during initialisation and would count unmarked ones twice in the gradient
        # norm. So it initialises, with functions that leave the memory unchanged.
        perform_initialization=True,
        init_method=_unchanged,
        output_layer_init_method=_unchanged,
        embedding_init_method=_unchanged,
        calculate_per_token_loss=True,  # gradients are sums; the losses have the denominators of the mini-batch
        recompute_granularity="full" if gradient_checkpointing else None,
        recompute_method="uniform" if gradient_checkpointing else None,
        recompute_num_layers=1 if gradient_checkpointing else None,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **({} if mixture is None else _experts(mixture, parallel)),
        **(_latent(config) if latent else {}),
    )


def _experts(mixture: Mixture, parallel: Parallel) -> dict[str, object]:
    return {
        "num_moe_experts": mixture.experts,
        "moe_layer_freq": [int(present) for present in mixture.layers],
        "moe_ffn_hidden_size": mixture.width,
        "moe_shared_expert_intermediate_size": mixture.shared_width,
        "moe_shared_expert_gate": mixture.shared_gate,
        "moe_router_topk": mixture.active,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
    }


def _latent(config: PretrainedConfig) -> dict[str, object]:
    return {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
    }


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _specification(settings: TransformerConfig, backbone: PreTrainedModel, chunk: int | None, *, fused: bool) -> object:
    """Returns Megatron's layers of this part of the pipeline, with packed attention and, unless fused, `RMSNorm`.

    Raises ConfigError if `fused` and Megatron could not import Transformer Engine.
    """
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_decoder_block_spec

    from rl_platform.engines.training.megatron.expert_layers import Experts, Router
    from rl_platform.engines.training.megatron.latent import LatentAttention, LatentNorm

    if fused and not HAVE_TE:
        message = (
            "Transformer Engine cannot be imported: python -c 'import transformer_engine.pytorch' shows the reason"
        )
        hint = "actor.kernels=torch critic.kernels=torch: Megatron's own layers"
        raise ConfigError([Problem("kernels", message, hint=hint)])
    block = get_gpt_decoder_block_spec(settings, use_transformer_engine=fused, normalization="RMSNorm", vp_stage=chunk)
    if not fused:
        block.layer_norm = RMSNorm
    latent, mixture = is_latent(backbone.config), Mixture.of(backbone.config)
    windows = [window_of(backbone.config, layer) for layer in range(settings.num_layers)]
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        # latent attention has no windows, and builds its core from a class only
        attention.submodules.core_attention = (
            PackedCoreAttention if latent else partial(PackedCoreAttention, windows=windows)
        )
        if not fused:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        if latent:
            attention.module = LatentAttention
            scaling = backbone.layers[0].self_attn.scaling
            attention.params = {**attention.params, "rotary": backbone.rotary_emb, "scaling": scaling}
            attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentNorm
        elif not fused and settings.qk_layernorm:
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
        parts = layer.submodules.mlp.submodules
        if hasattr(parts, "router"):
            parts.router, parts.experts = partial(Router, mixture), Experts
    return block


def with_optimizer(
    stages: Sequence[GPTModel], optim: Optim, dtype: torch.dtype, *, distributed: bool
) -> tuple[list[DistributedDataParallel], ChainedOptimizer]:
    """Wraps this rank's stages in Megatron's data parallelism; returns them and a chain of optimizers.

    Experts have an optimizer of their own. `distributed`: data-parallel ranks shard the optimizer state. The optimizer
    is torch's AdamW even if Transformer Engine or Apex are installed, so that the state has one form on every machine.
    """
    import megatron.core.optimizer as megatron_optimizer
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:  # neither Transformer Engine nor Apex is installed
        clip_grads.l2_norm_impl = _norm_on_device
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    chunks = [DistributedDataParallel(stage.config, settings, stage) for stage in stages]
    for stage in stages:
        stage.config.finalize_model_grads_func = finalize_model_grads
    config = megatron_optimizer.OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad or 0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    overrides: dict[object, object] = {}  # Megatron's default exempts vectors from weight decay
    optimizer = megatron_optimizer.get_megatron_optimizer(config, chunks, overrides, use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        group["fused"] = True  # as the engine of plain torch does
    return chunks, optimizer


def _norm_on_device(_chunk: int, _flag: Tensor, tensors: Sequence[Sequence[Tensor]], *_: object) -> tuple[Tensor, None]:
    """Returns the norm [1] of all tensors. Megatron's own function copies the norm of every tensor to the host."""
    norms = torch.stack([torch.norm(tensor) for tensor in tensors[0]])
    return torch.norm(norms[None]).reshape(1), None


def clipped_gradient_norm(optimizer: ChainedOptimizer, clip: float | None) -> float:
    """Returns the norm of all gradients of the model, on every rank, and scales them to a norm of at most `clip`."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    norm = float(optimizer.get_grad_norm())
    if clip is not None:
        for part in optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(part.get_parameters(), clip, norm)
    return norm
