"""Embodied runs: environments and policy exchange observations and actions through channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_platform.components.actor import EmbodiedActor
from rl_platform.components.environment import Environment
from rl_platform.components.policy_rollout import PolicyRollout
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.metrics import Reporter
from rl_platform.runners.ppo import Learners, sync_metrics
from rl_platform.runners.recovery import Recovery, Simulation
from rl_platform.runners.rollouts import Collected
from rl_platform.runtime import ComponentSpec, Runtime
from rl_platform.runtime.group import WorkerGroup


class EmbodiedTask:
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
        self.actor = self.groups[actor]
        self.learners = Learners(self.actor)
        self.recovery = Recovery(runtime, self.groups["rollout"])
        self.simulation = Simulation(self.recovery, self.parts()["env"])

    def sync_weights(self, version: int) -> dict[str, float]:
        weights = self.actor.publish(version, copy=self.config.runner.max_staleness > 0).wait()[0]
        return sync_metrics(self.recovery.sync(weights))

    def collect(self, step: int) -> Collected:
        with self.reporter.phase("collect"):
            batch, metrics = self.simulation.collect(lambda: self._at_work("collect", step))
            return Collected(batch, metrics | self.recovery.metrics())

    def validate(self, step: int) -> dict[str, float]:
        last = step >= self.config.runner.max_steps
        video = str(self.output_dir / "evaluation.mp4") if last and self.config.env.evaluation.video else None
        found = self.simulation.evaluate(lambda: self._at_work("evaluate", step, video))
        if found["note"]:
            self.reporter.note(found["note"])
        elif video:
            self.reporter.note(f"video of an evaluation episode: {video}")
        returns, lengths = found["returns"], found["lengths"]
        metrics = {"val/episodes": float(len(returns)), "val/invalid": float(found["invalid"])}
        if returns:
            mean = sum(returns) / len(returns)
            deviation = math.sqrt(sum((value - mean) ** 2 for value in returns) / len(returns))
            metrics |= {"val/return": mean, "val/return_std": deviation, "val/length": sum(lengths) / len(lengths)}
        return metrics

    def exhausted(self) -> bool:
        return False

    def learned_parts(self) -> Mapping[str, WorkerGroup]:
        return {"actor": self.actor}

    def parts(self) -> Mapping[str, WorkerGroup]:
        return {"env": self.groups["env"]}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state

    def finish(self) -> None:
        pass

    def _at_work(self, method: str, *arguments: Any) -> Any:
        """The result of an env's method that asks the rollout for actions."""
        stages = self.config.env.pipeline_stages  # each has one message under way
        to_policy = self.runtime.channel("observations", stages, ["env"], ["rollout"])
        from_policy = self.runtime.channel("actions", stages, ["rollout"], ["env"])
        with self.recovery.working(to_policy, from_policy) as calls:
            calls.append(serving := self.groups["rollout"].serve(to_policy, from_policy))
            calls.append(working := getattr(self.groups["env"], method)(*arguments, to_policy, from_policy))
            found = working.wait(on_progress=self.reporter.progress)[0]
            to_policy.close()
            serving.wait()
            from_policy.close()
        return found
