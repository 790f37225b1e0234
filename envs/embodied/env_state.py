"""The exact state of one Gymnasium environment as bytes, and back.

Wrappers and the environment are saved attribute by attribute (counters, random generators, physical state) and written
into a freshly built environment of the same kind. Of MuJoCo data the integration state and all arrays are saved: some
environments read quantities that belong to the previous position. The model is left out, it can have megabytes of
meshes; contacts and constraint forces are those of the next step. Pickling environments themselves would
not do: many are rebuilt from their constructor's arguments and forget their state.
The bytes are a pickle: restore only what this platform wrote. Parameters of a MuJoCo model that an environment changes
while it runs, and NumPy's global random state, are not covered.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle

LIVE_MODULES = ("mujoco.", "gymnasium.envs.mujoco.mujoco_rendering")


_FOREIGN = ("efc_", "iefc_", "plugin")  # arrays that are made anew, or hold addresses, or are in the state


class CannotSave(Exception):
    """An environment holds something that cannot be saved; the message names it."""


def save(env: Env[Any, Any]) -> bytes:
    """State of `env`, some 10 KB for a MuJoCo environment. Raises CannotSave."""
    layers = _layers(env)
    live, mujoco_data = _live_objects(layers)
    data = {key: _saved_data(value, _model_of(layers, key)) for key, value in mujoco_data.items()}
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, {id(value): key for key, value in live.items()}).dump([_attributes(layer) for layer in layers])
    except Exception as error:  # any object may refuse in its own way
        raise CannotSave(f"{env}: {type(error).__name__}: {error}") from error
    return zlib.compress(pickle.dumps((buffer.getvalue(), data)), 1)


def restore(env: Env[Any, Any], state: bytes) -> None:
    """Bring `env`, built like the one that was saved, to the saved state."""
    layers = _layers(env)
    live, _ = _live_objects(layers)
    attributes, data = pickle.loads(zlib.decompress(state))
    for layer, saved in zip(layers, _Unpickler(io.BytesIO(attributes), live).load(), strict=True):
        for name in _attributes(layer).keys() - saved.keys():
            delattr(layer, name)
        vars(layer).update(saved)
    for key, saved in data.items():
        _restore_data(live[key], _model_of(layers, key), *saved)


def _layers(env: Env[Any, Any]) -> list[Env[Any, Any]]:
    """The outermost wrapper first, the environment last."""
    layers = [env]
    while layers[-1] is not env.unwrapped:
        layers.append(layers[-1].env)  # type: ignore[attr-defined]
    return layers


def _attributes(layer: Env[Any, Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if name != "env"}


def _live_objects(layers: list[Env[Any, Any]]) -> tuple[dict[tuple[int, str], Any], dict[tuple[int, str], Any]]:
    """Objects that the new environment keeps as its own, by position; and those of them that are MuJoCo data."""
    live: dict[tuple[int, str], Any] = {(index, ""): layer for index, layer in enumerate(layers)}
    data = {}
    for index, layer in enumerate(layers):
        for name, value in _attributes(layer).items():
            kind = type(value)
            if isinstance(value, EnvSpec | ModuleType) or kind.__module__.startswith(LIVE_MODULES):
                live[index, name] = value
                if kind.__name__ == "MjData":
                    data[index, name] = value
    return live, data


def _model_of(layers: list[Env[Any, Any]], key: tuple[int, str]) -> Any:
    """The model of MuJoCo data."""
    return layers[key[0]].model  # type: ignore[attr-defined]


def _saved_data(data: Any, model: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    mujoco = sys.modules["mujoco"]
    state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    fields = ((name, getattr(data, name)) for name in dir(data) if not name.startswith(("_", *_FOREIGN)))
    return state, {name: value.copy() for name, value in fields if isinstance(value, np.ndarray)}


def _restore_data(data: Any, model: Any, state: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
    mujoco = sys.modules["mujoco"]
    mujoco.mj_setState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    for name, values in arrays.items():
        if (live := getattr(data, name)).shape == values.shape:
            live[...] = values


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, keys: dict[int, tuple[int, str]]) -> None:
        super().__init__(file, protocol=5)
        self._keys = keys

    def persistent_id(self, value: object) -> tuple[int, str] | None:
        return self._keys.get(id(value))

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, EzPickle):
            raise pickle.PicklingError(f"{type(value).__name__} would be rebuilt and forget its state")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, live: dict[tuple[int, str], Any]) -> None:
        super().__init__(file)
        self._live = live

    def persistent_load(self, key: Any) -> Any:
        return self._live[key]
