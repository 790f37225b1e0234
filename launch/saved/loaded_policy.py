"""`load_policy`: a trained embodied policy for scripts, robots and notebooks.

    policy = rl_platform.load_policy("runs/hopper")
    action = policy.act(observation)

An action is the one that `platform-launch --eval` executes for the same observations: observation normaliser, memory,
chunks of actions and bounds are applied. Neither Ray nor a simulation is started. Not covered: language models, which
`rl-platform export` writes for transformers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from numbers import Integral
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike

from rl_platform.components.actor import saved_policy, trained_policy
from rl_platform.components.policy_rollout import Observations, PolicyInference
from rl_platform.envs.embodied.descriptions import OF_PROGRAM
from rl_platform.errors import ConfigError, DataError, Problem
from rl_platform.launch.saved.policy_folder import built, normalizer_of, read_policy
from rl_platform.launch.saved.saved_run import SavedRun, find_run
from rl_platform.launch.saved.saved_weights import whole_weights
from rl_platform.models.saved_policy import DESCRIPTION, SavedPolicy
from rl_platform.runtime.cpu import one_thread


class Policy:
    """Acts in one environment, or in N at once.

    Call `reset`, or pass `episode_starts`, when episodes begin. A recurrent policy has a memory, and a policy with
    action chunks stores actions that are not executed yet. saved: what the policy was built from.
    """

    def __init__(self, saved: SavedPolicy, seed: int | None = None, device: str = "cpu") -> None:
        """seed: of sampled actions; None: the run's, as in an evaluation."""
        about = saved.description
        self.saved, self.spaces, self.levels = saved, about.spaces, about.levels
        seed = about.seed if seed is None else seed
        self._inference = PolicyInference(built(saved), torch.device(device), seed, about.forward_rows)
        self._normalizer = normalizer_of(saved)
        self._memory_size = about.model.recurrent_size if about.model.type == "gru" else 0
        self._tasks = len(about.language.instruction_lengths) if about.language else 0
        self._choices = 0  # so far; each has random numbers of its own
        self.reset()

    def __repr__(self) -> str:
        about = self.saved.description
        return f"Policy of step {about.step} for {about.environment}, observation {self.spaces.observation_shape}"

    def reset(self) -> None:
        """Begins an episode in every environment. Their number may change here."""
        self._memory: np.ndarray | None = None  # [N,H] of a recurrent policy
        self._chunks: np.ndarray | None = None  # [N,K,...] actions that were chosen last
        self._used = np.zeros(0, np.int64)  # [N] how many of them were returned

    def act(
        self,
        observation: ArrayLike | Mapping[str, object],
        deterministic: bool = True,
        *,
        episode_starts: ArrayLike | None = None,
        tasks: ArrayLike | None = None,
    ) -> np.ndarray:
        """Returns the action for an observation, or actions [N,...] for observations [N,...].

        Shapes are those of the environment's spaces; a Dict or Tuple of Boxes may be given as it is. Continuous actions
        are float32 and inside their bounds; choices have the type of the action space. deterministic: the most likely
        action, otherwise a sample. episode_starts: bool or [N] bool: the observation is the first of its episode.
        tasks: integer or [N] integers: the index of the instruction, for a policy that reads several.

        Raises DataError for observations of another shape or type, and for another N during episodes.
        """
        rows, single = self._rows(observation)
        count, actions_per_choice = len(rows), self.levels.num_actions
        starts = self._flags(episode_starts, count)
        which = self._instructions(tasks, count)
        if self._chunks is not None and len(self._chunks) != count:
            if actions_per_choice > 1 or self._memory_size:
                message = f"{count} observations, but episodes of {len(self._chunks)} environments are running"
                raise DataError(f"{message}. Call reset() before another number of environments")
            self.reset()
        if self._chunks is None:
            starts[:] = True
            self._used = np.full(count, actions_per_choice)
        if (due := starts | (self._used == actions_per_choice)).any():
            chosen = self._choose(rows, starts, deterministic, which)
            if self._chunks is None:
                self._chunks = np.empty_like(chosen)
            self._chunks[due], self._used[due] = chosen[due], 0
        assert self._chunks is not None
        actions = self._in_bounds(self._chunks[np.arange(count), self._used])
        self._used += 1
        result: np.ndarray = actions[0] if single else actions
        return result

    def _choose(
        self, rows: np.ndarray, starts: np.ndarray, deterministic: bool, tasks: np.ndarray | None
    ) -> np.ndarray:
        """Chunks [N,K,...] for observations [N,D] that are not normalised yet."""
        seen = rows if self._normalizer is None else self._normalizer(rows)
        if self._memory_size and self._memory is None:
            self._memory = np.zeros((len(rows), self._memory_size), np.float32)
        if self._memory is not None:
            self._memory[starts] = 0.0
        self._choices += 1
        draw = ("evaluate", 0, self._choices)  # of `Environment.evaluate`, whose samples these are
        with one_thread():
            chosen = self._inference.act(Observations(seen, draw, deterministic, None, self._memory, tasks))
        self._memory = chosen.hidden_states
        return chosen.to_execute[:, None] if self.levels.single else chosen.to_execute

    def _in_bounds(self, actions: np.ndarray) -> np.ndarray:
        """Actions [N,...] of the policy -> those of the environment, as `VectorEnv.send` and `EnvBlock` pass them."""
        spaces = self.spaces
        if spaces.action.kind != "continuous":
            return spaces.environment_choices(actions)
        low, high = (np.asarray(bound, np.float32) for bound in (spaces.action_low, spaces.action_high))
        bounded: np.ndarray = np.clip(actions, low, high)
        return bounded.reshape(-1, *spaces.action_shape)

    def _rows(self, observation: ArrayLike | Mapping[str, object]) -> tuple[np.ndarray, bool]:
        """Observations [N,D] float32, or uint8 of images, and whether it is a single one."""
        shape, images = self.spaces.observation_shape, self.spaces.images
        try:
            several = isinstance(observation, Mapping) or (isinstance(observation, tuple) and self._observes_tuples)
            array = self._flat(observation) if several else _array(observation)
        except ValueError as error:  # rows of unequal lengths
            reason = "reset() and step() return it first in a tuple" if isinstance(observation, tuple) else error
            raise DataError(f"observation: no array: {reason}") from error
        if array.dtype != np.uint8 if images else array.dtype.kind not in "fiub":
            allowed = "uint8 images" if images else "real numbers"
            raise DataError(f"observation: has type {array.dtype}; this policy observes {allowed}")
        single = array.shape == shape
        if not single and (array.shape[1:] != shape or not array.size):
            allowed = f"{shape}, or (N, {', '.join(map(str, shape))}) for N of them"
            raise DataError(f"observation: has shape {array.shape}; this policy observes {allowed}")
        rows: np.ndarray = np.array(array, np.uint8 if images else np.float32).reshape(-1, math.prod(shape))
        if not np.isfinite(rows).all():
            row = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
            raise DataError(f"observation: row {row} is not finite: {rows[row]}")
        if numbers := self.spaces.wrong_pixels(rows):
            raise DataError(f"observation: its pixels have {numbers}; this policy observes whole numbers from 0 to 255")
        if (scale := self.spaces.pixel_scale) is not None:
            rows *= scale
        return rows, single

    @property
    def _observes_tuples(self) -> bool:
        """Whether observations are of a Tuple: its parts are named by their positions."""
        return any(part.name.partition(".")[0] == "0" for part in self.spaces.parts)

    def _flat(self, observation: object) -> np.ndarray:
        """Maps a Dict or Tuple [...] to its parts side by side [...,D], as `gymnasium.spaces.flatten` puts them."""
        if not self.spaces.parts or not all(part.numbers or part.image for part in self.spaces.parts):
            hint = "pass gymnasium.spaces.flatten(env.observation_space, observation)"
            kind = "tuple" if isinstance(observation, tuple) else "dict"
            raise DataError(f"observation: is a {kind}; this policy observes {self.spaces.observation_shape}: {hint}")
        arrays = []
        for part in self.spaces.parts:
            values = [*_parts(observation, part.name)]
            if not values:
                raise DataError(f"observation: has no part {part.name}")
            array = _array(values[0])
            if part.image and array.dtype != np.uint8:
                raise DataError(
                    f"observation: part {part.name} has type {array.dtype}; this policy observes uint8 images"
                )
            arrays.append(array.reshape(*array.shape[: array.ndim - len(part.shape)], part.size))
        return np.concatenate(arrays, axis=-1)

    def _flags(self, given: ArrayLike | None, count: int) -> np.ndarray:
        """[N] bool, a copy."""
        flags = np.asarray(False if given is None else given)
        if flags.dtype != bool or flags.shape not in ((), (count,)):
            raise DataError(f"episode_starts: has type {flags.dtype} and shape {flags.shape}; allowed: bool ({count},)")
        return np.array(np.broadcast_to(flags, count))

    def _instructions(self, given: ArrayLike | None, count: int) -> np.ndarray | None:
        """[N] int64, None for a policy with at most one instruction."""
        if given is None and self._tasks < 2:
            return None
        if self._tasks < 2:
            raise DataError("tasks: this policy reads no instruction, or always the same one")
        which = np.asarray(-1 if given is None else given)
        fits = which.dtype.kind in "iu" and which.shape in ((), (count,))
        if not fits or which.min() < 0 or which.max() >= self._tasks:
            allowed = f"integers 0..{self._tasks - 1}, one for each of the {count} observations"
            raise DataError(f"tasks: {given!r}; allowed: {allowed}")
        return np.array(np.broadcast_to(which, count), np.int64)


