"""Saves the exact state of a Gymnasium environment as bytes, and restores it.

Wrappers and environment are saved attribute by attribute (counters, random generators, physical state) and restored
into a new environment of the same kind. Of MuJoCo data the integration state and all arrays are saved, because some
environments read quantities of the previous position. The model is not saved, as it can have megabytes of meshes.
The functions of Gymnasium's wrappers are not saved either. Of a method of the environment, as one of a table of
commands, only the name is saved.
Environments cannot be pickled themselves: many are rebuilt from their constructor's arguments without their state.
Arrays that share memory, with each other or with MuJoCo's data, share it again after the restore.
The bytes are a pickle, and restoring a pickle may run code. `refuse_code` finds out without running any.

Not covered: contacts and constraint forces, which the next step computes; parameters of a MuJoCo model that an
environment changes while it runs; variables of modules and classes, as NumPy's global random state.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Env, Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle

from rl_platform.envs.embodied.block import CannotSave
from rl_platform.errors import CheckpointError, message_of

if TYPE_CHECKING:
    import mujoco

    from rl_platform.envs.embodied.spaces import AnyEnv

Key = tuple[int, str]  # (index of the layer, name of the attribute), or NAME + _METHOD for a method of the layer
_METHOD = "()"

LIVE_MODULES = ("mujoco.", "gymnasium.envs.mujoco.mujoco_rendering")
# arrays that each step recomputes, that hold addresses, or that are in the integration state
_EXCLUDED = ("efc_", "iefc_", "plugin")


_OTHER_LAYERS = "the state is that of an environment with other wrappers"
NATIVE = b"native 1:"  # begins the state of an environment that is stepped without Gymnasium
# What pickles of most environments are made of. These run no code of the environment.
_HARMLESS = {
    ("collections", "deque"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("collections", "Counter"),
    *(("builtins", kind.__name__) for kind in (bool, int, float, complex, str, list, dict, set, range, slice)),
    ("random", "Random"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    (__name__, "array_view"),
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
    ("numpy.random._pickle", "__randomstate_ctor"),
    ("gymnasium.wrappers.utils", "RunningMeanStd"),
    *((f"numpy.random._{name.lower()}", name) for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")),
}


def save(env: AnyEnv) -> bytes:
    """Returns the state of `env`, about 10 KB for a MuJoCo environment. Raises CannotSave."""
    layers = _layers(env)
    live, mujoco_data = _live_objects(layers)
    data = {key: _saved_data(value, _model_of(layers, key)) for key, value in mujoco_data.items()}
    attributes = [_attributes(layer) for layer in layers]
    try:
        pickler = _Pickler(live, mujoco_data)
        saved = pickler.dumped(attributes)
        if owners := pickler.shared_owners():
            saved = _Pickler(live, mujoco_data, owners).dumped(attributes)
    except Exception as error:  # objects raise various types
        raise CannotSave(f"{env}: {type(error).__name__}: {message_of(error)}") from error
    return zlib.compress(pickle.dumps((saved, data)), 1)


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
            object.__delattr__(layer, name)
        for name, value in saved.items():
            object.__setattr__(layer, name, value)
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
    layers: list[Any] = [env]
    while layers[-1] is not env.unwrapped:
        layers.append(layers[-1].env)
    while isinstance(inner := vars(layers[-1]).get("env"), Env) and inner not in layers:
        layers.append(inner)
    return layers


def _attributes(layer: AnyEnv) -> dict[str, object]:
    """Returns what the layer holds, also in `__slots__`, without the next layer. A simulator that is no Gymnasium
    environment is none."""
    held = object.__getstate__(layer)
    attributes, slots = held if isinstance(held, tuple) else (held, {})
    items = ((attributes or {}) | slots).items()
    return {name: value for name, value in items if not (name == "env" and isinstance(value, Env))}


def _live_objects(layers: list[AnyEnv]) -> tuple[dict[Key, object], dict[Key, mujoco.MjData]]:
    """Returns the objects that are not restored, by (layer, attribute), and those of them that are MuJoCo data."""
    live: dict[Key, object] = {(index, ""): layer for index, layer in enumerate(layers)}
    data = {}
    for index, layer in enumerate(layers):
        for name, value in _attributes(layer).items():
            kind = type(value)
            live_kind = isinstance(value, EnvSpec | ModuleType) or kind.__module__.startswith(LIVE_MODULES)
            if live_kind or _is_fixed_function(layer, value):
                live[index, name] = value
                if kind.__name__ == "MjData":
                    data[index, name] = value
    return live, data


def _is_fixed_function(layer: AnyEnv, value: object) -> bool:
    """Returns whether `value` is a function that a wrapper of Gymnasium never changes, as that of FlattenObservation or
    TransformReward. A user's function with variables around it is none: it may change these."""
    if isinstance(value, FunctionType) and str(value.__module__).startswith("gymnasium."):  # None of compiled text
        return True
    plain = isinstance(value, np.ufunc) or (isinstance(value, FunctionType) and not value.__closure__)
    return plain and type(layer).__module__.startswith("gymnasium.")


def _model_of(layers: list[AnyEnv], key: Key) -> mujoco.MjModel:
    """Returns the MuJoCo model of the layer that has the data."""
    owner: Any = layers[key[0]]
    model: mujoco.MjModel = owner.model
    return model


