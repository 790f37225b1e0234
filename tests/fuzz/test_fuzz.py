"""Seeded absurd input of every kind ends with exit code 0, 2 or 65, within seconds and without a traceback.

975 cases run each time, and 50,000 others with `pytest -m release`. A failure names the command that
replays its case, see `cases.py`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fuzz.cases import Ended, Kind, make, run

CASES = {"configs": 250, "placements": 75, "questions": 500, "models": 100, "checkpoints": 50}
RELEASE = {"configs": 12_000, "placements": 12_000, "questions": 18_000, "models": 4_000, "checkpoints": 4_000}


@pytest.fixture(scope="module", params=CASES)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Kind]]:
    before, threads = os.getcwd(), torch.get_num_threads()
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp(request.param)
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        made = make(request.param, folder)
        yield request.param, made
    if close := getattr(made, "close", None):
        close()
    os.chdir(before)
    torch.set_num_threads(threads)


def test_absurd_input_ends_with_the_right_code(kind: tuple[str, Kind]) -> None:
    _run(kind, range(CASES[kind[0]]))


@pytest.mark.release
def test_much_absurd_input_ends_with_the_right_code(kind: tuple[str, Kind]) -> None:
    _run(kind, range(CASES[kind[0]], CASES[kind[0]] + RELEASE[kind[0]]))


def _run(kind: tuple[str, Kind], seeds: range) -> None:
    name, made = kind
    codes, faults = set[int](), list[Ended]()  # the other cases are forgotten: their inputs would fill the memory
    for count, seed in enumerate(seeds):
        ended = run(name, made, seed)
        if count % 100 == 0:
            gc.collect()  # tests/conftest.py makes it rare, and the garbage of 100 absurd inputs takes 60 MiB
        codes.add(ended.code)
        if ended.fault:
            faults.append(ended)
    assert 0 in codes, "no case was valid: the kind tests nothing"
    assert not faults, f"{len(faults)} of {len(seeds)} cases failed\n" + "\n".join(map(str, faults[:5]))
