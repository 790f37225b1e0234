"""The `reward` section: what scores responses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_platform.config.schema.base import Section

VERIFIERS = (
    "task",
    "math_verify",
    "exact_match",
)  # BUILT_IN of envs/reasoning/verifiers.py, which imports no pydantic


class RewardModel(Section):
    """`reward.model`: a sequence classifier with one label."""

    path: str = Field(min_length=1, description="HF folder or hub id of the classifier and its tokenizer")
    tokenizer: str | None = Field(default=None, description="HF folder or hub id; null: the one beside the weights")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="precision of weights and forward")
    use_chat_template: bool = Field(
        default=True, description="prompt and response as turns of the tokenizer's template; false: one bare text"
    )


class Reward(Section):
    """`reward`: scores responses."""

    group_name: str | None = Field(default=None, description="name of the worker group in logs")
    type: str = Field(
        default="task",
        description="task (its own verifier), math_verify, exact_match, module:function, model (a classifier) or http",
    )
    num_workers: int = Field(default=2, ge=1, description="processes that score; http: requests at the same time")
    timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="a response that takes longer to score is masked out and counted; http: limit of one request",
    )
    max_batch_size: int = Field(
        default=16, ge=1, description="model, http: responses per forward pass or request, at most"
    )
    model: RewardModel | None = Field(default=None, description="type model: the classifier")
    url: str | None = Field(default=None, description="type http: where responses are posted, http:// or https://")
    retries: int = Field(default=3, ge=0, description="type http: further tries after a request that failed")
