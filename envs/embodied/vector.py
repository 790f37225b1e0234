"""Vectorised environments: N copies of a Gymnasium environment, stepped in this process or in worker processes.

An episode that ends is reset in the same step. The result has the first observation of the next episode and the last
one of the ended episode. The learner bootstraps from the value of the latter if the episode was truncated. Numbers that
are not finite never leave this module: the episode ends and is marked invalid.

Not covered: normalisation (`normalize.py`) and evaluation (`evaluate.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl_platform.envs.embodied.block import EnvBlock, EnvFailure, failure, is_lost
from rl_platform.envs.embodied.buffers import Buffers, all_finite
from rl_platform.envs.embodied.descriptions import (
    EnvDescription,
    EnvSetup,
    closing_env,
    find_spec,
    make_env,
    warned_of_closing,
)
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces, read_spaces
from rl_platform.envs.embodied.stepping import user_spaces, workers_class
from rl_platform.envs.embodied.success import Success, success_of
from rl_platform.errors import CheckpointError, Diverged
from rl_platform.placement.inventory import cpu_count
from rl_platform.tracing import recorder

if TYPE_CHECKING:
    import torch
    from gymnasium.envs.registration import EnvSpec

    from rl_platform.envs.embodied.mujoco.device_step import DeviceEnvs
    from rl_platform.envs.embodied.processes.workers import EnvWorkers
    from rl_platform.records import StateDict


@dataclass(frozen=True)
class EpisodeStats:
    """A finished episode: the sum of its raw rewards, its number of steps, its success (None: not reported).

    terminated: it reached a terminal state, otherwise a limit of steps ended it.
    """

    env_index: int
    return_: float
    length: int
    success: Success | None = None
    terminated: bool = False


class StepResult(NamedTuple):
    """One step of N environments with D observation numbers. The arrays are copies. A tuple, as it is quick to create.

    observations [N,D] float32, or uint8 of images: input of the next actions, from a new episode where one ended.
    rewards [N] float64: raw. terminated, truncated [N] bool. ended [N] bool: either of them, a new episode has begun.
    invalid [N] bool: the environment returned a number that is not finite, its physics diverged, or it was replaced.
    The episode ended (truncated is set too), its reward is 0 and `episodes` does not have it.
    final_observations [K,D], of the same type: last observations of the K episodes that ended, in order of environment;
    of an invalid episode the last finite observation.
    episodes: the valid episodes that ended, in order of environment.
    failures: environments that raised, hung or died since the last result and were replaced.
    """

    observations: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    ended: np.ndarray
    invalid: np.ndarray
    final_observations: np.ndarray
    episodes: list[EpisodeStats]
    failures: int = 0


class VectorEnv:
    """N environments of one kind.

    num_workers: 0 steps them in this process, otherwise that many processes, or connections to servers, have equal
    shares, in order; external environments have at least one. Only workers have a deadline: an environment that hangs
    in this process blocks it. After any error the environments are closed.
    `native`: batched physics steps the environments, and a reset leaves no state of earlier episodes.

    stages: equal parts of the environments, each stepped without waiting for the others; `rows` are their slices of N.
    Their number divides the number of environments and of workers, if there are any.

    restarts: the most replacements of environments that raise and workers that hang or die; the next error is raised.
    numbers: the environments' numbers in the run, which determine their tasks; empty: from 0.
    """

    def __init__(
        self,
        description: EnvDescription,
        num_envs: int,
        num_workers: int = 0,
        step_timeout_s: float = 60.0,
        render_mode: str | None = None,
        worker_variables: Mapping[str, str] | None = None,
        stages: int = 1,
        restarts: int = 0,
        numbers: Sequence[int] = (),
    ) -> None:
        """Builds the environments with `render_mode`; `worker_variables` are environment variables of the workers.

        Raises ConfigError for an unknown id and unusable arguments or spaces.
        """
        external = description.external
        num_workers = max(num_workers, 1) if external else num_workers
        assert 0 <= num_workers <= num_envs
        self.description = description
        self.num_envs = num_envs
        self._seed = 0
        self._steps = 0
        self._under_way = [False] * stages
        self.rows = [slice(first, last) for first, last in pairwise(_shares(num_envs, stages))]
        spec = None if description.own_backend or external else find_spec(description)
        if external:
            self.spaces = inspect_env(description).spaces
        else:
            self.spaces = user_spaces(description) if spec is None else _spaces_of(description, spec)
        # one row per environment: clipping to broadcast bounds takes twice as long
        self._low = np.tile(np.asarray(self.spaces.action_low, np.float32), (num_envs, 1))
        self._high = np.tile(np.asarray(self.spaces.action_high, np.float32), (num_envs, 1))
        self._blocks: list[EnvBlock] = []
        self._workers: EnvWorkers | None = None
        self.native, self._closed, self._failures = False, False, 0
        self._unseen = np.zeros(num_envs, bool)  # whose next step is invalid, as in the run that saved them
        setup = EnvSetup(description, spec, self.spaces, numbers or range(num_envs), render_mode, restarts)
        self._bounds = _shares(num_envs, num_workers or stages)
        if num_workers == 0:
            self._buffers = Buffers(num_envs, self.spaces)
            shares = enumerate(pairwise(self._bounds))
            self._blocks = [EnvBlock(setup, self._buffers, *share, index, cpu_count()) for index, share in shares]
            self.native = self._blocks[0].native
        else:
            workers = workers_class(description)
            self._workers = workers(setup, self._bounds, step_timeout_s, worker_variables or {})
            self._buffers = self._workers.buffers
            with self._closing_on_error():
                self._workers.wait_for_start()

        buffers = self._buffers
        buffers.not_closed |= warned_of_closing(description.id)  # of the one that was built for its spaces
        results = buffers.observations, buffers.rewards, buffers.terminated, buffers.truncated, buffers.invalid
        self._results = [[array[rows] for array in results] for rows in self.rows]  # of each stage
        self._no_finals = buffers.final_observations[:0]

    @property
    def action_space(self) -> ActionSpace:
        return self.spaces.action

    @property
    def observation_shape(self) -> tuple[int, ...]:
        return (self.spaces.observation_size,)

    @property
    def observations(self) -> np.ndarray:
        """A copy of the current observations [N,D], float32, or uint8 of images."""
        return self._buffers.observations.copy()

    @property
    def worker_pids(self) -> list[int]:
        return self._workers.pids if self._workers else []

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Starts an episode in every environment, each with its own seed. Returns observations [N,D]."""
        assert len(seeds) == self.num_envs, f"{len(seeds)} seeds for {self.num_envs} environments"
        seeds = [int(seed) for seed in seeds]
        self._seed_with(seeds[0], 0)
        self._unseen[:] = False
        self._call("reset", seeds)
        return self.observations

    def step(self, actions: np.ndarray) -> StepResult:
        """Calls `send` and `receive`."""
        self.send(actions)
        return self.receive()

    def send(self, actions: np.ndarray, stage: int = 0, idle: np.ndarray | None = None) -> None:
        """Starts a step of one stage. Workers step at once; without workers `receive` steps.

        actions [N,A] floats, clipped here to the bounds of the action space, or [N] or [N,D] integers, for the stage's
        environments; idle [N] bool: environments that are not stepped and get no reward. Raises Diverged for actions
        that are not finite.
        """
        assert not self._under_way[stage], "receive() the running step first"
        rows = self.rows[stage]
        if self.spaces.action.kind == "continuous":
            clipped = self._buffers.actions[rows]
            # faster than np.clip, with equal results
            np.minimum(np.maximum(actions, self._low[rows], out=clipped), self._high[rows], out=clipped)
            if not all_finite(actions):
                bad = (np.flatnonzero(~np.isfinite(actions).all(axis=1)) + rows.start).tolist()
                raise Diverged(f"the policy's actions for environments {bad} ({self.description.id}) are not finite")
        else:
            self._buffers.actions[rows] = actions
        self._buffers.idle[rows] = self._unseen[rows] if idle is None else idle | self._unseen[rows]
        self._under_way[stage] = True
        if self._workers:
            with self._closing_on_error():
                self._workers.send_step(self._part(stage))

    def receive(self, stage: int = 0) -> StepResult:
        """Returns the result of the step that `send` started; N is the number of environments of the stage.

        Raises WorkerDied or Deadline, both with environment and worker, or WorkerError with a traceback.
        """
        assert self._under_way[stage], "send() actions first"
        assert not self._closed, f"the environments ({self.description.id}) are closed"
        try:  # `_closing_on_error` here would add 5 % to the time after a step
            if self._workers:
                began = time.monotonic()
                self._workers.finish_step(self._part(stage))
                recorder.add("work", "physics", began)
            else:
                for index in self._part(stage):
                    self._blocks[index].step()
        except BaseException:
            with self._closing_on_error():
                raise
        self._under_way[stage] = False
        self._steps += 1
        buffers = self._buffers
        if np.count_nonzero(unseen := self._unseen[self.rows[stage]]):
            buffers.truncated[self.rows[stage]] |= unseen
            buffers.invalid[self.rows[stage]] |= unseen
            unseen[:] = False  # a view
        observations, rewards, terminated, truncated, invalid = [array.copy() for array in self._results[stage]]
        ended = terminated | truncated
        which, finals, episodes = ended.nonzero()[0], self._no_finals, []
        if len(which):
            which += self.rows[stage].start
            finals, episodes = buffers.final_observations[which], self._episodes(which)
        failures = self._failures
        if not self.native or self.description.own_backend:  # MuJoCo's batch never fails alone
            self._failures = int(buffers.failures.sum())
        since = self._failures - failures
        return StepResult(observations, rewards, terminated, truncated, ended, invalid, finals, episodes, since)

    @property
    def device(self) -> torch.device | None:
        """The device on which these environments can be stepped with tensors (`to_device`); None: on none."""
        return self._blocks[0].device if len(self._blocks) == 1 else None

    def to_device(self, steps: int) -> DeviceEnvs:
        """Returns the environments as tensors of `device`, for a rollout of `steps` steps, with equal results."""
        assert not any(self._under_way), "receive() the running step first"
        with self._closing_on_error():
            envs = self._blocks[0].to_device(self._low, self._high, steps)
        self._steps += steps
        return envs

    def _episodes(self, ended: np.ndarray) -> list[EpisodeStats]:
        """Returns the valid episodes of environments `ended` (indices)."""
        buffers = self._buffers
        return [
            EpisodeStats(
                i,
                float(buffers.returns[i]),
                int(buffers.lengths[i]),
                success_of(buffers.success_once[i], buffers.success_at_end[i]),
                bool(buffers.terminated[i]),
            )
            for i in ended.tolist()
            if not buffers.invalid[i]
        ]

    def render(self) -> np.ndarray:
        """Returns a frame of the first environment, [height,width,3] uint8; needs render_mode="rgb_array"."""
        with self._closing_on_error():
            return self._workers.render() if self._workers else self._blocks[0].render()

    def state_dict(self) -> StateDict:
        """Returns the state to continue bit for bit, in types that `torch.load(weights_only=True)` accepts.

        The number of workers may change between runs, the environments may not. A warning names an environment that
        cannot be saved; a resumed run starts a new episode for it. `unseen` has the environments of replaced workers
        whose first observations no step has returned yet.
        """
        assert not any(self._under_way), "receive() the running step first"
        envs = self._call("save")  # first, because replaced environments may have to start
        unseen = {*self._unseen.nonzero()[0].tolist(), *(self._workers.unseen() if self._workers else ())}
        return {
            "id": self.description.id,
            "num_envs": self.num_envs,
            "seed": self._seed,
            "steps": self._steps,
            "observations": self._buffers.observations.tobytes(),
            "envs": envs,
            "unseen": sorted(i for i in unseen if not is_lost(envs[i])),  # a resumed run resets those that are lost
        }

    def load_state_dict(self, state: StateDict, chosen: Sequence[int] | None = None) -> np.ndarray:
        """Continues from `state_dict()`, or from its environments `chosen`. Drops a step that is under way.

        Returns observations [N,D]. Raises CheckpointError if the state is of other environments.
        """
        count = self.num_envs if chosen is None else state["num_envs"]
        for name, ours in (("id", self.description.id), ("num_envs", count)):
            if state[name] != ours:
                raise CheckpointError(
                    f"the checkpoint's environments have {name} {state[name]!r}, the config's {ours!r}"
                )
        for stage, under_way in enumerate(self._under_way):
            if under_way:
                self.receive(stage)
        self._seed_with(state["seed"], state["steps"])
        which = list(range(count) if chosen is None else chosen)
        self._unseen[:] = np.isin(which, state.get("unseen", ()))  # older checkpoints have none
        restart_seeds = np.random.SeedSequence([self._seed, self._steps]).generate_state(count)[which].tolist()
        dtype = self._buffers.observations.dtype
        self._buffers.observations[:] = np.frombuffer(state["observations"], dtype).reshape(count, -1)[which]
        self._call("restore", [state["envs"][index] for index in which], restart_seeds)
        return self.observations

    def warned_as(self, others: VectorEnv) -> None:
        """Logs no more what `others` have logged: an invalid step, an error of close()."""
        self._buffers.warned |= others._buffers.warned.any()
        self._buffers.not_closed |= others._buffers.not_closed.any()

    def close(self) -> None:
        """Ends the worker processes and closes the environments. May be called twice."""
        self._closed = True
        if self._workers:
            self._workers.close()
        for block in self._blocks:
            block.close()
        self._blocks.clear()

    def _seed_with(self, seed: int, steps: int) -> None:
        self._seed, self._steps = seed, steps
        if self._workers:
            self._workers.seed = seed

    def _call(self, method: str, *per_env: Sequence[object]) -> list[Any]:
        """Calls a method of every EnvBlock with its part of each list and returns the joined results."""
        with self._closing_on_error():
            if self._workers:
                return self._workers.call(method, *per_env)
            shares = [[values[first:last] for values in per_env] for first, last in pairwise(self._bounds)]
            parts = [getattr(block, method)(*share) for block, share in zip(self._blocks, shares, strict=True)]
            return [value for part in parts for value in part or ()]

    def _part(self, stage: int) -> range:
        """Returns the indices of the blocks or workers of a stage."""
        size = (len(self._bounds) - 1) // len(self.rows)
        return range(stage * size, (stage + 1) * size)

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Closes everything if the body raises. Converts an EnvFailure to a WorkerError."""
        assert not self._closed, f"the environments ({self.description.id}) are closed"
        try:
            yield
        except EnvFailure as error:
            self.close()
            raise failure(error.env_index, self.description.id, error.doing, error.details) from error
        except BaseException:
            self.close()
            raise


def _spaces_of(description: EnvDescription, spec: EnvSpec) -> EnvSpaces:
    with closing_env(make_env(description, spec), description.id) as probe:
        return read_spaces(probe, description.id)


def _shares(total: int, parts: int) -> list[int]:
    """Returns the bounds of `parts` equal shares of `total`, [parts + 1]."""
    bounds: list[int] = np.linspace(0, total, parts + 1).astype(int).tolist()
    return bounds
