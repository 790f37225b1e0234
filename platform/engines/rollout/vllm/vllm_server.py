"""The program of vLLM's process: the engine, the calls that arrive, the answers that leave.

It runs in the interpreter of `rollout.vllm.python`, whose environment has vLLM and the torch that vLLM requires, and
nothing of this package. So this file imports only vLLM, that torch and the standard library. Token ids go in and come
out; no tokenizer is loaded. The weights are random until the first `load`.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

ITEM, ANSWER, FAILED = "item", "answer", "failed"  # kinds of replies to a call
GREEDY = 1e-5  # vLLM decodes greedily at lower temperatures

Stored = tuple[str, str, list[int], int]  # name, type, shape and first byte of a tensor in shared memory


class Setup(TypedDict):
    """`version` of vLLM, the descriptor of the memory with the weights, and arguments of `vllm.EngineArgs`."""

    version: str
    weights: int
    arguments: dict[str, object]


class Wanted(TypedDict):
    """A `Request` of the caller."""

    index: int
    token_ids: list[int]
    seed: int
    max_new_tokens: int | None


class SamplingOptions(TypedDict):
    """`SamplingParams` of the caller."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int


def main() -> None:
    """Entry point of the process: the argument is the socket's descriptor."""
    connection = Connection(int(sys.argv[1]))
    setup = json.loads(connection.recv_bytes())
    try:
        server = VLLMServer(connection, setup)
    except BaseException as error:
        connection.send_bytes(json.dumps((0, FAILED, f"{type(error).__name__}: {error}")).encode())
        raise
    server.send(0, ANSWER, os.getpid())
    server.serve()
    os._exit(0)


class Response:
    """A request of the call `number` and what is sampled of its response so far."""

    def __init__(self, number: int, request: Wanted, parameters: SamplingParams) -> None:
        self.number, self.request, self.parameters = number, request, parameters
        self.restart()

    def restart(self) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []


class VLLMServer:
    """Steps the engine while there are requests, and reads calls between the steps."""

    def __init__(self, connection: Connection, setup: Setup) -> None:
        import vllm

        installed = vllm.__version__.split("+")[0]
        if installed != setup["version"]:
            raise RuntimeError(f"vllm {installed} is installed, {setup['version']} is needed")
        self.connection = connection
        self.weights = f"/proc/{os.getpid()}/fd/{setup['weights']}"  # workers of other ranks open it, too
        self.engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**setup["arguments"]))
        self.engine.collective_rpc("scale_log_probs")
        self.names = map(str, itertools.count())
        self.responses: dict[str, Response] = {}
        self.reused = 0

    def send(self, number: int, kind: str, value: object) -> None:
        self.connection.send_bytes(json.dumps((number, kind, value)).encode())

    def serve(self) -> None:
        """Answers requests until the other end closes."""
        while True:
            while self.connection.poll(0 if self.responses else None):
                try:
                    number, operation, arguments = json.loads(self.connection.recv_bytes())
                except (EOFError, OSError):
                    return
                self.perform(number, operation, arguments)
            self.step()

    def perform(self, number: int, operation: str, arguments: list[object]) -> None:
        try:
            answer = getattr(self, operation)(number, *arguments)
        except Exception:
            self.drop(number)
            self.send(number, FAILED, traceback.format_exc())
        else:
            if not any(response.number == number for response in self.responses.values()):
                self.send(number, ANSWER, answer)

    def step(self) -> None:
        for output in self.engine.step():
            response = self.responses[output.request_id]
            (sampled,) = output.outputs
            response.tokens += sampled.token_ids
            response.log_probs += [
                entry[token].logprob for token, entry in zip(sampled.token_ids, sampled.logprobs, strict=True)
            ]
            if output.finished:
                self.reused += output.num_cached_tokens or 0
                self.finish(output.request_id, sampled.finish_reason)

    def finish(self, name: str, reason: str) -> None:
        response = self.responses.pop(name)
        completion = response.request["index"], response.tokens, response.log_probs, reason, None
        self.send(response.number, ITEM, completion)
        if not any(other.number == response.number for other in self.responses.values()):
            self.send(response.number, ANSWER, None)

    def begin(self, response: Response) -> None:
        name = next(self.names)
        self.responses[name] = response
        prompt = {"prompt_token_ids": response.request["token_ids"]}
        self.engine.add_request(name, prompt, response.parameters)

    def drop(self, number: int) -> None:
        names = [name for name, response in self.responses.items() if response.number == number]
        self.engine.abort_request(names)
        for name in names:
            del self.responses[name]

    # Calls ------------------------------------------------------------------------------------------------------------

    def generate(self, number: int, requests: list[Wanted], sampling: SamplingOptions, eos: list[int]) -> None:
        """Sends the fields of a Completion for every request as soon as it is finished."""
        vocabulary = self.engine.model_config.get_vocab_size()
        stop = [token for token in eos if token < vocabulary]  # vLLM refuses others, which are never sampled
        for request in requests:
            self.begin(Response(number, request, _parameters(request, sampling, stop)))

    def abort(self, number: int, generation: int) -> None:
        """Ends the call `generation` now: unfinished responses are sent as they are."""
        names = [name for name, response in self.responses.items() if response.number == generation]
        self.engine.abort_request(names)
        for name in names:
            self.finish(name, "abort")

    def load(self, number: int, tensors: list[Stored]) -> None:
        """Loads the weights that lie in shared memory. Responses in work begin again: none mixes two versions."""
        self.engine.abort_request(list(self.responses))
        unfinished = list(self.responses.values())
        self.responses.clear()
        self.engine.collective_rpc("load_shared", args=(self.weights, tensors))
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache still holds keys and values of the old weights")
        for response in unfinished:
            response.restart()
            self.begin(response)

    def sleep(self, number: int) -> None:
        """Frees the GPU's memory: weights, keys and values. On a CPU vLLM has no such mode."""
        if self.engine.model_config.enable_sleep_mode:
            self.engine.sleep(level=2)

    def wake(self, number: int, stage: str) -> None:
        """Allocates the memory of a stage again, without content."""
        if self.engine.model_config.enable_sleep_mode:
            self.engine.wake_up(["weights"] if stage == "weights" else ["kv_cache"])

    def cached_tokens(self, number: int) -> int:
        """Returns how many tokens of prompts were not computed again so far."""
        return self.reused


