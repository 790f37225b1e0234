"""Language models with random weights, batches for them, and SGLang on a CPU: what several benchmarks build."""

from __future__ import annotations

import importlib.util
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rl_platform.engines.rollout.sglang.sglang_client import SGLangEngine
    from rl_platform.engines.training.base import TrainingEngine
    from rl_platform.records import RolloutBatch

TRANSFORMERS, BACKENDS = "transformers", ("fsdp", "megatron")
_LLAMA = {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048}
_LLAMA |= {"tie_word_embeddings": True}
SMOLLM2 = {**_LLAMA, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
QUICK = {**_LLAMA, "vocab_size": 512, "hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2}
WIDE = {**_LLAMA, "vocab_size": 32_768, "hidden_size": 36, "intermediate_size": 72, "num_hidden_layers": 1}
_TINY_QWEN2 = {"model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
_TINY_QWEN2 |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
STAND_INS = Path(__file__).resolve().parents[1] / "tests" / "sglang_cpu"


def gpu_shape(dry_run: bool) -> dict[str, Any]:
    """The shape of Qwen2.5-1.5B as settings of transformers; a tiny one to try a script out on a CPU."""
    from rl_platform.placement.estimates.architectures import known_options

    options = _TINY_QWEN2 if dry_run else known_options("Qwen/Qwen2.5-1.5B")
    return {**(options or {}), "max_position_embeddings": 32_768}


def network(shape: dict[str, Any], drawn_on: str | torch.device = "cpu") -> Any:
    """A causal language model of transformers, float32, on the device that draws its weights.

    A GPU draws billions of weights in a fraction of a second; they differ from those that a CPU draws.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape)
    with torch.device(drawn_on):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def row_lengths(rows: int, longest: int, mixed: bool) -> list[int]:
    """Lengths from an eighth of the longest to all of it (`mixed`), or all equal."""
    shortest = longest // 8 if mixed else longest
    step = (longest - shortest) / max(rows - 1, 1)
    return [round(shortest + row * step) for row in range(rows)]


def batch(lengths: Sequence[int], vocabulary: int) -> RolloutBatch:
    """Rows whose first quarter is the prompt."""
    import torch

    from rl_platform.records import RolloutBatch

    draw = torch.Generator().manual_seed(0)
    positions, rows = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
    mask = (positions >= rows // 4) & (positions < rows)
    return RolloutBatch(
        inputs={"tokens": torch.randint(vocabulary, mask.shape, generator=draw), "lengths": rows.squeeze(1)},
        action_mask=mask,
        sample_mask=torch.ones(len(lengths), dtype=torch.bool),
        group_ids=torch.arange(len(lengths)),
        rewards=torch.zeros(mask.shape),
        rollout_log_probs=torch.zeros(mask.shape),
        log_probs=0.1 * torch.randn(mask.shape, generator=draw) - math.log(vocabulary),
        advantages=torch.randn(mask.shape, generator=draw),
    )


def training_engine(
    backend: str,
    shape: dict[str, Any],
    *,
    values: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    recompute: bool = False,
    drawn_on: str | torch.device = "cpu",
) -> TrainingEngine:
    """Our engine with a model of this shape; dtype None: float32; device None: the CPU; drawn_on: as of `network`."""
    import torch

    from rl_platform.config.schema.models import Trainable
    from rl_platform.engines.training import build
    from rl_platform.models.forward import TokenPolicy, TokenValues
    from rl_platform.models.language import LanguageModel

    model = LanguageModel(network(shape, drawn_on), value_head=values)
    return build.training_engine(
        Trainable(training_backend=backend, gradient_checkpointing=recompute),
        TokenValues(model) if values else TokenPolicy(model, temperature=1.0),
        dtype=dtype or torch.float32,
        horizon=1,
        device=device or torch.device("cpu"),
        nominal=False,
    )


def action_states(model: Any, rows: RolloutBatch) -> torch.Tensor:
    """The plain way: last hidden states [K,H] before the K actions, of padded rows through transformers."""
    import torch

    tokens, lengths = rows.inputs["tokens"], rows.inputs["lengths"]
    equal = bool((lengths == tokens.shape[1]).all())
    present = None if equal else (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    states = model.model(input_ids=tokens, attention_mask=present, use_cache=False).last_hidden_state
    row, column = rows.action_mask.nonzero(as_tuple=True)
    found: torch.Tensor = states[row, column - 1]
    return found


def action_log_probs(model: Any, rows: RolloutBatch) -> torch.Tensor:
    """The plain way: log-probabilities [K] of the actions."""
    logits: torch.Tensor = model.lm_head(action_states(model, rows))
    chosen = rows.inputs["tokens"][rows.action_mask]
    return logits.gather(1, chosen[:, None]).squeeze(1) - logits.logsumexp(-1)


def sglang_installed() -> bool:
    return importlib.util.find_spec("sglang") is not None


@contextmanager
def sglang_on_cpu(network: Any, running: int, room: int, threads: int | None) -> Iterator[SGLangEngine]:
    """SGLang with the stand-ins of tests/sglang_cpu.

    `running`: requests at a time; `room`: tokens of keys and values; `threads` None: one for each core.
    """
    from rl_platform.engines.rollout.sglang.program import SGLangSetup
    from rl_platform.engines.rollout.sglang.sglang_client import SGLangEngine

    model = network.config.to_dict() | {"eos_token_id": None}
    setup = SGLangSetup(model, "cpu", 1, "float32", running, room, 0.1, seed=1)
    count = threads or len(os.sched_getaffinity(0))
    environment = {"PYTHONPATH": str(STAND_INS), "OMP_NUM_THREADS": str(count)}
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(SGLangEngine("rollout", setup, (), environment, Path(folder, "sglang.log"))) as engine,
    ):
        yield engine
