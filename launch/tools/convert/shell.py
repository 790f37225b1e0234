"""Reads the arguments of a training command from a shell script. Nothing of the script is run.

Assignments, arrays, quotes, `${NAME:-default}` and `$((...))` are followed. A variable that the script does not set
becomes `${env:NAME}`. Output of commands, and assignments inside `if`, `case` and loops, stay unresolved.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from rl_platform.launch.tools.convert.outcome import Unresolved

_MARK = "\0"  # replaces a value that is not known
_NAME = re.compile(r"[A-Za-z_]\w*")
_OPENING, _CLOSING = {"if", "for", "while", "until", "case", "{"}, {"fi", "done", "esac", "}"}
_KEYWORDS = {"then", "else", "elif", "do", "!", "export", "local", "readonly", "declare", "exec", "time"}
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class _Shell:
    variables: dict[str, str | list[str]] = field(default_factory=dict)

    def words(self, raw: str) -> list[str]:
        """Returns the words that one raw word expands to: none, one, or the elements of an array."""
        if match := re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', raw):
            value = self.variables.get(match[1], [])
            return value if isinstance(value, list) else [value]
        if re.fullmatch(r'"?\$(@|\*|\{@\})"?', raw):
            return []
        text = self.text(raw)
        if "'" in raw or '"' in raw or "$" not in raw:
            return [text]
        return text.split() or ([text] if "=" in raw else [])

    def text(self, raw: str) -> str:
        out, at, quoted = "", 0, False
        while at < len(raw):
            char = raw[at]
            if char == "'" and not quoted:
                end = _quoted(raw, at)
                out, at = out + raw[at + 1 : end].removesuffix("'"), end
            elif char == '"':
                quoted, at = not quoted, at + 1
            elif char == "\\" and at + 1 < len(raw):
                keeps = quoted and raw[at + 1] not in '"\\$`'
                out, at = out + (raw[at : at + 2] if keeps else raw[at + 1]), at + 2
            elif char == "`":
                out, at = out + _MARK, _quoted(raw, at)
            elif char == "$" and at + 1 < len(raw):
                value, at = self._dollar(raw, at)
                out += value
            else:
                out, at = out + char, at + 1
        return out

    def _dollar(self, raw: str, at: int) -> tuple[str, int]:
        if raw.startswith("$((", at):
            end = _closing(raw, at + 1)
            return self._number(raw[at + 3 : end - 2]), end
        if raw.startswith("$(", at):
            return _MARK, _closing(raw, at + 1)
        if raw.startswith("${", at):
            end = _closing(raw, at + 1)
            return self._braces(raw[at + 2 : end - 1]), end
        if name := _NAME.match(raw, at + 1):
            return self._variable(name[0]), name.end()
        return "", at + 2  # $1, $@, $?

    def _braces(self, inner: str) -> str:
        match = re.fullmatch(r"(\w+)(\[[@*]\])?(:?[-=?+])?(.*)", inner, re.DOTALL)
        if match is None:
            return _MARK
        name, _, test, other = match.groups()
        if test is None:
            return self._variable(name) if not other else _MARK
        known = self.variables.get(name)
        if test[-1] == "+":
            if not known:
                self.variables[name] = ""  # the script works without it
            return self.text(other) if known else ""
        return self._variable(name) if known else self.text(other) if test[-1] in "-=" else _MARK

    def _variable(self, name: str) -> str:
        if name.isdigit():
            return ""
        value = self.variables.get(name, f"${{env:{name}}}")
        return " ".join(value) if isinstance(value, list) else value

    def _number(self, text: str) -> str:
        names = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: f"({self._variable(name[1])})", text)
        try:
            return str(_computed(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
            return _MARK


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return int(_OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError


def commands(text: str) -> Iterator[list[str]]:
    """Returns the simple commands of a script, each as its expanded words."""
    shell, depth = _Shell(), 0
    raw: list[str] = []
    tokens = [*_tokens(text), "\n"]
    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if token not in ("\n", ";", "&&", "||", "|", "&", "(", ")", ";;"):
            if not raw and (token in _OPENING or token in _CLOSING):
                depth += 1 if token in _OPENING else -1
                raw = [token] if token in ("for", "case") else []  # their heads are no commands
            elif not (token in _KEYWORDS and not raw):
                raw.append(token)
            if (assigned := _assignment(raw)) is not None and len(raw) == 1:
                name, value = assigned
                if value == "" and at < len(tokens) and tokens[at] == "(":
                    end = tokens.index(")", at) if ")" in tokens[at:] else len(tokens)
                    elements = [word for each in tokens[at + 1 : end] if each != "\n" for word in shell.words(each)]
                    _set(shell, name, elements, depth)
                    at = end + 1
                    raw = []
                elif at < len(tokens) and tokens[at] in ("\n", ";", "&&"):
                    _set(shell, name, shell.text(value), depth)
                    raw = []
            continue
        if raw and raw[0] not in ("for", "case"):
            yield [word for each in raw for word in shell.words(each)]
        raw = []


def _assignment(raw: list[str]) -> tuple[str, str] | None:
    match = re.fullmatch(r"([A-Za-z_]\w*\+?)=(.*)", raw[0], re.DOTALL) if raw else None
    return (match[1], match[2]) if match else None


def _set(shell: _Shell, name: str, value: str | list[str], depth: int) -> None:
    """Sets a variable. Inside `if`, `case` and loops it is only known that the script may set it."""
    before = shell.variables.get(name.rstrip("+"))
    if depth > 0:
        if before is None and isinstance(value, str):
            shell.variables[name] = _MARK
        return
    if name.endswith("+") and before is not None:
        if isinstance(before, list) and isinstance(value, list):
            value = [*before, *value]
        else:
            value = f"{before}{value}"
    shell.variables[name.rstrip("+")] = value


def _tokens(text: str) -> Iterator[str]:
    at, word = 0, ""
    # A shell ends the command at `\ # comment`; the lines below it are meant as its arguments.
    text = re.sub(r"\\(\r?|[ \t]+#.*)\n", " ", text)
    while at < len(text):
        char = text[at]
        if char in " \t\r":
            if word:
                yield word
            word, at = "", at + 1
        elif char == "#" and not word:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif char in "\n;&|()<>" and not (char in "<>" and word.isdigit()):
            if word:
                yield word
            operator_ = text[at : at + 2] if text[at : at + 2] in ("&&", "||", ";;") else char
            yield operator_
            word, at = "", at + len(operator_)
        elif char in "'\"`" or text.startswith(("${", "$("), at):
            end = _quoted(text, at) if char in "'\"`" else _closing(text, at + 1)
            word, at = word + text[at:end], end
        elif char == "\\":
            word, at = word + text[at : at + 2], at + 2
        else:
            word, at = word + char, at + 1
    if word:
        yield word


def _quoted(text: str, at: int) -> int:
    """Returns the end of a quoted part that begins at `at`."""
    quote, at = text[at], at + 1
    while at < len(text) and text[at] != quote:
        if quote == '"' and text.startswith(("${", "$("), at):
            at = _closing(text, at + 1)
        else:
            at += 2 if quote == '"' and text[at] == "\\" else 1
    return at + 1


def _closing(text: str, at: int) -> int:
    """Returns the end of a part in brackets that begins at `at`."""
    pairs, depth = {"(": ")", "{": "}"}, 0
    opening = text[at]
    while at < len(text):
        if text[at] in "'\"":
            at = _quoted(text, at)
            continue
        depth += {opening: 1, pairs[opening]: -1}.get(text[at], 0)
        at += 1
        if depth == 0:
            break
    return at


def known(text: str) -> str | Unresolved:
    """Returns the text of an expanded word, or what is known of it."""
    if _MARK not in text:
        return text
    return Unresolved(text.replace(_MARK, "..."), "the script sets it by a command or under a condition")
