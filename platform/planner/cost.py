"""Estimates the seconds of each phase of a PPO step from arithmetic, memory traffic and transfers.

A phase takes as long as the slowest of its parts: products at a usual share of the device's peak, bytes moved,
transfers between ranks. Decoding reads all weights and the cache and launches all kernels for every token. Responses
have their greatest length. Scores of a reward model count; other scoring runs beside generation. fsdp gathers the
weights for every micro-batch; Megatron exchanges activations, and gradients and weights once per optimizer step.
`calibration` corrects phases by the measurements of an earlier run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rl_platform.config.rollout_backend import HOSTED
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import estimator_needs
from rl_platform.config.schema.models import Parallel
from rl_platform.placement.hardware import Device
from rl_platform.placement.layout import Layout, Part
from rl_platform.placement.memory import (
    MemoryModel,
    bytes_of,
    copies,
    layout_of_learner,
    longest,
    micro_batch_rows,
    rows_per_step,
    running_sequences,
    trained_parameters,
)
from rl_platform.placement.model_shape import FLOAT, ModelShape, Shape
from rl_platform.placement.offload_order import OffloadOrder, PhaseMoves

TRAINING_SHARE = 0.4  # of the peak arithmetic, reached by forward and backward passes
STREAM_SHARE = 0.7  # of the peak bandwidth, reached by reading weights and caches
TRANSFER_SHARE = 0.7  # of a link's bandwidth, reached by collectives
BACKWARD = 3  # forward and backward, in forwards
BACKWARD_OF_ADAPTERS = 2  # without gradients of the frozen matrices
OPTIMIZER_BYTES = 7 * FLOAT  # AdamW reads weight, gradient and two moments of a parameter and writes three of them
HOST_LINK = 20e9  # bytes/s between a GPU and pinned host memory, one way: PCIe 4.0 x16
TRANSFER_S = 50e-6  # one collective or broadcast that moves nothing
LAUNCH_S = 250e-6  # the operators of one layer, for any batch: measured on a core, as in a GPU's queue
ENV_STEP_S = 30e-6  # one environment, one step, one core: MuJoCo's HalfCheetah
ACT_S = 150e-6  # the policy's forward for one step of all environments

Bounds = dict[str, float]
"""Seconds that a phase takes by each thing it must do: it takes as long as the slowest of them."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one phase, and what bounds it: arithmetic, memory traffic, launches, transfers, simulation."""

    seconds: float
    bound: str


@dataclass(frozen=True)
class Correction:
    """The measured seconds of a phase in multiples of the prediction, and the bound of the prediction.

    A slower phase is slower in its bound only; a faster one is faster in all parts.
    """

    factor: float
    bound: str

    def apply(self, bounds: Bounds) -> Bounds:
        return {
            name: seconds * self.factor if name == self.bound or self.factor < 1 else seconds
            for name, seconds in bounds.items()
        }


