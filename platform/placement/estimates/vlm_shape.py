"""The shapes of policies on vision-language models from config.json alone.

A plan does not build the environment. Without `env.pixels` it assumes observations of one image of IMAGE pixels, or of
numbers for pi0 and smolvla with random weights. The numbers of actions and observations are those of other policies.
The tokens of an instruction are estimated unless the tokenizer is `bytes`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import FLOW_POLICIES, Model
from rl_platform.placement.estimates.architectures import Options
from rl_platform.placement.estimates.model_shape import ModelShape
from rl_platform.placement.estimates.policy_shape import ACTIONS, OBSERVATIONS, PolicyShape, Stack
from rl_platform.placement.estimates.smolvla_options import SMOLVLM2_OPTIONS, crosses, expert_sizes

LETTERS = 4  # of an instruction per token
IMAGE = (224, 224)  # pixels, of environments that give images themselves; only Qwen2.5-VL reads their size
CRITIC_WIDTH = 256  # of models.vlas.flow_policy
RANDOM_IMAGE, RANDOM_PATCH = 64, 16  # of models.vlas.build
DEFAULTS: dict[str, Options] = {  # of transformers, for keys that a config.json leaves out
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
    },
    "smolvlm_vision": {
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 32,
    },
    "qwen2_5_vl_vision": {"depth": 32, "num_heads": 16, "intermediate_size": 3420, "patch_size": 14},
}
DEFAULTS["idefics3_vision"] = DEFAULTS["smolvlm_vision"]
PALIGEMMA: Options = {  # the vision-language model of pi0
    "model_type": "paligemma",
    "text_config": {
        "model_type": "gemma",
        "vocab_size": 257_152,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
    },
}
EXPERT: Options = PALIGEMMA["text_config"] | {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256}
Decoder = Callable[[Options], ModelShape | str]


def vlm_policy_shape(config: Config, options: Options, decoder: Decoder) -> PolicyShape | str:
    """Returns the shape of a policy on a vision-language model with this config.json, or why it is not known.

    decoder: returns the shape of a language model with a config.json.
    """
    kind, model = options.get("model_type"), config.actor.model
    flow = model.type in FLOW_POLICIES
    if kind != model.type if flow else kind in FLOW_POLICIES:
        return f"a model of type {kind} is no {model.type}"
    default = SMOLVLM2_OPTIONS if kind == "smolvla" else PALIGEMMA
    vlm = (options.get("vlm_config") or default) if flow else options
    try:
        text = decoder(_text_options(vlm))
        if isinstance(text, str):
            return text
        camera, projector, patches = _vision(vlm, text.hidden, config)
        return (_flow if flow else _tokens)(config, options, decoder, text, camera, projector, patches)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return f"config.json lacks or garbles {error}"


def known_vlm(path: str) -> Options | None:
    """Returns config.json of pi0, of smolvla or of a PaliGemma of 3 billion parameters by its name; None for other
    models."""
    name = path.rstrip("/").rpartition("/")[2].lower()
    if re.match(r"smolvla(\W|_|$)", name):
        return {"type": "smolvla"}
    if re.match(r"pi0(\W|_|$)", name):
        return {"model_type": "pi0"}
    if (size := re.match(r"paligemma-3b\b.*-(224|448|896)\b", name)) is None:
        return None
    return PALIGEMMA | {"vision_config": PALIGEMMA["vision_config"] | {"image_size": int(size[1])}}


def random_options(model: Model, vocabulary: int) -> Options:
    """Returns the config.json of a tiny model with random weights, as `models.vlas.build` makes it."""
    tiny = model.random_init
    assert tiny is not None
    sizes = {
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
    }
    gemma = sizes | {
        "model_type": "gemma",
        "num_key_value_heads": tiny.num_kv_heads or tiny.num_heads,
        "head_dim": tiny.hidden_size // tiny.num_heads,
        "vocab_size": vocabulary + (0 if model.type in FLOW_POLICIES else model.action_bins),
    }
    vision = sizes | {"image_size": RANDOM_IMAGE, "patch_size": RANDOM_PATCH}
    widths = {"chunk_size": model.num_action_chunks, "max_action_dim": ACTIONS}
    if model.type == "smolvla":
        vlm = {"model_type": "smolvlm", "text_config": gemma | {"model_type": "llama"}, "vision_config": vision}
        return {"model_type": "smolvla", "vlm_config": vlm, **widths}
    vlm = {"model_type": "paligemma", "text_config": gemma}
    vlm |= {"vision_config": vision | {"model_type": "siglip_vision_model"}}
    return {"model_type": "pi0", "vlm_config": vlm, "dit_config": gemma, **widths} if model.type == "pi0" else vlm


def _tokens(
    config: Config, _: Options, __: Decoder, text: ModelShape, camera: Stack, projector: int, patches: int
) -> PolicyShape:
    """Images, instruction and a token per number of the chunk go through the language model once."""
    model, cameras = config.actor.model, _cameras(config)
    prompt = cameras * patches + _instruction(config)
    head = 0 if text.tied else text.vocabulary * text.hidden
    language = Stack(
        text,
        prompt + model.num_action_chunks * ACTIONS,
        table=text.vocabulary * text.hidden + text.hidden + head,
        frozen=not model.train_backbone,
    )
    vision = replace(camera, frozen=not (model.train_vision and model.train_backbone))
    values = text.hidden + 1
    if not model.train_backbone:
        return PolicyShape((), stacks=(vision, language), adapted=1, heads=values, fixed=projector + 2 * ACTIONS)
    return PolicyShape((), stacks=(vision, language), adapted=1, heads=values + projector, fixed=2 * ACTIONS)


def _flow(
    config: Config, options: Options, decoder: Decoder, text: ModelShape, camera: Stack, projector: int, patches: int
) -> PolicyShape | str:
    """Returns the shape of pi0 or SmolVLA, or why it is not known.

    The prefix goes through the language model once, the action expert's tokens once for each denoising step.
    """
    model, flow, smol = config.actor.model, config.actor.model.flow, config.actor.model.type == "smolvla"
    pi0 = _with_defaults(options.get("dit_config") or EXPERT, "gemma")
    expert = _smolvla_expert(options, text) if smol else decoder(pi0)
    if isinstance(expert, str):
        return expert
    sees = config.env.pixels is not None or model.random_init is None
    horizon, width = options.get("chunk_size", 50), options.get("max_action_dim", 32)
    state = (1 if sees else OBSERVATIONS) if model.random_init else options.get("max_state_dim", 32)
    instruction = _instruction(config)
    prefix = _cameras(config) * patches + instruction if sees else instruction
    steps = flow.denoising_steps or options.get("num_inference_steps", 10)
    noisy = steps - 1 if flow.method == "flow_cps" else steps
    passes = noisy if flow.stochastic_steps == "all" else 1
    frozen, hidden = not model.train_backbone, expert.hidden
    outer = 3 * hidden * (hidden + 1) + 2 * width * hidden + width  # of actions and times
    crossed = [layer for layer in range(expert.layers) if smol and crosses(options, layer)]
    across = 2 * expert.kv_width**2 * len(crossed)  # keys and values of the prefix are projected
    tokens = horizon if smol else horizon + 1
    stacks = [
        Stack(text, prefix + 1 if smol else prefix if sees else 0, table=text.hidden, frozen=frozen),
        Stack(
            expert,
            tokens,
            outer=outer - 2 * hidden * expert.kv_width * len(crossed),
            table=hidden + (0 if smol else (state + 1) * hidden),
            passes=passes,
            acting=steps,
            context=prefix + 1 if smol else prefix,
        ),
    ]
    heads = (text.hidden + state + 1) * CRITIC_WIDTH + CRITIC_WIDTH + 1
    heads += (hidden + 1) * width if flow.method == "flow_noise" else 0
    heads += (state + 1) * text.hidden if smol else 0
    fixed = instruction * text.hidden * max(len(config.env.tasks), 1) + 2 * ACTIONS
    if sees:
        stacks.insert(0, replace(camera, frozen=frozen or not model.train_vision))
        heads, fixed = (heads, fixed + projector) if frozen else (heads + projector, fixed)
    elif smol:
        fixed += 3 * OBSERVATIONS  # center, scale and offset of the state
    adapted = len(stacks) - 2
    if across:
        stacks.append(Stack(replace(expert, layers=0), prefix + 1, outer=across, passes=passes, acting=steps))
    return PolicyShape((), stacks=tuple(stacks), adapted=adapted, heads=heads, fixed=fixed)


def _smolvla_expert(options: Options, text: ModelShape) -> ModelShape:
    hidden, intermediate = expert_sizes(options, text.hidden)
    return replace(text, vocabulary=0, hidden=hidden, intermediate=intermediate)


def _vision(vlm: Options, text_hidden: int, config: Config) -> tuple[Stack, int, int]:
    """Returns the vision tower for all cameras, the parameters behind it, and the language model's tokens per image."""
    kind = vlm["model_type"]
    tower = {"paligemma": "siglip_vision_model", "qwen2_5_vl": "qwen2_5_vl_vision", "idefics3": "idefics3_vision"}
    vision = _with_defaults(vlm["vision_config"], tower.get(kind, "smolvlm_vision"))
    hidden, patch, cameras = int(vision["hidden_size"]), int(vision["patch_size"]), _cameras(config)
    qwen = kind == "qwen2_5_vl"
    heads = int(vision["num_heads" if qwen else "num_attention_heads"])
    layers = ModelShape(
        vocabulary=0,
        hidden=hidden,
        layers=int(vision["depth" if qwen else "num_hidden_layers"]),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=int(vision["intermediate_size"]),
        tied=True,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated=qwen,
        norms=2 if qwen else 4,  # a LayerNorm has a weight and a bias
    )
    if qwen:
        merged = int(vision.get("spatial_merge_size", 2))
        block = patch * merged
        height, width = (max(round(side / block), 2) * merged for side in _pixels(config))
        frames, wide = int(vision.get("temporal_patch_size", 2)), hidden * merged**2
        outer = 3 * frames * patch**2 * hidden
        stack = Stack(layers, height * width * cameras, outer=outer, images=cameras)
        return stack, hidden + (wide + 1) * wide + (wide + 1) * text_hidden, height * width // merged**2
    places = (int(vision["image_size"]) // patch) ** 2
    stack = Stack(
        layers,
        places * cameras,
        outer=(3 * patch**2 + 1) * hidden,
        table=places * hidden + 2 * hidden,  # position embedding, last norm
        images=cameras,
    )
    if kind == "paligemma":
        return stack, (hidden + 1) * text_hidden, places
    joined = int(vlm.get("scale_factor", 2)) ** 2
    return stack, hidden * joined * text_hidden, places // joined


def _text_options(vlm: Options) -> Options:
    """Returns config.json of the language model; old ones of Qwen2.5-VL have it at the top."""
    kind = vlm["model_type"]
    if kind == "qwen2_5_vl":
        return {**(vlm.get("text_config") or vlm), "model_type": "qwen2", "tie_word_embeddings": _tied(vlm)}
    default = "gemma" if kind == "paligemma" else "llama"
    return {**_with_defaults(vlm["text_config"], default), "tie_word_embeddings": _tied(vlm)}


def _tied(vlm: Options) -> bool:
    return bool(vlm.get("tie_word_embeddings", vlm["model_type"] == "paligemma"))


def _cameras(config: Config) -> int:
    """Returns the number of images in an observation."""
    return 1 if config.env.pixels is None else config.env.pixels.frame_stack


def _pixels(config: Config) -> tuple[int, int]:
    pixels = config.env.pixels
    return IMAGE if pixels is None else (pixels.height, pixels.width)


def _instruction(config: Config) -> int:
    """Returns the number of tokens of the longest instruction and the new line behind it."""
    model = config.actor.model
    instructions = [model.instruction or "", *(task.instruction or "" for task in config.env.tasks)]
    letters = max(len(text.encode()) for text in instructions)
    return letters + 1 if model.tokenizer == "bytes" else letters // LETTERS + 1


def _with_defaults(options: Options, kind: str) -> Options:
    """Returns the options of a part with the defaults of transformers. kind: its model_type, unless it has one."""
    kind = options.get("model_type", kind)
    return {**DEFAULTS.get(kind, {}), "model_type": kind, **options}
