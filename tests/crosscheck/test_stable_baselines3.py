"""The same data through Stable-Baselines3: its rollout buffer, and one whole gradient step of its PPO.

Needs the extra `crosscheck`. Where the two differ by design is said at each test; docs/algorithms.md has the keys.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from neutral_batches import neutral_batch
from torch import Tensor

REASON = "stable-baselines3 is not installed: pip install -e '.[crosscheck]'"
pytest.importorskip("stable_baselines3", reason=REASON)

import gymnasium
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import explained_variance as their_explained_variance

from rl_platform.algorithms.aggregation import Denominators
from rl_platform.algorithms.gae import gae
from rl_platform.algorithms.losses import ModelOutputs, actor_critic_loss
from rl_platform.algorithms.statistics import explained_variance, whiten
from rl_platform.config.schema.algorithm import Algorithm

STEPS, ENVS = 24, 5
ROWS = STEPS * ENVS
OBSERVATIONS = gymnasium.spaces.Box(-1, 1, (3,))
CONTINUOUS, DISCRETE = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_gae_with_episodes_that_end_anywhere(seed: int, gamma: float, lam: float) -> None:
    """Rows are environments here and columns there. A truncated episode: there gamma V of its last observation is added
    to the reward as `collect_rollouts` does, here it is an end value."""
    draw = np.random.default_rng(seed)
    rewards, values, following = (draw.normal(size=(STEPS, ENVS)).astype(np.float32) for _ in range(3))
    ended = draw.random((STEPS, ENVS)) < 0.2
    truncated = ended & (draw.random((STEPS, ENVS)) < 0.5)
    last_values = draw.normal(size=ENVS).astype(np.float32)

    buffer = RolloutBuffer(STEPS, OBSERVATIONS, CONTINUOUS, "cpu", gae_lambda=lam, gamma=gamma, n_envs=ENVS)
    buffer.rewards[:] = rewards + gamma * following * truncated
    buffer.values[:] = values
    buffer.episode_starts[1:] = ended[:-1]
    buffer.compute_returns_and_advantage(torch.from_numpy(last_values), ended[-1])

    end_values = following * truncated
    end_values[-1] = np.where(ended[-1], end_values[-1], last_values)
    ends = ended.copy()
    ends[-1] = True
    tensors = (torch.from_numpy(np.ascontiguousarray(x.T)) for x in (rewards, values))
    mask = torch.ones(ENVS, STEPS, dtype=torch.bool)
    found = gae(*tensors, mask, gamma, lam, torch.from_numpy(ends.T.copy()), torch.from_numpy(end_values.T.copy()))
    for ours, theirs in zip(found, (buffer.advantages, buffer.returns), strict=True):
        torch.testing.assert_close(ours, torch.from_numpy(theirs.T.copy()), rtol=1e-5, atol=1e-5)


def test_explained_variance() -> None:
    draw = np.random.default_rng(0)
    values, returns = (draw.normal(size=200).astype(np.float32) for _ in range(2))
    ours, valid = explained_variance(*map(torch.from_numpy, (returns, values)), torch.ones(200, dtype=torch.bool))
    assert valid
    assert ours == pytest.approx(float(their_explained_variance(values, returns)), rel=1e-5)


class Still(gymnasium.Env[Any, Any]):
    """Spaces only: nothing is ever simulated."""

    observation_space = OBSERVATIONS

    def __init__(self, action_space: Any) -> None:
        self.action_space = action_space


class Learned:
    """One step of their PPO on random data: plain gradient descent with rate 1, so that its change is its gradient."""

    def __init__(self, action_space: Any, beyond_clip: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = PPO(
            "MlpPolicy",
            Still(action_space),
            learning_rate=1.0,
            n_steps=ROWS,
            batch_size=ROWS,
            n_epochs=1,
            max_grad_norm=1e9,
            policy_kwargs={"optimizer_class": torch.optim.SGD, "net_arch": [8]},
            device="cpu",
            **options,
        )
        self.model.set_logger(configure(None, []))
        self.policy = copy.deepcopy(self.model.policy)
        self._fill(beyond_clip)
        self.model.train()
        self.logged = self.model.logger.name_to_value

    def _fill(self, beyond_clip: bool) -> None:
        """Old log-probs and values unlike the present ones, as after some steps. `beyond_clip`: returns lie so far
        beyond the present values that a clipped value is never the better one."""
        buffer, numbers = self.model.rollout_buffer, torch.Generator().manual_seed(1)
        self.observations = torch.randn(ROWS, 3, generator=numbers)
        with torch.no_grad():
            torch.manual_seed(2)
            self.actions, values, log_probs = self.policy(self.observations)
        self.old_log_probs = log_probs + 0.3 * torch.randn(ROWS, generator=numbers)
        moved = 0.5 * torch.randn(ROWS, generator=numbers)
        self.old_values = values.flatten() - moved
        self.advantages = torch.randn(ROWS, generator=numbers)
        self.returns = self.old_values + (moved.sign() * 5 if beyond_clip else self.advantages)
        buffer.pos, buffer.full = ROWS, True
        for name in ("observations", "actions", "old_values", "old_log_probs", "advantages", "returns"):
            stored = getattr(buffer, name.removeprefix("old_"))
            stored[:] = getattr(self, name).numpy().reshape(stored.shape)

    def ours(self, **keys: Any) -> tuple[list[Tensor], dict[str, float]]:
        """Our gradient of their policy's parameters on that data, and our metrics."""
        values, log_probs, entropy = self.policy.evaluate_actions(self.observations, self.actions)
        mask = torch.ones(ROWS, 1, dtype=torch.bool)
        batch = neutral_batch(
            mask,
            sample_mask=mask[:, 0],
            rollout_log_probs=self.old_log_probs[:, None],
            log_probs=self.old_log_probs[:, None],
            values=self.old_values[:, None],
            advantages=whiten(self.advantages[:, None], mask),  # the mini-batch is the rollout, so both scopes agree
            returns=self.returns[:, None],
        )
        outputs = ModelOutputs(log_probs[:, None], entropy[:, None], values)
        algorithm = Algorithm(loss_type="actor_critic", target_kl=1e9, **keys)
        loss, metrics = actor_critic_loss(outputs, batch, Denominators.of(mask, 1), algorithm)
        return list(torch.autograd.grad(loss, list(self.policy.parameters()))), metrics.finalize()

    def theirs(self) -> list[Tensor]:
        before, after = self.policy.parameters(), self.model.policy.parameters()
        return [(old - new).detach() for old, new in zip(before, after, strict=True)]