def waves(config: Config, layout: Layout) -> int:
    """Returns how often a rollout rank fills its slots with new sequences in a step."""
    if config.runner.task_type == "embodied":
        return 1
    ranks = layout.parts["rollout"].ranks
    return math.ceil(-(-rows_per_step(config) // ranks) / running_sequences(config, ranks))


@dataclass(frozen=True)
class SwapCost:
    """The moves at the beginning of a phase and their seconds."""

    moves: PhaseMoves
    seconds: float


def swaps(order: OffloadOrder, memory: MemoryModel, device: Device) -> dict[str, SwapCost]:
    """Returns the swaps of phases with moves; those of a phase with several parts (`alternating`) are added up.

    Every rank has its own link to host memory.
    """
    rate = min(HOST_LINK, device.hbm * STREAM_SHARE)
    costs: dict[str, SwapCost] = {}
    for moves in order.phases:
        if moves.leaves or moves.comes:
            seconds = memory.moved((*moves.leaves, *moves.comes)) / rate
            earlier = costs.get(moves.phase, SwapCost(moves, 0.0))
            costs[moves.phase] = replace(earlier, seconds=earlier.seconds + seconds)
    return costs


class CostModel:
    """Estimates for one config. device: of every rank. calibration: corrections by phase."""

    def __init__(
        self,
        config: Config,
        shapes: Mapping[str, Shape],
        device: Device,
        calibration: Mapping[str, Correction] | None = None,
    ) -> None:
        self.config, self.shapes, self.device = config, shapes, device
        self.calibration = calibration or {}
        self.rows = rows_per_step(config)
        greedy = config.data.train_batch_size if estimator_needs(config.algorithm.adv_type).greedy else 0
        self.responses = self.rows + greedy

    def phases(self, layout: Layout) -> dict[str, tuple[str, Cost]]:
        """Returns phase -> (component, cost) in the order of a step, without phases of unknown models."""
        embodied = self.config.runner.task_type == "embodied"
        policy = layout.policy
        wanted: list[tuple[str, str, Callable[[Layout], Bounds]]] = [("sync weights", policy, self._sync)]
        wanted.append(("collect", "rollout", self._collect) if embodied else ("generate", "rollout", self._generate))
        wanted += [("score", "reward", self._score)]
        reference = policy if self.config.reference_is_base else "reference"
        evaluated = (("reference", reference), ("log-probs", policy), ("values", "critic"))
        wanted += [(phase, name, self._evaluate(name)) for phase, name in evaluated]
        wanted += [("train critic", "critic", self._train("critic")), ("train actor", policy, self._train(policy))]
        costs: dict[str, tuple[str, Cost]] = {}
        for phase, name, estimate in wanted:
            if name in layout.parts and name in self.shapes:
                bounds = estimate(layout)
                if phase in self.calibration:
                    bounds = self.calibration[phase].apply(bounds)
                slowest = max(bounds, key=lambda bound: bounds[bound])
                costs[phase] = (name, Cost(bounds[slowest], slowest))
        return costs

    def _sync(self, layout: Layout) -> Bounds:
        """All parameters go from the learner's ranks to the generator's: over the network between nodes, and not at all
        within one process."""
        policy = layout.policy
        if layout.together(policy, "rollout"):
            return {"launches": TRANSFER_S}
        source, target = layout.parts[policy], layout.parts["rollout"]
        same_node = len(source.nodes | target.nodes) == 1
        rate = (self.device.link if same_node else self.device.network) * TRANSFER_SHARE
        hops = math.log2(source.ranks + target.ranks)
        return {"launches": TRANSFER_S, "transfers": self.shapes[policy].parameters * FLOAT / rate + hops * TRANSFER_S}

    def _generate(self, layout: Layout) -> Bounds:
        """Decodes in waves: every rank runs `running_sequences` of its share until all are complete."""
        shape, data = self.shapes["rollout"], self.config.data
        assert isinstance(shape, ModelShape)
        ranks = layout.parts["rollout"].ranks
        share = -(-self.responses // ranks)
        running = min(running_sequences(self.config, ranks), share)
        tokens = self.config.rollout.sampling.max_new_tokens or data.max_response_length
        hosted = self.config.rollout.backend in HOSTED
        dtype = self.config.actor.model.dtype if hosted or self.device.kind != "cpu" else "float32"
        prefill = self._arithmetic(shape, share * data.max_prompt_length, data.max_prompt_length, dtype)
        weights = shape.products_per_token * bytes_of(dtype)
        cache = running * (data.max_prompt_length + tokens / 2) * shape.kv_elements_per_token * bytes_of(dtype)
        traffic = (weights + cache) / (self.device.hbm * STREAM_SHARE)
        products = self._arithmetic(shape, running, longest(self.config), dtype)
        launches = shape.layers * LAUNCH_S
        each = {"arithmetic": products, "memory traffic": traffic, "launches": launches}
        return {bound: prefill + share / running * tokens * seconds for bound, seconds in each.items()}

    def _collect(self, layout: Layout) -> Bounds:
        """The simulation and the policy in turns, `rollout_steps` times."""
        env = self.config.env
        simulation = env.num_envs * ENV_STEP_S / max(env.num_workers, layout.parts["env"].ranks)
        return {("simulation" if simulation > ACT_S else "launches"): env.rollout_steps * (simulation + ACT_S)}

    def _score(self, layout: Layout) -> Bounds:
        """One forward of every response by the reward model, which is whole on every rank."""
        shape, reward, length = self.shapes["reward"], self.config.reward.classifier, longest(self.config)
        assert reward is not None
        assert reward.model is not None
        share = -(-self.responses // layout.parts["reward"].ranks)
        batches, dtype = -(-share // reward.max_batch_size), reward.model.dtype
        traffic = batches * shape.parameters * bytes_of(dtype) / (self.device.hbm * STREAM_SHARE)
        products = self._arithmetic(shape, share * length, length, dtype)
        return {"arithmetic": products, "memory traffic": traffic, "launches": batches * shape.layers * LAUNCH_S}

    def _evaluate(self, name: str) -> Callable[[Layout], Bounds]:
        """One forward of every row, without gradient."""

        def estimate(layout: Layout) -> Bounds:
            return self._passes(name, layout, self.rows, 1)

        return estimate

    def _train(self, name: str) -> Callable[[Layout], Bounds]:
        """All epochs: forward and backward of every row, and an optimizer step per mini-batch."""

        def estimate(layout: Layout) -> Bounds:
            algorithm = self.config.algorithm
            epochs = algorithm.critic_epochs if name == "critic" else algorithm.ppo_epochs
            forwards = BACKWARD if self.config.section(name).lora is None else BACKWARD_OF_ADAPTERS
            passes = self._passes(name, layout, self.rows * epochs, forwards)
            steps = epochs * max(1, self.rows // self.config.mini_batch_size(name))
            shard = trained_parameters(self.config, name, self.shapes[name]) / layout.parts[name].ranks
            optimizer = steps * shard * OPTIMIZER_BYTES / (self.device.hbm * STREAM_SHARE)
            section, part = self.config.section(name), layout.parts[name]
            if section.training_backend == "megatron" and part.ranks > section.parallel.ranks:
                # gradients are added up and new weights gathered over the copies of the model
                own = self.shapes[name].parameters / section.parallel.ranks
                dtype = (section.model or self.config.actor.model).dtype
                optimizer += steps * own * (FLOAT + bytes_of(dtype)) / self._rate(part)
            return {bound: seconds + optimizer for bound, seconds in passes.items()}

        return estimate

    def _passes(self, name: str, layout: Layout, rows: int, forwards: int) -> Bounds:
        """Returns the bounds of `forwards` passes over `rows` rows, shared by the ranks.

        Sharded weights are gathered for every micro-batch while the previous layer computes.
        """
        shape, part, section = self.shapes[name], layout.parts[name], self.config.section(name)
        parallel = layout_of_learner(section)
        batches = copies(self.config, name, part.ranks)
        dtype = (section.model or self.config.actor.model).dtype
        length = longest(self.config) if isinstance(shape, ModelShape) else 1
        micro_batches = math.ceil(math.ceil(rows / batches) / micro_batch_rows(self.config, name, batches))
        split = parallel.tensor * parallel.pipeline
        waiting = 1 + (parallel.pipeline - 1) / micro_batches  # stages without work at both ends of a schedule
        products = forwards * self._arithmetic(shape, math.ceil(rows / part.ranks) * length, length, dtype) * waiting
        # every micro-batch reads the weights, and writes and reads gradients
        traffic = forwards * micro_batches * shape.parameters / split * FLOAT / (self.device.hbm * STREAM_SHARE)
        launches = forwards * micro_batches * shape.layers / parallel.pipeline * LAUNCH_S
        bounds = {"arithmetic": products, "memory traffic": traffic, "launches": launches}
        if part.ranks > 1 and section.training_backend == "megatron" and isinstance(shape, ModelShape):
            tokens = math.ceil(rows / batches) * length
            bounds["transfers"] = forwards * self._exchanges(shape, part, parallel, tokens, micro_batches, dtype)
        elif part.ranks > 1:
            moved = shape.parameters * FLOAT * (part.ranks - 1) / part.ranks
            seconds = moved / self._rate(part) + (shape.layers + 1) * TRANSFER_S
            bounds["transfers"] = forwards * micro_batches * seconds
        return bounds

    def _exchanges(
        self, shape: ModelShape, part: Part, parallel: Parallel, tokens: int, micro_batches: int, dtype: str
    ) -> float:
        """Returns the seconds of one forward's transfers of activations between Megatron's ranks.

        In each layer tensor ranks add up two results; expert ranks send every token to its experts and back.
        """
        layers, each = shape.layers / parallel.pipeline, tokens * shape.hidden * bytes_of(dtype)
        others = (parallel.tensor - 1) / parallel.tensor
        seconds = layers * 2 * 2 * others * each / (self.device.link * TRANSFER_SHARE)
        collectives = 2 if parallel.tensor > 1 else 0
        if parallel.expert > 1:
            sent = each / parallel.tensor * shape.active_experts * (parallel.expert - 1) / parallel.expert
            seconds += layers * 2 * sent / self._rate(part)
            collectives += 2
        return seconds + layers * micro_batches * collectives * TRANSFER_S

    def _rate(self, part: Part) -> float:
        """Returns the bytes per second between the ranks of a component."""
        return (self.device.link if len(part.nodes) == 1 else self.device.network) * TRANSFER_SHARE

    def _arithmetic(self, shape: Shape, tokens: float, length: int, dtype: str) -> float:
        """Returns the seconds of one forward of `tokens` tokens in sequences of `length`: matrices, and the scores of
        each token with half of its sequence on average."""
        products = tokens * shape.products_per_token
        if isinstance(shape, ModelShape):
            products += tokens * length * shape.layers * shape.attention_width
        return 2 * products / (self.device.flops(dtype) * TRAINING_SHARE)
