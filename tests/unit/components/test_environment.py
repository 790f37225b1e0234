"""The env component: what follows an end, masks of invalid steps, actions that depend on their draw alone."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from stand_ins import DirectRollout, Placed, context, embodied_config

from rl_platform.components.actor import EmbodiedActor
from rl_platform.components.env_ranks.all_envs import Order, Peers
from rl_platform.components.environment import Environment
from rl_platform.components.policy_rollout import Actions, LocalPolicy, Observations, PolicyRollout, RemotePolicy
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.evaluate import EvaluationResult
from rl_platform.envs.embodied.pictures.video import RecordedEpisode, shown_episodes
from rl_platform.envs.embodied.success import Success
from rl_platform.errors import WorkerError
from rl_platform.records import Weights
from rl_platform.runners.recovery import EnvPart
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.host import ComponentSpec
from rl_platform.runtime.local import LocalRuntime

ENV_ID = "Corridor-v0"
OWN_BACKEND = """
import numpy as np
from gymnasium.spaces import Box, Discrete
from rl_platform.envs.embodied.user_backend import EnvBackend

class Own(EnvBackend):
    @classmethod
    def spaces(cls):
        return Box(-9, 9, (1,)), Discrete(2)
    def __init__(self, num_envs):
        self.count = np.zeros((num_envs, 1))
    def reset(self, which, seeds):
        self.count[which] = 0
        return self.count[which]
    def step(self, actions, idle):
        self.count[~idle] += 1
        none = np.zeros(len(idle), bool)
        return self.count.copy(), self.count[:, 0].copy(), none, none
"""


class Corridor(gymnasium.Env):
    """Observation: [steps so far + 1, 7]. Terminates after 3 steps if action 1 was chosen; NaN on demand."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, nan_at: int = -1, succeed_at: int | None = None, saveable: bool = True) -> None:
        self.nan_at, self.succeed_at = nan_at, succeed_at
        self.device = None if saveable else (lambda: None)  # no pickle holds a lambda

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.chose_one = 0, False
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        self.chose_one |= bool(action)
        reward = np.nan if self.steps == self.nan_at else float(self.steps)
        said = {} if self.succeed_at is None else {"success": self.steps == self.succeed_at}
        return self._observe(), reward, self.chose_one and self.steps == 3, False, said

    def _observe(self):
        return np.array([self.steps + 1, 7], np.float32)


gymnasium.register(ENV_ID, Corridor, max_episode_steps=5)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import this module, and torch with it


def config(**env) -> Config:
    settings = {"id": ENV_ID, "num_envs": 2, "rollout_steps": 7} | env
    return embodied_config(settings, {"hidden_sizes": [8]}, {"gamma": 0.9})


def always(choice: int) -> DirectRollout:
    """A policy that chooses nothing else."""

    def act(observations: Observations) -> Actions:
        count = len(observations.array)
        return Actions(np.full(count, choice), np.full(count, -0.5, np.float32))

    return DirectRollout(SimpleNamespace(act=act))


def collect(choice: int, **env):
    policy = always(choice)
    with closing(Environment(context("env"), config(**env))) as environment:
        return *environment.collect(0, RemotePolicy(policy, policy)), policy


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stages_change_neither_what_is_collected_nor_its_order(num_workers):
    settings = {"num_envs": 4, "num_workers": num_workers, "normalize_rewards": True}
    (whole, metrics, asked), (staged, staged_metrics, staged_asked) = (
        collect(choice=1, pipeline_stages=stages, **settings) for stages in (1, 2)
    )
    for name in ("ends", "bootstrapped", "end_observations", "action_mask", "rollout_log_probs"):
        assert torch.equal(getattr(whole, name), getattr(staged, name)), name
    assert torch.equal(whole.inputs["observations"], staged.inputs["observations"])
    assert torch.allclose(whole.rewards, staged.rewards, rtol=0.5)  # the running deviation grows in smaller steps
    assert metrics == staged_metrics
    assert [len(observations.array) for observations in asked.asked] == [4] * 7
    assert [len(observations.array) for observations in staged_asked.asked] == [2] * 14
    assert len({observations.draw for observations in staged_asked.asked}) == 14


def test_terminated_episodes_are_worth_nothing_after_their_end():
    batch, metrics, _ = collect(choice=1)
    assert batch.ends[0].tolist() == [False, False, True, False, False, True, True]
    assert batch.bootstrapped[0].tolist() == [False] * 6 + [True]
    assert batch.end_observations[0, 6].tolist() == [2.0, 7.0]  # the rollout ends one step into an episode
    assert metrics["episode/return"] == 6.0
    assert metrics["episode/length"] == 3.0


