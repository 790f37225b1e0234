"""Evaluation while others are generated: on which placements, of which rows, and with the numbers of the phases."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from stand_ins import Done, SilentReporter

from rl_platform.components.critic import LanguageCritic
from rl_platform.config.schema import Config
from rl_platform.config.schema.rollout import PartialRollout
from rl_platform.engines.rollout.base import Completion
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.errors import WorkerError
from rl_platform.placement.estimates.occupancy import offload_order
from rl_platform.placement.estimates.streaming import part_rows, streaming_chains
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.layout import Layout
from rl_platform.placement.scheduler import schedule
from rl_platform.records import Prompt, RolloutBatch, Trajectory
from rl_platform.runners.collection.streamed_evaluation import StreamedEvaluation
from rl_platform.runners.ppo import PPO
from rl_platform.runners.reasoning import ReasoningRunner
from rl_platform.runners.trajectories import rollout_batch, shaped_rewards
from rl_platform.runtime.local import LocalRuntime
from rl_platform.tracing import TraceSpan, recorder

TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64, "max_positions": 64}
APART = {"actor,critic,reference": "0", "rollout,reward": "1"}
EACH = {"actor": "0", "critic": "1", "reference": "2", "rollout,reward": "3"}
SHARED = {"actor,critic,reference,rollout,reward": "0"}
DEVICES = 4


class Reporter(SilentReporter):
    def progress(self, *args: Any) -> None: ...


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    recorder.on = False
    recorder.drain()


def build(placement: dict[str, str], **algorithm: Any) -> Config:
    return Config(
        runner={"task_type": "reasoning", "max_steps": 2, "seed": 5, "output_dir": "unused"},
        cluster={"component_placement": placement, "devices_per_node": DEVICES},
        data={
            "task": {"type": "digits", "params": {"operation": "last", "length": 2}},
            "train_size": 30,
            "val_size": 4,
            "train_batch_size": 16,
            "mini_batch_size": 16,
            "max_prompt_length": 8,
            "max_response_length": 16,
            "use_chat_template": False,
        },
        actor={"model": {"random_init": TINY, "tokenizer": "bytes"}, "micro_batch_size": 4},
        critic={"use_critic_model": True, "micro_batch_size": 4},
        rollout={"max_running_requests": 4},
        reward={"num_workers": 1},
        algorithm={"use_kl_loss": True, **algorithm},
    )


@contextmanager
def task_of(config: Config) -> Iterator[ReasoningRunner]:
    """A task in this process, whatever its placement."""
    placement = schedule(config.cluster, Inventory.emulated(1, DEVICES))
    with LocalRuntime(placement, 60, config.runner.seed) as runtime:
        turns = offload_order(config, placement, Inventory.emulated(1, DEVICES))
        questions = build_questions(config.data, config.runner.seed)
        task = ReasoningRunner(config, runtime, Reporter(), None, questions, turns)  # type: ignore[arg-type]
        task.receive(task.publish(0))
        yield task


def learned(config: Config) -> tuple[list[RolloutBatch], dict[str, float]]:
    """The batches that two steps collect, and the metrics of the second."""
    with task_of(config) as task:
        ppo, batches, metrics = PPO(config, task.learners, Reporter()), [], {}  # type: ignore[arg-type]
        for step in range(2):
            batches.append(task.collect(step).batch)
            metrics = ppo.update(batches[-1], step)
            task.receive(task.publish(step + 1))
        return batches, metrics


FULL_KL = {"use_kl_in_reward": True, "use_kl_loss": False, "kl_penalty": "full"}


class TestPlacement:
    @pytest.mark.parametrize(
        ("placement", "algorithm", "chains"),
        [
            (SHARED, {}, ()),
            (APART, {}, (("reference", "actor", "critic"),)),
            (EACH, {}, (("reference",), ("actor",), ("critic",))),
            ({"actor,rollout,reward": "0", "critic,reference": "1"}, {}, (("reference", "critic"),)),
            ({"actor": "0", "reference,critic,rollout,reward": "1"}, {}, (("actor",),)),
            (
                {"actor": "0-1", "critic": "1-2", "reference": "2", "rollout,reward": "3"},
                {},
                (("reference", "actor", "critic"),),
            ),
            (EACH, {"dynamic_sampling": {}, "group_size": 2}, ()),
            (EACH, {"old_log_probs": "rollout"}, (("reference",), ("critic",))),
            (EACH, FULL_KL, (("reference", "actor"), ("critic",))),
            # a full KL needs the states of a reference that streams
            ({"actor": "0", "critic": "1", "reference,rollout,reward": "2"}, FULL_KL, (("critic",),)),
        ],
        ids=str,
    )
    def test_who_streams(self, placement: Any, algorithm: Any, chains: Any) -> None:
        config = build(placement, **algorithm)
        assert streaming_chains(config, layout(config)) == chains

    def test_one_cpu_is_shared_by_all(self) -> None:
        config = build(dict.fromkeys(("actor", "critic", "reference", "rollout", "reward"), "all"))
        one = schedule(config.cluster, Inventory.declared(1, 0)).layout
        assert streaming_chains(config, one) == ()

    @pytest.mark.parametrize("change", [{"runner.max_staleness": 1}, {"rollout.partial_rollout": PartialRollout()}])
    def test_nobody_streams_ahead_or_with_partial_rollouts(self, change: dict[str, Any]) -> None:
        """Models that are trained meanwhile; it is not known yet what the step trains on."""
        config = build(EACH, rollout_is={})
        assert streaming_chains(config, layout(config))
        assert streaming_chains(config.changed(change), layout(config)) == ()

    @pytest.mark.parametrize(
        ("actor", "rows", "expected"),
        [("0", None, 4), ("0", 3, 3), ("0", 20, 4), ("0-1", 2, 4)],
        ids=["a forward pass", "a smaller one", "at most a quarter of the batch", "all ranks get rows"],
    )
    def test_rows_of_a_part(self, actor: str, rows: int | None, expected: int) -> None:
        placement = {"actor,critic,reference": actor, "rollout,reward": "3"}
        config = build(placement, logprob_forward_micro_batch_size=rows)
        assert part_rows(config, layout(config), ["actor", "critic"]) == expected


def layout(config: Config) -> Layout:
    return schedule(config.cluster, Inventory.emulated(1, DEVICES)).layout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "algorithm"),
    [
        (EACH, {"bootstrap_truncated": True}),
        (APART, FULL_KL),
    ],
    ids=["three chains", "full kl in one chain"],
)
def test_numbers_are_those_of_the_phases_in_every_run(placement: dict[str, str], algorithm: dict[str, Any]) -> None:
    (_, shared), expected = learned(build(SHARED, **algorithm))
    (first, streamed), found = learned(build(placement, **algorithm))
    again = learned(build(placement, **algorithm))[0][1]
    for name in ("reference_log_probs", "log_probs", "values"):
        assert getattr(first, name) is not None, "streamed"
        assert getattr(shared, name) is None, "in phases"
        assert torch.equal(getattr(streamed, name), getattr(again, name))
    for field in fields(streamed):  # tokens of the second step come from what the first one has learned
        if getattr(shared, field.name) is not None and field.name != "inputs":
            torch.testing.assert_close(getattr(streamed, field.name), getattr(shared, field.name), rtol=1e-6, atol=1e-6)
    assert torch.equal(streamed.inputs["tokens"], shared.inputs["tokens"])
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def calls(name: str, spans: list[TraceSpan]) -> list[tuple[str, float, float]]:
    return [(span.lane, span.began, span.began + span.seconds) for span in spans if span.name == name]


@pytest.mark.parametrize(("placement", "inside"), [(APART, True), (SHARED, False)], ids=["apart", "shared"])
def test_evaluations_lie_inside_the_generation(
    placement: dict[str, str], inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = threading.Event()
    if inside:  # however slow the evaluations are, the last responses come after one: 13 of 16 hold a part of 4
        evaluate, generate = LanguageCritic.evaluate, TorchRolloutEngine.generate

        def noted(critic: LanguageCritic, batch: RolloutBatch) -> Any:
            fields = evaluate(critic, batch)
            evaluated.set()
            return fields

        def held(engine: TorchRolloutEngine, requests: Any, sampling: Any, on_finished: Any) -> None:
            finished = 0

            def in_time(completion: Completion) -> None:
                nonlocal finished
                finished += 1
                if finished > 13 and not evaluated.wait(60):
                    raise TimeoutError("nothing was evaluated meanwhile")
                on_finished(completion)

            generate(engine, requests, sampling, in_time)

        monkeypatch.setattr(LanguageCritic, "evaluate", noted)
        monkeypatch.setattr(TorchRolloutEngine, "generate", held)
    config = build(placement)
    with task_of(config) as task:
        recorder.drain()
        recorder.on = True
        PPO(config, task.learners, Reporter()).update(task.collect(0).batch, 0)  # type: ignore[arg-type]
        spans = recorder.drain()
    ((_, began, ended),) = calls("generate", spans)
    within = {lane for lane, start, _ in calls("evaluate", spans) if began < start < ended}
    assert within == ({"reference[0]", "actor[0]", "critic[0]"} if inside else set())


# the parts, with a stand-in for the models


class Lengths:
    """An evaluator whose log-probs are the rows' lengths; it remembers what it was asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[list[int]] = []
        self.error = error

    def evaluate(self, batch: RolloutBatch) -> Done:
        if self.error is not None:
            raise self.error
        self.asked.append(batch.group_ids.tolist())
        return Done({"log_probs": torch.where(batch.action_mask, batch.inputs["lengths"][:, None].float(), 0.0)})


