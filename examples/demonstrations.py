"""Records demonstrations of scripted experts for eight robot tasks, in the layout of robomimic's files.

    python examples/demonstrations.py lift.hdf5                # robosuite's Lift
    python examples/demonstrations.py door.hdf5                # robosuite's Door
    python examples/demonstrations.py fetch_push.hdf5          # FetchPush of Gymnasium-Robotics
    python examples/demonstrations.py metaworld_push.hdf5      # push-v3 of Meta-World
    python examples/demonstrations.py metaworld_drawer.hdf5    # drawer-open-v3 of Meta-World
    python examples/demonstrations.py dm_reach.hdf5            # reach_site_features of dm-control
    python examples/demonstrations.py maniskill_pick.hdf5 --python maniskill/bin/python    # ManiSkill's PickCube
    python examples/demonstrations.py maniskill_push_camera.hdf5 --python maniskill/bin/python    # PushCube with images

`--task` or the name of the file chooses the task. Needs `rl-platform environment manipulation` once, or the setup of
docs/maniskill.md, and `pip install h5py`. Executed actions have noise and the file has those of the expert, so a clone
of it learns to correct its errors (Laskey et al., "DART", 2017).
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import h5py
import mujoco
import numpy as np

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.vector import EpisodeStats, VectorEnv
from rl_platform.errors import PlatformError

OPEN, CLOSE = -1.0, 1.0
UP = np.array([0.0, 0.0, 1.0])
LIFTED = 0.92  # height of robosuite's cube at the end, in metres; the table is at 0.8
# dm-control's Jaco arm: offset of each link from the one before in metres; its rotation, a quaternion (w, x, y, z)
JACO_BASE = np.array([0.0, 0.4, 0.0])
JACO = (
    ((0.0, 0.0, 0.15675), (0.0, 0.0, 1.0, 0.0)),
    ((0.0, 0.0016, -0.11875), (0.0, 0.0, -(0.5**0.5), 0.5**0.5)),
    ((0.0, -0.41, 0.0), (0.0, 0.0, 1.0, 0.0)),
    ((0.0, 0.2073, -0.0114), (0.0, 0.0, -(0.5**0.5), 0.5**0.5)),
    ((0.0, -0.03703, -0.06414), (0.0, 0.0, 0.5, 0.75**0.5)),
    ((0.0, -0.03703, -0.06414), (0.0, 0.0, 0.5, 0.75**0.5)),
)
JACO_SPEED = np.array([0.628] * 3 + [0.837] * 3)  # of its joints, at most, in radians per second


class Task(NamedTuple):
    """parts: of an observation, and their sizes; of images their shapes. noisy: components of an action.

    episodes: to record by default. noise: standard deviation of the noise on executed actions, by default.
    least_return: of an episode that is written, where the task reports no success.
    """

    env: EnvDescription
    parts: Mapping[str, int | tuple[int, ...]]
    expert: Callable[[np.ndarray], np.ndarray]
    noisy: slice
    episodes: int
    noise: float = 0.2
    least_return: float = float("inf")


def lift(observation: np.ndarray) -> np.ndarray:
    """Goes above the cube, down around it, closes the hand, and lifts it. At action 1 the hand moves by 0.05 m."""
    hand, (x, y, z, w), fingers, cube = observation[:3], observation[3:7], observation[7:9], observation[9:12]
    to_cube, width, action = cube - hand, fingers[0] - fingers[1], np.zeros(7)
    between = 0.03 < width < 0.06  # the cube is 0.04 m wide; an open hand 0.08 m
    aside, above = np.linalg.norm(to_cube[:2]), -to_cube[2]
    at_cube = (aside < 0.02 and above < 0.01) or (between and max(aside, above) < 0.03)
    action[6] = CLOSE if at_cube else OPEN
    if at_cube and between:
        action[2] = (LIFTED - cube[2]) / 0.05
    else:
        height = 0.06 if aside > (0.015 if above > 0.03 else 0.025) else 0.0
        action[:3] = (to_cube + np.array([0.0, 0.0, height])) / 0.05
    action[3:6] = 4.0 * np.sign(x) * np.array([w, z, -y])  # turns the hand downwards: quaternion 1, 0, 0, 0
    return np.clip(action, -1.0, 1.0)


def door(observation: np.ndarray) -> np.ndarray:
    """Grips the end of the handle from above, turns it down and pulls the door, which opens towards the hand.

    The hand turns with the door and leans away from it, because the inner finger needs the gap behind the handle.
    """
    hand, (x, y, z, w), fingers = observation[:3], observation[3:7], observation[7:9]
    panel, handle, hinge, turn = observation[9:12], observation[12:15], observation[15], observation[16]
    # Angle of the door seen from above: the end of the handle is 0.1 m in front of it
    ahead, seen = (handle - panel)[:2], np.array([-0.05 - 0.125 * (1.0 - np.cos(turn)), -0.1])
    angle = np.arctan2(ahead[1], ahead[0]) - np.arctan2(seen[1], seen[0])
    out, along = np.array([np.sin(angle), -np.cos(angle), 0.0]), np.array([np.cos(angle), np.sin(angle), 0.0])
    to_handle, width, action = handle + 0.022 * out - hand, fingers[0] - fingers[1], np.zeros(7)
    action[3:6] = 4.0 * np.sign(x) * np.array([w, z, -y]) + 0.2 * along - 2.0 * out[0] * UP
    aside, above = np.linalg.norm(to_handle[:2]), -to_handle[2]
    at_handle = aside < 0.02 and above < 0.01
    held = 0.025 < width < 0.05 and np.linalg.norm(to_handle) < 0.05  # the handle is 0.03 m thick
    action[6] = CLOSE if held or at_handle else OPEN
    if held and hinge < 0.15:
        further = min(turn + 0.6, 1.3)
        arc = (np.cos(further) - np.cos(turn)) * along - (np.sin(further) - np.sin(turn)) * UP
        action[:3] = (to_handle + 0.125 * arc) / 0.05
        if turn > 1.0 or hinge > 0.03:
            action[:3] = 0.5 * action[:3] + out
    elif held:
        action[:3] = to_handle / 0.05 + (1.0 if hinge < 0.36 else 0.2) * out
    elif hinge > 0.3:
        action[6] = CLOSE
    elif turn > 0.3 and not at_handle:  # the hand presses the handle from above
        action[:3] = UP + 0.3 * out
    else:
        height = 0.08 if aside > (0.015 if above > 0.04 else 0.03) and not at_handle else 0.0
        action[:3] = (to_handle + height * UP) / 0.05
    return np.clip(action, -1.0, 1.0)


def fetch_push(observation: np.ndarray) -> np.ndarray:
    """Goes above a point behind the block, down to it, and pushes the block to its goal, with the fingers closed."""
    block, goal, hand = observation[:3], observation[3:6], observation[6:9]
    to_goal, action = goal[:2] - block[:2], np.zeros(4)
    distance = np.linalg.norm(to_goal)
    if distance < 0.02:
        return action
    ahead = to_goal / distance
    from_block = hand[:2] - block[:2]
    along = from_block @ ahead
    aside = from_block - along * ahead
    to_start = -0.07 * ahead - from_block
    behind = along < -0.02 and np.linalg.norm(aside) < 0.025
    if behind and hand[2] < block[2] + 0.03:
        action[:2] = 5.0 * distance * ahead - 10.0 * aside
        action[2] = 10.0 * (block[2] - hand[2])
    elif behind and np.linalg.norm(to_start) < 0.025:
        action[:2] = 10.0 * to_start
        action[2] = 10.0 * (block[2] - hand[2])
    else:
        action[2] = 10.0 * (block[2] + 0.1 - hand[2])
        if hand[2] > block[2] + 0.05:
            action[:2] = 10.0 * to_start
    return np.clip(action, -1.0, 1.0)


def metaworld_push(observation: np.ndarray) -> np.ndarray:
    """Goes above the puck, down to it, closes the fingers and moves to the goal."""
    hand, puck, goal = observation[:3], observation[4:7], observation[36:39]
    to_puck = puck - hand
    if np.linalg.norm(to_puck[:2]) > 0.02:
        target, gripper = to_puck + np.array([0.0, 0.0, 0.15]), OPEN
    elif abs(to_puck[2]) > 0.04:
        target, gripper = to_puck + np.array([0.0, 0.0, 0.02]), 0.0
    else:
        target, gripper = goal - hand, CLOSE
    return np.clip(np.append(10.0 * target, gripper), -1.0, 1.0)


def metaworld_drawer(observation: np.ndarray) -> np.ndarray:
    """Goes above the handle, down behind it, and pulls the drawer to its goal, with the fingers open."""
    hand, handle, goal = observation[:3], observation[4:7], observation[36:39]
    to_handle = handle - hand
    if np.linalg.norm(to_handle[:2]) > 0.05:
        target = to_handle + np.array([0.0, 0.0, 0.12])
        if to_handle[2] > -0.06:  # beside the handle: up first
            target[:2] = 0.0
    elif to_handle[2] < -0.02:
        target = to_handle
    else:
        target = np.array([to_handle[0], 2.0 * (goal[1] - handle[1]), to_handle[2]])
    return np.clip(np.append(10.0 * target, OPEN), -1.0, 1.0)


def dm_reach(observation: np.ndarray) -> np.ndarray:
    """Turns the joints so that the hand moves straight to its target (damped least squares, Wampler 1986)."""
    target, angles, hand = observation[:3], observation[3:15].reshape(6, 2), observation[33:36]
    jacobian = jaco_jacobian(angles, hand)
    speeds = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + 1e-3 * np.eye(3), 4.0 * (target - hand))
    return np.append(speeds / max(1.0, np.abs(speeds / JACO_SPEED).max()), np.zeros(3))  # the fingers rest


def jaco_jacobian(angles: np.ndarray, hand: np.ndarray) -> np.ndarray:
    """Returns the velocity of the hand for each joint's, [3,6], from sines and cosines of the joints, [6,2]."""
    columns, origin, rotation, link = [], JACO_BASE, np.eye(3), np.empty(9)
    for (offset, quaternion), (sine, cosine) in zip(JACO, angles, strict=True):
        mujoco.mju_quat2Mat(link, np.array(quaternion))
        origin = origin + rotation @ np.array(offset)
        rotation = rotation @ link.reshape(3, 3)
        columns.append(np.cross(rotation[:, 2], hand - origin))  # each joint turns about the z axis of its link
        rotation = rotation @ np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])
    return np.stack(columns, 1)


