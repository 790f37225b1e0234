"""The `reward` section: what scores responses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_platform.config.schema.base import Section, key

VERIFIERS = (
    "task",
    "math_verify",
    "exact_match",
)  # BUILT_IN of envs/reasoning/verifiers.py, which imports no pydantic


class RewardModel(Section):
    """`reward.model`: a sequence classifier with one label."""

    path: str = Field(min_length=1, description="HF folder or hub id of the classifier and its tokenizer")
    tokenizer: str | None = key(None, "HF folder or hub id; null: the one beside the weights")
    dtype: Literal["float32", "bfloat16"] = key("float32", "precision of weights and forward")
    use_chat_template: bool = key(
        True, "prompt and response as turns of the tokenizer's template; false: one bare text"
    )


class Reward(Section):
    """`reward`: scores responses."""

    group_name: str | None = key(None, "name of the worker group in logs")
    type: str = key(
        "task", "task (its own verifier), math_verify, exact_match, module:function, model (a classifier) or http"
    )
    num_workers: int = key(2, "processes that score; http: requests at the same time", ge=1)
    timeout_s: float = key(
        5.0, "a response that takes longer to score is masked out and counted; http: limit of one request", gt=0
    )
    max_batch_size: int = key(16, "model, http: responses per forward pass or request, at most", ge=1)
    model: RewardModel | None = key(None, "type model: the classifier")
    url: str | None = key(None, "type http: where responses are posted, http:// or https://")
    retries: int = key(3, "type http: further tries after a request that failed", ge=0)
