"""Reads the calls of tools in a model's text: the formats of Hermes and Qwen, and of Llama 3.

| format | a call |
|---|---|
| hermes | <tool_call>{"name": "search", "arguments": {"query": "tides"}}</tool_call> |
| llama3 | {"name": "search", "parameters": {"query": "tides"}}, alone in the response; several are separated by `;` |

Not covered: formats of other markup, as the XML of Qwen3-Coder or the `[TOOL_CALLS]` of Mistral.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_platform.components.agents.agent_function import JsonObject
from rl_platform.config.schema.rollout import Agent
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.tokenizer import Tokenizer

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_PROBE = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Does nothing. This text is longer than what a format has between a name and parameters.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
_WRITTEN = {
    "hermes": '<tool_call>{"name": "...", "arguments": {...}}</tool_call>',
    "llama3": '{"name": "...", "parameters": {...}}',
}


@dataclass(frozen=True)
class Called:
    """A call that the policy wrote. error: why it cannot be read; name and arguments are then empty."""

    name: str = ""
    arguments: JsonObject = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """name: hermes or llama3. in_template: the chat template renders tools and their results."""

    name: str
    in_template: bool = True

    def read(self, text: str) -> tuple[str, list[Called]]:
        """Returns the text before the first call, and all calls in it, those that cannot be read included."""
        return _read_llama3(text) if self.name == "llama3" else _read_hermes(text)

    def instructions(self, schemas: Sequence[JsonObject]) -> str:
        """Describes the tools, for chat templates that do not."""
        lines = "\n".join(json.dumps(schema["function"]) for schema in schemas)
        return (
            f"You can call these functions. A line describes each:\n{lines}\nTo call one, write\n"
            f"{_WRITTEN[self.name]}\nThe result follows.\n"
        )

    def results(self, results: Sequence[tuple[str, str, str]]) -> list[JsonObject]:
        """Returns the messages with the results, each a call's id, the tool's name and a text."""
        if self.in_template:
            return [
                {"role": "tool", "tool_call_id": call, "name": name, "content": text} for call, name, text in results
            ]
        shown = "\n".join(f"<tool_response>{text}</tool_response>" for _, _, text in results)
        return [{"role": "user", "content": shown}]


def format_of(tokenizer: Tokenizer, options: Agent, chat: bool) -> ToolFormat:
    """Returns `rollout.agent.tool_format`, derived from what the chat template says if it is `auto`.

    If that shows no tools or another format, raises ConfigError for `tools`; agents of the user get hermes.
    """
    asked = options.tool_format
    shown = _rendered(tokenizer) if chat else ""
    known = _format_in(shown)
    if asked != "auto":
        return ToolFormat(asked, in_template=asked == known)
    if known is None and options.tools:
        why = "the chat template shows another format" if shown else "the chat template shows no tools"
        why = why if chat else "there is no chat template (data.use_chat_template: false)"
        hint = "hermes or llama3; the schemas are then in the system message"
        problem = Problem("rollout.agent.tool_format", why, value="auto", allowed="hermes, llama3", hint=hint)
        raise ConfigError([problem])
    return ToolFormat(known or "hermes")


def _rendered(tokenizer: Tokenizer) -> str:
    """Returns what the chat template adds if there is a tool; empty if it ignores tools."""
    messages = [{"role": "user", "content": "?"}]
    try:
        with_tools = tokenizer.decode(tokenizer.apply_chat(messages, [_PROBE]), special=True)
    except ValueError:
        return ""
    return with_tools if "probe" in with_tools else ""


def _format_in(shown: str) -> str | None:
    if "<function=" in shown or not shown:  # XML of Qwen3-Coder
        return None
    if "<tool_call>" in shown:
        return "hermes"
    return "llama3" if re.search(r'\{\s*"name":.{1,40}"parameters":', shown) else None


def _read_hermes(text: str) -> tuple[str, list[Called]]:
    calls = [
        _called(call[1], "arguments") if call[2] else Called(error="the call has no </tool_call>")
        for call in _HERMES.finditer(text)
    ]
    return text.partition("<tool_call>")[0], calls


def _read_llama3(text: str) -> tuple[str, list[Called]]:
    before, tag, rest = text.partition(_PYTHON_TAG)
    if not tag:
        before, rest = "", text
    rest = rest.strip()
    if not tag and not re.match(r'\{\s*"(name|type|parameters)"', rest):
        return text, []
    calls = []
    while rest:
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            end = len(rest)
        calls.append(_called(rest[:end], "parameters"))
        rest = rest[end:].lstrip("; \n")
    return before, calls


def _called(text: str, arguments_key: str) -> Called:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Called(error=f"the call is not JSON: {error}"[:200])
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Called(error="a call is an object with a name")
    arguments = call.get(arguments_key, {})
    if not isinstance(arguments, dict):
        return Called(error=f"{arguments_key} must be an object")
    return Called(call["name"], arguments)
