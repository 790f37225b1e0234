"""The test of arrays for numbers that are not finite."""

import numpy as np
import pytest

from rl_platform.envs.embodied.buffers import all_finite


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("number", "finite"), [(0.5, True), (np.nan, False), (np.inf, False), (-np.inf, False), (None, True)]
)
def test_one_number_decides(dtype: type[np.floating], number: float | None, finite: bool) -> None:
    """None: the largest number, whose square is infinite."""
    numbers = np.ones((7, 9), dtype)
    numbers[3, 4] = np.finfo(dtype).max if number is None else number
    assert all_finite(numbers) is finite
    assert all_finite(numbers[:, 4:]) is finite  # rows with gaps between them
    assert all_finite(numbers[:, 5:])


def test_no_numbers_are_finite() -> None:
    assert all_finite(np.zeros((3, 0), np.uint8))
