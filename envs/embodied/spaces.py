"""Observation and action spaces of environments, and the check that a policy can use them.

Not covered: finding and building environments (`descriptions.py`). Nothing here imports torch, so that worker processes
start quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rl_platform.errors import ConfigError, Problem

if TYPE_CHECKING:
    import gymnasium
    import numpy as np

    AnyEnv = gymnasium.Env[Any, Any]

Dtype = Literal["float32", "uint8"]


@dataclass(frozen=True)
class ActionSpace:
    """Actions of the policy: `size` numbers ("continuous"), one of `size` choices ("discrete"), or several independent
    choices ("multi_discrete"), of which `choices` has the numbers of possibilities and `size` their sum."""

    kind: Literal["continuous", "discrete", "multi_discrete"]
    size: int
    choices: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """The possibilities of each choice; of continuous actions none."""
        return self.choices or (() if self.kind == "continuous" else (self.size,))

    @property
    def components(self) -> int:
        """The number of log-probs of an action: of continuous actions one per number, else one per choice."""
        return len(self.counts) or self.size


@dataclass(frozen=True)
class ObservationPart:
    """A part of an observation of several: `name` (keys and positions, joined by dots), its `shape` before it is
    flattened to `size` numbers. numbers: they are normalised; False: one-hot or binary choices, or pixels. image: its
    pixels are divided by 255."""

    name: str
    shape: tuple[int, ...]
    size: int
    numbers: bool
    image: bool = False


@dataclass(frozen=True)
class EnvSpaces:
    """Observation and action spaces of one environment.

    observation_shape: of the environment. Observations are passed flattened to `observation_size` numbers, images as
    uint8 and others as float32. Images are [height,width,channels] or a stack [S,height,width,channels].
    action_shape: of one action of the environment; action_low, action_high: flattened bounds, empty if discrete.
    action_start: the environment's number of choice 0, of several choices one number each if they are not all 0.
    action_dtype: of several choices. parts: of a Dict or Tuple, in the order in which they are flattened.
    """

    observation_shape: tuple[int, ...]
    action: ActionSpace
    action_shape: tuple[int, ...]
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    action_start: int | tuple[int, ...] = 0
    observation_dtype: Dtype = "float32"
    action_dtype: str = "int64"
    parts: tuple[ObservationPart, ...] = ()

    @property
    def images(self) -> bool:
        return self.observation_dtype == "uint8"

    @property
    def image_parts(self) -> tuple[ObservationPart, ...]:
        """The images among several parts."""
        return tuple(part for part in self.parts if part.image)

    @property
    def pixel_scale(self) -> np.ndarray | None:
        """Factors [D] float32 that the parts of an observation get when they are joined: 1/255 for pixels, else 1. None
        without images among several parts."""
        import numpy as np

        parts = [np.full(part.size, 1 / 255 if part.image else 1, np.float32) for part in self.parts]
        return np.concatenate(parts) if self.image_parts else None

    def wrong_pixels(self, observations: np.ndarray) -> str:
        """Returns the range of the pixels of images among several parts, as "numbers between 0 and 0.5", if those of
        observations [N,D] are not whole numbers from 0 to 255; else an empty text."""
        if (scale := self.pixel_scale) is None:
            return ""
        pixels = observations[:, scale < 1]
        if not ((pixels % 1).any() or (pixels < 0).any() or (pixels > 255).any()):
            return ""
        return f"numbers between {pixels.min():g} and {pixels.max():g}"

    @property
    def normalized(self) -> tuple[bool, ...]:
        """Per number of an observation: whether it is normalised. Empty: all are."""
        each = tuple(part.numbers for part in self.parts for _ in range(part.size))
        return () if all(each) else each

    def environment_choices(self, chosen: np.ndarray) -> np.ndarray:
        """Choices [N] or [N,D] of the policy -> actions [N,...] of the environment, in its shape, type and numbers."""
        import numpy as np

        shifted: np.ndarray = (chosen + np.asarray(self.action_start)).astype(self.action_dtype)
        return shifted.reshape(-1, *self.action_shape)

    @property
    def policy_action_shape(self) -> tuple[int, ...]:
        """Of an action as the policy chooses it: numbers [A], one choice [], or several choices [D]."""
        return () if self.action.kind == "discrete" else (self.action.components,)

    @property
    def policy_action_dtype(self) -> type[np.float32 | np.int64]:
        """Of an action as the policy chooses it."""
        import numpy as np

        return np.float32 if self.action.kind == "continuous" else np.int64

    @property
    def observation_size(self) -> int:
        size = 1
        for length in self.observation_shape:
            size *= length
        return size


def read_spaces(env: AnyEnv, env_id: str, key: str = "env.id") -> EnvSpaces:
    """Returns the spaces of an environment. Raises ConfigError that lists all spaces no policy can use.

    key: of the config, for messages.
    """
    import numpy as np
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
    from gymnasium.spaces.utils import flatdim

    from rl_platform.envs.embodied.adapter import FlatObservations, is_image, leaves

    observation, action = env.observation_space, env.action_space
    problems = []
    if not isinstance(observation, Box):
        hint = "wrap it with gymnasium.wrappers.FlattenObservation and register the wrapped environment"
        problems.append(
            _unusable(
                key,
                f"observation space of {env_id}",
                observation,
                "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them",
                hint,
            )
        )
    choices = isinstance(action, Discrete | MultiDiscrete | MultiBinary)
    if not choices and not (isinstance(action, Box) and np.issubdtype(action.dtype, np.floating)):
        hint = "wrap it so that an action is a vector of choices or of floats"
        problems.append(
            _unusable(
                key, f"action space of {env_id}", action, "Discrete, MultiDiscrete, MultiBinary, Box of floats", hint
            )
        )
    for what, space in (("observation", observation), ("action", action)):
        if not problems and 0 in (space.shape or ()):
            problems.append(_unusable(key, f"{what} space of {env_id}", space, "at least one number", ""))
    several = list(leaves(env.env.observation_space)) if isinstance(env, FlatObservations) else []
    names = [name for name, _ in several]
    if twice := [name for name in names if names.count(name) > 1]:
        message = f"two parts of the observation space of {env_id} have one name: their keys, joined by dots"
        problems.append(Problem(key, message, value=twice[0], hint="rename the key with a dot in the Dict space"))
    if problems:
        raise ConfigError(problems)
    assert isinstance(observation, Box)
    shape = observation.shape
    dtype: Dtype = "uint8" if is_image(observation) else "float32"
    parts = tuple(
        ObservationPart(
            name, space.shape or (), flatdim(space), isinstance(space, Box) and not is_image(space), is_image(space)
        )
        for name, space in several
    )
    if isinstance(action, Discrete):
        start = int(action.start)
        return EnvSpaces(shape, ActionSpace("discrete", int(action.n)), (), (), (), start, dtype, parts=parts)
    if isinstance(action, MultiDiscrete | MultiBinary):
        counts, first = np.full(action.shape, 2), np.zeros(1, int)
        if isinstance(action, MultiDiscrete):
            counts, first = action.nvec, action.start
        kind = ActionSpace("multi_discrete", int(counts.sum()), tuple(counts.reshape(-1).tolist()))
        starts, action_dtype = tuple(first.reshape(-1).tolist()) if first.any() else 0, np.dtype(action.dtype).name
        return EnvSpaces(shape, kind, action.shape, (), (), starts, dtype, action_dtype, parts)
    assert isinstance(action, Box)
    size = int(np.prod(action.shape))
    low, high = (tuple(map(float, bound.reshape(-1))) for bound in _representable(action.low, action.high))
    return EnvSpaces(shape, ActionSpace("continuous", size), action.shape, low, high, 0, dtype, parts=parts)


def _representable(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns bounds as float32, the type of actions, within those given: 0.1 would be rounded to 0.100000001, which
    an environment with bounds of float64 may refuse. Equal bounds are rounded to the nearest number."""
    import numpy as np

    with np.errstate(over="ignore"):
        lower, upper = low.astype(np.float32), high.astype(np.float32)
    inner_lower = np.where(lower < low, np.nextafter(lower, np.float32(np.inf)), lower)
    inner_upper = np.where(upper > high, np.nextafter(upper, np.float32(-np.inf)), upper)
    crossed = inner_lower > inner_upper
    return np.where(crossed, lower, inner_lower), np.where(crossed, upper, inner_upper)


def _unusable(key: str, what: str, space: object, allowed: str, hint: str) -> Problem:
    return Problem(key, f"{what} cannot be used", value=str(space), allowed=allowed, hint=hint)
