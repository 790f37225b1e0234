"""A client of SandboxFusion: what it sends, how it reads the answers, and that it never sends an expected result."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from reward_parts import post_server
from waiting import HANG_S

from rl_platform.config.schema.reward import Code, Scoring
from rl_platform.envs.reasoning.sandbox.code_scorer import code_scorer
from rl_platform.envs.reasoning.score import Score
from rl_platform.envs.reasoning.servers.http_scorer import HttpScorer
from rl_platform.envs.reasoning.verifiers import ScoreItem
from rl_platform.errors import ConfigError, Unreachable

SECRET = "sk-very-secret"


class Fusion:
    """Speaks the documented format and runs the programs of this test, which are harmless."""

    url: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.reply: tuple[int, dict[str, Any]] | None = None

    def answer(self, request: dict[str, Any], key: str | None) -> tuple[int, str]:
        self.asked.append(request)
        self.keys.append(key)
        status, reply = self.reply or (200, self.run(request, self.folder))
        return status, json.dumps(reply)

    def run(self, request: dict[str, Any], folder: Path) -> dict[str, Any]:
        command = [sys.executable, "-I", "-S", "-c", request["code"]]
        limit_s = 0.2 if "while True" in request["code"] else HANG_S
        try:
            ended = subprocess.run(
                command, input=request["stdin"], cwd=folder, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            run = {
                "status": "TimeLimitExceeded",
                "execution_time": 2.0,
                "return_code": None,
                "stdout": "",
                "stderr": "",
            }
            return {"status": "Failed", "message": "", "compile_result": None, "run_result": run, "files": {}}
        run = {
            "status": "Finished",
            "execution_time": 0.01,
            "return_code": ended.returncode,
            "stdout": ended.stdout,
            "stderr": ended.stderr,
        }
        found = [folder / name for name in request["fetch_files"] if (folder / name).is_file()]
        files = {file.name: base64.b64encode(file.read_bytes()).decode() for file in found}
        status = "Failed" if ended.returncode else "Success"
        return {"status": status, "message": "", "compile_result": None, "run_result": run, "files": files}


@pytest.fixture
def fusion(tmp_path: Path) -> Iterator[Fusion]:
    server = Fusion(tmp_path)
    with post_server(server.answer, path="run_code") as server.url:
        yield server


def scorer(url: str, **code: Any) -> HttpScorer:
    made = code_scorer(Scoring(type="code", timeout_s=1.0, retries=0, num_workers=1, code=Code(url=url, **code)))
    assert isinstance(made, HttpScorer)
    return made


def scores(made: HttpScorer, *items: tuple[str, dict[str, Any]]) -> list[Score]:
    with closing(made):
        return [future.result() for future in made.submit([ScoreItem(text, "", "", row) for text, row in items])]


PRINTED = {"tests": [{"input": "4", "output": "5"}, {"input": "7", "output": "ANSWER"}]}
CALLED = {
    "entry_point": "double",
    "tests": [{"arguments": [4], "result": 8}, {"arguments": {"x": "a"}, "result": "aa"}],
}


def test_programs_and_calls(fusion: Fusion) -> None:
    half, called, crashed, looping = scores(
        scorer(fusion.url, score="fraction"),
        ("```python\nprint(int(input()) + 1)\n```", PRINTED),
        ("def double(x): return 2 * x", CALLED),
        ("1 / 0", PRINTED),
        ("while True: pass", PRINTED),
    )
    assert (half.value, half.reason) == (0.5, "wrong")
    assert called == Score(1.0, reason="passed", detail="passed 2 of 2 tests")
    assert (crashed.value, crashed.reason) == (0.0, "crashed")
    assert "ZeroDivisionError" in crashed.detail
    assert (looping.value, looping.reason) == (0.0, "timeout")
    sent = fusion.asked[1]
    assert sent == {
        "code": "print(int(input()) + 1)\n",
        "language": "python",
        "stdin": "4",
        "compile_timeout": 1,
        "run_timeout": 1,
        "memory_limit_MB": 512,
        "fetch_files": [],
    }
    assert not any("ANSWER" in json.dumps(each) or '"result"' in json.dumps(each) for each in fusion.asked)


def test_what_a_program_prints_is_no_result_of_a_call(fusion: Fusion) -> None:
    text = "print('8')\ndef double(x): print('8')"
    [score] = scores(scorer(fusion.url), (text, CALLED))
    assert (score.value, score.reason) == (0.0, "wrong")


def test_the_key_is_sent_and_never_shown(fusion: Fusion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_KEY", SECRET)
    made = scorer(fusion.url, api_key_env="FUSION_KEY")
    fusion.reply = 500, {"status": SECRET}
    [score] = scores(made, ("print(1)", PRINTED))
    assert fusion.keys == [f"Bearer {SECRET}"] * 2
    assert not score.valid
    assert SECRET not in score.detail
    monkeypatch.delenv("FUSION_KEY")
    with pytest.raises(ConfigError, match=r"reward\.code\.api_key_env"):
        scorer(fusion.url, api_key_env="FUSION_KEY")


@pytest.mark.parametrize(
    "reply",
    [
        {"status": "SandboxError", "message": "no pod", "run_result": None},
        {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": 3}},
        {"status": "Success", "run_result": None},
        {"scores": [1.0]},
        [1],
    ],
)
def test_a_failing_server_is_no_failing_program(fusion: Fusion, reply: Any) -> None:
    made = scorer(fusion.url)
    fusion.reply = 200, reply
    [score] = scores(made, ("print(1)", PRINTED))
    assert not score.valid


def test_a_server_is_tried_before_the_run(fusion: Fusion) -> None:
    fusion.reply = 404, {}
    with pytest.raises(ConfigError, match=r"reward\.code\.url"):
        scorer(fusion.url)
    with pytest.raises(Unreachable, match="does not answer"):
        scorer("http://127.0.0.1:9/run_code")
