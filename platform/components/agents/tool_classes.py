"""Tools of agents: the built-in ones, and the check of a schema."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from functools import cache
from pathlib import Path
from typing import ClassVar, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from rl_platform.components.agents.agent_function import AGENT_TOOL, AgentTool, JsonObject
from rl_platform.components.agents.turn_tool import computed
from rl_platform.errors import ConfigError, Problem, problems_of
from rl_platform.text_files import NotUTF8, text_of

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_WORD = re.compile(r"\w+")


def tool_class(name: str) -> type[AgentTool]:
    """Returns a built-in tool or the user's class of that name. Raises ConfigError if there is none, or if its schema
    is wrong."""
    tool_type: type[AgentTool] = cast(type[AgentTool], TOOLS[name]) if name in TOOLS else AGENT_TOOL.load(name)
    if problem := _schema_problem(getattr(tool_type, "schema", None)):
        raise AGENT_TOOL.misfit(name, f"its schema {problem}", hint="docs/agents.md#a-tool-of-your-own has an example")
    return tool_type


def check_params(name: str, params: JsonObject, key: str) -> None:
    """Raises ConfigError for wrong parameters of a built-in tool. Only the class reads those of a user's tool."""
    tool = TOOLS.get(name)
    if tool is None:
        return
    for each, value in params.items():
        if each not in tool.params or type(value) is not type(tool.params[each]):
            message = f"tool {name} has no such parameter" if each not in tool.params else "has another type"
            shown = ", ".join(f"{known}: {default!r}" for known, default in tool.params.items()) or "none"
            raise ConfigError([Problem(f"{key}.params.{each}", message, value=repr(value), allowed=shown)])
    try:
        tool.check(params, key)
    except (OSError, ValueError, sqlite3.Error) as error:
        raise ConfigError([Problem(f"{key}.params", str(error), value=str(params), hint=tool.hint)]) from error


def _schema_problem(schema: object) -> str:
    """Returns what is wrong with a tool's schema; empty if nothing is."""
    if not isinstance(schema, dict):
        return f"is not a dictionary with name, description and parameters, but {schema!r:.80}"
    if not isinstance(schema.get("name"), str) or not _NAME.fullmatch(schema["name"]):
        return f"has the name {schema.get('name')!r:.80}; allowed are 1 to 64 letters, digits, _ and -"
    if not isinstance(schema.get("description"), str):
        return "has no description"
    parameters = schema.get("parameters")
    if not isinstance(parameters, dict) or parameters.get("type") != "object":
        return 'has no parameters, a JSON schema with "type": "object"'
    try:
        Draft202012Validator.check_schema(parameters)
        json.dumps(schema)
    except (SchemaError, TypeError) as error:
        return f"has wrong parameters: {getattr(error, 'message', error)}"
    return ""


def _one_text(name: str, description: str, argument: str, meaning: str) -> JsonObject:
    properties = {argument: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"name": name, "description": description, "parameters": parameters}


class BuiltInTool:
    """params: by name, an example with the type. hint: of a message about them."""

    params: ClassVar[dict[str, object]] = {}
    hint = ""

    @classmethod
    def check(cls, params: JsonObject, key: str) -> None:
        """Raises OSError, ValueError, sqlite3.Error or ConfigError if calls could not succeed with these parameters."""


class SearchTool(BuiltInTool):
    """Full-text search (SQLite FTS5, BM25) in `documents`, JSON lines with title and text or an SQLite file.

    Returns the `limit` best documents that have any word of the query. A process reads the documents once.
    """

    schema = _one_text("search", "Finds documents.", "query", "words to look for")
    params: ClassVar[dict[str, object]] = {"documents": "documents.jsonl", "limit": 3}
    hint = 'documents: a file of JSON lines, {"title": "...", "text": "..."}, or an SQLite file with a table of FTS5'

    @classmethod
    def check(cls, params: JsonObject, key: str) -> None:
        _index(str(params.get("documents", "")))

    def __init__(self, question: JsonObject, params: JsonObject) -> None:
        self._table, self._connection, self._lock = _index(params["documents"])
        self._limit = params.get("limit", 3)

    def call(self, arguments: JsonObject) -> str:
        words = " OR ".join(f'"{word}"' for word in _WORD.findall(arguments["query"])[:32])
        if not words:
            return "no results"
        query = f'SELECT title, text FROM "{self._table}" WHERE "{self._table}" MATCH ? ORDER BY rank LIMIT ?'
        with self._lock:
            rows = self._connection.execute(query, (words, self._limit)).fetchall()
        return "\n".join(f"{title}: {text}" for title, text in rows) or "no results"