def _array(value: object) -> np.ndarray:
    """Returns an array of anything like one; of a tensor, which may have a gradient, its numbers."""
    return np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)


def _parts(observation: object, name: str) -> Iterator[object]:
    """Yields the part of an observation with this name: keys and positions, joined by dots. A key may have dots."""
    if isinstance(observation, Mapping):
        entries = [(str(key), value) for key, value in observation.items()]
    elif isinstance(observation, tuple | list):
        entries = [(str(position), value) for position, value in enumerate(observation)]
    else:
        return
    for key, value in entries:
        if key == name:
            yield value
        elif name.startswith(f"{key}."):
            yield from _parts(value, name.removeprefix(f"{key}."))


def load_policy(
    folder: str | PathLike[str], step: int | None = None, *, seed: int | None = None, device: str = "cpu"
) -> Policy:
    """Returns a trained embodied policy.

    folder: of a run, one of its checkpoints, its `model`, or `latest` for the newest run in runs/. step: of the
    checkpoint; None: the newest one. seed: of sampled actions; None: the run's. device: as in torch.

    Raises ConfigError for a folder without a policy, a step without a checkpoint, a reasoning run, a wrong step or
    seed and a missing device. Raises CheckpointError and DataError for damaged files.
    """
    problems = []
    if not isinstance(folder, str | PathLike):
        allowed = "a run, or the path of its folder"
        problems.append(Problem("folder", "names no folder", value=repr(folder)[:80], allowed=allowed))
    if step is not None and (not isinstance(step, Integral) or isinstance(step, bool) or step < 0):
        allowed = "a whole number, at least 0; None: the newest checkpoint"
        hint = f"step={int(step)}" if isinstance(step, str) and step.isdecimal() else ""
        problems.append(Problem("step", "is no step", value=repr(step)[:80], allowed=allowed, hint=hint))
    if seed is not None and (not isinstance(seed, Integral) or seed < 0):
        problems.append(Problem("seed", "is no seed", value=repr(seed)[:80], allowed="a whole number, at least 0"))
    if problems:
        raise ConfigError(problems)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError([Problem("load_policy", f"no such device: {reason}", value=str(device))]) from error
    return Policy(find_policy(folder, "load_policy", step), seed, device)


