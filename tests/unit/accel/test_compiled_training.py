"""The compiled optimizer step is the plain one: metrics, parameters, moments, and what it leaves to the plain one."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch

from rl_platform.accel import compiled_ppo as ppo
from rl_platform.accel.compiled_training import CompiledEngine, compiles
from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.algorithms.losses import actor_critic_loss
from rl_platform.config import load_config
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.config.schema.models import Optim, Trainable
from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.build import training_engine
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.models.embodied_policy import build_policy
from rl_platform.models.forward import EmbodiedActorCritic
from rl_platform.models.policy import ActorCriticPolicy, PolicyConfig
from rl_platform.placement.estimates.component_shapes import shapes
from rl_platform.placement.estimates.policy_shape import PolicyShape
from rl_platform.records import RolloutBatch

ROWS, MINI_BATCH, OBSERVATIONS, ACTIONS = 192, 48, 5, 3
OPTIM = Optim(lr=1e-2, clip_grad=0.5, weight_decay=0.01)
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
WHOLE = MicroBatches()


def model(kind: str = "continuous", activation: str = "tanh") -> EmbodiedActorCritic:
    torch.manual_seed(0)
    space = ActionSpace(kind, ACTIONS)
    config = PolicyConfig((16, 8), activation, initial_log_std=-0.5)
    return EmbodiedActorCritic(ActorCriticPolicy((OBSERVATIONS,), space, config))


def engine(cls: type[FSDPEngine], kind: str = "continuous") -> FSDPEngine:
    return cls(model(kind), OPTIM, dtype=torch.float32, horizon=1, device=CPU)


def loss(**options: Any) -> Any:
    base = {"adv_type": "gae", "loss_type": "actor_critic", "loss_agg_func": "token-mean", "huber_delta": 0.5}
    return partial(actor_critic_loss, algorithm=Algorithm(**base | options))


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return batch_of("continuous")


def batch_of(kind: str) -> RolloutBatch:
    """Old log-probs, values and returns that reach every branch of the losses."""
    drawn = torch.Generator().manual_seed(1)
    some = partial(torch.randn, generator=drawn)
    observations, actions = some(ROWS, 1, OBSERVATIONS), some(ROWS, 1, ACTIONS)
    if kind == "discrete":
        actions = torch.randint(ACTIONS, (ROWS, 1), generator=drawn)
    rows = neutral_batch(
        torch.ones(ROWS, 1, dtype=torch.bool), inputs={"observations": observations, "actions": actions}
    )
    outputs = engine(FSDPEngine, kind).evaluate(rows, WHOLE)
    assert outputs.log_probs is not None
    assert outputs.values is not None
    return replace(
        rows,
        log_probs=outputs.log_probs + 0.8 * some(ROWS, 1),
        values=outputs.values + 0.3 * some(ROWS, 1),
        advantages=some(ROWS, 1),
        returns=outputs.values + some(ROWS, 1),
    )


def mini_batches(batch: RolloutBatch) -> list[RolloutBatch]:
    return [batch.select(torch.arange(start, start + MINI_BATCH)) for start in range(0, ROWS, MINI_BATCH)]


def assert_same(plain: FSDPEngine, compiled: FSDPEngine, atol: float = 2e-6) -> None:
    state, other = plain.sharded_state(), compiled.sharded_state()
    assert state.keys() == other.keys()
    for name, sharded in state.items():
        ((_, expected),), ((_, actual),) = sharded.parts, other[name].parts
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"huber_delta": None, "value_clip": None},
        {"clip_ratio_c": 1.5, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "value_clip": 0.2},
        {"entropy_bonus": 0.02, "target_kl": 0.1, "value_loss_scale": 0.5},
    ],
    ids=["defaults", "squared error", "clips", "entropy"],
)
@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_steps_are_those_of_the_plain_engine(kind: str, options: dict[str, Any]) -> None:
    plain, compiled = engine(FSDPEngine, kind), engine(CompiledEngine, kind)
    for number, part in enumerate(mini_batches(batch_of(kind)) * 3):
        for each in (plain, compiled):
            each.set_learning_rate(1e-2 / (number + 1))
        expected, actual = (each.step(part, loss(**options), WHOLE) for each in (plain, compiled))
        assert expected is not None
        assert actual is not None
        numbers = expected.finalize()
        assert numbers["actor/clip_frac"] > 0.1
        assert actual.finalize() == pytest.approx(numbers, rel=1e-3, abs=1e-5)
    assert_same(plain, compiled)


@pytest.mark.parametrize("other", ["seq-mean-token-mean", "micro-batches", "masked"])
def test_what_is_not_compiled_takes_the_plain_way_and_both_ways_may_alternate(other: str, batch: RolloutBatch) -> None:
    plain, compiled = engine(FSDPEngine), engine(CompiledEngine)
    for part in mini_batches(batch):
        masked = replace(part, sample_mask=torch.arange(MINI_BATCH) % 3 > 0) if other == "masked" else part
        aggregation = other if other.startswith("seq") else "token-mean"
        split = MicroBatches(rows=20) if other == "micro-batches" else WHOLE
        for each in (plain, compiled):
            assert each.step(masked, loss(loss_agg_func=aggregation), split) is not None
            assert each.step(part, loss(), WHOLE) is not None
    assert_same(plain, compiled)


@pytest.mark.parametrize("offset", [0.0, 1e5])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_log_probs_of_choices_are_exact_for_large_logits(width: int, offset: float) -> None:
    heads = torch.randn(ROWS, width + 1, generator=torch.Generator().manual_seed(0)) * 10 + offset
    choices, every = torch.arange(ROWS) % width, torch.empty(ROWS, width + 1)
    log_probs, entropies = torch.empty(ROWS), torch.empty(ROWS)
    given = heads, choices, every, log_probs, entropies
    ppo.categorical_log_probs()(*(tensor.numpy() for tensor in given))
    expected = heads[:, :-1].log_softmax(-1)
    assert torch.allclose(every[:, :-1], expected, atol=1e-5)
    assert torch.allclose(log_probs, expected[torch.arange(ROWS), choices], atol=1e-5)
    assert torch.allclose(entropies, -(expected.exp() * expected).sum(-1), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *(("continuous", field) for field in ("log_probs", "advantages", "returns", "observations", "actions")),
        *(("discrete", field) for field in ("log_probs", "observations")),
    ],
)
def test_nothing_changes_where_something_is_not_finite(kind: str, field: str) -> None:
    compiled = engine(CompiledEngine, kind)
    part = mini_batches(batch_of(kind))[0]
    compiled.step(part, loss(value_clip=0.2), WHOLE)
    before = {name: sharded.parts[0][1].clone() for name, sharded in compiled.sharded_state().items()}
    if field in part.inputs:
        broken = replace(part, inputs=part.inputs | {field: part.inputs[field].clone()})
        broken.inputs[field][3, 0, 1] = math.nan
    else:
        broken = replace(part, **{field: getattr(part, field).clone()})
        getattr(broken, field)[3] = math.nan
    assert compiled.step(broken, loss(value_clip=0.2), WHOLE) is None
    for name, sharded in compiled.sharded_state().items():
        assert torch.equal(sharded.parts[0][1], before[name]), name
    assert compiled.step(part, loss(value_clip=0.2), WHOLE) is not None


def test_state_of_the_plain_engine_goes_on_in_the_compiled_one(batch: RolloutBatch) -> None:
    plain, compiled = engine(FSDPEngine), engine(CompiledEngine)
    first, *others = mini_batches(batch)
    plain.step(first, loss(), WHOLE)
    for name, sharded in compiled.sharded_state().items():
        sharded.destinations[0][1].copy_(plain.sharded_state()[name].parts[0][1])
    for part in others:
        for each in (plain, compiled):
            each.step(part, loss(), WHOLE)
    assert_same(plain, compiled)


def test_published_weights_are_the_live_parameters(batch: RolloutBatch) -> None:
    compiled = engine(CompiledEngine)
    weights = compiled.weights()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    compiled.step(mini_batches(batch)[0], loss(), WHOLE)
    assert all(not torch.equal(weights[name], before[name]) for name in weights)


def test_who_trains_which_policy() -> None:
    def made(policy: EmbodiedActorCritic, **options: Any) -> type:
        section = Trainable(**options)
        return type(training_engine(section, policy, dtype=torch.float32, horizon=1, device=CPU, nominal=False))

    assert made(model()) is CompiledEngine
    assert made(model("discrete")) is CompiledEngine
    assert made(model("multi_discrete")) is FSDPEngine
    assert made(model(activation="relu")) is FSDPEngine
    assert made(model(), gradient_checkpointing=True) is FSDPEngine


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.model.activation=relu"],
        ["actor.model.hidden_sizes=[512, 512]"],
        ["actor.model.log_std=state"],
        ["actor.model.action_distribution=squashed"],
    ],
    ids=["small", "relu", "large", "state", "squashed"],
)
def test_the_plan_counts_compiled_steps_of_the_policies_that_have_them(overrides: list[str]) -> None:
    config = load_config(ROOT / "configs/embodied/ppo.yaml", overrides).config
    shape = shapes(config)[0]["actor_critic"]
    assert isinstance(shape, PolicyShape)
    bounds = {"action_low": (-1.0,) * ACTIONS, "action_high": (1.0,) * ACTIONS}
    spaces = EnvSpaces((shape.inputs,), ActionSpace("continuous", ACTIONS), (ACTIONS,), **bounds)
    policy = build_policy(config.actor.model, spaces, ActionLevels(1, ACTIONS), seed=0)
    assert shape.compiled is compiles(EmbodiedActorCritic(policy), CPU, torch.float32)
