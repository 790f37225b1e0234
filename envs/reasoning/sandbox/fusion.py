"""Programs run by a SandboxFusion server: its `run_code` request, one per test.

    POST url  {"code": text, "language": "python", "stdin": text, "run_timeout": seconds, "memory_limit_MB": ..., ...}
    200       {"status": "Success" | "Failed" | "SandboxError", "run_result": {"status": "Finished" |
              "TimeLimitExceeded" | "Error", "return_code": 0, "stdout": text, "stderr": text}, "files": {...}}

Protocol: https://github.com/bytedance/SandboxFusion. The result of a function call comes back as a file, which the
server encodes in base64. Not covered: retries, see `servers/http_scorer.py`.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Sequence
from typing import Any

from rl_platform.envs.reasoning.sandbox.cases import Case, cases_of
from rl_platform.envs.reasoning.sandbox.process import (
    CRASHED,
    ENDED,
    LONGEST_OUTPUT,
    MEMORY,
    OUTPUT,
    TIMEOUT,
    WALL_FACTOR,
    Limits,
    Result,
)
from rl_platform.envs.reasoning.sandbox.program_verdict import judge, program_of
from rl_platform.envs.reasoning.score import RAISED, Score, unscored
from rl_platform.envs.reasoning.servers.judge import secret_of
from rl_platform.envs.reasoning.servers.reward_server import SHOWN, Server, Unanswered
from rl_platform.envs.reasoning.verifiers import ScoreItem

ANSWER_S = 30.0  # of the server, beside the program's own time
_RESULT = "result.json"
_CALL = """
import json
_module = type(json)("program")
exec(compile({program!r}, "program.py", "exec"), _module.__dict__)
_test = json.loads({test!r})
_first, *_names = _test["entry_point"].split(".")
_function = _module.__dict__[_first]
for _name in _names:
    _function = getattr(_function() if isinstance(_function, type) else _function, _name)
_arguments = _test["arguments"]
_result = _function(**_arguments) if isinstance(_arguments, dict) else _function(*_arguments)
with open({file!r}, "w") as _file:
    json.dump(_result, _file)
"""


class FusionServer(Server):
    """Scores programs by requests to `url`, which ends with /run_code."""

    key = "reward.code.url"

    def __init__(self, url: str, api_key_env: str | None, limits: Limits, *, partial: bool) -> None:
        secret = secret_of(api_key_env, "reward.code.api_key_env")
        super().__init__(url, WALL_FACTOR * limits.cpu_s + ANSWER_S, secret)
        self._limits, self._partial = limits, partial

    def ask(self, items: Sequence[ScoreItem]) -> list[Score]:
        if not items and (result := self._run("print(input())", Case("", input="42"))).output.strip() != b"42":
            raise Unanswered(RAISED, f"{self.url} does not run a program that echoes 42: {result.status} {result.note}")
        return [self._score(item) for item in items]

    def _score(self, item: ScoreItem) -> Score:
        try:
            program, cases = program_of(item.final), cases_of(item.metadata)
        except ValueError as error:
            return unscored(RAISED, str(error))
        return judge(program, cases, lambda case: self._run(program, case), partial=self._partial)

    def _run(self, program: str, case: Case) -> Result:
        calls = bool(case.entry_point)
        test = json.dumps(case.question())
        request = {
            "code": _CALL.format(program=program, test=test, file=_RESULT) if calls else program,
            "language": "python",
            "stdin": case.input,
            "compile_timeout": math.ceil(self._limits.cpu_s),
            "run_timeout": math.ceil(self._limits.cpu_s),
            "memory_limit_MB": self._limits.memory_bytes >> 20,
            "fetch_files": [_RESULT] if calls else [],
        }
        answer = self.post(json.dumps(request).encode())
        try:
            reply = json.loads(answer)
            if reply["status"] == "SandboxError":
                raise Unanswered(RAISED, f"{self.url}: the sandbox failed: {str(reply.get('message'))[:SHOWN]}")
            return _result(reply, reply["run_result"], calls)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
            message = f"{self.url} answered with something else than a result of run_code: {self.shown(answer)}"
            raise Unanswered(RAISED, message) from error


def _result(reply: dict[str, Any], run: dict[str, Any], calls: bool) -> Result:
    note = str(run.get("stderr") or "").strip()[-SHOWN:]
    if run["status"] == "TimeLimitExceeded":
        return Result(TIMEOUT, note=note)
    if reply["status"] != "Success" or run["status"] != "Finished" or run["return_code"] != 0:
        memory = note.rpartition("\n")[2].startswith("MemoryError")
        return Result(MEMORY if memory else CRASHED, note=note or f"exit code {run.get('return_code')}")
    output = base64.b64decode(reply["files"][_RESULT]) if calls else run["stdout"].encode()
    return Result(OUTPUT) if len(output) > LONGEST_OUTPUT else Result(ENDED, output, note)
