"""The whole config: one closed schema for both task types. Derived values are properties, never keys."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rl_platform.config.algorithm import Algorithm
from rl_platform.config.base import Section
from rl_platform.config.components import Actor, Critic, Parallel, Reference, Reward, Rollout
from rl_platform.config.simulation import Env

GPU = Literal["a10", "a100-40gb", "a100-80gb", "b200", "h100", "h20", "h200", "l4", "l40s", "mi300x", "rtx4090"]

MAX_NODES, MAX_GPUS = 10_000, 20_000  # of a cluster; of a node


class Runner(Section):
    """`runner`: the run as a whole."""

    task_type: Literal["embodied", "reasoning"] = Field(description="which loop")
    experiment_name: str = Field(default="ppo", min_length=1, description="name of the run")
    output_dir: str = Field(
        default="runs/${runner.experiment_name}",
        min_length=1,
        description="for metrics, checkpoints, config and samples",
    )
    max_steps: int = Field(default=100, ge=1, description="PPO steps")
    max_epochs: int | None = Field(
        default=None, ge=1, description="reasoning: passes over the data; null: only max_steps counts"
    )
    seed: int = Field(default=1, ge=0, description="of every random generator of the run")
    val_check_interval: int = Field(default=0, ge=0, description="steps between validations; 0: at start and end")
    save_interval: int = Field(default=0, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(default=2, ge=1, description="newest checkpoints kept")
    resume: str = Field(default="auto", description="auto, never, or the path of a checkpoint")
    logger_backends: list[Literal["tensorboard", "wandb"]] = Field(
        default=["tensorboard"], description="beside metrics.jsonl"
    )
    log_samples: int = Field(default=2, ge=0, description="reasoning: generated texts written per step")
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=1,
        description="1: a rollout is collected while the one before is trained on, with weights one update old",
    )
    trace_steps: int = Field(
        default=5, ge=0, description="first steps of a launch whose timeline is written to trace.json; 0: none"
    )
    deadline_s: float = Field(default=600.0, gt=0, description="longest wait between components before the run ends")
    stop_grace_s: float = Field(
        default=20.0, ge=0, description="after SIGTERM or SIGHUP: longest wait for the end of the step, which is saved"
    )


class NodeGroup(Section):
    """`cluster.node_groups[]`: nodes by label, with what sets them apart."""

    label: str = Field(min_length=1, description="name used as node_group in component_placement")
    node_ranks: str = Field(description="nodes of the cluster in this group, as 0-1,3")
    env_vars: dict[str, str] = Field(default_factory=dict, description="environment of the workers on these nodes")
    accelerators: int | None = Field(
        default=None,
        ge=0,
        le=MAX_GPUS,
        description="GPUs of each of these nodes; 0: CPU nodes; null: as the cluster's other nodes",
    )
    ray_labels: dict[str, str] = Field(
        default_factory=dict, description="these nodes are Ray nodes with these labels (ray start --labels)"
    )


class ClusterInventory(Section):
    """`cluster.inventory`: equal machines that need not exist, for --plan."""

    nodes: int = Field(ge=1, le=MAX_NODES, description="machines; cluster.num_nodes follows from it")
    gpus_per_node: int = Field(ge=0, le=MAX_GPUS, description="GPUs of each; cluster.gpus_per_node follows from it")
    gpu: GPU | None = Field(
        default=None, description="kind of GPU, for estimates of memory and time; null: memory and speed not known"
    )


class Cluster(Section):
    """`cluster`: the only section that changes between a laptop and a cluster."""

    num_nodes: int = Field(default=1, ge=1, le=MAX_NODES, description="machines")
    gpus_per_node: int | None = Field(
        default=None,
        ge=0,
        le=MAX_GPUS,
        description="null: what this machine has; a number declares the inventory for --plan",
    )
    devices_per_node: int | None = Field(
        default=None,
        ge=1,
        le=MAX_GPUS,
        description="CPU workers that stand for this many GPUs on each machine; null: none",
    )
    component_placement: dict[str, Any] = Field(
        description="component names -> resources[:ranks], or {node_group, placement}"
    )
    node_groups: list[NodeGroup] = Field(default_factory=list, description="groups of nodes by label")
    runtime: Literal["auto", "local", "ray"] = Field(
        default="auto",
        description="local: threads of one process; ray: a process per host; auto: local where the placement allows it",
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        description="Ray cluster to join, as auto or HOST:PORT; null: one is started",
    )
    restarts: int = Field(
        default=3,
        ge=0,
        description="how often a process without a learner is started again when it dies; 0: never",
    )
    inventory: ClusterInventory | None = Field(default=None, description="declares a whole cluster for --plan")

    @model_validator(mode="before")
    @classmethod
    def _follow_inventory(cls, values: Any) -> Any:
        """`num_nodes` and `gpus_per_node` that were not written are those of the inventory."""
        inventory = values.get("inventory") if isinstance(values, dict) else None
        if not isinstance(inventory, dict):
            return values
        implied = {"num_nodes": inventory.get("nodes"), "gpus_per_node": inventory.get("gpus_per_node")}
        written = {name: value for name, value in values.items() if value is not None}
        smallest = {"num_nodes": 1, "gpus_per_node": 0}
        sizes = {name: size for name, size in implied.items() if type(size) is int and size >= smallest[name]}
        return sizes | written


class Task(Section):
    """`data.task`: where prompts and answers come from."""

    type: Literal["reasoning_gym", "jsonl", "digits"] = Field(default="reasoning_gym", description="which source")
    name: str | None = Field(default=None, description="reasoning_gym: dataset name")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of a generated task")
    path: str | None = Field(default=None, description="jsonl: training file")
    val_path: str | None = Field(default=None, description="jsonl: validation file; null: the last data.val_size lines")
    prompt_column: str = Field(default="question", description="jsonl: field with the prompt")
    answer_column: str = Field(default="answer", description="jsonl: field with the answer")


class Data(Section):
    """`data`: the task and the batch sizes."""

    task: Task | None = Field(default=None, description="reasoning only, and required there")
    train_size: int = Field(default=10_000, ge=1, description="generated tasks: number of distinct training prompts")
    val_size: int = Field(default=200, ge=1, description="validation prompts, never among the training prompts")
    train_batch_size: int = Field(default=64, ge=1, description="reasoning: prompts per step")
    mini_batch_size: int = Field(default=64, ge=1, description="rows (embodied: transitions) behind one optimizer step")
    max_prompt_length: int = Field(default=256, ge=1, description="tokens; longer prompts are left out and counted")
    max_response_length: int = Field(default=64, ge=1, description="tokens; longer responses are cut")
    system_prompt: str | None = Field(
        default=None, description="system turn of the chat template; null: the template's own"
    )
    prompt_template: str = Field(default="{question}", description="user turn; {question} is replaced")
    use_chat_template: bool = Field(default=True, description="false: the prompt is the bare text")
    shuffle: bool = Field(default=True, description="a new order every epoch, from runner.seed")


class Config(Section):
    """One run."""

    runner: Runner = Field(description="the run as a whole")
    cluster: Cluster = Field(description="machines and who works where")
    algorithm: Algorithm = Field(default_factory=Algorithm, description="estimator, losses and schedule of PPO")
    data: Data = Field(default_factory=Data, description="the task and the batch sizes")
    actor: Actor = Field(default_factory=Actor, description="the policy that learns")
    critic: Critic = Field(default_factory=Critic, description="the separate value model")
    reference: Reference = Field(default_factory=Reference, description="the frozen policy of KL terms")
    rollout: Rollout = Field(default_factory=Rollout, description="generates responses or chooses actions")
    reward: Reward = Field(default_factory=Reward, description="scores responses")
    env: Env = Field(default_factory=Env, description="the simulation")

    @model_validator(mode="before")
    @classmethod
    def _complete_models(cls, values: Any) -> Any:
        """A model of the critic or the reference that names no weights is the actor's, with the keys that it writes."""
        if not isinstance(values, dict):
            return values
        actor = values.get("actor")
        base = actor.get("model") if isinstance(actor, dict) else None
        if not isinstance(base, dict) or not _names_weights(base):
            return values
        completed = dict(values)
        for role in ("critic", "reference"):
            section = values.get(role)
            own = section.get("model") if isinstance(section, dict) else None
            if isinstance(section, dict) and isinstance(own, dict) and own and not _names_weights(own):
                written = {name: value for name, value in own.items() if value is not None}
                completed[role] = {**section, "model": {**base, **written}}
        return completed

    @property
    def reference_is_base(self) -> bool:
        """KL terms compare to the actor's own model with its adapters off: no second model, no component."""
        return self.algorithm.needs_reference and self.actor.lora is not None and self.reference.model is None

    @property
    def has_reference(self) -> bool:
        """There is a component `reference`."""
        return self.algorithm.needs_reference and not self.reference_is_base

    @property
    def reference_section(self) -> Actor:
        """How the reference is computed: as the actor, but for what its own section says. Nothing of it is trained."""
        own, backend = self.reference, self.reference.training_backend or self.actor.training_backend
        inherited = self.actor.parallel if backend == self.actor.training_backend else Parallel()
        changed = {
            "model": own.model or self.actor.model,
            "training_backend": backend,
            "parallel": own.parallel or inherited,
            "cpu_offload": self.actor.cpu_offload and backend == "fsdp",
            "offload": own.offload,
            "lora": None,
            "gradient_checkpointing": False,
        }
        return self.actor.model_copy(update=changed)

    @property
    def prompts_in_flight(self) -> int:
        """Reasoning: prompts whose responses are generated at once."""
        partial, prompts = self.rollout.partial_rollout, self.data.train_batch_size
        if partial is None:
            return prompts
        return partial.prompts_in_flight or -(-3 * prompts // 2)

    @property
    def instructions(self) -> tuple[str, ...]:
        """What a policy that reads instructions is told: one for each task, or the only one."""
        own = tuple(task.instruction for task in self.env.tasks) or (self.actor.model.instruction,)
        return tuple(text for text in own if text is not None)

    @property
    def transitions(self) -> int:
        """Embodied: rows of a rollout, one per choice of the policy."""
        return self.env.num_envs * self.env.rollout_steps // self.actor.model.num_action_chunks

    @property
    def sequence_length(self) -> int:
        """Transitions in a row that mini-batches are made of; 1 unless the policy is recurrent, and for reasoning."""
        model = self.actor.model
        return (model.sequence_length or self.env.rollout_steps) if model.type == "gru" else 1


def _names_weights(model: dict[str, Any]) -> bool:
    return model.get("path") is not None or model.get("random_init") is not None
