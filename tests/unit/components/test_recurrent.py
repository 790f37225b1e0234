"""A recurrent policy among the components: what it remembers, when it forgets, and what is trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

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

NUM_ENVS, STEPS, SIZE = 4, 24, 6


class Lengths(gymnasium.Env):
    """Episodes of 3 to 9 steps, some terminated, some cut; observations are random numbers."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, render_mode=None):
        pass

    def render(self):
        return np.full((32, 32, 3), 20 * self.left, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 10))
        return self._observe(), {}

    def step(self, action):
        self.left -= 1
        ended, cut = self.left == 0, bool(self.np_random.random() < 0.5)
        return self._observe(), float(action), ended and not cut, ended and cut, {}

    def _observe(self):
        return self.np_random.normal(size=3).astype(np.float32)


gymnasium.register("Lengths-v0", Lengths)


def config(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **env: Any) -> Config:
    settings = {"id": "Lengths-v0", "num_envs": NUM_ENVS, "rollout_steps": STEPS, "normalize_rewards": True}
    model = {"type": "gru", "recurrent_size": SIZE, "hidden_sizes": [8]} | (model or {})
    algorithm = {"normalize_advantages": False}
    return embodied_config(settings | env, model, algorithm, data={"mini_batch_size": 24} | (data or {}))


class World:
    """Environment, rollout and actor with the same, not so tame, weights."""

    def __init__(self, settings: Config) -> None:
        self.environment = Environment(context("env"), settings)
        spaces = self.environment.envs.spaces
        self.actor = EmbodiedActor(context("actor_critic"), settings, spaces)
        torch.manual_seed(1)
        for parameter in self.actor.engine.model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        rollout = PolicyRollout(context("rollout"), settings, spaces)
        rollout.receive(self.actor.publish(0))
        self.answers = DirectRollout(rollout)
        self.policy = RemotePolicy(self.answers, self.answers)

        self.close = self.environment.close

    def collect(self, step: int) -> RolloutBatch:
        return self.environment.collect(step, self.policy)[0]


@pytest.fixture
def world(closes) -> Callable[[Config], World]:
    return lambda settings: closes(World(settings))


