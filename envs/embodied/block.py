"""A block of environments that one process steps: the learner's process or a worker.

Gymnasium's MuJoCo tasks (`native.py`) and backends of users (`user_envs.py`) step all environments in one call.
Other environments are stepped one after the other. Not covered: the transport of actions and results, see `vector.py`
and `workers.py`.
"""

from __future__ import annotations

import logging
import pickle
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rl_platform.envs.embodied.adapter import reset_env
from rl_platform.envs.embodied.buffers import Buffers, all_finite
from rl_platform.envs.embodied.descriptions import ENV_ERRORS, EnvSetup, close_env
from rl_platform.envs.embodied.spares import Spares
from rl_platform.envs.embodied.step_results import (
    WrongResult,
    check_exact,
    flag_of,
    interface_hint,
    picture_of,
    reward_of,
)
from rl_platform.envs.embodied.stepping import native_envs, stop_timers, user_envs
from rl_platform.envs.embodied.success import SuccessCount
from rl_platform.errors import WorkerError
from rl_platform.extras import find
from rl_platform.tracing import recorder

if TYPE_CHECKING:
    import torch

    from rl_platform.envs.embodied.mujoco.device_step import DeviceEnvs
    from rl_platform.envs.embodied.mujoco.native import NativeEnvs
    from rl_platform.envs.embodied.spaces import AnyEnv
    from rl_platform.envs.embodied.user_envs.user_envs import UserEnvs

STATES = "rl_platform.envs.embodied.saved_states"  # an extra
logger = logging.getLogger(__name__)


class EnvFailure(Exception):
    """Environment `env_index` raised; `details` is its traceback."""

    def __init__(self, env_index: int, doing: str, details: str) -> None:
        super().__init__(env_index, doing, details)
        self.env_index = env_index
        self.doing = doing
        self.details = details

    def __str__(self) -> str:
        return f"environment {self.env_index} failed in {self.doing}: {self.details.rstrip().splitlines()[-1]}"


class NotFinite(Exception):
    """The first observation of an episode has NaN or infinity."""


class CannotSave(Exception):
    """An environment holds something that cannot be saved; the message names it."""


