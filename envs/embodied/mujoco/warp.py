"""Steps many simulations of one MuJoCo model with MuJoCo Warp, in float32: on the first GPU, or on the CPU.

All worlds are stepped at once, and idle ones restored afterwards. Not covered: counters of bad states, which Warp does
not have. Numbers that are not finite or too large are still detected. Bit-identical repetition on a GPU is not covered
either, because MuJoCo Warp's contacts are in no fixed order there by default.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import mujoco
import numpy as np
import torch
from torch import Tensor

from rl_platform.envs.embodied.mujoco.tasks import native_task
from rl_platform.envs.embodied.mujoco.tasks.mujoco_task import Quantities
from rl_platform.errors import Problem

if TYPE_CHECKING:
    from rl_platform.envs.embodied.spaces import AnyEnv

COVERED = {"xpos", "site_xpos", "qfrc_constraint"}
"""Fields that tasks may read. Warp's contact forces of bodies (Ant, humanoids) differ from MuJoCo's."""
_STATE = ("time", "qpos", "qvel", "act", "qacc_warmstart")


def warp_problem(env: AnyEnv) -> Problem | None:
    """Returns a problem if MuJoCo Warp cannot step the environment `env`; None if it can."""
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


def _packages() -> tuple[ModuleType, ModuleType]:
    """Returns Warp, which prints a line for each of its many kernels unless it is quiet, and MuJoCo Warp."""
    import warp

    warp.config.log_level = warp.LOG_WARNING
    import mujoco_warp

    return warp, mujoco_warp


class WarpPhysics:
    """`Physics` and `DevicePhysics` by MuJoCo Warp. `threads` is ignored.

    Between steps, torch reads and writes Warp's arrays where they are. Methods of `Physics` copy actions from main
    memory, and the numbers that tasks read back to it.
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
        self._graphs: dict[str, object] = {}  # graphs of kernels, whose arrays keep their addresses
        self.warnings = np.zeros((num_envs, 3), np.int64)
        read = dict.fromkeys(("qpos", "qvel", "time", *fields))
        self._read = tuple(read)
        self._arrays = {name: warp.to_torch(getattr(self._data, name)) for name in {*_STATE, "ctrl", *read}}
        self.device = self._arrays["qpos"].device
        self._begins = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self._warp_begins = warp.from_torch(self._begins)
        self.now = Quantities({name: self._arrays[name].cpu().double().numpy() for name in read})

    def step(self, actions: np.ndarray, which: np.ndarray | None = None) -> None:
        with self.computing():
            before_step = self._copies(_STATE) if which is not None else {}
            self.step_on_device(torch.from_numpy(actions))
            if which is not None:
                self._restore_others(which, before_step)
            self._update_now(slice(None) if which is None else which)

    def reset(self, which: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        with self.computing():
            begins, starts = torch.zeros_like(self._begins), []
            begins[which] = True
            for name, rows in (("qpos", qpos), ("qvel", qvel)):
                starts.append(torch.zeros_like(self._arrays[name]))
                starts[-1][which] = torch.from_numpy(rows).to(self._arrays[name])
            self.reset_on_device(begins, *starts)
            self._update_now(which)

    def step_on_device(self, actions: Tensor) -> None:
        self._arrays["ctrl"].copy_(actions)
        self._run("step", self._step)

    def reset_on_device(self, begins: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        before = self._copies(("qacc_warmstart",))
        self._begins.copy_(begins)
        self._run("reset", lambda: self._mjw.reset_data(self._model, self._data, self._warp_begins))
        self._copy_rows(begins, {"qpos": qpos, "qvel": qvel})
        # computes all simulations; the others continue as before
        self._run("forward", lambda: self._mjw.forward(self._model, self._data))
        self._copy_rows(~begins, before)

    def now_on_device(self) -> Quantities:
        return Quantities({name: self._arrays[name].double() for name in self._read})

    def update_now(self) -> None:
        with self.computing():
            self._update_now(slice(None))

    def save(self, index: int) -> np.ndarray:
        with self.computing():
            return torch.cat([self._arrays[name][index].flatten() for name in _STATE]).cpu().double().numpy()

    def restore(self, index: int, state: np.ndarray) -> None:
        with self.computing():
            rows = [self._arrays[name][index] for name in _STATE]
            for row, values in zip(rows, torch.from_numpy(state).split([row.numel() for row in rows]), strict=True):
                row.copy_(values.view(row.shape))

    def close(self) -> None:
        pass

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Runs torch's kernels on Warp's stream, so that kernels of each wait for those of the other."""
        if not self._device.is_cuda:
            yield
            return
        stream, outside = self._warp.stream_to_torch(self._device), torch.cuda.current_stream(self.device)
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            yield
        outside.wait_stream(stream)

    def _run(self, name: str, launch: Callable[[], None]) -> None:
        """Launches kernels, from the second call on as one graph.

        A step has hundreds of kernels. Four Hoppers on a CPU core: 84 -> 1.4 ms of processor time a step.
        """
        if name in self._graphs:
            self._warp.capture_launch(self._graphs[name])
            return
        launch()  # loads the kernels
        with self._warp.ScopedCapture() as capture:
            launch()
        self._graphs[name] = capture.graph

    def _step(self) -> None:
        """Steps all worlds `frame_skip` times."""
        for _ in range(self._frame_skip):
            self._mjw.step(self._model, self._data)

    def _copy_rows(self, rows: Tensor, values: dict[str, Tensor]) -> None:
        """Writes `values` into the simulations `rows` [N] bool, without waiting for the device."""
        for name, tensor in values.items():
            self._arrays[name].copy_(torch.where(rows[:, None], tensor, self._arrays[name]))

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