def test_the_return_is_known_between_the_ends_of_episodes_and_after_a_restart(closes):
    policy = always(1)
    first, second = (closes(Environment(context("env"), config(rollout_steps=1))) for _ in range(2))
    metrics = [first.collect(step, RemotePolicy(policy, policy))[1] for step in range(4)]
    assert [found["episode/count"] > 0 for found in metrics] == [False, False, True, False]
    assert [found.get("episode/return") for found in metrics] == [None, None, 6.0, 6.0]
    second.load_state_dict(first.state_dict())
    assert second.collect(4, RemotePolicy(policy, policy))[1]["episode/return"] == 6.0


def test_the_policy_sees_the_new_episodes_of_environments_that_cannot_be_saved(closes):
    policy, settings = always(0), config(rollout_steps=2, kwargs={"saveable": False})
    first, second = (closes(Environment(context("env"), settings)) for _ in range(2))
    first.collect(0, RemotePolicy(policy, policy))
    second.load_state_dict(first.state_dict())
    policy.asked.clear()
    second.collect(1, RemotePolicy(policy, policy))
    assert policy.asked[0].array.tolist() == [[1.0, 7.0]] * 2


def test_new_episodes_after_a_restart_begin_without_memory_and_returns_of_others(closes):
    """Also where the first observation equals the last one that was saved."""
    settings = embodied_config(
        {"id": ENV_ID, "num_envs": 2, "rollout_steps": 6, "kwargs": {"saveable": False}, "normalize_rewards": True},
        {"hidden_sizes": [8], "type": "gru", "recurrent_size": 4},
        {"gamma": 0.9},
    )
    first, second = (closes(Environment(context("env"), settings)) for _ in range(2))
    assert first.memory is not None
    assert second.memory is not None
    assert second.reward_normalizer is not None
    first.memory.array[:] = 3.0
    state = first.state_dict()
    state["reward_normalizer"]["returns"] = [5.0, 5.0]
    second.load_state_dict(state)
    assert not second.memory.array.any()
    assert second.reward_normalizer.state_dict()["returns"] == [0.0, 0.0]


def test_new_episodes_of_other_ranks_are_seen_too():
    policy, settings = always(0), config(rollout_steps=2, kwargs={"saveable": False})
    with closing(Environment(context("env"), settings)) as first:
        first.collect(0, RemotePolicy(policy, policy))
        state = first.state_dict()
    assert state["observations"].tolist() == [[3.0, 7.0]] * 2
    with LocalRuntime(Placed.of([("env", 0)], [("env", 1)]), 60.0, 3) as runtime:
        env = runtime.start({"env": ComponentSpec(Environment, {"config": settings})})["env"]
        EnvPart(env, settings.env).load_state_dict(state).wait()
        assert env.rank(0).state_dict().wait()[0]["observations"].tolist() == [[1.0, 7.0]] * 2


def test_success_rates_of_the_last_episodes_survive_a_restart():
    metrics = collect(choice=0, kwargs={"succeed_at": 2})[1]
    assert (metrics["env/success_once"], metrics["env/success_at_end"]) == (1.0, 0.0)
    assert "env/success_once" not in collect(choice=0)[1]
    policy = always(0)
    settings = config(rollout_steps=1, kwargs={"succeed_at": 5})
    with (
        closing(Environment(context("env"), settings)) as first,
        closing(Environment(context("env"), settings)) as second,
    ):
        for step in range(5):
            metrics = first.collect(step, RemotePolicy(policy, policy))[1]
            assert ("env/success_once" in metrics) == (step == 4)
        second.load_state_dict(first.state_dict())
        metrics = second.collect(5, RemotePolicy(policy, policy))[1]
        assert (metrics["env/success_once"], metrics["env/success_at_end"]) == (1.0, 1.0)
        found = first.evaluate(0, None, False, True, RemotePolicy(policy, policy))
        assert found.successes == [Success(once=True, at_end=True)] * 10


def test_the_processes_of_a_backend_step_the_next_evaluation_too(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_BACKEND)
    env = {"backend": f"{tmp_path / 'own.py'}:Own", "max_episode_steps": 3, "num_envs": 2, "num_workers": 1}
    settings = embodied_config(env | {"rollout_steps": 7, "evaluation": {"episodes": 3}}, {"hidden_sizes": [8]}, {})
    policy, pids = always(0), []
    with closing(Environment(context("env"), settings)) as environment:
        for step in range(2):
            found = environment.evaluate(step, None, False, True, RemotePolicy(policy, policy))
            assert found.returns == [6.0] * 3
            pids.append(environment.evaluation.envs.worker_pids)
    assert pids[0] == pids[1]


