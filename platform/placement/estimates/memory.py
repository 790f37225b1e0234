"""Memory of every rank and every GPU, from the config and the model's shape alone.

Counted for learners: parameters, gradients and optimizer state in float32, sharded over the ranks as by FSDP or
Megatron's layout. With adapters, only those have gradients and optimizer state; a reference has parameters alone. Also
counted: the model that a sharded learner gathers for the rollout, the activations of a micro-batch for the backward
pass, the generator's key-value cache, and the overhead of a process. On CPUs passes in bfloat16 also copy a matrix of
the learner, and generation packs all of them. Not counted: environments, verifiers, fragmentation. Components that
share a GPU take turns, so of the passing parts the largest counts; a reward model scores while the rollout generates,
so theirs add up. Lasting parts add up. If components leave for host memory (`OffloadOrder`), the fullest phase counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from rl_platform.config.rollout_backend import HOSTED
from rl_platform.config.schema import Config
from rl_platform.placement.estimates.component_shapes import Shape
from rl_platform.placement.estimates.hardware import GIB
from rl_platform.placement.estimates.model_shape import FLOAT, ModelShape
from rl_platform.placement.estimates.policy_shape import PolicyShape
from rl_platform.placement.estimates.step_moves import Move, phases_of
from rl_platform.placement.estimates.tensor_bytes import (
    ADAM_STATES,
    adapter_bytes,
    bytes_of,
    forward_of_policy,
    gathered_bytes,
    half_copy,
    kept_by_policy,
    live_elements,
    saved_bytes_per_token,
    state_bytes,
)
from rl_platform.placement.estimates.weight_route import (
    held_publications,
    published_type,
    sends_by_group,
    sent_while_gathered,
)
from rl_platform.placement.estimates.workload import (
    copies,
    forward_rows,
    layout_of_learner,
    micro_batch_rows,
    running_sequences,
)
from rl_platform.placement.layout import LEARNERS, Layout
from rl_platform.placement.offload_order import PHASES, Held, OffloadOrder

LOGIT_CHUNK = 1024  # positions whose logits exist together: models.language.TOKENS_PER_CHUNK
LOGIT_COPIES = 3  # logits, their exponentials and a gradient
FILTERED_COPIES = 9  # with top-k or top-p: also sorted probabilities, their order and sums
PREFILL_TOKENS, GPU_PREFILL_TOKENS = 1024, 8192  # of engines.rollout.prefill
PAGES_BESIDE = 2 * 64  # tokens: of engines.rollout.kv_cache, overhead of a slot beside its tokens
SENT_BUCKET = 256 * 2**20  # bytes: BUCKET of runtime.weights.group
# CUDA context: 543 MiB in a process that allocated nothing (github.com/pytorch/pytorch/issues/81257), and a workspace
# of cuBLAS, 32 MiB on Hopper
PROCESS_ON_GPU = 575 * 2**20
# NCCL's buffers of one group with more than two A100s (github.com/NVIDIA/nccl/issues/964); an all-to-all takes more
COMMUNICATOR = 688 * 2**20
# Freed memory that the allocator keeps, as a share of the activations, probably because mini-batches with other lengths
# have blocks of other sizes. 0.39 GiB beside 0.30 in a run of benchmarks/memory.py with 28 million parameters
FREED = 1.0
PROCESS_IN_MEMORY = int(0.5 * GIB)  # interpreter, libraries, data: benchmarks/memory.py

# Versions of the weights in shared memory whose pages the sender and the receivers have touched. Measured: 0.107 GiB
# with 0.053 GiB of parameters, in a run with actor and rollout in different processes.
STORED_VERSIONS = 2

Counted = tuple[str, float, int]
"""A component on a device, the number of its ranks there, and that of their processes. A rank that spans several
devices counts as a fraction."""


@dataclass(frozen=True)
class Memory:
    """Bytes. gradients, activations and kv_cache exist in one phase only; the others stay.

    published: the whole model, gathered for the rollout or stored in shared memory. graphs: the memory pool of a
    generator's CUDA graphs.
    """

    weights: int = 0
    published: int = 0
    graphs: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0

    @property
    def lasting(self) -> int:
        return self.weights + self.published + self.graphs + self.optimizer

    @property
    def passing(self) -> int:
        return self.gradients + self.activations + self.kv_cache

    @property
    def total(self) -> int:
        return self.lasting + self.passing

    def held(self, held: Held) -> int:
        """Returns the bytes on the device of a component that may leave it; published weights stay."""
        weights = self.weights + self.published + self.graphs
        return {"nothing": self.published, "weights": weights, "all": self.lasting}[held]

    def sent(self, held: Held) -> int:
        """Returns the bytes of `held` that come from host memory; CUDA graphs are recorded again."""
        return self.held(held) - (0 if held == "nothing" else self.graphs)

    def __mul__(self, factor: float) -> Memory:
        if factor == 1:  # the usual case: a search would make some hundred thousand copies
            return self
        return Memory(*(math.ceil(getattr(self, field.name) * factor) for field in fields(self)))


@dataclass(frozen=True)
class Usage:
    """Bytes on one GPU or in a node's main memory: of each component, of the processes, and the peak."""

    components: Mapping[str, Memory]
    processes: int
    peak: int


