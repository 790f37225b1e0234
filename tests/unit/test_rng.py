"""Named random streams are stable and unrelated."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rl_platform import rng


def test_derived_seeds_never_change() -> None:
    """Goldens: a change here silently changes every run."""
    assert rng.derive_seed(1) == 4969683784270905964
    assert rng.derive_seed(1, "rollout", 3) == 6505403925511478214


@pytest.mark.slow
def test_derived_seeds_do_not_depend_on_the_process() -> None:
    code = "from rl_platform import rng; print(rng.derive_seed(7, 'env', 2))"
    seeds = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        ).stdout
        for salt in ("0", "1")
    }
    assert seeds == {f"{rng.derive_seed(7, 'env', 2)}\n"}


def test_names_give_distinct_seeds_in_range() -> None:
    names = [(), ("a", "bc"), ("ab", "c"), ("a", "b", "c"), ("abc",), (1,), ("1",), (1, 2), (12,)]
    seeds = {rng.derive_seed(seed, *name) for seed in range(3) for name in names}
    assert len(seeds) == 3 * len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generators_repeat_and_differ() -> None:
    draw = lambda *names: torch.randn(4, generator=rng.generator(1, *names))  # noqa: E731
    assert torch.equal(draw("rollout", 0), draw("rollout", 0))
    assert not torch.equal(draw("rollout", 0), draw("rollout", 1))
