"""Builds policies on vision-language models of transformers: from a folder, or tiny ones with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import FLOW_POLICIES, Model, RandomLM
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.causal_lm import quiet_transformers
from rl_platform.models.policies.vla import check_words
from rl_platform.models.pretrained.folder_files import check_options, check_weights, reading
from rl_platform.models.pretrained.model_folder import model_folder
from rl_platform.models.tokenizer import load_tokenizer
from rl_platform.models.vlas.action_token_policy import ActionTokenPolicy, unpadded_vocabulary, vision_parts
from rl_platform.models.vlas.flow_policy import FlowPolicy
from rl_platform.models.vlas.inputs import ActionRange, StateScale, action_range
from rl_platform.models.vlas.vision_inputs import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

RANDOM_IMAGE, RANDOM_PATCH = 64, 16  # pixels, of models with random weights
_TYPE, _PATH, _BINS = "actor.model.type", "actor.model.path", "actor.model.action_bins"


def build(
    model: Model, spaces: EnvSpaces, levels: ActionLevels, seed: int, instructions: Sequence[str]
) -> FlowPolicy | ActionTokenPolicy:
    """Returns the policy of section `model`. Random weights depend on `seed`, new parameters on torch's generator.

    Raises ConfigError if there is nothing to load, or if the spaces do not fit the model.
    """
    tokenizer = load_tokenizer(model)
    config = network_config(model, spaces, levels, tokenizer.vocab_size)
    counted = torch.get_default_device().type == "meta"  # without memory, before a run
    network = _read(model.path, config) if model.path and not counted else _random(config, seed)
    tokens = [tokenizer.encode(f"{text}\n") for text in instructions]  # the line ends as in training
    if (longest := max(map(len, tokens))) > (most := getattr(config, "tokenizer_max_length", longest)):
        message = f"the longest instruction has {longest} tokens, and the model reads at most {most}"
        key = "actor.model.instruction" if len(tokens) == 1 else "env.tasks"
        raise ConfigError([Problem(key, message, hint="a shorter text")])
    flow = model.type in FLOW_POLICIES
    reads = config.vlm_config if flow else config
    pictures = [getattr(reads, name, None) for name in ("image_token_id", "video_token_id")]
    check_words(tokens, len(network.get_input_embeddings().weight), pictures)
    policy = _assembled(model, spaces, levels, network, tokens, *scales(model, spaces))
    if not model.train_backbone:
        (network.backbone if flow else network).requires_grad_(False)
    if not model.train_vision:
        for part in vision_parts(network.backbone if flow else network.model):
            part.requires_grad_(False)
    return policy


def without_weights(
    model: Model, spaces: EnvSpaces, levels: ActionLevels, config: Mapping[str, object], tokens: Sequence[Sequence[int]]
) -> FlowPolicy | ActionTokenPolicy:
    """Returns a policy whose parameters are to be loaded. config: of its network; tokens: of each instruction."""
    from transformers import AutoConfig

    if model.type == "smolvla":
        import rl_platform.models.vlas.smolvla_network  # noqa: F401  registers its config
    network = _random(AutoConfig.for_model(**config), 0)
    unknown = [0.0] * spaces.action.size
    return _assembled(model, spaces, levels, network, tokens, ActionRange(unknown, unknown), _no_scale(model, spaces))


def _assembled(
    model: Model,
    spaces: EnvSpaces,
    levels: ActionLevels,
    network: PreTrainedModel,
    tokens: Sequence[Sequence[int]],
    actions: ActionRange,
    state: StateScale | None,
) -> FlowPolicy | ActionTokenPolicy:
    if model.type in FLOW_POLICIES:
        return FlowPolicy(network, tokens, spaces, model.flow, levels, actions, state)
    return ActionTokenPolicy(network, tokens, spaces, model.action_bins, levels, actions)


def scales(model: Model, spaces: EnvSpaces) -> tuple[ActionRange, StateScale | None]:
    """Returns the range of actions and the scale of the robot's state, None if the policy reads no state.

    A folder of LeRobot has scales of its own. The network writes actions that the folder does not normalise in the
    environment's numbers.
    """
    state = _no_scale(model, spaces)
    if model.type != "smolvla" or model.path is None:
        return action_range(model, spaces), state
    from rl_platform.models.vlas.lerobot_folder import ACTION, STATE, LeRobotFolder
    from rl_platform.models.vlas.lerobot_normalizer import LeRobotNormalizer

    if torch.get_default_device().type == "meta":  # parameters are counted, maybe without model.safetensors
        return ActionRange(*[[0.0] * spaces.action.size] * 2), state
    folder = LeRobotFolder(model.path)
    center_and_scale = LeRobotNormalizer.of(folder, ACTION).center_and_scale(spaces.action.size, model.unnorm_key)
    low, high = ([center + sign * scale for center, scale in zip(*center_and_scale, strict=True)] for sign in (-1, 1))
    if state is not None:
        normalizer = LeRobotNormalizer.of(folder, STATE)
        center, scale = normalizer.center_and_scale(spaces.observation_size, model.unnorm_key)
        if normalizer.scales_a_range:
            least = [middle - half for middle, half in zip(center, scale, strict=True)]
            state = StateScale(least, scale, offset=-1.0)
        else:
            state = StateScale(center, scale)
    return ActionRange(low, high), state


def _no_scale(model: Model, spaces: EnvSpaces) -> StateScale | None:
    """Returns the scale of the robot's state before statistics are known; None if the policy reads no state."""
    if model.type != "smolvla" or spaces.images:
        return None
    return StateScale([0.0] * spaces.observation_size, [1.0] * spaces.observation_size)


