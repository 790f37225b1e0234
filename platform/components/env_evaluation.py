"""Evaluation episodes of the env component, in environments of their own, and videos of the best and the worst one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_platform.components.policy_rollout import Observations, Policy
from rl_platform.components.recording import HiddenStates
from rl_platform.envs.embodied.evaluate import EvaluationResult, evaluate
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.errors import ConfigError
from rl_platform.extras import required

if TYPE_CHECKING:
    from rl_platform.components.environment import Environment
    from rl_platform.envs.embodied.pictures.video import Video


class EnvEvaluation:
    """Evaluates with the frozen normalisers of `env`, which is env rank 0."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self.envs: VectorEnv | None = None  # environments of the last evaluation, where they can be used again
        self._video: Video | None = None  # made for the first one

    def run(self, step: int, video: str | None, last: bool, deterministic: bool, policy: Policy) -> EvaluationResult:
        """Returns the results of the episodes of `env.evaluation`.

        video: a file into which the best episode is drawn after the call, and the worst one into another file;
        `drawn` waits for them. A drawing under way is ended if this one is the `last`, which is left out otherwise.
        """
        env = self._env
        settings, chunked = env.env.evaluation, not env.levels.single
        acting = _Acting(env, policy, step, deterministic)
        envs, self.envs = self.envs or self._open(), None
        envs.warned_as(env.envs)
        try:
            result = evaluate(
                envs,
                acting,
                settings.episodes,
                settings.seed,
                chunked=chunked,
                begin=acting.begin,
                on_ended=acting.count,
            )
            # simulators of backends start, and JAX compiles, once for all evaluations
            self.envs = envs if envs.native or env.description.own_backend else None
        finally:
            if self.envs is None:
                envs.close()
            env.envs.warned_as(envs)
        if video:
            self._draw(Path(video), result, acting, last)
        return result

    def _draw(self, video: Path, result: EvaluationResult, acting: _Acting, last: bool) -> None:
        """Plays the episodes that are shown once more, and begins to draw them."""
        with required("rl_platform.envs.embodied.pictures", "env.evaluation.video"):
            from rl_platform.envs.embodied.pictures.video import Video, play, shown_episodes
        env, settings = self._env, self._env.env
        self._video = self._video or Video(env.description, settings.step_timeout_s)
        if self._video.refusal or (self._video.busy and not last):
            return
        episodes = {}
        for path, number in shown_episodes(video, result).items():
            acting.number, acting.values = number, []
            try:
                episode = play(
                    env.description,
                    acting,
                    settings.evaluation.seed + number,
                    number=number,
                    chunked=not env.levels.single,
                    begin=acting.begin,
                    num_workers=min(settings.num_workers, 1),
                    timeout_s=settings.step_timeout_s,
                    variables=env.drawing,
                    restarts=settings.restarts,
                )
            except ConfigError as error:
                self._video.refuse(error)
                return
            instruction = env.instructions[number % len(env.instructions)] if env.instructions else ""
            episodes[path] = replace(episode, values=acting.values, instruction=instruction)
        self._video.start(episodes, {"step": acting.step})

    def drawn(self) -> str:
        """Waits for the video and says why there is none; empty: it was drawn."""
        if (video := self._video) is None:
            return "the process that drew it has ended"
        return video.wait(lambda: self._env.context.progress.update(*video.steps, "steps of the video"))

    def _open(self) -> VectorEnv:
        env, settings = self._env, self._env.env
        count = env.tasks.whole_turns(min(settings.evaluation.episodes, settings.num_envs))
        workers, timeout = min(settings.num_workers, count), settings.step_timeout_s
        variables, restarts = env.drawing, settings.restarts
        return VectorEnv(env.description, count, workers, timeout, worker_variables=variables, restarts=restarts)

    def close(self) -> None:
        if self._video is not None:
            self._video.stop()
        if self.envs is not None:
            self.envs.close()


class _Acting:
    """The policy as a function of raw observations.

    number: of the first environment. values: collects those of the states, while an episode is played for a video.
    """

    def __init__(self, env: Environment, policy: Policy, step: int, deterministic: bool) -> None:
        self._env, self._policy, self.step, self._deterministic = env, policy, step, deterministic
        self._calls = self._ended = self.number = 0
        self._memory: HiddenStates | None = None
        self.values: list[float] | None = None

    def begin(self, num_envs: int) -> None:
        """Sets the hidden states to 0, because all environments begin an episode."""
        memory = self._env.memory
        self._memory = None if memory is None else HiddenStates(num_envs, memory.array.shape[1])

    def count(self, ended: int) -> None:
        self._ended = ended

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        env, memory = self._env, self._memory
        self._calls += 1
        env.context.progress.update(self._calls, 0, f"steps, {self._ended} of {env.env.evaluation.episodes} episodes")
        self._policy.request(
            Observations(
                env.normalized(observations),
                ("evaluate", self.step, self._calls),
                self._deterministic,
                hidden_states=None if memory is None else memory.array,
                tasks=env.tasks.read(slice(self.number, self.number + len(observations))),
                valued=self.values is not None,
            )
        )
        chosen = self._policy.actions(len(observations))
        if self.values is not None and chosen.values is not None:
            self.values.append(float(chosen.values[0]))
        if memory is not None:
            assert chosen.hidden_states is not None
            memory.array = chosen.hidden_states
        return chosen.to_execute
