"""The shipped configs with rewards beyond rules: their reward sections, two steps, with parts that the test makes."""

from __future__ import annotations

import json
import re
import socket
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from reward_parts import make_classifier, reward_server, scores
from waiting import HANG_S

from rl_platform.components.reward_models.classifier import SequenceClassifier
from rl_platform.config.schema.reward import RewardModel
from rl_platform.envs.reasoning.servers.http_scorer import HttpScorer
from rl_platform.envs.reasoning.servers.reward_server import RewardServer
from rl_platform.envs.reasoning.verifiers import ScoreItem

CONFIGS = Path(__file__).parents[2] / "configs" / "reasoning"


def section(name: str, **changes: Any) -> list[str]:
    """Overrides that lay the reward section of a shipped config over a tiny one."""
    written = yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))["reward"] | changes
    return ["runner.max_steps=2", "runner.log_samples=8", f"reward={json.dumps(written)}"]


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out", name).read_text().splitlines()]


def test_two_steps_with_a_reward_model(command, folder: Path) -> None:
    make_classifier(folder / "classifier")
    model = {"path": str(folder / "classifier"), "dtype": "float32"}
    ended = command("reasoning.yaml", *section("reward_model.yaml", model=model))
    assert ended.code == 0, ended.err
    classifier = SequenceClassifier(RewardModel(**model), torch.device("cpu"))
    samples = rows("samples.jsonl")
    turns = [
        [{"role": "user", "content": sample["prompt"]}, {"role": "assistant", "content": sample["response"]}]
        for sample in samples
    ]
    expected = [classifier.scores([classifier.encode(conversation)])[0] for conversation in turns]
    assert len(expected) == 16
    assert [sample["reward"] for sample in samples] == pytest.approx(expected, abs=1e-4)
    trained = rows("metrics.jsonl")[1:]
    means = [statistics.fmean(expected[:8]), statistics.fmean(expected[8:])]
    assert [row["reward/raw_mean"] for row in trained] == pytest.approx(means, abs=1e-4)


def test_two_steps_with_a_reward_server(command) -> None:
    given: dict[str, float] = {}

    def answer(asked: list[dict[str, Any]]) -> tuple[int, str]:
        """Scores but each third response, however many a request holds."""
        numbers = range(len(given), len(given) + len(asked))
        given.update((item["response"], float(number)) for item, number in zip(asked, numbers, strict=True))
        return scores(*(None if number % 3 == 2 else float(number) for number in numbers))

    with reward_server(answer) as url:
        ended = command("reasoning.yaml", *section("reward_http.yaml", url=url, num_workers=1))
    assert ended.code == 0, ended.err
    trained = rows("metrics.jsonl")[1:]
    assert all(0 < row["reward/unscored"] < 8 for row in trained)
    assert trained[0]["reward/raw_mean"] > 0
    assert {sample["response"] for sample in rows("samples.jsonl")} <= given.keys()


def test_the_server_of_the_docs_scores_what_the_docs_say() -> None:
    page = (CONFIGS.parents[1] / "docs" / "reasoning.md").read_text(encoding="utf-8")
    (text,) = (found for found in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "HTTPServer" in found)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", text.replace("8000", str(port))], stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}/score"
        scorer = HttpScorer(
            RewardServer(url, 10.0), batch_size=2, num_workers=2, retries=5
        )  # it takes a moment to start
        responses = [ScoreItem(" 4 ", "2+2", "4"), ScoreItem("5", "2+2", "4"), ScoreItem("4", "2+2", "4", {"by": "x"})]
        assert [future.result(HANG_S).value for future in scorer.submit(responses)] == [1.0, 0.0, 1.0]
        scorer.close()
    finally:
        process.kill()
        process.wait()


def test_a_reward_server_that_is_not_there_is_told_before_anything_starts(command) -> None:
    url = "http://127.0.0.1:9/score"
    ended = command("reasoning.yaml", *section("reward_http.yaml", url=url, retries=0))
    assert ended.code == 75
    assert "Unreachable: the reward server does not answer: http://127.0.0.1:9/score" in ended.err
    assert "Traceback" not in ended.err
    assert not Path("out").exists()


def test_a_reward_server_that_dies_ends_the_run_with_a_checkpoint_to_go_on_from(command) -> None:
    alive = threading.Semaphore(6)  # requests; the start asks twice, a validation and each step at least once

    def answer(asked: list[dict[str, Any]]) -> tuple[int, str] | None:
        return scores(*(1.0 for _ in asked)) if alive.acquire(blocking=False) else None

    change = {"retries": 0, "timeout_s": HANG_S, "num_workers": 1}
    with reward_server(answer) as url:
        options = section("reward_http.yaml", url=url, **change)
        ended = command("reasoning.yaml", *options, "runner.max_steps=20", "runner.save_interval=1")
        assert ended.code == 75, ended.err
        assert "Unreachable: reward.type http scored none of the 8 responses of a step (died 8)" in ended.err
        done = rows("metrics.jsonl")[-1]["step"]
        assert 0 <= done < 20
        for _ in range(100):
            alive.release()
        ended = command("reasoning.yaml", *options, "runner.max_steps=6", "runner.save_interval=1")
        assert ended.code == 0, ended.err
    assert [row["step"] for row in rows("metrics.jsonl")] == list(range(7))


def test_a_reward_server_that_dies_before_the_greedy_baselines_is_what_the_error_names(command) -> None:
    served = 0

    def answer(asked: list[dict[str, Any]]) -> tuple[int, str] | None:
        nonlocal served
        served += len(asked)
        return scores(*(1.0 for _ in asked)) if served <= 8 + 8 else None  # of the validation and of the step

    change = {"retries": 0, "timeout_s": HANG_S, "num_workers": 1}
    with reward_server(answer) as url:
        options = section("reward_http.yaml", url=url, **change)
        places = "cluster.component_placement={'actor,rollout,reward': all}"
        ended = command("reasoning.yaml", *options, "algorithm.adv_type=remax", "critic.use_critic_model=false", places)
    assert ended.code == 75, ended.err
    assert "Unreachable: reward.type http scored none of the 8 responses of a step (died 8)" in ended.err
