"""The console in a notebook: text on standard output, or nothing."""

from __future__ import annotations

import builtins
import sys
from types import ModuleType

import pytest
from rich.console import Console

from rl_platform.launch.views.console import run_console
from rl_platform.launch.views.plain import PlainView, terminal_view


class ZMQInteractiveShell:
    """rich recognises a notebook by this name."""


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a notebook shows beside standard output."""
    shown: list[object] = []
    display = ModuleType("IPython.display")
    display.display = shown.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    return shown


def test_a_notebook_gets_text_or_nothing(
    displayed: list[object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert Console().is_jupyter
    view = terminal_view()
    assert isinstance(view, PlainView)
    view.console.print("seen")
    with view.console.status("checking"):
        pass
    run_console(show=False).print("unseen")
    assert (displayed, capsys.readouterr().out.strip()) == ([], "seen")
