"""vLLM as a rollout engine: starts its process, in an interpreter of its own, and brings the weights there.

The code of the process is in `vllm_server`. Weights are sent through an in-memory file that both processes hold open.
They need no space in a folder or in `/dev/shm`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from rl_platform.engines.rollout.hosted.hosted_engine import EngineProcess, HostedEngine, exported
from rl_platform.engines.rollout.vllm.installation import VERSION, recognised, unusable
from rl_platform.errors import ConfigError, Problem
from rl_platform.records import Weights
from rl_platform.runtime.weights.group import WeightsOffer
from rl_platform.runtime.weights.weight_transfer import bytes_of

SERVER = Path(__file__).with_name("vllm_server.py")
PROGRAM = f"from {SERVER.stem} import main; main()"
ALIGNMENT = 64  # bytes: each tensor begins at a multiple of it
PAGE = 128  # tokens of a block of keys and values on a CPU


@dataclass(frozen=True)
class VLLMSetup:
    """The settings that start an engine.

    longest: tokens of a sequence. memory_share: of each GPU, for weights, keys and values. gpus: names of the GPUs of
    this engine; none: it computes on the CPU. python: the interpreter; None: this one. extra: arguments of
    `vllm.EngineArgs`.
    """

    model_config: dict[str, object]
    tensor_parallel: int
    dtype: str
    max_running: int
    longest: int
    memory_share: float
    seed: int
    gpus: tuple[str, ...] = ()
    python: str | None = None
    extra: dict[str, object] = field(default_factory=dict)

    def arguments(self, folder: str) -> dict[str, object]:
        """Returns the arguments of `vllm.EngineArgs`. folder: has the model's config.json."""
        common = {
            "model": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # no sampling options from a file
            "worker_extension_cls": f"{SERVER.stem}.WorkerExtension",
            "tensor_parallel_size": self.tensor_parallel,
            "dtype": self.dtype,
            "max_num_seqs": self.max_running,
            "max_model_len": self.longest,
            "seed": self.seed % 2**31,
            "async_scheduling": False,  # else a step is in work while weights are loaded
            "disable_log_stats": True,
        }
        cpu = {"enforce_eager": True, "kv_cache_memory_bytes": self._cache_bytes()}
        gpu = {"gpu_memory_utilization": self.memory_share, "enable_sleep_mode": True}
        return common | (gpu if self.gpus else cpu) | self.extra

    def _cache_bytes(self) -> int:
        """Returns the bytes of a rank for the keys and values of all running sequences, and one block more of each."""
        numbers: Mapping[str, int] = self.model_config  # type: ignore[assignment]
        heads = numbers.get("num_key_value_heads") or numbers["num_attention_heads"]
        head_dim = numbers.get("head_dim") or numbers["hidden_size"] // numbers["num_attention_heads"]
        tokens = (self.max_running + 1) * (-(-self.longest // PAGE) + 1) * PAGE
        each = 2 * numbers["num_hidden_layers"] * max(1, heads // self.tensor_parallel) * head_dim
        return tokens * each * (4 if self.dtype == "float32" else 2)

    def environment(self) -> dict[str, str]:
        """Returns variables of the engine's process."""
        common = {
            "PYTHONPATH": str(SERVER.parent),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's loop is in `vllm_server`
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # has another sampler
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.gpus:
            return common | {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        return common | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


class VLLMEngine(HostedEngine):
    """`environment`: for the engine's process."""

    engine = "vLLM"

    def __init__(
        self, label: str, setup: VLLMSetup, eos_token_ids: Sequence[int], environment: Mapping[str, str], log: Path
    ) -> None:
        self._setup, self._log = setup, log
        self._environment = setup.environment() | dict(environment)
        self._shared = os.memfd_create("rl-platform-weights")
        super().__init__(label, setup.model_config, eos_token_ids)

    def _new_process(self) -> EngineProcess:
        python, folder = self._setup.python or sys.executable, self._folder.name
        setup = {"version": VERSION, "weights": self._shared, "arguments": self._setup.arguments(folder)}
        try:
            return EngineProcess(
                PROGRAM,
                setup,
                self._environment,
                self._log,
                descriptors=[self._shared],
                python=python,
                scratch=folder,
            )
        except OSError as error:
            raise ConfigError([unusable(python, str(error.strerror))]) from error

    def _recognised(self, log: str) -> Problem | None:
        return recognised(self._label, log, self._setup.python, self._setup.memory_share)

    def _reachable(self, weights: Weights | WeightsOffer) -> Weights:
        return weights.fetch() if isinstance(weights, WeightsOffer) else weights

    def close(self) -> None:
        super().close()
        if self._shared >= 0:
            os.close(self._shared)
            self._shared = -1

    def _load(self) -> None:
        assert isinstance(self._weights, Weights)
        tensors = write({exported(name): tensor for name, tensor in self._weights.state.items()}, self._shared)
        self._process.call("load", tensors).wait()


def write(state: Mapping[str, Tensor], file: int) -> list[tuple[str, str, list[int], int]]:
    """Writes the tensors into a file; returns the name, type, shape and first byte of each.

    Tensors that share their memory are written once, under the first name: readers tie the others to it.
    """
    distinct = {tensor.data_ptr(): name for name, tensor in reversed([*state.items()])}
    tensors, end = [], 0
    for name in (name for name in state if name in set(distinct.values())):
        tensor = state[name]
        tensors.append((name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape], end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    os.ftruncate(file, end)
    for name, _, _, start in tensors:
        _write_at(file, bytes_of(state[name]), start)
    return tensors


def _write_at(file: int, content: np.ndarray, start: int) -> None:
    left = content.data
    while left:  # a call writes at most 2 GiB
        done = os.pwrite(file, left, start)
        left, start = left[done:], start + done
