"""The score of a response, and its encoding as a line of JSON between a scoring process and the pool.

A scoring process runs untrusted code, so `decode` accepts only scores of the declared types and range, and raises
ValueError for other lines. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from typing import TypeGuard

RAISED, TIMEOUT, DIED, REFUSED = "raised", "timeout", "died", "refused"
PASSED, WRONG, NO_PROGRAM = "passed", "wrong", "no_program"
# of programs: the cause that ended the tests
OUTCOMES = (PASSED, WRONG, "crashed", TIMEOUT, "memory", "output", NO_PROGRAM)
# float32 represents numbers up to this with an error of at most 0.03, and can sum the squares of 10^6 of them.
LARGEST_REWARD = 1e6
LONGEST_MESSAGE = 16 * 2**20  # bytes
_LONGEST_DETAIL = 4_000
_SHOWN = 100  # characters of a refused value in messages


@dataclass(frozen=True)
class Score:
    """A score. If not `valid`, `value` is ignored, `reason` is RAISED, TIMEOUT, DIED or REFUSED, `detail` explains it.
    A program has one of OUTCOMES as `reason`, and `detail` says which test it failed.

    `steps`: (end of a step in characters from the start of the response, its reward). `text`: a tool's answer. `parts`:
    (name, score) of each of several functions that gave one.
    """

    value: float
    valid: bool = True
    reason: str = ""
    detail: str = ""
    steps: tuple[tuple[int, float], ...] = ()
    text: str | None = None
    parts: tuple[tuple[str, float], ...] = ()


def unscored(reason: str, detail: str) -> Score:
    """Returns an invalid score."""
    return Score(0.0, valid=False, reason=reason, detail=detail[-_LONGEST_DETAIL:])


def parts_of(verdict: object) -> tuple[object, list[tuple[object, object]]]:
    """Returns the reward and the (end, reward) of each step that a function of the user returned. A NumPy or torch
    scalar becomes a number. Raises ValueError for a tuple of another form."""
    value, steps = verdict if isinstance(verdict, tuple) and len(verdict) == 2 else (verdict, ())
    pairs = [step if isinstance(step, tuple | list) else () for step in steps] if _is_series(steps) else [()]
    if isinstance(verdict, tuple) and (len(verdict) != 2 or any(len(pair) != 2 for pair in pairs)):
        raise ValueError(
            f"a tuple must be (reward, [(end of a step, its reward), ...]), not {_shown(verdict)}: without rewards of "
            "steps return the number alone"
        )
    return _number(value), [(_number(end), _number(reward)) for end, reward in pairs]


def _is_series(steps: object) -> TypeGuard[Iterable[object]]:
    return isinstance(steps, Iterable) and not isinstance(steps, str | bytes | dict)


def _number(value: object) -> object:
    """Returns an array without dimensions, of NumPy or torch, as a number; other values as they are."""
    item = getattr(value, "item", None)
    return item() if getattr(value, "shape", None) == () and callable(item) else value


def checked_reward(value: object) -> float:
    """Returns `value` as a float. Raises ValueError unless it is a real number in [-LARGEST_REWARD, LARGEST_REWARD]."""
    # both comparisons are False for NaN
    if isinstance(value, Real) and -LARGEST_REWARD <= value <= LARGEST_REWARD:  # type: ignore[operator]
        return float(value)
    finite = isinstance(value, Real) and (isinstance(value, Integral) or math.isfinite(value))
    allowed = f"at most {LARGEST_REWARD:.0e} in size" if finite else "a finite number"
    raise ValueError(f"a reward must be {allowed}, not {_shown(value)}")


def checked_steps(steps: Iterable[tuple[object, object]], response: str) -> tuple[tuple[int, float], ...]:
    """Returns `steps` of a score for this response.

    Raises ValueError for an end outside the response, and if a reward or the sum of absolute rewards is out of range.
    """
    pairs = tuple((_checked_end(end, response), checked_reward(reward)) for end, reward in steps)
    if sum(abs(reward) for _, reward in pairs) > LARGEST_REWARD:
        raise ValueError(f"the rewards of {len(pairs)} steps add up to more than {LARGEST_REWARD:.0e}")
    return pairs


def encode(score: Score) -> bytes:
    """Returns the score as a line of JSON."""
    return json.dumps(asdict(score)).encode() + b"\n"


def decode(line: bytes, response: str) -> Score:
    """Returns the score of `response` from a line of `encode`. Raises ValueError for other lines."""
    match _json(line):
        case {"value": 0.0, "valid": False, "reason": "raised", "detail": str(detail), "steps": [], "text": None}:
            return unscored(RAISED, _readable(detail))
        case {
            "value": value,
            "valid": True,
            "reason": str(reason),
            "detail": str(detail),
            "steps": list(steps),
            "text": text,
        } if reason in ("", *OUTCOMES):
            if text is not None and type(text) is not str:
                raise ValueError(f"the text of a tool is not {_shown(text)}")
            (text or "").encode()  # raises for a lone surrogate, which tokenizers cannot encode
            numbers = [json_number(value)] + [json_number(part) for step in steps for part in _pair(step)]
            pairs = zip(numbers[1::2], numbers[2::2], strict=True)
            score = Score(checked_reward(value), steps=checked_steps(pairs, response), text=text)
            return replace(score, reason=reason, detail=_readable(detail)) if reason else score
    raise ValueError(f"not a score: {_shown(line)}")


def _json(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {_shown(line)}") from error


def _readable(detail: str) -> str:
    return detail.encode(errors="backslashreplace").decode()[-_LONGEST_DETAIL:]


def _pair(step: object) -> list[object]:
    if type(step) is not list or len(step) != 2:
        raise ValueError(f"a step is an end and a reward, not {_shown(step)}")
    return step


def json_number(value: object) -> int | float:
    """Returns `value`. Raises ValueError unless it is a JSON number; `true` is none."""
    if type(value) is int or type(value) is float:
        return value
    raise ValueError(f"a reward must be a finite number, not {_shown(value)}")


def _checked_end(end: object, response: str) -> int:
    if not isinstance(end, Integral) or not 0 < int(end) <= len(response):
        raise ValueError(f"a step of a response of {len(response)} characters cannot end at {_shown(end)}")
    return int(end)


def _shown(value: object) -> str:
    try:
        return f"{value!r:.{_SHOWN}}"
    except ValueError:  # an integer with more digits than Python prints
        assert isinstance(value, int)
        return f"a number of {value.bit_length()} bits"
