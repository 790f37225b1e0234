"""Images as the families of transformers' vision-language models read them: resized, normalised, cut into patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.models.policies.vision import ImageLayout
from rl_platform.models.vlas.inputs import camera_images, cameras

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("paligemma", "smolvlm", "idefics3", "qwen2_5_vl")
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class VisionInputs:
    """Inputs of the model of `config` for images of shape `shape`, each image of a stack as a camera of its own."""

    config: PretrainedConfig
    shape: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width that images are resized to. Qwen2.5-VL reads the environment's size, in whole blocks."""
        vision = self.config.vision_config
        if self.config.model_type != "qwen2_5_vl":
            return vision.image_size, vision.image_size
        block = vision.patch_size * vision.spatial_merge_size
        height, width = (max(round(side / block), 2) * block for side in ImageLayout(self.shape).height_and_width)
        return height, width

    @property
    def tokens(self) -> list[int]:
        """Token ids of all images in the prompt."""
        config, (height, width) = self.config, self.size
        patches = (height // config.vision_config.patch_size) * (width // config.vision_config.patch_size)
        if config.model_type == "qwen2_5_vl":
            places = [config.image_token_id] * (patches // config.vision_config.spatial_merge_size**2)
            return [config.vision_start_token_id, *places, config.vision_end_token_id] * cameras(self.shape)
        joined = 1 if config.model_type == "paligemma" else config.scale_factor**2
        return [config.image_token_id] * (patches // joined) * cameras(self.shape)

    def __call__(self, observations: Tensor) -> dict[str, Tensor]:
        """Images [B,D] uint8 -> keyword arguments of the model."""
        images = camera_images(observations, self.shape, self.size)
        if self.config.model_type == "paligemma":
            return {"pixel_values": images.flatten(0, 1)}
        if self.config.model_type != "qwen2_5_vl":
            return {"pixel_values": images}
        mean, std = (torch.tensor(each, device=images.device)[:, None, None] for each in (_CLIP_MEAN, _CLIP_STD))
        return self._patches(((images + 1) / 2 - mean) / std)

    def _patches(self, images: Tensor) -> dict[str, Tensor]:
        """Images [B,C,3,H,W] -> patches of Qwen2.5-VL, those of a block together, and their grid."""
        vision = self.config.vision_config
        patch, merged, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        images = images.flatten(0, 1)
        rows, columns = (side // patch for side in images.shape[-2:])
        # [N, 3, block row, row in block, y, block column, column in block, x]
        cut = images.view(images.shape[0], 3, rows // merged, merged, patch, columns // merged, merged, patch)
        cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :].expand(*(-1,) * 6, frames, -1, -1)
        grid = torch.tensor([[1, rows, columns]], device=images.device).expand(images.shape[0], -1)
        return {"pixel_values": cut.reshape(-1, 3 * frames * patch * patch), "image_grid_thw": grid}
