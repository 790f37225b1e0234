"""Fingerprints: lines `key: value`, one for each fact of the models of a checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path

FILES_OF = "files of "  # `files of KEY` is the hash of the model folder that KEY names
HASHED = ("config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "*.safetensors", "*.bin")
SAMPLES, SAMPLE_BYTES = 64, 2**14  # of a file, see `files_hash`


def files_hash(folder: Path) -> str:
    """Returns a hash of config, tokenizer and weights in a model folder.

    Of a large file it takes the size and 1 MiB, evenly spaced: a model that was trained further differs nearly
    everywhere.
    """
    digest = hashlib.sha256()
    for file in sorted({file for pattern in HASHED for file in folder.glob(pattern)}):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for position in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
                opened.seek(position)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def fingerprint_difference(theirs: str, ours: str) -> tuple[str, str] | None:
    """Returns the facts of each fingerprint that the other lacks, as text; None if they agree.

    A model folder may lie at another path: if both fingerprints have its hash, the path does not count. If one lacks
    it, the path alone counts.
    """
    facts, others = (dict(line.partition(": ")[::2] for line in text.splitlines()) for text in (theirs, ours))
    for key in {*facts, *others}:
        if key.startswith(FILES_OF):
            uncounted = key.removeprefix(FILES_OF) if key in facts and key in others else key
            facts.pop(uncounted, None)
            others.pop(uncounted, None)
    return None if facts == others else (_only_in(facts, others), _only_in(others, facts))


def _only_in(facts: dict[str, str], others: dict[str, str]) -> str:
    only = [f"{key}: {value}" if value else key for key, value in facts.items() if others.get(key) != value]
    return "; ".join(only) or "nothing more"
