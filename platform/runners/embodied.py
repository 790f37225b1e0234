"""Embodied runs: environments and policy exchange observations and actions through channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_platform.components.actor import EmbodiedActor
from rl_platform.components.env_ranks import Peers, Shares, joined_states
from rl_platform.components.env_tasks import EnvTasks
from rl_platform.components.environment import Environment
from rl_platform.components.policy_ranks import PolicyRanks
from rl_platform.components.policy_rollout import PolicyRollout
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.embodied.success import success_rates
from rl_platform.metrics import Reporter
from rl_platform.runners.ppo import Learners, sync_metrics
from rl_platform.runners.recovery import Recovery, Simulation
from rl_platform.runners.rollouts import Collected
from rl_platform.runtime import ComponentSpec, Runtime
from rl_platform.runtime.worker_group import Handle, WorkerGroup


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
        # one policy beside the environments that waits for them anyway: it acts in their thread
        alone = self.groups["rollout"].world_size == 1 and config.env.pipeline_stages == 1
        self.acts_there: bool = alone and self.recovery.run(lambda: self.groups["env"].rank(0).finds_policy().result())
        if self.groups["env"].world_size > 1:
            self._with_peers(lambda peers: self.groups["env"].rank(0).begin(peers))

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
        found = self.evaluate(step, video, self.config.env.evaluation.deterministic)
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
        tasks = EnvTasks(self.config.env, reads_instructions=False)
        metrics |= tasks.metrics("val", found["numbers"], returns, found["successes"])
        return metrics | success_rates(found["successes"], "val")

    def evaluate(self, step: int, video: str | None, deterministic: bool) -> dict[str, Any]:
        """What `Environment.evaluate` finds. Sampled actions are the same ones for the same `step`."""
        found: dict[str, Any] = self.simulation.evaluate(lambda: self._at_work("evaluate", step, video, deterministic))
        return found

    def exhausted(self) -> bool:
        return False

    def learned_parts(self) -> Mapping[str, WorkerGroup]:
        return {"actor": self.actor}

    def parts(self) -> Mapping[str, Any]:
        env = self.config.env
        shares = Shares(env.num_envs, env.pipeline_stages, self.groups["env"].world_size)
        return {"env": _EnvPart(self.groups["env"], shares)}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state

    def finish(self) -> None:
        pass

    def _at_work(self, method: str, *arguments: Any) -> Any:
        """The result of a method of env rank 0 that asks the rollout for actions. Collecting is all env ranks' work."""
        rollout = self.groups["rollout"]
        if self.acts_there:
            return self._work(method, arguments, None)
        capacity = self.config.env.pipeline_stages * rollout.world_size  # each has one message under way
        to_policy = self.runtime.channel("observations", capacity, ["env[0]"], ["rollout"])
        from_policy = self.runtime.channel("actions", capacity, ["rollout"], ["env[0]"])
        with self.recovery.working(to_policy, from_policy) as calls:
            calls.append(serving := rollout.serve(to_policy, from_policy))
            found = self._work(method, arguments, PolicyRanks(to_policy, from_policy, rollout.world_size))
            to_policy.close()
            serving.wait()
            from_policy.close()
        return found

    def _work(self, method: str, arguments: tuple[Any, ...], policy: PolicyRanks | None) -> Any:
        env = self.groups["env"].rank(0)
        if method == "collect":
            return self._with_peers(lambda peers: env.collect(*arguments, policy, peers))
        with self.recovery.working() as calls:
            calls.append(working := getattr(env, method)(*arguments, policy))
            return working.wait(on_progress=self.reporter.progress)[0]

    def _with_peers(self, call: Callable[[Peers | None], Handle]) -> Any:
        """The result of a call on env rank 0 with which the other env ranks simulate; None: there are no others."""
        env = self.groups["env"]
        if env.world_size == 1:
            with self.recovery.working() as calls:
                calls.append(working := call(None))
                return working.wait(on_progress=self.reporter.progress)[0]
        ranks = range(1, env.world_size)
        labels, capacity = [f"env[{rank}]" for rank in ranks], self.config.env.pipeline_stages * len(ranks)
        orders = self.runtime.channel("orders", capacity, ["env[0]"], labels)
        answers = self.runtime.channel("answers", capacity, labels, ["env[0]"])
        peers = Peers(orders, answers)
        with self.recovery.working(orders, answers) as calls:
            calls.append(simulating := env.on(ranks).simulate(peers))
            calls.append(working := call(peers))
            found = working.wait(on_progress=self.reporter.progress)[0]
            orders.close()
            simulating.wait()
            answers.close()
        return found


@dataclass(frozen=True)
class _EnvPart:
    """The env group as a part of a checkpoint, which is the same for any number of ranks."""

    group: WorkerGroup
    shares: Shares

    def state_dict(self) -> _Saving:
        return _Saving(self.group.state_dict(), self.shares)

    def load_state_dict(self, state: dict[str, Any]) -> Handle:
        return self.group.load_state_dict(state)


@dataclass(frozen=True)
class _Saving:
    handle: Handle
    shares: Shares

    def wait(self) -> list[dict[str, Any]]:
        """The state of all ranks in one."""
        states = self.handle.wait()
        return [{**states[0], "envs": joined_states([state["envs"] for state in states], self.shares)}]
