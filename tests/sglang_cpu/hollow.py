"""Modules without content: any name can be imported from them, used as a decorator, called or inherited from."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Base:
    """What a class of a hollow module is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()


class Hollow(ModuleType):
    """Its attributes come into being when they are asked for: classes if they are capitalised, else hollow modules."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = __file__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        made = type(name, (Base,), {}) if name[0].isupper() else sys.modules.get(path) or Hollow(path)
        setattr(self, name, made)
        return made

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """As decorator, with and without arguments."""
        if len(arguments) == 1 and not options and callable(arguments[0]):
            return arguments[0]
        return lambda decorated: decorated

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (Base,)

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __contains__(self, _: object) -> bool:
        return False


class Finder(MetaPathFinder, Loader):
    """Finds every submodule of `root`."""

    def __init__(self, root: str) -> None:
        self.prefix = f"{root}."

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(self.prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Hollow(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        parent, _, name = module.__name__.rpartition(".")
        setattr(sys.modules[parent], name, module)


def hollow_out(name: str, **attributes: Any) -> None:
    """Called by the package `name` while it is imported: it is hollow but for `attributes`."""
    sys.meta_path.insert(0, Finder(name))
    module = sys.modules[name]
    module.__class__ = Hollow
    module.__path__ = []
    for attribute, value in attributes.items():
        setattr(module, attribute, value)
