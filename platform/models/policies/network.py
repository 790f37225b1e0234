"""The user's network of an embodied policy: from observations to the features that the platform's heads read."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.user_code import Extension, raised


class Network(Protocol):
    """A torch.nn.Module. The policy head, the value head and deviations are the platform's, on its features.

    width: the number of features. Nothing that `forward` reads may change but parameters and buffers.
    """

    width: int

    def __init__(self, spaces: EnvSpaces, **options: object) -> None:
        """`spaces`: shapes, and the named parts of a Dict; options: `actor.model.kwargs`."""

    def forward(self, observations: Tensor) -> Tensor:
        """Observations [B,D], normalised, or images divided by 255, float32 -> features [B,width].

        D numbers are flattened; `spaces.observation_shape` is their shape, `spaces.parts` the parts of a Dict.
        """


NETWORK = Extension(
    "policy network",
    "actor.model.type",
    Network,
    "torch.nn.Module(spaces, **kwargs) with width and forward(observations [B,D]) -> features [B,width]",
)


def build_network(name: str, spaces: EnvSpaces, options: dict[str, object]) -> nn.Module:
    """Returns the network behind `name`. Raises ConfigError if it cannot be built."""
    kind = NETWORK.load(name, options)
    if not issubclass(kind, nn.Module):
        raise NETWORK.misfit(name, "does not inherit from torch.nn.Module")
    try:
        network = kind(spaces, **options)
    except Exception as error:
        message = f"cannot be built with actor.model.kwargs {options}: {raised(error)}"
        raise NETWORK.misfit(name, message) from error
    if not isinstance(getattr(network, "width", None), int):
        raise NETWORK.misfit(name, "has no integer width, the number of its features")
    return network


def check_network(name: str, spaces: EnvSpaces, options: dict[str, object]) -> None:
    """Builds the network and calls it with two observations of zeros. Raises ConfigError for another result than
    features [2,width]."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        network = build_network(name, spaces, options)
        try:
            features = network(torch.zeros(2, spaces.observation_size))
        except Exception as error:
            raise NETWORK.misfit(name, f"forward() raised {raised(error)}") from error
    expected = (2, network.width)
    if not isinstance(features, Tensor) or features.shape != expected or not features.is_floating_point():
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise NETWORK.misfit(name, f"forward() returned {shape} for 2 observations, not features {list(expected)}")
