"""The built-in rollout engine: continuous batching on torch, on CPU or GPU.

A forward pass has one token of every running sequence and a bounded number of prompt tokens. Long prompts therefore
enter in parts while other sequences are decoded. A finished sequence leaves at once and a waiting one enters. Keys and
values are stored in pages (`kv_cache`); common prefixes are computed and stored once (`prefill`); known architectures
run with fewer operations (`decoder`). On a CPU a compiled loop computes attention (`accel/decode_kernel`), in bfloat16
also the operations between the matrix products (`accel/row_kernels`) and sampling (`accel/sampling_kernel`). On a GPU
with Triton a CUDA graph decodes the running sequences, and the forward pass has the prompts only (`accel/cuda_decode`).
Weights of the same device and type are references to the trainer's; on a CPU the matrices are packed for each
generation (`accel/packed_linear`).

Not covered: tensor parallelism.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform import acceleration
from rl_platform.engines.rollout.base import Arrivals, Completion, Request
from rl_platform.engines.rollout.batch import ContinuousBatch
from rl_platform.engines.rollout.decoder import FusedDecoder, decoder_for
from rl_platform.engines.rollout.kv_cache import KVCache
from rl_platform.engines.rollout.unfinished import UnfinishedResponses
from rl_platform.extras import required
from rl_platform.models.attention import cached_heads, is_plain
from rl_platform.models.language import LanguageModel
from rl_platform.records import SamplingParams, Weights, WeightsReceived

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from rl_platform.engines.offloading.swap import Swap
    from rl_platform.engines.rollout.stopping.stop_texts import StopTexts
    from rl_platform.models.experts.routers import RecordedRouters
    from rl_platform.runtime.weights.group import WeightReceiver, WeightsOffer


class TorchRolloutEngine:
    """Generates with a model of `model_config` (transformers). `receive` must load weights before `generate`.

    dtype: of weights, keys and values; received weights of another type are converted and therefore copied.
    label: the name of this rank for senders of weights. records_routes: completions have the experts of their tokens.
    continues: weights that arrive during `generate` are for the next tokens of unfinished responses, whose keys and
    values are computed again; else these responses start again. alone: nothing else in this process uses the GPU during
    `generate`.
    """

    accepts_arrivals = True  # `generate` takes requests that arrive while it generates

    def __init__(
        self,
        model_config: PretrainedConfig,
        eos_token_ids: Sequence[int],
        max_running: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        label: str = "rollout",
        stop_texts: StopTexts | None = None,
        records_routes: bool = False,
        continues: bool = False,
        alone: bool = True,
    ) -> None:
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        with init_empty_weights(include_buffers=False):
            network = AutoModelForCausalLM.from_config(model_config)
        self.model = LanguageModel(network).eval()
        self.config = model_config
        self.eos, self.stop_texts = frozenset(eos_token_ids), stop_texts
        self.max_running, self.continues = max_running, continues
        self.device, self.dtype = device, dtype
        self.version = -1
        self._lock = threading.RLock()  # one decoding step, or one update
        self._turn = threading.Lock()  # a waiting update holds it; otherwise decoding would take `_lock` again at once
        self._updated = self._aborted = False
        self._decoder = decoder_for(self.model, device, dtype)
        self._decoding = acceleration.find("decoding_step", self._decoder, max_running, device, dtype, graphs=alone)
        self._recorder: RecordedRouters | None = None
        if records_routes:
            with required("rl_platform.models.experts", "actor.router_replay"):
                from rl_platform.models.experts.routers import RecordedRouters
            self._recorder = RecordedRouters(self.model.backbone)
        self._swap: Swap | None = None  # of the weights, from the first `offload` on
        self.label = label
        self._receiver: WeightReceiver | None = None  # of weights that another process offers

    def offload(self) -> None:
        """Moves the weights to host memory until they are used. They must not be references to the trainer's."""
        if self._swap is None:
            with required("rl_platform.engines.offloading", "rollout.offload"):
                from rl_platform.engines.offloading.swap import Swap
            self._swap = Swap(self.model.parameters, self.device)
        self._unpack()
        if self._decoding is not None:
            self._decoding.drop()
        self._swap.leave()

    def _onload(self) -> None:
        if self._swap is not None:
            self._swap.enter()

    def _pack(self) -> None:
        """Packs the matrices that are not packed. 135 M parameters take 0.15 s on two cores."""
        packed = acceleration.find("packed_linear_class", self.device, self.dtype)
        if packed is not None:
            for linear in self._decoder.linears:
                if linear.packed is None:
                    linear.pack(packed, self.dtype)

    def _unpack(self) -> None:
        for linear in self._decoder.linears:
            linear.packed = None

    def receive(self, weights: Weights | WeightsOffer) -> WeightsReceived:
        if not isinstance(weights, Weights) and not weights.reaches([self.device]):
            weights = weights.fetch()
        with self._turn, self._lock:
            self._receive(weights)
            self._updated = True
        return WeightsReceived(weights.version, weights.bytes, weights.buckets)

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None: ...

    def _receive(self, weights: Weights | WeightsOffer) -> None:
        self._onload()
        if self.version < 0:
            if isinstance(weights, Weights):
                state = self._converted(weights.state, self._packed_names())
            else:
                state = self._converted(weights.empty(self.device))
            self.model.load_state_dict(state, assign=True)
            self.model.to(self.device)  # buffers, which are not among the weights
            given = weights.state if isinstance(weights, Weights) else {}
            if self._decoding is not None and all(state[name] is not given[name] for name in given):
                self._decoding.join()
        own = self.model.state_dict(keep_vars=True)
        if not isinstance(weights, Weights):
            from rl_platform.runtime.weights.group import WeightReceiver

            self._receiver = self._receiver or WeightReceiver(self.label, self.device)
            self._receiver.receive(weights, own)
        elif self.version >= 0:
            for name, tensor in weights.state.items():
                if own[name].shape != tensor.shape:
                    raise RuntimeError(f"{name}: {list(tensor.shape)} numbers for a tensor of {list(own[name].shape)}")
                if (own[name].device, own[name].dtype) == (tensor.device, tensor.dtype):
                    own[name].data = tensor
                else:
                    own[name].data.copy_(tensor)
        self._unpack()
        self.version = weights.version

    def _packed_names(self) -> set[str]:
        """Returns the names of matrices that are read only to pack them, so that their type does not matter."""
        decoder, packed = self._decoder, acceleration.find("packed_linear_class", self.device, self.dtype)
        if packed is None or not isinstance(decoder, FusedDecoder):
            return set()
        matrices = {linear.weight for layer in decoder.layers for joined in layer.linears for linear in joined.layers}
        return {name for name, parameter in self.model.named_parameters() if parameter in matrices}

    def _converted(self, state: Mapping[str, Tensor], unchanged: Collection[str] = ()) -> dict[str, Tensor]:
        """Returns tensors of the engine's device and type, by reference where possible. Shared memory stays shared.

        Buffers keep their type: biases that select experts (DeepSeek-V3) are float32 in every model. So do the tensors
        named in `unchanged`.
        """
        own: dict[tuple[int, torch.Size], Tensor] = {}
        unchanged = {*unchanged, *(name for name, _ in self.model.named_buffers())}
        for name, tensor in state.items():
            key = tensor.data_ptr(), tensor.shape
            if key not in own:
                own[key] = tensor.to(self.device, tensor.dtype if name in unchanged else self.dtype)
        return {name: own[tensor.data_ptr(), tensor.shape] for name, tensor in state.items()}

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        on_finished: Callable[[Completion], None],
        arrivals: Arrivals | None = None,
    ) -> None:
        work = UnfinishedResponses(requests, sampling)
        with self._lock:
            self._onload()
            self._pack()
            batch, version = self._new_batch(requests, sampling, arrivals), self.version
            self._updated = self._aborted = False
        while not self._aborted:
            if arrivals is not None and (new := arrivals.take(idle=batch.over)):
                work.add(new)
                batch.add(new)
            if batch.over:
                break
            with self._turn:  # lets a waiting update go first
                pass
            with self._lock:
                if self._updated:
                    self._pack()
                    left = work.continued(batch.cut(), version) if self.continues else batch.left
                    batch, version, self._updated = self._new_batch(left, sampling, arrivals), self.version, False
                with nullcontext() if self._decoding is None else self._decoding.on_device():
                    batch.step()
            for completion in batch.finished(self.eos, self.stop_texts):
                on_finished(work.whole(completion, version))
        for completion in batch.cut():
            on_finished(work.whole(completion, version))
        with self._lock:  # training has their memory
            self._unpack()
            if self._decoding is not None:
                self._decoding.end()

    def _new_batch(
        self, requests: Sequence[Request], sampling: SamplingParams, arrivals: Arrivals | None = None
    ) -> ContinuousBatch:
        config = self.config
        heads, width = cached_heads(config)
        slots = min(self.max_running, len(requests)) if arrivals is None else self.max_running
        cache = KVCache(config.num_hidden_layers, slots, heads, width, dtype=self.dtype, device=self.device)
        lengths = [len(request.token_ids) + request.limit(sampling) for request in requests]
        longest = max(lengths, default=0) if arrivals is None else arrivals.longest
        latent = bool(getattr(config, "kv_lora_rank", None))
        plain = is_plain(config, longest)
        decoding = self._decoding if plain and self._recorder is None else None
        if decoding is not None:
            decoding.begin(cache, sampling, longest)
        return ContinuousBatch(
            self._decoder,
            cache,
            requests,
            sampling,
            plain=plain,
            padded=latent,
            recorder=self._recorder,
            decoding=decoding,
        )
