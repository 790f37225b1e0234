"""The tests of `tests/gpu` that need no kernel of a GPU, on the pretended device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from device_rehearsal.pretended_device import CUDA, Device, in_threads
from device_rehearsal.runs import sharing_short_prefixes

from rl_platform.components.reward_models.classifier import SequenceClassifier
from rl_platform.launch.tools import device_measurements

GPU = Path(__file__).parents[1] / "gpu"
Script = Callable[[Path], ModuleType]


def test_offloaded_memory(script: Script, device: Device) -> None:
    script(GPU / "test_offload.py").test_the_memory_is_free_and_the_content_comes_back()


def test_offloaded_learner(script: Script, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers alone stay on the device, which has no workspaces of libraries."""
    tests = script(GPU / "test_offload.py")
    small = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
    monkeypatch.setattr(tests, "WIDE", tests.WIDE.model_copy(update=small))
    monkeypatch.setattr(tests, "WORKSPACE", 1024)  # rotary frequencies, a learning rate
    with sharing_short_prefixes():
        tests.test_a_trained_model_leaves_nothing_behind_and_learns_the_same()


def test_calibration_of_the_link(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/gpu/test_calibrate.py, whose bounds are those of a real link. The copies are from pinned memory."""
    monkeypatch.setattr(device_measurements, "STREAM_BYTES", 2**12)
    assert device_measurements.host_link_rate(CUDA) > 0
    assert device.pinned() == 2**12
    assert device.counts.copies.total() > 1


def test_reward_model(script: Script, device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It scores in a thread of its own."""
    monkeypatch.setattr(SequenceClassifier, "scores", in_threads(SequenceClassifier.scores))
    script(GPU / "test_reward_model.py").test_it_scores_on_its_gpu_what_it_scores_on_the_cpu(tmp_path)
