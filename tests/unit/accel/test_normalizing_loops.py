"""The compiled running statistics are the plain ones."""

from __future__ import annotations

import numpy as np
import pytest

from rl_platform.accel import normalizing_loops
from rl_platform.acceleration import accelerating
from rl_platform.envs.embodied import normalize
from rl_platform.envs.embodied.normalize import ObservationNormalizer, RewardNormalizer


def normalizers(mode: str) -> tuple[ObservationNormalizer, RewardNormalizer]:
    with accelerating(mode):
        return ObservationNormalizer((5,), clip=1.5), RewardNormalizer(16, gamma=0.9, clip=3.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_both_count_and_normalize_alike(dtype: type) -> None:
    numbers = np.random.default_rng(0)
    compiled, plain = normalizers("auto"), normalizers("off")
    for _ in range(20):
        observations = numbers.normal(1e3, 2.0, (16, 5)).astype(dtype)
        rewards, ended = numbers.normal(size=16), numbers.random(16) < 0.2
        for one, other in (
            [each[0].count(observations) for each in (compiled, plain)],
            [each[0](observations + 1) for each in (compiled, plain)],
            [each[1](rewards, ended) for each in (compiled, plain)],
            [each[1](rewards[:3], ended[:3], np.array([4, 1, 9])) for each in (compiled, plain)],
        ):
            assert one.dtype == other.dtype == np.float32
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(compiled, plain, strict=True):
        assert one.state_dict().keys() == other.state_dict().keys()
    for name in ("mean", "variance"):
        moments = [each[0].state_dict()[name] for each in (compiled, plain)]
        np.testing.assert_allclose(*moments, rtol=1e-10, err_msg=name)
    np.testing.assert_allclose(compiled[1].state_dict()["returns"], plain[1].state_dict()["returns"], rtol=1e-12)


def test_off_is_plain() -> None:
    observations, rewards = normalizers("off")
    assert observations._normalize is normalize.normalize_rows
    assert rewards._normalize is normalize.normalize_rewards
    assert normalizers("auto")[0]._normalize is normalizing_loops.normalize_rows()
