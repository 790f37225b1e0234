"""vlm_tokens: its log-probs are those of transformers' own forward, its bins those of OpenVLA."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import Model
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.errors import ConfigError
from rl_platform.models.tokenizer import ByteTokenizer
from rl_platform.models.vlas import build as vlas
from rl_platform.models.vlas.action_token_policy import ActionTokenPolicy
from rl_platform.models.vlas.inputs import camera_images
from rl_platform.models.vlas.inputs import cameras as cameras_of
from rl_platform.models.vlas.vision_inputs import FAMILIES, VisionInputs

BINS, ACTIONS, NUMBERS, VOCABULARY = 8, 3, 2, 300
TOLD = ["reach it", "go"]
TASKS = torch.tensor([0, 1, 1, 0, 1, 0])
LEVELS = ActionLevels(ACTIONS, NUMBERS)
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
EYES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def spaces(*shape: int) -> EnvSpaces:
    return EnvSpaces(shape, ActionSpace("continuous", NUMBERS), (NUMBERS,), (-1.0, 0.0), (1.0, 4.0), 0, "uint8")


ONE, TWO = spaces(24, 24, 3), spaces(24, 24, 6)


def network(family: str) -> Any:
    """A tiny vision-language model with random weights that are large enough to matter."""
    import transformers

    text: dict[str, Any] = {**TEXT, "vocab_size": VOCABULARY, "num_key_value_heads": 2}
    eyes: dict[str, Any] = {**EYES, "image_size": 32, "patch_size": 8}
    llama = {**text, "model_type": "llama"}
    joined = {"text_config": llama, "vision_config": eyes, "image_token_id": 270, "scale_factor": 2, "pad_token_id": 0}
    match family:
        case "paligemma":
            eyes |= {"model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False}
            gemma = {**text, "model_type": "gemma", "head_dim": 8}
            config = transformers.PaliGemmaConfig(
                text_config=gemma, vision_config=eyes, projection_dim=32, image_token_id=VOCABULARY
            )
        case "smolvlm":
            config = transformers.SmolVLMConfig(**joined)
        case "idefics3":
            config = transformers.Idefics3Config(**joined)
        case _:
            rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
            eyes = {"hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 4, "patch_size": 8}
            eyes |= {"out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 32}
            marks = {"image_token_id": 270, "vision_start_token_id": 271, "vision_end_token_id": 272}
            config = transformers.Qwen2_5_VLConfig(
                text_config={**text, "rope_parameters": rope}, vision_config=eyes, video_token_id=273, **marks
            )
    config.pad_to_multiple_of = 4  # OpenVLA's number of tokens that fill the matrix up
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).float()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() > 1 and "mlp" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def section(folder: Path | str) -> Model:
    return Model(type="vlm_tokens", path=str(folder), tokenizer="bytes", action_bins=BINS)


def built(family: str, folder: Path, given: EnvSpaces = ONE, levels: ActionLevels = LEVELS) -> ActionTokenPolicy:
    network(family).save_pretrained(folder)
    torch.manual_seed(1)
    policy = vlas.build(section(folder), given, levels, 3, TOLD)
    assert isinstance(policy, ActionTokenPolicy)
    torch.nn.init.normal_(policy.value_head.weight)
    return policy


def observed(given: EnvSpaces) -> Tensor:
    torch.manual_seed(2)
    return torch.randint(0, 256, (6, given.observation_size), dtype=torch.uint8)


@pytest.mark.parametrize("given", [ONE, TWO], ids=["one camera", "two cameras"])
def test_log_probs_are_those_of_the_whole_model(family: str, tmp_path: Path, given: EnvSpaces) -> None:
    """Each row alone and without padding, in float64 after transformers' own logits."""
    policy, images = built(family, tmp_path, given), observed(given)
    bins, log_probs = policy.act(images, torch.Generator().manual_seed(5), tasks=TASKS)
    assert bins.shape == log_probs.shape == (6, ACTIONS, NUMBERS)
    plain, vision = network(family), VisionInputs(policy.network.config, given.observation_shape)
    expected = torch.zeros(6, ACTIONS * NUMBERS)
    for row in range(6):
        told = ByteTokenizer().encode(f"{TOLD[TASKS[row]]}\n")
        last = VOCABULARY - 4 - 1
        ids = torch.tensor([[*vision.tokens, *told, *(last - number for number in range(ACTIONS * NUMBERS))]])
        more: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
        if family == "qwen2_5_vl":
            more |= {"mm_token_type_ids": (ids == 270).int()}
        if family == "paligemma":
            more |= {"token_type_ids": torch.zeros_like(ids)}
        with torch.no_grad():
            logits = plain(input_ids=ids, **vision(images[row : row + 1]), **more).logits[0, -ACTIONS * NUMBERS :]
        of_bins = logits[:, last - BINS + 1 : last + 1].double().log_softmax(-1).flip(-1)
        expected[row] = of_bins.gather(1, bins[row].reshape(-1, 1)).squeeze(1).float()
    torch.testing.assert_close(log_probs.flatten(1), expected, atol=1e-5, rtol=0)
    assert log_probs.std() > 0.05


