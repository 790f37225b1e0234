"""Estimates the seconds of each phase of a PPO step from arithmetic, memory traffic and transfers.

A phase takes as long as the slowest of its parts: products, bytes moved, transfers between ranks. On a CPU launches,
products and transfers follow one another. Decoding reads all weights and the cache and launches all kernels for every
token; the batch shrinks when the last responses end. Scores of a reward model count; other scoring runs beside
generation. fsdp gathers the weights for every micro-batch. Megatron exchanges activations, and once per optimizer step
gradients and weights. `Basis` holds the lengths, the rates and the corrections of an earlier run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from rl_platform.config.rollout_backend import HOSTED
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import estimator_needs
from rl_platform.config.schema.models import Parallel
from rl_platform.placement.estimates.component_shapes import Shape
from rl_platform.placement.estimates.hardware import Devices
from rl_platform.placement.estimates.memory import (
    LOGIT_COPIES,
    MemoryModel,
    trained_parameters,
)
from rl_platform.placement.estimates.model_shape import FLOAT, ModelShape
from rl_platform.placement.estimates.policy_device import with_policy_device
from rl_platform.placement.estimates.policy_shape import PolicyShape
from rl_platform.placement.estimates.step_moves import PhaseMoves, phases_of
from rl_platform.placement.estimates.tensor_bytes import bytes_of, saved_bytes_per_token
from rl_platform.placement.estimates.workload import (
    copies,
    forward_rows,
    layout_of_learner,
    micro_batch_rows,
    optimizer_steps,
    running_sequences,
)
from rl_platform.placement.layout import LEARNERS, Layout, Part
from rl_platform.placement.offload_order import OffloadOrder
from rl_platform.planner.basis import Basis, Bounds, Correction
from rl_platform.planner.lengths import decoding, expected
from rl_platform.planner.rates import OVERHEADS, Rates, data_sheet

BACKWARD = 3  # forward and backward, in forwards
BACKWARD_OF_ADAPTERS = 2  # without gradients of the frozen matrices
OPTIMIZER_BYTES = 7 * FLOAT  # AdamW reads weight, gradient and two moments of a parameter and writes three of them
MESSAGE_S, MESSAGE_BETWEEN_NODES_S = 5e-4, 3e-3  # to an environment's process and back (docs/placement.md)
ADVANTAGES = "advantages and metrics"  # the runner's work between the phases of components
SAVED_BYTES = 3 * FLOAT  # of a trained parameter in a checkpoint: weight and two moments

Estimate = Callable[["CostModel", Layout], list[Bounds]]


@dataclass(frozen=True)
class Cost:
    """Seconds of one phase, and what bounds it: arithmetic, memory traffic, launches, transfers, simulation."""

    seconds: float
    bound: str


@dataclass(frozen=True)
class OtherWork:
    """Work outside the phases of a step: its seconds each time, and the number of steps between."""

    name: str
    seconds: float
    steps: int

    @property
    def per_step(self) -> float:
        return self.seconds / self.steps


def waves(config: Config, layout: Layout) -> int:
    """Returns how often a rollout rank fills its slots with new sequences in a step."""
    if config.runner.task_type == "embodied":
        return 1
    ranks = layout.parts["rollout"].ranks
    return math.ceil(-(-config.rows_per_step // ranks) / running_sequences(config, ranks))


@dataclass(frozen=True)
class SwapCost:
    """The moves at the beginning of a phase and their seconds."""

    moves: PhaseMoves
    seconds: float


def swaps(order: OffloadOrder, memory: MemoryModel, rates: Rates) -> dict[str, SwapCost]:
    """Returns the swaps of phases with moves; those of a phase with several parts (`alternating`) are added up.

    Every rank has its own link to host memory.
    """
    rate = min(rates.host, rates.memory)
    costs: dict[str, SwapCost] = {}
    for moves in phases_of(order):
        if moves.leaves or moves.comes:
            seconds = memory.moved((*moves.leaves, *moves.comes)) / rate
            earlier = costs.get(moves.phase, SwapCost(moves, 0.0))
            costs[moves.phase] = replace(earlier, seconds=earlier.seconds + seconds)
    return costs


class CostModel:
    """Estimates for one config. A component on several kinds of devices computes at the rates of the slowest.

    The rates of `basis` are those of `devices.main`.
    """

    def __init__(
        self, config: Config, shapes: Mapping[str, Shape], devices: Devices, basis: Basis | None = None
    ) -> None:
        self.config, self.shapes, self.devices, self.device = config, shapes, devices, devices.main
        self.basis = basis or Basis()
        self.lengths = self.basis.lengths or expected(config)
        self.rates = self.basis.rates or data_sheet(self.device)
        self.rows = config.rows_per_step
        greedy = config.data.train_batch_size if estimator_needs(config.algorithm.adv_type).greedy else 0
        self.responses = self.rows + greedy

    def phases(self, layout: Layout) -> dict[str, tuple[str, Cost]]:
        """Returns phase -> (component, cost) in the order of a step, without phases of unknown models."""
        embodied = self.config.runner.task_type == "embodied"
        policy = layout.policy
        host = self.devices.host
        if host not in (None, self.device) and with_policy_device(self.config, layout).actor.device == "cpu":
            return CostModel(self.config, self.shapes, Devices(host), replace(self.basis, rates=None)).phases(layout)
        wanted: list[tuple[str, str, Estimate]] = [("sync weights", policy, CostModel._sync)]
        collected, collect = ("collect", CostModel._collect) if embodied else ("generate", CostModel._generate)
        wanted += [(collected, "rollout", collect), ("score", "reward", CostModel._score)]
        reference = policy if self.config.reference_is_base else "reference"
        evaluated = (("reference", reference), ("log-probs", policy), ("values", "critic"))
        wanted += [(phase, name, partial(CostModel._evaluate, name=name)) for phase, name in evaluated]
        wanted.append((ADVANTAGES, policy, CostModel._advantages))
        trained = (("train critic", "critic"), ("train actor", policy))
        wanted += [(phase, name, partial(CostModel._train, name=name)) for phase, name in trained]
        costs: dict[str, tuple[str, Cost]] = {}
        for phase, name, estimate in wanted:
            if name in layout.parts and name in self.shapes:
                correction = self.basis.corrections.get(phase)
                nodes = layout.parts[name].nodes
                if phase == "sync weights":
                    nodes |= layout.parts["rollout"].nodes
                costs[phase] = (name, self._cost(estimate(self._on(nodes), layout), correction))
        if not costs.get(ADVANTAGES, ("", Cost(0.0, "")))[1].seconds:  # not measured
            costs.pop(ADVANTAGES, None)
        return costs

    def _on(self, nodes: frozenset[int]) -> CostModel:
        """Returns the model for work on these nodes."""
        device = self.devices.on(nodes)
        if device is self.device:
            return self
        return CostModel(self.config, self.shapes, Devices(device), replace(self.basis, rates=None))

    def other_work(self, layout: Layout) -> tuple[OtherWork, ...]:
        """Returns validation, checkpoints and the start, without those that cannot be estimated."""
        runner, work = self.config.runner, []
        trained = {
            name: trained_parameters(self.config, name, shape)
            for name, shape in self.shapes.items()
            if name in LEARNERS and name in layout.parts
        }
        saved = sum(trained.values()) * SAVED_BYTES / self.rates.disk
        weights = sum(shape.parameters for name, shape in self.shapes.items() if name in layout.parts) * FLOAT
        start = self.rates.start + weights / self.rates.disk
        for name, seconds, steps in (
            ("validation", self._measured("validate", self._validation(layout)), runner.val_check_interval),
            ("checkpoint", self._measured("checkpoint", saved), runner.save_interval),
            ("start", start, runner.max_steps or 0),
        ):
            if steps and seconds:
                work.append(OtherWork(name, seconds, steps))
        return tuple(work)

    def _measured(self, timing: str, predicted: float) -> float:
        """Returns the corrected seconds of work outside the phases."""
        if (correction := self.basis.corrections.get(timing)) is not None:
            return predicted * correction.factor
        return self.basis.other_seconds.get(timing, predicted)

    def _validation(self, layout: Layout) -> float:
        """Returns the seconds to generate a response to every validation prompt.

        0 for embodied runs, because only the environment determines the length of an episode.
        """
        if self.config.runner.task_type == "embodied" or "rollout" not in self.shapes:
            return 0.0
        model = self._on(layout.parts["rollout"].nodes)
        return self._cost(model._decode(layout, self.config.data.validation_prompts)).seconds

    def _cost(self, parts: list[Bounds], correction: Correction | None = None) -> Cost:
        """Adds up the parts. The bound of the sum is the one with the most seconds."""
        spent: dict[str, float] = {}
        for part in parts:
            bounds = part if correction is None else correction.apply(part)
            slowest = max(bounds, key=lambda bound: bounds[bound])
            spent[slowest] = spent.get(slowest, 0.0) + bounds[slowest]
        return Cost(sum(spent.values()), max(spent, key=lambda bound: spent[bound]))

    def _computed(self, products: float, traffic: float, launches: float) -> Bounds:
        """Returns the bounds of a device's own work."""
        if self.device.kind != "cpu":
            return {"arithmetic": products, "memory traffic": traffic, "launches": launches}
        # a core launches and computes, one after the other
        slower = "arithmetic" if products >= launches else "launches"
        return {slower: products + launches, "memory traffic": traffic + launches}

    def _sync(self, layout: Layout) -> list[Bounds]:
        """Returns the bounds of sending all parameters from the learner to the rollout: over the network between nodes,
        not at all within one process."""
        policy = layout.policy
        if layout.together(policy, "rollout"):
            return [{"launches": self.rates.transfer}]
        source, target = layout.parts[policy], layout.parts["rollout"]
        same_node = len(source.nodes | target.nodes) == 1
        rate = self.rates.link if same_node else self.rates.network
        hops = math.log2(source.ranks + target.ranks)
        return [{"transfers": self.shapes[policy].parameters * FLOAT / rate + (hops + 1) * self.rates.transfer}]

    def _generate(self, layout: Layout) -> list[Bounds]:
        return self._decode(layout, self.responses)

    def _decode(self, layout: Layout, responses: int) -> list[Bounds]:
        """Returns the bounds of the prompts and of decoding.

        A rank decodes `running_sequences` of its share together, and fewer towards the end.
        """
        shape, ranks, lengths = self.shapes["rollout"], layout.parts["rollout"].ranks, self.lengths
        assert isinstance(shape, ModelShape)
        share = -(-responses // ranks)
        running = min(running_sequences(self.config, ranks), share)
        hosted = self.config.rollout.backend in HOSTED
        dtype = self.config.actor.model.dtype if hosted or self.device.kind != "cpu" else "float32"
        weights, rates = shape.products_per_token * bytes_of(dtype), self.rates
        # tokens of tools are processed like those of prompts
        read = share * (lengths.prompt + lengths.inserted)
        parts = [{"arithmetic": arithmetic(self.rates, shape, read, lengths.prompt, dtype, read)}]
        cached = (lengths.sequence - lengths.response / 2) * shape.kv_elements_per_token * bytes_of(dtype)
        for batch, steps in decoding(lengths.responses, share, running):
            each = self._computed(
                arithmetic(self.rates, shape, batch, lengths.context, dtype, batch),
                (weights + batch * cached) / rates.memory,
                shape.layers * rates.decode_layer + batch * rates.decode_sequence,
            )
            parts.append({bound: steps * seconds for bound, seconds in each.items()})
        return [*parts, {"launches": rates.overhead("generate", 1, share)}]

    def _advantages(self, layout: Layout) -> list[Bounds]:
        """Returns the seconds of the runner between the phases; 0 for embodied runs, where they are not known."""
        if self.config.runner.task_type == "embodied":
            return [{"launches": 0.0}]
        return [{"launches": self.rates.overhead("advantages", 1, self.rows)}]

    def _collect(self, layout: Layout) -> list[Bounds]:
        """Returns the bounds of simulation, policy and the messages between their processes, `rollout_steps` times in
        turns."""
        env, part, rollout = self.config.env, layout.parts["env"], layout.parts["rollout"]
        simulation = env.num_envs * self.rates.env_step / max(env.num_workers, part.ranks)
        act, kind = self._act(rollout.ranks)
        bound = "simulation" if simulation > act else kind
        together = part.ranks == 1 and (layout.one_process or part.key == rollout.key)
        if self.rates.collect and together and layout.together(layout.policy, "rollout"):
            return [{bound: env.rollout_steps * self.rates.collect}]
        message = MESSAGE_S if len(part.nodes | rollout.nodes) == 1 else MESSAGE_BETWEEN_NODES_S
        exchange = 0.0 if together else message
        return [{bound: env.rollout_steps * (simulation + act)}, {"transfers": env.rollout_steps * exchange}]

    def _act(self, ranks: int) -> tuple[float, str]:
        """Returns the policy's seconds per step of all environments, and their bound. A chunk of actions is one choice.

        `rates.act` is measured with a small policy. pi0 runs its action expert once for each denoising step.
        """
        shape, chunk, rates = self.shapes["rollout"], self.config.actor.model.num_action_chunks, self.rates
        assert isinstance(shape, PolicyShape)
        if not shape.stacks:
            return rates.act / chunk, "launches"
        rows, dtype = -(-self.config.env.num_envs // ranks), self.config.actor.model.dtype
        flops = rates.flops(dtype, rows * shape.tokens, shape.width)
        read = sum(stack.acting * stack.shape.decoder_parameters for stack in shape.stacks) * FLOAT
        launches = sum(stack.acting * stack.shape.layers for stack in shape.stacks) * rates.launch
        bounds = self._computed(2 * rows * shape.acting_products / flops, read / rates.memory, launches)
        kind = max(bounds, key=lambda bound: bounds[bound])
        return bounds[kind] / chunk, kind

    def _score(self, layout: Layout) -> list[Bounds]:
        """Returns the seconds of one forward of every response by the reward model, which is whole on every rank."""
        shape, reward, length = self.shapes["reward"], self.config.reward.classifier, self.lengths.sequence
        assert reward is not None
        assert reward.model is not None
        share = -(-self.responses // layout.parts["reward"].ranks)
        batches, dtype = -(-share // reward.max_batch_size), reward.model.dtype
        traffic = batches * shape.parameters * bytes_of(dtype) / self.rates.memory
        products = arithmetic(
            self.rates, shape, share * length, self.lengths.context, dtype, reward.max_batch_size * length
        )
        launches = batches * shape.layers * self.rates.launch
        return [self._computed(products, traffic, launches)]

    def _evaluate(self, layout: Layout, name: str) -> list[Bounds]:
        """Returns the seconds of one forward of every row, without gradient."""
        if self.rates.evaluate and self._is_measured(name, layout):
            return [{"arithmetic": self.rows * self.rates.evaluate}]
        batches = copies(self.config, name, layout.parts[name].ranks)
        passes = self._passes(name, layout, self.rows, 1, forward_rows(self.config, name, batches, self._length(name)))
        return [passes, {"launches": self._overhead("evaluate", name, 1, self.rows / batches)}]

    def _length(self, name: str) -> float | None:
        """Returns the mean tokens of a row; None for an embodied policy."""
        return self.lengths.sequence if isinstance(self.shapes[name], ModelShape) else None

    def _overhead(self, phase: OVERHEADS, name: str, calls: float, rows: float) -> float:
        return self.rates.overhead(phase, calls, rows) if isinstance(self.shapes[name], ModelShape) else 0.0

    def _train(self, layout: Layout, name: str) -> list[Bounds]:
        """Returns the seconds of all epochs: forward and backward of every row, and an optimizer step per
        mini-batch."""
        algorithm = self.config.algorithm
        epochs = algorithm.critic_epochs if name == "critic" else algorithm.ppo_epochs
        shape, lora = self.shapes[name], self.config.section(name).lora
        forwards: float = BACKWARD if lora is None else BACKWARD_OF_ADAPTERS
        if isinstance(shape, PolicyShape):
            forwards = shape.update_forwards(forwards)
        steps = optimizer_steps(self.config, name)
        if self.rates.update and self._is_measured(name, layout):
            return [{"arithmetic": steps * self.rates.update}]
        batches = copies(self.config, name, layout.parts[name].ranks)
        rows_each = micro_batch_rows(self.config, name, batches, self._length(name))
        passes = self._passes(name, layout, self.rows * epochs, forwards, rows_each)
        shard = trained_parameters(self.config, name, self.shapes[name]) / layout.parts[name].ranks
        optimizer = steps * shard * OPTIMIZER_BYTES / self.rates.memory
        section, part = self.config.section(name), layout.parts[name]
        if section.training_backend == "megatron" and part.ranks > section.parallel.ranks:
            # gradients are added up and new weights gathered over the copies of the model
            own = self.shapes[name].parameters / section.parallel.ranks
            dtype = (section.model or self.config.actor.model).dtype
            optimizer += steps * own * (FLOAT + bytes_of(dtype)) / self._rate(part)
        optimizer += self._overhead("train", name, steps, self.rows * epochs / batches)
        return [{bound: seconds + optimizer for bound, seconds in passes.items()}]

    def _is_measured(self, name: str, layout: Layout) -> bool:
        """Returns whether the rates of the embodied policy hold for a component."""
        return isinstance(self.shapes[name], PolicyShape) and layout.parts[name].ranks == 1

    def _passes(self, name: str, layout: Layout, rows: int, forwards: float, rows_each: int) -> Bounds:
        """Returns the bounds of `forwards` passes over `rows` rows, shared by the ranks; `rows_each` rows at a time.

        Sharded weights are gathered for every micro-batch while the previous layer computes.
        """
        shape, part, section = self.shapes[name], layout.parts[name], self.config.section(name)
        parallel = layout_of_learner(section)
        batches = copies(self.config, name, part.ranks)
        dtype = (section.model or self.config.actor.model).dtype
        length, context = (self.lengths.sequence, self.lengths.context) if isinstance(shape, ModelShape) else (1.0, 1.0)
        micro_batches = math.ceil(math.ceil(rows / batches) / rows_each)
        split = parallel.tensor * parallel.pipeline
        waiting = 1 + (parallel.pipeline - 1) / micro_batches  # stages without work at both ends of a schedule
        tokens = math.ceil(rows / part.ranks) * length
        products = arithmetic(self.rates, shape, tokens, context, dtype, rows_each * length)
        products += elementwise(self.rates, shape, tokens, dtype) / BACKWARD
        products *= forwards * waiting
        # every micro-batch reads the weights, and writes and reads gradients
        traffic = forwards * micro_batches * shape.parameters / split * FLOAT / self.rates.memory
        launches = forwards * micro_batches * self._layers(shape) / parallel.pipeline
        bounds = self._computed(products, traffic, launches)
        if part.ranks > 1 and section.training_backend == "megatron" and isinstance(shape, ModelShape):
            together = math.ceil(rows / batches) * length / parallel.context
            bounds["transfers"] = forwards * self._exchanges(shape, part, parallel, together, micro_batches, dtype)
        elif part.ranks > 1:
            moved = shape.parameters * FLOAT * (part.ranks - 1) / part.ranks
            seconds = moved / self._rate(part) + (shape.layers + 1) * self.rates.transfer
            bounds["transfers"] = forwards * micro_batches * seconds
        if isinstance(shape, ModelShape) and (context_ranks := section.parallel.context) > 1:
            # in each layer a token's queries, keys, values and outputs go to the ranks that have its heads, and back
            width = 2 * shape.attention_width + shape.kv_width * 2
            sent = tokens * width * bytes_of(dtype) * (context_ranks - 1) / context_ranks
            exchanged = shape.layers / parallel.pipeline * sent / self._rate(part)
            exchanged += shape.layers / parallel.pipeline * micro_batches * 2 * self.rates.transfer
            bounds["transfers"] = bounds.get("transfers", 0.0) + forwards * exchanged
        if self.device.kind == "cpu" and "transfers" in bounds:  # the cores that compute move the bytes, too
            moved = bounds.pop("transfers")
            bounds = {bound: seconds + moved for bound, seconds in bounds.items()}
        return bounds

    def _layers(self, shape: Shape) -> float:
        """Returns the seconds of the launches of all layers."""
        if isinstance(shape, ModelShape):
            return shape.layers * self.rates.launch
        passes = sum(stack.passes * stack.shape.layers for stack in shape.stacks)
        layer = self.rates.policy_layer if shape.compiled else self.rates.launch
        return passes * self.rates.launch + len(shape.elements) * layer

    def _exchanges(
        self, shape: ModelShape, part: Part, parallel: Parallel, tokens: float, micro_batches: int, dtype: str
    ) -> float:
        """Returns the seconds of one forward's transfers of activations between Megatron's ranks.

        In each layer tensor ranks add up two results; expert ranks send every token to its experts and back.
        """
        layers, each = shape.layers / parallel.pipeline, tokens * shape.hidden * bytes_of(dtype)
        others = (parallel.tensor - 1) / parallel.tensor
        seconds = layers * 2 * 2 * others * each / self.rates.link
        collectives = 2 if parallel.tensor > 1 else 0
        if parallel.expert > 1:
            sent = each / parallel.tensor * shape.active_experts * (parallel.expert - 1) / parallel.expert
            seconds += layers * 2 * sent / self._rate(part)
            collectives += 2
        return seconds + layers * micro_batches * collectives * self.rates.transfer

    def _rate(self, part: Part) -> float:
        """Returns the bytes per second between the ranks of a component."""
        return self.rates.link if len(part.nodes) == 1 else self.rates.network


def elementwise(rates: Rates, shape: Shape, tokens: float, dtype: str) -> float:
    """Returns the seconds between the products of a forward and backward pass: norms, activations, the loss."""
    if not isinstance(shape, ModelShape):
        return 0.0
    logits = 0 if shape.value_head else LOGIT_COPIES * shape.vocabulary * FLOAT
    return tokens * (shape.layers * saved_bytes_per_token(shape, dtype) + logits) * rates.elements


def arithmetic(rates: Rates, shape: Shape, tokens: float, length: float, dtype: str, rows: float) -> float:
    """Returns the seconds of one forward of `tokens` tokens in sequences of `length`, `rows` tokens at a time.

    Counts matrix products, and the attention scores of each token with half of its sequence on average.
    """
    products = tokens * shape.products_per_token
    if isinstance(shape, ModelShape):
        products += tokens * length * shape.layers * shape.attention_width
        return 2 * products / rates.flops(dtype, rows, shape.hidden)
    return 2 * products / rates.flops(dtype, rows * shape.tokens, shape.width)
