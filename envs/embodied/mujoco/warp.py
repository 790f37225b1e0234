"""Steps many simulations of one MuJoCo model with MuJoCo Warp, in float32: on the first GPU, or on the CPU.

All worlds are stepped at once, and idle ones restored afterwards. Not covered: counters of bad states, which Warp does
not have. Numbers that are not finite or too large are still detected.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from rl_platform.envs.embodied.mujoco.tasks.mujoco_task import Quantities
from rl_platform.errors import Problem

COVERED = {"xpos", "site_xpos", "qfrc_constraint"}
"""Fields that tasks may read. Warp's contact forces of bodies (Ant, humanoids) differ from MuJoCo's."""
_STATE = ("time", "qpos", "qvel", "act", "qacc_warmstart")


def warp_problem(env: Any) -> Problem | None:
    """Returns a problem if MuJoCo Warp cannot step the environment `env`; None if it can."""
    from rl_platform.envs.embodied.mujoco.native import native_task

    key, name = "env.backend", "mujoco_warp"
    if (task := native_task(env)) is None:
        allowed = "Gymnasium's MuJoCo tasks of version 5"
        return Problem(key, f"{env.spec.id} is none of the tasks it steps", value=name, allowed=allowed)
    if others := set(task.fields) - COVERED:
        message = (
            f"{env.spec.id} observes quantities that MuJoCo Warp computes differently: {', '.join(sorted(others))}"
        )
        return Problem(key, message, value=name, hint="env.backend: mujoco")
    if importlib.util.find_spec("mujoco_warp") is None:
        return Problem(key, "MuJoCo Warp is not installed", value=name, hint="pip install 'rl-platform[warp]'")
    import mujoco_warp

    try:
        mujoco_warp.put_model(env.unwrapped.model)
    except NotImplementedError as error:
        return Problem(key, f"MuJoCo Warp cannot simulate the model of {env.spec.id}: {error}", value=name)
    return None


class WarpPhysics:
    """`Physics` by MuJoCo Warp. `threads` is ignored."""

    def __init__(
        self, model: mujoco.MjModel, frame_skip: int, num_envs: int, threads: int, fields: Sequence[str]
    ) -> None:
        import mujoco_warp
        import warp

        warp.config.quiet = True
        self._warp, self._mjw, self._frame_skip = warp, mujoco_warp, frame_skip
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        self._model = mujoco_warp.put_model(model)
        self._data = mujoco_warp.put_data(model, data, nworld=num_envs)
        self._captures = self._data.qpos.device.is_cuda
        self._graph: Any = None  # CUDA graph of the kernels of `step`, whose arrays keep their addresses
        self.warnings = np.zeros((num_envs, 3), np.int64)
        names = dict.fromkeys(("qpos", "qvel", "time", *fields))
        self.now = Quantities({name: self._read(name) for name in names})

    def step(self, actions: np.ndarray, which: np.ndarray | None = None) -> None:
        before_step = None if which is None else {name: self._read(name) for name in _STATE}
        self._write("ctrl", actions)
        if self._graph is not None:
            self._warp.capture_launch(self._graph)
        else:
            self._launch()
            if self._captures:  # the first steps have loaded the kernels
                with self._warp.ScopedCapture() as capture:
                    self._launch()
                self._graph = capture.graph
        if before_step is not None:
            others = np.setdiff1d(np.arange(len(self.warnings)), which)
            for name, before in before_step.items():
                after = self._read(name)
                after[others] = before[others]
                self._write(name, after)
        self._update_now(slice(None) if which is None else which)

    def reset(self, which: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        begins = np.zeros(len(self.warnings), bool)
        begins[which] = True
        warmstart = self._read("qacc_warmstart")
        self._mjw.reset_data(self._model, self._data, self._warp.array(begins, dtype=bool))
        for name, rows in (("qpos", qpos), ("qvel", qvel)):
            whole = self._read(name)
            whole[which] = rows
            self._write(name, whole)
        self._mjw.forward(self._model, self._data)  # computes all simulations; the others are restored below
        computed = self._read("qacc_warmstart")
        computed[~begins] = warmstart[~begins]
        self._write("qacc_warmstart", computed)
        self._update_now(which)

    def save(self, index: int) -> np.ndarray:
        return np.concatenate([self._read(name)[index].reshape(-1) for name in _STATE])

    def restore(self, index: int, state: np.ndarray) -> None:
        begin = 0
        for name in _STATE:
            whole = self._read(name)
            end = begin + whole[index].size
            whole[index] = state[begin:end].reshape(whole[index].shape)
            self._write(name, whole)
            begin = end

    def close(self) -> None:
        pass

    def _launch(self) -> None:
        """Steps all worlds `frame_skip` times. A step has hundreds of kernels, so a GPU runs them as a CUDA graph."""
        for _ in range(self._frame_skip):
            self._mjw.step(self._model, self._data)

    def _read(self, name: str) -> np.ndarray:
        """Returns a copy of a field, float64."""
        values: np.ndarray = getattr(self._data, name).numpy().astype(np.float64)
        return values

    def _write(self, name: str, array: np.ndarray) -> None:
        if array.size:
            getattr(self._data, name).assign(array.astype(np.float32))

    def _update_now(self, rows: slice | np.ndarray) -> None:
        for name, array in vars(self.now).items():
            array[rows] = self._read(name)[rows]
