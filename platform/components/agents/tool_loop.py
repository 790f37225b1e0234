"""`rollout.agent.tools`: the policy answers a question and calls tools before its answer.

A call that cannot be read, has an unknown name or wrong arguments, raises, hangs or dies gives an error that the policy
reads; the trajectory continues. Calls of one response run one after another, because they share the state of the tools.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from jsonschema import Draft202012Validator

from rl_platform.components.agents.agent_function import JsonObject
from rl_platform.components.agents.agent_process import AgentFailed
from rl_platform.components.agents.chat_session import ChatSession, Said, first_context
from rl_platform.components.agents.tool_classes import check_params, tool_class
from rl_platform.components.agents.tool_formats import Called, ToolFormat, format_of
from rl_platform.components.agents.tool_processes import LETTERS_PER_TOKEN, Lease, ToolProcesses, error_line
from rl_platform.config.schema.rollout import Agent
from rl_platform.errors import ConfigError, Problem, check_all
from rl_platform.models.tokenizer import Tokenizer

MALFORMED = "malformed"


class ToolLoop:
    """One rank's tools. Raises ConfigError for tools that cannot be used."""

    def __init__(self, options: Agent, tokenizer: Tokenizer, tools: ToolFormat) -> None:
        self._options, self._tokenizer, self._format = options, tokenizer, tools
        self.schemas = schemas_of(options)
        self._names = [schema["function"]["name"] for schema in self.schemas]
        self._checks = [Draft202012Validator(schema["function"]["parameters"]) for schema in self.schemas]
        self._specs = [{"type": tool.type, "params": tool.params} for tool in options.tools]
        self._processes = ToolProcesses(options.num_workers)
        self._free: list[asyncio.Semaphore] = []

    def begin(self) -> None:
        """Prepares for the trajectories of a rollout, which have an event loop of their own."""
        self._free = [asyncio.Semaphore(tool.max_running) for tool in self._options.tools]

    def close(self) -> None:
        self._processes.close()

    async def run(self, session: ChatSession, question: JsonObject, place: int) -> dict[str, int]:
        """Runs a trajectory to its answer without a call, or the last of `max_calls`. Returns counts of each tool."""
        counts = self.counts()
        messages, schemas = self.described(question["messages"])
        lease = self.lease(place, question)
        try:
            await lease.set_up()
            for number in range(self._options.max_calls):
                said = await session.say(messages, schemas)
                if said is None or number == self._options.max_calls - 1:
                    break
                if not (results := await self.results(said, lease, counts)):
                    break
                messages += [said[0], *results]
            with suppress(TimeoutError, AgentFailed):
                await lease.end()
        finally:
            lease.leave()
        return dict(counts)

    def counts(self) -> Counter[str]:
        """Returns zeros for a new trajectory."""
        counts = Counter({f"{name}/{what}": 0 for name in self._names for what in ("calls", "errors", "timeouts")})
        counts[MALFORMED] = 0
        return counts

    def described(self, messages: Sequence[JsonObject]) -> tuple[list[JsonObject], list[JsonObject] | None]:
        """Returns the first messages, and the schemas for the chat template; None: the messages have them."""
        return described(messages, self.schemas, self._format)

    def lease(self, place: int, question: JsonObject) -> Lease:
        """Returns the tools of a trajectory."""
        return Lease(self._processes, place, tools=self._specs, question=question)

    async def results(self, said: Said, lease: Lease, counts: Counter[str]) -> list[JsonObject]:
        """Runs the calls of a response; returns the messages with their results, none if there are no calls."""
        if not (called := self._format.read(said[1])[1]):
            return []
        texts = [
            shortened(await self._result(call, lease, counts), self._tokenizer, self._longest(call)) for call in called
        ]
        return self._format.results(_named(said[0], called, texts))

    def _longest(self, call: Called) -> int:
        tools = self._options.tools
        known = call.name in self._names
        return tools[self._names.index(call.name)].max_result_tokens if known else tools[0].max_result_tokens

    async def _result(self, call: Called, lease: Lease, counts: Counter[str]) -> str:
        if call.error or call.name not in self._names:
            counts[MALFORMED] += 1
            return f"error: {call.error or f'there is no function {call.name[:64]}, only ' + ', '.join(self._names)}"
        number = self._names.index(call.name)
        tool = self._options.tools[number]
        counts[f"{call.name}/calls"] += 1
        if wrong := self._misfit(number, call.arguments):
            counts[f"{call.name}/errors"] += 1
            return f"error: {wrong}"
        job = {"number": number, "arguments": call.arguments, "longest": tool.max_result_tokens * LETTERS_PER_TOKEN}
        said = ""
        for _ in range(tool.retries + 1):
            try:
                async with self._free[number]:
                    result: str = await lease.ask("call", tool.timeout_s, **job)
                    return result
            except TimeoutError:
                counts[f"{call.name}/timeouts"] += 1
                said = f"error: no result within {tool.timeout_s:g} s"
            except AgentFailed as failed:
                counts[f"{call.name}/errors"] += 1
                said = f"error: {error_line(failed)}"
        return said

    def _misfit(self, number: int, arguments: JsonObject) -> str:
        """Returns why the arguments do not fit the tool's schema; empty if they do."""
        try:
            error = next(self._checks[number].iter_errors(arguments), None)
        except Exception as broken:  # of a schema, as a $ref that leads nowhere
            return f"{type(broken).__name__}: {broken}"[:500]
        return "" if error is None else error.message[:500]


