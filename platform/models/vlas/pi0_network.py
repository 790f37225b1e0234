"""transformers' pi0 as a network of `FlowPolicy`: PaliGemma reads images and an instruction, Gemma denoises actions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PI0ForConditionalGeneration

from rl_platform.models.vlas.inputs import Instructions, camera_images
from rl_platform.models.vlas.prefix import Prefix, masked_mean


class Pi0Network(PI0ForConditionalGeneration):
    """pi0 (Black et al., 2024). Its robot's state is read by the action expert in every denoising step."""

    @property
    def backbone(self) -> nn.Module:
        return self.model.vlm

    @property
    def decoder(self) -> nn.Module:
        return self.model.vlm.language_model

    def drop_unread(self, images: bool) -> None:
        """Removes embeddings of tokens, and without images the vision tower: parameters that get no gradient."""
        self.model.vlm.set_input_embeddings(None)
        self.model.dit.set_input_embeddings(None)
        if not images:
            self.model.vlm.vision_tower = self.model.vlm.multi_modal_projector = None

    def images(self, observations: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Images [B,D] uint8 -> [B,C,3,H,W], the cameras of each observation."""
        side = self.model.vlm.config.vision_config.image_size
        return camera_images(observations, shape, (side, side))

    def prefix(self, instructions: Instructions, tasks: Tensor, images: Tensor | None, state: Tensor) -> Prefix:
        """Reads images [B,C,3,H,W] and the instructions `tasks` [B]; state [B,S]. See `FlowNetwork`."""
        vlm = self.model.vlm
        if images is not None:
            embedded, mask = instructions(tasks)
            features = vlm.get_image_features(images.flatten(0, 1)).pooler_output
            features = features.reshape(images.shape[0], -1, features.shape[-1])
            embedded = torch.cat([features.to(embedded.dtype), embedded], dim=1)
            mask = torch.cat([mask.new_ones(features.shape[:2]), mask], dim=1)
        else:  # the prefix is the instruction alone: it is computed once for all rows that share it
            embedded, mask = instructions(torch.arange(len(instructions.lengths), device=tasks.device))
        output = vlm(
            inputs_embeds=embedded,
            attention_mask=mask,
            position_ids=mask.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(mask),
            use_cache=True,
        )
        cache, mean = output.past_key_values, masked_mean(output.last_hidden_state, mask)
        if images is None:
            cache.batch_select_indices(tasks)
            mean, mask = mean[tasks], mask[tasks]
        return Prefix(cache, mask, state, mean)

    def expert(self, x: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        """Noisy actions [B,H,A] at the times [B] -> hidden states [B,H,W] of the action expert."""
        embedded = self.embed_action_time(prefix.state, x, time)
        output = self.model(action_embeds=embedded, attention_mask=prefix.mask, past_key_values=prefix.cache)
        return output.last_hidden_state[:, 1:]  # the first token is the state
