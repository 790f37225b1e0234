"""The whole config: one closed schema for both task types. Derived values are properties, never keys."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_platform.config.algorithm import Algorithm
from rl_platform.config.base import Section
from rl_platform.config.components import Actor, Critic, Env, Reference, Reward, Rollout


class Runner(Section):
    """`runner`: the run as a whole."""

    task_type: Literal["embodied", "reasoning"] = Field(description="which loop")
    experiment_name: str = Field("ppo", min_length=1)
    output_dir: str = Field("runs/${runner.experiment_name}", description="metrics, checkpoints, config and samples go here")
    max_steps: int = Field(100, ge=1, description="PPO steps")
    max_epochs: int | None = Field(None, ge=1, description="reasoning: passes over the training data; null: only max_steps counts")
    seed: int = Field(1, ge=0)
    val_check_interval: int = Field(0, ge=0, description="steps between validations; 0: only at the start and the end")
    save_interval: int = Field(0, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept")
    resume: str = Field("auto", description="auto, never, or the path of a checkpoint")
    logger_backends: list[Literal["tensorboard", "wandb"]] = Field(["tensorboard"], description="beside metrics.jsonl")
    log_samples: int = Field(2, ge=0, description="reasoning: generated texts written per step")
    deadline_s: float = Field(600.0, gt=0, description="the longest wait between components before the run ends with a message")


class NodeGroup(Section):
    """`cluster.node_groups[]`: nodes by label, with environment variables."""

    label: str = Field(min_length=1)
    node_ranks: str = Field(description="nodes of the cluster in this group, as 0-1,3")
    env_vars: dict[str, str] = Field(default_factory=dict)


class Cluster(Section):
    """`cluster`: the only section that changes between a laptop and a cluster."""

    num_nodes: int = Field(1, ge=1)
    gpus_per_node: int | None = Field(None, ge=0, description="null: what this machine has; a number declares the inventory for --plan")
    component_placement: dict[str, Any] = Field(description="component names -> resources[:ranks], or {node_group, placement}")
    node_groups: list[NodeGroup] = Field(default_factory=list)
    runtime: Literal["auto", "local", "ray"] = Field("auto", description="local: threads of one process")


class Task(Section):
    """`data.task`: where prompts and answers come from."""

    type: Literal["reasoning_gym", "jsonl", "addition"] = Field("reasoning_gym")
    name: str | None = Field(None, description="reasoning_gym: dataset name")
    params: dict[str, Any] = Field(default_factory=dict, description="reasoning_gym: dataset parameters")
    path: str | None = Field(None, description="jsonl: training file")
    val_path: str | None = Field(None, description="jsonl: validation file; null: the last val_size lines are held out")
    prompt_column: str = "question"
    answer_column: str = "answer"


class Data(Section):
    """`data`: the task and the batch sizes."""

    task: Task | None = Field(None, description="reasoning: required; embodied: not used")
    train_size: int = Field(10_000, ge=1, description="generated tasks: number of distinct training prompts")
    val_size: int = Field(200, ge=1, description="validation prompts, never in the training set")
    train_batch_size: int = Field(64, ge=1, description="reasoning: prompts per step")
    mini_batch_size: int = Field(64, ge=1, description="rows behind one optimizer step: sequences, or transitions when embodied")
    max_prompt_length: int = Field(256, ge=1, description="tokens; longer prompts are left out and counted")
    max_response_length: int = Field(64, ge=1, description="tokens")
    system_prompt: str | None = Field(None, description="system turn of the chat template; null: the template's own")
    prompt_template: str = Field("{question}", description="user turn; {question} is replaced")
    use_chat_template: bool = Field(True, description="false: the prompt is the bare text")
    shuffle: bool = Field(True, description="a new order every epoch, from runner.seed")


class Config(Section):
    """One run."""

    runner: Runner
    cluster: Cluster
    algorithm: Algorithm = Field(default_factory=Algorithm)
    data: Data = Field(default_factory=Data)
    actor: Actor = Field(default_factory=Actor)
    critic: Critic = Field(default_factory=Critic)
    reference: Reference = Field(default_factory=Reference)
    rollout: Rollout = Field(default_factory=Rollout)
    reward: Reward = Field(default_factory=Reward)
    env: Env = Field(default_factory=Env)
