"""The program of a process with tools or text environments, which `agent_process.py` starts.

A job names a trajectory, `key`; each has instances of its own.

| job | result |
|---|---|
| do: start, environment: its type | null |
| do: start, tools, question | null |
| do: call, number, arguments | text |
| do: reset, environment, question, seed | text |
| do: step, text | [text, reward, done] |
| do: end | the environment's score, or null |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from rl_platform.components.agents.agent_function import AgentTool, JsonObject, TextEnvironment
from rl_platform.components.agents.agent_program import serve
from rl_platform.components.agents.text_environments import environment_class
from rl_platform.components.agents.tool_classes import tool_class
from rl_platform.envs.reasoning.score import checked_reward
from rl_platform.standard_streams import never_fail

T = TypeVar("T")


def main() -> None:
    """Runs the process. Its argument is the socket's descriptor."""
    never_fail()
    tools: dict[str, list[AgentTool]] = {}  # by trajectory
    environments: dict[str, TextEnvironment] = {}
    importing = threading.Lock()  # another thread would see a module that is not complete

    def loaded(load: Callable[[str], T], name: str) -> T:
        with importing:
            return load(name)

    def run(job: JsonObject) -> object:
        key = job["key"]
        match job["do"]:
            case "start":
                if "environment" in job:
                    # the import may take longer than the deadline of a reset allows
                    loaded(environment_class, job["environment"])
                    return None
                tools[key] = [
                    loaded(tool_class, spec["type"])(job["question"], spec["params"]) for spec in job["tools"]
                ]
                return None
            case "call":
                return _text(tools[key][job["number"]].call(job["arguments"]), job["longest"], "call()")
            case "reset":
                spec = job["environment"]
                environment = environments[key] = loaded(environment_class, spec["type"])(spec["params"])
                return _text(environment.reset(job["question"], job["seed"]), job["longest"], "reset()")
            case "step":
                if key not in environments:
                    raise LookupError("the process with this episode has ended")
                step = environments[key].step(job["text"])
                if not isinstance(step, tuple) or len(step) != 3:
                    raise TypeError(f"step() returns (text, reward, done), not {_shown(step)}")
                return [_text(step[0], job["longest"], "step()"), checked_reward(step[1]), bool(step[2])]
            case _:
                ended = environments.pop(key, None)
                return _end(tools.pop(key, []) if ended is None else [ended])

    serve(run)


def _end(instances: Sequence[object]) -> float | None:
    """Closes the instances. Returns the score of an environment that has one."""
    try:
        scores = [checked_reward(score()) for each in instances if callable(score := getattr(each, "score", None))]
        return scores[0] if scores else None
    finally:
        for each in instances:
            if callable(close := getattr(each, "close", None)):
                close()


def _text(text: object, longest: int, what: str) -> str:
    """Returns at most `longest` characters that a tokenizer can encode. Raises TypeError for other than text."""
    if not isinstance(text, str):
        raise TypeError(f"{what} returns text, not {_shown(text)}")
    return text[:longest].encode(errors="replace").decode()


def _shown(value: object) -> str:
    return f"{value!r:.100}"
