"""The reward component with a reward model: which text it scores, in which batches, and which responses it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reward_parts import make_classifier

from rl_platform.components.reward import LanguageReward
from rl_platform.components.reward_models.classifier import SequenceClassifier
from rl_platform.errors import WorkerDied
from rl_platform.records import Prompt, Trajectory
from rl_platform.runtime.channel import Channel


@pytest.fixture
def build(tmp_path: Path, context, reasoning, closes):
    make_classifier(tmp_path / "model", positions=48)

    def build(batch_size: int = 4, **data: object) -> LanguageReward:
        section = {"type": "model", "max_batch_size": batch_size, "model": {"path": str(tmp_path / "model")}}
        sizes = {"mini_batch_size": 4, "max_prompt_length": 8, "max_response_length": 8}
        return closes(LanguageReward(context("reward"), reasoning(reward=section, data=sizes | data)))

    return build


def trajectory(text: str, index: int = 0) -> Trajectory:
    return Trajectory(Prompt(index, "2+2", "4", (50,)), 0, (1,), (0.0,), "stop", 0, text=text)


def expected(component: LanguageReward, *turns: tuple[str, str]) -> float:
    classifier: SequenceClassifier = component._scorer._classifier
    return classifier.scores([classifier.encode([{"role": role, "content": text} for role, text in turns])])[0]


def test_it_scores_what_the_policy_read_and_what_it_wrote(build) -> None:
    component = build(system_prompt="Be brief.", prompt_template="Q: {question}")
    (found,) = component.score([trajectory("five")])
    value = expected(component, ("system", "Be brief."), ("user", "Q: 2+2"), ("assistant", "five"))
    assert value != expected(component, ("user", "2+2"), ("assistant", "five"))
    assert (found.reward, found.metric, found.valid) == (pytest.approx(value, abs=1e-5), found.reward, True)


def test_responses_are_scored_as_they_arrive_in_batches_of_those_that_wait(build, monkeypatch) -> None:
    component = build(batch_size=3)
    texts = [f"response {number}" for number in range(8)]
    single = {text: expected(component, ("user", "2+2"), ("assistant", text)) for text in texts}
    classifier, sizes = component._scorer._classifier, []
    usual = classifier.scores
    monkeypatch.setattr(classifier, "scores", lambda rows: sizes.append(len(rows)) or usual(rows))
    source, sink = Channel("source", 16, 30.0), Channel("sink", 16, 30.0)
    for index, text in enumerate(texts):
        source.put(trajectory(text, index))
    source.close()
    assert component.stream(source, sink) == len(texts)
    found = sink.get_many(len(texts))
    assert {one.text: one.reward for one in found} == pytest.approx(single, abs=1e-5)
    assert sum(sizes) == len(texts)
    assert 1 < max(sizes) <= 3


def test_a_conversation_beyond_the_context_costs_itself_only(build) -> None:
    component = build()
    long, good = component.score([trajectory("x" * 60), trajectory("good")])
    assert (long.valid, long.reward) == (False, 0.0)
    assert good.valid
    assert long.outcome == "raised"
    assert "reads 1 to 48" in long.verdict


@pytest.mark.parametrize("weight", [float("inf"), 1e12])
def test_scores_that_are_not_finite_or_out_of_range_are_invalid(build, weight: float) -> None:
    component = build()
    with torch.no_grad():
        component._scorer._classifier._network.score.weight.fill_(weight)
    (scored,) = component.score([trajectory("good")])
    assert not scored.valid
    assert "the reward model gave" in scored.verdict


def test_an_error_of_the_model_reaches_who_waits(build, monkeypatch) -> None:
    component = build()

    def out_of_memory(rows: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(component._scorer._classifier, "scores", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        component.score([trajectory("good")])


def test_closed_it_takes_nothing(build) -> None:
    component = build()
    component.close()
    with pytest.raises(WorkerDied):
        component.score([trajectory("good")])
