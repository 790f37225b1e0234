"""The config's own learners and PPO step around a model of a few thousand random parameters.

Unchanged: the section `algorithm`, clipping and decay of the optimisers, temperature, activation. Replaced: models, so
that nothing is loaded, batch sizes, learning rates, precision (float32), placement (this process, without GPU).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_platform.components.actor import EmbodiedActor, LanguageActor
from rl_platform.components.critic import LanguageCritic
from rl_platform.components.reference import LanguageReference
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import Cluster
from rl_platform.config.schema.models import Model, Parallel, RandomLM
from rl_platform.launch.check.samples import LONGEST_PROMPT, LONGEST_RESPONSE, SPACES, CheckedConfig
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import schedule
from rl_platform.records import RolloutBatch
from rl_platform.reporter import Reporters
from rl_platform.runners.ppo import PPO
from rl_platform.runners.task_runner import Learners
from rl_platform.runtime import ComponentSpec
from rl_platform.runtime.local import LocalRuntime
from rl_platform.runtime.worker_group import WorkerGroup

MOST_EPOCHS = 2
DEADLINE_S = 60.0
_LONGEST = LONGEST_PROMPT + LONGEST_RESPONSE


@dataclass
class Small:
    """Running learners and the PPO step over them."""

    groups: Mapping[str, WorkerGroup]
    ppo: PPO

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """Takes one PPO step on a batch and returns its metrics."""
        return self.ppo.update(batch, 0)

    def parameters(self, name: str) -> Tensor:
        """Returns a copy of all parameters of a learner as one vector."""
        state = self.groups[name].publish(0).wait()[0].state
        return torch.cat([tensor.flatten() for tensor in state.values()]).clone()

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        return {name: group for name, group in self.groups.items() if name != "reference"}


@contextmanager
def small_learners(case: CheckedConfig, config: Config) -> Iterator[Small]:
    """Runs the learners of `config`, made by `small`, in this process until the block ends."""
    specs = _components(config)
    placement = schedule(config.cluster, Inventory.declared(1, 0))
    with LocalRuntime(placement, DEADLINE_S, case.config.runner.seed) as runtime:
        groups = runtime.start(specs)
        if config.algorithm.full_kl:
            groups["actor"].receive_reference_head(groups["reference"].head().wait()[0]).wait()
        learners = Learners(groups["actor"], groups.get("critic"), groups.get("reference"))
        yield Small(groups, PPO(config, learners, Reporters([])))


def small(case: CheckedConfig, micro_batch_size: int | None = None, **algorithm: object) -> Config:
    """Returns the config with a small model. `algorithm`: keys to be changed.

    Adam divides a gradient by its own size, so the rounding of a gradient near 0 would become a whole step. With an
    `eps` of 1 the steps are as large as the gradients.
    """
    config = case.config
    names = _names(config)
    keys: dict[str, object] = {
        "runner.warm_start": None,
        "cluster": Cluster(component_placement={",".join(names): "all"}, gpus_per_node=0),
        "algorithm.ppo_epochs": min(config.algorithm.ppo_epochs, MOST_EPOCHS),
        "algorithm.critic_ppo_epochs": min(config.algorithm.critic_epochs, MOST_EPOCHS),
        "algorithm.logprob_forward_micro_batch_size": None,
        "data.mini_batch_size": case.rows // 2,
        "data.max_prompt_length": LONGEST_PROMPT,
        "data.max_response_length": LONGEST_RESPONSE,
        "actor.model": _model(case),
        "critic.model": None,
        "critic.mini_batch_size": None,
        "reference.model": _language_model(24),
        "reference.training_backend": None,
        "reference.parallel": None,
    }
    if config.algorithm.loss_agg_horizon is None:
        keys["algorithm.loss_agg_horizon"] = config.data.max_response_length
    learner = {
        "micro_batch_size": micro_batch_size,
        "max_tokens_per_micro_batch": None,
        "training_backend": "fsdp",
        "lora": None,
        "cpu_offload": False,
        "parallel": Parallel(),
        "optim.lr": 0.1,
        "optim.eps": 1.0,
        "optim.lr_schedule": "constant",
        "optim.lr_warmup_steps": 0,
    }
    keys |= {f"{role}.{name}": value for role in ("actor", "critic") for name, value in learner.items()}
    return config.changed(keys | {f"algorithm.{name}": value for name, value in algorithm.items()})


def rollout(case: CheckedConfig) -> RolloutBatch:
    """Returns the batch that a PPO step starts from: rewards and actions, without results of models."""
    return replace(case.rollout, log_probs=None, reference_log_probs=None, full_kl=None, values=None)


def _components(config: Config) -> dict[str, ComponentSpec]:
    if config.runner.task_type == "embodied":
        return {"actor": ComponentSpec(EmbodiedActor, {"config": config, "spaces": SPACES})}
    classes = {"actor": LanguageActor, "critic": LanguageCritic, "reference": LanguageReference}
    return {name: ComponentSpec(classes[name], {"config": config}) for name in _names(config)}


def _names(config: Config) -> list[str]:
    critic = ["critic"] if config.critic.use_critic_model else []
    return ["actor", *critic, *(["reference"] if config.algorithm.needs_reference else [])]


def _model(case: CheckedConfig) -> Model:
    model = case.config.actor.model
    if case.embodied:
        # the properties are about single transitions, so a recurrent policy is replaced too
        return model.model_copy(update={"hidden_sizes": [8, 8], "dtype": "float32", "type": "mlp"})
    return _language_model(16)


def _language_model(width: int) -> Model:
    tiny = RandomLM(hidden_size=width, num_layers=1, num_heads=2, intermediate_size=32, max_positions=_LONGEST)
    return Model(random_init=tiny, tokenizer="bytes")