def maniskill_pick(observation: np.ndarray) -> np.ndarray:
    """Goes above the cube, down around it, closes the hand and carries it to the goal. Action 1 moves 0.1 m."""
    width, held, hand = observation[7] + observation[8], observation[18], observation[19:22]
    goal, cube = observation[26:29], observation[29:32]
    to_cube, action = cube - hand, np.zeros(4)
    between = 0.03 < width < 0.07  # the cube is 0.04 m wide; an open hand 0.08 m
    aside, above = np.linalg.norm(to_cube[:2]), -to_cube[2]
    at_cube = (aside < 0.015 and above < 0.01) or (between and max(aside, above) < 0.03)
    # A funnel: a height that jumps, and a cube that is only just reached, are hard to clone
    height = 0.0 if at_cube else 0.06 * np.clip((aside - 0.01) / 0.03, 0.0, 1.0) - 0.005
    action[:3] = (goal - cube if held else to_cube + height * UP) / 0.1
    action[3] = -1.0 if held or at_cube else 1.0  # unlike robosuite, 1 opens
    return np.clip(action, -1.0, 1.0)


def maniskill_push(observation: np.ndarray) -> np.ndarray:
    """Goes above a point behind the cube, down to it, and pushes the cube ahead (+x), with the fingers closed."""
    hand, cube, action = observation[18:21], observation[28:31], np.zeros(4)
    to_start = cube - np.array([0.05, 0.0, 0.0]) - hand
    behind, aside = to_start[0] > -0.02, abs(to_start[1])
    action[:3], action[3] = to_start / 0.1, -1.0
    if behind and aside < 0.02 and hand[2] < 0.05:
        action[0] = 1.0
    elif np.linalg.norm(to_start[:2]) > 0.02:
        action[2] += 0.6
    return np.clip(action, -1.0, 1.0)


