"""Comparisons of the reports that runs of training engines make (unit/engines/ranks.py). No test by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        one, other = actual[name].detach(), tensor.detach()
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_moved(report: dict[str, Any]) -> None:
    moved = [float((report["outputs"][name] - tensor).abs().max()) for name, tensor in report["start"].items()]
    assert min(moved) > 1e-2, "three steps that change nothing would prove nothing"


def learned(report: dict[str, Any]) -> list[dict[str, float]]:
    """The metrics of all steps that one rank has too."""
    return [
        {name: value for name, value in metrics.items() if not name.startswith("balance/")}
        for metrics in [*report["metrics"], *report.get("odd", [])]
    ]


def assert_gathered_in_bfloat16(report: dict[str, Any]) -> None:
    """Parameters that ranks send in bfloat16 are the rounded whole ones; buffers stay float32."""
    assert report["gathered"].keys() == report["parameters"].keys()
    for name, tensor in report["gathered"].items():
        assert tensor.dtype == (torch.float32 if "correction" in name else torch.bfloat16), name
        assert torch.equal(tensor, report["parameters"][name].to(tensor.dtype)), name
