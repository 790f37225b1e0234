"""A rollout that stays on a device: environments, normalisers and policy exchange tensors.

The host launches all steps without waiting for the device, then copies the recorded steps to main memory. Results equal
those of `Environment.collect` with arrays. Covered: environments with `VectorEnv.device`, and a policy in their process
and on their device that chooses one action per step, without memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import torch

from rl_platform.components.policy_rollout import PolicyInference
from rl_platform.components.recording import Recording
from rl_platform.envs.embodied.vector import EpisodeStats
from rl_platform.models.policy import ActorCriticPolicy

if TYPE_CHECKING:
    from rl_platform.components.environment import Environment


def obstacle(environment: Environment, policy: PolicyInference | None) -> str | None:
    """Returns why rollouts do not stay on the device of the environments; None: they do.

    policy: that of the rollout rank which acts in this thread; None: there is none.
    """
    device = environment.envs.device
    if not environment.env.on_device:
        return "env.on_device is false"
    if device is None:
        return "the environments are stepped in several parts (env.pipeline_stages)"
    if policy is None:
        return "the policy is in other processes, or has several ranks"
    if environment.context.world_size > 1:
        return "the environments are in several processes"
    if policy.device != device:
        return f"the policy is on {policy.device} (actor.device)"
    if environment.episode_steps is not None:
        return "episodes begin together (algorithm.loss_type: actor)"
    if type(policy.policy) is not ActorCriticPolicy or not environment.levels.single:
        return "the policy has memory, or chooses chunks of actions"
    return None


@torch.inference_mode()
def collect_on_device(environment: Environment, policy: PolicyInference, recording: Recording, step: int) -> None:
    """Steps every environment `env.rollout_steps` times; fills `recording` and `environment.observations`."""
    steps, rows = environment.env.rollout_steps, slice(0, environment.env.num_envs)
    envs = environment.envs.to_device(steps)
    recorded = []
    assert environment.observations is not None
    with ExitStack() as stack:
        stack.enter_context(envs.computing())
        for normalizer in environment.normalizers:
            stack.enter_context(normalizer.on(envs.device))
        current = torch.from_numpy(environment.observations).to(envs.device)
        for position in range(steps):
            environment.context.progress.update(position, steps, "steps")
            actions, log_probs, executed = policy.act_on_device(current, ("act", step, position, 0))
            result = envs.step(executed)
            rewards, finals = environment.scaled(result, rows), environment.normalized(result.final_observations)
            ends = result.ended, result.invalid, result.terminated, result.returns, result.lengths
            recorded.append((current, actions, log_probs, rewards.float(), finals, *ends))
            current = environment.seen(result.observations)
        envs.finish()
        arrays = [torch.stack(field, dim=1).cpu().numpy() for field in zip(*recorded, strict=True)]
        environment.observations[:] = current.cpu().numpy()
    recording.observations, recording.actions, recording.log_probs, recording.rewards, last, *others = arrays
    recording.ends, recording.invalid, recording.terminated, returns, lengths = others
    recording.end_observations[recording.ends] = last[recording.ends]
    for position, number in np.argwhere((recording.ends & ~recording.invalid).T).tolist():
        place = number, position
        terminated = bool(recording.terminated[place])
        length = int(lengths[place])
        recording.episodes.append(EpisodeStats(number, float(returns[place]), length, terminated=terminated))
