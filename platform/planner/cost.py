"""Predicts how long each phase of a PPO step takes, from arithmetic, memory traffic and transfers. An estimate.

A phase takes as long as the slowest of what it must do: products at the device's rate times what such code reaches of
it, bytes moved, transfers between ranks; decoding reads all weights and the cache for every token and pays for its
kernels' launches. Responses are taken as long as they may be. Scoring runs beside generation and is not counted;
Megatron's layouts are taken for as fast as sharding.
`calibration` corrects phases by what an earlier run measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rl_platform.config.schema import Config
from rl_platform.placement.hardware import Device
from rl_platform.placement.layout import Layout
from rl_platform.placement.memory import (
    MemoryModel,
    bytes_of,
    longest,
    micro_batch_rows,
    rows_per_step,
    running_sequences,
    trained_parameters,
)
from rl_platform.placement.model_shape import FLOAT, ModelShape, Shape
from rl_platform.placement.offload_order import OffloadOrder, PhaseMoves

TRAINING_SHARE = 0.4  # of the peak arithmetic that forward and backward passes reach
STREAM_SHARE = 0.7  # of the peak bandwidth that reading weights and caches reaches
TRANSFER_SHARE = 0.7  # of a link's bandwidth that collectives reach
BACKWARD = 3  # forward and backward, in forwards
BACKWARD_OF_ADAPTERS = 2  # without the gradients of the matrices beside them
OPTIMIZER_BYTES = 7 * FLOAT  # AdamW reads weight, gradient and two moments of a parameter and writes three of them
HOST_LINK = 20e9  # bytes/s between a GPU and pinned host memory, one way: PCIe 4.0 x16
TRANSFER_S = 50e-6  # one collective or broadcast that moves nothing
LAUNCH_S = 250e-6  # the operators of one layer one by one, whatever the batch: measured on a core, as in a GPU's queue
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
    """What a measured phase took, in multiples of the prediction, and what bounded it then.

    A phase that was slower is slower in what bounded it; one that was faster needs less of everything.
    """

    factor: float
    bound: str

    def apply(self, bounds: Bounds) -> Bounds:
        return {
            name: seconds * self.factor if name == self.bound or self.factor < 1 else seconds
            for name, seconds in bounds.items()
        }


def waves(config: Config, layout: Layout) -> int:
    """How often a rollout rank fills its slots with new sequences until its share of a step is done."""
    if config.runner.task_type == "embodied":
        return 1
    ranks = layout.parts["rollout"].ranks
    return math.ceil(-(-rows_per_step(config) // ranks) / running_sequences(config, ranks))


@dataclass(frozen=True)
class Swap:
    """Who leaves and comes at the beginning of a phase, and the seconds that takes."""

    moves: PhaseMoves
    seconds: float


def swaps(order: OffloadOrder, memory: MemoryModel, device: Device) -> dict[str, Swap]:
    """By phase, those in which anybody leaves or comes; every rank has a link to host memory of its own."""
    rate = min(HOST_LINK, device.hbm * STREAM_SHARE)
    return {
        moves.phase: Swap(moves, memory.moved((*moves.leaves, *moves.comes)) / rate)
        for moves in order.phases
        if moves.leaves or moves.comes
    }


class CostModel:
    """`device`: what every rank computes on. `calibration`: corrections by phase."""

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

    def phases(self, layout: Layout) -> dict[str, tuple[str, Cost]]:
        """Phase -> (component, cost), in the order of a step. Phases of models that are not known are missing."""
        embodied = self.config.runner.task_type == "embodied"
        policy = layout.policy
        wanted: list[tuple[str, str, Callable[[Layout], Bounds]]] = [("sync weights", policy, self._sync)]
        if embodied:
            wanted += [("collect", "rollout", self._collect)]
        else:
            wanted += [("generate", "rollout", self._generate)]
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
        """All parameters from the learner's ranks to the generator's: over the network if these are on several nodes,
        and nothing at all where both are one process."""
        policy = layout.policy
        if layout.together(policy, "rollout"):
            return {"launches": TRANSFER_S}
        source, target = layout.parts[policy], layout.parts["rollout"]
        same_node = len(source.nodes | target.nodes) == 1
        rate = (self.device.link if same_node else self.device.network) * TRANSFER_SHARE
        hops = math.log2(source.ranks + target.ranks)
        return {"launches": TRANSFER_S, "transfers": self.shapes[policy].parameters * FLOAT / rate + hops * TRANSFER_S}

    def _generate(self, layout: Layout) -> Bounds:
        """Decoding in waves: every rank runs `running_sequences` of its share until all have their tokens."""
        shape, data = self.shapes["rollout"], self.config.data
        assert isinstance(shape, ModelShape)
        ranks = layout.parts["rollout"].ranks
        share = -(-self.rows // ranks)
        running = min(running_sequences(self.config, ranks), share)
        tokens = self.config.rollout.sampling.max_new_tokens or data.max_response_length
        dtype = "float32" if self.config.rollout.backend == "torch" else self.config.actor.model.dtype
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

    def _evaluate(self, name: str) -> Callable[[Layout], Bounds]:
        """One forward of every row, without gradient."""

        def estimate(layout: Layout) -> Bounds:
            return self._passes(name, layout, self.rows, 1)

        return estimate

    def _train(self, name: str) -> Callable[[Layout], Bounds]:
        """All epochs: forward and backward of every row, and an optimizer step per mini-batch."""

        def estimate(layout: Layout) -> Bounds:
            algorithm = self.config.algorithm
            epochs = algorithm.ppo_epochs
            if name == "critic" and algorithm.critic_ppo_epochs is not None:
                epochs = algorithm.critic_ppo_epochs
            forwards = BACKWARD if self.config.section(name).lora is None else BACKWARD_OF_ADAPTERS
            passes = self._passes(name, layout, self.rows * epochs, forwards)
            steps = epochs * max(1, self.rows // self.config.data.mini_batch_size)
            shard = trained_parameters(self.config, name, self.shapes[name]) / layout.parts[name].ranks
            optimizer = steps * shard * OPTIMIZER_BYTES / (self.device.hbm * STREAM_SHARE)
            return {bound: seconds + optimizer for bound, seconds in passes.items()}

        return estimate

    def _passes(self, name: str, layout: Layout, rows: int, forwards: int) -> Bounds:
        """`forwards` passes over `rows` rows, shared by the ranks; sharded weights are gathered for every micro-batch,
        while the layer before computes."""
        shape, part = self.shapes[name], layout.parts[name]
        together = micro_batch_rows(self.config, name, part.ranks)
        share = math.ceil(rows / part.ranks)
        dtype = (self.config.section(name).model or self.config.actor.model).dtype
        length = longest(self.config) if isinstance(shape, ModelShape) else 1
        micro_batches = math.ceil(share / together)
        products = forwards * self._arithmetic(shape, share * length, length, dtype)
        # every micro-batch reads the weights; a gradient is written and read as well
        traffic = forwards * micro_batches * shape.parameters * FLOAT / (self.device.hbm * STREAM_SHARE)
        layers = shape.layers
        launches = forwards * micro_batches * layers * LAUNCH_S
        bounds = {"arithmetic": products, "memory traffic": traffic, "launches": launches}
        if part.ranks > 1:
            rate = (self.device.link if len(part.nodes) == 1 else self.device.network) * TRANSFER_SHARE
            moved = shape.parameters * FLOAT * (part.ranks - 1) / part.ranks
            bounds["transfers"] = forwards * micro_batches * (moved / rate + (layers + 1) * TRANSFER_S)
        return bounds

    def _arithmetic(self, shape: Shape, tokens: float, length: int, dtype: str) -> float:
        """One forward of `tokens` tokens in sequences of `length`: matrices, and each token's scores with half of its
        sequence on average."""
        products = tokens * shape.products_per_token
        if isinstance(shape, ModelShape):
            products += tokens * length * shape.layers * shape.attention_width
        return 2 * products / (self.device.flops(dtype) * TRAINING_SHARE)
