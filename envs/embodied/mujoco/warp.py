"""Steps many simulations of one MuJoCo model with MuJoCo Warp, in float32: on the first GPU, or on the CPU.

All worlds are stepped at once, and idle ones restored afterwards. Not covered: counters of bad states, which Warp does
not have. Numbers that are not finite or too large are still detected. Bit-identical repetition on a GPU is not covered
either, because MuJoCo Warp's contacts are in no fixed order there by default.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

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
    _, mujoco_warp = _packages()
    try:
        mujoco_warp.put_model(env.unwrapped.model)
    except NotImplementedError as error:
        return Problem(key, f"MuJoCo Warp cannot simulate the model of {env.spec.id}: {error}", value=name)
    return None


def _packages() -> tuple[Any, Any]:
    """Returns Warp, which prints a line for each of its many kernels unless it is quiet, and MuJoCo Warp."""
    import warp

    warp.config.log_level = warp.LOG_WARNING
    import mujoco_warp

    return warp, mujoco_warp


class WarpPhysics:
    """`Physics` by MuJoCo Warp. `threads` is ignored.

    Between steps, torch reads and writes Warp's arrays where they are; only actions and what tasks read pass the host.
    """

    def __init__(
        self, model: mujoco.MjModel, frame_skip: int, num_envs: int, threads: int, fields: Sequence[str]
    ) -> None:
        warp, mujoco_warp = _packages()
        self._warp, self._mjw, self._frame_skip = warp, mujoco_warp, frame_skip
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        self._model = mujoco_warp.put_model(model)
        self._data = mujoco_warp.put_data(model, data, nworld=num_envs)
        self._device = self._data.qpos.device
        self._captures = self._device.is_cuda
        self._graph: Any = None  # CUDA graph of the kernels of `step`, whose arrays keep their addresses
        self.warnings = np.zeros((num_envs, 3), np.int64)
        read = dict.fromkeys(("qpos", "qvel", "time", *fields))
        self._arrays = {name: warp.to_torch(getattr(self._data, name)) for name in {*_STATE, "ctrl", *read}}
        self._begins = torch.zeros(num_envs, dtype=torch.bool, device=self._arrays["qpos"].device)
        self.now = Quantities({name: self._arrays[name].cpu().double().numpy() for name in read})

    def step(self, actions: np.ndarray, which: np.ndarray | None = None) -> None:
        with self._on_warps_stream():
            before_step = self._copies(_STATE) if which is not None else {}
            self._arrays["ctrl"].copy_(torch.from_numpy(actions))
            if self._graph is not None:
                self._warp.capture_launch(self._graph)
            else:
                self._launch()
                if self._captures:  # the first steps have loaded the kernels
                    with self._warp.ScopedCapture() as capture:
                        self._launch()
                    self._graph = capture.graph
            if which is not None:
                self._restore_others(which, before_step)
            self._update_now(slice(None) if which is None else which)

    def reset(self, which: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        with self._on_warps_stream():
            before = self._copies(("qacc_warmstart",))
            self._begins.zero_()[which] = True
            self._mjw.reset_data(self._model, self._data, self._warp.from_torch(self._begins))
            for name, rows in (("qpos", qpos), ("qvel", qvel)):
                self._arrays[name][which] = torch.from_numpy(rows).to(self._arrays[name])
            self._mjw.forward(self._model, self._data)  # computes all simulations; the others continue as before
            self._restore_others(which, before)
            self._update_now(which)

    def save(self, index: int) -> np.ndarray:
        with self._on_warps_stream():
            return torch.cat([self._arrays[name][index].flatten() for name in _STATE]).cpu().double().numpy()

    def restore(self, index: int, state: np.ndarray) -> None:
        with self._on_warps_stream():
            rows = [self._arrays[name][index] for name in _STATE]
            for row, values in zip(rows, torch.from_numpy(state).split([row.numel() for row in rows]), strict=True):
                row.copy_(values.view(row.shape))

    def close(self) -> None:
        pass

    def _on_warps_stream(self) -> AbstractContextManager[Any]:
        """Torch's kernels within wait for those of Warp, and the reverse."""
        return torch.cuda.stream(self._warp.stream_to_torch(self._device)) if self._device.is_cuda else nullcontext()

    def _launch(self) -> None:
        """Steps all worlds `frame_skip` times. A step has hundreds of kernels, so a GPU runs them as a CUDA graph."""
        for _ in range(self._frame_skip):
            self._mjw.step(self._model, self._data)

    def _copies(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._arrays[name].clone() for name in names}

    def _restore_others(self, which: np.ndarray, before: dict[str, Tensor]) -> None:
        """Sets the simulations that are not in `which` back to `before`."""
        for name, values in before.items():
            array = self._arrays[name]
            values[which] = array[which]
            array.copy_(values)

    def _update_now(self, rows: slice | np.ndarray) -> None:
        for name, array in vars(self.now).items():
            array[rows] = self._arrays[name][rows].cpu().numpy()
