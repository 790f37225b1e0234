"""Every kind of embodied policy between rollout, environment and learner: log-probs, bounds, bytes of images."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stand_ins import DirectRollout, context, embodied_config

from rl_platform.components.actor import EmbodiedActor
from rl_platform.components.environment import Environment
from rl_platform.components.policy_rollout import Observations, PolicyRollout, RemotePolicy
from rl_platform.config.schema import Config
from rl_platform.records import RolloutBatch, Weights


class Tiles(gymnasium.Env):
    """Observes random pictures; keeps the actions that it got. Bounds: `LOW`, `HIGH`. The reward of each episode's step
    `nan_at` is not a number."""

    LOW, HIGH = np.float32([-2.0, 1.0]), np.float32([2.0, 4.0])
    observation_space = gymnasium.spaces.Box(0, 255, (12, 10, 3), np.uint8)

    def __init__(self, discrete: bool = False, nan_at: int = -1) -> None:
        self.nan_at = nan_at
        self.action_space = gymnasium.spaces.Discrete(4) if discrete else gymnasium.spaces.Box(self.LOW, self.HIGH)
        self.taken: list[Any] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.taken.append(action)
        self.steps += 1
        reward = float("nan") if self.steps == self.nan_at else float(np.sum(action))
        return self._observe(), reward, False, False, {}

    def _observe(self):
        return self.np_random.integers(0, 256, (12, 10, 3), dtype=np.uint8)


gymnasium.register("Tiles-v0", Tiles, max_episode_steps=5)

CNN = {"type": "cnn", "cnn": {"channels": [4], "kernels": [4], "strides": [2]}, "hidden_sizes": [8]}
VLA = CNN | {
    "type": "vla",
    "random_init": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32, "max_positions": 64},
    "tokenizer": "bytes",
    "instruction": "tidy up",
    "action_bins": 5,
}
del VLA["hidden_sizes"]
SQUASHED = {"action_distribution": "squashed", "log_std": "state"}
MODELS = {
    "mlp": {"hidden_sizes": [8]},
    "squashed": {"hidden_sizes": [8]} | SQUASHED,
    "squashed chunks": {"hidden_sizes": [8], "num_action_chunks": 2} | SQUASHED,
    "cnn": CNN,
    "squashed cnn": CNN | SQUASHED,
    "vla": VLA,
    "frozen vla": VLA | {"train_backbone": False},
}


def config(model: dict[str, Any], lora: dict[str, Any] | None = None, **env: Any) -> Config:
    settings = {"id": "Tiles-v0", "num_envs": 4, "rollout_steps": 8, "normalize_observations": True} | env
    actor = {"model": model, "optim": {"lr": 1e-2}, "lora": lora}
    return embodied_config(settings, model, {"ppo_epochs": 2}, data={"mini_batch_size": 8}, actor=actor)


def moved(actor: EmbodiedActor) -> EmbodiedActor:
    """Away from the start at which heads are zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in actor.engine.parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return actor


def collected(settings: Config) -> tuple[RolloutBatch, EmbodiedActor, DirectRollout, Environment]:
    environment = Environment(context("env"), settings)
    spaces = environment.envs.spaces
    actor = moved(EmbodiedActor(context("actor"), settings, spaces))
    rollout = PolicyRollout(context("rollout"), settings, spaces)
    state = {name: tensor.clone() for name, tensor in actor.publish(0).state.items()}
    rollout.receive(Weights(0, state))
    policy = DirectRollout(rollout)
    batch, _ = environment.collect(0, RemotePolicy(policy, policy))
    return batch, actor, policy, environment


