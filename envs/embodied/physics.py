"""Many simulations of one MuJoCo model, stepped in native threads.

`BatchedPhysics` is MuJoCo's own batch: its threads never meet Python, and simulations share a few working memories, so
cheap models stay in the cache. `ThreadedPhysics` keeps a memory per simulation and steps it from Python threads, which
MuJoCo lets run side by side; it can do between steps what the batch cannot, contact forces of bodies, and works where
MuJoCo (before version 4) has no batch. Both give the same numbers, those of `mj_step`, for any number of threads, and
both save a simulation as the same row of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol

import mujoco
import numpy as np

from rl_platform.envs.embodied.mujoco_tasks.base import Quantities

try:
    from mujoco.batch import Batch
except ImportError:  # MuJoCo 3
    Batch = None

_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
# Counters of states that MuJoCo found bad and restarted by itself, which nothing else tells.
_BAD_STATES = slice(int(mujoco.mjtWarning.mjWARN_BADQPOS), int(mujoco.mjtWarning.mjWARN_BADQACC) + 1)


class Physics(Protocol):
    """N simulations. `now`: their `qpos`, `qvel`, `time` and the fields asked for, as the last call left them;
    `warnings` [N,3]: how often since its reset MuJoCo could not go on from a state and started over by itself."""

    now: Quantities

    @property
    def warnings(self) -> np.ndarray: ...

    def step(self, actions: np.ndarray, which: np.ndarray | None = None) -> None:
        """`frame_skip` steps of simulations `which` (None: all) under controls [N,A]."""

    def reset(self, which: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        """Start simulations `which` [K] anew at qpos [K,nq], qvel [K,nv]."""

    def squares(self) -> float:
        """At least the sum of squares of `qpos` and `qvel`; NaN or infinite if one of them is."""

    def save(self, index: int) -> np.ndarray:
        """All that the future of one simulation depends on, [state] float64."""

    def restore(self, index: int, state: np.ndarray) -> None:
        """Continue one simulation from `save`. `now` follows with the next step."""

    def close(self) -> None:
        """End the threads."""


def make_physics(
    model: mujoco.MjModel, frame_skip: int, num_envs: int, threads: int, fields: Sequence[str]
) -> BatchedPhysics | ThreadedPhysics:
    """The faster of the two that can compute `fields`."""
    kind = ThreadedPhysics if Batch is None or "cfrc_ext" in fields else BatchedPhysics
    return kind(model, frame_skip, num_envs, threads, fields)


def is_covered(model: mujoco.MjModel) -> bool:
    """Whether the future of a simulation depends on nothing but its saved state."""
    # bodies that sleep and some solvers keep books of their own, and so may plugins
    bits = [getattr(mujoco.mjtEnableBit, name, 0) for name in ("mjENBL_SLEEP", "mjENBL_IPC")]
    return model.nplugin == 0 and not any(model.opt.enableflags & int(bit) for bit in bits)


class BatchedPhysics:
    """MuJoCo's batch (version 4). It cannot compute `cfrc_ext`."""

    def __init__(
        self, model: mujoco.MjModel, frame_skip: int, num_envs: int, threads: int, fields: Sequence[str]
    ) -> None:
        self._batch: Any = Batch(model, num_envs, min(threads, num_envs))
        self._frame_skip = frame_skip
        self._ctrl = self._batch.bind("ctrl")
        self._state = self._batch.state.reshape(-1)
        self.warnings: np.ndarray = self._batch.warning[:, _BAD_STATES, 1]
        self.now = Quantities({name: self._batch.bind(name) for name in ("qpos", "qvel", "time", *fields)})

    def step(self, actions: np.ndarray, which: np.ndarray | None = None) -> None:
        if which is None:
            self._ctrl[:] = actions
        else:
            self._ctrl[which] = actions[which]
        self._batch.step(which, self._frame_skip)

    def reset(self, which: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        self._batch.reset(which, stage=mujoco.mjtStage.mjSTAGE_NONE)
        self.now.qpos[which], self.now.qvel[which] = qpos, qvel
        self._batch.forward(which)

    def squares(self) -> float:
        return float(self._state @ self._state)

    def save(self, index: int) -> np.ndarray:
        state: np.ndarray = self._batch.state[index].copy()
        return state

    def restore(self, index: int, state: np.ndarray) -> None:
        self._batch.reset([index], stage=mujoco.mjtStage.mjSTAGE_NONE)  # clears its warnings
        self._batch.state[index] = state

    def close(self) -> None:
        pass  # the batch ends its threads with itself


class ThreadedPhysics:
    """One MuJoCo data per simulation, stepped by whichever Python thread is free."""

    def __init__(
        self, model: mujoco.MjModel, frame_skip: int, num_envs: int, threads: int, fields: Sequence[str]
    ) -> None:
        self._model, self._frame_skip = model, frame_skip
        self._contact_forces = "cfrc_ext" in fields
        self._data = [mujoco.MjData(model) for _ in range(num_envs)]
        self._ctrl = [data.ctrl for data in self._data]
        self._warnings = [data.warning.number[_BAD_STATES] for data in self._data]
        self._sources = {name: [getattr(data, name) for data in self._data] for name in ("qpos", "qvel", *fields)}
        joined = {name: np.stack(arrays) for name, arrays in self._sources.items()}
        self.now = Quantities({**joined, "time": np.zeros(num_envs)})
        self._others = min(threads, num_envs) - 1
        self._pool = ThreadPoolExecutor(self._others, "physics") if self._others else None

    def step(self, actions: np.ndarray, which: np.ndarray | None = None) -> None:
        # an iterator that all threads draw from: whoever is done takes the next simulation
        work = iter(range(len(self._data)) if which is None else which.tolist())
        others = [self._pool.submit(self._simulate, work, actions) for _ in range(self._others)] if self._pool else []
        try:
            self._simulate(work, actions)
        finally:
            wait(others)
        for other in others:
            other.result()
        self._gather()

    def _simulate(self, work: Iterator[int], actions: np.ndarray) -> None:
        # while it is in Python a thread keeps the others waiting: nothing is looked up in the loop
        model, frame_skip, all_data, ctrl = self._model, self._frame_skip, self._data, self._ctrl
        times, contact_forces = self.now.time, self._contact_forces
        mj_step, mj_contact_forces = mujoco.mj_step, mujoco.mj_rnePostConstraint
        for i in work:
            data = all_data[i]
            ctrl[i][:] = actions[i]
            mj_step(model, data, frame_skip)
            if contact_forces:
                mj_contact_forces(model, data)
            times[i] = data.time

    def _gather(self) -> None:
        for name, arrays in self._sources.items():
            target = getattr(self.now, name)
            np.concatenate(arrays, out=target.reshape(-1, *target.shape[2:]))

    def reset(self, which: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        for row, i in enumerate(which.tolist()):
            data = self._data[i]
            mujoco.mj_resetData(self._model, data)
            data.qpos[:], data.qvel[:] = qpos[row], qvel[row]
            mujoco.mj_forward(self._model, data)
            self.now.time[i] = data.time
        self._gather()

    @property
    def warnings(self) -> np.ndarray:
        return np.concatenate(self._warnings).reshape(len(self._data), -1)

    def squares(self) -> float:
        return float(sum(array.reshape(-1) @ array.reshape(-1) for array in (self.now.qpos, self.now.qvel)))

    def save(self, index: int) -> np.ndarray:
        state = np.empty(mujoco.mj_stateSize(self._model, _STATE))
        mujoco.mj_getState(self._model, self._data[index], state, _STATE)
        return state

    def restore(self, index: int, state: np.ndarray) -> None:
        mujoco.mj_resetData(self._model, self._data[index])  # clears its warnings
        mujoco.mj_setState(self._model, self._data[index], state, _STATE)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
