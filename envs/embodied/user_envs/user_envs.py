"""The environments of a user's backend: checks what it returns, and tries it before a run."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from copy import deepcopy

import numpy as np

from rl_platform.envs.embodied.block import CannotSave
from rl_platform.envs.embodied.descriptions import ENV_ERRORS, EnvDescription, close_env
from rl_platform.envs.embodied.saved_states.env_state import NATIVE, refuse_code
from rl_platform.envs.embodied.spaces import EnvSpaces, read_spaces
from rl_platform.envs.embodied.user_backend import BACKEND, EnvBackend, StepArrays
from rl_platform.errors import CheckpointError, ConfigError
from rl_platform.tracing import recorder
from rl_platform.user_code import raised

_NUMBERS = "real numbers"


class UserEnvs:
    """The environments of a block, stepped by an `EnvBackend`. Has the interface of `NativeEnvs`; none diverges."""

    def __init__(self, description: EnvDescription, spaces: EnvSpaces, num_envs: int) -> None:
        self._name, self._spaces = description.backend, spaces
        assert description.max_episode_steps is not None  # a rule of the config
        self._limit = description.max_episode_steps
        kind = BACKEND.load(self._name)
        try:
            self._backend: EnvBackend = kind(num_envs, **deepcopy(description.kwargs))  # it may change its lists
        except ConfigError:
            raise
        except ENV_ERRORS as error:
            message = f"cannot be built with env.kwargs {description.kwargs}: {raised(error)}"
            raise BACKEND.misfit(self._name, message) from error
        self.diverged = np.zeros(num_envs, bool)
        self._none_idle = np.zeros(num_envs, bool)

    @property
    def success(self) -> np.ndarray | None:
        """The success [N] bool after the latest step; None if the backend has none."""
        success = self._backend.success
        return None if success is None else self._array("the flags success", success, (len(self.diverged),), "bool")

    def reset(self, which: np.ndarray, seeds: Sequence[int | None]) -> np.ndarray:
        """Starts episodes of environments `which` [K]; returns their first observations [K,D]."""
        return self._observations("reset()", self._backend.reset(which, seeds), len(which))

    def step(self, actions: np.ndarray, lengths: np.ndarray, idle: np.ndarray | None = None) -> StepArrays:
        """Returns observations [N,D], rewards, terminated and truncated [N].

        actions: those of the policy; lengths [N]: steps of each episode before this one; idle [N] bool.
        """
        began, count = time.monotonic(), len(lengths)
        if self._spaces.action.kind == "continuous":
            actions = actions.reshape(-1, *self._spaces.action_shape).copy()
        else:
            actions = self._spaces.environment_choices(actions)
        given = self._backend.step(actions, self._none_idle.copy() if idle is None else idle.copy())
        recorder.add("work", "physics", began)
        if not isinstance(given, tuple) or len(given) != 4:
            raise BACKEND.misfit(self._name, "step() returned no tuple (observations, rewards, terminated, truncated)")
        observations, rewards, *ends = given
        terminated, truncated = (
            self._array(f"step(): the flags {name}", end, (count,), "bool")
            for name, end in zip(("terminated", "truncated"), ends, strict=True)
        )
        return (
            self._observations("step()", observations, count),
            self._array("step(): rewards", rewards, (count,), _NUMBERS),
            terminated,
            truncated | (lengths >= self._limit - 1),
        )

    def save(self, index: int) -> bytes:
        """Returns the state of one environment. Raises CannotSave if the backend returns None."""
        state = self._backend.save(index)
        if state is None:
            raise CannotSave(f"save() of {self._name} returns None")
        return NATIVE + pickle.dumps(state)

    def restore(self, index: int, saved: bytes) -> None:
        """Sets environment `index` to a state that `save` returned."""
        self._backend.restore(index, pickle.loads(saved.removeprefix(NATIVE)))

    def close(self) -> None:
        close_env(self._backend, self._name)

    def _observations(self, call: str, given: object, count: int) -> np.ndarray:
        """Returns observations [count,*shape] as [count,D]."""
        shape, kind = (count, *self._spaces.observation_shape), "uint8" if self._spaces.images else _NUMBERS
        return self._array(f"{call}: observations", given, shape, kind).reshape(count, -1)

    def _array(self, what: str, given: object, shape: tuple[int, ...], kind: str) -> np.ndarray:
        """Returns an array of the backend. Raises ConfigError if its shape or type is wrong."""
        array = np.asarray(given)
        if array.shape != shape or not (array.dtype.kind in "fiub" if kind == _NUMBERS else array.dtype == kind):
            message = f"{what} have type {array.dtype} and shape {array.shape}"
            raise BACKEND.misfit(self._name, message, allowed=f"{kind} of shape {shape}")
        return array


def backend_spaces(description: EnvDescription) -> EnvSpaces:
    """Returns the spaces of the user's backend. Raises ConfigError for spaces that no policy can use."""
    import gymnasium

    name = description.backend
    try:
        observation, action = BACKEND.load(name).spaces(**deepcopy(description.kwargs))
    except ConfigError:
        raise
    except ENV_ERRORS as error:
        message = f"spaces() with env.kwargs {description.kwargs} raised {raised(error)}"
        raise BACKEND.misfit(name, message) from error
    env: gymnasium.Env[object, object] = gymnasium.Env()
    env.observation_space, env.action_space = observation, action
    return read_spaces(env, name, "env.backend")