def batch_of(trajectories: Any) -> RolloutBatch:
    config = build(SHARED)
    return rollout_batch(trajectories, shaped_rewards(trajectories, config.algorithm, 30), pad_token_id=0)


def responses(prompts: list[Prompt], samples: int, seed: int = 0) -> list[Trajectory]:
    """In the order of the batch."""
    draw = random.Random(seed)
    found = []
    for prompt in prompts:
        for sample in range(samples):
            tokens = (7,) * draw.randint(1, 30)
            found.append(Trajectory(prompt, sample, tokens, (-1.0,) * len(tokens), "stop", 0))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_parts_do_not_depend_on_who_is_finished_first(seed: int) -> None:
    prompts = [Prompt(index, "", "", (1, 2)) for index in (8, 3, 5, 1, 9)]
    ordered = responses(prompts, 2)
    arriving = ordered[:]
    random.Random(seed).shuffle(arriving)
    evaluator = Lengths()
    streaming = StreamedEvaluation([[evaluator]], 4, batch_of)  # type: ignore[list-item]
    streaming.begin(prompts, 2)
    for start in range(0, len(arriving), 3):
        streaming.add(arriving[start : start + 3])
    batch = batch_of(ordered)
    found = streaming.fields(batch)["log_probs"]
    assert torch.equal(found, torch.where(batch.action_mask, batch.inputs["lengths"][:, None].float(), 0.0))
    assert sorted(evaluator.asked) == sorted([[8, 8, 3, 3], [5, 5, 1, 1], [9, 9]])


