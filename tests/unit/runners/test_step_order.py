"""The order of a PPO step and the critic warm-up, through the real loop with real models."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch
from stand_ins import DirectGroup, Done, SilentReporter, context

from rl_platform.components.actor import LanguageActor
from rl_platform.components.critic import LanguageCritic
from rl_platform.config.schema import Config
from rl_platform.config.schema.data import Data
from rl_platform.errors import CheckpointError
from rl_platform.interrupts import Interrupted, StepDropped, Stop, _signals
from rl_platform.records import RolloutBatch, Weights
from rl_platform.runners.ppo import PPO, train
from rl_platform.runners.rollouts import Collected
from rl_platform.runners.task_runner import Learners

pytestmark = pytest.mark.usefixtures("one_thread")
WARM_UP, STEPS, ROWS = 2, 4, 8
TINY = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_positions": 16}


def build(**algorithm: Any) -> Config:
    return Config(
        runner={"task_type": "reasoning", "max_steps": STEPS, "seed": 5},
        cluster={"component_placement": {"actor,critic,rollout,reward": "all"}},
        data={"mini_batch_size": 4, "max_prompt_length": 4, "max_response_length": 4},
        actor={"model": {"random_init": TINY, "tokenizer": "bytes"}, "optim": {"lr": 1e-2}},
        critic={"use_critic_model": True, "optim": {"lr": 1e-2}},
        algorithm=algorithm,
    )


def rollout(seed: int) -> RolloutBatch:
    numbers = torch.Generator().manual_seed(seed)
    shape = (ROWS, 8)
    mask = (torch.arange(8) >= 4).expand(shape).contiguous()
    rewards = torch.zeros(shape)
    rewards[:, -1] = torch.arange(ROWS) % 3
    return neutral_batch(
        mask,
        inputs={"tokens": torch.randint(256, shape, generator=numbers), "lengths": torch.full((ROWS,), 8)},
        rewards=rewards,
    )


class Group(DirectGroup):
    """Writes down what is called."""

    def __init__(self, name: str, component: Any, calls: list[str]) -> None:
        super().__init__(component)
        self.name, self.calls = name, calls
        step, kind = component.engine.step, name

        def counted(*args: Any) -> Any:
            calls.append(f"{kind} step")
            return step(*args)

        component.engine.step = counted

    def evaluate(self, batch: RolloutBatch) -> Done:
        self.calls.append(f"{self.name} evaluate")
        return super().evaluate(batch)


class Reporter(SilentReporter):
    """Keeps the metrics of each step."""

    def __init__(self) -> None:
        self.metrics: list[Mapping[str, float]] = []

    def samples(self, step: int, samples: Any) -> None:
        assert samples == []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append(metrics)


class World:
    """Models of one config behind learners, and the task that `train` runs."""

    groups: Mapping[str, Any] = {}

    def __init__(self, config: Config) -> None:
        self.calls: list[str] = []
        self.synced: list[int] = []
        self.before: list[dict[str, dict[str, torch.Tensor]]] = []
        self.actor = Group("actor", LanguageActor(context(), config), self.calls)
        self.critic = Group("critic", LanguageCritic(context("critic"), config), self.calls)
        self.learners: Any = Learners(self.actor, self.critic)  # type: ignore[arg-type]

    def publish(self, version: int) -> Weights:
        self.synced.append(version)
        return Weights(version, {})

    def receive(self, weights: Weights) -> dict[str, float]:
        return {}

    def warm_start(self) -> dict[str, float]:
        return {}

    def trained(self, batch: RolloutBatch) -> dict[str, float]:
        return {}

    def check_samples(self, waiting: Any) -> None: ...

    def collect(self, step: int) -> Collected:
        self.before.append({"actor": self.actor.parameters(), "critic": self.critic.parameters()})
        return Collected(rollout(step))

    def validate(self, step: int) -> dict[str, float]:
        return {}

    def log_tokens(self, step: int, batch: RolloutBatch) -> None: ...

    def exhausted(self) -> bool:
        return False

    def finish(self, step: int) -> None:
        self.before.append({"actor": self.actor.parameters(), "critic": self.critic.parameters()})


class State:
    def __init__(self) -> None:
        self.saved: list[int] = []

    def restore(self, *args: Any) -> int:
        return 0

    def read(self, *args: Any) -> None: ...

    def save(self, step: int, *args: Any) -> None:
        self.saved.append(step)


@pytest.fixture
def no_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoTimings:
        def __init__(self, *args: Any) -> None: ...

        def since_last(self) -> dict[str, float]:
            return {}

    monkeypatch.setattr("rl_platform.runners.ppo.ComponentTimings", NoTimings)


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.usefixtures("no_timings")
def test_rollouts_of_a_checkpoint_that_the_config_cannot_train_on_are_refused() -> None:
    """Another mini-batch size or estimator than that of the run which collected them ahead."""

    class Ahead(State):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.rows = rows

        def restore(self, runner: Any, ppo: Any, rollouts: Any) -> int:
            rollouts._ready.append(Collected(rollout(0).select(torch.arange(self.rows))))
            return 1

    def resumed(rows: int, **algorithm: Any) -> None:
        config = build(**algorithm)
        train(config, World(config), Reporter(), Ahead(rows))  # type: ignore[arg-type]

    with pytest.raises(CheckpointError, match=r"of 6 rows, which mini-batches of 4 do not divide"):
        resumed(6)
    with pytest.raises(CheckpointError, match=r"without the greedy responses that algorithm.adv_type remax needs"):
        resumed(8, adv_type="remax")
    resumed(8)


@pytest.mark.usefixtures("no_timings")
def test_a_run_that_max_epochs_ends_before_max_steps_says_so() -> None:
    class Passed(World):
        def exhausted(self) -> bool:
            return len(self.synced) > 2  # at the start and after two steps

    config, notes = build(), []
    reporter = Reporter()
    reporter.note = notes.append  # type: ignore[method-assign]
    assert train(config, Passed(config), reporter, State()) == "max_epochs"  # type: ignore[arg-type]
    assert notes[1:] == ["the run ends after step 2, before runner.max_steps, by runner.max_epochs"]


@pytest.mark.usefixtures("no_timings")
def test_exactly_k_steps_train_the_critic_only() -> None:
    config, reporter = build(policy_training_start_step=WARM_UP), Reporter()
    world = World(config)
    train(config, world, reporter, State())  # type: ignore[arg-type]
    states = world.before
    for step in range(STEPS):
        assert changed(states[step]["actor"], states[step + 1]["actor"]) == (step >= WARM_UP)
        assert changed(states[step]["critic"], states[step + 1]["critic"])
        assert ("actor/loss" in reporter.metrics[step + 1]) == (step >= WARM_UP)  # one report is before the first step
    assert world.synced == [0, 1, 2]  # at the start, and after steps that trained the actor: versions count these


@pytest.mark.usefixtures("no_timings")
@pytest.mark.parametrize("left", [False, True])
def test_a_signal_while_placements_are_compared_ends_the_run_after_that_step(
    monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    monkeypatch.setattr(_signals, "leaving", False)  # again after the test

    def leaves(step: int) -> bool:
        assert _signals.stop is not None
        assert _signals.stop.accept(signal.SIGINT)
        return left

    config, state = build(), State()
    with pytest.raises(Interrupted):
        train(config, World(config), Reporter(), state, leaves=leaves)  # type: ignore[arg-type]
    assert state.saved == [1]


def test_a_step_is_dropped_if_the_rest_of_it_does_not_fit_in_the_grace_period() -> None:
    stop = Stop(3600, lambda text: None)
    with stop.droppable(7200):  # without a signal there is no limit
        pass
    with stop.droppable(60):
        assert stop.accept(signal.SIGTERM)
    with stop.droppable(None):
        pass
    with pytest.raises(StepDropped), stop.droppable(7200):
        pass
    assert not stop.drops(signal.SIGTERM)  # outside the block


def test_all_critic_epochs_come_before_the_actors() -> None:
    config = build(ppo_epochs=2, critic_ppo_epochs=3)
    world = World(config)
    PPO(config, world.learners, Reporter()).update(rollout(0), 0)  # type: ignore[arg-type]
    assert world.calls == ["actor evaluate", "critic evaluate", *["critic step"] * 6, *["actor step"] * 4]


def test_the_first_optimizer_step_of_a_rollout_is_reinforce() -> None:
    """Old log-probs come from the same weights: the ratio is 1, nothing is clipped, the step that of -A log pi."""
    data = {"mini_batch_size": ROWS, "max_prompt_length": 4, "max_response_length": 4}
    trained = {}
    for kind in ("ppo_clip", "cispo", "reinforce"):
        config = build(policy_loss=kind)
        config = config.model_copy(update={"data": Data(**data)})
        world = World(config)
        metrics = PPO(config, world.learners, Reporter()).update(rollout(0), 0)  # type: ignore[arg-type]
        for name in ("actor/ratio_mean", "actor/ratio_min", "actor/ratio_max"):
            assert metrics[name] == pytest.approx(1.0, abs=1e-6)
        assert metrics.get("actor/clip_frac", 0.0) == 0
        assert abs(metrics["actor/approx_kl"]) < 1e-6
        assert world.calls.count("actor step") == 1
        trained[kind] = world.actor.parameters(), metrics["actor/grad_norm"]
    expected, norm = trained["reinforce"]
    for parameters, other_norm in trained.values():
        assert other_norm == pytest.approx(norm, rel=1e-5)
        for name, tensor in parameters.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)  # a thousandth of the step


class TestPFPPO:
    def trained(self, step: int = 0, **options: Any) -> tuple[World, dict[str, float]]:
        config = build(use_pf_ppo=True, pf_ppo=options)
        world = World(config)
        return world, PPO(config, world.learners, Reporter()).update(rollout(0), step)  # type: ignore[arg-type]

    def test_both_models_train_on_the_draw_and_metrics_are_of_the_rollout(self) -> None:
        world, metrics = self.trained()
        plain = World(build())
        expected = PPO(build(), plain.learners, Reporter()).update(rollout(0), 0)  # type: ignore[arg-type]
        (ours,), (critics,), (all_rows,) = world.actor.trained_on, world.critic.trained_on, plain.actor.trained_on
        assert torch.equal(ours.group_ids, critics.group_ids)
        drawn = ours.group_ids
        assert len(drawn) == ROWS
        assert {row % 3 for row in drawn.tolist()} <= {1, 2}
        for name in ("advantages", "returns", "log_probs", "values", "rewards"):  # whitened over the whole rollout
            assert torch.equal(getattr(ours, name), getattr(all_rows, name)[drawn])
        for name in ("reward/mean", "adv/std", "adv/mean", "critic/returns_mean"):
            assert metrics[name] == expected[name]
        assert metrics["pf_ppo/effective_rows"] > 1

    def test_draws_depend_on_the_step_and_repeat(self) -> None:
        first, again, other = (self.trained(step)[0].actor.trained_on[0].group_ids.tolist() for step in (0, 0, 1))
        assert first == again != other

    def test_weights_leave_the_critic_as_it_was(self) -> None:
        world, _ = self.trained(mode="weight")
        plain = World(build())
        PPO(build(), plain.learners, Reporter()).update(rollout(0), 0)  # type: ignore[arg-type]
        assert not changed(world.critic.parameters(), plain.critic.parameters())
        assert changed(world.actor.parameters(), plain.actor.parameters())

    def test_scores_are_without_the_kl_penalty(self) -> None:
        """With a penalty far above the rewards the draw stays the same."""
        config = build(use_pf_ppo=True, use_kl_in_reward=True, kl_ctrl={"kl_coef": 1e3})

        class Reference:
            def evaluate(self, batch: RolloutBatch) -> Done:
                return Done({"reference_log_probs": torch.randn(batch.action_mask.shape)})

        world = World(config)
        learners: Any = Learners(world.actor, world.critic, Reference())  # type: ignore[arg-type]
        PPO(config, learners, Reporter()).update(rollout(0), 0)  # type: ignore[arg-type]
        assert torch.equal(world.actor.trained_on[0].group_ids, self.trained()[0].actor.trained_on[0].group_ids)
