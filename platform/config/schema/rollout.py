"""The `rollout` section: sampling, multi-turn conversations and the generation engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_platform.config.schema.models import Offload, offload_key
from rl_platform.config.schema.section import Section, UserPath, key

ENGINES = ("auto", "torch", "sglang", "vllm")
AGENT_TOOLS = ("search", "python", "calculator")
TEXT_ENVIRONMENTS = ("guess_number", "reasoning_gym", "textarena", "verifiers", "openenv")
CHANNEL_CAPACITY = 1024  # responses that may wait for the reward or the runner
RUNNING = 64  # sequences decoded together, unless their number follows from the memory


class Sampling(Section):
    """`rollout.sampling`: sampling of training responses."""

    temperature: float = key(1.0, "sampling temperature, at least 0.01; 0: greedy", ge=0)
    top_p: float = key(1.0, "nucleus sampling: total probability of the tokens sampled from; 1: off", gt=0, le=1)
    top_k: int = key(0, "most likely tokens sampled from; 0: off", ge=0)
    max_new_tokens: int | None = key(
        None, "largest number of tokens of a response or turn; null: data.max_response_length", ge=1
    )


class ValSampling(Sampling):
    """`rollout.val_sampling`: the same keys, greedy by default."""

    temperature: float = key(0.0, "sampling temperature, at least 0.01; 0: greedy", ge=0)


class MultiTurn(Section):
    """`rollout.multi_turn`: a tool answers between the turns of the policy."""

    tool: str = key("calculator", "calculator or module:function")
    max_turns: int = key(4, "largest number of turns of the policy; the tool does not answer the last", ge=2)
    max_observation_tokens: int = key(32, "largest number of tokens of an answer; longer answers are truncated", ge=1)
    num_workers: int = key(2, "processes for the tool, per rollout rank", ge=1)
    timeout_s: float = key(
        5.0, "longest call of the tool in seconds; beyond it the response is masked out and counted", gt=0
    )


class ToolOptions(Section):
    """One of `rollout.agent.tools`."""

    type: str = Field(description=f"{', '.join(AGENT_TOOLS)} or module:Class")
    params: dict[str, object] = Field(default_factory=dict, description="parameters of the tool")
    timeout_s: float = key(10.0, "longest call in seconds; beyond it the policy reads an error", gt=0)
    retries: int = key(0, "further attempts after a call raised, hung or died", ge=0)
    max_running: int = key(16, "calls at the same time, per rollout rank", ge=1)
    max_result_tokens: int = key(256, "largest number of tokens of a result; longer results are truncated", ge=1)


class EnvironmentOptions(Section):
    """`rollout.agent.environment`: each response of the policy is a step of an environment that answers with text."""

    type: str = Field(description=f"{', '.join(TEXT_ENVIRONMENTS)} or module:Class")
    params: dict[str, object] = Field(default_factory=dict, description="parameters of the environment")
    timeout_s: float = key(10.0, "longest reset or step in seconds; beyond it the trajectory is masked out", gt=0)
    max_result_tokens: int = key(256, "largest number of tokens of a text; longer texts are truncated", ge=1)


class Agent(Section):
    """`rollout.agent`: several calls of the policy per question: an agent of the user, tools or a text environment."""

    function: str | None = key(
        None,
        "your own agent, module:function, called with (question, base_url, api_key); returns the reward, or None: the "
        "reward component scores the last answer",
    )
    tools: list[ToolOptions] = key(
        [], "tools that the policy calls through its chat template; with an environment: between two steps"
    )
    tool_format: Literal["auto", "hermes", "llama3"] = key(
        "auto", "how the policy writes a call; auto: as the chat template says"
    )
    environment: EnvironmentOptions | None = key(None, "a game or task that answers each response with text")
    num_workers: int = key(2, "processes for tools or environments, per rollout rank", ge=1)
    max_running: int = key(64, "trajectories that run at the same time, per rollout rank", ge=1)
    max_calls: int = key(32, "largest number of responses of the policy per trajectory", ge=1)
    timeout_s: float = key(600.0, "longest trajectory in seconds; beyond it the trajectory is masked out", gt=0)
    retries: int = key(
        0, "further attempts after an agent or an environment raised, hung or died, from the same random numbers", ge=0
    )


class PartialRollout(Section):
    """`rollout.partial_rollout`: a step trains on the first complete prompts; the others continue in the next step."""

    prompts_in_flight: int | None = key(None, "prompts generated at once; null: 1.5 times data.train_batch_size", ge=2)


class VLLM(Section):
    """`rollout.vllm`: a Python environment of its own, because vLLM requires other versions of the same packages."""

    python: UserPath | None = key(None, "path of the Python interpreter with vLLM; null: the running one", min_length=1)


class Rollout(Section):
    """`rollout`: generates responses or chooses actions."""

    group_name: str | None = key(None, "name of the worker group in logs")
    backend: str = key(
        "auto",
        f"generation engine of language models: {', '.join(ENGINES)} or module:Class; auto: sglang on GPUs if it is "
        "installed",
    )
    sampling: Sampling = Field(default_factory=Sampling, description="sampling of training responses")
    val_sampling: ValSampling = Field(
        default_factory=ValSampling, description="sampling of validation responses; greedy by default"
    )
    stop: list[Annotated[str, Field(min_length=1)]] = key([], "texts that end a response or a turn, like EOS")
    offload: Offload = offload_key("the engine's own weights")
    multi_turn: MultiTurn | None = key(None, "conversations with a tool; null: a response is one turn")
    agent: Agent | None = key(
        None, "tools, a text environment, or an agent of yours; null: the policy answers the prompt"
    )
    partial_rollout: PartialRollout | None = key(
        None,
        "interrupt unfinished responses when a step has enough, and continue them in the next step; null: wait for all",
    )
    on_update: Literal["finish", "continue", "abort"] = key(
        "finish",
        "weights that arrive while responses are generated. finish: they wait for the next rollout; continue: the next "
        "token is sampled with them; abort: unfinished responses start again with them",
    )
    max_running_requests: int | None = key(
        None,
        f"largest number of sequences decoded together; null: {RUNNING}; on GPUs as many as fit into the memory "
        "that other components leave, up to 256",
        ge=1,
    )
    tensor_parallel_size: int | None = key(
        None, "sglang, vllm: number of processes that split the model; null: one per GPU of a rank", ge=1
    )
    gpu_memory_utilization: float | None = key(
        None,
        "sglang, vllm: fraction of the GPU memory for weights and KV cache; null: from the memory estimate",
        gt=0,
        lt=1,
    )
    engine_args: dict[str, object] = Field(
        default_factory=dict, description="further arguments of sglang.Engine, vllm.EngineArgs or an engine of yours"
    )
    engine_env: dict[str, str] = Field(
        default_factory=dict, description="sglang, vllm: environment variables of the engine's process"
    )
    vllm: VLLM = Field(default_factory=VLLM, description="vllm: its Python environment")
    sync: Literal["full", "delta"] = key(
        "full", "weights sent to another process: all (full) or only changed parts (delta)"
    )
    weight_transfer: Literal["auto", "group", "memory"] = key(
        "auto",
        "path of weights to another process; group: directly, by NCCL or gloo; memory: through main memory; "
        "auto: group if both have GPUs of their own",
    )

    @property
    def running_limit(self) -> int:
        """The largest number of sequences that an engine decodes together."""
        return self.max_running_requests or RUNNING
