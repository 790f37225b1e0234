"""What rules between keys report, wherever they are written, and how a function of the user is named."""

from __future__ import annotations

import re
from typing import NamedTuple

FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # module:function


class BrokenRule(NamedTuple):
    """A key, why it cannot stand, the other keys that take part in the rule, and what to do."""

    key: str
    message: str
    involved: tuple[str, ...] = ()
    hint: str = ""
