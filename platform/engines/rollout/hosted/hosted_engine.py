"""Rollout engines in processes of their own, which receive calls, and send items and an answer for each call.

A crash of the process does not end this one: SGLang, for example, kills its parent when it crashes. A process that dies
is started again with the weights it had, and unanswered requests are sent again, so each request is answered once.
Messages are JSON, because unpickling a message could run code.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
import queue
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rl_platform.engines.rollout.base import Arrivals, Completion, FinishReason, Request
from rl_platform.errors import ConfigError, Deadline, Problem, WorkerDied, WorkerError
from rl_platform.records import SamplingParams, Weights, WeightsReceived
from rl_platform.runtime.child import Child, Death
from rl_platform.runtime.weights.group import WeightsOffer

if TYPE_CHECKING:
    from rl_platform.engines.rollout.stopping.stop_texts import StopTexts

logger = logging.getLogger(__name__)

ITEM, ANSWER, FAILED, DIED = "item", "answer", "failed", "died"  # kinds of replies to a call
LOG_LINES = 30  # of the end of the log, shown when the engine does not start
SEARCHED_LINES = 400  # of the end of the log, in which a reason is looked for: tracebacks of several processes
START_S = 600.0  # a large model on many GPUs takes minutes
# Stages of waking up: the cache is allocated after the sender's copy of the weights is no longer needed.
STAGES = ("weights", "cache")
ATTEMPTS = 3  # processes in a row that die without having answered anything
ARRIVALS_S = 0.005  # between two checks for new requests while others are generated; a decoding step takes longer
Messages = queue.SimpleQueue[tuple[str, Any]]  # (kind, value)


class EngineCall:
    """One call. `arrived` is the queue of the messages that answer it; several calls may share a queue."""

    def __init__(self, number: int, operation: str, arrived: Messages | None = None) -> None:
        self.number, self.operation = number, operation
        self.arrived: Messages = queue.SimpleQueue() if arrived is None else arrived

    def wait(self, timeout: float | None = None) -> Any:
        """Returns the answer.

        Raises WorkerError if the engine refuses, WorkerDied if it dies, Deadline if no message arrives in `timeout`
        seconds.
        """
        try:
            kind, value = self.arrived.get(timeout=timeout)
        except queue.Empty:
            raise Deadline(f"the engine did not answer to {self.operation} within {timeout:g} s") from None
        if kind == ANSWER:
            self.value = value
            return value
        raise WorkerDied(value) if kind == DIED else WorkerError(f"{self.operation}: {value}")


class EngineProcess:
    """Starts `program`, sends it `setup` and then calls, all as JSON. Processes that it starts end with it.

    The process inherits the environment of this one, as `not_inherited` changes it, and `environment` is added. Output
    goes to `log`. descriptors, python, scratch: of `Child`.
    """

    def __init__(
        self,
        program: str,
        setup: object,
        environment: Mapping[str, str],
        log: Path,
        *,
        descriptors: Sequence[int] = (),
        python: str | None = None,
        scratch: str = "",
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._log_begins = output.tell()
            variables = {**not_inherited(os.environ), **environment}
            self.child = Child(
                program,
                Death.GUARD,
                environment=variables,
                descriptors=descriptors,
                output=output,
                python=python,
                scratch=scratch,
            )
        self._connection = self.child.connection()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, EngineCall] = {}
        self._dead = False
        self._reader = threading.Thread(target=self._read, name="engine", daemon=True)
        self.started = self._register("start")
        with suppress(OSError):  # dead already: the reader reports it
            self._connection.send_bytes(json.dumps(setup).encode())
        self._reader.start()

    def call(self, operation: str, *arguments: object, arrived: Messages | None = None) -> EngineCall:
        """Starts a call and returns at once. arrived: the queue of its messages; None: a new one."""
        call = self._register(operation, arrived)
        with self._lock, suppress(OSError):
            self._connection.send_bytes(json.dumps((call.number, operation, arguments)).encode())
        return call

    def kill(self) -> None:
        """Kills the process and its children. A second call does nothing."""
        self.child.kill()
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join()

    def end_of_log(self, lines: int = LOG_LINES) -> str:
        """Returns the last lines that this process wrote."""
        text = self.log.read_bytes()[self._log_begins :] if self.log.exists() else b""
        return "\n".join(text.decode(errors="replace").splitlines()[-lines:])

    def _register(self, operation: str, arrived: Messages | None = None) -> EngineCall:
        with self._lock:
            call = EngineCall(next(self._numbers), operation, arrived)
            if self._dead:
                call.arrived.put((DIED, self._obituary()))
            else:
                self._calls[call.number] = call
        return call

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, kind, value = json.loads(self._connection.recv_bytes())
                call = self._calls.get(number) if kind == ITEM else self._calls.pop(number)
                if call is not None:
                    call.arrived.put((kind, value))
        self.child.kill()  # its other processes would wait for the one that ended
        with self._lock:
            self._dead = True
            self._connection.close()
            left, self._calls = self._calls, {}
        for call in left.values():
            call.arrived.put((DIED, self._obituary()))

    def _obituary(self) -> str:
        return f"the engine's process died; its log is {self.log}"


class HostedEngine(ABC):
    """A rollout engine in a process of its own. Subclasses start the process and give it weights.

    engine: its name in messages. Raises ConfigError if it does not come up for a reason that is known, else WorkerError
    with the end of its log.
    """

    engine: str
    accepts_arrivals = True

    stop_texts: StopTexts | None = None  # the engine continues; tokens after the text are dropped

    def __init__(self, label: str, model_config: Mapping[str, object], eos_token_ids: Sequence[int]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rl-platform-model-")
        Path(self._folder.name, "config.json").write_text(json.dumps(model_config), encoding="utf-8")
        self.eos = tuple(eos_token_ids)
        layers = model_config.get("num_hidden_layers")
        self._layers = layers if isinstance(layers, int) else 0
        self.restarts, self._restarting = 0, threading.Lock()
        self._label = label
        self._weights: Weights | WeightsOffer | None = None
        self._generation: list[int] = []  # the numbers of its calls
        self._asleep: tuple[str, ...] = ()  # the remaining stages of waking up, in order
        self._process = self._start()

    @abstractmethod
    def _new_process(self) -> EngineProcess: ...

    @abstractmethod
    def _load(self) -> None:
        """Sends `self._weights` to the engine, whose memory for weights is allocated but has no content."""

    @abstractmethod
    def _recognised(self, log: str) -> Problem | None:
        """Returns the known problem that the log of a failed start shows."""

    @property
    def version(self) -> int:
        return -1 if self._weights is None else self._weights.version

    @property
    def process_id(self) -> int:
        """The id of the engine's process."""
        pid: int = self._process.started.value
        return pid

    def receive(self, weights: Weights | WeightsOffer) -> WeightsReceived:
        self._weights = weights = self._reachable(weights)
        self._load_awake()
        return WeightsReceived(weights.version, weights.bytes, weights.buckets)

    @abstractmethod
    def _reachable(self, weights: Weights | WeightsOffer) -> Weights | WeightsOffer:
        """Returns `weights`, or a copy if they are offered by a process group that the engine cannot join."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        on_finished: Callable[[Completion], None],
        arrivals: Arrivals | None = None,
    ) -> None:
        try:
            self._generate(requests, sampling, on_finished, arrivals)
        except BaseException:
            self._call_abort()  # nobody waits for the rest, which would slow down the next call
            raise

    def _generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        on_finished: Callable[[Completion], None],
        arrivals: Arrivals | None,
    ) -> None:
        unanswered = {request.index: request for request in requests}
        unsent, calls, deaths, death = [*requests], 0, 0, ""
        arrived: Messages = queue.SimpleQueue()
        self._generation = []
        while True:
            if arrivals is not None:
                unsent += (new := arrivals.take(idle=not unanswered))
                unanswered |= {request.index: request for request in new}
            if not unanswered:
                return
            if unsent:
                if self._asleep:
                    self._load_awake()
                work = [asdict(request) for request in unsent]
                process = self._process
                call = process.call("generate", work, asdict(sampling), self.eos, arrived=arrived)
                self._generation.append(call.number)
                unsent, calls = [], calls + 1
            try:
                kind, value = arrived.get(timeout=None if arrivals is None else ARRIVALS_S)
            except queue.Empty:
                continue
            if kind == ITEM:
                request = unanswered.pop(value[0])
                on_finished(self._completion(request, *value[1:]))
                deaths = 0
                continue
            if kind == FAILED:
                raise WorkerError(f"generate: {value}")
            calls, death = calls - 1, value if kind == DIED else death
            if calls:
                continue
            if death:  # all calls of the process have ended
                deaths += 1
                if deaths >= ATTEMPTS:
                    raise WorkerDied(f"{self._label}: {deaths} engines in a row died: {death}")
                self._restart(process, death)
                self._generation, death = [], ""
            unsent = [*unanswered.values()]

    def _completion(
        self, request: Request, tokens: list[int], log_probs: list[float], reason: FinishReason, encoded: str | None
    ) -> Completion:
        computed = len(request.token_ids) + len(tokens) - 1
        routes = None if encoded is None else decoded_routes(encoded, computed, self._layers)
        completion = Completion(request.index, tuple(tokens), tuple(log_probs), reason, routes)
        return self.stop_texts.cut(request, completion) if self.stop_texts else completion

    def abort(self) -> None:
        with suppress(WorkerDied):  # `generate` hears of the death, too, and starts the engine again
            for call in self._call_abort():
                call.wait()

    def _call_abort(self) -> list[EngineCall]:
        return [self._process.call("abort", number) for number in [*self._generation]]

    def offload(self) -> None:
        if not self._asleep:
            self._process.call("sleep").wait()
            self._asleep = STAGES

    def cached_tokens(self) -> int:
        """Returns how many tokens of prompts the process took from its prefix cache."""
        cached: int = self._process.call("cached_tokens").wait()
        return cached

    def close(self) -> None:
        self._process.kill()
        self._folder.cleanup()

    def _load_awake(self) -> None:
        process = self._process
        try:
            self._wake("weights")
            self._load()
            self._wake("cache")
        except WorkerDied as death:
            self._restart(process, str(death))

    def _wake(self, stage: str) -> None:
        if stage in self._asleep:
            self._process.call("wake", stage).wait()
            self._asleep = self._asleep[1:]

    def _start(self) -> EngineProcess:
        began = time.monotonic()
        process = self._new_process()
        try:
            process.started.wait(START_S)
        except (Deadline, WorkerDied, WorkerError) as error:
            process.kill()
            log = f"{process.end_of_log(SEARCHED_LINES)}\n{error}"
            if problem := self._recognised(log):
                raise ConfigError([problem]) from error
            raise WorkerError(f"{self._label}: {self.engine} did not start: {error}\n{process.end_of_log()}") from error
        logger.info("%s: %s started in %.0f s", self._label, self.engine, time.monotonic() - began)
        return process

    def _restart(self, dead: EngineProcess, death: str) -> None:
        """Starts the engine again, unless another thread did so after `dead` died."""
        with self._restarting:
            if self._process is not dead:
                return
            self.restarts += 1
            logger.warning("%s: %s. It is started again with the weights it had", self._label, death)
            dead.kill()
            self._process, self._asleep = self._start(), ()
            self._load()


def decoded_routes(encoded: str, tokens: int, layers: int) -> Tensor:
    """Returns the routes int16 [tokens,layers,K] that base64 of int32 numbers encodes.

    Raises WorkerError if they are not those of so many tokens, or if the engine recorded none.
    """
    numbers = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    if not tokens or numbers.size % (tokens * layers):
        raise WorkerError(f"the engine reported {numbers.size} selected experts for {tokens} tokens in {layers} layers")
    routes = torch.from_numpy(numbers.astype(np.int16)).view(tokens, layers, -1)
    if routes.shape[2] > 1 and not routes.any():  # its buffer is as it was allocated: experts of a token differ
        raise WorkerError("the engine recorded no selected experts of this model: actor.router_replay=false")
    return routes


def not_inherited(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the variables of a learner's process that an engine must not inherit, with new values; None removes one.

    * Expandable segments: SGLang and vLLM release memory by mappings of their own and refuse these segments.
    * MALLOC_ARENA_MAX=1: hosts have one computing thread and set it. Threads of an engine would wait for each other.
    * CUDA_DEVICE_MAX_CONNECTIONS=1: Megatron needs it. Streams of an engine would share one queue.
    """
    changed: dict[str, str | None] = {}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        options = environment.get(name, "").split(",")
        others = [option for option in options if not option.strip().startswith("expandable_segments")]
        if others != options:
            changed[name] = ",".join(others) or None
    for name in ("MALLOC_ARENA_MAX", "CUDA_DEVICE_MAX_CONNECTIONS"):
        if environment.get(name) == "1":
            changed[name] = None
    return changed


def exported(name: str) -> str:
    """Returns the name in a Hugging Face folder of a parameter of `models.language.LanguageModel`."""
    return "lm_head.weight" if name == "head.weight" else name.replace("backbone.", "model.", 1)


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process sees, in torch's order."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name for name in shown.split(",") if name] if shown else [str(n) for n in range(torch.cuda.device_count())]