def test_truncated_episodes_continue_with_their_last_observation_not_the_reset_one():
    batch, _, _ = collect(choice=0)
    assert batch.ends[0].tolist() == [False, False, False, False, True, False, True]
    assert batch.bootstrapped[0].tolist() == batch.ends[0].tolist()
    assert batch.end_observations[0, 4].tolist() == [6.0, 7.0]
    assert batch.inputs["observations"][0, 5].tolist() == [1.0, 7.0]


def test_a_step_that_is_not_finite_is_masked_and_ends_its_episode():
    batch, metrics, _ = collect(choice=0, kwargs={"nan_at": 2})
    assert batch.action_mask[0].tolist() == [True, False, True, False, True, False, True]
    assert batch.ends[0, 1]
    assert torch.isfinite(batch.rewards).all()
    assert metrics["episode/invalid"] == 6.0
    assert metrics["episode/count"] == 0.0


def test_a_step_that_is_not_finite_is_told_once_in_a_run(caplog) -> None:
    policy = always(0)
    settings = config(kwargs={"nan_at": 2}, evaluation={"episodes": 2})
    with closing(Environment(context("env"), settings)) as environment:
        for step in range(2):
            environment.evaluate(step, None, False, True, RemotePolicy(policy, policy))
            environment.collect(step, RemotePolicy(policy, policy))
    assert [record.getMessage().count("its reward is nan") for record in caplog.records] == [1]


def test_a_failing_environment_of_another_rank_is_named_by_its_number_in_the_run():
    rank = context("env", 2, 3)
    environment = Environment(rank, config(num_envs=6, restarts=0))
    environment.envs._blocks[0]._envs[1].unwrapped.step = None
    peers = Peers(Channel("orders", 2, 5.0), Channel("answers", 2, 5.0))
    peers.orders.put(Order(0, np.zeros(2, np.int64)), key=2)
    with pytest.raises(WorkerError, match=r"environment 1 \(Corridor-v0\) failed in step") as caught:
        environment.simulate(peers)
    assert caught.value.__notes__ == ["environment 0 of env[2] is number 4 of the run"]


def test_end_values_come_from_the_states_that_follow_ends():
    settings = config()
    batch, _, _ = collect(choice=0)
    environment = Environment(context("env"), settings)
    actor = EmbodiedActor(context("actor_critic"), settings, environment.envs.spaces)
    environment.close()
    torch.nn.init.normal_(actor.engine.model.model.value_head.weight, std=1.0)
    fields = actor.evaluate(batch)
    with torch.no_grad():
        _, expected = actor.engine.model.model(torch.tensor([[6.0, 7.0]]))
    assert fields["end_values"][0, 4].item() == pytest.approx(expected.item())
    assert fields["end_values"][0, :4].abs().sum() == 0


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_rollout_micro_batches_choose_the_same_actions_when_deterministic(rows):
    settings = config()
    environment = Environment(context("env"), settings)
    environment.close()
    whole = PolicyRollout(context("rollout"), settings, environment.envs.spaces)
    small = settings.changed({"algorithm.rollout_micro_batch_size": rows})
    parts = PolicyRollout(context("rollout"), small, environment.envs.spaces)
    observations = Observations(np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32), deterministic=True)
    assert whole.act(observations).array.tolist() == parts.act(observations).array.tolist()
    np.testing.assert_allclose(whole.act(observations).log_probs, parts.act(observations).log_probs, rtol=1e-6)


def test_actions_depend_on_the_draw_and_not_on_what_was_drawn_before():
    settings = config()
    environment = Environment(context("env"), settings)
    environment.close()
    rollout = PolicyRollout(context("rollout"), settings, environment.envs.spaces)
    array = np.zeros((64, 2), np.float32)
    first = rollout.act(Observations(array, ("act", 1, 2))).array
    other = rollout.act(Observations(array, ("act", 1, 3))).array
    again = rollout.act(Observations(array, ("act", 1, 2))).array
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()
    rollout.draw_ahead([("act", 1, 3), ("act", 1, 2)], 64)
    assert len(rollout.ahead) == 2  # this policy acts in compiled loops
    assert rollout.act(Observations(array, ("act", 1, 2))).array.tolist() == first.tolist()
    assert rollout.act(Observations(array, ("act", 1, 3))).array.tolist() == other.tolist()
    assert not rollout.ahead


def test_serve_answers_until_its_source_closes():
    settings = config()
    environment = Environment(context("env"), settings)
    environment.close()
    rollout = PolicyRollout(context("rollout"), settings, environment.envs.spaces)
    rollout.receive(Weights(0, rollout.policy.state_dict()))
    source, sink = Channel("observations", 2, 5.0), Channel("actions", 2, 5.0)
    source.put(Observations(np.zeros((2, 2), np.float32), ("act", 0, 0)))
    source.close()
    rollout.serve(source, sink)
    assert sink.get().array.shape == (2,)


