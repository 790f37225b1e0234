"""The type of observations of tasks that cameras may observe."""

from __future__ import annotations

import numpy as np

Observation = np.ndarray | dict[str, np.ndarray]  # a state or an image alone, or both by name
