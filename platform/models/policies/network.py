"""The user's network of an embodied policy: from observations to the features that the platform's heads read."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.user_code import Extension, raised

_ROWS = 2  # of a check


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
    width = getattr(network, "width", None)
    if not isinstance(width, int) or width < 1:
        raise NETWORK.misfit(name, "has no integer width of at least 1, the number of its features")
    if lazy := [key for key, part in network.named_parameters() if isinstance(part, UninitializedParameter)]:
        message = f"{lazy[0]} has no size before the first call: layers may not be lazy"
        raise NETWORK.misfit(name, message, hint="spaces.observation_size is the number of inputs")
    return network


def check_network(name: str, spaces: EnvSpaces, options: dict[str, object]) -> None:
    """Builds the network and calls it with random observations between 0 and 1.

    Raises ConfigError if the result is not features [B,width], if features depend on other rows or earlier calls, or if
    the state_dict lacks layers. Rollout, training and a checkpoint would then have different policies.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)  # the same network has the same result every time
        network = build_network(name, spaces, options)
        observations = torch.rand(_ROWS, spaces.observation_size)
        features = _features(name, network, observations)
        if not _equal(_features(name, network, observations), features):
            message = "forward() returns other features when it is called with the same observations again"
            raise NETWORK.misfit(name, message, allowed="equal ones: no Dropout, no random numbers, no counters")
        for row in range(_ROWS):
            if not _equal(_features(name, network, observations[row : row + 1]), features[row : row + 1]):
                message = "the features of an observation depend on the other observations of the batch"
                raise NETWORK.misfit(name, message, allowed="independent rows, as with LayerNorm in place of BatchNorm")
        other = build_network(name, spaces, options)
        other.load_state_dict(network.state_dict())
        if not _equal(_features(name, other, observations), features):
            message = "its features depend on layers or numbers that are not in its state_dict, and are never trained"
            raise NETWORK.misfit(name, message, hint="nn.ModuleList in place of a list of layers, register_buffer")


def _features(name: str, network: nn.Module, observations: Tensor) -> Tensor:
    """Returns the features of observations [B,D]. Raises ConfigError unless they are [B,width], float32 and finite."""
    given = observations.clone()
    count = f"{len(observations)} observation{'s' if len(observations) > 1 else ''}"
    try:
        features: object = network(given)
    except Exception as error:
        raise NETWORK.misfit(name, f"forward() of {count} raised {raised(error)}") from error
    expected = (len(observations), network.width)
    if not isinstance(features, Tensor) or features.shape != expected or not features.is_floating_point():
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise NETWORK.misfit(name, f"forward() returned {shape} for {count}, not features {list(expected)}")
    if features.dtype != torch.float32:
        raise NETWORK.misfit(name, f"forward() returned {features.dtype}", allowed="torch.float32, as the observations")
    if not features.isfinite().all():
        raise NETWORK.misfit(name, "forward() returned features that are not finite, for observations between 0 and 1")
    if not torch.equal(given, observations):
        raise NETWORK.misfit(name, "forward() changes the observations, which are also trained on", hint="copy them")
    return features


def _equal(features: Tensor, others: Tensor) -> bool:
    return torch.allclose(features, others, rtol=1e-3, atol=1e-4)
