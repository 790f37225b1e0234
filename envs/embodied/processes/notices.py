"""A run shows each notice of Farama's packages (Gymnasium, Gymnasium-Robotics) once.

The packages print them when they are imported, and each worker process imports the packages.
"""

from __future__ import annotations

import os
import sys

_HIDDEN = "RL_PLATFORM_HIDDEN_NOTICES"  # names of packages, or _ALL: of a worker process
_ALL = "*"
_started = False  # whether this process has started a worker


def variables_of_worker() -> dict[str, str]:
    """Returns the environment variables of the next worker process: only the first one prints notices, of packages
    that this process has not imported."""
    global _started
    if _started:
        return {_HIDDEN: _ALL}
    _started = True
    known = getattr(sys.modules.get("farama_notifications"), "notifications", ())
    return {_HIDDEN: " ".join(name for name in known if name in sys.modules)}


def hide_shown() -> None:
    """Hides notices in a worker process, before it imports the packages."""
    names = os.environ.get(_HIDDEN, "").split()
    if not names:
        return
    try:
        from farama_notifications import notifications
    except ImportError:
        return
    for name in list(notifications) if names == [_ALL] else names:
        notifications.pop(name, None)
