"""Prints the signatures of installed functions and classes. No test by itself.

`python signatures.py NAME ...` prints {name: [[parameter, kind, default], ...]}, null where a name does not exist. A
default is written as Python, "..." if it is no plain value, null if there is none. The script needs only the standard
library, so any interpreter runs it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from typing import Any

PLAIN = (type(None), bool, int, float, str)


def found(name: str) -> Any:
    """Returns the object of a dotted name, whose leading parts are modules; None if there is none."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            result: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            result = getattr(result, part, None)
        return result
    return None


def signature(name: str) -> list[list[Any]] | None:
    what = found(name)
    if what is None:
        return None
    rows: list[list[Any]] = []
    for one in inspect.signature(what).parameters.values():
        default = repr(one.default) if isinstance(one.default, PLAIN) else "..."
        rows.append([one.name, one.kind.name, None if one.default is one.empty else default])
    return rows if not rows or rows[0][0] != "self" else rows[1:]


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps({name: signature(name) for name in sys.argv[1:]}) + "\n")
