"""The notebooks of examples/ in a kernel of Jupyter, with fewer steps, and the stop button of a notebook."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="the packages nbclient and ipykernel are not installed")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
SMALL = 'steps = 2\nfolder = "out"'


def executed(cells: list[Any], folder: Path, **options: Any) -> list[Any]:
    """Runs the cells in a kernel of their own, in the folder; returns the cells of code with their outputs."""
    (folder / "configs").symlink_to(ROOT / "configs")
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources, **options).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[str]:
    return [output.output_type for output in cell.outputs]


@pytest.mark.parametrize("name", ["embodied", "reasoning"])
def test_cells_run_in_order(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # of tqdm, where ipywidgets is not installed
    cells = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4).cells
    assert not any(cell.get("outputs") for cell in cells)  # results of one machine do not belong into the file
    (parameters,) = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert [line.split(" = ")[0] for line in parameters.source.splitlines()] == ["steps", "folder"]
    parameters.source = SMALL
    shown = executed(cells, folder)
    for cell in shown:
        if "show=False" in cell.source:
            assert kinds(cell) == ["execute_result"], [
                output.get("text") for output in cell.outputs
            ]  # the value of the cell, and nothing that the call printed
        if "plot" in cell.metadata.get("tags", []):
            assert "image/png" in cell.outputs[-1].data
    assert (folder / "out" / "model").is_dir()


INTERRUPTED = [
    """
    import logging, os, signal, sys, torch
    import rl_platform as rl

    def settings():
        streams = [str(stream) for stream in (sys.stdout, sys.stderr, sys.excepthook, logging.root.handlers)]
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        return streams, handlers, torch.get_num_threads(), torch.initial_seed(), os.getcwd(), list(sys.path)

    def stop_button(step, metrics):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    config, before = "configs/embodied/cartpole.yaml", settings()
    small = {"runner.max_steps": 4, "env.evaluation.episodes": 1, "runner.output_dir": "out"}
    """,
    "rl.train(config, small, callbacks=[stop_button], show=False)",
    "assert settings() == before",
    "rl.train(config, small)",
    "assert settings() == before",
]


def test_the_stop_button_saves_and_the_cell_continues_when_run_again(folder: Path) -> None:
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(text)) for text in INTERRUPTED]
    interrupted, unchanged, continued, as_before = executed(cells, folder, allow_errors=True)[1:]
    assert [output.ename for output in interrupted.outputs] == ["Interrupted"]
    assert (unchanged.outputs, as_before.outputs) == ([], [])
    text = "".join(output.text for output in continued.outputs if output.output_type == "stream")
    assert "resumed from step 2" in text
    assert "step 4/4" in text
