"""The built-in rollout engine: continuous batching on plain torch, on CPU or GPU.

Running sequences are decoded together; one that finishes leaves at once and a waiting one takes its slot. What prompts
have in common is computed once (`prefill`), the layers of well-known architectures with few operations (`decoder`).
Weights on the same device and of the same type are references to the trainer's, not copies; on a CPU the matrices are
repacked after each update (`packed_linear`).

Does not cover tensor parallelism and paging: every slot has room for the longest sequence of the call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_platform.engines.offload import Swap
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.decoder import decoder_for
from rl_platform.engines.rollout.kv_cache import DecodeAttention, KVCache
from rl_platform.engines.rollout.packed_linear import can_pack
from rl_platform.engines.rollout.prefill import PREFILL_TOKENS, Prefill
from rl_platform.engines.rollout.sampling import sample, uniforms
from rl_platform.models.language import LanguageModel
from rl_platform.records import SamplingParams, Weights
from rl_platform.runtime.weight_group import WeightReceiver, WeightsOffer
from rl_platform.runtime.weights import empty

REFILL_SHARE = 8  # waiting requests enter when one slot in this many is free: prefills of one prompt are slow


@dataclass
class _Running:
    request: Request
    random: Tensor
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def stored(self) -> int:
        """Tokens in its slot: all but the last sampled one."""
        return len(self.request.token_ids) + len(self.tokens) - 1


class TorchRolloutEngine:
    """`model_config`: of transformers. Weights come by `receive` before the first `generate`.

    dtype: of weights, keys and values; weights of another one are converted, so they are no references any more.
    label: of the rank that generates, for those who send weights to it.
    """

    def __init__(
        self,
        model_config: Any,
        eos_token_ids: Sequence[int],
        max_running: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        label: str = "rollout",
    ) -> None:
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        with init_empty_weights(include_buffers=False):
            network = AutoModelForCausalLM.from_config(model_config)
        self.model = LanguageModel(network).eval()
        self.config = model_config
        self.eos = frozenset(eos_token_ids)
        self.max_running = max_running
        self.device, self.dtype = device, dtype
        self.version = -1
        self._lock = threading.RLock()  # one decoding step, or one update
        self._again = self._aborted = False
        self._decoder = decoder_for(self.model)
        self._swap = Swap(self.model.parameters, device)
        self._receiver = WeightReceiver(label, device)

    def offload(self) -> None:
        """The weights leave the device until they are used. Only where they are not the trainer's."""
        self._swap.leave()
        for linear in self._decoder.linears:
            linear.drop()

    def _onload(self) -> None:
        if self._swap.away:
            self._swap.enter()
            self._repack()

    def _repack(self) -> None:
        if can_pack(self.device):
            for linear in self._decoder.linears:
                linear.repack()

    def takes(self, offer: WeightsOffer) -> bool:
        return offer.reaches([self.device])

    def receive(self, weights: Weights | WeightsOffer) -> None:
        with self._lock:
            self._receive(weights)
            self._again = True

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None: ...

    def _receive(self, weights: Weights | WeightsOffer) -> None:
        self._onload()
        if self.version < 0:
            state = empty(weights.tensors, self.device) if isinstance(weights, WeightsOffer) else weights.state
            self.model.load_state_dict(self._own(state), assign=True)
            self.model.to(self.device)  # its buffers, which are not among the weights
        own = self.model.state_dict(keep_vars=True)
        if isinstance(weights, WeightsOffer):
            self._receiver.receive(weights, own)
        elif self.version >= 0:
            for name, tensor in weights.state.items():
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].data.copy_(tensor)
        self._repack()
        self.version = weights.version

    def _own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """References where device and type are the engine's; tensors that share memory still do."""
        found: dict[tuple[int, torch.Size], Tensor] = {}
        for tensor in state.values():
            key = tensor.data_ptr(), tensor.shape
            if key not in found:
                found[key] = tensor.to(self.device, self.dtype)
        return {name: found[tensor.data_ptr(), tensor.shape] for name, tensor in state.items()}

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        on_finished: Callable[[Completion], None],
    ) -> None:
        self._onload()
        waiting = deque(requests)
        running: list[_Running] = []
        slots = min(self.max_running, len(requests))
        longest = max((len(request.token_ids) + request.limit(sampling) for request in requests), default=0)
        cache = self._new_cache(slots, longest)
        self._again, self._aborted = True, False
        while (waiting or running) and not self._aborted:
            with self._lock:
                if self._again:  # no response mixes two sets of weights
                    waiting.extendleft(entry.request for entry in reversed(running))
                    running.clear()
                    prefill = Prefill(self._decoder, cache, [request.token_ids for request in waiting])
                    self._again = False
                self._advance(prefill, waiting, running, sampling)
            self._release(cache, running, sampling, on_finished)
        for entry in running:
            on_finished(Completion(entry.request.index, tuple(entry.tokens), tuple(entry.log_probs), "abort"))
        for request in waiting:
            on_finished(Completion(request.index, (), (), "abort"))

    def _advance(
        self, prefill: Prefill, waiting: deque[Request], running: list[_Running], sampling: SamplingParams
    ) -> None:
        """One more token for those that run, or the first one for those that enter."""
        slots = prefill.cache.slots
        free = slots - len(running)
        if waiting and free * REFILL_SHARE >= min(slots, len(waiting)):
            entered = self._take(waiting, free, sampling)
            following = waiting[0].token_ids if waiting else None
            states = prefill.enter(len(running), [entry.request.token_ids for entry in entered], following)
            running += entered
        else:
            entered = running
            states = self._decode(prefill.cache, running)
        self._append(entered, self._decoder.logits(states), sampling)

    def _take(self, waiting: deque[Request], free: int, sampling: SamplingParams) -> list[_Running]:
        """Those that enter now, longest prompt first: neighbours in the cache are read as far as the longest goes."""
        entered: list[_Running] = []
        tokens = 0
        while waiting and len(entered) < free and (not entered or tokens + len(waiting[0].token_ids) <= PREFILL_TOKENS):
            request = waiting.popleft()
            tokens += len(request.token_ids)
            entered.append(_Running(request, uniforms(request.seed, sampling.max_new_tokens)))
        return sorted(entered, key=lambda entry: -len(entry.request.token_ids))

    def _decode(self, cache: KVCache, running: list[_Running]) -> Tensor:
        tokens = torch.tensor([entry.tokens[-1] for entry in running], device=self.device)
        lengths = torch.tensor([entry.stored for entry in running], device=self.device)
        return self._decoder.hidden(tokens, lengths, DecodeAttention(cache, lengths))

    def _append(self, entries: list[_Running], logits: Tensor, sampling: SamplingParams) -> None:
        uniform = torch.stack([entry.random[len(entry.tokens)] for entry in entries])
        tokens, log_probs = sample(logits, uniform, sampling)
        for entry, token, log_prob in zip(entries, tokens.tolist(), log_probs.tolist(), strict=True):
            entry.tokens.append(token)
            entry.log_probs.append(log_prob)

    def _release(
        self,
        cache: KVCache,
        running: list[_Running],
        sampling: SamplingParams,
        on_finished: Callable[[Completion], None],
    ) -> None:
        """Finished sequences leave; the last running one moves into the gap."""
        for slot in range(len(running) - 1, -1, -1):
            entry = running[slot]
            stopped = entry.tokens[-1] in self.eos
            if not stopped and len(entry.tokens) < entry.request.limit(sampling):
                continue
            last = running.pop()
            if slot < len(running):
                running[slot] = last
                cache.copy(len(running), slot, last.stored)
            reason = "stop" if stopped else "length"
            on_finished(Completion(entry.request.index, tuple(entry.tokens), tuple(entry.log_probs), reason))

    def _new_cache(self, slots: int, length: int) -> KVCache:
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dtype = self.model.head.weight.dtype
        return KVCache(config.num_hidden_layers, slots, heads, length, head_dim, dtype=dtype, device=self.device)
