"""SGLang as a rollout engine: starts its process (`program`) and brings the weights there."""

from __future__ import annotations

import base64
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from rl_platform.engines.rollout.hosted.hosted_engine import EngineProcess, HostedEngine, exported, visible_gpus
from rl_platform.engines.rollout.hosted.out_of_memory import memory_problem
from rl_platform.engines.rollout.sglang.program import PROGRAM, VERSION, SGLangSetup, Shape, engine_environment
from rl_platform.engines.rollout.sglang.shared_weights import SharedWeights, write_folder
from rl_platform.errors import Problem, WorkerDied, WorkerError
from rl_platform.models.pretrained.pretrained_lm import empty_causal_lm
from rl_platform.records import Weights
from rl_platform.runtime.weights.group import JoinRequest, WeightGroup, WeightsOffer, buckets_of, reachable

logger = logging.getLogger(__name__)

EXPERTS = ".experts."  # in the names of their parameters
DEATH_S = 5.0  # after which a process that broke a connection by its death is gone
# of SGLang's log
_ARCHITECTURES = (
    re.compile(r"Model architectures \['(\w+)'.*are not supported"),
    re.compile(r"Cannot find model module\. '(\w+)' is not a registered model"),
    re.compile(r"(\w+) has no SGlang implementation and the Transformers implementation is not compatible"),
)
_NO_ROOM = ("Loaded weights leave no GPU memory", "Not enough memory. Please try to increase --mem-fraction-static")
_FULL = ("torch.OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory")


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
        self._group: WeightGroup | None = None
        self._requested: WeightsOffer | None = None
        super().__init__(label, setup.model_config, eos_token_ids)

    def _new_process(self) -> EngineProcess:
        self._group = None
        folder = self._folder.name
        setup = asdict(replace(self._setup, folder=folder))
        return EngineProcess(PROGRAM, setup, self._environment, self._log, scratch=folder)

    def _recognised(self, log: str) -> Problem | None:
        for pattern in _ARCHITECTURES:
            if (match := pattern.search(log)) is not None:
                message = f"SGLang {VERSION} has no model of architecture {match[1]} (actor.model)"
                hint = "rollout.backend: torch generates with the models that are trained here"
                return Problem("rollout.backend", message, value="sglang", hint=hint)
        return memory_problem(self._label, log, self._setup.memory_share, _NO_ROOM, _FULL)

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
        """Sends the weights of the offer to the engine. If that fails, the engine has a part of them and is ended.

        All engines request an offer together. One that requests it again, after a restart or a failure, does so alone.
        """
        known = "" if self._group is None else self._group.name
        ranks = self._setup.tensor_parallel
        again, self._requested = self._requested is offer, offer
        request = JoinRequest(self._label, ranks, self._setup.device, checked=False, group=known, alone=again)
        group, joining = offer.join(request), []
        if self._group is None or group.name != self._group.name:
            first = group.first_rank(self._label)
            place = [group.name, group.address, group.port, group.backend, group.world_size, first]
            joining = [self._process.call("join", *place)]
        self._group = group
        loading = [*joining, self._process.call("load_from_group", group.name, buckets(offer, group))]
        try:
            offer.send(group)
        except BaseException as error:
            shared = len(group.receivers) > 1
            died = self._process.child.ends_within(DEATH_S)
            self._process.kill()
            if isinstance(error, WorkerError) and (died or shared):
                what = "the engine" if died else "another engine"
                raise WorkerDied(f"{what} died while weights were sent to it: {error}") from error
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


def buckets(offer: WeightsOffer, group: WeightGroup) -> list[list[Shape]]:
    """Returns the buckets of an offer as the engine reads them: name, type and shape of each tensor."""
    return [
        [(exported(one.name), str(one.dtype).removeprefix("torch."), [*one.shape]) for one in bucket]
        for bucket in buckets_of(offer.tensors, group.bucket)
    ]
