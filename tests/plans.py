"""Reasoning configs on declared clusters, for the tests of placement and planner."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rl_platform.config import load_config
from rl_platform.config.schema import Config
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.basis import Basis
from rl_platform.planner.report import Report, plan_report

ROOT = Path(__file__).parents[1]
SHARED = {"actor,critic,rollout,reward": "all"}
LLAMA = {  # 1.2 billion parameters
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128_256,
    "tie_word_embeddings": True,
}


class Plans:
    """Configs and reports."""

    large = (  # a step large enough to keep hundreds of GPUs busy
        "data.train_batch_size=16384",
        "data.mini_batch_size=16384",
        "data.max_prompt_length=512",
        "data.max_response_length=2048",
        "actor.max_tokens_per_micro_batch=8192",
        "critic.max_tokens_per_micro_batch=8192",
        "rollout.max_running_requests=64",
        "actor.model.dtype=bfloat16",
    )

    def config(
        self,
        *overrides: str,
        placement: dict[str, object] | None = None,
        nodes: int = 1,
        gpus: int = 8,
        gpu: str = "h100",
    ) -> Config:
        """configs/reasoning/ppo.yaml on `nodes` nodes with `gpus` GPUs of kind `gpu`, none if it is ""."""
        inventory = {"nodes": nodes, "gpus_per_node": gpus, **({"gpu": gpu} if gpu and gpus else {})}
        cluster = {"inventory": inventory, "component_placement": placement or SHARED}
        changes = [f"cluster={json.dumps(cluster)}", *overrides]
        return load_config(ROOT / "configs" / "reasoning" / "ppo.yaml", changes).config

    def llama(self, folder: Path, **changes: int) -> str:
        """The override that trains a Llama of 1.2 billion parameters, or one that is changed."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA | changes))
        return f"actor.model.path={folder}"

    def report(self, config: Config, basis: Basis | None = None) -> Report:
        inventory = inventory_for(config.cluster)
        return plan_report(config, schedule(config.cluster, inventory), inventory, basis)


def different_mathematics(paths: Iterable[Path]) -> list[Path]:
    """Returns the first config of each algorithm: `--check` computes nothing else for the others."""
    first: dict[str, Path] = {}
    for path in paths:
        config = load_config(path).config
        algorithm = config.algorithm.model_copy(update={"logprob_forward_micro_batch_size": None})
        model = config.actor.model.type, config.actor.model.num_action_chunks, config.rollout.agent is not None
        kind = algorithm, config.reward.type == "model", config.runner.task_type, model
        first.setdefault(repr(kind), path)
    return [*first.values()]
