"""Steps many simulations of one MuJoCo model in threads.

`BatchedPhysics` uses MuJoCo's batch, whose threads run without Python. `ThreadedPhysics` uses Python threads, which run
in parallel because MuJoCo releases the interpreter lock; it also computes contact forces of bodies, which the batch
cannot, and works with MuJoCo before version 4, which has no batch. Simulations are stored as states; each thread has
one working memory, which stays in the cache. Both give the numbers of `mj_step` for any number of threads and save a
simulation in the same format.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Protocol

import mujoco
import numpy as np

from rl_platform.envs.embodied.mujoco.tasks.mujoco_task import Quantities

if TYPE_CHECKING:
    import torch
    from torch import Tensor

try:
    from mujoco.batch import Batch
except ImportError:  # MuJoCo 3
    Batch = None

_Job = tuple[Iterator[int], np.ndarray]
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
# Counters of bad states that MuJoCo has reset by itself; there is no other sign of them.
_BAD_STATES = slice(int(mujoco.mjtWarning.mjWARN_BADQPOS), int(mujoco.mjtWarning.mjWARN_BADQACC) + 1)


class Physics(Protocol):
    """N simulations.

    `now`: their `qpos`, `qvel`, `time` and further fields after the last call. `warnings` [N,3]: how often MuJoCo has
    reset a bad state of each simulation since its last reset.
    """

    now: Quantities

    @property
    def warnings(self) -> np.ndarray: ...

    def step(self, actions: np.ndarray, which: np.ndarray | None = None) -> None:
        """Makes `frame_skip` steps of simulations `which` (None: all) with controls [N,A]."""

    def reset(self, which: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        """Resets simulations `which` [K] to qpos [K,nq], qvel [K,nv]."""

    def save(self, index: int) -> np.ndarray:
        """Returns the full state of one simulation, [state] float64."""

    def restore(self, index: int, state: np.ndarray) -> None:
        """Restores one simulation from `save`. `now` is updated by the next step."""

    def close(self) -> None:
        """Ends the threads."""


class DevicePhysics(Physics, Protocol):
    """Simulations whose numbers are tensors of `device`. Methods that end in `on_device` never wait for it.

    Call them within `computing`, and `update_now` before the next method of `Physics`.
    """

    device: torch.device

    def computing(self) -> AbstractContextManager[None]:
        """Orders the kernels of torch within the block and those of the simulation."""

    def step_on_device(self, actions: Tensor) -> None:
        """Makes `frame_skip` steps of all simulations with controls [N,A] float32."""

    def reset_on_device(self, begins: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Resets the simulations `begins` [N] bool to rows of qpos [N,nq], qvel [N,nv] float32."""

    def now_on_device(self) -> Quantities:
        """Returns the present numbers as float64 tensors."""

    def update_now(self) -> None:
        """Copies the present numbers to `now`."""


def make_physics(
    model: mujoco.MjModel, frame_skip: int, num_envs: int, threads: int, fields: Sequence[str]
) -> BatchedPhysics | ThreadedPhysics:
    """Returns the faster physics that can compute `fields`."""
    kind = ThreadedPhysics if Batch is None or "cfrc_ext" in fields else BatchedPhysics
    return kind(model, frame_skip, num_envs, threads, fields)


def is_covered(model: mujoco.MjModel) -> bool:
    """Returns whether the saved state determines the future of a simulation of this model."""
    # sleeping bodies, some solvers and plugins have further state
    bits = [getattr(mujoco.mjtEnableBit, name, 0) for name in ("mjENBL_SLEEP", "mjENBL_IPC")]
    return model.nplugin == 0 and not any(model.opt.enableflags & int(bit) for bit in bits)


def stop_timers() -> None:
    """Switches off MuJoCo's timers (`mjData.timer`) in this process.

    MuJoCo's Python package reads the clock around every part of a step, which takes 10 % of it. Results are unchanged.
    """
    try:
        library = ctypes.CDLL(sys.modules[mujoco.mj_step.__module__].__file__)
        clock = ctypes.c_void_p.in_dll(library, "mjcb_time")
    except (OSError, ValueError):
        return  # this build has no such symbol: the timers stay on
    clock.value = None


def skip_islands(model: mujoco.MjModel) -> None:
    """Switches off the search for islands (bodies whose constraints are solved separately) in models with one tree.

    Such a model has at most one island. This saves 5 % of a step; results are bit-identical.
    """
    if model.ntree == 1:  # without the flag, MuJoCo does not search by default
        model.opt.disableflags |= int(getattr(mujoco.mjtDisableBit, "mjDSBL_ISLAND", 0))


class BatchedPhysics:
    """MuJoCo's batch (version 4). It cannot compute `cfrc_ext`."""

    def __init__(
        self, model: mujoco.MjModel, frame_skip: int, num_envs: int, threads: int, fields: Sequence[str]
    ) -> None:
        skip_islands(model)
        self._batch = Batch(model, num_envs, min(threads, num_envs))
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
        # faster for few simulations than waking the batch's threads, but only these compute derived fields
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
        pass  # the batch ends its threads when it is deleted


class ThreadedPhysics:
    """Python threads with a working memory (MuJoCo's data) each; a free thread steps the next simulation."""

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
        # lists, as they are faster to index: a thread that runs Python blocks the others
        self._rows, self._copied = list(self._states), [list(array) for array in copied.values()]
        self._memories = [_ThreadMemory(data, others) for data in memories]
        # queues in C instead of futures, which take longer
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._threads = [Thread(target=self._serve, args=(memory,), daemon=True) for memory in self._memories[1:]]
        for thread in self._threads:
            thread.start()

    def step(self, actions: np.ndarray, which: np.ndarray | None = None) -> None:
        # all threads take the next simulation from one iterator
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
        """Copies the fields of simulation i that are not in the state; `memory` must have just stepped it."""
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
    """A thread's working memory, and views of the fields that are read after every step."""

    def __init__(self, data: mujoco.MjData, fields: Sequence[str]) -> None:
        self.data, self.ctrl = data, data.ctrl
        self.sources = [getattr(data, name) for name in fields]
        self.warnings = data.warning.number[_BAD_STATES]
        self.none = bytes(self.warnings.nbytes)
