"""Many simulations of one MuJoCo model, stepped in native threads.

`BatchedPhysics` is MuJoCo's own batch: its threads never meet Python. `ThreadedPhysics` steps from Python threads,
which MuJoCo lets run side by side; it can do between steps what the batch cannot, contact forces of bodies, and works
where MuJoCo (before version 4) has no batch. In both, simulations are states that share a working memory per thread,
which stays in the cache. Both give the same numbers, those of `mj_step`, for any number of threads, and
both save a simulation as the same row of numbers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import mujoco
import numpy as np

from rl_platform.envs.embodied.mujoco.tasks.base import Quantities

try:
    from mujoco.batch import Batch
except ImportError:  # MuJoCo 3
    Batch = None

_Job = tuple[Iterator[int], np.ndarray]
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


def stop_timers() -> None:
    """Have MuJoCo leave `mjData.timer` at 0 in this process: its Python package has it read the clock around every part
    of a step, which its C library does not do by itself. A tenth of a step, and no number depends on it."""
    try:
        library = ctypes.CDLL(sys.modules[mujoco.mj_step.__module__].__file__)
        clock = ctypes.c_void_p.in_dll(library, "mjcb_time")
    except (OSError, ValueError):
        return  # not to be found in this build: only slower
    clock.value = None


def skip_islands(model: mujoco.MjModel) -> None:
    """Leave out the search for islands, groups of bodies whose constraints are solved apart, where there is one tree of
    bodies: it has one at most. A twentieth of a step, for the same bits."""
    if model.ntree == 1:  # no bit: a version that does not look for islands unless asked
        model.opt.disableflags |= int(getattr(mujoco.mjtDisableBit, "mjDSBL_ISLAND", 0))


class BatchedPhysics:
    """MuJoCo's batch (version 4). It cannot compute `cfrc_ext`."""

    def __init__(
        self, model: mujoco.MjModel, frame_skip: int, num_envs: int, threads: int, fields: Sequence[str]
    ) -> None:
        skip_islands(model)
        self._batch: Any = Batch(model, num_envs, min(threads, num_envs))
        self._model, self._frame_skip, self._derives = model, frame_skip, bool(fields)
        self._memory = mujoco.MjData(model)
        self._ctrl = self._batch.bind("ctrl")
        self.warnings: np.ndarray = self._batch.warning[:, _BAD_STATES, 1]
        self.now = Quantities({name: self._batch.bind(name) for name in ("qpos", "qvel", "time", *fields)})

    def step(self, actions: np.ndarray, which: np.ndarray | None = None) -> None:
        if which is None:
            self._ctrl[:] = actions
        else:
            self._ctrl[which] = actions[which]
        self._batch.step(which, self._frame_skip)

    def reset(self, which: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        # the usual few, sooner done here than by waking the batch's threads; only those can fill its derived fields
        data = self._memory
        for row, i in enumerate(which.tolist()):
            mujoco.mj_resetData(self._model, data)
            data.qpos[:], data.qvel[:] = qpos[row], qvel[row]
            if not self._derives:
                mujoco.mj_forward(self._model, data)
            mujoco.mj_getState(self._model, data, self._batch.state[i], _STATE)
        self._batch.warning[which] = 0
        if self._derives:
            self._batch.forward(which)

    def save(self, index: int) -> np.ndarray:
        state: np.ndarray = self._batch.state[index].copy()
        return state

    def restore(self, index: int, state: np.ndarray) -> None:
        self._batch.state[index], self._batch.warning[index] = state, 0

    def close(self) -> None:
        pass  # the batch ends its threads with itself


class ThreadedPhysics:
    """A working memory (MuJoCo's data) per thread: whichever is free loads the next simulation's state and steps it."""

    def __init__(
        self, model: mujoco.MjModel, frame_skip: int, num_envs: int, threads: int, fields: Sequence[str]
    ) -> None:
        skip_islands(model)
        self._model, self._frame_skip = model, frame_skip
        self._contact_forces = "cfrc_ext" in fields
        memories = [mujoco.MjData(model) for _ in range(max(1, min(threads, num_envs)))]
        self._states = np.empty((num_envs, mujoco.mj_stateSize(model, _STATE)))
        mujoco.mj_getState(model, memories[0], self._states[0], _STATE)
        self._states[1:] = self._states[0]
        self.warnings = np.zeros((num_envs, _BAD_STATES.stop - _BAD_STATES.start), np.int64)
        # a state begins with time, positions and velocities
        ends = np.cumsum([1, model.nq, model.nv])
        in_state = {
            "time": self._states[:, 0],
            "qpos": self._states[:, 1 : ends[1]],
            "qvel": self._states[:, ends[1] : ends[2]],
        }
        others = [name for name in fields if name not in in_state]
        copied = {name: np.stack([getattr(memories[0], name)] * num_envs) for name in others}
        self.now = Quantities({**in_state, **copied})
        # rows and sources as lists: while it is in Python a thread keeps the others waiting
        self._rows, self._copied = list(self._states), [list(array) for array in copied.values()]
        self._memories = [_ThreadMemory(data, others) for data in memories]
        # queues in C and no futures: hand-overs are a few microseconds of every step
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._threads = [Thread(target=self._serve, args=(memory,), daemon=True) for memory in self._memories[1:]]
        for thread in self._threads:
            thread.start()

    def step(self, actions: np.ndarray, which: np.ndarray | None = None) -> None:
        # an iterator that all threads draw from: whoever is done takes the next simulation
        work = iter(range(len(self._rows)) if which is None else which.tolist())
        for _ in self._threads:
            self._jobs.put((work, actions))
        try:
            self._simulate(self._memories[0], work, actions)
        finally:
            failures = [failure for _ in self._threads if (failure := self._done.get()) is not None]
        if failures:
            raise failures[0]

    def _serve(self, memory: _ThreadMemory) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._simulate(memory, *job)
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)

    def _simulate(self, memory: _ThreadMemory, work: Iterator[int], actions: np.ndarray) -> None:
        model, frame_skip, rows, contact_forces = self._model, self._frame_skip, self._rows, self._contact_forces
        data, ctrl, spec = memory.data, memory.ctrl, _STATE
        load, step, keep = mujoco.mj_setState, mujoco.mj_step, mujoco.mj_getState
        for i in work:
            load(model, data, rows[i], spec)
            ctrl[:] = actions[i]
            step(model, data, frame_skip)
            if contact_forces:
                mujoco.mj_rnePostConstraint(model, data)
            keep(model, data, rows[i], spec)
            self._read(memory, i)

    def _read(self, memory: _ThreadMemory, i: int) -> None:
        """What the state does not hold of simulation i, which was the last one here."""
        for targets, source in zip(self._copied, memory.sources, strict=True):
            targets[i][...] = source
        if memory.warnings.tobytes() != memory.none:
            self.warnings[i] += memory.warnings
            memory.warnings[:] = 0

    def reset(self, which: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        memory = self._memories[0]
        for row, i in enumerate(which.tolist()):
            mujoco.mj_resetData(self._model, memory.data)
            memory.data.qpos[:], memory.data.qvel[:] = qpos[row], qvel[row]
            mujoco.mj_forward(self._model, memory.data)
            mujoco.mj_getState(self._model, memory.data, self._rows[i], _STATE)
            self.warnings[i] = 0
            self._read(memory, i)

    def save(self, index: int) -> np.ndarray:
        state: np.ndarray = self._states[index].copy()
        return state

    def restore(self, index: int, state: np.ndarray) -> None:
        self._states[index] = state
        self.warnings[index] = 0

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


class _ThreadMemory:
    """A thread's memory, and views of what is read from it after every step."""

    def __init__(self, data: mujoco.MjData, fields: Sequence[str]) -> None:
        self.data, self.ctrl = data, data.ctrl
        self.sources = [getattr(data, name) for name in fields]
        self.warnings = data.warning.number[_BAD_STATES]
        self.none = bytes(self.warnings.nbytes)