def network_config(model: Model, spaces: EnvSpaces, levels: ActionLevels, vocabulary: int) -> PretrainedConfig:
    """Returns the transformers config of section `model`; vocabulary: of its tokenizer.

    Raises ConfigError if transformers has no such network, or if the spaces do not fit it.
    """
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model.type == "pi0" and "pi0" not in CONFIG_MAPPING_NAMES:
        message = f"transformers {__version__} has no pi0"
        hint = "pip install --upgrade transformers; 5.19 has it"
        raise ConfigError([Problem(_TYPE, message, value="pi0", hint=hint)])
    if model.random_init is not None:
        if model.type in FLOW_POLICIES:
            numbers = 0 if spaces.images else spaces.observation_size
            config = _random_pi0 if model.type == "pi0" else _random_smolvla
            return config(model.random_init, numbers, levels.num_actions, spaces.action.size, vocabulary)
        return _random_vlm(model.random_init, vocabulary + model.action_bins)
    folder = model_folder(model.path or "", _PATH)
    check_options(folder, _PATH)
    if model.type == "smolvla":
        from rl_platform.models.vlas.lerobot_folder import LeRobotFolder

        lerobot = LeRobotFolder(folder)
        config = lerobot.config()
        if refused := [*_misfits(config, folder, model, spaces), *lerobot.misfits(spaces)]:
            raise ConfigError(refused)
        return config
    with reading(_PATH, "cannot be loaded", folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    problems = _pi0_misfits if model.type == "pi0" else _vlm_misfits
    if refused := list(problems(config, folder, model, spaces)):
        raise ConfigError(refused)
    return config


def _pi0_misfits(config: PretrainedConfig, folder: str, model: Model, spaces: EnvSpaces) -> Iterator[Problem]:
    if config.model_type != "pi0":
        yield _other_kind(config, folder, "pi0")
        return
    yield from _misfits(config, folder, model, spaces)


def _misfits(config: PretrainedConfig, folder: str, model: Model, spaces: EnvSpaces) -> Iterator[Problem]:
    """Yields the problems of a network that denoises chunks, if they are too small for the environment."""
    fits = {
        "actor.model.num_action_chunks": (model.num_action_chunks, config.chunk_size, "actions in a chunk"),
        "env.id": (spaces.action.size, config.max_action_dim, "numbers in an action"),
        _PATH: (0 if spaces.images else spaces.observation_size, config.max_state_dim, "numbers in an observation"),
    }
    for key, (count, most, what) in fits.items():
        if count > most:
            message = f"the model of {folder} has at most {most} {what}"
            yield Problem(key, message, value=str(count), allowed=f"1..{most}")


def _vlm_misfits(config: PretrainedConfig, folder: str, model: Model, spaces: EnvSpaces) -> Iterator[Problem]:
    if config.model_type not in FAMILIES:
        yield _other_kind(config, folder, ", ".join(FAMILIES))
        return
    bins = getattr(config, "n_action_bins", model.action_bins)
    if bins != model.action_bins:
        message = f"the model of {folder} was trained with {bins} bins"
        yield Problem(_BINS, message, value=str(model.action_bins), hint=f"{_BINS}: {bins}")
    if model.action_bins > (most := unpadded_vocabulary(config)):
        yield Problem(_BINS, f"the vocabulary of {folder} has {most} tokens", value=str(model.action_bins))


def _other_kind(config: PretrainedConfig, folder: str, allowed: str) -> Problem:
    kind = "pi0" if config.model_type == "pi0" else "vlm_tokens" if config.model_type in FAMILIES else "vla"
    message = f"a model of type {config.model_type} does not fit this policy"
    return Problem(_PATH, message, value=folder, allowed=allowed, hint=f"{_TYPE}: {kind}" if kind != "vla" else "")


def _gemma(tiny: RandomLM, vocabulary: int) -> dict[str, object]:
    return {
        **_sizes(tiny),
        "model_type": "gemma",
        "num_key_value_heads": tiny.num_kv_heads or tiny.num_heads,
        "head_dim": tiny.hidden_size // tiny.num_heads,
        "max_position_embeddings": tiny.max_positions,
        "vocab_size": vocabulary,
    }


def _sizes(tiny: RandomLM) -> dict[str, object]:
    return {
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
    }


def _paligemma(tiny: RandomLM, vocabulary: int) -> dict[str, object]:
    vision = {
        **_sizes(tiny),
        "model_type": "siglip_vision_model",
        "image_size": RANDOM_IMAGE,
        "patch_size": RANDOM_PATCH,
        "projection_dim": tiny.hidden_size,
        "vision_use_head": False,
    }
    return {
        "text_config": _gemma(tiny, vocabulary),
        "vision_config": vision,
        "projection_dim": tiny.hidden_size,
        "image_token_id": vocabulary,  # outside of the vocabulary: no text contains it
    }


def _random_pi0(tiny: RandomLM, numbers: int, actions: int, width: int, vocabulary: int) -> PretrainedConfig:
    from transformers import PI0Config

    return PI0Config(
        vlm_config={"model_type": "paligemma", **_paligemma(tiny, vocabulary)},
        dit_config=_gemma(tiny, vocabulary),
        chunk_size=actions,
        max_state_dim=max(numbers, 1),
        max_action_dim=width,
    )


def _random_smolvla(tiny: RandomLM, numbers: int, actions: int, width: int, vocabulary: int) -> PretrainedConfig:
    from rl_platform.models.vlas.smolvla_network import SmolVLAConfig

    vlm = {
        "text_config": _gemma(tiny, vocabulary) | {"model_type": "llama"},
        "vision_config": _sizes(tiny) | {"image_size": RANDOM_IMAGE, "patch_size": RANDOM_PATCH},
        "image_token_id": vocabulary,
        "pad_token_id": None,
    }
    return SmolVLAConfig(
        vlm_config=vlm,
        chunk_size=actions,
        max_state_dim=max(numbers, 1),
        max_action_dim=width,
        image_size=(RANDOM_IMAGE, RANDOM_IMAGE),
        tokenizer_max_length=tiny.max_positions,
    )


def _random_vlm(tiny: RandomLM, vocabulary: int) -> PretrainedConfig:
    from transformers import PaliGemmaConfig

    return PaliGemmaConfig(**_paligemma(tiny, vocabulary))


def _new_network(config: PretrainedConfig) -> PreTrainedModel:
    from transformers import AutoModelForImageTextToText

    if config.model_type == "smolvla":
        from rl_platform.models.vlas.smolvla_network import SmolVLANetwork

        return SmolVLANetwork(config)
    if config.model_type == "pi0":
        from rl_platform.models.vlas.pi0_network import Pi0Network

        return Pi0Network(config)
    return AutoModelForImageTextToText.from_config(config)


def _random(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _new_network(config).float()


def _read(path: str, config: PretrainedConfig) -> PreTrainedModel:
    if config.model_type == "smolvla":
        from rl_platform.models.vlas.lerobot_folder import LeRobotFolder

        network = _random(config, 0)
        LeRobotFolder(path).fill(network)
        return network
    from transformers import AutoModelForImageTextToText

    kind = AutoModelForImageTextToText
    if config.model_type == "pi0":
        from rl_platform.models.vlas.pi0_network import Pi0Network

        kind = Pi0Network
    folder = model_folder(path, _PATH)
    options = {"config": config, "dtype": torch.float32, "output_loading_info": True, "trust_remote_code": False}
    with quiet_transformers(), reading(_PATH, "cannot be loaded", folder):
        network, loading = kind.from_pretrained(folder, **options)
        check_weights(network, loading["missing_keys"], loading["unexpected_keys"], folder, _PATH)
    return network
