"""Seeds and random states: every stream of random numbers has a name, and every global one can be saved and put back.

Not covered: generators that a component owns (their `get_state()` belongs into that component's checkpoint part).
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch

from rl_platform.errors import CheckpointError


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed in [0, 2**63) for the stream called `names`, the same on every machine, process and Python version.

    Different names give unrelated streams; ("a", "bc") and ("ab", "c") are different names.
    """
    digest = hashlib.blake2b(json.dumps([seed, *names]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator of its own for the stream called `names`."""
    return torch.Generator().manual_seed(derive_seed(seed, *names))


def seed_all(seed: int, *names: str | int) -> None:
    """Seed the global generators of Python, NumPy and torch (all devices) for the stream called `names`."""
    derived = derive_seed(seed, *names)
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived)


def capture() -> dict[str, Any]:
    """The global states of Python, NumPy and torch as plain values and tensors, fit for a checkpoint."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` returned. CheckpointError if a key is missing or the number of CUDA devices differs."""
    missing = {"python", "numpy", "torch", "cuda"} - state.keys()
    if missing:
        raise CheckpointError(f"random state: {', '.join(sorted(missing))} missing from the checkpoint")
    devices = torch.cuda.device_count()
    if state["cuda"] and len(state["cuda"]) != devices:
        raise CheckpointError(f"random state: saved for {len(state['cuda'])} CUDA devices, this process sees {devices}")
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
