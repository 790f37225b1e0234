"""Adapts environments of other packages: flattens observations, casts actions to float16, and seeds older ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from gymnasium.spaces.utils import flatdim, flatten, flatten_space

from rl_platform.envs.embodied.step_results import WrongResult, check_choices, check_exact

if TYPE_CHECKING:
    from rl_platform.envs.embodied.spaces import AnyEnv


class FlatObservations(gymnasium.ObservationWrapper[object, object, object]):
    """Concatenates the parts of a Dict or Tuple observation in the order of the space; choices become one-hot, and
    pixels of images are divided by 255.

    Gymnasium sorts a Dict space that is built from a plain dict by key (achieved_goal, desired_goal, observation).
    """

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        self.observation_space = flatten_space(env.observation_space)
        pixels = [np.full(flatdim(space), is_image(space)) for _, space in leaves(env.observation_space)]
        self._scale = None
        if (images := np.concatenate(pixels)).any():
            self._scale = np.where(images, np.float32(1 / 255), np.float32(1))
            self.observation_space = Box(-np.inf, np.inf, images.shape, np.float32)

    def observation(self, observation: object) -> np.ndarray:
        """Returns the observation as a vector [D]. Raises WrongResult if it does not fit its space."""
        check_parts(self.env.observation_space, observation)
        vector: np.ndarray = flatten(self.env.observation_space, observation)  # type: ignore[assignment]
        return vector if self._scale is None else vector.astype(np.float32) * self._scale


def check_parts(space: Space[object], observation: Any, name: str = "") -> None:
    """Raises WrongResult for a part that is missing, of another size, or beyond its choices.

    Flattening would shift the numbers of other parts, or set a bit of another choice.
    """
    what = f"part {name} of the observation" if name else "the observation"
    if isinstance(space, Dict | Tuple):
        items = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        for key, inner in items:
            try:
                part = observation[key]
            except (KeyError, IndexError, TypeError) as error:
                raise WrongResult(f"{what} has no part {key!r}, which its space has") from error
            check_parts(inner, part, f"{name}.{key}" if name else str(key))
    elif isinstance(space, Box):
        if np.size(observation) != math.prod(space.shape):
            shapes = f"shape {np.shape(observation)}; its space has shape {space.shape}"
            raise WrongResult(f"{what} has {shapes}")
        check_exact(observation, space.dtype, what)
    elif isinstance(space, Discrete):
        number = isinstance(observation, int | np.integer)
        if not (number and space.start <= observation < space.start + space.n):
            check_choices(observation, np.array(space.start), np.array(space.start + space.n - 1), what)
    elif isinstance(space, MultiDiscrete):
        check_choices(observation, space.start, space.start + space.nvec - 1, what)
    elif isinstance(space, MultiBinary):
        check_choices(observation, np.zeros(space.shape, int), np.ones(space.shape, int), what)


def is_image(space: object) -> bool:
    """Returns whether a space holds images: uint8 of three dimensions, or of four for a stack of images."""
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) in (3, 4)


def leaves(space: Space[object], name: str = "") -> Iterator[tuple[str, Space[object]]]:
    """Yields the parts of a Dict or Tuple space with their names, in the order in which they are flattened."""
    if isinstance(space, Dict | Tuple):
        items = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        for key, inner in items:
            yield from leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, space


def flattened(env: AnyEnv) -> AnyEnv:
    """Returns `env`, wrapped in `FlatObservations` if it observes choices or several parts of fixed sizes."""
    space = env.observation_space
    parts = isinstance(space, Dict | Tuple | Discrete | MultiDiscrete | MultiBinary)
    some = next(leaves(space), None) is not None  # else `read_spaces` refuses it
    return FlatObservations(env) if parts and some and space.is_np_flattenable else env


class HalfActions(gymnasium.ActionWrapper[object, object, object]):
    """Gives an environment with actions of float16 actions of that type.

    The policy's are float32, which a space of float16 does not contain. Rounding keeps them within the space's bounds.
    """

    def action(self, action: object) -> object:
        """Returns the action as float16."""
        return np.asarray(action, np.float16)


def with_typed_actions(env: AnyEnv) -> AnyEnv:
    """Returns `env`, wrapped in `HalfActions` if its actions are float16."""
    return HalfActions(env) if isinstance(env.action_space, Box) and env.action_space.dtype == np.float16 else env


def reset_env(env: AnyEnv, seed: int | None) -> object:
    """Starts an episode and returns its first observation. `seed` None keeps the environment's random state.

    Environments with the older method `seed` (Meta-World) ignore the seed of `reset`.
    """
    if seed is not None and callable(older := getattr(env.unwrapped, "seed", None)):
        older(seed)
    observation, _ = env.reset(seed=seed)
    return observation
