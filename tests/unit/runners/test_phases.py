"""Phases of one stage: side by side on devices of their own, one after the other on shared ones."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from rl_platform.config.schema import Config
from rl_platform.errors import Diverged, WorkerDied
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.offload_order import order_with
from rl_platform.placement.scheduler import schedule
from rl_platform.runners.phases import Phase, Phases, TakingTurns

LONG_S = 60.0  # for what must happen; nobody waits so long unless it does not
EACH = {"actor": "0", "critic": "1", "reference": "2", "rollout,reward": "3"}
SHARED = {"actor,critic,reference,rollout,reward": "0-3"}
FULL_KL = {"use_kl_in_reward": True, "use_kl_loss": False, "kl_penalty": "full"}


class Reporter:
    """Which phases were open in which thread, when each began."""

    progress = None

    def __init__(self) -> None:
        self.order: list[str] = []
        self.threads: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Any:
        self.order.append(f"{name} begins")
        self.threads[name] = threading.get_ident()
        yield
        self.order.append(f"{name} ends")


class Call:
    """A handle that ends when `may_end` says so. `began` is set as soon as somebody waits for it."""

    def __init__(self, found: Mapping[str, Any] | Exception, may_end: threading.Event | None = None) -> None:
        self.found, self.may_end, self.began = found, may_end, threading.Event()
        self.known: Mapping[str, Any] | None = None

    def __call__(self, known: Mapping[str, Any]) -> Call:
        self.known = dict(known)
        return self

    def wait(self, on_progress: Any = None) -> list[Any]:
        self.began.set()
        assert self.may_end is None or self.may_end.wait(LONG_S)
        if isinstance(self.found, Exception):
            raise self.found
        return [self.found]


def build(placement: Mapping[str, str], **algorithm: Any) -> Config:
    return Config(
        runner={"task_type": "reasoning"},
        cluster={"component_placement": dict(placement), "devices_per_node": 4},
        data={"train_batch_size": 4, "mini_batch_size": 4},
        actor={"model": {"random_init": {"hidden_size": 16, "num_layers": 1}, "tokenizer": "bytes"}},
        critic={"use_critic_model": True},
        algorithm={"use_kl_loss": True} | algorithm,
    )


def phases(placement: Mapping[str, str], reporter: Any, **algorithm: Any) -> Phases:
    config = build(placement, **algorithm)
    layout = schedule(config.cluster, Inventory.emulated(1, 4)).layout
    return Phases(config, TakingTurns(order_with(config, layout, frozenset()), {}), reporter)


def training(critic: Call, actor: Call) -> list[Phase]:
    return [Phase("train critic", "critic", critic), Phase("train actor", "actor", actor)]


def test_apart_none_waits_for_the_other() -> None:
    critic, actor, reporter = Call({"critic/loss": 1.0}), Call({"actor/loss": 2.0}), Reporter()
    critic.may_end, actor.may_end = actor.began, critic.began  # each ends only when the other has begun
    assert phases(EACH, reporter).run(training(critic, actor)) == {"critic/loss": 1.0, "actor/loss": 2.0}
    assert reporter.threads["train critic"] != reporter.threads["train actor"]


@pytest.mark.parametrize(
    "placement", [SHARED, {"actor": "0-1", "critic": "1-2", "reference,rollout,reward": "3"}], ids=["shared", "partly"]
)
def test_on_shared_devices_one_follows_the_other(placement: Mapping[str, str]) -> None:
    critic, actor, reporter = Call({"critic/loss": 1.0}), Call({"actor/loss": 2.0}), Reporter()
    assert phases(placement, reporter).run(training(critic, actor)) == {"critic/loss": 1.0, "actor/loss": 2.0}
    assert reporter.order == ["train critic begins", "train critic ends", "train actor begins", "train actor ends"]
    assert set(reporter.threads.values()) == {threading.get_ident()}


def test_nothing_is_known_of_devices() -> None:
    critic, actor, reporter = Call({"critic/loss": 1.0}), Call({"actor/loss": 2.0}), Reporter()
    Phases(build(EACH), None, reporter).run(training(critic, actor))
    assert reporter.order == ["train critic begins", "train critic ends", "train actor begins", "train actor ends"]


def test_a_full_kl_waits_for_the_references_states() -> None:
    reference, actor, critic = Call({"reference_states": 1}), Call({"log_probs": 2}), Call({"values": 3})
    critic.may_end = actor.began  # and is beside both
    reporter = Reporter()
    found = phases(EACH, reporter, **FULL_KL).run(
        [
            Phase("reference", "reference", reference),
            Phase("log-probs", "actor", actor),
            Phase("values", "critic", critic),
        ]
    )
    assert found == {"reference_states": 1, "log_probs": 2, "values": 3}
    assert actor.known == {"reference_states": 1}
    assert critic.known == {}
    assert reporter.order.index("reference ends") < reporter.order.index("log-probs begins")


def test_two_phases_of_one_component_follow_one_another() -> None:
    base, actor, reporter = Call({"reference_log_probs": 1}), Call({"log_probs": 2}), Reporter()
    phases(EACH, reporter).run([Phase("reference", "actor", base), Phase("log-probs", "actor", actor)])
    assert reporter.order == ["reference begins", "reference ends", "log-probs begins", "log-probs ends"]


@pytest.mark.parametrize("failing", ["critic", "actor"])
def test_a_failure_is_raised_at_once(failing: str) -> None:
    """While the other one is still at work: it ends only after the failure was seen here."""
    seen = threading.Event()
    calls = {name: Call(Diverged("no number"), None) if name == failing else Call({}, seen) for name in EACH}
    with pytest.raises(Diverged, match="no number"):
        phases(EACH, Reporter()).run(training(calls["critic"], calls["actor"]))
    seen.set()


def test_nothing_to_do() -> None:
    assert phases(EACH, Reporter()).run([]) == {}


class DyingGroup:
    """A component whose process dies when it is asked to leave its device."""

    def __init__(self) -> None:
        self.settled = 0

    def offload(self, weights: bool) -> DyingGroup:
        return self

    def wait(self) -> list[None]:
        raise WorkerDied("its process")

    def settle(self) -> None:
        self.settled += 1


def test_a_rollout_that_died_has_left_its_device_and_a_learner_that_died_ends_the_run() -> None:
    config = build(SHARED)
    layout = schedule(config.cluster, Inventory.emulated(1, 4)).layout
    rollout: Any = DyingGroup()
    TakingTurns(order_with(config, layout, frozenset({"rollout"})), {"rollout": rollout}).before("train actor")
    assert rollout.settled == 1, "its other ranks must have left, too"
    critic: Any = DyingGroup()
    with pytest.raises(WorkerDied):
        TakingTurns(order_with(config, layout, frozenset({"critic"})), {"critic": critic}).before("generate")
