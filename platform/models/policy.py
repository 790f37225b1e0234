"""The embodied policy: a shared backbone (MLP, or CNN and MLP) with a policy head and a value head.

Observations are flat. Vectors are normalised by the environment component; uint8 images are divided by 255 here.
The environment clips actions to its bounds, unless the policy squashes them. Policy loss and value loss both train the
backbone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.models.autograd_context import AutogradContext
from rl_platform.models.choices import chosen, entropies, log_distributions, of_choices
from rl_platform.models.draws import Among, normals

if TYPE_CHECKING:
    from rl_platform.models.policies.squash import Squash
    from rl_platform.models.policies.vision import ImageEncoder, PartsEncoder


class Tanh(nn.Module):
    """tanh(x). On a CPU it is computed as 2 sigmoid(2x) - 1: within 2e-7 of torch.tanh, in half the time."""

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.device.type != "cpu":
            return torch.tanh(inputs)
        if not torch.is_grad_enabled():
            return _tanh(inputs)
        outputs: Tensor = _TanhOnCPU.apply(inputs)  # type: ignore[no-untyped-call]  # torch has no types for it
        return outputs


class _TanhOnCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, inputs: Tensor) -> Tensor:
        outputs = _tanh(inputs)
        ctx.save_for_backward(outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> Tensor:
        (outputs,) = ctx.saved_tensors
        inputs_gradient: Tensor = torch.ops.aten.tanh_backward(gradient, outputs)
        return inputs_gradient


def _tanh(inputs: Tensor) -> Tensor:
    return (inputs + inputs).sigmoid_().mul_(2.0).sub_(1.0)


_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": Tanh, "relu": nn.ReLU, "silu": nn.SiLU, "elu": nn.ELU}
LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)
LOG_STD_RANGE = (-20.0, 2.0)  # clamps state-dependent log standard deviations, as in Soft Actor-Critic


@dataclass(frozen=True)
class PolicyConfig:
    """Architecture of an embodied policy.

    `log_std`: the log standard deviation of a Gaussian is one parameter per action ("free") or a second head ("state").
    `encoder`: network that images pass before the backbone; None: observations enter the backbone.
    `network`: replaces the backbone; None: an MLP of `hidden_sizes`.
    `recurrent_size` is read by `RecurrentPolicy`, `num_actions` and `num_values` by `ChunkPolicy`.
    """

    hidden_sizes: Sequence[int] = (256, 256)
    activation: str = "tanh"
    initial_log_std: float = 0.0
    log_std: Literal["free", "state"] = "free"
    squash: Squash | None = None
    encoder: ImageEncoder | PartsEncoder | None = None
    network: nn.Module | None = None
    recurrent_size: int = 128
    num_actions: int = 1
    num_values: int = 1


DEFAULTS = PolicyConfig()


class ActorCriticPolicy(nn.Module):
    """Diagonal Gaussian (continuous) or categorical policy (one or several independent choices) and the state's value.

    The policy head starts near zero (orthogonal, gain 0.01), so that the first actions do not depend on the state. The
    value head starts at zero. With `config.squash` the Gaussian is over u and the environment executes squash(u);
    `act` and `evaluate` call u the action, and `executed` returns squash(u).
    """

    def __init__(
        self, observation_shape: Sequence[int], action_space: ActionSpace, config: PolicyConfig = DEFAULTS
    ) -> None:
        super().__init__()
        self.action_space, self.squash, self.encoder = action_space, config.squash, config.encoder
        self.observation_size = math.prod(observation_shape)
        width = self.observation_size if self.encoder is None else self.encoder.width
        self.backbone: nn.Module = config.network or perceptron(width, config.hidden_sizes, config.activation)
        width = config.hidden_sizes[-1] if config.hidden_sizes else width
        if config.network is not None:
            width = cast(int, config.network.width)
        self.policy_head = _linear(width, action_space.size, 0.01)
        self.value_head = nn.Linear(width, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        if action_space.kind == "continuous" and config.log_std == "free":
            self.log_std = nn.Parameter(torch.full((action_space.size,), float(config.initial_log_std)))
        elif action_space.kind == "continuous":
            self.log_std_head = _linear(width, action_space.size, 0.01)
            nn.init.constant_(self.log_std_head.bias, config.initial_log_std)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """observations [B,...] -> Gaussian means or logits [B,A], values [B]."""
        features = self._features(observations)
        return self.policy_head(features), self.value_head(features).squeeze(-1)

    def _features(self, observations: Tensor) -> Tensor:
        flat = observations.reshape(observations.shape[0], self.observation_size)
        if flat.dtype == torch.uint8:
            flat = flat.float() / 255
        features: Tensor = self.backbone(flat if self.encoder is None else self.encoder(flat))
        return features

    def _log_std(self, features: Tensor) -> Tensor:
        """Log standard deviations: [A], or [B,A] if they depend on the state."""
        if hasattr(self, "log_std_head"):
            of_state: Tensor = self.log_std_head(features).clamp(*LOG_STD_RANGE)
            return of_state
        return self.log_std

    def executed(self, actions: Tensor) -> Tensor:
        """Returns the actions [...,A] that the environment executes for actions of `act`."""
        return actions if self.squash is None else self.squash(actions)

    @torch.no_grad()
    def act(
        self,
        observations: Tensor,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        among: Among = None,
    ) -> tuple[Tensor, Tensor]:
        """Samples actions; with `deterministic` returns the mean or the most likely choice.

        observations [N,...] float32 or uint8 -> actions [N,A] float32 (not clipped), [N] int64 or, of several choices,
        [N,D] int64; log_probs [N].
        `among` places the rows in a larger batch, see `draws`.
        """
        features = self._features(observations)
        head = self.policy_head(features)
        if self.action_space.kind == "continuous":
            noise = normals(head, generator, deterministic, among)
            log_std = self._log_std(features)
            actions = torch.addcmul(head, noise, log_std.exp())
            return actions, self._gaussian_log_probs(noise, log_std, actions)
        drawn, log_probs = chosen(log_distributions(head, self.action_space.counts), generator, deterministic, among)
        return self._outward(drawn), log_probs.sum(-1)

    def evaluate(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log-probabilities of given actions, entropies and values, with gradients.

        observations [B,...], actions as of `act` -> log_probs [B], entropy [B], values [B].
        """
        features = self._features(observations)
        head, values = self.policy_head(features), self.value_head(features).squeeze(-1)
        if self.action_space.kind == "continuous":
            log_std = self._log_std(features)
            noise = (actions - head) * (-log_std).exp()
            # H = sum_i (log sigma_i + (1 + log 2 pi) / 2)
            entropy = log_std.sum(-1) + self.action_space.size * (0.5 + LOG_SQRT_2_PI)
            if self.squash is not None:
                entropy = entropy + self.squash.mean_log_slope(head, log_std).sum(-1)
            return self._gaussian_log_probs(noise, log_std, actions), entropy.expand(values.shape), values
        log_probs = log_distributions(head, self.action_space.counts)
        # of independent choices log-probs and entropies add up
        return (
            of_choices(log_probs, actions.reshape(log_probs.shape[:-1])).sum(-1),
            entropies(log_probs).sum(-1),
            values,
        )

    def _outward(self, drawn: Tensor) -> Tensor:
        """Choices [...,D] -> actions: [...] of a single choice."""
        return drawn.squeeze(-1) if self.action_space.kind == "discrete" else drawn

    def _gaussian_log_probs(self, noise: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
        """noise [B,A] = (a - mu) / sigma, log_std [A] or [B,A] -> [B]."""
        # log N(a; mu, sigma) = -sum_i (noise_i^2 / 2 + log sigma_i + log sqrt(2 pi))
        log_probs = -0.5 * noise.square().sum(-1) - (log_std.sum(-1) + self.action_space.size * LOG_SQRT_2_PI)
        return log_probs if self.squash is None else log_probs - self.squash.log_slope(actions).sum(-1)


def perceptron(inputs: int, hidden_sizes: Sequence[int], activation: str) -> nn.Sequential:
    """Returns linear layers of widths `hidden_sizes`, each followed by the activation; no layers: the identity."""
    gain = nn.init.calculate_gain("tanh" if activation == "tanh" else "relu")
    layers: list[nn.Module] = []
    for hidden in hidden_sizes:
        layers += [_linear(inputs, hidden, gain), _ACTIVATIONS[activation]()]
        inputs = hidden
    return nn.Sequential(*layers)


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
