"""Images in every layout on their way through the convolutions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from rl_platform.config.schema.models import ConvNet
from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.models.policies.vision import ImageEncoder, ImageLayout
from rl_platform.models.policy import ActorCriticPolicy, PolicyConfig

SMALL = ConvNet(channels=[4, 6], kernels=[4, 3], strides=[2, 1])
LAYOUTS = [  # shape, and what makes [B,channels,height,width] of it
    ((10, 12, 3), lambda images: images.movedim(-1, 1)),
    ((4, 10, 12), lambda images: images),
    ((2, 10, 12, 3), lambda images: torch.cat([images[:, 0], images[:, 1]], dim=-1).movedim(-1, 1)),
]


@pytest.mark.parametrize(("shape", "channels_first"), LAYOUTS, ids=[str(shape) for shape, _ in LAYOUTS])
def test_features_are_those_of_the_convolutions(shape: tuple[int, ...], channels_first) -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder(shape, SMALL)
    images = torch.rand(5, *shape)
    first, second = encoder.layers[0], encoder.layers[2]
    hidden = F.relu(F.conv2d(channels_first(images), first.weight, first.bias, 2))
    expected = F.relu(F.conv2d(hidden, second.weight, second.bias, 1))
    places = encoder.places(images.flatten(1))
    torch.testing.assert_close(places, expected.flatten(2).movedim(1, 2))
    torch.testing.assert_close(encoder(images.flatten(1)), places.flatten(1))
    assert (encoder.positions, encoder.channels) == places.shape[1:]
    assert encoder.width == places[0].numel()


def test_sizes() -> None:
    assert ConvNet().map_sizes(84, 84) == [(20, 20), (9, 9), (7, 7)]
    assert ConvNet().map_sizes(36, 44)[-1] == (1, 2)
    assert min(ConvNet().map_sizes(35, 84)[-1]) < 1
    assert min(ConvNet().map_sizes(4, 4)[-1]) < 1
    assert ImageLayout((3, 8, 8)).channels == 3
    assert ImageLayout((8, 8, 3)).channels == 3


def test_layers_start_orthogonal() -> None:
    encoder = ImageEncoder((16, 16, 2), SMALL)
    weight = encoder.layers[0].weight.flatten(1)
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("cnn", [True, False])
def test_pixels_are_divided_by_255_in_the_policy(cnn: bool) -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder((10, 12, 3), SMALL) if cnn else None
    policy = ActorCriticPolicy((360,), ActionSpace("discrete", 4), PolicyConfig((16,), encoder=encoder))
    torch.nn.init.normal_(policy.policy_head.weight)
    pixels = torch.randint(256, (6, 360), dtype=torch.uint8)
    actions, log_probs = policy.act(pixels, torch.Generator().manual_seed(1))
    evaluated, _, _ = policy.evaluate(pixels.float() / 255, actions)
    torch.testing.assert_close(log_probs, evaluated.detach())


def test_both_losses_train_the_convolutions() -> None:
    torch.manual_seed(0)
    config = PolicyConfig((16,), encoder=ImageEncoder((10, 12, 3), SMALL))
    policy = ActorCriticPolicy((360,), ActionSpace("discrete", 4), config)
    torch.nn.init.normal_(policy.value_head.weight)
    pixels = torch.randint(256, (6, 360), dtype=torch.uint8)
    for which in (0, 2):
        policy.zero_grad()
        policy.evaluate(pixels, torch.zeros(6, dtype=torch.int64))[which].sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in policy.encoder.parameters())
