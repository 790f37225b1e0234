"""The score of one response, and how it travels from a scoring process: one line of JSON, checked by its receiver.

A scoring process runs code that its receiver does not control, so nothing that it sends is trusted: `decode` accepts
a score of the declared types and range, and raises ValueError for all else. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

RAISED, TIMEOUT, DIED, REFUSED = "raised", "timeout", "died", "refused"
# float32 holds numbers up to here with an error of at most 0.03, and the squares of 10^6 of them can be summed.
LARGEST_REWARD = 1e6
LONGEST_MESSAGE = 16 * 2**20  # bytes
_LONGEST_DETAIL = 4_000
_SHOWN = 100  # characters of a refused value in messages


@dataclass(frozen=True)
class Score:
    """`value` counts only if `valid`; otherwise `reason` is RAISED, TIMEOUT, DIED or REFUSED, and `detail` tells more.

    `steps`: where a step of the response ends, in characters from its beginning, and the reward of that step.
    `text`: what a tool answers.
    """

    value: float
    valid: bool = True
    reason: str = ""
    detail: str = ""
    steps: tuple[tuple[int, float], ...] = ()
    text: str | None = None


def unscored(reason: str, detail: str) -> Score:
    """The score of a response that has none."""
    return Score(0.0, valid=False, reason=reason, detail=detail[-_LONGEST_DETAIL:])


def checked_reward(value: Any) -> float:
    """`value` as a float. Raises ValueError for anything but a real number of -LARGEST_REWARD to LARGEST_REWARD."""
    if isinstance(value, Real) and -LARGEST_REWARD <= value <= LARGEST_REWARD:  # both are False for NaN
        return float(value)
    finite = isinstance(value, Real) and (isinstance(value, Integral) or math.isfinite(value))
    allowed = f"at most {LARGEST_REWARD:.0e} in size" if finite else "a finite number"
    raise ValueError(f"a reward must be {allowed}, not {_shown(value)}")


def checked_steps(steps: Any, response: str) -> tuple[tuple[int, float], ...]:
    """`steps` of a score for this response. Raises ValueError for an end outside of the response, and for a reward or a
    sum of absolute rewards that is out of range."""
    pairs = tuple((_checked_end(end, response), checked_reward(reward)) for end, reward in steps)
    if sum(abs(reward) for _, reward in pairs) > LARGEST_REWARD:
        raise ValueError(f"the rewards of {len(pairs)} steps add up to more than {LARGEST_REWARD:.0e}")
    return pairs


def encode(score: Score) -> bytes:
    """One line of JSON."""
    return json.dumps(asdict(score)).encode() + b"\n"


def decode(line: bytes, response: str) -> Score:
    """The score of `response` in a line of `encode`. Raises ValueError for every other line."""
    match _json(line):
        case {"value": 0.0, "valid": False, "reason": "raised", "detail": str(detail), "steps": [], "text": None}:
            return unscored(RAISED, detail.encode(errors="backslashreplace").decode())
        case {"value": value, "valid": True, "reason": "", "detail": "", "steps": list(steps), "text": text}:
            if text is not None and type(text) is not str:
                raise ValueError(f"the text of a tool is not {_shown(text)}")
            (text or "").encode()  # raises for half of a surrogate pair, which no tokenizer reads
            numbers = [json_number(value)] + [json_number(part) for step in steps for part in _pair(step)]
            pairs = zip(numbers[1::2], numbers[2::2], strict=True)
            return Score(checked_reward(value), steps=checked_steps(pairs, response), text=text)
    raise ValueError(f"not a score: {_shown(line)}")


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {_shown(line)}") from error


def _pair(step: Any) -> list[Any]:
    if type(step) is not list or len(step) != 2:
        raise ValueError(f"a step is an end and a reward, not {_shown(step)}")
    return step


def json_number(value: Any) -> int | float:
    """`value`. Raises ValueError unless it is what JSON calls a number; `true` is none."""
    if type(value) not in (int, float):
        raise ValueError(f"a reward must be a finite number, not {_shown(value)}")
    return value


def _checked_end(end: Any, response: str) -> int:
    if not isinstance(end, Integral) or not 0 < end <= len(response):
        raise ValueError(f"a step of a response of {len(response)} characters cannot end at {_shown(end)}")
    return int(end)


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.{_SHOWN}}"
    except ValueError:  # a whole number of more digits than Python writes
        return f"a number of {value.bit_length()} bits"
