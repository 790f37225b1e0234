"""Parameters and products of policies on vision-language models equal those of models that are built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.models.adapters.lora import add_adapters
from rl_platform.models.embodied_policy import build_policy
from rl_platform.placement.estimates.component_shapes import shapes
from rl_platform.placement.estimates.policy_shape import ACTIONS, OBSERVATIONS, PolicyShape
from rl_platform.placement.estimates.vlm_shape import IMAGE

TINY = {"random_init": {"hidden_size": 64, "num_layers": 3, "num_kv_heads": 2, "intermediate_size": 160}}
PIXELS = {"width": 32, "height": 40, "frame_stack": 2}
TEXT = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 300}
EYES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
EYES |= {"image_size": 32, "patch_size": 8}
GEMMA = TEXT | {"model_type": "gemma", "head_dim": 16}
PALIGEMMA = {"model_type": "paligemma", "text_config": GEMMA, "projection_dim": 32, "image_token_id": 300} | {
    "vision_config": EYES | {"model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False}
}
LLAMA = {"text_config": TEXT | {"model_type": "llama"}, "vision_config": EYES, "image_token_id": 270}
QWEN_EYES = {"hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 4, "patch_size": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
MARKS = {"image_token_id": 270, "vision_start_token_id": 271, "vision_end_token_id": 272, "video_token_id": 273}
FOLDERS: dict[str, dict[str, Any]] = {
    "paligemma": PALIGEMMA,
    "smolvlm": {"model_type": "smolvlm", "scale_factor": 2, "pad_token_id": 0} | LLAMA,
    "idefics3": {"model_type": "idefics3", "scale_factor": 2, "pad_token_id": 0} | LLAMA,
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "text_config": TEXT | {"rope_parameters": ROPE}}
    | {"vision_config": QWEN_EYES | {"out_hidden_size": 32, "fullatt_block_indexes": [1]}}
    | MARKS,
    "pi0": {"model_type": "pi0", "vlm_config": PALIGEMMA, "dit_config": GEMMA | {"hidden_size": 40}, "chunk_size": 6},
}


def config_of(model: dict[str, Any], *, pixels: bool, lora: bool = False) -> Config:
    actor: dict[str, Any] = {"model": {"tokenizer": "bytes", "instruction": "reach it", "num_action_chunks": 3} | model}
    if lora:
        actor["lora"] = {"rank": 4}
    section = {
        "runner": {"task_type": "embodied"},
        "cluster": {"component_placement": {"actor_critic,env,rollout": "all"}},
        "actor": actor,
        "env": {"id": "Reacher-v5", "pixels": PIXELS if pixels else None},
    }
    return Config.model_validate(section)


def counted(config: Config) -> PolicyShape:
    shape = shapes(config)[0]["actor_critic"]
    assert isinstance(shape, PolicyShape)
    return shape


def built(config: Config) -> Any:
    model = config.actor.model
    observed: tuple[int, ...] = (OBSERVATIONS,)
    if config.env.pixels is not None:
        observed = (PIXELS["height"], PIXELS["width"], 3 * PIXELS["frame_stack"])
    elif model.path is not None:
        observed = (*IMAGE, 3)
    action = ActionSpace("continuous", ACTIONS)
    bounds = (-1.0,) * ACTIONS, (1.0,) * ACTIONS
    spaces = EnvSpaces(observed, action, (ACTIONS,), *bounds, 0, "uint8" if len(observed) > 1 else "float32")
    policy = build_policy(model, spaces, ActionLevels(model.num_action_chunks, ACTIONS), 1, ["reach it"])
    if config.actor.lora is not None:
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        add_adapters(policy.adapted, config.actor.lora, 1, "actor.lora")
        assert trained
    return policy


FROZEN: dict[str, Any] = {"train_backbone": False}
RANDOM: dict[str, tuple[dict[str, Any], bool, bool]] = {  # section, pixels, lora
    "pi0 of numbers": ({"type": "pi0"}, False, False),
    "pi0 of images": ({"type": "pi0"}, True, False),
    "pi0 with learned noise": ({"type": "pi0", "flow": {"method": "flow_noise"}}, True, False),
    "pi0, expert alone": ({"type": "pi0"} | FROZEN, True, False),
    "pi0, blind": ({"type": "pi0", "train_vision": False}, True, False),
    "pi0, adapters": ({"type": "pi0"}, True, True),
    "smolvla of numbers": ({"type": "smolvla"}, False, False),
    "smolvla of images": ({"type": "smolvla"}, True, False),
    "smolvla with learned noise": ({"type": "smolvla", "flow": {"method": "flow_noise"}}, True, False),
    "smolvla, expert alone": ({"type": "smolvla"} | FROZEN, True, False),
    "smolvla, blind": ({"type": "smolvla", "train_vision": False}, True, False),
    "smolvla, adapters": ({"type": "smolvla"}, True, True),
    "vlm_tokens": ({"type": "vlm_tokens"}, True, False),
    "vlm_tokens, blind": ({"type": "vlm_tokens", "train_vision": False}, True, False),
    "vlm_tokens, adapters": ({"type": "vlm_tokens"}, True, True),
    "vlm_tokens, adapters alone": ({"type": "vlm_tokens"} | FROZEN, True, True),
}


@pytest.mark.parametrize("name", RANDOM)
def test_parameters_of_random_models(name: str) -> None:
    model, pixels, lora = RANDOM[name]
    config = config_of(TINY | model, pixels=pixels, lora=lora)
    shape, policy = counted(config), built(config)
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert shape.trained_parameters(config.actor.lora) == trained
    added = sum(parameter.numel() for name, parameter in policy.named_parameters() if "lora_" in name)
    assert shape.parameters == sum(parameter.numel() for parameter in policy.parameters()) - added


@pytest.mark.parametrize("family", FOLDERS)
def test_parameters_of_folders(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FOLDERS[family]))
    kind = "pi0" if family == "pi0" else "vlm_tokens"
    config = config_of({"type": kind, "path": str(tmp_path)}, pixels=family != "qwen2_5_vl")
    with torch.device("meta"):
        policy = built(config)
    assert counted(config).parameters == sum(parameter.numel() for parameter in policy.parameters())


def test_parameters_of_a_folder_of_lerobot(tmp_path: Path) -> None:
    (tmp_path / "vlm").mkdir()
    (tmp_path / "vlm" / "config.json").write_text(json.dumps(FOLDERS["smolvlm"] | {"image_token_id": 299}))
    options = {"type": "smolvla", "vlm_model_name": str(tmp_path / "vlm"), "num_vlm_layers": 1, "chunk_size": 6}
    (tmp_path / "config.json").write_text(json.dumps(options | {"self_attn_every_n_layers": 3}))
    config = config_of({"type": "smolvla", "path": str(tmp_path)}, pixels=True)
    with torch.device("meta"):
        policy = built(config)
    assert counted(config).parameters == sum(parameter.numel() for parameter in policy.parameters())


@pytest.mark.parametrize(
    ("model", "pixels"),
    [
        ({"type": "pi0", "flow": {"denoising_steps": 4, "stochastic_steps": "all"}}, True),
        ({"type": "pi0", "flow": {"denoising_steps": 4}}, True),
        ({"type": "pi0", "flow": {"denoising_steps": 5, "method": "flow_cps", "stochastic_steps": "all"}}, False),
        ({"type": "smolvla", "flow": {"denoising_steps": 4, "stochastic_steps": "all"}}, True),
        ({"type": "smolvla", "flow": {"denoising_steps": 4}}, False),
        ({"type": "vlm_tokens"}, True),
    ],
    ids=["pi0, all", "pi0, one", "pi0 of numbers", "smolvla, all", "smolvla of numbers", "vlm_tokens"],
)
def test_products_of_an_update_and_of_an_action(model: dict[str, Any], pixels: bool) -> None:
    config = config_of(TINY | model, pixels=pixels)
    shape, policy = counted(config), built(config)
    policy.network.set_attn_implementation("eager")  # the counter leaves out fused attention on CPUs
    rows = 40  # observations of numbers; all share the prefix
    observations = torch.zeros(rows, 40 * 32 * 6, dtype=torch.uint8) if pixels else torch.zeros(rows, OBSERVATIONS)
    with torch.no_grad(), FlopCounterMode(display=False) as acting:
        actions, _ = policy.act(observations, torch.Generator().manual_seed(1))
    with torch.no_grad(), FlopCounterMode(display=False) as updating:
        policy.evaluate(observations, actions)
    for name, found, expected in (
        ("update", updating, shape.products_per_token),
        ("action", acting, shape.acting_products),
    ):
        assert found.get_total_flops() / 2 / rows == pytest.approx(expected, rel=0.03), name


def test_a_frozen_part_costs_an_update_its_forward_alone() -> None:
    whole = counted(config_of(TINY | {"type": "pi0"}, pixels=True))
    expert = counted(config_of(TINY | {"type": "pi0"} | FROZEN, pixels=True))
    assert whole.update_forwards(3) == 3
    vision, language, _ = expert.stacks
    still = (vision.products + language.products) / expert.products_per_token
    assert expert.update_forwards(3) == pytest.approx(3 - 2 * still)
    assert 1 < expert.update_forwards(3) < 2


def test_a_row_of_a_step_is_a_chunk_of_actions() -> None:
    one, four = (config_of(TINY | {"type": "pi0", "num_action_chunks": n}, pixels=True) for n in (1, 4))
    assert one.rows_per_step == 4 * four.rows_per_step == one.env.num_envs * one.env.rollout_steps


def test_a_published_model_has_its_published_size() -> None:
    config = config_of({"type": "pi0", "path": "physical-intelligence/pi0"}, pixels=True)
    shape = counted(config)
    vision, language, expert = shape.stacks
    assert round(vision.parameters / 1e6) == 412  # SigLIP So400m without its head
    assert round(language.shape.decoder_parameters / 1e9, 2) == 1.98  # Gemma 2B without its embedding
    assert round(expert.shape.decoder_parameters / 1e6) == 311


def test_the_published_smolvla_has_its_published_size() -> None:
    shape = counted(config_of({"type": "smolvla", "path": "lerobot/smolvla_base"}, pixels=True))
    vision, language, expert, across = shape.stacks
    assert round(vision.parameters / 1e6) == 86  # SigLIP base with 1024 places
    assert language.shape.layers == 16
    assert round((expert.parameters + across.parameters) / 1e6) == 100  # "about 100 million" in the paper


def test_what_cannot_be_counted_says_why(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "a model of type pi0 is no vlm_tokens": FOLDERS["pi0"],
        "config.json lacks or garbles 'text_config'": {"model_type": "paligemma"},
        "config.json lacks or garbles 'vision_config'": {"model_type": "paligemma", "text_config": GEMMA},
        "are not counted": FOLDERS["smolvlm"] | {"text_config": TEXT | {"model_type": "other"}},
    }
    for text, options in cases.items():
        (tmp_path / "config.json").write_text(json.dumps(options))
        reasons = shapes(config_of({"type": "vlm_tokens", "path": str(tmp_path)}, pixels=True))[1]
        assert text in reasons["actor_critic"]
