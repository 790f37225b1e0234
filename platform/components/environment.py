"""The env component: simulation, normalisers, and recording of a rollout batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from rl_platform.components.actor import action_levels, demonstrations_of
from rl_platform.components.env_evaluation import EnvEvaluation
from rl_platform.components.env_tasks import EnvTasks
from rl_platform.components.policy_rollout import Actions, LocalPolicy, Observations, Policy, PolicyRollout
from rl_platform.components.recent_episodes import RecentEpisodes
from rl_platform.components.recording import HiddenStates, Recording
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import PLACEMENT
from rl_platform.config.schema.models import INSTRUCTED
from rl_platform.envs.embodied.arrays import Array
from rl_platform.envs.embodied.block import is_lost
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.evaluate import EvaluationResult
from rl_platform.envs.embodied.normalize import ObservationNormalizer, RewardNormalizer
from rl_platform.envs.embodied.vector import StepResult, VectorEnv
from rl_platform.errors import ConfigError, PlatformError, Problem
from rl_platform.extras import is_present, required
from rl_platform.records import RolloutBatch, StateDict
from rl_platform.rng import derive_seed
from rl_platform.runtime.host import ComponentContext, label

if TYPE_CHECKING:
    from rl_platform.components.env_ranks.all_envs import AllEnvs, Peers, Shares
    from rl_platform.envs.embodied.mujoco.device_step import DeviceStep

ENV_RANKS = "rl_platform.components.env_ranks"  # an extra
_POLICY = label("rollout", 0)


class NewEpisodes(NamedTuple):
    """numbers [K] of environments in the run that have begun episodes; observations [K,D]: their first ones, raw."""

    numbers: np.ndarray
    observations: np.ndarray


class Environment:
    """`env.num_envs` environments, shared by the ranks. Actions come from a `Policy`, behind channels or in this
    process.

    Rank 0 collects and owns the normalisers; the others simulate for it.
    """

    def __init__(self, context: ComponentContext, config: Config) -> None:
        self.context, self.env = context, config.env
        self.description = EnvDescription.of(self.env)
        self.numbers = np.arange(self.env.num_envs)  # of the environments of this rank
        self.shares: Shares | None = None
        if context.world_size > 1:
            with required(ENV_RANKS, PLACEMENT):
                from rl_platform.components.env_ranks.all_envs import Shares
            self.shares = Shares(self.env.num_envs, self.env.pipeline_stages, context.world_size)
            self.numbers = self.shares.of(context.rank)
        self.drawing: dict[str, str] = {}  # environment variables of the processes that draw
        seed = derive_seed(context.seed, "env") % 2**31
        self.envs = self._open([seed + number for number in self.numbers.tolist()])
        self.observation_normalizer = (
            ObservationNormalizer(self.envs.observation_shape, self.env.clip_observations, self.envs.spaces.normalized)
            if self.env.normalize_observations and not self.envs.spaces.images
            else None
        )
        if config.runner.warm_start is not None and self.observation_normalizer is not None:
            self.observation_normalizer = demonstrations_of(config, self.envs.spaces, context.seed).normalizer
        self.reward_normalizer = (
            RewardNormalizer(self.env.num_envs, config.algorithm.gamma, self.env.clip_rewards)
            if self.env.normalize_rewards and not config.whole_episodes  # they would be scored in different units
            else None
        )
        self.normalizers = [one for one in (self.observation_normalizer, self.reward_normalizer) if one is not None]
        if self.env.backend == "mujoco_warp":  # so that both paths of its rollouts have equal bits
            for normalizer in self.normalizers:
                normalizer.use_torch()
        self.levels = action_levels(config, self.envs.spaces)
        self.bootstrap = config.algorithm.bootstrap_type
        model, self.sequence_length = config.actor.model, config.sequence_length
        self.memory = HiddenStates(self.env.num_envs, model.recurrent_size) if model.type == "gru" else None
        self.episode_steps = self.env.max_episode_steps if config.whole_episodes else None
        self.groups = self.env.num_envs // config.algorithm.group_size
        self.tasks = EnvTasks(self.env, reads_instructions=model.type in INSTRUCTED)
        self.instructions = config.instructions if model.type in INSTRUCTED else ()  # of videos
        self.recent = RecentEpisodes(self.tasks)
        self.observations: np.ndarray | None = None  # normalised; None before the first use
        self.evaluation = EnvEvaluation(self)

    def _open(self, seeds: list[int]) -> VectorEnv:
        """Starts the environments of this rank. Raises ConfigError if they cannot be drawn here."""
        workers = self.env.num_workers // self.context.world_size

        def start(variables: dict[str, str]) -> VectorEnv:
            self.drawing = variables
            envs = VectorEnv(
                self.description,
                len(seeds),
                workers,
                self.env.step_timeout_s,
                worker_variables=variables,
                stages=self.env.pipeline_stages,
                restarts=self.env.restarts,
                numbers=self.numbers.tolist(),
            )
            envs.reset(seeds)
            return envs

        if self.description.pixels is None:
            return start({})
        from rl_platform.envs.embodied.pictures.drawing import CannotDraw, with_drawing

        try:
            return with_drawing(True, start)
        except CannotDraw as error:
            hint = "install a graphics library that needs no screen, as libegl1 or libosmesa6; MUJOCO_GL chooses one"
            message = f"nothing can be drawn on the machine of {self.context.label}: {error}"
            raise ConfigError([Problem("env.pixels", message, hint=hint)]) from error

    def begin(self, peers: Peers) -> None:
        """Counts the observations after the reset. Called once and first, on rank 0 of several ranks."""
        self._current(peers)

    def collect(
        self, step: int, policy: Policy | None, peers: Peers | None = None
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Steps every environment `env.rollout_steps` times; returns one row each, and metrics of ended episodes.

        With whole episodes a row is one episode, and an environment has as many as fit; from its end to the latest end
        that is possible the environment is idle.

        The policy acts for one stage while the environments of the others are stepped. Stages alternate in a fixed
        order, so the rollout does not depend on timing. The policy acts before every step, or with chunks of K actions
        before every K-th. policy None: the rollout rank of this process.
        """
        policy = policy or self._policy_here()
        steps, failures = self.env.rollout_steps, 0
        rollout = self._recording(steps)
        acting = policy.rollout if isinstance(policy, LocalPolicy) else None
        if acting is not None and self.device_obstacle(acting) is None:
            from rl_platform.components.device_rollout.collection import collect_on_device

            self._current()
            collect_on_device(self, acting, rollout, step)
        else:
            if acting is not None:
                stages = self.env.pipeline_stages
                choices = [(at, stage) for at in range(0, steps, self.levels.num_actions) for stage in range(stages)]
                acting.draw_ahead([("act", step, *choice) for choice in choices], self.env.num_envs // stages)
            failures = self._collect(step, policy, peers, rollout)
        assert self.observations is not None
        batch = rollout.finish(self.observations, self.bootstrap)
        batch.inputs.update(self.tasks.inputs(steps // self.levels.num_actions))
        if self.episode_steps is not None:
            batch = self._one_row_each(batch, rollout.invalid, steps // self.episode_steps)
        return batch, self._metrics(rollout, failures)

    def _collect(self, step: int, policy: Policy, peers: Peers | None, rollout: Recording) -> int:
        """Steps all environments with arrays; returns how often one was replaced."""
        envs = self._all(peers)
        steps, memory = self.env.rollout_steps, self.memory
        turn = self.episode_steps or steps
        num_actions = self.levels.num_actions
        chosen: dict[int, Actions] = {}
        failures = 0
        for position in range(steps):
            self.context.progress.update(position, steps, "steps")
            if position % turn == 0:
                if self.episode_steps is not None:
                    self._begin_episodes(envs, step, position // turn)
                current, stages = self._current(peers), list(enumerate(envs.rows))
                for stage, rows in stages:
                    policy.request(self._policy_input(current[rows].copy(), ("act", step, position, stage), rows))
            elif self.episode_steps is not None:
                stages = [(stage, rows) for stage, rows in stages if not rollout.idle[rows].all()]
            for stage, rows in stages:
                if position % num_actions == 0:
                    chosen[stage] = policy.actions(len(current[rows]))
                actions, idle = rollout.next_actions(chosen[stage].to_execute, (rows, position))
                envs.send(actions, stage, idle)
            for stage, rows in stages:
                result = envs.receive(stage)
                failures += result.failures
                stepped = rollout.stepped(rows)
                rewards, finals = self.scaled(result, rows, stepped), self.normalized(result.final_observations)
                normalised = result._replace(rewards=rewards, final_observations=finals)
                rollout.add((rows, position), current[rows], chosen[stage], normalised)
                if memory is not None:
                    memory.advance(rows, chosen[stage], result.ended)
                current[rows] = observations = self.seen(result.observations, stepped)
                over = self.episode_steps is not None and rollout.idle[rows].all()
                if (position + 1) % turn and (position + 1) % num_actions == 0 and not over:
                    policy.request(self._policy_input(observations, ("act", step, position + 1, stage), rows))
        return failures

    def _begin_episodes(self, envs: VectorEnv | AllEnvs, step: int, number: int) -> None:
        """Resets all environments. Those of a group, whose numbers are equal modulo `groups`, begin in one state."""
        seeds = [derive_seed(self.context.seed, "env", step, number, group) % 2**31 for group in range(self.groups)]
        envs.reset(np.resize(seeds, self.env.num_envs).tolist())
        self.observations = None  # these are counted
        if self.memory is not None:
            self.memory.array[:] = 0.0

    def _one_row_each(self, batch: RolloutBatch, invalid: np.ndarray, episodes: int) -> RolloutBatch:
        """Returns the batch with a row per episode. The row of an episode with an invalid step does not count."""
        number, env = np.meshgrid(np.arange(episodes), np.arange(self.env.num_envs))
        groups = torch.from_numpy(number * self.groups + env % self.groups)
        broken = torch.from_numpy(invalid.reshape(groups.numel(), -1).any(axis=1))
        batch = replace(batch, bootstrapped=None, end_observations=None).cut(episodes)
        return replace(batch, group_ids=groups.flatten(), sample_mask=~broken)

    def finds_policy(self) -> bool:
        """Returns whether the rollout's first rank is in this process."""
        return _POLICY in self.context.shared

    def device_obstacle(self, policy: PolicyRollout | None) -> str | None:
        """Returns why each step of a rollout passes through main memory; None: rollouts stay on the device.

        policy: the rollout rank that acts in this thread; None: there is none.
        """
        if self.env.backend != "mujoco_warp" or not is_present("rl_platform.components.device_rollout"):
            return "the environments take and return arrays"
        from rl_platform.components.device_rollout.collection import obstacle

        return obstacle(self, policy)

    def rollout_path(self, acts_here: bool) -> str:
        """Returns the path of observations and actions, and its reason, as a line for the user.

        acts_here: the policy acts in the thread of this rank.
        """
        reason = self.device_obstacle(self._policy_rollout() if acts_here else None)
        if reason is None:
            return f"rollouts stay on {self.envs.device}, with their observations and actions"
        return f"observations and actions of every step pass through main memory: {reason}"

    def _policy_rollout(self) -> PolicyRollout:
        """Returns the rollout's first rank, which is in this process."""
        return cast(PolicyRollout, self.context.shared[_POLICY])

    def _policy_here(self) -> LocalPolicy:
        return LocalPolicy(self._policy_rollout())

    def simulate(self, peers: Peers) -> None:
        """Simulates on ranks above 0 while rank 0 begins or collects."""
        from rl_platform.components.env_ranks.all_envs import follow_orders

        total, context = self.env.rollout_steps * self.env.pipeline_stages, self.context
        try:
            follow_orders(self.envs, context.rank, peers, lambda done: context.progress.update(done, total, "steps"))
        except PlatformError as error:
            error.add_note(f"environment 0 of {context.label} is number {self.numbers[0]} of the run")
            raise

    def _all(self, peers: Peers | None) -> VectorEnv | AllEnvs:
        """Returns the environments of all ranks, on rank 0. peers None: there are no other ranks."""
        if self.shares is None:
            return self.envs
        from rl_platform.components.env_ranks.all_envs import AllEnvs

        assert peers is not None
        return AllEnvs(self.envs, self.shares, peers)

    def _current(self, peers: Peers | None = None) -> np.ndarray:
        """Returns the observations [num_envs,D] that await an action, normalised unless they are images. Those that
        follow a reset are counted once."""
        if self.observations is None:
            self.observations = self.seen(self._all(peers).observations)
        return self.observations

    def _policy_input(self, observations: np.ndarray, draw: tuple[str | int, ...], rows: slice) -> Observations:
        """Returns the observations of the environments `rows`, with hidden states for a recurrent policy."""
        states = None if self.memory is None else self.memory.array[rows].copy()
        return Observations(observations, draw, hidden_states=states, tasks=self.tasks.read(rows))

    def _recording(self, steps: int) -> Recording:
        where, turn = (self.env.num_envs, steps, self.envs.spaces), self.episode_steps or 1
        if self.memory is None and self.levels.single:
            return Recording(*where, turn)
        with required("rl_platform.components.policy_recordings", "actor.model"):
            from rl_platform.components.policy_recordings.chunks import ChunkRecording
            from rl_platform.components.policy_recordings.recurrent import RecurrentRecording
        if self.memory is not None:
            return RecurrentRecording(*where, self.memory, self.sequence_length, turn)
        return ChunkRecording(*where, self.levels, turn)

    def evaluate(
        self, step: int, video: str | None, last: bool, deterministic: bool, policy: Policy | None
    ) -> EvaluationResult:
        """Returns the result of `EnvEvaluation.run`. policy None: the rollout rank of this process."""
        self._current()  # the normalisers count the observations after the reset
        return self.evaluation.run(step, video, last, deterministic, policy or self._policy_here())

    def drawn(self) -> str:
        """Waits for the video and says why there is none; empty: it was drawn."""
        return self.evaluation.drawn()

    def state_dict(self) -> StateDict:
        """Returns the simulation, normalisers and the observations that await an action; on ranks above 0 the
        simulation alone.

        `joined_states` joins those of all ranks.
        """
        state: StateDict = {"envs": self.envs.state_dict()}
        if self.context.rank > 0:
            return state
        state["observations"] = torch.from_numpy(self._current().copy())
        state |= self.recent.state_dict()
        if self.memory is not None:
            state["hidden_states"] = torch.from_numpy(self.memory.array.copy())
        if self.observation_normalizer:
            state["observation_normalizer"] = self.observation_normalizer.state_dict()
        if self.reward_normalizer:
            state["reward_normalizer"] = self.reward_normalizer.state_dict()
        return state

    def load_state_dict(self, state: StateDict) -> NewEpisodes:
        """Loads the state of all environments, which any number of ranks may have saved. Returns the environments of
        this rank whose state could not be saved, so that they have begun new episodes; see `see_new_episodes`."""
        raw, saved = self.envs.load_state_dict(state["envs"], self.numbers.tolist()), state["envs"]["observations"]
        self.observations = state["observations"].numpy().copy()
        self.recent.load_state_dict(state)
        if self.memory is not None:
            self.memory.array = state["hidden_states"].numpy().copy()
        if self.observation_normalizer:
            self.observation_normalizer.load_state_dict(state["observation_normalizer"])
        if self.reward_normalizer:
            self.reward_normalizer.load_state_dict(state["reward_normalizer"])
        begun = (raw != np.frombuffer(saved, raw.dtype).reshape(-1, raw.shape[1])[self.numbers]).any(axis=1)
        begun |= [is_lost(state["envs"]["envs"][number]) for number in self.numbers]  # their observations may be equal
        new = NewEpisodes(self.numbers[begun], raw[begun])
        self.see_new_episodes([new])
        return new

    def see_new_episodes(self, of_ranks: Sequence[NewEpisodes]) -> None:
        """Makes the policy act on the first observations of new episodes. Called on rank 0, with what `load_state_dict`
        of all ranks returned."""
        assert self.observations is not None
        for numbers, raw in of_ranks:
            self.observations[numbers] = self.normalized(raw)
            if self.memory is not None:
                self.memory.array[numbers] = 0.0
            if self.reward_normalizer is not None:
                self.reward_normalizer.begin(numbers)

    def normalizer(self) -> StateDict | None:
        """Returns the state of the observation normaliser, as checkpoints have it; None without one."""
        self._current()
        return self.observation_normalizer.state_dict() if self.observation_normalizer else None

    def use_normalizer(self, state: StateDict) -> None:
        """Evaluates with the normalisers of another env component, whose state this is."""
        if self.observation_normalizer:
            self.observation_normalizer.load_state_dict(state["observation_normalizer"])
        self.observations = self.normalized(self.envs.observations)  # so nothing is counted any more

    def close(self) -> None:
        self.envs.close()
        self.evaluation.close()

    def _metrics(self, rollout: Recording, failures: int) -> dict[str, float]:
        self.recent.add(rollout.episodes)
        metrics = {
            "episode/count": float(len(rollout.episodes)),
            "episode/invalid": float(rollout.invalid.sum()),
            "env/failures": float(failures),
            "perf/env_steps": float(rollout.env_steps),
        }
        return metrics | self.recent.metrics()

    def scaled(self, result: StepResult | DeviceStep, rows: slice, stepped: np.ndarray | None = None) -> Array:
        """Returns normalised rewards of the environments `rows`, after counting those that were `stepped`."""
        if self.reward_normalizer is None:
            return result.rewards
        if stepped is None:
            return self.reward_normalizer(result.rewards, result.ended, rows)
        rewards = np.zeros_like(result.rewards)
        if len(stepped):
            where = rows.start + stepped
            rewards[stepped] = self.reward_normalizer(result.rewards[stepped], result.ended[stepped], where)
        return rewards

    def seen(self, observations: Array, stepped: np.ndarray | None = None) -> Array:
        """Returns normalised observations, after counting those of environments that were `stepped` (None: all)."""
        if self.observation_normalizer is None:
            return observations
        if stepped is None:
            return self.observation_normalizer.count(observations)
        if len(stepped):
            self.observation_normalizer.update(observations[stepped])
        return self.normalized(observations)

    def normalized(self, observations: Array) -> Array:
        if self.observation_normalizer is None or not len(observations):
            return observations
        return self.observation_normalizer(observations)
