"""Checks of what an environment returns, where NumPy would convert it silently or with an unclear error.

Not covered: the shape of an observation (`block.py`), and numbers that are not finite, which end an episode.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from rl_platform.errors import message_of

_LONGEST = 100  # characters of a value in a message


class WrongResult(ValueError):
    """`reset`, `step` or `render` returned something of a wrong type or beyond its space; the message has the value."""


def reward_of(value: Any) -> float:
    """Returns the reward. Raises WrongResult unless it is one number."""
    if np.shape(value) == () and hasattr(value, "__float__"):
        return float(value)
    raise WrongResult(f"step() returned {_described(value)} as the reward; it must be one number")


def flag_of(name: str, value: Any) -> bool:
    """Returns `terminated` or `truncated`. Raises WrongResult unless it is true or false."""
    if np.shape(value) == () and hasattr(value, "__float__") and float(value) in (0.0, 1.0):
        return bool(value)
    order = "step() returns (observation, reward, terminated, truncated, info)"
    raise WrongResult(f"step() returned {_described(value)} as {name}; it must be True or False. {order}")


def check_exact(value: object, dtype: np.dtype, what: str) -> None:
    """Raises WrongResult if numbers would change in an array of this type of whole numbers."""
    array = np.asarray(value)
    if array.dtype == dtype or dtype.kind == "f":
        return
    with np.errstate(invalid="ignore"):
        same = array.dtype.kind in "iufb" and np.array_equal(array, array.astype(dtype))
    if not same:
        message = f"{what} has type {array.dtype}"
        if array.dtype.kind in "iufb" and array.size:
            message += f" and values from {array.min():g} to {array.max():g}"
        raise WrongResult(f"{message}, which are no numbers of type {dtype} as in its space")


def check_choices(value: object, low: np.ndarray, high: np.ndarray, what: str) -> None:
    """Raises ValueError unless `value` has whole numbers from low to high, as many as they have.

    It is no WrongResult: code may be wrong in rare states only, and another episode may begin.
    """
    array = np.asarray(value)
    if array.size == low.size and array.dtype.kind in "iub":
        row = array.reshape(low.shape)
        if (low <= row).all() and (row <= high).all():
            return
    allowed = f"whole numbers from {low.tolist()} to {high.tolist()}"
    raise ValueError(f"{what} is {_described(value)}; its space has {allowed}")


def picture_of(given: object) -> np.ndarray:
    """Returns a picture. Raises WrongResult unless it is [height,width,3] of uint8."""
    picture = np.asarray(given)
    if picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3:
        return picture
    what = f"an array of type {picture.dtype} and shape {picture.shape}" if picture.ndim else _described(given)
    raise WrongResult(f"render() returned {what}; for rgb_array it is uint8 of shape [height, width, 3]")


def interface_hint(error: BaseException) -> str:
    """Returns a line on the interface of Gymnasium if `error` shows that an environment has another one, else ""."""
    text = message_of(error)
    if isinstance(error, ValueError | TypeError) and re.search("values to unpack|cannot unpack", text):
        return (
            "\nIn Gymnasium reset() returns (observation, info), and step() returns (observation, reward, terminated, "
            "truncated, info)"
        )
    if isinstance(error, TypeError) and re.search(
        r"reset\(\) got an unexpected keyword argument '(seed|options)'", text
    ):
        return "\nIn Gymnasium it is reset(self, *, seed=None, options=None)"
    return ""


def _described(value: object) -> str:
    text = repr(value)
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    shape = np.shape(value) if hasattr(value, "__array__") else ()
    return f"{text} (type {type(value).__name__}{f', shape {shape}' if shape else ''})"
