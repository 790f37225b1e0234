"""The `rollout` section: sampling, conversations, and the engine that generates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rl_platform.config.schema.base import Section, key
from rl_platform.config.schema.models import Offload, offload_key


class Sampling(Section):
    """`rollout.sampling`: how training responses are drawn."""

    temperature: float = key(1.0, "0: greedy", ge=0)
    top_p: float = key(1.0, "nucleus: smallest set of tokens with this mass; 1: off", gt=0, le=1)
    top_k: int = key(0, "most likely tokens kept; 0: off", ge=0)
    max_new_tokens: int | None = key(None, "longest response, or turn of one; null: data.max_response_length", ge=1)


class ValSampling(Sampling):
    """`rollout.val_sampling`: the same keys, greedy by default."""

    temperature: float = key(0.0, "0: greedy", ge=0)


class MultiTurn(Section):
    """`rollout.multi_turn`: a tool or an environment answers between turns of the policy."""

    tool: str = key("calculator", "who answers: calculator, or module:function")
    max_turns: int = key(4, "turns of the policy; nobody answers after the last", ge=2)
    max_observation_tokens: int = key(32, "longer answers are cut", ge=1)
    num_workers: int = key(2, "processes of a rollout rank in which the tool runs", ge=1)
    timeout_s: float = key(5.0, "a response whose tool takes longer is masked out and counted", gt=0)


class PartialRollout(Section):
    """`rollout.partial_rollout`: a step waits for the prompts that are complete first, the others go on in the next."""

    prompts_in_flight: int | None = key(
        None, "prompts in work at once, of which data.train_batch_size are trained on; null: half as many again", ge=2
    )


class VLLM(Section):
    """`rollout.vllm`: the environment of vLLM, whose requirements clash with those of SGLang and of this package."""

    python: str | None = key(None, "path of the Python interpreter that has vLLM; null: the running one", min_length=1)


class Rollout(Section):
    """`rollout`: generates responses or chooses actions."""

    group_name: str | None = key(None, "name of the worker group in logs")
    backend: Literal["auto", "torch", "sglang", "vllm"] = key(
        "auto", "generation engine of language models; auto: sglang on GPUs if it is installed"
    )
    sampling: Sampling = Field(default_factory=Sampling, description="training")
    val_sampling: ValSampling = Field(default_factory=ValSampling, description="validation; greedy by default")
    stop: list[Annotated[str, Field(min_length=1)]] = key(
        [], "texts of one token each that end a response, or a turn, as EOS does"
    )
    offload: Offload = offload_key("weights of its own")
    multi_turn: MultiTurn | None = key(None, "turns with answers of a tool in between; null: a response is one turn")
    partial_rollout: PartialRollout | None = key(
        None,
        "cut what is unfinished when a step has enough responses, and go on with it in the next step; "
        "null: wait for all",
    )
    max_running_requests: int = key(64, "sequences decoded together; the others wait", ge=1)
    tensor_parallel_size: int | None = key(
        None, "sglang, vllm: processes that share the model; null: one per GPU of a rank", ge=1
    )
    gpu_memory_utilization: float | None = key(
        None,
        "sglang, vllm: share of a GPU's memory for weights, keys and values; null: from the estimate",
        gt=0,
        lt=1,
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of sglang.Engine or vllm.EngineArgs"
    )
    engine_env: dict[str, str] = Field(
        default_factory=dict, description="sglang, vllm: environment variables of the engine's process"
    )
    vllm: VLLM = Field(default_factory=VLLM, description="vllm: its environment")
    sync: Literal["full", "delta"] = key(
        "full", "weights sent to another process; delta: only parts that differ from what the receiver has"
    )
    weight_transfer: Literal["auto", "group", "memory"] = key(
        "auto",
        "weights to another process; group: straight to the engine, by NCCL or gloo; memory: through main "
        "memory; auto: group where both have GPUs of their own",
    )
