"""Tasks of MuJoCo Playground as an environment backend: JAX steps all environments of a process in one call.

`env.backend: rl_platform.envs.embodied.suites.playground:Playground` with `env.kwargs: {task: CartpoleBalance}` and the
time limit of the task in `env.max_episode_steps`. It imports mujoco_playground, which usually needs an interpreter of
its own (`env.python`). Tasks of robots download MuJoCo Menagerie at first use. Not covered: pictures, success,
`action_repeat`, randomised physics (Playground's domain randomisation), exact resume on a GPU, where MuJoCo does not
repeat a step bit for bit.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import cache
from subprocess import CalledProcessError
from typing import TYPE_CHECKING

import numpy as np
from gymnasium.spaces import Box

from rl_platform.envs.embodied.suites.names import check_name
from rl_platform.envs.embodied.suites.packages import installed
from rl_platform.envs.embodied.user_backend import EnvBackend, StepArrays
from rl_platform.errors import ConfigError, Problem

if TYPE_CHECKING:
    import jax
    from ml_collections import ConfigDict
    from mujoco_playground import MjxEnv, State

_Saved = tuple[list[np.ndarray], np.random.Generator]  # the rows of one environment, and what draws its seeds
_DOWNLOAD = 'from mujoco_playground import registry; registry.load("{task}")'


class Playground(EnvBackend):
    """`num_envs` environments of a task. Actions are in [-1, 1], as Playground defines them.

    task: a name of its registry. observation: the part to observe where a task has several, as `privileged_state`.
    options: changes of the task's config, as `ctrl_dt`; a name may have points, as `reward_config.scales.tracking`.
    """

    @classmethod
    def spaces(cls, task: str = "CartpoleBalance", observation: str = "state", **options: object) -> tuple[Box, Box]:
        env = _loaded(task, json.dumps(options))
        size = env.observation_size
        if isinstance(size, dict):
            check_name("observation", observation, size)
            size = size[observation]
        return Box(-np.inf, np.inf, np.broadcast_shapes(size)), Box(-1.0, 1.0, (env.action_size,))

    def __init__(
        self, num_envs: int, task: str = "CartpoleBalance", observation: str = "state", **options: object
    ) -> None:
        env, self._part = _loaded(task, json.dumps(options)), observation
        import jax

        def selected(which: jax.Array, new: State, old: State) -> State:
            """Returns the state of `new` where `which` [N] is set, else that of `old`."""

            def of_leaf(a: jax.Array, b: jax.Array) -> jax.Array:
                return jax.numpy.where(which.reshape(-1, *[1] * (a.ndim - 1)), a, b) if self._has_rows(a) else a

            return jax.tree.map(of_leaf, new, old)

        self._tree, self._select = jax.tree, jax.jit(selected)
        self._begin, self._step = jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step))
        self._random = [np.random.default_rng(index) for index in range(num_envs)]
        self._state = self._begin(np.zeros((num_envs, 2), np.uint32))
        self._exact = jax.default_backend() == "cpu"
        self._host: list[np.ndarray] | None = None
        # compiles here, because the start of a process has a longer limit than a step
        self.step(np.zeros((num_envs, env.action_size), np.float32), np.ones(num_envs, bool))

    def reset(self, which: np.ndarray, seeds: Sequence[int | None]) -> np.ndarray:
        keys = np.zeros((len(self._random), 2), np.uint32)
        chosen = np.zeros(len(keys), bool)
        chosen[which] = True
        for i, seed in zip(which.tolist(), seeds, strict=True):
            if seed is not None:
                self._random[i] = np.random.default_rng(seed)
            keys[i] = self._random[i].integers(2**32, size=2, dtype=np.uint32)
        # all environments are reset, because another number of them would be compiled anew
        self._state, self._host = self._select(chosen, self._begin(keys), self._state), None
        return self._observed()[which]

    def step(self, actions: np.ndarray, idle: np.ndarray) -> StepArrays:
        stepped = self._step(self._state, actions.astype(np.float32))
        self._state, self._host = self._select(~idle, stepped, self._state), None
        ended = np.asarray(self._state.done) > 0.5
        return self._observed(), np.asarray(self._state.reward), ended, np.zeros(len(idle), bool)

    def save(self, index: int) -> _Saved | None:
        if not self._exact:
            return None
        return [leaf[index].copy() for leaf in filter(self._has_rows, self._leaves())], self._random[index]

    def restore(self, index: int, state: _Saved) -> None:
        values, self._random[index] = state
        for leaf, value in zip(filter(self._has_rows, self._leaves()), values, strict=True):
            leaf[index] = value
        self._state = self._tree.unflatten(self._tree.structure(self._state), self._leaves())

    def _leaves(self) -> list[np.ndarray]:
        """Returns copies of the state's arrays in NumPy, made once for all environments that are saved or restored."""
        if self._host is None:
            self._host = [np.array(leaf) for leaf in self._tree.leaves(self._state)]
        return self._host

    def _has_rows(self, leaf: jax.Array | np.ndarray) -> bool:
        """Returns whether each environment has a row: all share scratch memory of MuJoCo Warp, such as contacts."""
        return leaf.ndim > 0 and leaf.shape[0] == len(self._random)

    def _observed(self) -> np.ndarray:
        observed = self._state.obs
        return np.asarray(observed[self._part] if isinstance(observed, dict) else observed)


@cache
def _loaded(task: str, options: str) -> MjxEnv:
    """Returns the task of Playground's registry. options: JSON."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the GPU's memory
    with installed("playground", "env.backend"):
        from mujoco_playground import registry
    check_name("task", task, registry.ALL_ENVS)
    changes, config = json.loads(options), registry.get_default_config(task)
    for name in changes:
        _check_option(name, config)
    try:
        return registry.load(task, config_overrides=changes)
    except (OSError, CalledProcessError) as error:
        message = f"the models of {task} cannot be downloaded ({type(error).__name__}: {error})"
        hint = f"with network: `{sys.executable} -c '{_DOWNLOAD.format(task=task)}'`"
        raise ConfigError([Problem("env.kwargs.task", message, value=task, hint=hint)]) from error


def _check_option(name: str, config: ConfigDict) -> None:
    """Raises ConfigError if the task's config has no such option. name: with points between its parts."""
    for part in name.split("."):
        known = list(config) if hasattr(config, "keys") else []
        check_name(name, part, known)
        config = config[part]
