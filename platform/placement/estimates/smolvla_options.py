"""Options of SmolVLA's network, from config.json of LeRobot's folder and of the vision-language model that it names."""

from __future__ import annotations

from rl_platform.placement.estimates.architectures import Options

SMOLVLM2 = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"  # the vision-language model of published weights
SMOLVLM2_OPTIONS: Options = {
    "model_type": "smolvlm",
    "scale_factor": 4,
    "image_token_id": 49_190,
    "pad_token_id": 2,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 49_280,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 2,
    },
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
}
_NAMES = {  # LeRobot's, and those of transformers' pi0 where there is a counterpart
    "chunk_size": "chunk_size",
    "max_state_dim": "max_state_dim",
    "max_action_dim": "max_action_dim",
    "num_steps": "num_inference_steps",
    "attention_mode": "attention_mode",
    "self_attn_every_n_layers": "self_attn_every_n_layers",
    "expert_width_multiplier": "expert_width_multiplier",
    "min_period": "min_period",
    "max_period": "max_period",
    "resize_imgs_with_padding": "image_size",
    "tokenizer_max_length": "tokenizer_max_length",
}


def smolvla_options(options: Options, vlm: Options) -> Options:
    """Returns the options of `SmolVLAConfig`. options: LeRobot's; vlm: config.json of its vision-language model, of
    which the first `num_vlm_layers` are used."""
    text, layers = dict(vlm["text_config"]), int(options.get("num_vlm_layers", 16))
    if layers > 0:
        text["num_hidden_layers"] = min(layers, text["num_hidden_layers"])
    given = {ours: options[theirs] for theirs, ours in _NAMES.items() if options.get(theirs) is not None}
    return {"vlm_config": {**vlm, "text_config": text}, **given}


def crosses(options: Options, layer: int) -> bool:
    """Returns whether this layer of the action expert attends to the prefix alone."""
    every = options.get("self_attn_every_n_layers", 2)
    return "cross" in options.get("attention_mode", "cross_attn") and not (every > 0 and layer % every == 0)


def expert_sizes(options: Options, text_hidden: int) -> tuple[int, int]:
    """Returns the widths of the expert's residual stream and of its feed-forward layers, which are 8/3 of the former,
    rounded up to a multiple of 256."""
    hidden = int(text_hidden * options.get("expert_width_multiplier", 0.75))
    return hidden, -(-(4 * (2 * hidden // 3)) // 256) * 256