def assert_same_step(learned: Learned, gradient: list[Tensor], metrics: dict[str, float], vf_coef: float) -> None:
    """Their value loss is the mean of e^2 and ours of e^2 / 2, so `value_loss_scale` is twice their `vf_coef`."""
    theirs = learned.theirs()
    largest = max(float(tensor.abs().max()) for tensor in theirs)
    assert largest > 0.01
    for ours, expected in zip(gradient, theirs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * largest)
    assert metrics["actor/pg_loss"] == pytest.approx(learned.logged["train/policy_gradient_loss"], rel=1e-4, abs=1e-6)
    assert metrics["critic/loss"] == pytest.approx(vf_coef * learned.logged["train/value_loss"], rel=1e-4)
    assert metrics["actor/entropy"] == pytest.approx(-learned.logged["train/entropy_loss"], rel=1e-5)
    assert metrics["actor/approx_kl_k3"] == pytest.approx(learned.logged["train/approx_kl"], rel=1e-4)


@pytest.mark.parametrize("space", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize("clip", [0.1, 0.3])
@pytest.mark.parametrize(("entropy", "vf_coef"), [(0.0, 0.5), (0.05, 0.8)])
def test_a_step_of_ppo(space: Any, clip: float, entropy: float, vf_coef: float) -> None:
    learned = Learned(space, clip_range=clip, ent_coef=entropy, vf_coef=vf_coef)
    keys = {"clip_ratio_low": clip, "clip_ratio_high": clip}
    gradient, metrics = learned.ours(**keys, entropy_bonus=entropy, value_loss_scale=2 * vf_coef)
    assert metrics["actor/clip_frac"] > 0.1
    assert_same_step(learned, gradient, metrics, vf_coef)


def test_value_clip() -> None:
    """They always take the clipped value, we the worse of the two, as PPO2 did: equal where the clipped is worse."""
    learned = Learned(CONTINUOUS, beyond_clip=True, clip_range_vf=0.2)
    gradient, metrics = learned.ours(value_clip=0.2)
    assert 0.3 < metrics["critic/clip_frac"] == metrics["critic/out_of_range_frac"] < 1
    assert_same_step(learned, gradient, metrics, 0.5)