class EnvBlock:
    """Environments first..last-1 of `setup`, stepped in order, or in `threads` threads if `NativeEnvs` can step them.

    worker: the index of this block in `buffers.busy`. Every method may raise EnvFailure.
    """

    def __init__(self, setup: EnvSetup, buffers: Buffers, first: int, last: int, worker: int, threads: int) -> None:
        description, spaces = setup.description, setup.spaces
        self._native: NativeEnvs | UserEnvs | None = None
        self._envs: list[AnyEnv] = []
        if description.own_backend:
            self._native = user_envs(description, spaces, last - first)
        else:
            env = setup.make(first)
            if not description.tasks:
                self._native = native_envs(env, last - first, threads, description.backend)
            stop_timers()
            others = range(first + 1, last) if self._native is None else ()
            self._envs = [env, *(setup.make(index) for index in others)]
        self.native = self._native is not None
        self._first, self._id = first, description.id
        self._spaces = spaces
        rows = slice(first, last)
        self._busy = buffers.busy[worker : worker + 1]
        self._actions = buffers.actions[rows]
        self._observations = buffers.observations[rows]
        self._finals = buffers.final_observations[rows]
        self._may_be_infinite = self._finals[:, : 0 if spaces.images else None]  # pixels are always finite
        self._rewards = buffers.rewards[rows]
        self._terminated = buffers.terminated[rows]
        self._truncated = buffers.truncated[rows]
        self._invalid = buffers.invalid[rows]
        self._idle = buffers.idle[rows]
        self._warned = buffers.warned  # of all blocks
        self._warned[rows] |= setup.render_mode is not None  # a drawing repeats an evaluation
        self._not_closed = buffers.not_closed
        self._ended_returns = buffers.returns[rows]
        self._ended_lengths = buffers.lengths[rows]
        self._returns = np.zeros(last - first)
        self._warned_of_saving = False
        self._lengths = np.zeros(last - first, np.int64)
        self._spares = Spares(setup, buffers.failures, first, self._lengths)
        self._success = SuccessCount(buffers.success_once[rows], buffers.success_at_end[rows])
        self._some_ended = False
        # views in the environments' shape, so that assignments flatten
        self._shaped_observations = self._observations.reshape(-1, *spaces.observation_shape)
        self._shaped_finals = self._finals.reshape(-1, *spaces.observation_shape)
        self._find_physics_failures()

    def reset(self, seeds: list[int]) -> None:
        """Starts an episode in every environment, with its entry of `seeds`."""
        self._spares.seeds = list(seeds)
        self._reset(np.arange(len(seeds)), seeds)

    def step(self) -> None:
        """Steps all environments that are not idle, with the actions in the buffers, and resets ended episodes."""
        idle = self._idle if np.count_nonzero(self._idle) else None
        if self._native is not None:
            self._step_all(self._native, idle)
        else:
            self._step_each(idle)
        if self._some_ended:
            ended = (self._terminated | self._truncated).nonzero()[0]
            self._ended_returns[ended] = self._returns[ended]
            self._ended_lengths[ended] = self._lengths[ended]
            self._success.end(ended)
            self._spares.ended(ended[~self._invalid[ended]])
            self._reset(ended, [self._spares.seed_of_new(i) for i in ended.tolist()])

    @property
    def device(self) -> torch.device | None:
        """The device on which these environments can be stepped with tensors (`to_device`); None: on none."""
        return getattr(self._native, "device", None)

    def to_device(self, low: np.ndarray, high: np.ndarray, steps: int) -> DeviceEnvs:
        """Returns the environments for a rollout on `device`; see `VectorEnv.to_device`."""
        running = (self._observations, self._returns, self._lengths)
        return cast("NativeEnvs", self._native).to_device(running, (low, high), steps)

    def _step_all(self, native: NativeEnvs | UserEnvs, idle: np.ndarray | None) -> None:
        self._busy[0] = self._first
        try:
            given = native.step(self._actions, self._lengths, idle)
        except ENV_ERRORS as error:
            failed = getattr(error, "ids", (0,))[0]  # MuJoCo's batch reports which
            raise EnvFailure(self._first + int(failed), "step", traceback.format_exc()) from error
        self._finals[:], self._rewards[:], self._terminated[:], self._truncated[:] = given
        if (success := native.success) is not None:
            self._success.step_all(success, self._idle)
        self._finish_step(native.diverged, idle)

    def _step_each(self, idle: np.ndarray | None) -> None:
        """Steps one environment after the other."""
        began = time.monotonic()
        if self._spaces.action.kind == "continuous":
            actions = list(self._actions.reshape(-1, *self._spaces.action_shape).copy())
        else:
            actions = list(self._spaces.environment_choices(self._actions))
        busy, first = self._busy, self._first
        results: list[tuple[int, Any]] = []
        for i, env in enumerate(self._envs):
            if idle is None or not idle[i]:
                busy[0] = first + i
                try:
                    results.append((i, env.step(actions[i])))
                except ENV_ERRORS as error:
                    results.append((i, error))
        # not between the steps, which displace this code and its data from the processor's caches
        terminated, truncated, rewards = self._terminated, self._truncated, self._rewards
        finals, success = self._shaped_finals, self._success
        for i, result in results:
            try:
                if isinstance(result, BaseException):
                    raise result
                observation, reward, ended, cut, info = result
                self._check_observation(i, observation, "step")
                finals[i] = observation
                rewards[i] = reward if type(reward) is float else reward_of(reward)
                terminated[i] = ended if type(ended) is bool else flag_of("terminated", ended)
                truncated[i] = cut if type(cut) is bool else flag_of("truncated", cut)
                success.step(i, info)
            except EnvFailure:
                raise
            except WrongResult as error:
                raise EnvFailure(first + i, "step", str(error)) from error
            except ENV_ERRORS as error:
                self._replace(i, "step", error)
                rewards[i] = np.nan  # which makes the step invalid
        recorder.add("work", "physics", began)
        self._finish_step(None, idle)

    def _finish_step(self, diverged: np.ndarray | None, idle: np.ndarray | None) -> None:
        """Turns what the environments returned into the step's results. diverged [N] bool: of native environments."""
        if idle is not None:  # they keep their last observation and get no reward
            self._finals[idle] = self._observations[idle]
            self._rewards[idle] = 0.0
            self._terminated[idle] = self._truncated[idle] = False
        self._invalidate(diverged)
        self._returns += self._rewards
        self._lengths += 1 if idle is None else ~idle
        self._observations[:] = self._finals
        self._some_ended = bool(np.count_nonzero(self._terminated) or np.count_nonzero(self._truncated))

    def _replace(self, i: int, doing: str, error: BaseException) -> None:
        """Replaces environment i, which raised `error`."""
        self._count(i, doing, error)
        try:
            self._envs[i] = self._spares.replacement(i, self._envs[i])
        except ENV_ERRORS as reason:
            raise EnvFailure(self._first + i, doing, traceback.format_exc()) from reason
        self._find_physics_failures()

    def _count(self, i: int, doing: str, error: BaseException) -> None:
        """Counts a failure of environment i. Raises EnvFailure if it ends the run."""
        if ending := self._spares.count(i, doing, error):
            details = "".join(traceback.format_exception(error)) if error.__traceback__ else f"{error}\n"
            raise EnvFailure(self._first + i, doing, details + ending + interface_hint(error)) from error

    def _check_observation(self, i: int, observation: Any, doing: str) -> None:
        """Raises EnvFailure for a wrong shape, which NumPy would broadcast silently, and for pixels that are no uint8,
        which it would wrap."""
        expected = self._spaces.observation_shape
        if np.shape(observation) != expected:
            message = f"an observation of shape {np.shape(observation)}; its observation_space has shape {expected}"
            raise EnvFailure(self._first + i, doing, message)
        if self._spaces.images and getattr(observation, "dtype", None) != np.uint8:
            try:
                check_exact(observation, np.dtype(np.uint8), "an image")
            except WrongResult as error:
                raise EnvFailure(self._first + i, doing, str(error)) from error

    def _find_physics_failures(self) -> None:
        self._physics_failures = [counters for env in self._envs if (counters := _physics_failures(env)) is not None]

    def _invalidate(self, diverged: np.ndarray | None) -> None:
        """Ends episodes whose last step returned a number that is not finite or whose physics was reset."""
        invalid = self._invalid
        if diverged is not None:
            invalid[:] = diverged
        elif self._physics_failures:
            invalid[:] = np.concatenate(self._physics_failures).reshape(len(invalid), -1).any(axis=1)
        else:
            invalid[:] = False
        if not (all_finite(self._may_be_infinite) and all_finite(self._rewards)):
            invalid |= ~(np.isfinite(self._finals).all(axis=1) & np.isfinite(self._rewards))
        if np.count_nonzero(invalid):
            self._warn_of_invalid()
            self._finals[invalid] = self._observations[invalid]
            self._rewards[invalid] = 0.0
            self._terminated[invalid] = False
            self._truncated[invalid] = True

    def _warn_of_invalid(self) -> None:
        """Logs once why a step is invalid. Environments that raised are left out: `Spares.count` logs them."""
        for i in self._invalid.nonzero()[0].tolist():
            if self._warned.any() or self._spares.is_new(i):
                continue
            self._warned[self._first + i] = True
            reason = "its physics diverged"
            if not np.isfinite(self._rewards[i]):
                reason = f"its reward is {self._rewards[i]}"
            elif not np.isfinite(self._finals[i]).all():
                reason = f"its observation has {_not_finite(self._shaped_finals[i])}"
            message = "%s: %s in step %d of an episode. Such episodes end; episode/invalid counts them"
            logger.warning(message, self._spares.named(i), reason, self._lengths[i] + 1)

    def _reset(self, which: np.ndarray, seeds: Sequence[int | None]) -> None:
        """Starts episodes of environments `which`; a seed of None keeps an environment's random state.

        An environment that raises is replaced, and so is one whose first observation is not finite. Environments of one
        simulation are reset again instead.
        """
        i = int(which[0])
        try:
            if self._native is not None:
                self._busy[0] = self._first + i
                self._reset_all(self._native, which, seeds)
            else:
                for i, seed in zip(which.tolist(), seeds, strict=True):
                    self._busy[0] = self._first + i
                    while (problem := self._begin(i, seed)) is not None:
                        self._replace(i, "reset", problem)
                        seed = self._spares.seed_of_new(i)
        except EnvFailure:
            raise
        except ENV_ERRORS as error:
            raise EnvFailure(self._first + i, "reset", traceback.format_exc()) from error
        self._spares.begun(which)
        self._returns[which] = 0.0
        self._lengths[which] = 0
        self._success.begin(which)

    def _reset_all(self, native: NativeEnvs | UserEnvs, which: np.ndarray, seeds: Sequence[int | None]) -> None:
        """Starts episodes in one call, and again where the first observation is not finite."""
        self._observations[which] = native.reset(which, seeds)
        while not (self._spaces.images or all_finite(self._observations[which])):
            which = which[~np.isfinite(self._observations[which]).all(axis=1)]
            for i in which.tolist():
                self._count(i, "reset", self._first_not_finite(i))
            self._observations[which] = native.reset(which, [self._spares.seed_of_new(i) for i in which.tolist()])

    def _begin(self, i: int, seed: int | None) -> BaseException | None:
        """Starts an episode of environment i. Returns what it raised, or that its observation is not finite."""
        try:
            observation = reset_env(self._envs[i], seed)
        except WrongResult as error:
            raise EnvFailure(self._first + i, "reset", str(error)) from error
        except ENV_ERRORS as error:
            return error
        self._check_observation(i, observation, "reset")
        self._shaped_observations[i] = observation
        return None if self._spaces.images or all_finite(self._observations[i]) else self._first_not_finite(i)

    def _first_not_finite(self, i: int) -> NotFinite:
        return NotFinite(f"the first observation has {_not_finite(self._shaped_observations[i])}")

    def render(self) -> np.ndarray:
        """Returns a frame of the first environment, [height,width,3] uint8."""
        try:
            return picture_of(self._envs[0].render())
        except WrongResult as error:
            raise EnvFailure(self._first, "render", str(error)) from error
        except ENV_ERRORS as error:
            raise EnvFailure(self._first, "render", traceback.format_exc()) from error

    def save(self) -> list[bytes]:
        """Returns the state of each environment and its running episode."""
        states: list[bytes] = []
        lost: dict[int, CannotSave] = {}
        save = find(STATES, "env_state.save", _cannot_save)
        for i in range(len(self._lengths)):
            try:
                state = self._native.save(i) if self._native is not None else save(self._envs[i])
            except CannotSave as error:
                state, lost[i] = None, error
            episode = float(self._returns[i]), int(self._lengths[i]), self._success.save(i)
            states.append(pickle.dumps((state, *episode, self._spares.seeds[i], int(self._spares.replaced[i]))))
        if lost and not self._warned_of_saving:  # long steps save after each one
            self._warned_of_saving = True
            first, reason = next(iter(lost.items()))
            others = f" and {len(lost) - 1} others" if len(lost) > 1 else ""
            message = "environment %d%s cannot be saved, a resumed run restarts these episodes: %s"
            logger.warning(message, self._first + first, others, reason)
        return states

    def restore(self, states: list[bytes], restart_seeds: list[int]) -> None:
        """Continues from `save`. An environment that could not be saved starts an episode with its restart seed.

        The caller restores the observations, except those of restarted environments, which are set here.
        """
        self._spares.seeds = list(restart_seeds)
        for i, saved in enumerate(states):
            state, returned, length, success, *replaced = pickle.loads(saved)
            if state is None:
                self._reset(np.array([i]), [restart_seeds[i]])
                continue
            try:
                if self._native is not None:
                    self._native.restore(i, state)
                else:
                    find(STATES, "env_state.restore", _cannot_save)(self._envs[i], state)
            except ENV_ERRORS as error:
                raise EnvFailure(self._first + i, "restore", traceback.format_exc()) from error
            self._returns[i], self._lengths[i] = returned, length
            self._success.restore(i, success)
            if replaced:  # checkpoints of before have none
                self._spares.seeds[i], self._spares.replaced[i] = replaced

    def close(self) -> None:
        if self._native is not None:
            self._native.close()
        for env in self._envs:
            close_env(env, self._id, self._not_closed)


