"""Code of the user that a config names as module:Name or path/to/file.py:Name: functions, classes, environments.

Every kind is one `Extension`, defined beside its protocol. launch/start_checks/extensions.py lists all of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_platform.errors import ConfigError, PlatformError, Problem, WorkerError, message_of
from rl_platform.suggest import did_you_mean

NAMED = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:]+\.py):[A-Za-z_]\w*")  # module:Name or path/to/file.py:Name
_files: list[str] = []  # that were imported
_PYTHON = ("<", *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")))
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")
_PLACE = "module:Name or path/to/file.py:Name, importable from where the run was started"


@dataclass(frozen=True)
class Extension:
    """A kind of user code. key: of the config; protocol: what it must satisfy; usage: a line of that for messages.

    A protocol with `__call__` is satisfied by a function, or by a class without arguments whose instances are called.
    Any other protocol is satisfied by a class; its `__init__`, if it has one, gives the arguments of the constructor.
    awaits: functions may be `async`.
    """

    kind: str
    key: str
    protocol: type
    usage: str
    awaits: bool = False

    def load(self, name: str, options: Iterable[str] = ()) -> Any:
        """Returns the function or the class behind `name`. Raises ConfigError if it does not satisfy the protocol.

        options: names of further arguments that the config gives the constructor.
        """
        module_name, _, attribute = name.rpartition(":")
        try:
            module = import_user_module(module_name)
        except (Exception, SystemExit) as error:  # whatever the user's module raises while it is imported
            message, absent = f"cannot be imported: {raised(error)}", getattr(error, "name", None)
            other = isinstance(error, ModuleNotFoundError) and absent not in (None, module_name.partition(".")[0])
            hint = f"the code imports {absent}, which is not installed here" if other else ""
            if isinstance(error, SystemExit):
                hint = 'it is imported, not run as a script: put what a script does below if __name__ == "__main__"'
            raise self.misfit(name, message, hint, _PLACE) from error
        if not hasattr(module, attribute):
            message = f"cannot be imported: AttributeError: {module_name} has no attribute '{attribute}'"
            raise self.misfit(name, message, _defined(module, attribute), _PLACE)
        loaded = getattr(module, attribute)
        if "__call__" in vars(self.protocol):
            return self.function(name, loaded)
        if not inspect.isclass(loaded):
            raise self.misfit(name, "is not a class")
        expected = _methods(self.protocol)
        missing = [method for method in expected if _is_missing(getattr(loaded, method, None))]
        if missing:
            raise self.misfit(name, f"has no method {', '.join(missing)}")
        for method, function in expected.items():
            bound = [None] if inspect.isfunction(inspect.getattr_static(loaded, method)) else []  # self
            self._check(name, f"{method}()", getattr(loaded, method), function, bound)
        if "__init__" in vars(self.protocol):
            self._check(name, "its constructor", loaded, self.protocol.__init__, options=options)  # type: ignore[misc]
        return loaded

    def function(self, name: str, loaded: object) -> Callable[..., Any]:
        """Returns the function, or an instance of the class, `loaded`. Raises ConfigError if it cannot be called as the
        protocol says."""
        if inspect.isclass(loaded):
            try:
                loaded = loaded()
            except (Exception, SystemExit) as error:
                raise self.misfit(name, f"cannot be built: {raised(error)}") from error
        if not callable(loaded):
            raise self.misfit(name, "is not a function")
        self._check(name, "it", loaded, self.protocol.__call__)
        function: Callable[..., object] = loaded
        return function

    def _check(
        self,
        name: str,
        what: str,
        loaded: Callable[..., object],
        expected: Callable[..., object],
        bound: Sequence[None] = (),
        options: Iterable[str] = (),
    ) -> None:
        """Raises ConfigError if `loaded` cannot be called with the arguments of `expected` and `options`, or if a call
        only returns a coroutine or a generator."""
        if not self.awaits and (kind := _deferred(loaded)):
            raise self.misfit(name, f"{what} is {kind}: a call returns no result", "an ordinary function returns it")
        try:
            own = inspect.signature(loaded)
        except (TypeError, ValueError):  # built-in functions have none
            return
        names = list(inspect.signature(expected).parameters.values())[1:]  # without self
        keywords = dict.fromkeys([*(each.name for each in names if each.kind is each.KEYWORD_ONLY), *options])
        positional = [each.name for each in names if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        try:
            own.bind(*bound, *positional, **keywords)
        except TypeError as error:
            given = ", ".join([*positional, *keywords]) or "nothing"
            raise self.misfit(name, f"{what} is called with ({given}): {error}") from error

    def misfit(self, name: str, message: str, hint: str = "", allowed: str = "") -> ConfigError:
        """Returns the error about user code that does not fit."""
        return ConfigError([Problem(self.key, message, value=name, allowed=allowed or self.usage, hint=hint)])

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Turns errors of the user's code into WorkerError with its traceback."""
        try:
            yield
        except PlatformError:
            raise
        except Exception as error:
            message = f"{self.key} {name} raised {raised(error)}"
            raise WorkerError(f"{message}\n{traceback.format_exc().rstrip()}") from error


