"""Seeds of named random streams.

Not covered: saving generators. Their owner stores `get_state()` in its own part of the checkpoint.
"""

from __future__ import annotations

import hashlib
import json

import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """Returns a seed in [0, 2**63) for the stream called `names`, equal on all machines and Python versions.

    Different names give unrelated streams; ("a", "bc") and ("ab", "c") are different names.
    """
    digest = hashlib.blake2b(json.dumps([seed, *names]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """Returns a new CPU generator for the stream called `names`."""
    return torch.Generator().manual_seed(derive_seed(seed, *names))
