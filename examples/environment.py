"""An environment with several choices at once: turn three dials, each to the position that a lamp shows."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, MultiDiscrete


class Dials(gymnasium.Env):
    """`effort` is a reading that the task does not need; `lamps` are the wanted positions."""

    def __init__(self, positions: int = 3) -> None:
        self.action_space = MultiDiscrete([positions] * 3)
        self.observation_space = Dict({"effort": Box(0, 100, (2,)), "lamps": MultiDiscrete([positions] * 3)})

    def observe(self) -> dict[str, np.ndarray]:
        effort = self.np_random.uniform(0, 100, 2).astype(np.float32)
        self.lamps = self.np_random.integers(self.action_space.nvec)
        return {"effort": effort, "lamps": self.lamps}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        reward = float(np.mean(action == self.lamps))
        return self.observe(), reward, False, False, {"success": reward == 1}


gymnasium.register("Dials-v0", entry_point=Dials, max_episode_steps=10)