class MemoryModel:
    """Estimates for one config on one layout. `on_gpu` False: ranks live in main memory."""

    def __init__(self, config: Config, shapes: Mapping[str, Shape], layout: Layout, *, on_gpu: bool) -> None:
        self.config, self.shapes, self.layout, self.on_gpu = config, shapes, layout, on_gpu
        self._ranks = {name: self._rank(name, shape) for name, shape in shapes.items() if name in layout.parts}

    def rank(self, component: str) -> Memory:
        """Returns the memory of one rank; 0 for a component without a model or with an unknown one."""
        return self._ranks.get(component, Memory())

    def usage(self, occupants: Iterable[Counted], order: OffloadOrder | None = None) -> Usage:
        """Returns the usage of one device. `order` None: no component leaves."""
        parts: dict[str, Memory] = {}
        processes: dict[str, int] = {}
        groups: dict[str, int] = {}
        for name, ranks, hosts in occupants:
            parts[name] = self.rank(name) * ranks
            key = self.layout.parts[name].key
            processes[key] = max(processes.get(key, 0), hosts)
            groups[key] = max(groups.get(key, 0), self.communicators(name))
        count = min(sum(processes.values()), 1) if self.layout.one_process else sum(processes.values())
        overhead = count * PROCESS_IN_MEMORY
        if self.on_gpu:
            communicators = sum(hosts * groups[key] for key, hosts in processes.items())
            overhead = count * PROCESS_ON_GPU + communicators * COMMUNICATOR
        peak = _peak(parts) if order is None or not order.leaving & parts.keys() else _peak_with_order(parts, order)
        return Usage(parts, overhead, overhead + peak)

    def communicators(self, name: str) -> int:
        """Returns the number of NCCL groups of a component's process. It counts the groups of learners with several
        ranks, of an engine on several GPUs, and of the weight transfer to the rollout."""
        part, groups = self.layout.parts[name], 0
        if name in LEARNERS and part.ranks > 1:
            parallel = layout_of_learner(self.config.section(name))
            sizes = (parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)
            groups = sum(size > 1 for size in (*sizes, copies(self.config, name, part.ranks)))
        if name == "rollout" and part.per_rank > 1 and self.config.rollout.backend in HOSTED:
            groups = 1
        by_group = sends_by_group(self.config, self.layout, on_gpu=self.on_gpu)
        return groups + (name in (self.layout.policy, "rollout") and by_group)

    def moved(self, moves: Iterable[Move]) -> int:
        """Returns the bytes that one rank of each component sends to host memory or fetches from there."""
        return sum(abs(self.rank(m.component).sent(m.after) - self.rank(m.component).sent(m.before)) for m in moves)

    def _rank(self, name: str, shape: Shape) -> Memory:
        if name == "rollout":
            return self._rollout(shape)
        if name == "reward":
            return self._reward(shape)
        ranks = self.layout.parts[name].ranks
        section, trained = self.config.section(name), trained_parameters(self.config, name, shape)
        activations = self._forward(name, shape)
        if trained:
            activations = max(activations, self._backward(name, shape))
            if not self.on_gpu and isinstance(shape, ModelShape):
                activations += int(FREED * activations)
        published = self._published(shape) if name == self.layout.policy else 0
        if name == self.layout.policy and sent_while_gathered(self.config, self.layout, on_gpu=self.on_gpu):
            assert isinstance(shape, ModelShape)
            # the bucket that is sent, the one that is filled, and a tensor that is gathered and then converted
            activations = max(activations, 2 * SENT_BUCKET + 2 * shape.largest_tensor * FLOAT)
        if isinstance(shape, ModelShape) and section.training_backend == "megatron":
            kept, optimized = state_bytes(shape, section.parallel, self.config.model_of(name).dtype, ranks)
            if section.lora is not None:
                added, optimized = adapter_bytes(trained, section.parallel, self.config.model_of(name).dtype, ranks)
                kept += added
            optimized = optimized if trained else 0
            return Memory(weights=kept, published=published, optimizer=optimized, activations=activations)
        offloaded = section.cpu_offload and self.on_gpu
        whole = shape.parameters if section.lora is None else shape.parameters + trained
        held = 0 if offloaded else 1  # main memory holds the state; a GPU has only the gathered layers
        weights = held * whole * FLOAT // ranks
        if ranks > 1 or offloaded:
            weights += gathered_bytes(shape)
        gradients = held * trained * FLOAT // ranks
        if isinstance(shape, ModelShape) and self._alone(name, shape) and self._at_once(name):
            # the backward pass frees a layer's activations before it allocates the gradients of the layers below
            gradients = max(0, gradients - activations)
        return Memory(
            weights=weights,
            published=published,
            gradients=gradients,
            optimizer=held * trained * FLOAT * ADAM_STATES // ranks,
            activations=activations,
        )

    def _published(self, shape: Shape) -> int:
        """Returns the bytes of gathered models on a rank that holds them. The estimate is of rank 0."""
        held = held_publications(self.config, self.layout, on_gpu=self.on_gpu)
        gathered = held * shape.parameters * bytes_of(published_type(self.config, on_gpu=self.on_gpu))
        return gathered + self._stored(shape)

    def _stored(self, shape: Shape) -> int:
        """Returns the bytes of shared memory that carries weights from the actor's process to the rollout's."""
        layout = self.layout
        apart = "rollout" in layout.parts and layout.parts[layout.policy].key != layout.parts["rollout"].key
        if self.on_gpu or layout.one_process or not apart or sends_by_group(self.config, layout, on_gpu=False):
            return 0
        return STORED_VERSIONS * shape.parameters * FLOAT

    def _copies(self, name: str) -> int:
        return copies(self.config, name, self.layout.parts[name].ranks)

    def _rollout(self, shape: Shape) -> Memory:
        """Returns the memory of the generator: its weights unless it uses the learner's, and its cache."""
        hosted = self.config.rollout.backend in HOSTED
        shared = self.layout.together(self.layout.policy, "rollout") and not hosted
        if isinstance(shape, PolicyShape):
            rows = -(-self.config.env.num_envs // self.layout.parts["rollout"].ranks)
            passing = rows * forward_of_policy(shape) if shape.stacks else 0
            own = 0 if shared else shape.parameters * FLOAT
            return Memory(weights=own, published=self._stored(shape), activations=passing)
        # the built-in engine uses float32 on CPUs without fast bfloat16: the larger size counts
        bytes_each = bytes_of(self.config.actor.model.dtype) if hosted or self.on_gpu else FLOAT
        referenced = shared and (hosted or bytes_each == FLOAT)
        weights = 0 if referenced else shape.parameters * bytes_each
        if referenced and self.config.actor.lora is not None:  # merged matrices are its own
            weights = shape.matrices * bytes_each
        packed = 0
        if not self.on_gpu:
            packed = (shape.matrices + shape.vocabulary * shape.hidden) * FLOAT  # in oneDNN's layout
            if referenced and self.config.actor.model.dtype == "bfloat16":  # where the CPU has fast bfloat16
                weights = (shape.parameters - shape.matrices) * bytes_of("bfloat16")
        slots = running_sequences(self.config, self.layout.parts["rollout"].ranks)
        room = self.config.data.longest_sequence + (0 if hosted else PAGES_BESIDE)
        flash = self.on_gpu and not hosted and bytes_each < FLOAT
        most = GPU_PREFILL_TOKENS if flash else PREFILL_TOKENS
        tokens = max(min(most, slots * self.config.data.max_prompt_length), slots)
        cached = shape.kv_elements_per_token if hosted else shape.whole_kv_elements_per_token
        sampling = self.config.rollout.sampling
        filtered = not hosted and (sampling.top_k > 0 or sampling.top_p < 1)
        logits = slots * shape.vocabulary * FLOAT * (FILTERED_COPIES if filtered else LOGIT_COPIES)
        graphs = 0
        if self.on_gpu and not hosted and self.config.runner.max_staleness == 0:  # accel/cuda_decode.py
            graphs = logits + slots * live_elements(shape) * bytes_each
        return Memory(
            weights=weights,
            published=self._stored(shape),
            graphs=graphs,
            activations=packed + logits + tokens * live_elements(shape) * (bytes_each if flash else FLOAT),
            kv_cache=cached * slots * room * bytes_each,
        )

    def _reward(self, shape: Shape) -> Memory:
        """Returns the memory of a reward model, complete on every rank, and of its largest batch."""
        reward = self.config.reward.classifier
        assert reward is not None
        assert reward.model is not None
        assert isinstance(shape, ModelShape)
        bytes_each = bytes_of(reward.model.dtype)
        tokens = reward.max_batch_size * self.config.data.longest_sequence
        return Memory(weights=shape.parameters * bytes_each, activations=tokens * live_elements(shape) * bytes_each)

    def _backward(self, name: str, shape: Shape) -> int:
        """Returns the bytes that a micro-batch keeps for its backward pass, and the logits of a chunk."""
        rows, section = micro_batch_rows(self.config, name, self._copies(name)), self.config.section(name)
        dtype, parallel = self.config.model_of(name).dtype, layout_of_learner(section)
        if isinstance(shape, PolicyShape):
            return rows * kept_by_policy(shape, dtype, checkpointed=section.gradient_checkpointing is True)
        tokens = -(-rows * self.config.data.longest_sequence // parallel.context)
        per_layer = saved_bytes_per_token(shape, dtype, parallel, recomputed=self._alone(name, shape))
        kept = tokens * shape.layers * per_layer  # a stage holds fewer layers, but those of more micro-batches
        if section.gradient_checkpointing is True:  # the inputs of all layers, and the recomputed tensors of one
            kept = tokens * (shape.layers * shape.hidden * FLOAT + per_layer)
        if self._copies_in_half(name, shape):
            kept += half_copy(shape)
        elif dtype != "float32" and section.training_backend == "fsdp":
            # autocast keeps a second copy of the matrices, of one layer if they are sharded
            whole = self.layout.parts[name].ranks == 1
            kept += (shape.matrices if whole else 2 * shape.matrices_per_layer) * bytes_of(dtype)
        return kept + self._logits(shape, rows) // (parallel.tensor * parallel.context)

    def _forward(self, name: str, shape: Shape) -> int:
        """Returns the bytes of a forward pass: without a backward pass only the tensors of one layer are alive."""
        rows, section = forward_rows(self.config, name, self._copies(name)), self.config.section(name)
        if isinstance(shape, PolicyShape):
            return rows * forward_of_policy(shape)
        context = section.parallel.context
        tokens = -(-rows * self.config.data.longest_sequence // context)
        copied = half_copy(shape) if self._copies_in_half(name, shape) else 0
        return copied + tokens * live_elements(shape) * FLOAT + self._logits(shape, rows) // context

    def _alone(self, name: str, shape: ModelShape) -> bool:
        """Returns whether a plain decoder trains on one CPU rank that neither offloads nor computes whole layers
        again."""
        section = self.config.section(name)
        whole = section.training_backend == "fsdp" and self.layout.parts[name].ranks == 1 and not self.on_gpu
        moves = section.cpu_offload or section.offload is True or section.gradient_checkpointing
        return whole and not moves and not shape.experts and shape.latent is None

    def _at_once(self, name: str) -> bool:
        """Returns whether a mini-batch is one micro-batch, so that no gradients are there before its backward pass."""
        rows = -(-self.config.mini_batch_size(name) // self._copies(name))
        return micro_batch_rows(self.config, name, self._copies(name)) == rows

    def _copies_in_half(self, name: str, shape: ModelShape) -> bool:
        """Returns whether passes of a learner copy its matrices to bfloat16: accel/bfloat16_training.py."""
        full = self.config.section(name).lora is None
        return self._alone(name, shape) and full and self.config.model_of(name).dtype == "bfloat16"

    def _logits(self, shape: ModelShape, rows: int) -> int:
        positions = min(rows * self.config.data.max_response_length, LOGIT_CHUNK)
        return 0 if shape.value_head else positions * shape.vocabulary * FLOAT * LOGIT_COPIES


def _peak(parts: Mapping[str, Memory]) -> int:
    lasting = sum(memory.lasting for memory in parts.values())
    return lasting + max([_generating(parts), *(memory.passing for memory in parts.values())])


def _generating(parts: Mapping[str, Memory]) -> int:
    """Returns the passing memory of the rollout and of a reward model that scores meanwhile."""
    return sum(parts[name].passing for name in ("rollout", "reward") if name in parts)


def _peak_with_order(parts: Mapping[str, Memory], order: OffloadOrder) -> int:
    """Returns the largest sum of a phase: the state that components hold in it, and the passing memory of its own."""
    peaks = []
    for moves in phases_of(order):
        lasting = sum(memory.held(moves.held.get(name, "all")) for name, memory in parts.items())
        working = PHASES[moves.phase] if moves.phase != "sync weights" else ()
        passing = max((parts[name].passing for name in working if name in parts), default=0)
        peaks.append(lasting + (_generating(parts) if moves.phase == "generate" else passing))
    return max(peaks)


def trained_parameters(config: Config, component: str, shape: Shape) -> int:
    """Returns the number of trained parameters: all, or adapters and a value head; 0 for a reference."""
    if component == "reference":
        return 0
    lora = config.section(component).lora
    if isinstance(shape, PolicyShape):
        return shape.trained_parameters(lora)
    if lora is None:
        return shape.parameters
    return shape.adapter_parameters(lora) + (shape.head_parameters if shape.value_head else 0)
