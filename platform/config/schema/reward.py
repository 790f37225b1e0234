"""The `reward` section: how responses are scored."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_platform.config.schema.section import Section, key

# They compare with the expected answer. BUILT_IN of envs/reasoning/verifiers.py, which imports no pydantic
VERIFIERS = ("task", "math_verify", "exact_match")


class RewardModel(Section):
    """`reward.model`: a sequence classifier with one label."""

    path: str = Field(min_length=1, description="HF folder or hub id of the classifier and its tokenizer")
    tokenizer: str | None = key(None, "HF folder or hub id; null: the tokenizer beside the weights")
    dtype: Literal["float32", "bfloat16"] = key("float32", "precision of weights and forward")
    url: str | None = key(None, "classify address of a server that computes the model; null: each reward rank does")
    server: Literal["vllm", "sglang"] = key("vllm", "which server is at url")
    api_key_env: str | None = key(
        None, "environment variable with the server's key, sent as Authorization: Bearer; null: no key", min_length=1
    )
    use_chat_template: bool = key(
        True, "format prompt and response by the tokenizer's chat template; false: plain text"
    )


class Judge(Section):
    """`reward.judge`: a language model behind an OpenAI-compatible server that scores responses."""

    url: str = Field(description="address of chat completions, for example http://HOST:PORT/v1/chat/completions")
    model: str = Field(min_length=1, description="name of the model at the server")
    template: str = Field(description="user message; {question}, {response} and {answer} are replaced")
    system_prompt: str | None = key(None, "system message; null: none")
    verdict: str | None = key(
        None, "regular expression whose only group is the score; its last match counts; null: the reply is a number"
    )
    api_key_env: str | None = key(
        None, "environment variable with the key, sent as Authorization: Bearer; null: no key", min_length=1
    )
    temperature: float = key(0.0, "sampling temperature of the judge", ge=0)
    max_tokens: int = key(512, "largest number of tokens of a reply", ge=1)


class Code(Section):
    """`reward.code`: programs, run on the tests of their question."""

    score: Literal["all", "fraction"] = key("all", "1 if all tests pass, else 0; fraction: of the tests that pass")
    memory_mb: int = key(512, "largest address space of a program in MiB", ge=64)
    url: str | None = key(
        None, "run_code address of a sandbox-fusion server; null: sandboxes on the machine of the reward"
    )
    api_key_env: str | None = key(
        None, "environment variable with the server's key, sent as Authorization: Bearer; null: no key", min_length=1
    )


class Scoring(Section):
    """Settings of one score of a response."""

    type: str = key(
        "task",
        f"{', '.join(VERIFIERS)}, module:function, code (runs programs), model (a classifier), judge or http; "
        "task: the task's own verifier",
    )
    exact: bool = key(True, "reasoning_gym tasks: pay full scores only, with 1; false: the data set's partial scores")
    num_workers: int = key(2, "scoring processes; with a server: number of concurrent requests", ge=1)
    timeout_s: float = key(
        5.0,
        "longest scoring of a response in seconds, masked out and counted beyond; with a server: limit of one request; "
        "code: CPU seconds of all tests of a response, beyond them it fails",
        gt=0,
    )
    max_batch_size: int = key(16, "model, http: largest number of responses per forward pass or request", ge=1)
    model: RewardModel | None = key(None, "model: the classifier")
    judge: Judge | None = key(None, "judge: a language model that scores")
    url: str | None = key(None, "http: address of the scoring server, http:// or https://")
    code: Code | None = key(None, "code: how programs run and are scored; null: the defaults")
    isolation: Literal["sandbox", "none"] = key(
        "sandbox", "code: what separates programs from this machine; none: only limits, for machines without secrets"
    )
    retries: int = key(3, "with a server: number of retries after a failed request", ge=0)

    @property
    def address(self) -> str | None:
        """The address of the server, judge, sandbox or reward model, None without one."""
        if self.type == "http":
            return self.url
        section = {"code": self.code, "judge": self.judge, "model": self.model}.get(self.type)
        return section.url if section else None

    @property
    def asks_server(self) -> bool:
        """Whether scores come from a server. A sandbox only runs programs."""
        return self.type != "code" and self.address is not None

    @property
    def computes_model(self) -> bool:
        """Whether the reward's process computes a reward model."""
        return self.type == "model" and not self.asks_server

    @property
    def at_once(self) -> int:
        """The number of responses that a rank scores at the same time."""
        batch = self.max_batch_size if self.type in ("model", "http") else 1
        return batch if self.computes_model else self.num_workers * batch


class WeightedReward(Scoring):
    """`reward.functions[]`: one of several functions whose weighted sum is the score."""

    name: str | None = key(
        None,
        "part of the name of its metric, `reward/<name>`; null: its type, of module:function the function",
        pattern=r"^[\w.-]+$",
    )
    weight: float = key(1.0, "factor of its score in the sum; 0: only measured")

    @property
    def label(self) -> str:
        """The name in metrics."""
        return self.name or self.type.rpartition(":")[2]


class Reward(Scoring):
    """`reward`: scores responses."""

    group_name: str | None = key(None, "name of the worker group in logs")
    functions: list[WeightedReward] = Field(
        default_factory=list, description="several functions, whose weighted sum is the score; none: reward.type alone"
    )

    @property
    def parts(self) -> list[tuple[str, Scoring]]:
        """Every function that scores, with its key."""
        if self.functions:
            return [(f"reward.functions[{index}]", function) for index, function in enumerate(self.functions)]
        return [("reward", self)]

    @property
    def labels(self) -> list[str]:
        """The names of several functions in metrics, in their order."""
        return [function.label for function in self.functions]

    @property
    def by_label(self) -> dict[str, Scoring]:
        """Every function that scores, by its name in metrics; that of one alone is empty."""
        return {function.label: function for function in self.functions} or {"": self}

    @property
    def classifier(self) -> Scoring | None:
        """The function whose reward model this component computes."""
        return next((part for _, part in self.parts if part.computes_model and part.model), None)
