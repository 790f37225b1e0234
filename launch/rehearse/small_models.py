"""Architectures of language models: `options_of` finds a model's config.json, `small_options` shrinks it.

A config.json on this machine comes first: a folder, or the cache of the Hugging Face hub. Otherwise the table of
`placement/estimates/architectures.yaml`. Nothing is downloaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from rl_platform.config.schema.models import Trainable
from rl_platform.disk import cache_folder
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.rehearse.rehearsal_sizes import small_heads, small_layers
from rl_platform.models.pretrained.model_folder import MODELSCOPE, PACKAGED
from rl_platform.placement.estimates.architectures import Options, family_of

HEAD, INNER, EXPERT = 32, 128, 32  # widths of small models; vLLM's attention on a CPU has no smaller heads
WINDOW = 8  # tokens of a sliding window: fewer than a prompt
LEFT_OUT = ("quantization_config", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id")
REQUIRED = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Specials:
    """Special tokens of a tokenizer; `start` and `end` surround a turn of a conversation. {Role}: in upper case."""

    family: str
    eos: str
    pad: str
    bos: str | None = None
    others: tuple[str, ...] = ()
    start: str = "<|im_start|>{role}\n"
    end: str = "<|im_end|>\n"


_DEEPSEEK = Specials(
    "DeepSeek",
    eos="<｜end▁of▁sentence｜>",
    pad="<｜end▁of▁sentence｜>",
    bos="<｜begin▁of▁sentence｜>",
    others=("<｜User｜>", "<｜Assistant｜>"),
    start="<｜{Role}｜>",
    end="",
)
_LLAMA2 = Specials("Llama 2", "</s>", "</s>", "<s>", ("[INST]", "[/INST]"), "[{role}] ", " ")
PLAIN = Specials("bytes", "<|endoftext|>", "<|pad|>")
TOKENIZERS = {  # by `Family.tokenizer`
    "qwen": Specials("Qwen2", "<|im_end|>", "<|endoftext|>", None, ("<|im_start|>",)),
    "deepseek": _DEEPSEEK,
    "deepseek-qwen": replace(_DEEPSEEK, family="DeepSeek-R1-Distill-Qwen"),
    "deepseek-llama": replace(_DEEPSEEK, family="DeepSeek-R1-Distill-Llama"),
    "llama-3": Specials(
        "Llama 3",
        eos="<|eot_id|>",
        pad="<|finetune_right_pad_id|>",
        bos="<|begin_of_text|>",
        others=("<|start_header_id|>", "<|end_header_id|>"),
        start="<|start_header_id|>{role}<|end_header_id|>\n\n",
        end="<|eot_id|>",
    ),
    "llama-2": _LLAMA2,
    "mistral": replace(_LLAMA2, family="Mistral"),
    "gemma": Specials(
        "Gemma",
        eos="<eos>",
        pad="<pad>",
        bos="<bos>",
        others=("<start_of_turn>", "<end_of_turn>"),
        start="<start_of_turn>{role}\n",
        end="<end_of_turn>\n",
    ),
    "moonlight": Specials(
        "Moonlight",
        "<|im_end|>",
        "[PAD]",
        "[BOS]",
        ("<|im_user|>", "<|im_middle|>"),
        "<|im_{role}|>{role}<|im_middle|>",
    ),
    "gpt-oss": Specials(
        "GPT-OSS",
        "<|return|>",
        "<|endoftext|>",
        None,
        ("<|start|>", "<|message|>", "<|end|>"),
        "<|start|>{role}<|message|>",
        "<|end|>",
    ),
    "seed-oss": Specials(
        "Seed-OSS", "<seed:eos>", "<seed:pad>", None, ("<seed:bos>",), "<seed:bos>{role}\n", "<seed:eos>"
    ),
    "smollm2": Specials("SmolLM2", "<|im_end|>", "<|im_end|>", "<|im_start|>"),
}


@dataclass(frozen=True)
class Architecture:
    """config.json of a model, and its tokenizer. folder: the files on this machine; None: from the table."""

    options: Options
    specials: Specials
    folder: Path | None = None

    @property
    def has_tokenizer(self) -> bool:
        return self.folder is not None and any(
            (self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
        )


def options_of(path: str, key: str) -> Architecture:
    """Returns the architecture of the model at `path`, a folder or hub id. Raises ConfigError about `key`."""
    folder = local_folder(path)
    known = _from_table(path)
    if folder is not None:
        try:
            options = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError([Problem(key, f"config.json cannot be read: {error}", value=path)]) from error
        if lacking := [name for name in REQUIRED if not isinstance(options, dict) or name not in options]:
            message = f"its config.json has no {', '.join(lacking)}"
            raise ConfigError([Problem(key, message, value=path, allowed="a text-only causal language model")])
        return Architecture(options, PLAIN if known is None else known.specials, folder)
    if known is None:
        is_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
        hint = f"hf download {path} --include '*.json' --local-dir FOLDER, then {key}=FOLDER" if is_id else ""
        raise ConfigError(
            [Problem(key, "neither on this machine nor among the architectures known here", value=path, hint=hint)]
        )
    return known


def local_folder(path: str) -> Path | None:
    """Returns the folder on this machine with config.json of a model: `path`, or its snapshot in the hub's cache."""
    path = path.removeprefix(MODELSCOPE)
    folder = cache_folder() / PACKAGED if path == PACKAGED else Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _from_table(path: str) -> Architecture | None:
    family = family_of(path)
    options = None if family is None else family.options_of(path)
    if family is None or options is None:
        return None
    return Architecture(options, TOKENIZERS[family.tokenizer])


