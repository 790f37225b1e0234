"""A simulation in torch in the place of MuJoCo Warp, whose kernels the pretended device cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from stand_ins import context, embodied_config
from torch import Tensor

from rl_platform.components.environment import Environment
from rl_platform.components.policy_rollout import PolicyRollout
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.mujoco import warp
from rl_platform.envs.embodied.mujoco.tasks.mujoco_task import Quantities
from rl_platform.records import Weights


class TensorPhysics:
    """`DevicePhysics` whose positions are driven by controls and fall. `breaks`: a speed above it becomes infinite."""

    device: ClassVar[torch.device] = torch.device("cpu")
    breaks: ClassVar[float] = float("inf")

    def __init__(self, model: Any, frame_skip: int, num_envs: int, threads: int, fields: Sequence[str]) -> None:
        self._dt = model.opt.timestep * frame_skip
        self._gains = torch.linspace(-3, 5, model.nu * model.nv).reshape(model.nu, model.nv).to(self.device)
        sizes = {"qpos": (model.nq,), "qvel": (model.nv,), "time": ()}
        self._arrays = {name: torch.zeros(num_envs, *size).to(self.device) for name, size in sizes.items()}
        self.warnings = np.zeros((num_envs, 3), np.int64)
        self.update_now()

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step_on_device(self, actions: Tensor) -> None:
        qpos, qvel, time = self._arrays.values()
        qvel += actions @ self._gains * self._dt
        qvel -= 0.4 * qpos * self._dt
        qvel.masked_fill_(qvel > self.breaks, float("inf"))
        qpos += qvel * self._dt
        time += self._dt

    def reset_on_device(self, begins: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        for name, start in (("qpos", qpos), ("qvel", qvel)):
            self._arrays[name].copy_(torch.where(begins[:, None], start, self._arrays[name]))
        self._arrays["time"].masked_fill_(begins, 0.0)

    def now_on_device(self) -> Quantities:
        return Quantities({name: array.double() for name, array in self._arrays.items()})

    def update_now(self) -> None:
        self.now = Quantities({name: array.cpu().double().numpy() for name, array in self._arrays.items()})

    def step(self, actions: np.ndarray, which: np.ndarray | None = None) -> None:
        assert which is None
        self.step_on_device(torch.from_numpy(actions).to(self.device))
        self.update_now()

    def reset(self, which: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        begins = torch.zeros(len(self.warnings), dtype=torch.bool)
        begins[which] = True
        whole = [torch.zeros(len(begins), rows.shape[1]) for rows in (qpos, qvel)]
        for array, rows in zip(whole, (qpos, qvel), strict=True):
            array[which] = torch.from_numpy(rows).float()
        self.reset_on_device(*(tensor.to(self.device) for tensor in (begins, *whole)))
        self.update_now()

    def save(self, index: int) -> np.ndarray:
        return torch.cat([array[index].flatten() for array in self._arrays.values()]).cpu().double().numpy()

    def restore(self, index: int, state: np.ndarray) -> None:
        rows = [array[index] for array in self._arrays.values()]
        for row, values in zip(rows, torch.from_numpy(state).split([row.numel() for row in rows]), strict=True):
            row.copy_(values.view(row.shape).float().to(self.device))

    def close(self) -> None: ...


def device_config(**env: Any) -> Config:
    settings = {"id": "Hopper-v5", "backend": "mujoco_warp", "num_envs": 3, "rollout_steps": 12, "max_episode_steps": 9}
    settings |= {"normalize_observations": True, "normalize_rewards": True} | env
    model = {"hidden_sizes": [16], "activation": "silu", "initial_log_std": 0.5}  # tanh: see runs.py
    return embodied_config(settings, model, {"gamma": 0.9})


@contextmanager
def on_device(
    config: Config, device: torch.device, physics: type | None = TensorPhysics
) -> Iterator[tuple[Environment, PolicyRollout]]:
    """Yields an environment component and a rollout rank with weights, both on `device`, in one process.

    physics None: that of the config.
    """
    where = context("env")
    with patch.object(warp, "WarpPhysics", physics or warp.WarpPhysics), patch.object(TensorPhysics, "device", device):
        environment = Environment(where, config)
        accelerators = (0,) if device.type == "cuda" else ()
        beside = replace(context("rollout"), accelerators=accelerators, shared=where.shared)
        rollout = PolicyRollout(beside, config, environment.envs.spaces)
        state = {name: tensor.detach().to(device) for name, tensor in rollout.policy.state_dict().items()}
        rollout.receive(Weights(0, state))
        try:
            yield environment, rollout
        finally:
            environment.close()
