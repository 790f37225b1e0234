"""The faster functions of `dm_control_speed.py` beside dm_control's own, in the simulators' interpreter.

Skipped unless `rl-platform environment manipulation` has made it.
"""

from __future__ import annotations

import subprocess

import pytest

from rl_platform.envs.embodied.processes.interpreter import executable, interpreter_code
from rl_platform.launch.tools.simulators import is_made

NAME = "manipulation"
pytestmark = pytest.mark.skipif(not is_made(NAME), reason="rl-platform environment manipulation was not run")

COMMON = """
import hashlib, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
from dm_control import manipulation, suite
from dm_control.utils import rewards
from rl_platform.envs.embodied.suites.dm_control_speed import quicken
"""
EPISODES = """
def digest(domain, task):
    if domain == "manipulation":
        env = manipulation.load(task, seed=3)
    else:
        env = suite.load(domain, task, task_kwargs={"random": 3, "time_limit": 1.0})
    spec, draw, seen = env.action_spec(), np.random.default_rng(5), hashlib.sha256()
    step, length = env.reset(), 0
    while length < 30:
        for part in step.observation.values():
            seen.update(np.ascontiguousarray(part).tobytes())
        seen.update(repr((step.step_type, step.reward, step.discount)).encode())
        step, length = env.step(draw.uniform(spec.minimum, spec.maximum, spec.shape)), length + 1
    return seen.hexdigest()
def everything():
    return {f"{domain} {task}": digest(domain, task) for domain, task in TASKS}
TASKS = [*suite.BENCHMARKING, ("manipulation", "reach_site_features"), ("manipulation", "lift_brick_features")]
plain = everything()
quicken()
assert len(plain) > 20
quick = everything()
assert quick == plain, [name for name in plain if quick[name] != plain[name]]
"""
REWARDS = """
draw, plain = np.random.default_rng(0), rewards.tolerance
quicken()
assert rewards.tolerance is not plain
for sigmoid in ("gaussian", "hyperbolic", "long_tail", "reciprocal", "cosine", "linear", "quadratic", "tanh_squared"):
    for _ in range(500):
        lower, upper = sorted(draw.normal(size=2))
        given = {"bounds": (lower, draw.choice([upper, np.inf, lower])), "margin": float(draw.choice([0, 1e-3, 0.5]))}
        given |= {"sigmoid": sigmoid, "value_at_margin": draw.uniform(0.01, 0.99)}
        if sigmoid in ("linear", "quadratic") and draw.random() < 0.3:
            given["value_at_margin"] = 0
        numbers = (np.float64(draw.normal()), float(draw.normal()), lower, float("nan"), 1e300, -np.inf)
        for x in (*numbers, draw.normal(size=3)):
            ours, theirs = rewards.tolerance(x, **given), plain(x, **given)
            assert type(ours) is type(theirs) and np.array(ours).tobytes() == np.array(theirs).tobytes(), (x, given)
for wrong in ({"bounds": (1, 0)}, {"margin": -1.0}):
    try:
        rewards.tolerance(0.0, **wrong)
    except ValueError:
        continue
    raise AssertionError(wrong)
"""
FAILURE = """
from dm_control.rl.control import PhysicsError
def message():
    physics = suite.load("walker", "walk", task_kwargs={"random": 1}).physics
    physics.data.qvel[0] = np.inf
    try:
        physics.step(3)
    except PhysicsError as error:
        with physics.suppress_physics_errors():
            physics.data.qvel[0] = np.nan
            physics.step()
        return str(error)
plain = message()
quicken()
assert "BADQPOS" in plain, plain
assert message() == plain
"""


@pytest.mark.parametrize("code", [EPISODES, REWARDS, FAILURE], ids=["episodes", "rewards", "diverged physics"])
def test_results_are_bit_identical(code: str) -> None:
    subprocess.run([executable(NAME), "-c", interpreter_code(COMMON + code)], check=True, timeout=300)
