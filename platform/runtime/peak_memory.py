"""The peak memory of a rank. Processes that a component starts itself, such as engines, are not counted."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path


def memory_peak(accelerators: Sequence[int]) -> int:
    """Returns the peak of the bytes that torch has allocated on one of these GPUs, the largest of all.

    Without GPUs it is the largest resident set of this process, which all its ranks share.
    """
    torch = sys.modules.get("torch")
    if accelerators and torch is not None and torch.cuda.is_initialized():
        return max(int(torch.cuda.max_memory_allocated(device)) for device in accelerators)
    if (peak := _largest_resident_set()) is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _largest_resident_set() -> int | None:
    """Returns the bytes that Linux reports for this program; None on other systems.

    getrusage also counts the process that started this program.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    kibibytes = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return None if kibibytes is None else int(kibibytes[1]) * 1024
