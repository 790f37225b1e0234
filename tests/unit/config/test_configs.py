"""Every shipped YAML loads, and so do the blocks that public PPO guides print."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rl_platform.config import load_config

CONFIGS = Path(__file__).parents[3] / "configs"

EMBODIED_GUIDE = """
algorithm:
  normalize_advantages: True
  group_size: 1
  adv_type: gae
  loss_type: actor_critic
  loss_agg_func: "token-mean"
  rollout_micro_batch_size: 256
  logprob_forward_micro_batch_size: 16
  entropy_bonus: 0
  clip_ratio_high: 0.2
  clip_ratio_low: 0.2
  value_clip: 0.2
  gamma: 0.99
  gae_lambda: 0.95
  huber_delta: 10.0
"""

REASONING_GUIDE = """
algorithm:
  group_size: 1
  adv_type: gae
  gamma: 1
  gae_lambda: 1
  normalize_advantages: True
  loss_type: actor
  loss_agg_func: "token-mean"
  clip_ratio_c: 3.0
  clip_ratio_low: 0.2
  clip_ratio_high: 0.2
  value_clip: 0.2

cluster:
  num_nodes: 1
  component_placement:
    actor,critic,rollout,reward: all

actor:
  group_name: "ActorGroup"
  training_backend: megatron

critic:
  use_critic_model: true
  group_name: "CriticGroup"
  training_backend: megatron
"""


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shipped_config_loads_and_its_resolved_form_loads_to_the_same(path: Path, tmp_path: Path) -> None:
    loaded = load_config(path)
    assert loaded.config.runner.task_type == path.relative_to(CONFIGS).parts[0]
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(loaded.resolved_yaml())
    assert load_config(resolved).config == loaded.config


def test_there_are_shipped_configs_of_both_tasks() -> None:
    assert {path.parent.name for path in CONFIGS.glob("*/*.yaml")} == {"embodied", "reasoning"}


def test_embodied_guide_block(tmp_path: Path) -> None:
    rest = """
runner: {task_type: embodied}
cluster: {component_placement: {"actor,env,rollout": all}}
env: {id: CartPole-v1}
"""
    path = tmp_path / "guide.yaml"
    path.write_text(rest + EMBODIED_GUIDE)
    algorithm = load_config(path).config.algorithm
    assert yaml.safe_load(EMBODIED_GUIDE)["algorithm"].items() <= algorithm.model_dump().items()
    assert isinstance(algorithm.entropy_bonus, float)


def test_reasoning_guide_block(tmp_path: Path) -> None:
    rest = """
runner: {task_type: reasoning}
data: {task: {type: digits}}
"""
    guide = REASONING_GUIDE
    path = tmp_path / "guide.yaml"
    path.write_text(rest + guide)
    config = load_config(path, ["actor.model.path=folder"]).config
    written = yaml.safe_load(guide)
    assert written["algorithm"].items() <= config.algorithm.model_dump().items()
    assert config.cluster.component_placement == written["cluster"]["component_placement"]
    assert (config.actor.group_name, config.actor.training_backend) == ("ActorGroup", "megatron")
    assert (config.critic.group_name, config.critic.training_backend) == ("CriticGroup", "megatron")
    assert config.critic.use_critic_model
