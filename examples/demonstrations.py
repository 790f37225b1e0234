"""Records demonstrations of a scripted expert for robosuite's Lift, in the layout of robomimic's files.

    python examples/demonstrations.py lift.hdf5 --episodes 50

Needs `rl-platform environment manipulation` once, and `pip install h5py`. Executed actions have noise and the file has
those of the expert, so a clone of it learns to correct its errors (Laskey et al., "DART", 2017).
"""

import argparse

import h5py
import numpy as np

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.vector import VectorEnv

PARTS = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "object-state": 10}  # and their sizes
LIFT = EnvDescription(
    "rl_platform.envs.embodied.suites.robosuite:Task",
    {"task": "Lift", "horizon": 60, "observations": list(PARTS)},
    python="manipulation",
)
METRES = 0.05  # that the hand moves at action 1
OPEN, CLOSE = -1.0, 1.0
HEIGHT = 0.92  # to which the cube is lifted, in metres; the table is at 0.8


def expert(observation: np.ndarray) -> np.ndarray:
    """Goes above the cube, down to it, closes the hand, and lifts it."""
    hand, fingers, cube = observation[:3], observation[7:9], observation[9:12]
    to_cube, action = cube - hand, np.zeros(7)
    at_cube, closed = np.linalg.norm(to_cube) < 0.02, fingers[0] - fingers[1] < 0.06
    aside = np.linalg.norm(to_cube[:2]) > 0.015
    action[6] = CLOSE if at_cube else OPEN
    if at_cube and closed:
        action[2] = (HEIGHT - cube[2]) / METRES
    elif not at_cube:
        target = to_cube + np.array([0.0, 0.0, 0.06 if aside else 0.0])
        action[:3] = target / METRES
    return np.clip(action, -1.0, 1.0)


def record(path: str, episodes: int, noise: float, workers: int) -> float:
    """Writes the successful ones of `episodes` episodes; returns their share."""
    envs = VectorEnv(LIFT, workers, workers)
    parts = np.cumsum(list(PARTS.values()))[:-1]
    draw, written = np.random.default_rng(0), 0
    try:
        with h5py.File(path, "w") as file:
            for first in range(0, episodes, workers):
                seen, chosen, observations, over = [], [], envs.reset(range(first, first + workers)), False
                while not over:
                    actions = np.stack([expert(each) for each in observations])
                    seen.append(observations)
                    chosen.append(actions)
                    moved = actions + noise * draw.normal(size=actions.shape) * [1, 1, 1, 1, 1, 1, 0]
                    result = envs.step(np.clip(moved, -1.0, 1.0).astype(np.float32))
                    observations, over = result.observations, bool(result.ended.all())
                for episode in result.episodes:
                    if episode.success is None or not episode.success.at_end:
                        continue
                    group = file.create_group(f"data/demo_{written}")
                    group["actions"] = np.stack(chosen)[:, episode.env_index].astype(np.float32)
                    for name, part in zip(PARTS, np.split(np.stack(seen)[:, episode.env_index], parts, 1), strict=True):
                        group[f"obs/{name}"] = part
                    written += 1
    finally:
        envs.close()
    return written / episodes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--noise", type=float, default=0.2, help="standard deviation of the noise on executed actions")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    share = record(options.file, options.episodes, options.noise, options.workers)
    print(f"{options.file}: {share:.0%} of {options.episodes} episodes succeeded and were written")
