"""Saves the exact state of a Gymnasium environment as bytes, and restores it.

Wrappers and environment are saved attribute by attribute (counters, random generators, physical state) and restored
into a new environment of the same kind. Of MuJoCo data the integration state and all arrays are saved, because some
environments read quantities of the previous position. The model is not saved, as it can have megabytes of meshes.
Environments cannot be pickled themselves: many are rebuilt from their constructor's arguments without their state.
The bytes are a pickle, and restoring a pickle may run code. `refuse_code` finds out without running any.

Not covered: contacts and constraint forces, which the next step computes; parameters of a MuJoCo model that an
environment changes while it runs; NumPy's global random state.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from gymnasium import Env, Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle

from rl_platform.envs.embodied.block import CannotSave
from rl_platform.errors import CheckpointError

if TYPE_CHECKING:
    import mujoco

    from rl_platform.envs.embodied.spaces import AnyEnv

Key = tuple[int, str]  # (index of the layer, name of the attribute)

LIVE_MODULES = ("mujoco.", "gymnasium.envs.mujoco.mujoco_rendering")
# arrays that each step recomputes, that hold addresses, or that are in the integration state
_EXCLUDED = ("efc_", "iefc_", "plugin")


_OTHER_LAYERS = "the state is that of an environment with other wrappers"
NATIVE = b"native 1:"  # begins the state of an environment that is stepped without Gymnasium
# What pickles of most environments are made of. These run no code of the environment.
_HARMLESS = {
    ("collections", "deque"),
    ("collections", "OrderedDict"),
    ("random", "Random"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *(
        (module, name)
        for module in ("numpy._core.multiarray", "numpy.core.multiarray")
        for name in ("_reconstruct", "scalar")
    ),
    *((module, "_frombuffer") for module in ("numpy._core.numeric", "numpy.core.numeric")),
    ("numpy.random.bit_generator", "SeedSequence"),
    ("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence"),
    ("numpy.random._pickle", "__bit_generator_ctor"),
    ("numpy.random._pickle", "__generator_ctor"),
    *((f"numpy.random._{name.lower()}", name) for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")),
}


def save(env: AnyEnv) -> bytes:
    """Returns the state of `env`, about 10 KB for a MuJoCo environment. Raises CannotSave."""
    layers = _layers(env)
    live, mujoco_data = _live_objects(layers)
    data = {key: _saved_data(value, _model_of(layers, key)) for key, value in mujoco_data.items()}
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, {id(value): key for key, value in live.items()}).dump([_attributes(layer) for layer in layers])
    except Exception as error:  # objects raise various types
        raise CannotSave(f"{env}: {type(error).__name__}: {error}") from error
    return zlib.compress(pickle.dumps((buffer.getvalue(), data)), 1)


def restore(env: AnyEnv, state: bytes) -> None:
    """Restores the state into `env`, which must be built like the environment that was saved.

    Raises CheckpointError if one with other wrappers was saved.
    """
    layers = _layers(env)
    live, _ = _live_objects(layers)
    attributes, data = pickle.loads(zlib.decompress(state))
    saved_layers = _Unpickler(io.BytesIO(attributes), live).load()
    if len(saved_layers) != len(layers):
        raise CheckpointError(_OTHER_LAYERS)
    for layer, saved in zip(layers, saved_layers, strict=True):
        for name in _attributes(layer).keys() - saved.keys():
            delattr(layer, name)
        vars(layer).update(saved)
    for key, saved in data.items():
        _restore_data(live[key], _model_of(layers, key), *saved)


def refuse_code(states: Sequence[bytes]) -> None:
    """Raises CheckpointError unless all states of `EnvBlock.save` are made of plain values, arrays, random generators
    and Gymnasium's spaces. Runs nothing else."""
    for number, saved in enumerate(states):
        try:
            state, *_ = _HarmlessUnpickler(io.BytesIO(saved)).load()
            if state is None:
                continue
            if state.startswith(NATIVE):
                _HarmlessUnpickler(io.BytesIO(state.removeprefix(NATIVE))).load()
            else:
                attributes, _ = _HarmlessUnpickler(io.BytesIO(zlib.decompress(state))).load()
                _HarmlessUnpickler(io.BytesIO(attributes)).load()
        except Exception as error:  # of any type, as pickle builds what the bytes name
            raise CheckpointError(f"the state of environment {number} {error}") from error


def _layers(env: AnyEnv) -> list[AnyEnv]:
    """Returns all layers, from the outermost wrapper to the environment, and further to one that it holds as `env`."""
    layers = [env]
    while layers[-1] is not env.unwrapped:
        layers.append(layers[-1].env)
    while isinstance(inner := vars(layers[-1]).get("env"), Env) and inner not in layers:
        layers.append(inner)
    return layers


def _attributes(layer: AnyEnv) -> dict[str, object]:
    """Returns what the layer holds, without the next layer. A simulator that is no Gymnasium environment is none."""
    return {name: value for name, value in vars(layer).items() if not (name == "env" and isinstance(value, Env))}


def _live_objects(layers: list[AnyEnv]) -> tuple[dict[Key, object], dict[Key, mujoco.MjData]]:
    """Returns the objects that are not restored, by (layer, attribute), and those of them that are MuJoCo data."""
    live: dict[Key, object] = {(index, ""): layer for index, layer in enumerate(layers)}
    data = {}
    for index, layer in enumerate(layers):
        for name, value in _attributes(layer).items():
            kind = type(value)
            if isinstance(value, EnvSpec | ModuleType) or kind.__module__.startswith(LIVE_MODULES):
                live[index, name] = value
                if kind.__name__ == "MjData":
                    data[index, name] = value
    return live, data


def _model_of(layers: list[AnyEnv], key: Key) -> mujoco.MjModel:
    """Returns the MuJoCo model of the layer that has the data."""
    return layers[key[0]].model


def _saved_data(data: mujoco.MjData, model: mujoco.MjModel) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    mujoco = sys.modules["mujoco"]
    state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    fields = ((name, getattr(data, name)) for name in dir(data) if not name.startswith(("_", *_EXCLUDED)))
    return state, {name: value.copy() for name, value in fields if isinstance(value, np.ndarray)}


def _restore_data(data: mujoco.MjData, model: mujoco.MjModel, state: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
    mujoco = sys.modules["mujoco"]
    mujoco.mj_setState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    for name, values in arrays.items():
        if (live := getattr(data, name)).shape == values.shape:
            live[...] = values


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, keys: dict[int, Key]) -> None:
        super().__init__(file, protocol=5)
        self._keys = keys

    def persistent_id(self, value: object) -> Key | None:
        return self._keys.get(id(value))

    def reducer_override(self, value: object) -> object:  # type: ignore[override]
        if isinstance(value, EzPickle):
            raise pickle.PicklingError(f"{type(value).__name__} would be rebuilt and forget its state")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, live: dict[Key, object]) -> None:
        super().__init__(file)
        self._live = live

    def persistent_load(self, key: Key) -> object:
        if key not in self._live:
            raise CheckpointError(_OTHER_LAYERS)
        return self._live[key]


class _HarmlessUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        space = getattr(sys.modules.get(module), name, None) if module.startswith("gymnasium.spaces.") else None
        if isinstance(space, type) and issubclass(space, Space):
            return space
        raise pickle.UnpicklingError(f"holds {module}.{name}, which may run code")

    def persistent_load(self, key: Key) -> object:
        return object()
