"""The notebooks of examples/, cell by cell in this process, with fewer steps."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
SMALL = {"steps": 2, "folder": "out"}


@pytest.mark.parametrize("name", ["embodied", "reasoning"])
def test_cells_run_in_order(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    (folder / "configs").symlink_to(NOTEBOOKS.parents[1] / "configs")
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        assert cell["outputs"] == []  # results of one machine do not belong into the file
        tags = cell["metadata"].get("tags", [])
        if "plot" in tags and importlib.util.find_spec("matplotlib") is None:
            continue
        exec(compile("".join(cell["source"]), f"{name}.ipynb", "exec"), names)
        if "parameters" in tags:
            assert set(SMALL) <= set(names)
            names |= SMALL
    assert names["run"].metrics["step"][-1] == 2
    assert (folder / "out" / "model").is_dir()