def test_a_prompt_that_comes_twice_has_two_rows() -> None:
    prompts = [Prompt(index, "", "", (1, 2)) for index in (4, 6, 4)]
    evaluator = Lengths()
    streaming = StreamedEvaluation([[evaluator]], 3, batch_of)  # type: ignore[list-item]
    streaming.begin(prompts, 1)
    trajectories = responses(prompts[:2], 1)
    again = replace(trajectories[0], sample=1)
    streaming.add([again, *trajectories])
    ordered = [trajectories[1], trajectories[0], again]  # as the runner orders them
    assert streaming.fields(batch_of(ordered))["log_probs"].max() > 0
    assert evaluator.asked == [[6, 4, 4]]


def test_settled_evaluations_have_ended() -> None:
    """Ranks that gather weights together must not evaluate meanwhile."""
    prompts = [Prompt(index, "", "", (1, 2)) for index in range(4)]
    trajectories = responses(prompts, 1)
    for evaluator in (Lengths(), Lengths(WorkerError("its error is left to fields()"))):
        streaming = StreamedEvaluation([[evaluator]], 2, batch_of)  # type: ignore[list-item]
        streaming.settle()
        streaming.begin(prompts, 1)
        streaming.add(trajectories[:2])
        streaming.settle()
        assert all(evaluation.done() for _, evaluation in streaming._evaluations)
        assert evaluator.error is not None or evaluator.asked == [[0, 1]]


def test_what_an_evaluation_raises_ends_the_collection() -> None:
    prompts = [Prompt(index, "", "", (1, 2)) for index in range(4)]
    trajectories = responses(prompts, 1)
    streaming = StreamedEvaluation([[Lengths(WorkerError("the critic failed"))]], 2, batch_of)  # type: ignore[list-item]
    streaming.begin(prompts, 1)
    streaming.add(trajectories[:2])
    until = time.monotonic() + 60
    while any(thread.name.startswith("runner (evaluating)") for thread in threading.enumerate()):
        time.sleep(0.01)
        try:
            streaming.add([])
        except WorkerError:
            break
        assert time.monotonic() < until
    else:
        pytest.fail("nobody evaluated")
    with pytest.raises(WorkerError, match="the critic failed"):
        streaming.fields(batch_of(trajectories))
