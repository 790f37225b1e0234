"""SGLang as a rollout engine: starts its process (`program`) and brings the weights there."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from rl_platform.engines.rollout.hosted import EngineProcess, HostedEngine, exported, visible_gpus
from rl_platform.engines.rollout.sglang.program import PROGRAM, VERSION, SGLangSetup, Shape, engine_environment
from rl_platform.engines.rollout.sglang.shared_weights import SharedWeights, write_folder
from rl_platform.engines.rollout.sglang.start_failures import recognised
from rl_platform.errors import Problem, WorkerDied, WorkerError
from rl_platform.models.pretrained import empty_causal_lm
from rl_platform.records import Weights
from rl_platform.runtime.process_group import Rendezvous
from rl_platform.runtime.weights.group import WeightGroup, WeightsOffer, open_group, reachable

logger = logging.getLogger(__name__)

BUCKET = 256 * 2**20  # bytes that the engine gets from a group at a time
EXPERTS = ".experts."  # in the names of their parameters
DEATH_S = 5.0  # after which a process that broke a connection by its death is gone


class SGLangEngine(HostedEngine):
    """`environment`: for the engine's process."""

    engine = "SGLang"

    def __init__(
        self, label: str, setup: SGLangSetup, eos_token_ids: Sequence[int], environment: Mapping[str, str], log: Path
    ) -> None:
        self._setup, self._log = setup, log
        variables = engine_environment(setup, sorted(os.sched_getaffinity(0)), visible_gpus())
        self._environment = variables | dict(environment)
        self._shared = SharedWeights()
        self._group: tuple[Rendezvous, WeightGroup] | None = None
        super().__init__(label, setup.model_config, eos_token_ids)

    def _new_process(self) -> EngineProcess:
        self._group = None
        folder = self._folder.name
        setup = asdict(replace(self._setup, folder=folder))
        return EngineProcess(PROGRAM, setup, self._environment, self._log, scratch=folder)

    def _recognised(self, log: str) -> Problem | None:
        return recognised(self._label, log, VERSION, self._setup.memory_share)

    def _reachable(self, weights: Weights | WeightsOffer) -> Weights | WeightsOffer:
        if isinstance(weights, WeightsOffer) and any(EXPERTS in tensor.name for tensor in weights.distinct):
            return weights.fetch()  # a group would send them stacked
        devices = [torch.device("cuda", number) for number in self._setup.accelerators] or [torch.device("cpu")]
        return reachable(weights, devices)

    def _load(self) -> None:
        assert self._weights is not None
        if isinstance(self._weights, WeightsOffer):
            self._load_from_group(self._weights)
            return
        state = {exported(name): tensor for name, tensor in self._weights.state.items()}
        if any(EXPERTS in name for name in state):
            state = with_single_experts(state, self._setup.model_config)
        if self._shared.has_room(state):
            handles = self._shared.write(state, self._setup.tensor_parallel)
            self._process.call("load", [base64.b64encode(one).decode() for one in handles]).wait()
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


def with_single_experts(state: Mapping[str, Tensor], model_config: Mapping[str, object]) -> dict[str, Tensor]:
    """Returns the tensors under the names and in the shapes of a published checkpoint.

    transformers stacks the experts of a layer in one tensor; SGLang reads them one by one, and skips stacked ones
    without an error.
    """
    from transformers import AutoConfig
    from transformers.core_model_loading import revert_weight_conversion

    network = empty_causal_lm(AutoConfig.for_model(**model_config), "", "actor.model.path")
    single: dict[str, Tensor] = revert_weight_conversion(network, dict(state))
    return single


def parts_of(offer: WeightsOffer) -> list[list[Shape]]:
    """The tensors of an offer in parts of which the engine has room for one beside its weights."""
    parts: list[list[Shape]] = []
    filled = BUCKET
    for tensor in offer.distinct:
        if filled + tensor.nbytes > BUCKET:
            parts.append([])
            filled = 0
        parts[-1].append((exported(tensor.name), str(tensor.dtype).removeprefix("torch."), [*tensor.shape]))
        filled += tensor.nbytes
    return parts