def robosuite_task(name: str, steps: int, parts: Iterable[str]) -> EnvDescription:
    kwargs = {"task": name, "horizon": steps, "observations": list(parts)}
    return EnvDescription("rl_platform.envs.embodied.suites.robosuite:Task", kwargs, python="manipulation")


def metaworld_task(name: str, steps: int) -> EnvDescription:
    kwargs = {"env_name": name, "seed": 1}
    return EnvDescription("metaworld:Meta-World/MT1", kwargs, max_episode_steps=steps, python="manipulation")


def maniskill_task(name: str, **kwargs: object) -> EnvDescription:
    given = {"task": name, "control_mode": "pd_ee_delta_pos", **kwargs}
    return EnvDescription(
        "rl_platform.envs.embodied.suites.maniskill:ManiSkillTask", given, python="maniskill/bin/python"
    )


LIFT = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "object-state": 10}
DOOR = {
    "robot0_eef_pos": 3,
    "robot0_eef_quat": 4,
    "robot0_gripper_qpos": 2,
    "door_pos": 3,
    "handle_pos": 3,
    "hinge_qpos": 1,
    "handle_qpos": 1,
}
TASKS = {
    "lift": Task(robosuite_task("Lift", 60, LIFT), LIFT, lift, noisy=slice(6), episodes=20),
    "door": Task(robosuite_task("Door", 100, DOOR), DOOR, door, noisy=slice(3), episodes=30),
    "fetch_push": Task(
        EnvDescription("gymnasium_robotics:FetchPushDense-v4", python="manipulation"),
        {"achieved_goal": 3, "desired_goal": 3, "observation": 25},
        fetch_push,
        noisy=slice(3),
        episodes=300,
    ),
    "metaworld_push": Task(metaworld_task("push-v3", 150), {"state": 39}, metaworld_push, noisy=slice(3), episodes=100),
    "metaworld_drawer": Task(
        metaworld_task("drawer-open-v3", 100), {"state": 39}, metaworld_drawer, noisy=slice(3), episodes=20
    ),
    "dm_reach": Task(
        EnvDescription(
            "rl_platform.envs.embodied.suites.dm_control:Manipulation",
            {"task": "reach_site_features"},
            python="manipulation",
        ),
        {"state": 45},
        dm_reach,
        noisy=slice(9),
        episodes=300,
        least_return=150.0,
    ),
    "maniskill_pick": Task(
        maniskill_task("PickCube-v1"), {"state": 42}, maniskill_pick, noisy=slice(3), episodes=150, noise=0.1
    ),
    "maniskill_push_camera": Task(  # the policy observes state and images, the expert the objects too
        maniskill_task("PushCube-v1", observations="state+rgb", size=64),
        {"state": 25, "objects": 10, "rgb": (64, 64, 3)},
        maniskill_push,
        noisy=slice(3),
        episodes=120,
        noise=0.1,
    ),
}


