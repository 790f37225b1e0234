"""Environments of the library verifiers: their check, and the program of their process (see `agent_process.py`).

Such an environment calls the rollout's endpoint, as an agent of the user does. Its rubric gives the reward. Covers
environments with `load_environment`, which verifiers has before 0.4; its tasksets are not covered.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from inspect import isawaitable
from typing import TYPE_CHECKING

from packaging.version import Version

from rl_platform.components.agents.agent_function import JsonObject
from rl_platform.components.agents.agent_process import AgentFailed, AgentProcess
from rl_platform.components.agents.agent_program import serve_agent
from rl_platform.errors import ConfigError, Problem
from rl_platform.standard_streams import never_fail

if TYPE_CHECKING:
    import verifiers

TYPE = "verifiers"
_KEY = "rollout.agent.environment"
_LOAD_S = 300.0
_raised: ContextVar[list[Exception]] = ContextVar("raised")  # by reward functions of an episode


def main() -> None:
    """Runs the process. Its arguments are the socket's descriptor, the parameters as JSON and the endpoint's URL."""
    never_fail()
    failure = ""
    try:
        environment = _loaded(json.loads(sys.argv[2]))  # in the main thread: its constructor sets signal handlers
    except Exception:
        failure = traceback.format_exc()

    async def episode(question: JsonObject, base_url: str, api_key: str) -> float | None:
        if failure:
            raise RuntimeError(failure)
        return await _episode(environment, question["seed"], base_url, api_key) if question else None

    serve_agent(episode, sys.argv[3])


def program(params: JsonObject) -> tuple[str, str]:
    """Returns the program and its first argument, for AgentProcess."""
    return "verifiers_program", json.dumps(params, default=str)


def check_verifiers(params: JsonObject) -> None:
    """Loads the environment in a process of its own. Raises ConfigError if that fails."""
    valid = isinstance(params.get("id"), str) and isinstance(params.get("args", {}), dict)
    if not valid or params.keys() - {"id", "args"}:
        message = "id names the environment, args are the arguments of its load_environment()"
        hint = f"{_KEY}: {{type: verifiers, params: {{id: my-environment, args: {{}}}}}}"
        raise ConfigError([Problem(f"{_KEY}.params", message, value=str(params), allowed="id, args", hint=hint)])
    install = "pip install 'rl-platform[verifiers]'"
    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        message = "the package verifiers is not installed"
        raise ConfigError([Problem(f"{_KEY}.type", message, value=TYPE, hint=install)]) from None
    if Version(installed) >= Version("0.4"):
        message = f"verifiers {installed} is installed, which has no load_environment()"
        raise ConfigError([Problem(f"{_KEY}.type", message, value=TYPE, allowed="verifiers before 0.4", hint=install)])
    process = AgentProcess(*program(params), "")
    try:
        process.run({"question": None, "key": ""}).result(_LOAD_S)
    except (AgentFailed, TimeoutError) as error:
        lines = str(error).strip().splitlines() or [f"not loaded within {_LOAD_S:g} s"]
        message = f"the environment cannot be loaded: {lines[-1]}"
        raise ConfigError([Problem(f"{_KEY}.params", message, value=str(params))]) from error
    finally:
        process.close()


def _loaded(params: JsonObject) -> verifiers.Environment:
    """Returns the environment. Raises ValueError for one that does not score single rollouts of training rows."""
    import verifiers

    environment = verifiers.load_environment(params["id"], **params.get("args", {}))
    if environment.requires_group_rollouts:
        raise ValueError("its rubric compares the rollouts of a group, and here each is scored alone")
    if not len(environment.get_dataset()):
        raise ValueError("its dataset is empty")
    for rubric in getattr(environment.rubric, "rubrics", [environment.rubric]):
        rubric.funcs = [
            _recorded(function) if weight else function
            for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
        ]
    return environment


def _recorded(function: Callable[..., object]) -> Callable[..., Awaitable[object]]:
    """Records exceptions of a reward function; the rubric itself counts them as a reward of 0."""

    @wraps(function)
    async def call(*arguments: object, **options: object) -> object:
        try:
            reward = function(*arguments, **options)
            return await reward if isawaitable(reward) else reward
        except Exception as error:
            _raised.get().append(error)
            raise

    return call


async def _episode(environment: verifiers.Environment, seed: int, base_url: str, api_key: str) -> float:
    """Returns the reward of an episode of the row that the seed selects. Raises an exception of a reward function."""
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient

    class Client(OpenAIChatCompletionsClient):  # type: ignore[misc]
        async def raise_from_native_response(self, response: object) -> None:
            """Accepts empty answers of the policy, so that they are scored too."""

    rows = environment.get_dataset()
    _raised.set([])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None) as client:
        row = rows[seed % len(rows)]
        ended = await environment.run_rollout(row, Client(client), "policy", environment.sampling_args)
    if _raised.get():
        raise _raised.get()[0]
    if ended["error"]:
        raise RuntimeError(str(ended.get("long_error_chain", ended["error"])))
    return float(ended["reward"])