def small_options(options: Options, section: Trainable, vocabulary: int) -> Options:
    """Returns config.json of a small model of the same architecture.

    Cut are layers, widths, heads and experts. The relation of heads to key and value heads, rotary positions, biases,
    norms, tied matrices and the kinds of layers stay. section: how the model is trained, which decides the layers.
    """
    small = {name: value for name, value in options.items() if name not in LEFT_OUT}
    layers = small_layers(options["num_hidden_layers"], section)
    heads = options["num_attention_heads"]
    heads, kv_heads = small_heads(heads, options.get("num_key_value_heads") or heads)
    wide = options.get("head_dim") not in (None, options["hidden_size"] // options["num_attention_heads"])
    head = 2 * HEAD if wide else HEAD
    sizes = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * HEAD,
        "intermediate_size": INNER,
        "head_dim": head,
        "vocab_size": vocabulary,
        "moe_intermediate_size": EXPERT,
        "shared_expert_intermediate_size": EXPERT,
        "q_lora_rank": EXPERT,
        "kv_lora_rank": HEAD,
        "qk_nope_head_dim": HEAD,
        "qk_rope_head_dim": HEAD // 2,
        "v_head_dim": HEAD,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": min(options.get("num_experts_per_tok") or 2, 2),
        "n_group": min(options.get("n_group") or 1, 2),
        "topk_group": 1,
        "first_k_dense_replace": min(options.get("first_k_dense_replace") or 0, 1),
        "max_window_layers": layers,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,  # one layer of each kind among two
        "full_attention_interval": 2,
    }
    small |= {name: value for name, value in sizes.items() if options.get(name) is not None}
    if options.get("layer_types"):
        kinds = options["layer_types"]
        small["layer_types"] = [*dict.fromkeys(kinds), *kinds][:layers]
    if options.get("mlp_only_layers"):
        small["mlp_only_layers"] = [number for number in options["mlp_only_layers"] if number < layers]
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(options.get(name), dict):
            # a list has a factor of each rotary frequency
            cut = {key: value[: head // 2] for key, value in options[name].items() if isinstance(value, list)}
            small[name] = options[name] | cut
    return small