@pytest.mark.parametrize(
    ("kind", "discrete"), [*((kind, False) for kind in MODELS), ("mlp", True), ("cnn", True), ("vla", True)]
)
def test_the_ratio_of_the_first_epoch_is_one(kind: str, discrete: bool) -> None:
    batch, actor, _, environment = collected(config(MODELS[kind], kwargs={"discrete": discrete}))
    environment.close()
    log_probs = actor.evaluate(batch)["log_probs"]
    assert log_probs.std() > 0.01
    torch.testing.assert_close(log_probs, batch.rollout_log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_images_stay_bytes_and_executed_actions_keep_to_the_bounds(kind: str) -> None:
    batch, _, policy, environment = collected(config(MODELS[kind]))
    taken = np.array([env.unwrapped.taken for env in environment.envs._blocks[0]._envs])
    environment.close()
    assert {asked.array.dtype for asked in policy.asked} == {np.dtype(np.uint8)}
    assert batch.inputs["observations"].dtype == batch.end_observations.dtype == torch.uint8
    assert batch.inputs["observations"].flatten(0, 1).shape == (4 * 8 // (2 if "chunks" in kind else 1), 360)
    assert (taken >= Tiles.LOW).all()
    assert (taken <= Tiles.HIGH).all()
    if kind in ("mlp", "cnn"):
        assert policy.answers[0].executed is None
    else:
        executed = np.concatenate([answer.executed for answer in policy.answers]).reshape(-1, 4, 2)
        if "chunks" not in kind:
            np.testing.assert_allclose(taken.swapaxes(0, 1), executed)
        assert not np.array_equal(policy.answers[0].array, policy.answers[0].executed)
    if kind == "vla":
        assert batch.inputs["actions"].dtype == torch.int64
        assert batch.inputs["actions"].shape == (4, 8, 2)


def test_a_reward_that_is_not_finite_ends_an_episode_of_images_too() -> None:
    batch, _, _, environment = collected(config(CNN, kwargs={"nan_at": 3}))
    environment.close()
    assert batch.action_mask[0].tolist() == [True, True, False, True, True, False, True, True]
    observations = batch.inputs["observations"][0]
    assert torch.equal(batch.end_observations[0, 2], observations[2])
    assert torch.isfinite(batch.rewards).all()


@pytest.mark.parametrize("kind", MODELS)
def test_an_update_moves_what_is_trained_and_its_published_form_is_what_the_rollout_reads(kind: str) -> None:
    settings = config(MODELS[kind])
    batch, actor, policy, environment = collected(settings)
    environment.close()
    found = actor.evaluate(batch)
    batch.log_probs, batch.values = found["log_probs"], found["values"]
    shape = batch.log_probs.shape
    batch.advantages, batch.returns = torch.randn(shape), torch.randn(shape)
    before = {name: tensor.clone() for name, tensor in actor.publish(0).state.items()}
    metrics = actor.update(batch.flatten(), step=0)
    assert metrics["actor/skipped_updates"] == 0
    after = actor.publish(1).state
    same = {name for name in before if torch.equal(before[name], after[name])}
    frozen = {name for name in before if name == "words" or ("frozen" in kind and "backbone" in name)}
    assert same == frozen
    policy.rollout.receive(Weights(1, after))
    assert policy.rollout.policy.state_dict().keys() == after.keys()


def test_a_state_of_a_frozen_backbone_is_without_it(tmp_path) -> None:
    sizes = {}
    for kind in ("vla", "frozen vla"):
        settings = config(MODELS[kind])
        environment = Environment(context("env"), settings)
        environment.close()
        actor = moved(EmbodiedActor(context("actor"), settings, environment.envs.spaces))
        sizes[kind] = actor.state_bytes()
        actor.save_state(str(tmp_path / kind))
        again = EmbodiedActor(context("actor"), settings, environment.envs.spaces)
        again.load_state(str(tmp_path / kind))
        mine, its = actor.publish(0).state, again.publish(0).state
        assert all(torch.equal(mine[name], its[name]) for name in mine)
    assert sizes["frozen vla"] < 0.6 * sizes["vla"]


def test_adapters_are_trained_in_place_of_the_language_model_and_merged_for_the_rollout() -> None:
    pytest.importorskip("peft")
    batch, actor, policy, environment = collected(config(VLA, lora={"rank": 2}))
    environment.close()
    torch.testing.assert_close(actor.evaluate(batch)["log_probs"], batch.rollout_log_probs, atol=1e-5, rtol=0)
    assert policy.rollout.policy.state_dict().keys() == actor.publish(0).state.keys()
    trained = [name for name, parameter in actor.engine.model.named_parameters() if parameter.requires_grad]
    assert {".lora_" in name for name in trained if ".backbone." in name} == {True}
    assert any("action_head" in name for name in trained)


def test_answers_of_several_ranks_are_one() -> None:
    """Two rollout ranks, each with half of the rows, answer as one does."""
    settings = config(MODELS["squashed cnn"])
    environment = Environment(context("env"), settings)
    spaces = environment.envs.spaces
    environment.close()
    rollout = PolicyRollout(context("rollout"), settings, spaces)
    images = np.random.default_rng(0).integers(0, 256, (5, 360), dtype=np.uint8)
    whole = rollout.act(Observations(images, ("act", 1)))

    ranks = DirectRollout(rollout)
    both = RemotePolicy(ranks, ranks, 2)
    both.request(Observations(images, ("act", 1)))
    answer = both.actions(5)
    np.testing.assert_allclose(answer.executed, whole.executed, rtol=1e-5)
    np.testing.assert_allclose(answer.log_probs, whole.log_probs, rtol=1e-5)
