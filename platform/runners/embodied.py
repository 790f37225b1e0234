"""Embodied runs: environments and policy exchange observations and actions through channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from rl_platform.components.actor import EmbodiedActor
from rl_platform.components.env_tasks import EnvTasks
from rl_platform.components.environment import Environment
from rl_platform.components.policy_rollout import PolicyRollout, RemotePolicy
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.evaluate import EvaluationResult
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.embodied.success import success_rates
from rl_platform.records import RolloutBatch, StateDict, Weights
from rl_platform.reporter import Episode, Reporter
from rl_platform.runners.component_groups import EmbodiedActorGroup, LearnerGroup, TypedGroups
from rl_platform.runners.recovery import EnvPart, Recovery, RestorableEnvs
from rl_platform.runners.rollouts import Collected
from rl_platform.runners.sample_ledger import SampleLedger, held_rows
from rl_platform.runners.task_runner import Learners
from rl_platform.runtime import ComponentSpec, Runtime
from rl_platform.runtime.weights_token import WeightsToken
from rl_platform.runtime.worker_group import Handle

if TYPE_CHECKING:
    from rl_platform.components.env_ranks.all_envs import Peers

T = TypeVar("T")


class EmbodiedRunner:
    """`loss_type: actor_critic`: one policy with a value head. `actor`: the name it is placed under."""

    def __init__(
        self, config: Config, runtime: Runtime, reporter: Reporter, output_dir: Path, spaces: EnvSpaces, actor: str
    ) -> None:
        self.config, self.runtime, self.reporter, self.output_dir = config, runtime, reporter, output_dir
        specs = {
            actor: ComponentSpec(EmbodiedActor, {"config": config, "spaces": spaces}),
            "rollout": ComponentSpec(PolicyRollout, {"config": config, "spaces": spaces}),
            "env": ComponentSpec(Environment, {"config": config}),
        }
        self.groups = runtime.start(specs)
        self.typed = cast(TypedGroups, self.groups)
        self.actor = cast(EmbodiedActorGroup, self.groups[actor])
        self.video: Path | None = None  # of the latest validation
        self.learners = Learners(self.actor)
        self.ledger = SampleLedger()
        self.recovery = Recovery(runtime, self.typed["rollout"])
        self.simulation = RestorableEnvs(self.recovery, self.parts()["env"])
        # a single rollout rank in the process of env rank 0 would only wait for it: it acts in its thread
        alone = self.typed["rollout"].world_size == 1 and config.env.pipeline_stages == 1
        self.acts_in_env: bool = alone and self.recovery.run(lambda: self.typed["env"].rank(0).finds_policy().wait()[0])
        if config.env.backend == "mujoco_warp":
            reporter.note(self.recovery.run(lambda: self.typed["env"].rank(0).rollout_path(self.acts_in_env).wait()[0]))
        if self.typed["env"].world_size > 1:
            self._with_peers(lambda peers: self.typed["env"].rank(0).begin(peers))

    def warm_start(self) -> dict[str, float]:
        if self.config.runner.warm_start is None:
            return {}
        with self.reporter.phase("warm start"):
            return self.actor.warm_start().wait(on_progress=self.reporter.progress)[0]

    def publish(self, version: int) -> Weights | WeightsToken:
        return self.actor.publish(version, copy=self.config.runner.max_staleness > 0).wait()[0]

    def receive(self, weights: Weights | WeightsToken) -> dict[str, float]:
        return self.simulation.sync(weights)

    def update(self, weights: Weights | WeightsToken) -> bool:
        raise NotImplementedError("rollout.on_update is refused for embodied runs")

    def collect(self, step: int) -> Collected:
        groups = self._groups(step)
        self.ledger.issue(groups, self.config.algorithm.group_size if self.config.whole_episodes else 1)
        with self.reporter.phase("collect"):
            batch, metrics = self.simulation.collect(lambda: self._collect(step))
        batch = replace(batch, group_ids=batch.group_ids + groups.start)
        if self.config.runner.max_staleness:
            batch = replace(batch, versions=torch.full((len(batch),), self.recovery.version))
        return Collected(batch, metrics | self.recovery.metrics())

    def _groups(self, step: int) -> range:
        """Returns the group ids of a rollout, which no other rollout of the run has."""
        env, count = self.config.env, self.config.env.num_envs
        if self.config.whole_episodes:
            assert env.max_episode_steps is not None
            count = count // self.config.algorithm.group_size * (env.rollout_steps // env.max_episode_steps)
        return range(step * count, (step + 1) * count)

    def validate(self, step: int) -> dict[str, float]:
        settings, last = self.config.env.evaluation, step >= self.config.runner.max_steps
        self.video = self.output_dir / "evaluation.mp4" if settings.video else None
        evaluation = self.evaluate(step, self.video, settings.deterministic, last=last)
        self.reporter.episodes(step, self._episodes(evaluation))
        returns, lengths = evaluation.returns, evaluation.lengths
        metrics = {"val/episodes": float(len(returns)), "val/invalid": float(evaluation.invalid)}
        if returns:
            mean = sum(returns) / len(returns)
            deviation = math.sqrt(sum((value - mean) ** 2 for value in returns) / len(returns))
            metrics |= {"val/return": mean, "val/return_std": deviation, "val/length": sum(lengths) / len(lengths)}
        tasks = EnvTasks(self.config.env, reads_instructions=False)
        metrics |= tasks.metrics("val", evaluation.numbers, returns, evaluation.successes)
        return metrics | success_rates(evaluation.successes, "val")

    def evaluate(self, step: int, video: Path | None, deterministic: bool, *, last: bool) -> EvaluationResult:
        """Returns the result of `Environment.evaluate`. Equal steps sample equal actions."""
        file = str(video) if video else None

        def evaluate(policy: RemotePolicy | None) -> EvaluationResult:
            env = self.typed["env"].rank(0)  # of this attempt: a process may have been started again
            return self._alone(lambda: env.evaluate(step, file, last, deterministic, policy))

        return self.simulation.evaluate(lambda: self._with_policy(evaluate))

    def drawn(self) -> str:
        """Waits for the video that `evaluate` began and says why there is none; empty: it was drawn."""
        with self.reporter.phase("draw"):
            return self._alone(lambda: self.typed["env"].rank(0).drawn())

    def _episodes(self, evaluation: EvaluationResult) -> list[Episode]:
        """Returns the episodes of an evaluation, with the invalid ones."""
        settings, tasks = self.config.env.evaluation, [task.name for task in self.config.env.tasks] or [""]
        valid = {number: place for place, number in enumerate(evaluation.numbers)}
        episodes = []
        for number in range(settings.episodes):
            episode = Episode(settings.seed + number, tasks[number % len(tasks)])
            if (place := valid.get(number)) is not None:
                episode = episode._replace(
                    return_=evaluation.returns[place],
                    length=evaluation.lengths[place],
                    finish_reason="terminated" if evaluation.terminated[place] else "truncated",
                    success=evaluation.successes[place],
                )
            episodes.append(episode)
        return episodes

    def trained(self, batch: RolloutBatch) -> dict[str, float]:
        self.ledger.trained(batch.group_ids.tolist())
        return self.ledger.metrics() if self.config.runner.max_staleness else {}

    def check_samples(self, waiting: Sequence[RolloutBatch]) -> None:
        self.ledger.check(held_rows(waiting))

    def log_tokens(self, step: int, batch: RolloutBatch) -> None:
        """Does nothing: a transition has no tokens."""

    def exhausted(self) -> bool:
        return False

    def learned_parts(self) -> Mapping[str, LearnerGroup]:
        return {"actor": self.actor}

    def parts(self) -> Mapping[str, EnvPart]:
        return {"env": EnvPart(self.typed["env"], self.config.env)}

    def state_dict(self) -> StateDict:
        return {"samples": self.ledger.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        if "samples" in state:
            self.ledger.load_state_dict(state["samples"])

    def finish(self, step: int) -> None:
        """Writes the trained policy with its observation normaliser; then waits for the video, drawn meanwhile."""
        with self.reporter.phase("export"):
            normalizer = self.typed["env"].rank(0).normalizer().wait()[0]
            folder = self.actor.export(str(self.output_dir / "model"), step, normalizer).wait()[0]
        self.reporter.note(f"trained policy, for rl_platform.load_policy: {folder}")
        if self.video is not None:
            if failure := self.drawn():
                self.reporter.note(f"no video: {failure}")
            else:
                self.reporter.video(self.video)
                self.reporter.note(f"video of an evaluation episode: {self.video}")

    def _collect(self, step: int) -> tuple[RolloutBatch, dict[str, float]]:
        """Returns one rollout, which all env ranks simulate."""
        env = self.typed["env"].rank(0)
        return self._with_policy(lambda policy: self._with_peers(lambda peers: env.collect(step, policy, peers)))

    def _with_policy(self, work: Callable[[RemotePolicy | None], T]) -> T:
        """Returns the result of `work` on env rank 0 while the rollout serves.

        The argument of `work` is None if the policy is in the process of that rank.
        """
        rollout = self.typed["rollout"]
        if self.acts_in_env:
            return work(None)
        capacity = self.config.env.pipeline_stages * rollout.world_size  # each has one message in flight
        to_policy = self.runtime.channel("observations", capacity, ["env[0]"], ["rollout"])
        from_policy = self.runtime.channel("actions", capacity, ["rollout"], ["env[0]"])
        with self.recovery.working(to_policy, from_policy) as calls:
            calls.append(serving := rollout.serve(to_policy, from_policy))
            result = work(RemotePolicy(to_policy, from_policy, rollout.world_size))
            to_policy.close()
            serving.wait()
            from_policy.close()
        return result

    def _alone(self, call: Callable[[], Handle[T]]) -> T:
        """Returns the result of a call on env rank 0."""
        with self.recovery.working() as calls:
            calls.append(working := call())
            return working.wait(on_progress=self.reporter.progress)[0]

    def _with_peers(self, call: Callable[[Peers | None], Handle[T]]) -> T:
        """Returns the result of a call on env rank 0 while the other env ranks simulate.

        The argument of the call is None if there are no other ranks.
        """
        env = self.typed["env"]
        if env.world_size == 1:
            return self._alone(lambda: call(None))
        from rl_platform.components.env_ranks.all_envs import Peers

        ranks = range(1, env.world_size)
        labels, capacity = [f"env[{rank}]" for rank in ranks], self.config.env.pipeline_stages * len(ranks)
        orders = self.runtime.channel("orders", capacity, ["env[0]"], labels)
        answers = self.runtime.channel("answers", capacity, labels, ["env[0]"])
        peers = Peers(orders, answers)
        with self.recovery.working(orders, answers) as calls:
            calls.append(simulating := env.on(ranks).simulate(peers))
            calls.append(working := call(peers))
            result = working.wait(on_progress=self.reporter.progress)[0]
            orders.close()
            simulating.wait()
            answers.close()
        return result