def is_lost(saved: bytes) -> bool:
    """Returns whether the environment of a state of `EnvBlock.save` could not be saved."""
    return pickle.loads(saved)[0] is None


def _not_finite(observation: np.ndarray) -> str:
    """Returns the first number that is not finite, its place, and the number of others."""
    places = np.argwhere(~np.isfinite(observation)).tolist()
    others = f" and at {len(places) - 1} more" if len(places) > 1 else ""
    return f"{observation[tuple(places[0])]} at {places[0]}{others} of shape {observation.shape}"


def _cannot_save(env: AnyEnv, *state: bytes) -> bytes:
    raise CannotSave(f"{STATES} is not installed")


def _physics_failures(env: AnyEnv) -> np.ndarray | None:
    """Returns a view of MuJoCo's counters of bad states that it has reset; None for other environments."""
    data = getattr(env.unwrapped, "data", None)
    mujoco = sys.modules.get("mujoco")
    if mujoco is None or not isinstance(data, mujoco.MjData):
        return None
    counters: np.ndarray = data.warning.number[3:6]  # BADQPOS, BADQVEL, BADQACC
    return counters


def failure(env_index: int, env_id: str, doing: str, details: str) -> WorkerError:
    """Returns the error for an environment that raised; `details` is its traceback."""
    return WorkerError(f"environment {env_index} ({env_id}) failed in {doing}:\n{details}")
