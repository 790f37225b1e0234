"""The env component: simulation, normalisers, and the rollout batch that the policy's actions lead to."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_platform.components.base import ComponentContext
from rl_platform.components.policy_rollout import Actions, Observations
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.evaluate import evaluate
from rl_platform.envs.embodied.normalize import ObservationNormalizer, RewardNormalizer
from rl_platform.envs.embodied.spaces import EnvDescription, EnvSpaces
from rl_platform.envs.embodied.vector import EpisodeStats, StepResult, VectorEnv
from rl_platform.envs.embodied.video import record_video
from rl_platform.records import RolloutBatch
from rl_platform.rng import derive_seed
from rl_platform.runtime.channel import Channel

RECENT_EPISODES = 100  # the last of them are what `episode/return` and `episode/length` are means of


class Environment:
    """`env.num_envs` environments; asks for actions through channels, so it knows nothing of the policy."""

    def __init__(self, context: ComponentContext, config: Config) -> None:
        self.context, self.env = context, config.env
        self.description = EnvDescription(self.env.id, self.env.kwargs, self.env.max_episode_steps)
        self.envs = VectorEnv(
            self.description,
            self.env.num_envs,
            self.env.num_workers,
            self.env.step_timeout_s,
            stages=self.env.pipeline_stages,
        )
        self.observation_normalizer = (
            ObservationNormalizer(self.envs.observation_shape, self.env.clip_observations)
            if self.env.normalize_observations
            else None
        )
        self.reward_normalizer = (
            RewardNormalizer(self.env.num_envs, config.algorithm.gamma, self.env.clip_rewards)
            if self.env.normalize_rewards
            else None
        )
        self.recent: deque[tuple[float, int]] = deque(maxlen=RECENT_EPISODES)  # returns and lengths
        seed = derive_seed(context.seed, "env") % 2**31
        self.observations = self._seen(self.envs.reset(range(seed, seed + self.env.num_envs)))

    def collect(
        self, step: int, to_policy: Channel[Observations], from_policy: Channel[Actions]
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """`env.rollout_steps` steps of every environment: one row each, and metrics of the episodes that ended.

        The policy answers one stage's observations while the environments of the others are stepped. Stages take
        turns in a fixed order, so what is collected does not depend on timing.
        """
        steps, stages = self.env.rollout_steps, list(enumerate(self.envs.rows))
        rollout = _Recording(self.env.num_envs, steps, self.envs.spaces)
        for stage, rows in stages:
            to_policy.put(Observations(self.observations[rows].copy(), ("act", step, 0, stage)))
        for position in range(steps):
            self.context.progress.update(position, steps, "steps")
            chosen = []
            for stage, _ in stages:
                chosen.append(from_policy.get())
                self.envs.send(chosen[stage].array, stage)
            for stage, rows in stages:
                result = self.envs.receive(stage)
                rewards = self._rewards(result, rows)
                finals = self._normalized(result.final_observations)
                rollout.add((rows, position), self.observations[rows], chosen[stage], rewards, result, finals)
                self.observations[rows] = observations = self._seen(result.observations)
                if position + 1 < steps:
                    to_policy.put(Observations(observations, ("act", step, position + 1, stage)))
        return rollout.finish(self.observations), self._metrics(rollout)

    def evaluate(
        self, step: int, video: str | None, to_policy: Channel[Observations], from_policy: Channel[Actions]
    ) -> dict[str, Any]:
        """Returns and lengths of evaluation episodes under the frozen normalisers; `video`: a file to write."""
        settings = self.env.evaluation
        moves = 0

        def policy(observations: np.ndarray) -> np.ndarray:
            nonlocal moves
            moves += 1
            to_policy.put(
                Observations(self._normalized(observations), ("evaluate", step, moves), settings.deterministic)
            )
            return from_policy.get().array

        count = min(settings.episodes, self.env.num_envs)
        envs = VectorEnv(self.description, count, min(self.env.num_workers, count), self.env.step_timeout_s)
        try:
            found = evaluate(envs, policy, settings.episodes, settings.seed)
        finally:
            envs.close()
        note = record_video(self.description, policy, Path(video), settings.seed) if video else None
        return {"returns": found.returns, "lengths": found.lengths, "invalid": found.invalid, "note": note}

    def state_dict(self) -> dict[str, Any]:
        """Simulation, normalisers and the observations that await an action."""
        state: dict[str, Any] = {
            "envs": self.envs.state_dict(),
            "observations": torch.from_numpy(self.observations.copy()),
            "recent_episodes": list(self.recent),
        }
        if self.observation_normalizer:
            state["observation_normalizer"] = self.observation_normalizer.state_dict()
        if self.reward_normalizer:
            state["reward_normalizer"] = self.reward_normalizer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.envs.load_state_dict(state["envs"])
        self.observations = state["observations"].numpy().copy()
        self.recent = deque(state["recent_episodes"], maxlen=RECENT_EPISODES)
        if self.observation_normalizer:
            self.observation_normalizer.load_state_dict(state["observation_normalizer"])
        if self.reward_normalizer:
            self.reward_normalizer.load_state_dict(state["reward_normalizer"])

    def close(self) -> None:
        self.envs.close()

    def _metrics(self, rollout: _Recording) -> dict[str, float]:
        self.recent.extend((episode.return_, episode.length) for episode in rollout.episodes)
        found = {
            "episode/count": float(len(rollout.episodes)),
            "episode/invalid": float(rollout.invalid.sum()),
            "perf/env_steps": float(rollout.ends.size),
        }
        if self.recent:
            found["episode/return"], found["episode/length"] = (float(mean) for mean in np.mean(self.recent, axis=0))
        return found

    def _rewards(self, result: StepResult, rows: slice) -> np.ndarray:
        return self.reward_normalizer(result.rewards, result.ended, rows) if self.reward_normalizer else result.rewards

    def _seen(self, observations: np.ndarray) -> np.ndarray:
        """Normalised observations, after counting them into the statistics."""
        if self.observation_normalizer:
            self.observation_normalizer.update(observations)
        return self._normalized(observations)

    def _normalized(self, observations: np.ndarray) -> np.ndarray:
        return self.observation_normalizer(observations) if self.observation_normalizer else observations


class _Recording:
    """Arrays [num_envs, steps, ...] that fill up step by step."""

    def __init__(self, num_envs: int, steps: int, spaces: EnvSpaces) -> None:
        shape, width = (num_envs, steps), spaces.observation_size
        continuous = spaces.action.kind == "continuous"
        self.observations = np.zeros((*shape, width), np.float32)
        self.end_observations = np.zeros((*shape, width), np.float32)
        self.actions = np.zeros((*shape, spaces.action.size), np.float32) if continuous else np.zeros(shape, np.int64)
        self.log_probs, self.rewards = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.ends, self.invalid, self.terminated = (np.zeros(shape, bool) for _ in range(3))
        self.episodes: list[EpisodeStats] = []

    def add(
        self,
        where: tuple[slice, int],
        observations: np.ndarray,
        actions: Actions,
        rewards: np.ndarray,
        result: StepResult,
        final_observations: np.ndarray,
    ) -> None:
        """One step at `where`: environments and position."""
        self.observations[where] = observations
        self.actions[where], self.log_probs[where] = actions.array, actions.log_probs
        self.rewards[where] = rewards
        self.ends[where], self.invalid[where], self.terminated[where] = result.ended, result.invalid, result.terminated
        if len(final_observations):
            self.end_observations[where][result.ended] = final_observations
        self.episodes += result.episodes

    def finish(self, next_observations: np.ndarray) -> RolloutBatch:
        """The batch; a row that ends in the middle of an episode continues with `next_observations`."""
        cut = ~self.ends[:, -1]
        self.end_observations[cut, -1] = next_observations[cut]
        self.ends[:, -1] = True
        num_envs = len(self.ends)
        arrays = {"observations": self.observations, "actions": self.actions}
        return RolloutBatch(
            inputs={name: torch.from_numpy(array) for name, array in arrays.items()},
            action_mask=torch.from_numpy(~self.invalid),
            sample_mask=torch.ones(num_envs, dtype=torch.bool),
            group_ids=torch.arange(num_envs),
            rewards=torch.from_numpy(self.rewards),
            rollout_log_probs=torch.from_numpy(self.log_probs),
            ends=torch.from_numpy(self.ends),
            bootstrapped=torch.from_numpy(self.ends & ~self.terminated),
            end_observations=torch.from_numpy(self.end_observations),
        )
