"""The `rollout` section: sampling, conversations, and the engine that generates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rl_platform.config.schema.base import Section
from rl_platform.config.schema.models import Offload, offload_field


class Sampling(Section):
    """`rollout.sampling`: how training responses are drawn."""

    temperature: float = Field(default=1.0, ge=0, description="0: greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus: smallest set of tokens with this mass; 1: off")
    top_k: int = Field(default=0, ge=0, description="most likely tokens kept; 0: off")
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="longest response, or turn of one; null: data.max_response_length"
    )


class ValSampling(Sampling):
    """`rollout.val_sampling`: the same keys, greedy by default."""

    temperature: float = Field(default=0.0, ge=0, description="0: greedy")


class MultiTurn(Section):
    """`rollout.multi_turn`: a tool or an environment answers between turns of the policy."""

    tool: str = Field(default="calculator", description="who answers: calculator, or module:function")
    max_turns: int = Field(default=4, ge=2, description="turns of the policy; nobody answers after the last")
    max_observation_tokens: int = Field(default=32, ge=1, description="longer answers are cut")
    num_workers: int = Field(default=2, ge=1, description="processes of a rollout rank in which the tool runs")
    timeout_s: float = Field(
        default=5.0, gt=0, description="a response whose tool takes longer is masked out and counted"
    )


class PartialRollout(Section):
    """`rollout.partial_rollout`: a step waits for the prompts that are complete first, the others go on in the next."""

    prompts_in_flight: int | None = Field(
        default=None,
        ge=2,
        description="prompts in work at once, of which data.train_batch_size are trained on; null: half as many again",
    )


class Rollout(Section):
    """`rollout`: generates responses or chooses actions."""

    group_name: str | None = Field(default=None, description="name of the worker group in logs")
    backend: Literal["auto", "torch", "sglang"] = Field(
        default="auto", description="generation engine of language models; auto: sglang on GPUs if it is installed"
    )
    sampling: Sampling = Field(default_factory=Sampling, description="training")
    val_sampling: ValSampling = Field(default_factory=ValSampling, description="validation; greedy by default")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[], description="texts of one token each that end a response, or a turn, as EOS does"
    )
    offload: Offload = offload_field("weights of its own")
    multi_turn: MultiTurn | None = Field(
        default=None, description="turns with answers of a tool in between; null: a response is one turn"
    )
    partial_rollout: PartialRollout | None = Field(
        default=None,
        description="cut what is unfinished when a step has enough responses, and go on with it in the next step; "
        "null: wait for all",
    )
    max_running_requests: int = Field(default=64, ge=1, description="sequences decoded together; the others wait")
    tensor_parallel_size: int | None = Field(
        default=None, ge=1, description="sglang: processes that share the model; null: one per GPU of a rank"
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="sglang: share of a GPU's memory for weights, keys and values; null: what the memory estimate says",
    )
    engine_args: dict[str, Any] = Field(default_factory=dict, description="sglang: further arguments of sglang.Engine")
    engine_env: dict[str, str] = Field(
        default_factory=dict, description="sglang: environment variables of the engine's process"
    )
    sync: Literal["full", "delta"] = Field(
        default="full",
        description="weights sent to another process; delta: only parts that differ from what the receiver has",
    )
    weight_transfer: Literal["auto", "group", "memory"] = Field(
        default="auto",
        description="weights to another process; group: straight to the engine, by NCCL or gloo; memory: through main "
        "memory; auto: group where both have GPUs of their own",
    )
