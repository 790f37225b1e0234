"""A reward model that vLLM or SGLang serves: what the server reads, which answers count, and every way it can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_parts import make_classifier, post_server

from rl_platform.components.reward import LanguageReward
from rl_platform.components.reward_models.classifier import SequenceClassifier
from rl_platform.config.schema.reward import RewardModel
from rl_platform.envs.reasoning.servers import http_scorer
from rl_platform.errors import ConfigError, Unreachable
from rl_platform.records import Prompt, Trajectory

SECRET = "sk-very-secret"
CONVERSATION = [("system", "Be brief."), ("user", "Q: 2+2")]


class Engine:
    """Answers like vLLM or SGLang, by the classifier in `folder`. `spoil` changes an answer before it is sent."""

    def __init__(self, folder: Path) -> None:
        self._classifier = SequenceClassifier(RewardModel(path=str(folder)), torch.device("cpu"))
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.spoil: Any = None

    def expected(self, response: str) -> float:
        turns = [*CONVERSATION, ("assistant", response)]
        row = self._classifier.encode([{"role": role, "content": content} for role, content in turns])
        return self._classifier.scores([row])[0]

    def answer(self, request: dict[str, Any], key: str | None) -> tuple[int, str]:
        self.requests.append(request)
        self.keys.append(key)
        values = self._classifier.scores(request["input"] if "input" in request else request["input_ids"])
        if "input" in request:
            assert request["use_activation"] is False
            rows = [{"index": index, "probs": [value], "num_classes": 1} for index, value in enumerate(values)]
            found: Any = {"object": "list", "data": rows[::-1]}
        else:
            found = [{"embedding": [value], "meta_info": {}} for value in values]
        spoiled = found if self.spoil is None or len(self.requests) == 1 else self.spoil(found)
        return spoiled if isinstance(spoiled, tuple) else (200, json.dumps(spoiled))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    # the padding token ends each turn, as in some published reward models
    return Engine(make_classifier(tmp_path / "model", positions=64, pad="<end>"))


@pytest.fixture
def build(tmp_path: Path, context, reasoning, engine: Engine, monkeypatch: pytest.MonkeyPatch, closes):
    """build("sglang"): a component whose reward model that server computes."""
    monkeypatch.setattr(http_scorer, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("CLASSIFIER_KEY", SECRET)
    with post_server(engine.answer) as url:

        def build(server: str, **options: object) -> LanguageReward:
            section = {"path": str(tmp_path / "model"), "url": url, "server": server} | options
            reward = {"type": "model", "max_batch_size": 4, "retries": 1, "num_workers": 1, "model": section}
            data = {"mini_batch_size": 4, "max_prompt_length": 8, "max_response_length": 8}
            texts = {"system_prompt": "Be brief.", "prompt_template": "Q: {question}"}
            return closes(LanguageReward(context("reward"), reasoning(reward=reward, data=data | texts)))

        yield build


def trajectories(*texts: str) -> list[Trajectory]:
    return [Trajectory(Prompt(0, "2+2", "4", (50,)), 0, (1,), (0.0,), "stop", 0, text=text) for text in texts]


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_served_scores_are_those_of_the_model(build, engine: Engine, server: str) -> None:
    component = build(server, api_key_env="CLASSIFIER_KEY")
    assert engine.keys == [f"Bearer {SECRET}"]
    texts = ["five", "", "four!", "x" * 60]
    *found, long = component.score(trajectories(*texts))
    expected = [engine.expected(text) for text in texts[:3]]
    assert len({round(value, 3) for value in expected}) == 3
    assert [one.reward for one in found] == pytest.approx(expected, abs=1e-5)
    assert (long.valid, long.reward) == (False, 0.0)
    assert "the reward model reads 1 to 64" in long.verdict
    padding = engine._classifier.padding
    for request in engine.requests[1:]:
        rows = request["input" if server == "vllm" else "input_ids"]
        assert all(row[-1] != padding for row in rows)
        assert all(padding in row for row in rows)


SPOILED = [
    ("vllm", lambda found: {"scores": [1.0]}, "did not answer as vllm"),
    ("vllm", lambda found: [{"embedding": [1.0]}], "did not answer as vllm"),
    ("vllm", lambda found: {"data": found["data"][1:]}, "1 outputs of 2 conversations"),
    ("vllm", lambda found: {"data": [found["data"][0]] * 2}, "1 outputs of 2 conversations"),
    ("vllm", lambda found: {"data": [{"index": i + 1, "probs": [1.0]} for i in range(2)]}, "KeyError: 0"),
    ("vllm", lambda found: {"data": [{"index": i, "probs": [0.5, 0.5]} for i in range(2)]}, "not one number"),
    ("vllm", lambda found: {"data": [{"index": i, "probs": []} for i in range(2)]}, "not one number"),
    ("vllm", lambda found: {"data": [{"index": i, "probs": [float("nan")]} for i in range(2)]}, "gave nan"),
    ("vllm", lambda found: {"data": [{"index": i, "probs": ["1"]} for i in range(2)]}, "gave 1: a reward must be"),
    ("vllm", lambda found: (404, '{"detail":"Not Found"}'), "status 404"),
    ("vllm", lambda found: (200, "<html>"), "did not answer as vllm"),
    ("sglang", lambda found: found[1:], "1 outputs of 2 conversations"),
    ("sglang", lambda found: found[0], "did not answer as sglang"),
    ("sglang", lambda found: [{"embedding": [0.1, 0.2]}] * 2, "not one number"),
    ("sglang", lambda found: [{"embedding": [None]}] * 2, "gave None: a reward must be"),
    ("sglang", lambda found: (500, "out of memory"), "status 500: out of memory"),
]


@pytest.mark.parametrize(("server", "spoil", "message"), SPOILED)
def test_other_answers_are_no_scores(build, engine: Engine, server: str, spoil: Any, message: str) -> None:
    component = build(server)
    engine.spoil = spoil
    source = trajectories("five", "four")
    for scored in component.score(source):
        assert not scored.valid
        assert message in scored.verdict


def test_the_other_server_is_refused_at_the_start(build, engine: Engine) -> None:
    engine.requests.append({})
    engine.spoil = lambda found: [{"embedding": [0.5]}]
    with pytest.raises(ConfigError, match="did not answer as vllm") as refused:
        build("vllm")
    assert refused.value.problems[0].key == "reward.model.url"


def test_a_missing_key_and_a_silent_server(build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLASSIFIER_KEY")
    with pytest.raises(ConfigError, match="CLASSIFIER_KEY") as refused:
        build("vllm", api_key_env="CLASSIFIER_KEY")
    assert refused.value.problems[0].key == "reward.model.api_key_env"
    with pytest.raises(Unreachable, match="the reward server does not answer"):
        build("vllm", url="http://127.0.0.1:9/classify")
