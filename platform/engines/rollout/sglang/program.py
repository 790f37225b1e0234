"""The program of SGLang's process: the engine, the calls that arrive, the answers that leave.

One code path; a CPU differs from a GPU in the arguments of `engine_arguments` only. Token ids go in and come out, the
tokenizer is not loaded. The model's weights are not read from a disk either. The engine starts with placeholder weights
and receives the real ones by `load` before the first request.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from rl_platform.engines.rollout.base import Request
from rl_platform.engines.rollout.hosted.hosted_engine import ANSWER, FAILED, ITEM
from rl_platform.records import SamplingParams

PROGRAM = "from rl_platform.engines.rollout.sglang.program import main; main()"
LOADER = "rl_platform.engines.rollout.sglang.shared_weights.load"
WAKING = {"weights": ["weights"], "cache": ["kv_cache", "cuda_graph"]}  # SGLang's names of its memory
IDLE_S = 60.0  # after the last answer, for the scheduler to become idle
VERSION = "0.5.23"  # names and semantics of weight updates change between releases
Shape = tuple[str, str, list[int]]  # of a tensor: name, type and size


@dataclass(frozen=True)
class SGLangSetup:
    """`cache_tokens`: room for keys and values, None: what the weights leave of `memory_share`; that is of all the
    memory of a GPU; `dtype` as torch says it; `accelerators`: numbers of the engine's GPUs, as its host counts them;
    `reports_routes`: of a mixture of experts."""

    model_config: dict[str, object]
    device: str
    tensor_parallel: int
    dtype: str
    max_running: int
    cache_tokens: int | None
    memory_share: float
    seed: int
    accelerators: tuple[int, ...] = ()
    reports_routes: bool = False
    extra: dict[str, object] = field(default_factory=dict)
    folder: str = ""  # with a config.json, all that is read of a model's folder; `hosted` makes it


def engine_arguments(setup: SGLangSetup) -> dict[str, object]:
    """Returns what `sglang.Engine` is called with: what both profiles share, the profile of the device, what the user
    adds."""
    common = {
        "model_path": setup.folder,
        "load_format": "dummy",
        "custom_weight_loader": [LOADER],
        "skip_tokenizer_init": True,
        "tp_size": setup.tensor_parallel,
        "dtype": setup.dtype,
        "max_running_requests": setup.max_running,
        "max_total_tokens": setup.cache_tokens,
        "random_seed": setup.seed % 2**31,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "enable_return_routed_experts": setup.reports_routes,
        "sleep_on_idle": True,  # an idle scheduler polls otherwise, and takes a core from everybody else
        "log_level": "error",
    }
    cpu = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.1,
    }
    gpu = {"device": "cuda", "mem_fraction_static": setup.memory_share, "enable_memory_saver": True}
    return common | (cpu if setup.device == "cpu" else gpu) | setup.extra


def engine_environment(setup: SGLangSetup, cores: Sequence[int], gpus: Sequence[str]) -> dict[str, str]:
    """Returns the variables of the engine's process. cores: those it may use; gpus: names of those seen here.

    It counts its GPUs from 0, and sees the others behind them: weights may lie there. On a CPU each tensor-parallel
    rank has its share of the cores.
    """
    if setup.device == "cuda":
        own = [gpus[number] for number in setup.accelerators]
        return {"CUDA_VISIBLE_DEVICES": ",".join([*own, *(name for name in gpus if name not in own)])}
    ranks = setup.tensor_parallel
    if ranks == 1:
        return {"SGLANG_USE_CPU_ENGINE": "1"}
    shares = [cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks] or cores for rank in range(ranks)]
    bound = "|".join(",".join(map(str, share)) for share in shares)
    return {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": bound}


def main() -> None:
    """Entry point of the process: the argument is the socket's descriptor."""
    connection = Connection(int(sys.argv[1]))
    setup = SGLangSetup(**json.loads(connection.recv_bytes()))
    try:
        host = EngineHost(connection, setup)
    except BaseException as error:
        connection.send_bytes(json.dumps((0, FAILED, f"{type(error).__name__}: {error}")).encode())
        raise
    host.send(0, ANSWER, os.getpid())
    host.serve()
    os._exit(0)  # its own shutdown waits for schedulers that the end of this process ends


