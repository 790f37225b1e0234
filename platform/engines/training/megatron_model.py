"""This rank's part of a language model in Megatron-Core: a pipeline stage whose tensors are shared by tensor ranks.

Built from a transformers model of the Llama family, with Megatron's local layer specification, which needs neither
Transformer Engine nor a GPU. Not covered: mixtures of experts, context parallelism, fused kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_platform.config.components import Optim, Parallel
from rl_platform.engines.training.megatron_layers import PackedCoreAttention, PackedRotary, RMSNorm
from rl_platform.engines.training.megatron_weights import head_size, padded


def build_stage(
    config: Any,
    frequencies: Tensor,
    parallel: Parallel,
    dtype: torch.dtype,
    device: torch.device,
    *,
    value_head: bool,
    gradient_checkpointing: bool,
) -> Any:
    """A GPTModel [N tokens] -> hidden states [N,1,H] with arbitrary weights; Megatron's parallel state must be there.

    `config`, `frequencies`: the transformers config and its rotary frequencies [D/2]. The first stage reads tokens; the
    last has an `output_layer`, the rows of the output matrix or a float32 scalar head, for the caller to apply.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    settings = _settings(config, parallel, dtype, gradient_checkpointing)
    stage: Any = GPTModel(
        settings,
        _specification(settings),
        vocab_size=padded(config.vocab_size, parallel.tensor),
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.tie_word_embeddings and not value_head,
    )
    if value_head and stage.post_process:
        stage.output_layer = nn.Linear(config.hidden_size, 1, dtype=torch.float32, device=device)
    stage.rotary_pos_emb = PackedRotary(frequencies.to(device))
    stage._postprocess = _hidden_states
    return stage.to(device)


def _hidden_states(hidden_states: Tensor, **_: Any) -> Tensor:
    """Instead of logits, of which Megatron would make all at once."""
    return hidden_states


def _settings(config: Any, parallel: Parallel, dtype: torch.dtype, gradient_checkpointing: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.model_type == "qwen3",
        add_qkv_bias=config.model_type == "qwen2",
        add_bias_linear=False,
        normalization="RMSNorm",
        activation_func=nn.functional.silu,
        gated_linear_unit=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        sequence_parallel=parallel.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=parallel.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # Megatron asks for it with variable lengths, also without experts
        # Without its own initialisation Megatron would not mark which parameters are shared, and count them twice in
        # the gradient norm: let it initialise, with functions that leave the memory as it is.
        perform_initialization=True,
        init_method=_as_it_is,
        output_layer_init_method=_as_it_is,
        embedding_init_method=_as_it_is,
        calculate_per_token_loss=True,  # gradients are sums: the losses are divided by the denominators of the whole
        recompute_granularity="full" if gradient_checkpointing else None,
        recompute_method="uniform" if gradient_checkpointing else None,
        recompute_num_layers=1 if gradient_checkpointing else None,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _specification(settings: Any) -> Any:
    """Megatron's local layers of this pipeline stage with our norm and attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization="RMSNorm")
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedCoreAttention
        if settings.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block


def with_optimizer(stage: Any, optim: Optim, dtype: torch.dtype, *, distributed: bool) -> tuple[Any, Any]:
    """The stage in Megatron's data parallelism, and its optimizer. `distributed`: data-parallel ranks share its state.

    It is torch's AdamW, also where Transformer Engine or Apex bring their own: one form of state on every machine.
    """
    import megatron.core.optimizer as megatron_optimizer
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    stage.config.finalize_model_grads_func = finalize_model_grads
    chunk = DistributedDataParallel(
        stage.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed),
        stage,
    )
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
    overrides: dict[Any, Any] = {}  # Megatron's own would spare vectors the weight decay
    chained = megatron_optimizer.get_megatron_optimizer(config, [chunk], overrides, use_gloo_process_groups=False)
    (optimizer,) = chained.chained_optimizers
    for group in optimizer.param_groups:
        group["fused"] = True  # as the engine of plain torch does
    return chunk, optimizer
