"""Memory that a rank has used at most. Processes that a component starts itself, as engines, are not counted."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence


def memory_peak(accelerators: Sequence[int]) -> int:
    """Returns the bytes that torch has allocated at most on the fullest of these GPUs. Without GPUs: the largest
    resident set of this process, which all its ranks share."""
    torch = sys.modules.get("torch")
    if accelerators and torch is not None and torch.cuda.is_initialized():
        return max(int(torch.cuda.max_memory_allocated(device)) for device in accelerators)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