def described(
    messages: Sequence[JsonObject], schemas: list[JsonObject], tool_format: ToolFormat
) -> tuple[list[JsonObject], list[JsonObject] | None]:
    """Returns the first messages, and the schemas for the chat template; None: the messages have them."""
    if tool_format.in_template:
        return list(messages), schemas
    return _with_system(list(messages), tool_format.instructions(schemas)), None


def length_with_tools(options: Agent, tokenizer: Tokenizer, chat: bool) -> Callable[[Sequence[JsonObject]], int]:
    """Returns a function from the messages of a question to the number of tokens of its first call.

    Raises ConfigError for tools that cannot be used.
    """
    schemas, tool_format = schemas_of(options), format_of(tokenizer, options, chat)
    return lambda messages: len(first_context(*described(messages, schemas, tool_format), tokenizer, chat))


def shortened(text: str, tokenizer: Tokenizer, longest: int) -> str:
    """Returns the text of the first `longest` tokens, without characters that no tokenizer can encode."""
    text = text.encode(errors="replace").decode()
    tokens = tokenizer.observation(text, chat=False, ended=True)
    return text if len(tokens) <= longest else tokenizer.decode(tokens[:longest])


def schemas_of(options: Agent) -> list[JsonObject]:
    """Returns the tools as chat templates read them. Raises ConfigError with all that are wrong."""

    def check(number: int) -> None:
        tool, key = options.tools[number], f"rollout.agent.tools[{number}]"
        tool_class(tool.type)
        check_params(tool.type, tool.params, key)

    check_all(*(lambda number=number: check(number) for number in range(len(options.tools))))
    schemas = [tool_class(tool.type).schema for tool in options.tools]
    names = [schema["name"] for schema in schemas]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        message = "several tools have this name, so a call would be ambiguous"
        raise ConfigError([Problem("rollout.agent.tools", message, value=twice[0], hint="one tool per name")])
    return [{"type": "function", "function": schema} for schema in schemas]


def _with_system(messages: list[JsonObject], text: str) -> list[JsonObject]:
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _named(message: JsonObject, called: list[Called], results: list[str]) -> list[tuple[str, str, str]]:
    """Returns the id, the name and the result of each call. A call that cannot be read has no id."""
    ids = iter(call["id"] for call in message.get("tool_calls", ()))
    return [
        ("" if call.error else next(ids, ""), call.name, result) for call, result in zip(called, results, strict=True)
    ]
