"""Untrained embodied policies of each kind, as a run saves them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import INSTRUCTED, ConvNet, Flow, Model, RandomLM
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.models.embodied_policy import build_policy
from rl_platform.models.saved_policy import Normalizer, PolicyDescription, SavedPolicy, language_of

CHOICES = EnvSpaces((3,), ActionSpace("discrete", 4), (), action_start=5)
DIALS = EnvSpaces(
    (3,), ActionSpace("multi_discrete", 9, (2, 4, 3)), (3, 1), action_start=(0, 5, 1), action_dtype="int8"
)
TORQUES = EnvSpaces((3,), ActionSpace("continuous", 2), (2, 1), (-0.1, -1.0), (0.1, float("inf")))
ONE_NUMBER = EnvSpaces((3,), ActionSpace("continuous", 1), (), (-0.1,), (0.1,))
BOUNDED = EnvSpaces((3,), ActionSpace("continuous", 2), (2,), (-0.5, -1.0), (0.5, 2.0))
IMAGES = EnvSpaces((12, 12, 3), ActionSpace("discrete", 4), (), observation_dtype="uint8")
PICTURED = EnvSpaces((12, 12, 3), ActionSpace("continuous", 2), (2,), (-1.0, -1.0), (1.0, 1.0), 0, "uint8")
CNN = ConvNet(channels=[4], kernels=[4], strides=[4])
WORDS = RandomLM(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=64)
RANDOM: dict[str, Any] = {"random_init": WORDS, "tokenizer": "bytes"}
STEPS = Flow(denoising_steps=2)

KINDS = {
    "choices": (CHOICES, Model(hidden_sizes=[8])),
    "several choices": (DIALS, Model(hidden_sizes=[8])),
    "torques": (TORQUES, Model(hidden_sizes=[8], activation="relu", log_std="state")),
    "one number": (ONE_NUMBER, Model(hidden_sizes=[8])),
    "chunks": (BOUNDED, Model(hidden_sizes=[8], action_distribution="squashed", num_action_chunks=3)),
    "memory": (CHOICES, Model(type="gru", hidden_sizes=[8], recurrent_size=6)),
    "images": (IMAGES, Model(type="cnn", cnn=CNN, hidden_sizes=[8], activation="elu")),
    "instructions": (PICTURED, Model(type="vla", cnn=CNN, action_bins=5, **RANDOM)),
    "one instruction": (PICTURED, Model(type="vla", cnn=CNN, action_bins=5, **RANDOM)),
    "tokens": (PICTURED, Model(type="vlm_tokens", action_bins=5, num_action_chunks=3, **RANDOM)),
    "pi0": (BOUNDED, Model(type="pi0", flow=STEPS, **RANDOM)),
    "smolvla": (PICTURED, Model(type="smolvla", flow=STEPS, num_action_chunks=3, **RANDOM)),
}
TOLD = {"instructions": ("go", "push it"), "tokens": ("go", "push it")}


def saved(kind: str) -> SavedPolicy:
    """The policy of a kind with random weights, and a normaliser where observations are numbers."""
    spaces, model = KINDS[kind]
    levels = ActionLevels(model.num_action_chunks, spaces.action.components)
    torch.manual_seed(0)
    policy = build_policy(model, spaces, levels, 0, TOLD.get(kind, ("go",) if model.type in INSTRUCTED else ()))
    weights = {name: tensor + 0.2 * torch.randn(tensor.shape) for name, tensor in policy.state_dict().items()}
    moments = Normalizer(count=9, mean=[1.0, 100.0, -3.0], variance=[0.5, 4.0, 1e-4], clip=2.0)
    description = PolicyDescription(
        environment="Toy-v0",
        step=7,
        seed=3,
        model=model,
        spaces=spaces,
        levels=levels,
        normalizer=None if spaces.images else moments,
        language=language_of(policy),
    )
    return SavedPolicy(description, weights)


def observations(kind: str, count: int) -> np.ndarray:
    """[N,...], different in each row."""
    spaces, generator = KINDS[kind][0], np.random.default_rng(1)
    shape = (count, *spaces.observation_shape)
    if spaces.images:
        return generator.integers(0, 256, shape, np.uint8)
    return (generator.normal(size=shape) * [1.0, 2.0, 0.01] + [1.0, 100.0, -3.0]).astype(np.float32)