def is_named(name: str) -> bool:
    """Returns whether `name` has the form module:Name or path/to/file.py:Name."""
    return NAMED.fullmatch(name) is not None


def raised(error: BaseException) -> str:
    """Returns type, place and message of an error of the user's code: `ValueError at file.py:12: text`."""
    place = raised_at(error)
    return f"{type(error).__name__}{f' at {place}' if place else ''}: {message_of(error)}"


def raised_at(error: BaseException, *, installed: bool = False) -> str:
    """Returns `file:line` of the user's code that raised `error`: of the innermost frame outside this package, the
    standard library and installed packages; empty without any. A file below the working folder is relative to it.

    installed: else the place in an installed package.
    """
    if isinstance(error, SyntaxError) and error.filename:  # of a module that was imported
        return f"{relative(error.filename)}:{error.lineno}"
    own = package = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if frame.f_globals.get("__name__", "").startswith("rl_platform."):
            continue
        if _PACKAGES.search(path):
            package = f"{path}:{line}"
        elif not path.startswith(_PYTHON):
            own = f"{relative(path)}:{line}"
    return own or (package if installed else "")


def is_of_user(path: str) -> bool:
    """Returns whether a file of a traceback is neither of the standard library nor of an installed package."""
    return _PACKAGES.search(path) is None and not path.startswith(_PYTHON)


def relative(path: str) -> str:
    """Returns the path, relative to the working folder if it is below it."""
    return path.removeprefix(os.path.join(os.getcwd(), ""))


def import_user_module(name: str) -> ModuleType:
    """Imports an installed module, one of the working folder, or a file. Raises the errors of the import."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # sys.path of a console script starts with the script's own folder
    return _import_file(Path(name).expanduser()) if name.endswith(".py") else importlib.import_module(name)


def is_imported(name: str) -> bool:
    """Returns whether a module, or a file of `import_user_module`, has been imported in this process."""
    return str(Path(name).expanduser().absolute()) in _files if name.endswith(".py") else name in sys.modules


def files_behind(pickled: bytes) -> list[str]:
    """Returns the files of `import_user_module` whose modules the pickle names: a child imports them before it
    unpickles."""
    return [file for file in _files if _module_name(Path(file)).encode() in pickled]


def _module_name(path: Path) -> str:
    """Returns a name without dots: pickle would look for packages."""
    return re.sub(r"\W", "_", str(path.absolute()))


def _import_file(path: Path) -> ModuleType:
    """Returns the module of a file, imported once. Modules beside it can be imported by their names."""
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ModuleNotFoundError(f"there is no file {path.absolute()}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent.absolute()) not in sys.path:
        sys.path.append(str(path.parent.absolute()))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _files.append(str(path.absolute()))
    return module


def _defined(module: ModuleType, name: str) -> str:
    """Returns the hint for a module without this name: a similar one, or those of the functions and classes in it."""
    names = [each for each, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return did_you_mean(name, names) or (f"it defines {', '.join(names[:10])}" if names else "it defines nothing")


def _deferred(function: Callable[..., object]) -> str:
    """Returns what kind of function returns before its code has run; an empty text for other functions."""
    for code in (function, getattr(function, "__call__", None)):  # noqa: B004  the method of an instance
        if inspect.iscoroutinefunction(code):
            return "an async function"
        if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
            return "a generator function, because it contains yield"
    return ""


def _is_missing(method: object) -> bool:
    return not callable(method) or getattr(method, "__isabstractmethod__", False)


def _methods(protocol: type) -> dict[str, Callable[..., object]]:
    """Returns the public methods of a protocol and its bases."""
    names = {name: None for base in reversed(protocol.__mro__) if base is not object for name in vars(base)}
    methods = {name: inspect.getattr_static(protocol, name) for name in names if not name.startswith("_")}
    methods = {name: each.__func__ if isinstance(each, classmethod) else each for name, each in methods.items()}
    return {name: each for name, each in methods.items() if inspect.isfunction(each)}
