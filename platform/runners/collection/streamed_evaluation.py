"""Log-probs and values of finished trajectories while others are still being generated.

A part of the batch is evaluated as soon as all of its rows have arrived. The rows of a part depend on their positions
in the batch alone, not on the order in which they finish, so two runs evaluate the same parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from rl_platform.config.schema import Config
from rl_platform.placement.estimates.streaming import part_rows, streaming_chains
from rl_platform.placement.offload_order import OffloadOrder
from rl_platform.records import Prompt, RolloutBatch, Trajectory, numbered
from rl_platform.runtime.worker_group import WorkerGroup

Fields = dict[str, Tensor]
BatchOf = Callable[[Sequence[Trajectory]], RolloutBatch]


def streaming(
    config: Config, order: OffloadOrder, groups: Mapping[str, WorkerGroup], batch_of: BatchOf
) -> StreamedEvaluation | None:
    """Returns None if everything is evaluated after the generation: also with agents, which decide about the number of
    rows."""
    chains = streaming_chains(config, order.layout, order.leaving)
    if not chains or config.rollout.agent is not None:
        return None
    rows = part_rows(config, order.layout, [name for chain in chains for name in chain])
    return StreamedEvaluation([[groups[name] for name in chain] for chain in chains], rows, batch_of)


class StreamedEvaluation:
    """chains: worker groups that evaluate one after another; chains run side by side. rows: of a part. batch_of: makes
    a batch of trajectories, in their order.

    For every rollout batch, call `begin`, `add` until all of its trajectories have arrived, and `fields`.
    """

    def __init__(self, chains: Sequence[Sequence[WorkerGroup]], rows: int, batch_of: BatchOf) -> None:
        self._chains, self._rows, self._batch_of = chains, rows, batch_of
        self._evaluations: list[tuple[int, Future[Fields]]] = []
        self._workers = [ThreadPoolExecutor(1, thread_name_prefix="runner (evaluating)") for _ in chains]

    def begin(self, prompts: Sequence[Prompt], samples: int) -> None:
        """Prepares for a batch of `samples` responses to each prompt."""
        last = {prompt.index: position for position, prompt in enumerate(prompts)}
        responses = [(prompt.index, sample) for prompt, sample in numbered(prompts, samples)]
        order = sorted(responses, key=lambda response: (last[response[0]], response[1]))
        self._places = {response: place for place, response in enumerate(order)}
        self._parts: dict[int, dict[int, Trajectory]] = defaultdict(dict)
        self._total = len(order)
        self._evaluations = []

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Adds finished trajectories, in any order. Raises errors of the evaluations so far."""
        for _, evaluation in self._evaluations:
            if evaluation.done():
                evaluation.result()
        for trajectory in trajectories:
            place = self._places[trajectory.prompt.index, trajectory.sample]
            number = place // self._rows
            self._parts[number][place] = trajectory
            if len(self._parts[number]) == min(self._rows, self._total - number * self._rows):
                part = self._parts.pop(number)
                self._evaluate(min(part), [part[row] for row in sorted(part)])

    def settle(self) -> None:
        """Returns when no component evaluates. The results, and errors, stay for `fields`."""
        wait([evaluation for _, evaluation in self._evaluations])

    def fields(self, batch: RolloutBatch) -> Fields:
        """Returns the fields of all rows of `batch`, as soon as all evaluations are done. Raises their errors."""
        assert len(batch) == self._total
        whole: Fields = {}
        for first, evaluation in self._evaluations:
            for name, tensor in evaluation.result().items():
                if name not in whole:
                    whole[name] = torch.zeros((*batch.action_mask.shape, *tensor.shape[2:]))
                whole[name][first : first + len(tensor), : tensor.shape[1]] = tensor
        self._evaluations = []
        return whole

    def _evaluate(self, first: int, trajectories: Sequence[Trajectory]) -> None:
        batch = self._batch_of(trajectories)
        for worker, chain in zip(self._workers, self._chains, strict=True):
            self._evaluations.append((first, worker.submit(_evaluated, chain, batch)))


def _evaluated(chain: Sequence[WorkerGroup], batch: RolloutBatch) -> Fields:
    fields: Fields = {}
    for group in chain:
        fields |= group.evaluate(batch.with_fields(fields)).wait()[0]
    return fields