class EngineHost:
    """The engine and the calls in work. Everything runs in the engine's event loop but the reading of the socket."""

    def __init__(self, connection: Connection, setup: SGLangSetup) -> None:
        import sglang

        if sglang.__version__ != VERSION:
            raise RuntimeError(f"sglang {sglang.__version__} is installed, {VERSION} is needed")
        self.connection, self.setup = connection, setup
        if setup.device == "cuda":
            setup = replace(setup, memory_share=_share_of_free(setup.memory_share, setup.tensor_parallel))
        self.engine = sglang.Engine(**engine_arguments(setup))
        self.manager = self.engine.tokenizer_manager
        self.updating = asyncio.Event()
        self.updating.set()
        self.aborting: set[int] = set()
        self.reused = 0

    def serve(self) -> None:
        """Answers requests until the other end closes."""
        self.engine.loop.run_until_complete(self._serve())

    def send(self, number: int, kind: str, value: object) -> None:
        self.connection.send_bytes(json.dumps((number, kind, value)).encode())

    async def _serve(self) -> None:
        loop, tasks = asyncio.get_running_loop(), set()
        while True:
            try:
                number, operation, arguments = json.loads(await loop.run_in_executor(None, self.connection.recv_bytes))
            except (EOFError, OSError):
                return
            task = loop.create_task(self._perform(number, operation, arguments))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _perform(self, number: int, operation: str, arguments: tuple[object, ...]) -> None:
        try:
            answer = await getattr(self, operation)(number, *arguments)
        except Exception:
            self.send(number, FAILED, traceback.format_exc())
        else:
            self.send(number, ANSWER, answer)

    # Calls ------------------------------------------------------------------------------------------------------------

    async def generate(
        self, number: int, requests: list[dict[str, Any]], sampling: dict[str, Any], eos: list[int]
    ) -> None:
        """Sends the fields of a Completion for every request as soon as it is finished."""
        try:
            async with asyncio.TaskGroup() as group:
                for request in (Request(**fields) for fields in requests):
                    parameters = _parameters(request, SamplingParams(**sampling), eos)
                    group.create_task(self._complete(number, request, parameters))
        finally:
            self.aborting.discard(number)

    async def abort(self, number: int, generation: int) -> None:
        """Ends the unfinished sequences of the call `generation` now. Their results hold the tokens so far."""
        self.aborting.add(generation)
        self.manager.abort_request(abort_all=True)

    async def load(self, number: int, handles: list[str]) -> None:
        """New weights, their handles for each rank. Requests in work begin again: none mixes two sets of weights."""
        from sglang.srt.managers import io_struct as messages

        named = [base64.b64decode(handle) for handle in handles]
        request = messages.UpdateWeightsFromTensorReqInput(serialized_named_tensors=named, load_format=LOADER)
        async with self._paused(), self._updated():
            _check(await self.manager.update_weights_from_tensor(request, None))

    async def load_from_disk(self, number: int) -> None:
        """As `load`, from the file beside the config that the engine was started with."""
        from sglang.srt.managers import io_struct as messages

        request = messages.UpdateWeightFromDiskReqInput(model_path=self.setup.folder, load_format="safetensors")
        async with self._paused():
            _check(await self.manager.update_weights_from_disk(request, None))

    async def join(
        self, number: int, name: str, address: str, port: int, backend: str, world_size: int, first: int
    ) -> None:
        """The engine's processes are ranks `first`, ... of a group, whose rank 0 will send weights."""
        from sglang.srt.managers import io_struct as messages

        request = messages.InitWeightsUpdateGroupReqInput(
            master_address=address,
            master_port=port,
            rank_offset=first,
            world_size=world_size,
            group_name=name,
            backend=backend,
        )
        _check(await self.manager.init_weights_update_group(request, None))

    async def load_from_group(self, number: int, name: str, buckets: list[list[Shape]]) -> None:
        """As `load`, of tensors that the group's rank 0 sends in flat buckets, each as it is described."""
        from sglang.srt.managers import io_struct as messages

        async with self._paused(), self._updated():
            for bucket in buckets:
                names, dtypes, shapes = map(list, zip(*bucket, strict=True))
                request = messages.UpdateWeightsFromDistributedReqInput(
                    names=names,
                    dtypes=dtypes,
                    shapes=shapes,
                    group_name=name,
                    flush_cache=bucket is buckets[-1],
                    load_format="flattened_bucket",
                )
                _check(await self.manager.update_weights_from_distributed(request, None))

    async def sleep(self, number: int) -> None:
        """Gives the GPU's memory back, keys, values and weights."""
        from sglang.srt.managers import io_struct as messages

        # The last answer is sent before the scheduler is idle; a busy scheduler would fail on the next request.
        if not (flushed := await self.manager.flush_cache(timeout_s=IDLE_S)).success:
            raise RuntimeError(f"the engine is not idle {IDLE_S:g} s after its last answer: {flushed.message}")
        await self.manager.release_memory_occupation(messages.ReleaseMemoryOccupationReqInput(), None)

    async def wake(self, number: int, stage: str) -> None:
        """Allocates the memory of a stage again. The caller loads the weights between the two stages."""
        from sglang.srt.managers import io_struct as messages

        request = messages.ResumeMemoryOccupationReqInput(tags=WAKING[stage])
        await self.manager.resume_memory_occupation(request, None)

    async def cached_tokens(self, number: int) -> int:
        """Of the prompts answered so far: how many tokens were not computed again."""
        return self.reused

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Nothing is generated within the block; what was begins again after it, unless it fails."""
        from sglang.srt.managers import io_struct as messages

        self.updating.clear()
        try:
            await self.manager.pause_generation(messages.PauseGenerationReqInput(mode="abort"))
            yield
            await self.manager.continue_generation(messages.ContinueGenerationReqInput())
        finally:
            self.updating.set()

    @asynccontextmanager
    async def _updated(self) -> AsyncIterator[None]:
        """The block changes weights that are in memory."""
        from sglang.srt.managers import io_struct as messages

        _check(await self.manager.begin_weight_update(messages.BeginWeightUpdateReqInput(selector="all"), None))
        yield
        _check(await self.manager.end_weight_update(messages.EndWeightUpdateReqInput(), None))

    async def _complete(self, number: int, request: Request, parameters: dict[str, object]) -> None:
        while True:
            await self.updating.wait()
            response = await self.engine.async_generate(
                input_ids=list(request.token_ids),
                sampling_params=parameters,
                return_logprob=True,
                return_routed_experts=self.setup.reports_routes,
            )
            facts = response["meta_info"]
            reason = facts["finish_reason"]["type"]
            if reason != "abort" or number in self.aborting:
                break
            await asyncio.sleep(0.01)  # an update ended it: it begins again, with the new weights
        self.reused += facts.get("cached_tokens", 0)
        sampled = facts["output_token_logprobs"]  # log-probability, token and text of each
        tokens, log_probs = tuple(entry[1] for entry in sampled), tuple(entry[0] for entry in sampled)
        self.send(number, ITEM, (request.index, tokens, log_probs, reason, facts.get("routed_experts")))


def _share_of_free(share: float, gpus: int) -> float:
    """Returns the share in SGLang's meaning: of the memory that other components have left free."""
    import torch

    total = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpus)]
    return share_of_free(share, total, [torch.cuda.device_memory_used(gpu) for gpu in range(gpus)])


def share_of_free(share: float, total: Sequence[int], used: Sequence[int]) -> float:
    """Returns `share` of the memory of GPUs as a share of the free memory of the fullest one; at most 0.95."""
    return min(0.95, share * max(all_of / max(all_of - part, 1) for all_of, part in zip(total, used, strict=True)))


def _parameters(request: Request, sampling: SamplingParams, eos: list[int]) -> dict[str, object]:
    """Returns SGLang's names and values. It reads the seed only with `enable_deterministic_inference`, on a GPU."""
    return {
        "max_new_tokens": request.limit(sampling),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": eos,
        "sampling_seed": request.seed % 2**31,
    }


def _check(result: tuple[object, ...]) -> None:
    """Raises the error of a weight update, which SGLang returns."""
    done, message, *_ = result
    if not done:
        raise RuntimeError(f"the weights were not taken: {message}")
