"""Writes smolvla_goldens.json with LeRobot's own network, whose weights are a formula of their names.

    pip download --no-deps lerobot==0.4.4 && unzip lerobot-*.whl -d LEROBOT
    python tests/smolvla_goldens.py LEROBOT

LeRobot requires another torch than this platform, so only the two files of its network are imported. Empty modules
replace the other modules that these files import, because the computation does not use them.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import tempfile
import types
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_name("smolvla_goldens.json")
ROWS, SHAPE, CAMERAS, NUMBERS = 3, (24, 36, 6), 2, 5  # shape: two color images that are not square
TOLD = [[7, 8, 9, 10, 11], [12, 13]]
TASKS = [0, 1, 1]
VLM: dict[str, Any] = {
    "model_type": "smolvlm",
    "scale_factor": 2,
    "image_token_id": 290,
    "pad_token_id": 0,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
    },
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 32,
        "patch_size": 8,
    },
}
OPTIONS: dict[str, Any] = {
    "type": "smolvla",
    "chunk_size": 4,
    "n_action_steps": 4,
    "max_state_dim": 8,
    "max_action_dim": 6,
    "resize_imgs_with_padding": [32, 32],
    "num_steps": 5,
    "num_vlm_layers": 4,
    "num_expert_layers": -1,
    "self_attn_every_n_layers": 2,
    "expert_width_multiplier": 0.75,
    "attention_mode": "cross_attn",
    "min_period": 4e-3,
    "max_period": 4.0,
    "tokenizer_max_length": 48,
    "add_image_special_tokens": False,
    "prefix_length": -1,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
}
CASES: dict[str, dict[str, Any]] = {
    "as published": {},
    "self-attention": {"attention_mode": "self_attn"},
    "every third layer, wider": {"self_attn_every_n_layers": 3, "expert_width_multiplier": 1.0, "num_vlm_layers": 3},
}


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor of LeRobot's name `name`."""
    count = torch.arange(math.prod(shape), dtype=torch.float64)
    wave = torch.sin(count * 12.9898 + zlib.crc32(name.encode()) % 1000) * torch.cos(count * 0.731)
    scale = 0.2 if len(shape) > 1 else 0.1
    return (wave * scale + ("norm" in name and name.endswith("weight"))).float().view(shape)


def images() -> Tensor:
    """[ROWS,24*36*6] uint8."""
    return (torch.arange(ROWS * math.prod(SHAPE)) * 37 % 251).to(torch.uint8).view(ROWS, -1)


def state() -> Tensor:
    return torch.linspace(-1, 1, ROWS * NUMBERS).view(ROWS, NUMBERS)


def noise() -> Tensor:
    return torch.empty(ROWS, 4, 6).normal_(generator=torch.Generator().manual_seed(5))


def lerobot_code(folder: str) -> Any:
    """The module lerobot.policies.smolvla.modeling_smolvla."""
    import transformers

    def stub(name: str, **contents: Any) -> Any:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(contents)
        return sys.modules[name]

    for name in ("lerobot", "lerobot.policies", "lerobot.policies.smolvla", "lerobot.policies.rtc", "lerobot.utils"):
        stub(name).__path__ = [str(Path(folder, *name.split(".")))]
    stub("lerobot.policies.pretrained", PreTrainedPolicy=torch.nn.Module)
    stub("lerobot.policies.rtc.modeling_rtc", RTCProcessor=object)
    stub("lerobot.policies.smolvla.configuration_smolvla", SmolVLAConfig=object)
    stub("lerobot.policies.utils", populate_queues=None)
    stub("lerobot.utils.utils", get_safe_dtype=lambda dtype, device: dtype)
    tokenizer = SimpleNamespace(fake_image_token_id=1, global_image_token_id=2)
    transformers.AutoProcessor = SimpleNamespace(from_pretrained=lambda name: SimpleNamespace(tokenizer=tokenizer))
    return importlib.import_module("lerobot.policies.smolvla.modeling_smolvla")


@torch.no_grad()
def computed(code: Any, options: dict[str, Any], vlm: str) -> dict[str, Any]:
    unread = {"freeze_vision_encoder": True, "train_expert_only": True, "train_state_proj": True, "device": "cpu"}
    unread |= {"load_vlm_weights": False, "compile_model": False, "rtc_config": None, "use_cache": True}
    features = [f"observation.image{number}" for number in range(CAMERAS)]
    config = SimpleNamespace(**options, **unread, vlm_model_name=vlm, image_features=features, empty_cameras=0)
    network = code.VLAFlowMatching(config).eval()
    shapes = {f"model.{name}": list(tensor.shape) for name, tensor in network.state_dict().items()}
    network.load_state_dict({name: weight(f"model.{name}", each.shape) for name, each in network.state_dict().items()})
    pixels = images().view(ROWS, *SHAPE).permute(0, 3, 1, 2).float() / 255
    batch = {name: pixels[:, 3 * number : 3 * number + 3] for number, name in enumerate(features)}
    seen, masks = code.SmolVLAPolicy.prepare_images(SimpleNamespace(config=config), batch)
    longest = max(map(len, TOLD))
    words = torch.tensor([TOLD[task] + [0] * (longest - len(TOLD[task])) for task in TASKS])
    told = torch.tensor([[place < len(TOLD[task]) for place in range(longest)] for task in TASKS])
    numbers = torch.nn.functional.pad(state(), (0, 8 - NUMBERS))

    times = torch.tensor([1.0, 0.7, 0.25])
    loss = network.forward(
        seen, masks, words, told, numbers, torch.zeros_like(noise()), noise() / times[:, None, None], times
    )
    # the loss is (u - v)^2 with u = noise: its gradient is not needed, v is recomputed by a step
    parts = network.embed_prefix(seen, masks, words, told, state=numbers)
    attention = code.make_att_2d_masks(parts[1], parts[2])
    _, cache = network.vlm_with_expert.forward(
        attention_mask=attention,
        position_ids=torch.cumsum(parts[1], dim=1) - 1,
        past_key_values=None,
        inputs_embeds=[parts[0], None],
        use_cache=True,
        fill_kv_cache=True,
    )
    velocity = network.denoise_step(parts[1], cache, noise(), times)
    torch.testing.assert_close((noise() / times[:, None, None] - velocity).square(), loss, atol=1e-4, rtol=1e-4)
    return {
        "shapes": shapes,
        "velocity": velocity.tolist(),
        "from images": network.sample_actions(seen, masks, words, told, torch.zeros_like(numbers), noise()).tolist(),
        "from states": network.sample_actions([], [], words, told, numbers, noise()).tolist(),
    }


if __name__ == "__main__":
    module = lerobot_code(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(VLM))
        found = {name: computed(module, OPTIONS | changes, folder) for name, changes in CASES.items()}
    FILE.write_text(json.dumps({"noise": noise().tolist(), **found}) + "\n")
