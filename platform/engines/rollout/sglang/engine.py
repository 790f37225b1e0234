"""SGLang as a rollout engine: keeps its process alive, with the current weights.

A process that dies is started again with the weights it had, and unanswered requests are sent again. So every request
is answered once. The code of the process is in `program`.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.sglang.engine_process import EngineCall, EngineProcess
from rl_platform.engines.rollout.sglang.program import PROGRAM, VERSION, EngineSetup, Shape, engine_environment
from rl_platform.engines.rollout.sglang.shared_weights import SharedWeights, write_folder
from rl_platform.engines.rollout.sglang.start_failures import recognised
from rl_platform.errors import ConfigError, Deadline, WorkerDied, WorkerError
from rl_platform.records import SamplingParams, Weights, WeightsReceived
from rl_platform.runtime.process_group import Rendezvous
from rl_platform.runtime.weights.group import WeightGroup, WeightsOffer, open_group, reachable

logger = logging.getLogger(__name__)

BUCKET = 256 * 2**20  # bytes that the engine gets from a group at a time
START_S = 600.0  # a large model on many GPUs takes minutes
SEARCHED_LINES = 400  # of the end of the log, in which a reason is looked for: tracebacks of several processes
DEATH_S = 5.0  # after which a process that broke a connection by its death is gone
ATTEMPTS = 3  # processes in a row that die without having answered anything


class HostedEngine:
    """`environment`: for the engine's process. Raises ConfigError if it does not come up for a reason that is known,
    else WorkerError with the end of its log."""

    def __init__(
        self, label: str, setup: EngineSetup, eos_token_ids: Sequence[int], environment: Mapping[str, str], log: Path
    ) -> None:
        self.eos = tuple(eos_token_ids)
        self._folder = tempfile.TemporaryDirectory(prefix="rl-platform-model-")
        Path(self._folder.name, "config.json").write_text(json.dumps(setup.model_config), encoding="utf-8")
        self._label, self._setup, self._log = label, replace(setup, folder=self._folder.name), log
        variables = engine_environment(setup, sorted(os.sched_getaffinity(0)), visible_gpus())
        self._environment = variables | dict(environment)
        self._shared = SharedWeights()
        self._weights: Weights | WeightsOffer | None = None
        self._group: tuple[Rendezvous, WeightGroup] | None = None
        self._generation: EngineCall | None = None
        self.restarts, self._asleep = 0, False
        self._process = self._start()

    @property
    def version(self) -> int:
        return -1 if self._weights is None else self._weights.version

    @property
    def process_id(self) -> int:
        """Of the engine."""
        pid: int = self._process.started.value
        return pid

    def receive(self, weights: Weights | WeightsOffer) -> WeightsReceived:
        devices = [torch.device("cuda", number) for number in self._setup.accelerators] or [torch.device("cpu")]
        self._weights = weights = reachable(weights, devices)
        try:
            self._load()
        except WorkerDied as death:
            self._restart(death)
        return WeightsReceived(weights.version, weights.bytes, weights.buckets)

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, on_finished: Callable[[Completion], None]
    ) -> None:
        unanswered = {request.index: request for request in requests}
        deaths = 0
        while unanswered:
            try:
                if self._asleep:
                    self._load()
                self._generation = self._process.call("generate", list(unanswered.values()), sampling, self.eos)
                for completion in self._generation.items():
                    del unanswered[completion.index]
                    on_finished(completion)
                    deaths = 0
            except WorkerDied as death:
                deaths += 1
                if deaths >= ATTEMPTS:
                    raise WorkerDied(f"{self._label}: {deaths} engines in a row died: {death}") from death
                self._restart(death)

    def abort(self) -> None:
        if self._generation is not None:
            self._process.call("abort", self._generation.number).wait()

    def offload(self) -> None:
        if not self._asleep:
            self._process.call("sleep").wait()
            self._asleep = True

    def cached_tokens(self) -> int:
        """Of the prompts of this process: how many tokens were taken from its prefix cache."""
        cached: int = self._process.call("cached_tokens").wait()
        return cached

    def close(self) -> None:
        self._process.kill()
        self._folder.cleanup()

    def _load(self) -> None:
        """Gives the engine its weights, awake: memory comes back without content."""
        if self._asleep:
            self._process.call("wake").wait()
            self._asleep = False
        assert self._weights is not None
        if isinstance(self._weights, WeightsOffer):
            self._load_from_group(self._weights)
            return
        state = {_exported(name): tensor for name, tensor in self._weights.state.items()}
        if self._shared.has_room(state):
            self._process.call("load", self._shared.write(state, self._setup.tensor_parallel)).wait()
        else:
            logger.warning("%s: no room for the weights in shared memory: they go through a file", self._label)
            write_folder(state, Path(self._folder.name))
            self._process.call("load_from_disk").wait()

    def _load_from_group(self, offer: WeightsOffer) -> None:
        """The engine waits for what the offer sends. Should that fail the engine has half of it, and ends."""
        joining = []
        if self._group is None:
            size = 1 + self._setup.tensor_parallel
            self._group = open_group(self._label, offer.address, size, self._setup.device)
            group = self._group[1]
            joining = [self._process.call("join", group.name, group.address, group.port, group.backend)]
        group = self._group[1]
        loading = [*joining, self._process.call("load_from_group", group.name, parts_of(offer))]
        try:
            offer.send(group)
        except BaseException as error:
            died = self._process.child.ends_within(DEATH_S)
            self._process.kill()
            if died and isinstance(error, WorkerError):
                raise WorkerDied(f"the engine died while weights were sent to it: {error}") from error
            raise
        for call in loading:
            call.wait()

    def _start(self) -> EngineProcess:
        began = time.monotonic()
        process = EngineProcess(PROGRAM, self._setup, self._environment, self._log)
        try:
            process.started.wait(START_S)
        except (Deadline, WorkerDied, WorkerError) as error:
            process.kill()
            log = f"{process.end_of_log(SEARCHED_LINES)}\n{error}"
            if problem := recognised(self._label, log, VERSION, self._setup.memory_share):
                raise ConfigError([problem]) from error
            raise WorkerError(f"{self._label}: SGLang did not start: {error}\n{process.end_of_log()}") from error
        logger.info("%s: SGLang started in %.0f s", self._label, time.monotonic() - began)
        return process

    def _restart(self, death: WorkerDied) -> None:
        self.restarts += 1
        logger.warning("%s: %s. It is started again with the weights it had", self._label, death)
        self._process.kill()
        self._process, self._asleep, self._group = self._start(), False, None
        self._load()


def visible_gpus() -> list[str]:
    """Of this process, in the order in which torch counts them."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name for name in shown.split(",") if name] if shown else [str(n) for n in range(torch.cuda.device_count())]


def parts_of(offer: WeightsOffer) -> list[list[Shape]]:
    """The tensors of an offer in parts of which the engine has room for one beside its weights."""
    parts: list[list[Shape]] = []
    filled = BUCKET
    for tensor in offer.distinct:
        if filled + tensor.nbytes > BUCKET:
            parts.append([])
            filled = 0
        parts[-1].append((_exported(tensor.name), str(tensor.dtype).removeprefix("torch."), [*tensor.shape]))
        filled += tensor.nbytes
    return parts


def _exported(name: str) -> str:
    """The name that a parameter of `models.language.LanguageModel` has in a Hugging Face folder."""
    return "lm_head.weight" if name == "head.weight" else name.replace("backbone.", "model.", 1)
