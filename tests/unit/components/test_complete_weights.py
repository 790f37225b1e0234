"""Rollouts work with the weights they are asked for, all of them, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rl_platform.components.actor import LanguageActor, embodied_policy
from rl_platform.components.policy_rollout import Observations, PolicyRollout
from rl_platform.components.rollout import LanguageRollout
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.errors import WorkerError
from rl_platform.records import Prompt, Weights
from rl_platform.runtime.channel import Channel

PROMPTS = [Prompt(3, "12", "", (49, 50)), Prompt(1, "7", "", (55,)), Prompt(3, "12", "", (49, 50))]


def half_of(weights: Weights, version: int) -> Weights:
    """The last tensor does not fit, so that those before it are in place when it fails."""
    state = dict(weights.state)
    last = list(state)[-1]
    return Weights(version, state | {last: torch.zeros(3, *state[last].shape)})


def generated(rollout: LanguageRollout, config: Config, *more: Any) -> list[tuple[int, int]]:
    sink: Channel[Any] = Channel("trajectories", 16, 5.0)
    rollout.generate(PROMPTS, 2, config.rollout.sampling, "train", 4, sink, *more)
    sink.close()
    return sorted((trajectory.prompt.index, trajectory.sample) for trajectory in sink.get_many(64))


def test_a_rollout_refuses_half_of_the_weights_and_other_versions(context, reasoning) -> None:
    config = reasoning()
    weights = LanguageActor(context(), config).publish(7)
    rollout = LanguageRollout(context("rollout"), config)
    with pytest.raises(WorkerError, match=r"rollout\[0\] has no complete weights"):
        generated(rollout, config)
    rollout.receive(weights)
    with pytest.raises(WorkerError, match="has weights version 7, requested was 8"):
        generated(rollout, config, 8)
    assert len(generated(rollout, config, 7)) == 6
    with pytest.raises(RuntimeError):
        rollout.receive(half_of(weights, 8))
    for version in (None, 7, 8):
        with pytest.raises(WorkerError, match="no complete weights"):
            generated(rollout, config, version)
    rollout.receive(weights)
    assert len(generated(rollout, config, 7)) == 6


def test_only_what_is_not_answered_is_generated_also_of_a_prompt_that_stands_there_twice(context, reasoning) -> None:
    config = reasoning()
    weights = LanguageActor(context(), config).publish(7)
    found = []
    for rank in range(2):
        rollout = LanguageRollout(context("rollout", rank, 2), config)
        rollout.receive(weights)
        found += generated(rollout, config, 7, [(3, 1), (1, 0), (3, 0), (3, 3)])
    assert sorted(found) == [(1, 1), (3, 2)]


def policy_rollout(context) -> tuple[PolicyRollout, Callable[[int], Weights]]:
    """And random weights for it, by their seed."""
    config = Config(
        runner={"task_type": "embodied"},
        cluster={"component_placement": {"actor_critic,env,rollout": "all"}},
        algorithm={"loss_type": "actor_critic"},
        actor={"model": {"hidden_sizes": [4]}},
        env={"id": "CartPole-v1"},
    )
    spaces = EnvSpaces((4,), ActionSpace("discrete", 2), (), (), ())
    rollout = PolicyRollout(context("rollout"), config, spaces)
    return rollout, lambda seed: Weights(seed, embodied_policy(config, spaces, seed).state_dict())


def test_a_policy_acts_with_what_it_received_last(context) -> None:
    """The same tensors with other numbers in them, others, and again the first after a part of others."""
    rollout, weights_of = policy_rollout(context)
    first, other = weights_of(1), weights_of(2)
    asked = Observations(np.eye(4, dtype=np.float32), ("act",))

    def acts(weights: Weights) -> np.ndarray:
        rollout.receive(weights)
        return rollout.act(asked).log_probs

    def acts_anew(weights: Weights) -> np.ndarray:
        fresh = policy_rollout(context)[0]
        fresh.receive(weights)
        return fresh.act(asked).log_probs

    before = acts(first)
    assert np.array_equal(before, acts_anew(first))
    for tensor in first.state.values():
        tensor.mul_(2.0)
    assert np.array_equal(changed := acts(first), acts_anew(first))
    assert not np.array_equal(changed, before)
    assert np.array_equal(acts(other), acts_anew(other))
    assert np.array_equal(acts(first), changed)
    with pytest.raises(RuntimeError):
        rollout.receive(half_of(other, 4))
    assert np.array_equal(acts(first), changed)


def test_a_policy_refuses_half_of_the_weights(context) -> None:
    rollout, weights_of = policy_rollout(context)
    weights = weights_of(3)
    channels: list[Channel[Any]] = [Channel("observations", 2, 5.0), Channel("actions", 2, 5.0)]
    channels[0].close()
    for broken in (None, half_of(weights, 4)):
        if broken is not None:
            with pytest.raises(RuntimeError):
                rollout.receive(broken)
        with pytest.raises(WorkerError, match=r"rollout\[0\] has no complete weights"):
            rollout.serve(*channels)
        assert rollout.receive(weights).version == 3
        rollout.serve(*channels)
