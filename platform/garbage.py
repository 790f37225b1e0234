"""Rare garbage collection while a process starts; objects of the start are never searched again.

Importing torch and transformers creates about 350,000 objects, hardly any of them garbage. With the usual thresholds
Python searches them for cycles 900 times during the import, and once more at the end of the process. That is two of the
five seconds that both take.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
_RARELY = 50_000  # more objects than before
_rare = _frozen = False


def collect_rarely() -> None:
    """Collects rarely until `collect_as_usual`. Temporary objects of a start, such as weights in a cycle, are still
    freed."""
    global _rare
    _rare = True
    gc.set_threshold(_RARELY, *_USUAL[1:])


def collect_as_usual() -> None:
    """Ends the start: collects its garbage and excludes the remaining objects from later searches. Idempotent.

    Does nothing without `collect_rarely`: in a program of the user, the settings are the program's.
    """
    global _rare, _frozen
    if not _rare:
        return
    _rare = False
    if not _frozen:
        gc.collect(1)
        gc.freeze()
        _frozen = True
    gc.set_threshold(*_USUAL)
