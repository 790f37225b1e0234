"""Environment steps per second of whole PPO training, next to Stable-Baselines3 and CleanRL in the same run.

All follow configs/embodied/ppo.yaml with the given changes: environment and number of environments, steps per rollout,
epochs, mini-batch, one tanh trunk with a policy head and a value head, running normalisation of observations and
rewards, episode statistics, clipped policy and value losses, Adam, gradient clipping, on the CPU. A lap is one PPO
step: a rollout and its epochs. All run with their default number of threads and with one thread. Stable-Baselines3 runs
with its environments in one process and, if they are few, also with a process for each. The fastest variant of each
library counts. `--cleanrl` adds CleanRL's `ppo_continuous_action.py`, an unchanged file of a checkout, which needs the
package tyro. It runs with Gymnasium's environments and, if EnvPool is installed, with EnvPool's in as many threads as
cores. Its policy and its value function are two networks of 64 x 64.
Not covered: learning curves, evaluation.

    python benchmarks/embodied.py [key=value ...] [--cleanrl cleanrl/cleanrl/ppo_continuous_action.py] [--rounds 8]
        [--warm-up 2] [--threads 1] [--quick] [--json FILE]
    python benchmarks/embodied.py env.id=Hopper-v5 env.num_envs=8 env.rollout_steps=256 data.mini_batch_size=64
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from _common import (
    LONG_RUN,
    WORK,
    Entry,
    Lap,
    Turns,
    machine,
    new_parser,
    print_phases,
    print_verdict,
    race,
    rate,
    ratios,
    train_ours,
    write_json,
)

from rl_platform.config import load_config

CONFIG = Path(__file__).parents[1] / "configs/embodied/ppo.yaml"
TARGET = 3.0
MOST_REST = 0.1
OURS, SB3, CLEANRL, ENVPOOL = "rl_platform", "Stable-Baselines3", "CleanRL, Gymnasium", "CleanRL, EnvPool"
STEPS = "perf/env_steps"
MOST_PROCESSES = 16  # of Stable-Baselines3: one per environment, and each takes a few hundred MB


def ours(turns: Turns, settings: argparse.Namespace) -> None:
    train_ours(turns, str(CONFIG), [*settings.changes, "env.evaluation={episodes: 1}"])


def stable_baselines(turns: Turns, settings: argparse.Namespace) -> None:
    import torch
    from gymnasium import Space
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    config = load_config(str(CONFIG), settings.changes).config
    algorithm, actor, env = config.algorithm, config.actor, config.env
    assert actor.model.activation == "tanh"

    class Trunk(BaseFeaturesExtractor):
        """The hidden layers that policy and value share."""

        def __init__(self, observation_space: Space) -> None:
            super().__init__(observation_space, actor.model.hidden_sizes[-1])
            widths = [observation_space.shape[0], *actor.model.hidden_sizes]
            layers = [(torch.nn.Linear(a, b), torch.nn.Tanh()) for a, b in pairwise(widths)]
            self.layers = torch.nn.Sequential(*(module for pair in layers for module in pair))

        def forward(self, observations: torch.Tensor) -> torch.Tensor:
            return self.layers(observations)

    class EveryRolloutALap(BaseCallback):
        """A lap reaches from the beginning of one rollout to that of the next, over the epochs between them."""

        def _on_rollout_start(self) -> None:
            turns.next({STEPS: env.num_envs * env.rollout_steps})

        def _on_step(self) -> bool:
            return True

    kind = SubprocVecEnv if settings.processes else DummyVecEnv
    envs = VecNormalize(
        make_vec_env(env.id, env.num_envs, seed=config.runner.seed, vec_env_cls=kind),
        clip_obs=env.clip_observations,
        clip_reward=env.clip_rewards,
        gamma=algorithm.gamma,
    )
    model = PPO(
        "MlpPolicy",
        envs,
        learning_rate=actor.optim.lr,
        n_steps=env.rollout_steps,
        batch_size=config.data.mini_batch_size,
        n_epochs=algorithm.ppo_epochs,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
        clip_range=algorithm.clip_ratio_high,
        clip_range_vf=algorithm.value_clip,
        normalize_advantage=algorithm.normalize_advantages,
        ent_coef=algorithm.entropy_bonus,
        vf_coef=algorithm.value_loss_scale,
        max_grad_norm=actor.optim.clip_grad,
        policy_kwargs={"features_extractor_class": Trunk, "net_arch": [], "log_std_init": actor.model.initial_log_std},
        seed=config.runner.seed,
        device="cpu",
    )
    try:
        model.learn(LONG_RUN * env.num_envs * env.rollout_steps, callback=EveryRolloutALap())
    finally:
        envs.close()


def cleanrl(turns: Turns, settings: argparse.Namespace) -> None:
    from _cleanrl import train

    config = load_config(str(CONFIG), settings.changes).config
    train(turns, settings.cleanrl, config, {STEPS: config.env.num_envs * config.env.rollout_steps}, settings.envpool)


def contestants(settings: argparse.Namespace, threads: int | None) -> dict[str, Entry]:
    num_envs = load_config(str(CONFIG), settings.changes).config.env.num_envs
    places = [("one process", False)]
    if num_envs <= MOST_PROCESSES:
        places.append(("process each", True))
    found = {}
    for suffix, count in [("", threads)] if threads else [("", None), (", 1 thread", 1)]:
        found[f"{OURS}{suffix}"] = Entry(ours, settings, count)
        for where, processes in places:
            variant = argparse.Namespace(**vars(settings), processes=processes)
            found[f"{SB3}, {where}{suffix}"] = Entry(stable_baselines, variant, count)
        for name in cleanrl_variants(settings):
            variant = argparse.Namespace(**vars(settings), envpool=name == ENVPOOL)
            found[f"{name}{suffix}"] = Entry(cleanrl, variant, count)
    return found


def cleanrl_variants(settings: argparse.Namespace) -> list[str]:
    if settings.cleanrl is None:
        return []
    return [CLEANRL, ENVPOOL] if importlib.util.find_spec("envpool") else [CLEANRL]


def best(laps: Mapping[str, Sequence[Lap]], library: str) -> str:
    return max((name for name in laps if name.startswith(library)), key=lambda name: rate(laps[name], STEPS))


def main() -> None:
    parser = new_parser(__doc__, rounds=8)
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes of the config, for all libraries")
    parser.add_argument("--cleanrl", type=Path, metavar="FILE", help="CleanRL's ppo_continuous_action.py")
    parser.set_defaults(warm_up=2)
    options = parser.parse_args()
    settings = argparse.Namespace(changes=list(options.changes), cleanrl=options.cleanrl)
    if options.quick:
        settings.changes.append("env.rollout_steps=32")
        options.rounds, options.warm_up = 2, 1

    found = machine(("torch", "gymnasium", "mujoco", "numpy", "stable-baselines3"))
    laps = race(contestants(settings, options.threads), options.warm_up, options.rounds)
    config = load_config(str(CONFIG), settings.changes).config
    env = config.env
    print(
        f"\n{env.id}, {env.num_envs} environments, {env.rollout_steps} steps, {config.algorithm.ppo_epochs} epochs, "
        f"mini-batches of {config.data.mini_batch_size}"
    )
    print(f"{'environment steps per second':<44} {'median':>8} {'fastest':>8}")
    for name, done in laps.items():
        fastest = max(lap.numbers[STEPS] / lap.seconds for lap in done)
        print(f"{name:<44} {rate(done, STEPS):8.0f} {fastest:8.0f}")
        if name.startswith(OURS):
            print_phases(done)
            rest = statistics.median(1.0 - lap.numbers[WORK] / lap.seconds for lap in done)
            print(f"  {rest:.1%} of the time outside physics, inference and optimizer steps; aim {MOST_REST:.0%}")
    mine = best(laps, OURS)
    for library in (SB3, *cleanrl_variants(settings)):
        theirs = best(laps, library)
        print_verdict(f"{mine} in multiples of {theirs}", ratios(laps[mine], laps[theirs], STEPS), TARGET)
    write_json(options.json, {"benchmark": "embodied", "options": vars(options), "machine": found, "laps": laps})


if __name__ == "__main__":
    main()
