"""The env component: simulation, normalisers, and the rollout batch that the policy's actions lead to."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_platform.components.actor import action_levels
from rl_platform.components.base import ComponentContext
from rl_platform.components.chunk_recording import ChunkRecording
from rl_platform.components.policy_rollout import Actions, Observations
from rl_platform.components.recording import Recording
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.evaluate import evaluate
from rl_platform.envs.embodied.normalize import ObservationNormalizer, RewardNormalizer
from rl_platform.envs.embodied.spaces import EnvDescription
from rl_platform.envs.embodied.vector import StepResult, VectorEnv
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
        self.levels = action_levels(config, self.envs.spaces)
        self.bootstrap = config.algorithm.bootstrap_type
        self.recent: deque[tuple[float, int]] = deque(maxlen=RECENT_EPISODES)  # returns and lengths
        seed = derive_seed(context.seed, "env") % 2**31
        self.observations = self._seen(self.envs.reset(range(seed, seed + self.env.num_envs)))

    def collect(
        self, step: int, to_policy: Channel[Observations], from_policy: Channel[Actions]
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """`env.rollout_steps` steps of every environment: one row each, and metrics of the episodes that ended.

        The policy answers one stage's observations while the environments of the others are stepped. Stages take
        turns in a fixed order, so what is collected does not depend on timing. It is asked before every step, or where
        it chooses K actions at once before every K-th.
        """
        steps, stages = self.env.rollout_steps, list(enumerate(self.envs.rows))
        num_actions = self.levels.num_actions
        rollout = self._recording(steps)
        chosen: dict[int, Actions] = {}
        for stage, rows in stages:
            to_policy.put(Observations(self.observations[rows].copy(), ("act", step, 0, stage)))
        for position in range(steps):
            self.context.progress.update(position, steps, "steps")
            for stage, _ in stages:
                if position % num_actions == 0:
                    chosen[stage] = from_policy.get()
                self._send(chosen[stage].array, stage, position % num_actions, rollout)
            for stage, rows in stages:
                result = self.envs.receive(stage)
                stepped = self._stepped(rollout, rows)
                rewards = self._rewards(result, rows, stepped)
                finals = self._normalized(result.final_observations)
                rollout.add((rows, position), self.observations[rows], chosen[stage], rewards, result, finals)
                self.observations[rows] = observations = self._seen(result.observations, stepped)
                if position + 1 < steps and (position + 1) % num_actions == 0:
                    to_policy.put(Observations(observations, ("act", step, position + 1, stage)))
        return rollout.finish(self.observations, self.bootstrap), self._metrics(rollout)

    def _recording(self, steps: int) -> Recording | ChunkRecording:
        if self.levels.single:
            return Recording(self.env.num_envs, steps, self.envs.spaces)
        return ChunkRecording(self.env.num_envs, steps, self.envs.spaces, self.levels)

    def _send(self, chosen: np.ndarray, stage: int, slot: int, rollout: Recording | ChunkRecording) -> None:
        """Begin a stage's step with the action at `slot` of its chunk; environments whose episode ended in it wait."""
        if isinstance(rollout, Recording):
            self.envs.send(chosen, stage)
            return
        rows = self.envs.rows[stage]
        if slot == 0:
            rollout.begin(rows)
        self.envs.send(chosen[:, slot], stage, rollout.idle[rows])

    def _stepped(self, rollout: Recording | ChunkRecording, rows: slice) -> np.ndarray | None:
        """Which of the environments `rows` are not waiting for their next chunk; None: all are stepped."""
        if isinstance(rollout, Recording) or not rollout.idle[rows].any():
            return None
        return np.flatnonzero(~rollout.idle[rows])

    def evaluate(
        self, step: int, video: str | None, to_policy: Channel[Observations], from_policy: Channel[Actions]
    ) -> dict[str, Any]:
        """Returns and lengths of evaluation episodes under the frozen normalisers; `video`: a file to write."""
        settings, chunked = self.env.evaluation, not self.levels.single
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
            found = evaluate(envs, policy, settings.episodes, settings.seed, chunked=chunked)
        finally:
            envs.close()
        note = None
        if video:
            note = record_video(self.description, policy, Path(video), settings.seed, chunked=chunked)
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

    def _metrics(self, rollout: Recording | ChunkRecording) -> dict[str, float]:
        self.recent.extend((episode.return_, episode.length) for episode in rollout.episodes)
        found = {
            "episode/count": float(len(rollout.episodes)),
            "episode/invalid": float(rollout.invalid.sum()),
            "perf/env_steps": float(rollout.env_steps),
        }
        if self.recent:
            found["episode/return"], found["episode/length"] = (float(mean) for mean in np.mean(self.recent, axis=0))
        return found

    def _rewards(self, result: StepResult, rows: slice, stepped: np.ndarray | None) -> np.ndarray:
        """Normalised rewards of the environments `rows`, after counting those that were `stepped`."""
        if self.reward_normalizer is None:
            return result.rewards
        if stepped is None:
            return self.reward_normalizer(result.rewards, result.ended, rows)
        rewards = np.zeros_like(result.rewards)
        if len(stepped):
            where = rows.start + stepped
            rewards[stepped] = self.reward_normalizer(result.rewards[stepped], result.ended[stepped], where)
        return rewards

    def _seen(self, observations: np.ndarray, stepped: np.ndarray | None = None) -> np.ndarray:
        """Normalised observations, after counting those of environments that were `stepped` (None: all)."""
        counted = observations if stepped is None else observations[stepped]
        if self.observation_normalizer and len(counted):
            self.observation_normalizer.update(counted)
        return self._normalized(observations)

    def _normalized(self, observations: np.ndarray) -> np.ndarray:
        return self.observation_normalizer(observations) if self.observation_normalizer else observations
