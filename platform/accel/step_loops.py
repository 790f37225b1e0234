"""Observations, rewards and ends after the physics of a step of MuJoCo tasks, for all environments of a block.

Compiled loops: a dozen array operations on a few hundred numbers take as long as the physics of one small environment.
The plain versions are in envs/embodied/ (vector.py, block.py, mujoco/).
"""

from __future__ import annotations

import numpy as np

from rl_platform.accel.compiling import IN_ORDER, Array, compiled_loops

_LARGEST = float(np.finfo(np.float64).max)


@compiled_loops(IN_ORDER)
def clip_actions(actions: Array, low: Array, high: Array, clipped: Array) -> bool:
    """(actions [N,A], low and high [A], out: [N,A] float32) -> whether all of `actions` are finite."""
    finite, width = True, clipped.shape[1]
    for i in range(len(clipped)):
        for j in range(width):
            finite &= abs(actions[i, j]) <= _LARGEST
            clipped[i, j] = min(max(actions[i, j], low[j]), high[j])
    return finite


@compiled_loops(IN_ORDER)
def finish_step(
    observed: Array,
    gained: Array,
    over: Array,
    cut: Array,
    diverged: Array,
    idle: Array,
    finals: Array,
    observations: Array,
    rewards: Array,
    terminated: Array,
    truncated: Array,
    invalid: Array,
    returns: Array,
    lengths: Array,
) -> int:
    """(observed [N,D], gained [N], over, cut, diverged, idle [N] bool: results of the step; finals, observations [N,D],
    rewards [N], terminated, truncated, invalid [N] bool, returns, lengths [N]) -> how many episodes ended.

    Arguments after `idle` are updated in place; `observations` are those before the step. Numbers that are not finite
    make a step invalid. An invalid step ends its episode with the last observation and no reward. Idle environments
    keep their state, without reward and end.
    """
    ended, width = 0, finals.shape[1]
    for i in range(len(rewards)):
        finite = abs(gained[i]) <= _LARGEST
        for j in range(width):
            finals[i, j] = observed[i, j]
            finite &= abs(finals[i, j]) <= _LARGEST
        stays = idle[i]
        invalid[i] = (diverged[i] or not finite) and not stays
        if invalid[i] or stays:
            rewards[i], terminated[i], truncated[i] = 0.0, False, invalid[i]
            for j in range(width):
                finals[i, j] = observations[i, j]
        else:
            rewards[i], terminated[i], truncated[i] = gained[i], over[i], cut[i]
            for j in range(width):
                observations[i, j] = finals[i, j]
        returns[i] += rewards[i]
        lengths[i] += 0 if stays else 1
        ended += terminated[i] or truncated[i]
    return ended


@compiled_loops(IN_ORDER)
def diverged(
    qpos: Array, qvel: Array, time: Array, warnings: Array, lengths: Array, dt: float, largest: float, out: Array
) -> None:
    """(qpos [N,nq], qvel [N,nv], time [N], warnings [N,3], lengths [N], dt, largest, out: [N] bool): whether MuJoCo
    reset a simulation, which resets its time, or a number is not below `largest`."""
    for i in range(len(out)):
        bad = not time[i] >= (lengths[i] + 0.5) * dt
        for j in range(warnings.shape[1]):
            bad |= warnings[i, j] != 0
        for j in range(qpos.shape[1]):
            bad |= not abs(qpos[i, j]) < largest
        for j in range(qvel.shape[1]):
            bad |= not abs(qvel[i, j]) < largest
        out[i] = bad


@compiled_loops(IN_ORDER)
def run_observation(qpos: Array, qvel: Array, skipped: int, largest: float, out: Array) -> None:
    """(qpos [N,nq], qvel [N,nv], leading positions to leave out, limit of velocities, out: [N,D])."""
    shown = qpos.shape[1] - skipped
    for i in range(len(out)):
        for j in range(shown):
            out[i, j] = qpos[i, skipped + j]
        for j in range(qvel.shape[1]):
            speed = qvel[i, j]
            out[i, shown + j] = largest if speed > largest else -largest if speed < -largest else speed


@compiled_loops(frozenset())
def run_outcome(
    positions: Array,
    dt: float,
    actions: Array,
    qpos: Array,
    qvel: Array,
    low: Array,
    high: Array,
    forward: float,
    control: float,
    reward: float,
    terminates: bool,
    rewards: Array,
    ends: Array,
) -> None:
    """(positions [N], dt, actions [N,A] float32, qpos [N,nq], qvel [N,nv], low and high [nq+nv], weights of speed and
    control, reward of the healthy, whether the unhealthy end, out: rewards, ends [N] bool). Speed is the
    change of the first of qpos since `positions`, which are updated. Rounded as numpy does for up to 7 actions,
    squares of actions in float32.

    Healthy: every number is strictly between its bounds; without bounds, it may be anything."""
    width = qpos.shape[1]
    for i in range(len(rewards)):
        healthy = True
        for j in range(width):
            healthy &= (low[j] < qpos[i, j] or low[j] == -np.inf) and (qpos[i, j] < high[j] or high[j] == np.inf)
        for j in range(qvel.shape[1]):
            k = width + j
            healthy &= (low[k] < qvel[i, j] or low[k] == -np.inf) and (qvel[i, j] < high[k] or high[k] == np.inf)
        squares = actions[i, 0] * actions[i, 0]
        for j in range(1, actions.shape[1]):
            squares += actions[i, j] * actions[i, j]
        speed = (qpos[i, 0] - positions[i]) / dt
        positions[i] = qpos[i, 0]
        rewards[i] = forward * speed + reward * healthy - control * squares
        ends[i] = terminates and not healthy
