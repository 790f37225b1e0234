"""An environment backend: NumPy steps all carts at once. A push moves a cart; the policy keeps it near the middle."""

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box

from rl_platform.envs.embodied.user_backend import EnvBackend


class Carts(EnvBackend):
    """Observes position and speed. A cart beyond 1 ends its episode; within 0.1 of the middle it is successful."""

    @classmethod
    def spaces(cls, wind: float = 0.05) -> tuple[Space, Space]:
        return Box(-np.inf, np.inf, (2,)), Box(-1.0, 1.0, (1,))

    def __init__(self, num_envs: int, wind: float = 0.05) -> None:
        self.wind = wind
        self.state = np.zeros((num_envs, 2))
        self.random = [np.random.default_rng(0) for _ in range(num_envs)]
        self.success = np.zeros(num_envs, bool)

    def reset(self, which: np.ndarray, seeds: list[int | None]) -> np.ndarray:
        for i, seed in zip(which, seeds, strict=True):
            if seed is not None:
                self.random[i] = np.random.default_rng(seed)
            self.state[i] = self.random[i].uniform(-0.5, 0.5, 2)
        return self.state[which]

    def step(self, actions: np.ndarray, idle: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        moving = ~idle
        position, speed = self.state[moving].T
        gusts = np.array([self.random[i].normal(scale=self.wind) for i in np.flatnonzero(moving)])
        speed = 0.9 * speed + 0.1 * actions[moving, 0] + gusts
        self.state[moving] = np.stack([position + 0.2 * speed, speed], axis=1)
        distance = np.abs(self.state[:, 0])
        self.success = distance < 0.1
        return self.state.copy(), 1.0 - distance, distance > 1, np.zeros(len(idle), bool)

    def save(self, index: int) -> Any:
        return self.state[index].copy(), self.random[index]

    def restore(self, index: int, state: Any) -> None:
        self.state[index], self.random[index] = state