def try_backend(description: EnvDescription) -> EnvSpaces:
    """Simulates two environments for two steps; returns the spaces.

    Raises ConfigError for exceptions, wrong shapes and types, seeds that do not determine an episode, and a restored
    state that continues differently.
    """
    spaces, name = backend_spaces(description), description.backend
    envs = UserEnvs(description, spaces, 2)
    doing = ""
    try:
        doing = "reset()"
        first = envs.reset(np.arange(2), [7, 8]).copy()
        begun = envs.reset(np.array([1]), [7])
        if BACKEND.load(name).episode_seeds and not np.array_equal(first[0], begun[0]):
            raise BACKEND.misfit(name, "reset() begins two episodes of one seed differently", allowed="equal ones")
        actions = np.zeros((2, *spaces.policy_action_shape), spaces.policy_action_dtype)
        if spaces.action.kind == "continuous":
            low, high = (np.asarray(bound, np.float32) for bound in (spaces.action_low, spaces.action_high))
            actions = np.clip(actions, low, high)
        doing = "step()"
        before = np.zeros(2, np.int64)
        _, _, *ends = envs.step(actions, before)
        _ = envs.success
        if len(ended := np.logical_or(*ends).nonzero()[0]):
            doing = "reset()"
            envs.reset(ended, [None] * len(ended))
        doing = "save()"
        state = _saved(envs, name)
        if state is not None:
            doing = "step()"
            idle = np.array([False, True])  # the second episode may end in the first of two steps
            after = [array[0].copy() for array in envs.step(actions, before, idle)]
            doing = "restore()"
            envs.restore(0, state)
            again = [array[0] for array in envs.step(actions, before, idle)]
            if not all(np.array_equal(old, new) for old, new in zip(after, again, strict=True)):
                message = "the step after restore() differs from the step after save()"
                raise BACKEND.misfit(name, message, allowed="equal ones, or None from save()")
    except ConfigError:
        raise
    except ENV_ERRORS as error:
        raise BACKEND.misfit(name, f"{doing} raised {raised(error)}") from error
    finally:
        envs.close()
    return spaces


def _saved(envs: UserEnvs, name: str) -> bytes | None:
    """Returns the state of the first environment; None if it cannot be saved."""
    try:
        state = envs.save(0)
        refuse_code([pickle.dumps((state, 0.0, 0))])
    except CannotSave:
        return None
    except CheckpointError as error:
        allowed = "plain values, arrays and NumPy generators, or None"
        raise BACKEND.misfit(name, f"save(): {error}", allowed=allowed) from error
    return state
