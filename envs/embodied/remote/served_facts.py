"""The description of an environment that a server sends, as fields of a message."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import SupportsInt

from rl_platform.envs.embodied.remote.wire import Fields, WireError
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces, ObservationPart

FASTEST = 10_000  # steps per second
LARGEST = 1 << 28  # numbers of an observation or an action
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


@dataclass(frozen=True)
class ServedFacts:
    """id: the server's `--env`. limited: the environment has a time limit of its own. tasks: names of `--tasks`.
    render_rate: steps per second of the simulated time; 0: the server draws no pictures."""

    id: str
    spaces: EnvSpaces
    limited: bool
    tasks: tuple[str, ...] = ()
    render_rate: int = 0

    def fields(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def of(cls, fields: Fields) -> ServedFacts:
        """Raises WireError for fields that describe no environment."""
        try:
            tasks = tuple(str(name)[:1000] for name in fields["tasks"])
            limited, rate = fields["limited"] is True, min(max(int(fields["render_rate"]), 0), FASTEST)
            facts = cls(str(fields["id"])[:1000], _spaces(fields["spaces"]), limited, tasks, rate)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise WireError(f"an environment whose description cannot be read ({error!r})") from error
        spaces = facts.spaces
        action, parts = spaces.action, spaces.parts
        continuous = action.kind == "continuous"
        bounds = action.size if continuous else 0
        if (
            action.kind not in ("continuous", "discrete", "multi_discrete")
            or min((*spaces.observation_shape, *spaces.action_shape, *action.counts), default=1) < 1
            or not 0 < spaces.observation_size <= LARGEST
            or not 0 < action.size <= LARGEST
            or sum(action.counts) != (0 if continuous else action.size)
            or math.prod(spaces.action_shape) != action.components
            or len(spaces.action_low) != bounds
            or len(spaces.action_high) != bounds
            or not all(low <= high for low, high in zip(spaces.action_low, spaces.action_high, strict=True))
            or spaces.observation_dtype not in ("float32", "uint8")
            or spaces.action_dtype not in _INTEGERS
            or (parts and sum(part.size for part in parts) != spaces.observation_size)
            or any(part.size < 0 for part in parts)
        ):
            raise WireError("an environment whose spaces no policy can use")
        return facts


def _spaces(given: Fields) -> EnvSpaces:
    action, start = given["action"], given["action_start"]
    return EnvSpaces(
        observation_shape=_integers(given["observation_shape"]),
        action=ActionSpace(action["kind"], int(action["size"]), _integers(action["choices"])),
        action_shape=_integers(given["action_shape"]),
        action_low=tuple(map(float, given["action_low"])),
        action_high=tuple(map(float, given["action_high"])),
        action_start=_integers(start) if isinstance(start, list | tuple) else int(start),
        observation_dtype=given["observation_dtype"],
        action_dtype=str(given["action_dtype"])[:20],
        parts=tuple(map(_part, given["parts"])),
    )


def _part(given: Fields) -> ObservationPart:
    flags = bool(given["numbers"]), bool(given["image"])
    return ObservationPart(str(given["name"]), _integers(given["shape"]), int(given["size"]), *flags)


def _integers(values: Iterable[SupportsInt]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
