"""An environment whose step waits, for `env_python.py`."""

from __future__ import annotations

import time

import gymnasium
import numpy as np
from gymnasium.spaces import Box

STEP_S = 1e-3


class Sleep(gymnasium.Env[np.ndarray, np.ndarray]):
    """Every step waits 1 ms, without work for the processor: more workers than cores do not slow each other."""

    observation_space, action_space = Box(-1.0, 1.0, (32,), np.float32), Box(-1.0, 1.0, (8,), np.float32)

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        return np.zeros(32, np.float32), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        time.sleep(STEP_S)
        return np.zeros(32, np.float32), 0.0, False, False, {}
