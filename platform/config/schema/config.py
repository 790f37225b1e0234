"""The whole config: one closed schema for both task types. Derived values are properties, never keys."""

from __future__ import annotations

from pydantic import Field, model_validator

from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.config.schema.cluster import Cluster
from rl_platform.config.schema.data import Data
from rl_platform.config.schema.env import Env
from rl_platform.config.schema.models import Actor, Critic, Model, Offload, Parallel, Reference
from rl_platform.config.schema.reward import Reward
from rl_platform.config.schema.rollout import Rollout
from rl_platform.config.schema.runner import Runner
from rl_platform.config.schema.section import Section


class Config(Section):
    """One run."""

    runner: Runner = Field(description="the run as a whole")
    cluster: Cluster = Field(description="machines, and the placement of components on them")
    algorithm: Algorithm = Field(default_factory=Algorithm, description="estimator, losses and schedule of PPO")
    data: Data = Field(default_factory=Data, description="the task and the batch sizes")
    actor: Actor = Field(default_factory=Actor, description="the policy that learns")
    critic: Critic = Field(default_factory=Critic, description="the separate value model")
    reference: Reference = Field(default_factory=Reference, description="the frozen policy that KL terms compare to")
    rollout: Rollout = Field(default_factory=Rollout, description="generation of responses or choice of actions")
    reward: Reward = Field(default_factory=Reward, description="scoring of responses")
    env: Env = Field(default_factory=Env, description="the simulation")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: object) -> object:
        return complete_models(values)

    @property
    def reference_is_base(self) -> bool:
        """True if KL terms compare to the actor's own model without its adapters. There is no second model then."""
        return self.algorithm.needs_reference and self.actor.lora is not None and self.reference.model is None

    @property
    def updates_at_once(self) -> bool:
        """True if weights are loaded while responses are generated."""
        return self.runner.max_staleness > 0 and self.rollout.on_update != "finish"

    @property
    def readable_publications(self) -> int:
        """Publications of weights that a learner keeps readable: those to come, and that of a rollout that restarts."""
        ahead = self.runner.max_staleness
        return ahead + 1 if ahead > 1 or self.updates_at_once else 1

    def oldest_version(self, step: int) -> int:
        """Returns the version of weights that are `runner.max_staleness` updates old at the update of `step`; may be
        negative."""
        return max(0, step - self.algorithm.policy_training_start_step) - self.runner.max_staleness

    @property
    def has_reference(self) -> bool:
        """True if the run has a component `reference`."""
        return self.algorithm.needs_reference and not self.reference_is_base

    @property
    def reference_section(self) -> Actor:
        """The actor's section with the keys that `reference` writes. Nothing of the reference is trained."""
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
    def reference_as_actor(self) -> bool:
        """Whether the reference is the actor's model on its backend in its layout."""
        own, actor = self.reference_section, self.actor
        same_backend = (own.training_backend, own.parallel) == (actor.training_backend, actor.parallel)
        return same_backend and own.model == actor.model

    def section(self, role: str) -> Actor | Critic:
        """Returns the section of a component's model: the critic's, the reference's as it is computed, or else the
        actor's."""
        if role == "reference":
            return self.reference_section
        return self.critic if role == "critic" else self.actor

    def model_of(self, role: str) -> Model:
        """Returns the model of a component: its own, or else the actor's."""
        return self.section(role).model or self.actor.model

    def mini_batch_size(self, role: str) -> int:
        """Returns the rows behind one optimizer step of a component, over all its ranks."""
        own = self.critic.mini_batch_size if role == "critic" else None
        return own or self.data.mini_batch_size

    @property
    def has_values(self) -> bool:
        """True if a value function is trained, as a head on the policy or as a model of its own."""
        return self.algorithm.loss_type == "actor_critic" or self.critic.use_critic_model

    @property
    def whole_episodes(self) -> bool:
        """Embodied: True if a rollout begins with new episodes and plays them to their ends. Without values an episode
        that is cut could not be scored."""
        return self.runner.task_type == "embodied" and self.algorithm.loss_type == "actor"

    @property
    def offload_keys(self) -> dict[str, Offload]:
        """The keys `offload` by component."""
        return {
            "actor": self.actor.offload,
            "critic": self.critic.offload,
            "reference": self.reference.offload,
            "rollout": self.rollout.offload,
        }

    @property
    def prompts_in_flight(self) -> int:
        """Reasoning: prompts whose responses are generated at once."""
        partial, prompts = self.rollout.partial_rollout, self.data.train_batch_size
        if partial is None:
            return prompts
        return partial.prompts_in_flight or -(-3 * prompts // 2)

    @property
    def instructions(self) -> tuple[str, ...]:
        """The instructions of a policy that reads them: one for each task, or the only one."""
        own = tuple(task.instruction for task in self.env.tasks) or (self.actor.model.instruction,)
        return tuple(text for text in own if text is not None)

    @property
    def rows_per_step(self) -> int:
        """Rows of a rollout: sequences, or transitions of an embodied run, one per choice of the policy."""
        if self.runner.task_type == "embodied":
            return self.env.num_envs * self.env.rollout_steps // self.actor.model.num_action_chunks
        return self.data.train_batch_size * self.algorithm.group_size

    @property
    def sequence_length(self) -> int:
        """Transitions in a row that mini-batches are made of; 1 unless the policy is recurrent, and for reasoning."""
        model = self.actor.model
        return (model.sequence_length or self.env.rollout_steps) if model.type == "gru" else 1


def complete_models(values: object) -> object:
    """Fills in the actor's model for a critic or reference whose model names no weights; its own keys stay."""
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


def _names_weights(model: dict[str, object]) -> bool:
    return model.get("path") is not None or model.get("random_init") is not None
