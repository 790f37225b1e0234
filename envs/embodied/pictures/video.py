"""Videos of episodes: an episode is played with the policy, then drawn from its actions beside what follows.

Under each picture are reward, return so far, the value of the policy, the success of the episode and its instruction.
The seed and the actions determine an episode, so it can be played once more without the policy. A separate process does
so and renders, so a graphics library that crashes or hangs cannot end the run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.evaluate import Begin, EvaluationResult, PolicyFunction, one_by_one
from rl_platform.envs.embodied.pictures.drawing import with_captions, with_drawing
from rl_platform.envs.embodied.success import Success
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.errors import ConfigError

LONGEST = 2000  # steps that are drawn
_PICTURES_PER_SECOND = 25  # of environments that draw more; others give every other picture


@dataclass(frozen=True)
class RecordedEpisode:
    """An episode that was played. seed: of its reset. number: of its environment, which determines its task. actions:
    each [1,A] or [1], in order. rewards: raw, of each. values: of the states before them; empty if the policy gives
    none. success: None if the environment does not report it, or the episode did not end. instruction: of its task."""

    seed: int
    number: int = 0
    actions: list[np.ndarray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    success: Success | None = None
    instruction: str = ""


def play(
    description: EnvDescription,
    policy: PolicyFunction,
    seed: int,
    *,
    number: int = 0,
    chunked: bool = False,
    begin: Begin | None = None,
    num_workers: int = 0,
    timeout_s: float = 60.0,
    variables: Mapping[str, str] | None = None,
    restarts: int = 0,
) -> RecordedEpisode:
    """Returns the episode of `seed` in environment `number`, at most `LONGEST` steps of it.

    `chunked`, `begin`: as of `evaluate`. The last four: as of `VectorEnv`. Raises ConfigError for an environment that
    cannot be built with the render mode, as its constructor may lack that argument.
    """
    episode = RecordedEpisode(seed, number)
    # with the render mode the physics is stepped as it will be for the video
    envs = VectorEnv(
        description,
        1,
        num_workers,
        timeout_s,
        render_mode="rgb_array",
        worker_variables=variables,
        restarts=restarts,
        numbers=[number],
    )
    try:
        observations = envs.reset([seed])
        if begin is not None:
            begin(1)
        act = one_by_one(policy) if chunked else policy
        ended = False
        while not ended and len(episode.actions) < LONGEST:
            episode.actions.append(np.array(act(observations)))
            result = envs.step(episode.actions[-1])
            episode.rewards.append(float(result.rewards[0]))
            observations, ended = result.observations, bool(result.ended[0])
        success = result.episodes[0].success if result.episodes else None
    finally:
        envs.close()
    return replace(episode, success=success)


def caption(episode: RecordedEpisode, step: int) -> str:
    """Returns the line under the picture before this step, whose reward it has."""
    parts = [f"seed {episode.seed}", f"step {step}", f"reward {episode.rewards[step]:.3g}"]
    parts.append(f"return {sum(episode.rewards[: step + 1]):.4g}")
    if step < len(episode.values):
        parts.append(f"value {episode.values[step]:.3g}")
    if episode.success is not None:
        ended = "at the end" if episode.success.at_end else "once" if episode.success.once else "never"
        parts.append(f"success {ended}")
    if episode.instruction:
        parts.append(f'"{" ".join(episode.instruction.split())}"')
    return "  ".join(parts)


def shown_episodes(video: Path, result: EvaluationResult) -> dict[Path, int]:
    """Returns the number of the episode of each file. `video` shows the highest return, NAME-worst the lowest one
    unless all are equal. If all episodes are invalid, `video` shows the first."""
    if not result.returns:
        return {video: 0}
    worst, best = (pick(range(len(result.returns)), key=result.returns.__getitem__) for pick in (min, max))
    shown = {video: result.numbers[best]}
    if result.returns[worst] < result.returns[best]:
        shown[video.with_name(f"{video.stem}-worst{video.suffix}")] = result.numbers[worst]
    return shown


class Video:
    """Draws episodes, one after the other, in a thread that steps and renders in a process of its own.

    timeout_s limits each step and each picture.
    """

    def __init__(self, description: EnvDescription, timeout_s: float = 60.0) -> None:
        self._description, self._timeout_s = description, timeout_s
        facts = inspect_env(description, limited=False)
        modes, rate = facts.render_modes, facts.render_rate
        self._uses_mujoco = facts.uses_mujoco
        self.refusal = "" if "rgb_array" in modes else f"{description.id} cannot draw (its render modes: {list(modes)})"
        self.steps_per_picture = max(2, rate // _PICTURES_PER_SECOND)
        self.pictures_per_second = rate / self.steps_per_picture
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._failure = self.refusal
        self.steps = (0, 0)  # drawn ones and all of the episode

    def refuse(self, error: ConfigError) -> None:
        """Draws nothing from now on, because of an error that `play` raised."""
        self.refusal = self._failure = error.problems[0].message

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, episodes: Mapping[Path, RecordedEpisode], facts: dict[str, int]) -> None:
        """Begins to draw an episode into each path and ends the drawing under way. `facts` and the rewards go into a
        JSON file beside it."""
        self.stop()
        self._failure = self.refusal
        if not self.refusal:
            self._thread = threading.Thread(target=self._draw, args=(episodes, facts), name="video", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the drawing under way, which leaves no file."""
        self._stopped.set()
        self.wait()
        self._stopped.clear()

    def wait(self, waiting: Callable[[], None] = lambda: None) -> str:
        """Waits for the last video and says why there is none; empty: it was drawn. `waiting` is called meanwhile."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.2)
            waiting()
        return self._failure

    def _draw(self, episodes: Mapping[Path, RecordedEpisode], facts: dict[str, int]) -> None:
        if sys.platform == "linux":  # there the thread and the processes it starts become nice, and no other thread
            os.nice(19)
        try:
            for path, episode in episodes.items():
                with_drawing(self._uses_mujoco, partial(self._record, episode, path, facts))
        except Exception as error:  # such as a full disk, or pictures of different sizes
            self._failure = f"{self._description.id}: {error}"

    def _record(self, episode: RecordedEpisode, path: Path, facts: dict[str, int], variables: dict[str, str]) -> None:
        import imageio.v2 as imageio

        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_name(f".{path.stem}.unfinished.mp4")
        envs = VectorEnv(
            self._description,
            1,
            1,
            self._timeout_s,
            render_mode="rgb_array",
            worker_variables=variables,
            numbers=[episode.number],
        )
        try:
            envs.reset([episode.seed])
            # the pixel format needs even sizes only; a larger block size would resize pictures
            rate, size = self.pictures_per_second, 2
            writer = imageio.get_writer(unfinished, format="FFMPEG", fps=rate, macro_block_size=size)
            with closing(writer):  # its own block would leave the encoder running after an error
                drawn = range(0, len(episode.actions), self.steps_per_picture)
                captions = [caption(episode, number) for number in drawn]
                for picture in with_captions(self._pictures(envs, episode), captions):
                    writer.append_data(picture)
            if self._stopped.is_set():
                return
            shown = {"steps_per_picture": self.steps_per_picture, "pictures_per_second": self.pictures_per_second}
            content = facts | {"seed": episode.seed, **shown, "rewards": episode.rewards}
            if episode.values:
                content["values"] = episode.values
            if episode.instruction:
                content["instruction"] = episode.instruction
            if episode.success is not None:
                content |= {f"success_{name}": int(value) for name, value in episode.success._asdict().items()}
            path.with_suffix(".json").write_text(json.dumps(content), encoding="utf-8")
            unfinished.replace(path)
        finally:
            envs.close()
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _pictures(self, envs: VectorEnv, episode: RecordedEpisode) -> Iterator[np.ndarray]:
        """Steps through the episode and yields its pictures; ends early once the drawing is stopped."""
        for number, action in enumerate(episode.actions):
            self.steps = number, len(episode.actions)
            if self._stopped.is_set():
                return
            if number % self.steps_per_picture == 0:
                yield envs.render()
            envs.step(action)