def find_policy(folder: str | PathLike[str], asked: str, step: int | None = None) -> SavedPolicy:
    """Returns the policy in a folder, see `load_policy`. asked: the caller, for messages."""
    path = Path(folder).expanduser()
    if not (path / DESCRIPTION).is_file():
        return find_run(os.fspath(folder), asked, step).read_by(policy_of)
    saved = read_policy(path)
    if step not in (None, own := saved.description.step):
        message = f"{path} holds the policy of one step"
        hint = "name the folder of the run"
        raise ConfigError([Problem(asked, message, value=str(step), allowed=str(own), hint=hint)])
    return saved


def policy_of(run: SavedRun) -> SavedPolicy:
    """Returns the policy in the checkpoint of an embodied run.

    Builds an environment to get its spaces. If a function of a program made the environment, the spaces come from the
    run's `model`.
    """
    from rl_platform.launch.start_checks.env_spaces import fitting_spaces

    config = run.load([]).config
    if config.runner.task_type == "reasoning":
        message = f"{run.folder} holds a language model, and only embodied policies act"
        hint = f"rl-platform export {run.folder} writes a folder for transformers: AutoModelForCausalLM.from_pretrained"
        raise ConfigError([Problem(run.asked, message, value="runner.task_type: reasoning", hint=hint)])
    checkpoint = run.open(config)
    model = run.folder / "model"
    of_program = config.env.id.startswith(OF_PROGRAM) and (model / DESCRIPTION).is_file()
    spaces = read_policy(model).description.spaces if of_program else fitting_spaces(config)
    policy = trained_policy(config, spaces, config.runner.seed)
    weights = whole_weights(checkpoint.file("actor"), policy, config.actor.lora)
    normalizer = checkpoint.load("env").get("observation_normalizer")
    return saved_policy(config, spaces, policy, weights, checkpoint.step, normalizer)