@cache
def _index(documents: str) -> tuple[str, sqlite3.Connection, threading.Lock]:
    """Returns the name of a table of FTS5, and its database. Raises OSError, ValueError or sqlite3.Error."""
    path = Path(documents)
    if not path.is_file():
        raise OSError("there is no such file")
    if path.suffix != ".jsonl":
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
        tables = connection.execute("SELECT name FROM sqlite_master WHERE sql LIKE '%USING fts5%'").fetchall()
        if len(tables) != 1:
            raise ValueError(f"the database has {len(tables)} tables of FTS5, not one")
        connection.execute(f'SELECT title, text FROM "{tables[0][0]}" LIMIT 1')
        return tables[0][0], connection, threading.Lock()
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text)")
    try:
        text = text_of(path.read_bytes(), path)
    except NotUTF8 as error:
        raise ValueError(f"line {error.line}: {error}. Convert it: {error.hint}") from error
    # not splitlines(): a text may hold further separators, such as U+2028
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no documents")
    for number, line in lines:
        connection.execute("INSERT INTO documents VALUES (?, ?)", _document(line, f"{path}:{number}"))
    return "documents", connection, threading.Lock()


def _document(line: str, where: str) -> tuple[str, str]:
    """Returns title and text. Raises ValueError with the line's place."""
    try:
        match json.loads(line):
            case {"title": str(title), "text": str(text)}:
                return title, text
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    raise ValueError(f"{where}: has no title and text, each a text")


class Python(BuiltInTool):
    """Runs a program in the sandbox of `reward.type: code` and returns what it prints, or the end of its errors.

    A program has `cpu_s` seconds of CPU time and `memory_mb` MiB. isolation: sandbox or none. Programs share no state.
    """

    schema = _one_text("python", "Runs a Python program and returns what it prints.", "code", "the program")
    params: ClassVar[dict[str, object]] = {"cpu_s": 2.0, "memory_mb": 256, "isolation": "sandbox"}

    def __init__(self, question: JsonObject, params: JsonObject) -> None:
        from rl_platform.envs.reasoning.sandbox.process import Limits

        isolation = params.get("isolation", "sandbox")
        if isolation not in ("sandbox", "none"):
            raise ValueError(f"isolation is sandbox or none, not {isolation}")
        self.limits = Limits(params.get("cpu_s", 2.0), params.get("memory_mb", 256) << 20)
        self.isolated = isolation == "sandbox"

    @classmethod
    def check(cls, params: JsonObject, key: str) -> None:
        from rl_platform.envs.reasoning.sandbox.spec import CodeSpec

        tool = cls({}, params)
        with problems_of(f"{key}.params.isolation", "reward.isolation"):
            CodeSpec(tool.limits, tool.isolated, partial=False).load()

    def call(self, arguments: JsonObject) -> str:
        from rl_platform.envs.reasoning.sandbox.cases import Case
        from rl_platform.envs.reasoning.sandbox.process import ENDED, Sandbox

        with Sandbox(arguments["code"], self.limits, isolated=self.isolated) as sandbox:
            result = sandbox.run(Case("", input=""))
        if result.status == ENDED:
            return result.output.decode(errors="replace") or "the program printed nothing"
        last = result.note.splitlines()[-1:]
        return f"error: {last[0]}" if last else f"error: {result.status}"


class Calculator(BuiltInTool):
    """The exact value of an expression of numbers, + - * / and parentheses."""

    schema = _one_text("calculator", "Computes an expression of numbers.", "expression", "as (2+3)*4")

    def __init__(self, question: JsonObject, params: JsonObject) -> None: ...

    def call(self, arguments: JsonObject) -> str:
        return computed(str(arguments["expression"]).strip().removesuffix("="))


TOOLS: dict[str, type[BuiltInTool]] = {"search": SearchTool, "python": Python, "calculator": Calculator}
