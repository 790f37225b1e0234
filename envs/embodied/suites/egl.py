"""Selects the device on which robosuite draws with EGL; LIBERO draws with robosuite."""

from __future__ import annotations

import os


def select_egl_device() -> None:
    """Selects the first device if CUDA_VISIBLE_DEVICES is empty or names GPUs by other things than numbers.

    robosuite converts each entry of that variable to an integer unless MUJOCO_EGL_DEVICE_ID is set. Called after the
    import of robosuite, which refuses a number that is not in CUDA_VISIBLE_DEVICES.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    if not all(name.isdigit() for name in visible.split(",")):
        os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", "0")