def test_the_ratio_is_one_before_the_first_update(family: str, tmp_path: Path) -> None:
    policy, images = built(family, tmp_path), observed(ONE)
    bins, log_probs = policy.act(images, torch.Generator().manual_seed(5), tasks=TASKS)
    again, entropies, values = policy.evaluate(images, bins, TASKS)
    assert torch.equal(again, log_probs)
    assert values.shape == (6, 1)
    assert values.std() > 0.01
    (again.sum() + entropies.sum() + values.sum()).backward()
    assert all(each.grad is not None for each in policy.value_head.parameters())
    assert policy.network.get_output_embeddings().weight.grad.any()
    others = policy.evaluate(observed(ONE).flip(0), bins, TASKS)[0]
    assert (others - again).abs().max() > 1e-3  # the images matter
    assert (policy.evaluate(images, bins, 1 - TASKS)[0] - again).abs().max() > 1e-3  # so do the instructions


def test_bins_are_those_of_openvla() -> None:
    """256 points from -1 to 1, their middles, and the last bin beside the one before it."""
    torch.manual_seed(0)
    model = Model(type="vlm_tokens", random_init={}, tokenizer="bytes", action_bins=256)
    policy = vlas.build(model, spaces(24, 24, 3), ActionLevels(1, NUMBERS), 3, ["go"])
    points = np.linspace(-1, 1, 256)
    middles = (points[:-1] + points[1:]) / 2
    for index in (0, 1, 100, 254, 255):
        token = (
            policy.vocabulary - 1 - index
        )  # as OpenVLA's tokenizer: the vocabulary minus digitize, which begins at 1
        number = middles[min(policy.vocabulary - token - 1, len(middles) - 1)]
        acted = policy.executed(torch.tensor([[index, index]]))
        np.testing.assert_allclose(acted[0], [number, 2 + 2 * number], atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "cameras"), [((8, 9, 3), 1), ((8, 9, 6), 2), ((2, 8, 9, 3), 2), ((8, 9, 4), 4), ((4, 8, 9), 4)]
)
def test_each_image_of_a_stack_is_a_camera(shape: tuple[int, ...], cameras: int) -> None:
    values = torch.arange(math.prod(shape)).remainder(256).to(torch.uint8)
    images = camera_images(values[None], shape, (8, 9))
    assert images.shape == (1, cameras, 3, 8, 9)
    assert cameras_of(shape) == cameras
    stacked = values.view(shape)
    one = {(8, 9, 3): stacked, (8, 9, 6): stacked[..., 3:], (2, 8, 9, 3): stacked[-1]}.get(shape)
    if one is None:  # gray: three equal channels
        one = (stacked[..., -1] if len(shape) == 3 and shape[-1] == 4 else stacked[-1])[..., None].expand(8, 9, 3)
    torch.testing.assert_close(images[0, -1], one.permute(2, 0, 1).float() / 127.5 - 1)


def test_patches_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    shape = (32, 48, 3)
    vision = VisionInputs(network("qwen2_5_vl").config, shape)
    images = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    processor = Qwen2VLImageProcessorPil(patch_size=8, min_pixels=1, max_pixels=1 << 20, do_resize=False)
    expected = processor(list(images.numpy()), return_tensors="pt")
    given = vision(images.flatten(1))
    torch.testing.assert_close(given["pixel_values"], expected["pixel_values"], atol=1e-5, rtol=0)
    assert torch.equal(given["image_grid_thw"], expected["image_grid_thw"])


def test_an_instruction_with_the_token_of_an_image(tmp_path: Path) -> None:
    made = network("smolvlm")
    made.config.image_token_id = ord("@")
    made.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"actor\.model\.instruction: .* stands for an image"):
        vlas.build(section(tmp_path), ONE, LEVELS, 3, ["reach it", "@ go"])


def test_a_frozen_vision_tower_and_other_models(family: str, tmp_path: Path) -> None:
    network(family).save_pretrained(tmp_path)
    policy = vlas.build(section(tmp_path).model_copy(update={"train_vision": False}), ONE, LEVELS, 3, TOLD)
    frozen = [name for name, each in policy.named_parameters() if not each.requires_grad]
    assert any("vision" in name or "visual" in name for name in frozen)
    assert not any(
        part in name for name in frozen for part in ("embed_tokens", "lm_head", "language_model", "text_model")
    )
    with pytest.raises(ConfigError, match=r"actor\.model\.type: vlm_tokens"):
        vlas.build(section(tmp_path).model_copy(update={"type": "pi0"}), ONE, LEVELS, 3, TOLD)