def _saved_data(data: mujoco.MjData, model: mujoco.MjModel) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    mujoco = sys.modules["mujoco"]
    state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    return state, {name: value.copy() for name, value in _fields(data)}


def _fields(data: mujoco.MjData) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of MuJoCo's data that are saved, with their names."""
    for name in dir(data):
        if not name.startswith(("_", *_EXCLUDED)) and isinstance(value := getattr(data, name), np.ndarray):
            yield name, value


def _restore_data(data: mujoco.MjData, model: mujoco.MjModel, state: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
    mujoco = sys.modules["mujoco"]
    mujoco.mj_setState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    for name, values in arrays.items():
        if (live := getattr(data, name)).shape == values.shape:
            live[...] = values


class _Pickler(pickle.Pickler):
    """Replaces live objects by their keys, and arrays in the memory of `owners` (ids of arrays) or of MuJoCo's data by
    views of these. pickle alone would copy them, and a change of one would no longer be seen in the other."""

    def __init__(self, live: dict[Key, object], data: dict[Key, mujoco.MjData], owners: Sequence[int] = ()) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=5)
        self._keys = {id(value): key for key, value in live.items()}
        self._data, self._owners = data, owners
        self._arrays: dict[int, list[np.ndarray]] = {}  # that are no data of MuJoCo, by the id of their owner

    def dumped(self, attributes: list[dict[str, object]]) -> bytes:
        self.dump(attributes)
        return self._buffer.getvalue()

    def shared_owners(self) -> list[int]:
        """Returns the ids of the arrays in whose memory two of the dumped arrays overlap."""
        shared = []
        for owner, arrays in self._arrays.items():
            places = sorted(_place_of(array) for array in arrays if array.size)
            if any(after < end for (_, end), (after, _) in pairwise(places)):
                shared.append(owner)
        return shared

    def persistent_id(self, value: object) -> Key | None:
        if type(value) is MethodType and (layer := self._keys.get(id(value.__self__))) and not layer[1]:
            name = value.__name__
            if getattr(type(value.__self__), name, None) is value.__func__:  # what a restore finds by this name
                return layer[0], name + _METHOD
        return self._keys.get(id(value))

    def reducer_override(self, value: object) -> object:  # type: ignore[override]
        if isinstance(value, EzPickle):
            raise pickle.PicklingError(f"{type(value).__name__} would be rebuilt and forget its state")
        if isinstance(value, FunctionType) and value.__module__ is None:  # pickle would search all modules for it
            raise pickle.PicklingError(f"{value} belongs to no module")
        if type(value) is np.ndarray and not value.dtype.hasobject:
            owner = value
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            if owner.base is not None and (place := self._place(value)) is not None:
                return field_view, (*place[:2], *_layout(value, place[2]))
            self._arrays.setdefault(id(owner), []).append(value)
            if id(owner) in self._owners and value is not owner and owner.flags.forc:
                return array_view, (owner, *_layout(value, owner))
        return NotImplemented

    def _place(self, array: np.ndarray) -> tuple[mujoco.MjData, str, np.ndarray] | None:
        """Returns the MuJoCo data, the name and the array of the field that `array` is a view of; None: of none."""
        for data in self._data.values():
            for name, field in _fields(data):
                if np.may_share_memory(field, array):
                    return data, name, field
        return None


def _place_of(array: np.ndarray) -> tuple[int, int]:
    """Returns the first address of an array's memory and the one after its last."""
    first: int = array.__array_interface__["data"][0]
    reach = [(count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)]
    return first + sum(min(step, 0) for step in reach), first + sum(max(step, 0) for step in reach) + array.itemsize


def _layout(view: np.ndarray, owner: np.ndarray) -> tuple[tuple[int, ...], np.dtype, int, tuple[int, ...]]:
    """Returns shape and type of `view`, its offset in the memory of `owner` in bytes, and its strides."""
    first, begin = (array.__array_interface__["data"][0] for array in (view, owner))
    return view.shape, view.dtype, first - begin, view.strides


def array_view(
    owner: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, offset: int, strides: tuple[int, ...]
) -> np.ndarray:
    """Returns a view of the memory of `owner`. Raises ValueError for one beyond it."""
    return np.ndarray(shape, dtype, owner.ravel(order="K"), offset, strides)


def field_view(data: mujoco.MjData, name: str, *layout: Any) -> np.ndarray:
    """Returns a view of a field of MuJoCo's data."""
    return array_view(getattr(data, name), *layout)


def _no_view(data: object, *place: object) -> None:
    """Takes the place of `field_view` where a state is checked without its live objects."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, live: dict[Key, object]) -> None:
        super().__init__(file)
        self._live = live

    def persistent_load(self, key: Key) -> object:
        index, name = key
        if name.endswith(_METHOD):
            layer = self._live.get((index, ""))
            function = getattr(type(layer), name.removesuffix(_METHOD), None)
            if not isinstance(function, FunctionType):
                raise CheckpointError(f"the environment has no method {name} any more")
            return MethodType(function, layer)
        if key not in self._live:
            raise CheckpointError(_OTHER_LAYERS)
        return self._live[key]


class _HarmlessUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == (__name__, "field_view"):
            return _no_view
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        if module.startswith(("gymnasium.spaces.", "numpy")):
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type) and issubclass(kind, Space | np.generic):
                return kind
        raise pickle.UnpicklingError(f"holds {module}.{name}, which may run code")

    def persistent_load(self, key: Key) -> object:
        return object()