def _parameters(request: Wanted, sampling: SamplingOptions, stop: list[int]) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    longest = sampling["max_new_tokens"]
    own = request["max_new_tokens"]
    return SamplingParams(
        max_tokens=longest if own is None else min(longest, own),
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=sampling["top_k"],
        seed=request["seed"] % 2**63,
        stop_token_ids=stop,
        ignore_eos=True,  # of the model's config; `stop` has all that count
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


class WorkerExtension:
    """Methods that vLLM adds to its worker of every tensor-parallel rank."""

    model_runner: GPUModelRunner

    def scale_log_probs(self) -> None:
        """Makes log-probs those of the unfiltered distribution at the sampling temperature.

        vLLM returns either raw ones, at temperature 1, or those after the filters top-k and top-p.
        """
        import torch

        sampler = self.model_runner.sampler
        # of the rows that are sampled now, [rows, 1]; None: all are greedy
        temperatures: list[torch.Tensor | None] = [None]

        def remember(
            _: object, arguments: tuple[torch.Tensor, SamplingMetadata], named: dict[str, SamplingMetadata]
        ) -> None:
            metadata = named["sampling_metadata"] if "sampling_metadata" in named else arguments[1]
            temperature = None if metadata.all_greedy else metadata.temperature
            temperatures[0] = temperature if temperature is None else temperature[:, None]

        def log_probs(logits: torch.Tensor) -> torch.Tensor:
            logits, temperature = logits.float(), temperatures[0]
            if temperature is not None:
                logits = logits / torch.where(temperature < GREEDY, 1.0, temperature)
            return logits.log_softmax(dim=-1)

        sampler.register_forward_pre_hook(remember, with_kwargs=True)
        sampler.compute_logprobs = log_probs

    def load_shared(self, path: str, tensors: list[Stored]) -> None:
        """Loads tensors that lie in the file."""
        import torch

        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

        def tensor(dtype: str, shape: list[int], start: int) -> torch.Tensor:
            count = math.prod(shape)
            return torch.frombuffer(memory, dtype=getattr(torch, dtype), count=count, offset=start).view(shape)

        named = ((name, tensor(dtype, shape, start)) for name, dtype, shape, start in tensors)
        self.model_runner.reload_weights(weights_iterator=named)
        for module in self.model_runner.get_model().modules():
            if hasattr(module, "cpu_linear"):  # a CPU's packed copy: that of tied weights is of the old ones
                module.quant_method.process_weights_after_loading(module)


if __name__ == "__main__":
    main()
