"""Stable-Baselines3's PPO with the tuned hyperparameters of its zoo, measured like our runs: a process of its own.

Its learning curve is written in the form of ours (`metrics.jsonl`), with returns of the same evaluation episodes from
the same seeds. Its small networks are fastest in one thread, so it has one, and its seconds are those of that thread on
a processor: what else the machine does costs it little. Started by `results.py`; not covered: going on with a run that
was interrupted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.evaluate import evaluate
from rl_platform.envs.embodied.success import success_rates
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.metrics import RunLog
from rl_platform.reporter import RunInfo

ZOO_SOURCE = (
    "https://github.com/DLR-RM/rl-baselines3-zoo/blob/208b6fdf3a9aa24de44b2e068c6e5f6a07d97fcc/hyperparams/ppo.yml"
)
# tuned by the zoo for version 4 of the MuJoCo tasks; the rest is Stable-Baselines3's default, as there
ZOO: Mapping[str, Mapping[str, Any]] = yaml.safe_load("""
HalfCheetah-v5:
  {normalize: true, n_envs: 1, n_steps: 512, batch_size: 64, n_epochs: 20, gamma: 0.98, gae_lambda: 0.92,
   learning_rate: 2.0633e-05, ent_coef: 0.000401762, clip_range: 0.1, max_grad_norm: 0.8, vf_coef: 0.58096,
   policy: &wide {activation: relu, net_arch: [256, 256], log_std_init: -2.0, ortho_init: false}}
Hopper-v5:
  {normalize: true, n_envs: 1, n_steps: 512, batch_size: 32, n_epochs: 5, gamma: 0.999, gae_lambda: 0.99,
   learning_rate: 9.80828e-05, ent_coef: 0.00229519, clip_range: 0.2, max_grad_norm: 0.7, vf_coef: 0.835671,
   policy: *wide}
Walker2d-v5:
  {normalize: true, n_envs: 1, n_steps: 512, batch_size: 32, n_epochs: 20, gamma: 0.99, gae_lambda: 0.95,
   learning_rate: 5.05041e-05, ent_coef: 0.000585045, clip_range: 0.1, max_grad_norm: 1.0, vf_coef: 0.871923}
Ant-v5:
  {normalize: true, n_envs: 1}
CartPole-v1:
  {normalize: false, n_envs: 8, n_steps: 32, batch_size: 256, n_epochs: 20, gamma: 0.98, gae_lambda: 0.8,
   learning_rate: linear 0.001, ent_coef: 0.0, clip_range: linear 0.2}
""")


def train(asked: Mapping[str, Any], folder: Path) -> None:
    """`asked`: env (id, kwargs, max_episode_steps), seed, env_steps, every (steps between evaluations), evaluation
    (episodes, seed)."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_num_threads(1)
    description = EnvDescription(**asked["env"])
    settings = dict(ZOO[description.id])
    envs, normalize = _envs(description, settings, asked["seed"])
    model = PPO("MlpPolicy", envs, seed=asked["seed"], device="cpu", **_arguments(settings))
    episodes, first_seed = asked["evaluation"]["episodes"], asked["evaluation"]["seed"]
    held_out = VectorEnv(description, episodes)
    log = RunLog(folder)
    log.start(RunInfo(description.id, "embodied", folder, 0))

    def act(observations: Any) -> Any:
        return model.predict(envs.normalize_obs(observations) if normalize else observations, deterministic=True)[0]

    class Curve(BaseCallback):  # type: ignore[misc]
        """A line of metrics after every rollout, with an evaluation where one is due."""

        def _on_training_start(self) -> None:
            self.lines, self.logged, self.due = 0, 0, 0
            self.began = time.process_time()
            self._write()

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if self.num_timesteps > self.logged:
                self._write()

        def _write(self) -> None:
            metrics: dict[str, float] = {"perf/env_steps": self.num_timesteps - self.logged}
            if model.ep_info_buffer:
                metrics["episode/return"] = sum(info["r"] for info in model.ep_info_buffer) / len(model.ep_info_buffer)
            evaluated = time.process_time()
            if self.num_timesteps >= min(self.due, asked["env_steps"]):
                self.due += asked["every"]
                found = evaluate(held_out, act, episodes, first_seed)
                metrics["val/return"] = sum(found.returns) / max(len(found.returns), 1)
                metrics |= success_rates(found.successes, "val")
                metrics["time/validate"] = time.process_time() - evaluated
            metrics["time/step"] = time.process_time() - self.began
            self.began, self.logged = time.process_time(), self.num_timesteps
            log.step(self.lines, metrics)
            self.lines += 1

    curve = Curve()
    try:
        model.learn(asked["env_steps"], callback=curve)
        curve._write()
    finally:
        log.close()
        envs.close()
        held_out.close()


def _envs(description: EnvDescription, settings: dict[str, Any], seed: int) -> tuple[Any, bool]:
    """Vector environments as the zoo builds them, and whether they normalise."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    kwargs = dict(description.kwargs)
    if description.max_episode_steps is not None:
        kwargs["max_episode_steps"] = description.max_episode_steps
    envs: Any = make_vec_env(description.id.rpartition(":")[2], settings.pop("n_envs"), seed=seed, env_kwargs=kwargs)
    if normalize := settings.pop("normalize"):
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    return envs, normalize


def _arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of Stable-Baselines3's PPO."""
    import torch

    found = {name: _schedule(value) for name, value in settings.items() if name != "policy"}
    if policy := settings.get("policy"):
        activation = {"relu": torch.nn.ReLU}[policy["activation"]]
        rest = {name: value for name, value in policy.items() if name != "activation"}
        found["policy_kwargs"] = {**rest, "activation_fn": activation}
    return found


def _schedule(value: Any) -> Any:
    """`linear 0.1` falls from there to 0 over the training."""
    if not isinstance(value, str):
        return value
    start = float(value.removeprefix("linear "))
    return lambda left: left * start


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    train(json.loads((folder / "asked.json").read_text(encoding="utf-8")), folder)
