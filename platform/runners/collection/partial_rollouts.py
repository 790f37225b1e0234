"""Prompts whose responses take several steps: a step trains on those that complete first, the others continue.

More prompts are open than a step trains on. When enough are complete, the others are cut (`cut_generation.py`).
They are stored here with the log-probs and versions of their tokens, and continue in the next step with its weights.
The last steps begin fewer prompts, so that none is left over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_platform.config.schema import Config
from rl_platform.config.schema.rollout import CHANNEL_CAPACITY
from rl_platform.envs.reasoning.prompts import PromptLoader
from rl_platform.errors import CheckpointError
from rl_platform.records import Prompt, StateDict, Trajectory
from rl_platform.reporter import Reporter
from rl_platform.runners.collection.trajectory_states import from_state, state_of
from rl_platform.runners.recovery import Recovery
from rl_platform.runners.sample_ledger import SampleLedger
from rl_platform.runtime import Runtime
from rl_platform.runtime.worker_group import WorkerGroup

Group = list[Trajectory]  # all responses to one prompt, in the order of their numbers


class PartialRollouts:
    """`rollout.partial_rollout`. Every prompt of `loader` is in `open` once, from its beginning until it is taken."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        recovery: Recovery,
        groups: Mapping[str, WorkerGroup],
        reporter: Reporter,
        loader: PromptLoader,
        ledger: SampleLedger,
    ) -> None:
        self.config, self.runtime, self.recovery = config, runtime, recovery
        self.groups, self.reporter, self.loader = groups, reporter, loader
        self.ledger = ledger
        self.wanted = config.data.train_batch_size  # groups of a step
        self.open: list[Group] = []  # the oldest prompt first

    def collect(self, step: int) -> tuple[list[Trajectory], dict[str, float]]:
        """Returns the scored responses of one step, group by group, and metrics.

        After the death of a process all responses restart from their state at the beginning of this step, with the same
        random numbers. A response that had been cut would otherwise continue with numbers that it has used already, and
        others would be cut than in an undisturbed run.
        """
        if self.config.runner.stale == "drop":
            self._drop(self.config.oldest_version(step))
        self._begin(step)
        begun = [tuple(group) for group in self.open]

        def generate() -> None:
            self.open = [list(group) for group in begun]
            self._generate(step)

        self.recovery.run(generate)
        complete = [group for group in self.open if all(one.complete for one in group)]
        taken = complete[: self.wanted]
        self.open = [group for group in self.open if all(group is not other for other in taken)]
        trajectories = [one for group in taken for one in group]
        return trajectories, self._metrics(trajectories)

    def _drop(self, oldest: int) -> None:
        """Responses that began with weights before version `oldest` begin again: they are dropped and issued anew."""
        for group in self.open:
            for number, one in enumerate(group):
                if one.token_ids and one.weights_version < oldest:
                    self.ledger.dropped([one])
                    self.ledger.issue([one.prompt.index], 1)
                    group[number] = _empty(one.prompt, one.sample)

    def _begin(self, step: int) -> None:
        """Adds prompts, at most as many as the remaining steps will train on."""
        steps = self.config.runner.max_steps - step
        if (epochs := self.config.runner.max_epochs) is not None:
            steps = min(steps, -(-(len(self.open) + self.loader.left(epochs)) // self.wanted))
        missing = min(self.config.prompts_in_flight, steps * self.wanted) - len(self.open)
        prompts = self.loader.next_batch(max(0, missing))
        self.ledger.issue((prompt.index for prompt in prompts), self.config.algorithm.group_size)
        for prompt in prompts:
            self.open.append(self._not_begun(prompt))

    def _not_begun(self, prompt: Prompt) -> Group:
        """Empty responses. A prompt that is still open from an earlier epoch gets other sample numbers."""
        size = self.config.algorithm.group_size
        known = {one.sample for group in self.open for one in group if one.prompt.index == prompt.index}
        first = 0
        while first in known:
            first += size
        return [_empty(prompt, first + number) for number in range(size)]

    def _generate(self, step: int) -> None:
        """Generates until enough of the open prompts are complete."""
        waiting = [group for group in self.open if not all(one.complete for one in group)]
        needed = self.wanted - (len(self.open) - len(waiting))
        if needed <= 0:
            return
        places = {_name(one): (group, number) for group in waiting for number, one in enumerate(group)}
        total, arrived = sum(not one.complete for group in waiting for one in group), 0
        generated = self.runtime.channel("trajectories", CHANNEL_CAPACITY, ["rollout"], ["reward"])
        done = self.runtime.channel("scored", CHANNEL_CAPACITY, ["reward", "rollout"], ["runner"])
        sampling = self.config.rollout.sampling
        with self.recovery.working(generated, done) as calls:
            calls.append(scoring := self.groups["reward"].stream(generated, done))
            arguments = waiting, needed, sampling, step, generated, done, self.recovery.version
            calls.append(generating := self.groups["rollout"].generate_until(*arguments))
            while arrived < total:
                for one in done.get_many(total - arrived):  # complete and scored, or cut
                    group, number = places[_name(one)]
                    group[number] = one
                    arrived += 1
                self.reporter.progress(arrived, total, "responses")
            generating.wait()
            generated.close()
            scoring.wait()
            done.close()

    def _metrics(self, trained: Sequence[Trajectory]) -> dict[str, float]:
        """open_prompts: not trained on yet; cut: their unfinished responses that have begun; continued_frac: of the
        trained responses those of several versions; stale_token_frac: of the trained tokens those of weights older than
        the ones that this step generated with."""
        tokens = sum(len(one.token_ids) for one in trained)
        spans = [span for one in trained for span in one.tokens_by_version]
        stale = sum(count for version, count in spans if version < self.recovery.version)
        unfinished = [one for group in self.open for one in group if not one.complete]
        return {
            "partial_rollout/open_prompts": float(len(self.open)),
            "partial_rollout/cut": float(sum(bool(one.token_ids) for one in unfinished)),
            "partial_rollout/continued_frac": sum(bool(one.segments) for one in trained) / len(trained),
            "staleness/stale_token_frac": stale / max(tokens, 1),
        }

    def state_dict(self) -> StateDict:
        """Returns the open prompts with their incomplete responses."""
        return {"open": [[state_of(one) for one in group] for group in self.open]}

    def load_state_dict(self, state: StateDict, prompts: Mapping[int, Prompt]) -> None:
        """Loads the prompts of `state`. Raises CheckpointError if they are of another group size."""
        groups = [[from_state(one, prompts) for one in group] for group in state["open"]]
        size = self.config.algorithm.group_size
        for group in groups:
            if len(group) != size:
                raise CheckpointError(
                    f"the checkpoint holds prompts with {len(group)} responses each, algorithm.group_size is {size}: "
                    "resume with the group size it was made with"
                )
        self.open = groups


def _empty(prompt: Prompt, sample: int) -> Trajectory:
    """Returns a response that has not begun."""
    return Trajectory(prompt, sample, (), (), "abort", -1)


def _name(one: Trajectory) -> tuple[int, int]:
    return one.prompt.index, one.sample