def test_a_policy_in_the_same_process_acts_without_channels_and_leads_to_the_same_batch():
    settings = config(id="HalfCheetah-v5", num_envs=5, normalize_observations=True, normalize_rewards=True)

    def collected(beside: bool):
        shared: dict[str, object] = {}
        environment = Environment(replace(context("env"), shared=shared), settings)
        assert not environment.finds_policy()
        rollout = PolicyRollout(replace(context("rollout"), shared=shared), settings, environment.envs.spaces)
        assert environment.finds_policy()
        if beside:
            with pytest.raises(WorkerError, match=r"rollout\[0\] has no complete weights"):
                environment.collect(0, None)
        rollout.receive(Weights(0, rollout.policy.state_dict()))
        try:
            if beside:
                return [environment.collect(step, None) for step in range(2)]
            channels = Channel("observations", 1, 5.0), Channel("actions", 1, 5.0)
            with ThreadPoolExecutor() as threads:
                serving = threads.submit(rollout.serve, *channels)
                found = [environment.collect(step, RemotePolicy(*channels)) for step in range(2)]
                channels[0].close()
                serving.result()
                return found
        finally:
            environment.close()

    for (batch, metrics), (other, other_metrics) in zip(collected(beside=True), collected(beside=False), strict=True):
        for name, tensor in vars(batch).items():
            if name != "inputs" and tensor is not None:
                assert torch.equal(tensor, getattr(other, name)), name
        assert torch.equal(batch.inputs["observations"], other.inputs["observations"])
        assert torch.equal(batch.inputs["actions"], other.inputs["actions"])
        assert batch.inputs["actions"].std() > 0
        assert metrics == other_metrics


def test_values_of_a_drawn_episode_are_those_of_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One value for each step that was played, of the observation before it."""
    settings = config(evaluation={"episodes": 1, "video": True})
    played: list[RecordedEpisode] = []

    class Screen:
        refusal, busy = "", False

        def __init__(self, *_: object) -> None: ...

        def start(self, episodes: dict[Path, RecordedEpisode], _: object) -> None:
            played.extend(episodes.values())

        def stop(self) -> None: ...

    def play_without_pictures(description, policy, seed, **_) -> RecordedEpisode:
        episode, observation = RecordedEpisode(seed), np.array([[1, 7]], np.float32)
        for _ in range(3):
            episode.actions.append(policy(observation))
            observation = observation + np.array([[1, 0]], np.float32)
        return episode

    monkeypatch.setattr("rl_platform.envs.embodied.pictures.video.Video", Screen)
    monkeypatch.setattr("rl_platform.envs.embodied.pictures.video.play", play_without_pictures)
    with closing(Environment(context("env"), settings)) as env:
        actor = EmbodiedActor(context(), settings, env.envs.spaces)
        rollout = PolicyRollout(context("rollout"), settings, env.envs.spaces)
        rollout.receive(actor.publish(0))
        env.evaluate(0, "evaluation.mp4", True, True, LocalPolicy(rollout))
    observations = env.normalized(np.array([[1, 7], [2, 7], [3, 7]], np.float32))
    with torch.no_grad():
        expected = actor.engine.model.model(torch.from_numpy(observations))[1]
    (episode,) = played
    assert episode.values == pytest.approx(expected.tolist())


def test_an_environment_that_takes_no_render_mode_gives_no_video(tmp_path: Path) -> None:
    """Its metadata says that it can draw; the evaluation ended because it could not be built with a render mode."""

    class Painted(Corridor):
        metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 - as Gymnasium declares it

    gymnasium.register("tests/Painted-v0", Painted, max_episode_steps=5)
    environment = Environment(context("env"), config(id="tests/Painted-v0", evaluation={"episodes": 2}))
    policy = always(1)
    try:
        for _ in range(2):
            found = environment.evaluate(0, str(tmp_path / "a.mp4"), True, True, RemotePolicy(policy, policy))
            assert found.lengths == [3, 3]
            assert "unexpected keyword argument 'render_mode'" in environment.drawn()
        assert not list(tmp_path.iterdir())
    finally:
        environment.close()
        del gymnasium.registry["tests/Painted-v0"]


def test_videos_show_the_best_and_the_worst_valid_episode() -> None:
    best, worst = Path("a/evaluation.mp4"), Path("a/evaluation-worst.mp4")
    returns = ([2.0, -1.0, 3.0], [1.0, 1.0], [])
    of = [EvaluationResult(each, [5] * len(each), 0, numbers=[1, 2, 4][: len(each)]) for each in returns]
    assert [shown_episodes(best, result) for result in of] == [{best: 4, worst: 2}, {best: 1}, {best: 0}]