@pytest.mark.parametrize("length", [None, 1, 8])
@pytest.mark.parametrize("stages", [1, 2])
def test_training_sees_the_log_probs_of_the_rollout(world, length: int | None, stages: int) -> None:
    """So the first ratio is 1: also in a second batch, whose episodes began in the first."""
    made = world(config({"sequence_length": length}, pipeline_stages=stages))
    for step in range(3):
        batch = made.collect(step)
        fields = made.actor.evaluate(batch)
        assert (fields["log_probs"] - batch.rollout_log_probs).exp().sub(1).abs().max() < 1e-5
    assert batch.inputs["hidden_states"].shape == (NUM_ENVS, STEPS // (length or STEPS), SIZE)
    assert batch.inputs["hidden_states"][:, 0].any(), "an episode goes on from one rollout into the next"
    assert batch.inputs["episode_starts"].sum() > NUM_ENVS


def test_what_is_remembered_is_of_the_running_episode_alone(world) -> None:
    """Stepped again by hand, one environment at a time."""
    made = world(config({"sequence_length": 8}))
    made.collect(0)
    before = made.environment.memory.array.copy()
    batch = made.collect(1)
    network = made.answers.rollout.policy
    fields = made.actor.evaluate(batch)
    ends = batch.ends.clone()
    ends[:, -1] = torch.from_numpy((made.environment.memory.array == 0).all(1))
    assert 0 < ends.sum() < ends.numel()
    for env in range(NUM_ENVS):
        state = torch.from_numpy(before[env : env + 1])
        for step in range(STEPS):
            if step % 8 == 0:
                torch.testing.assert_close(batch.inputs["hidden_states"][env, step // 8], state[0])
            with torch.no_grad():
                state = network.cell(network.backbone(batch.inputs["observations"][env, step][None]), state)
                _, value = network.heads(state)
                after = network.cell(network.backbone(batch.end_observations[env, step][None]), state)
                _, end_value = network.heads(after)
            torch.testing.assert_close(fields["values"][env, step], value[0])
            expected = end_value[0] if batch.bootstrapped[env, step] else torch.tensor(0.0)
            torch.testing.assert_close(fields["end_values"][env, step], expected)
            if ends[env, step]:
                state = torch.zeros(1, SIZE)
        np.testing.assert_allclose(made.environment.memory.array[env], state[0], atol=1e-6)
    cut = batch.bootstrapped.clone()
    cut[:, -1] = False
    assert cut.any(), "an episode was truncated inside the rollout"


def test_a_state_goes_on_with_what_was_remembered(world) -> None:
    first, second = world(config()), world(config())
    first.collect(0)
    second.environment.load_state_dict(first.environment.state_dict())
    expected, found = first.collect(1), second.collect(1)
    for name, tensor in expected.inputs.items():
        assert torch.equal(tensor, found.inputs[name]), name
    assert torch.equal(expected.rollout_log_probs, found.rollout_log_probs)
    assert expected.inputs["hidden_states"].any()


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_remembered_depends_neither_on_ranks_nor_on_micro_batches(world, ranks: int, rows: int | None) -> None:
    made = world(config())
    numbers = np.random.default_rng(0)
    array, states = (numbers.normal(size=(11, size)).astype(np.float32) for size in (3, SIZE))
    question = Observations(array, ("act", 1), hidden_states=states)
    expected = made.answers.rollout.act(question)
    made.answers.rollout.rows = rows
    parted = RemotePolicy(made.answers, made.answers, ranks)
    parted.request(question)
    found = parted.actions(11)
    assert found.array.tolist() == expected.array.tolist()
    np.testing.assert_allclose(found.hidden_states, expected.hidden_states, atol=1e-6)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-6)
    assert len(np.unique(expected.hidden_states, axis=0)) == 11


def test_evaluation_remembers_its_own_episodes(world) -> None:
    """However many environments they run in; those of training are not touched."""
    found = []
    for num_envs in (2, 4):
        made = world(config(num_envs=num_envs, evaluation={"episodes": 4}))
        made.collect(0)
        before = made.environment.memory.array.copy()
        made.answers.asked.clear()
        found.append(made.environment.evaluate(0, None, False, True, made.policy))
        assert (made.environment.memory.array == before).all()
        firsts = [question for question in made.answers.asked if not question.hidden_states.any()]
        assert len(firsts) == 4 // num_envs, "episodes begin with nothing remembered, and only then"
    assert found[0].lengths == found[1].lengths
    assert found[0].returns == found[1].returns


def test_a_video_shows_an_episode_that_begins_with_nothing_remembered(world, tmp_path: Path) -> None:
    made = world(config(evaluation={"episodes": 2}))
    made.environment.evaluate(0, str(tmp_path / "episode.mp4"), True, True, made.policy)
    assert made.environment.drawn() == ""
    assert (tmp_path / "episode.mp4").stat().st_size > 0
    filmed = [question for question in made.answers.asked if len(question.array) == 1]
    assert [bool(question.hidden_states.any()) for question in filmed] == [False] + [True] * (len(filmed) - 1)
    assert len(filmed) > 1


def test_mini_batches_count_transitions_and_hold_whole_sequences(world, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config({"sequence_length": 8}, {"mini_batch_size": 32})
    settings = settings.changed({"actor.micro_batch_size": 16})
    made = world(settings)
    batch = made.collect(0)
    seen: list[tuple[int, ...]] = []
    forward = made.actor.engine.model.forward

    def watched(part: RolloutBatch, **options: Any) -> Any:
        seen.append((*part.action_mask.shape, *part.inputs["hidden_states"].shape))
        return forward(part, **options)

    for name, tensor in made.actor.evaluate(batch).items():
        setattr(batch, name, tensor)
    batch.advantages = batch.returns = torch.zeros_like(batch.rewards)
    monkeypatch.setattr(made.actor.engine.model, "forward", watched)
    made.actor.update(batch.flatten(), 0)
    # 96 transitions: 3 mini-batches of 4 sequences, in 2 micro-batches each
    assert seen == [(2, 8, 2, 1, SIZE)] * 6


def test_weights_travel_by_their_names(world) -> None:
    made = world(config())
    weights = made.actor.publish(7)
    assert isinstance(weights, Weights)
    assert {"cell.weight_hh", "backbone.0.weight", "heads.policy_head.weight"} <= weights.state.keys()
