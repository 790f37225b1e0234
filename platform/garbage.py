"""Garbage collection while a process starts: rarely. What a start has made is not looked through again.

torch and transformers make some 350,000 objects when they are imported, hardly any of them garbage. With the usual
thresholds Python looks for cycles among them 900 times meanwhile, and among all of them once more at the end of the
process: two of the five seconds that both take.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
_RARELY = 50_000  # more objects than before


def collect_rarely() -> None:
    """From here to `collect_as_usual`: what a start needs for a moment, weights in a cycle say, still goes soon."""
    gc.set_threshold(_RARELY, *_USUAL[1:])


def collect_as_usual() -> None:
    """The end of the start: its garbage goes, what is left of it is no longer searched for cycles. Again: no change."""
    if not gc.get_freeze_count():
        gc.collect(1)
        gc.freeze()
    gc.set_threshold(*_USUAL)
