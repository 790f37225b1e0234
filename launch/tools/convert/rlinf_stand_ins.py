"""The files that a converted embodied config of RLinf names: a simulator and a policy network that stand in.

They have the shapes and arguments that the config says, so that a rehearsal runs before the real ones are there.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping

from rl_platform.launch.tools.convert.outcome import ForeignConfig, Value

SIMULATOR_FILE, POLICY_FILE = "simulators.py", "policies.py"
_ACTIONS, _STATE, _PICTURE = 7, 8, 224  # where the file does not say them
_LARGEST = 4096
_FLOW = tuple(f"actor.model.{kind}.num_images_in_input" for kind in ("openpi", "dexbotic"))
_MANISKILL = """
    # import mani_skill.envs, rlinf.envs.maniskill
    # from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper
    # return CPUGymWrapper(gymnasium.make(env_id, num_envs=1, render_mode=render_mode, **settings))"""
_SIMULATOR = '''"""A stand-in with the shapes of the simulator, by rl-platform convert. It has nothing to learn."""

import warnings

import gymnasium
import numpy as np
from gymnasium import spaces


class StandIn(gymnasium.Env):
    """Random observations; the smaller the action, the larger the reward."""

    metadata = {{"render_modes": ["rgb_array"]}}

    def __init__(self, observations, actions, render_mode):
        self.observation_space = observations
        self.action_space = spaces.Box(-1.0, 1.0, (actions,))
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {{}}

    def step(self, action):
        reward = 1 - float(np.square(action).mean())
        return self.observation_space.sample(), reward, False, False, {{"success": reward > 0.5}}

    def render(self):
        return np.zeros((64, 64, 3), np.uint8)


def {name}(
{parameters}):
    """One environment. The arguments are those of env.kwargs."""
    # Return the real simulator here, as one Gymnasium environment.{real}
    warnings.warn("{name} is a stand-in with random observations", stacklevel=1)
    observations = {observations}
    return StandIn(observations, {actions}, render_mode)
'''
_POLICY = '''"""A stand-in for the policy network, written by rl-platform convert. It averages what it observes."""

import warnings

import torch
from torch import nn


class {name}(nn.Module):
    """Observations [B,D] -> features [B,width]. `spaces.parts` names what an observation has: images and state."""

    # Put the real network here. The arguments are those of actor.model.kwargs.
    def __init__(
{parameters}    ):
        super().__init__()
        warnings.warn("{name} is a stand-in: two layers on averages of the observation", stacklevel=1)
        self.width = 64
        self.layer = nn.Linear(self.width, self.width)

    def forward(self, observations):
        averages = nn.functional.adaptive_avg_pool1d(observations[:, None], self.width)[:, 0]
        return torch.tanh(self.layer(averages))
'''


def stand_ins(source: ForeignConfig, values: Mapping[str, Value]) -> dict[str, tuple[str, str]]:
    """Returns the function or class that each file defines, and the text of the file."""
    files = {}
    if name := _named(values.get("env.id"), SIMULATOR_FILE):
        real, arguments = "", [each for each in _arguments(values, "env.kwargs.") if each != "render_mode"]
        if name == "maniskill":
            real, arguments = _MANISKILL, ["env_id", "**settings"]
        text = _SIMULATOR.format(
            name=name,
            parameters=_parameters([], arguments, ["render_mode=None"]),
            real=real,
            observations=_observations(source, values),
            actions=_whole(source, "actor.model.action_dim", otherwise=_ACTIONS),
        )
        files[SIMULATOR_FILE] = name, text
    if name := _named(values.get("actor.model.type"), POLICY_FILE):
        arguments = _arguments(values, "actor.model.kwargs.")
        parameters = _parameters(["self", "spaces"], arguments, [], " " * 8)
        files[POLICY_FILE] = name, _POLICY.format(name=name, parameters=parameters)
    return files


def python_name(text: str) -> str:
    """Returns a name that Python allows, as near to `text` as possible."""
    name = re.sub(r"\W", "_", text)
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"my_{name}"


def _named(value: Value, file: str) -> str:
    text = str(value)
    return text.removeprefix(f"{file}:") if text.startswith(f"{file}:") else ""


def _arguments(values: Mapping[str, Value], section: str) -> list[str]:
    """Returns the names of the arguments; those of a mapping are one."""
    names = (key.removeprefix(section).partition(".")[0] for key in values if key.startswith(section))
    return list(dict.fromkeys(names))


def _parameters(first: list[str], arguments: list[str], last: list[str], indent: str = "    ") -> str:
    """Returns a line for each parameter. `**settings` takes the arguments whose names are none in Python."""
    named = [each for each in arguments if each.isidentifier() and not keyword.iskeyword(each)]
    by_name = ["*", *named, *last] if named or last else []
    others = ["**settings"] if len(named) < len(arguments) else []
    return "".join(f"{indent}{each},\n" for each in (*first, *by_name, *others))


def _observations(source: ForeignConfig, values: Mapping[str, Value]) -> str:
    """Returns the observation space of the policy: a state, pictures, or for a network of the user both."""
    state = f"spaces.Box(-np.inf, np.inf, ({_state(source)},))"
    if values.get("actor.model.type") == "mlp":
        return state
    height, width = (_pixels(source, side) for side in ("height", "width"))
    cameras = _whole(source, *_FLOW, "actor.model.num_images_in_input", otherwise=1)
    stack = f"{cameras}, " if cameras > 1 else ""
    pictures = f"spaces.Box(0, 255, ({stack}{height}, {width}, 3), np.uint8)"
    if not _named(values.get("actor.model.type"), POLICY_FILE):
        return pictures
    return f'spaces.Dict({{"images": {pictures}, "state": {state}}})'


def _state(source: ForeignConfig) -> int:
    keys = (f"actor.model.{name}" for name in ("obs_dim", "state_dim", "proprio_dim"))
    return _whole(source, *keys, otherwise=_STATE)


def _pixels(source: ForeignConfig, side: str) -> int:
    usual = source("actor.model.image_size")
    usual = usual[-1] if isinstance(usual, list) and usual and isinstance(usual[-1], int) else _PICTURE
    keys = (f"env.train.init_params.camera_{name}" for name in (f"{side}s", side))
    return _whole(source, *keys, otherwise=usual if 0 < usual <= _LARGEST else _PICTURE)


def _whole(source: ForeignConfig, *keys: str, otherwise: int) -> int:
    """Returns the first number from 1 that one of `keys` has."""
    values = map(source, keys)
    return next((each for each in values if isinstance(each, int) and 0 < each <= _LARGEST), otherwise)