def record(path: str, task: Task, episodes: int, noise: float, workers: int) -> float:
    """Writes the successful ones of `episodes` episodes; returns their share."""
    unfinished = Path(f"{path}.unfinished")  # an interrupted recording leaves no file that a run would read
    unfinished.absolute().parent.mkdir(parents=True, exist_ok=True)
    envs = VectorEnv(task.env, workers, workers)
    parts = np.cumsum([np.prod(shape, dtype=int) for shape in task.parts.values()])[:-1]
    draw, written = np.random.default_rng(0), 0
    try:
        with h5py.File(unfinished, "w") as file:
            for first in range(0, episodes, workers):
                observations, seen, chosen = envs.reset(range(first, first + workers)), [], []
                ended: dict[int, EpisodeStats | None] = {}  # None: invalid. These environments begin another episode
                while len(ended) < workers:
                    actions = np.stack([task.expert(each) for each in observations])
                    seen.append(observations)
                    chosen.append(actions)
                    moved = actions.copy()
                    moved[:, task.noisy] += noise * draw.normal(size=moved[:, task.noisy].shape)
                    result = envs.step(np.clip(moved, -1.0, 1.0).astype(np.float32))
                    observations = result.observations
                    valid = {episode.env_index: episode for episode in result.episodes}
                    ended = {int(index): valid.get(int(index)) for index in np.flatnonzero(result.ended)} | ended
                for index, episode in sorted(ended.items()):
                    asked = first + index < episodes  # the last round of workers may be one too many
                    if not asked or episode is None or not succeeded(episode, task):
                        continue
                    group = file.create_group(f"data/demo_{written}")
                    group["actions"] = np.stack(chosen)[: episode.length, index].astype(np.float32)
                    each = np.split(np.stack(seen)[: episode.length, index], parts, 1)
                    for (name, shape), part in zip(task.parts.items(), each, strict=True):
                        if isinstance(shape, tuple):  # an image, whose pixels were divided by 255
                            pixels = np.rint(255 * part).astype(np.uint8).reshape(-1, *shape)
                            group.create_dataset(f"obs/{name}", data=pixels, compression="gzip")
                        else:
                            group[f"obs/{name}"] = part
                    written += 1
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
        envs.close()
    return written / episodes


def succeeded(episode: EpisodeStats, task: Task) -> bool:
    return episode.success.at_end if episode.success is not None else episode.return_ >= task.least_return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--task", choices=TASKS, help="by default the name of the file, without .hdf5")
    parser.add_argument("--episodes", type=int, help="by default as many as the task's config was run with")
    parser.add_argument("--noise", type=float, help="standard deviation of the noise on executed actions")
    parser.add_argument("--python", help="the interpreter that has the simulator (env.python)")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if (name := options.task or Path(options.file).stem) not in TASKS:
        parser.error(f"{options.file} names no task: add --task {' or --task '.join(TASKS)}")
    task = TASKS[name]
    if options.python is not None:
        task = task._replace(env=replace(task.env, python=options.python))
    episodes, noise = options.episodes or task.episodes, task.noise if options.noise is None else options.noise
    if episodes < 1 or options.workers < 1:
        parser.error("--episodes and --workers are at least 1")
    try:
        share = record(options.file, task, episodes, noise, options.workers)
    except (PlatformError, OSError) as error:
        parser.error(f"{options.file}: {error}")
    print(f"{options.file}: {share:.0%} of {episodes} episodes succeeded and were written")
