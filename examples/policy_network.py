"""A network of residual blocks for the policy."""

import torch
from torch import Tensor, nn

from rl_platform.envs.embodied.spaces import EnvSpaces


class Residual(nn.Module):
    def __init__(self, spaces: EnvSpaces, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.width = width
        self.inputs = nn.Linear(spaces.observation_size, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, observations: Tensor) -> Tensor:
        features = torch.tanh(self.inputs(observations))
        for block in self.blocks:
            features = features + torch.tanh(block(features))
        return features
