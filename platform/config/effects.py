"""Which keys do nothing under the chosen task, losses and switches, and why. A config that sets one is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rl_platform.config.action_level_rules import CHUNKS
from rl_platform.config.controls import idle_controls
from rl_platform.config.embodied_rules import POLICY_KEYS, idle_embodied_keys
from rl_platform.config.estimators import estimator_of, idle_estimator_keys
from rl_platform.config.parallel_rules import idle_parallel_keys
from rl_platform.config.reward_rules import idle_reward_keys
from rl_platform.config.schema import Config

_PROMPTS = (
    "task",
    "train_size",
    "val_size",
    "train_batch_size",
    "max_prompt_length",
    "max_response_length",
    "system_prompt",
    "prompt_template",
    "use_chat_template",
    "shuffle",
)
_CRITIC = (
    "group_name",
    "training_backend",
    "micro_batch_size",
    "max_tokens_per_micro_batch",
    "balance",
    "optim",
    "gradient_checkpointing",
    "parallel",
    "cpu_offload",
    "lora",
    "offload",
    "model",
)


class Idle(NamedTuple):
    """A key or section that nothing reads, the reason, and the keys that decide it."""

    key: str
    reason: str
    switches: tuple[str, ...] = ("runner.task_type",)


_SGLANG = ("tensor_parallel_size", "gpu_memory_utilization", "engine_args", "engine_env")


def has_values(config: Config) -> bool:
    """Whether a value function is trained, as a head on the policy or as a model of its own."""
    return config.algorithm.loss_type == "actor_critic" or config.critic.use_critic_model


def idle_keys(config: Config) -> list[Idle]:
    """All keys and sections without effect in this config. A section may be listed beside keys inside it."""
    task = _embodied(config) if config.runner.task_type == "embodied" else _reasoning(config)
    estimator = (Idle(*found) for found in idle_estimator_keys(config))
    losses = (_cluster(config), _losses(config), _policy_loss(config), _kl(config))
    layouts = (Idle(*found) for found in idle_parallel_keys(config))
    controls = (Idle(*found) for found in idle_controls(config))
    parts = (*losses, estimator, layouts, _rewards(config), _batches(config), _optimizers(config), controls)
    return [*task, *(idle for part in parts for idle in part)]


def _embodied(config: Config) -> Iterator[Idle]:
    for name in _PROMPTS:
        yield Idle(f"data.{name}", "embodied training has no prompts")
    for key in ("actor.offload", "rollout.offload"):
        yield Idle(key, "an embodied policy is small: it stays where it is")
    for name in ("backend", "sampling", "val_sampling", "multi_turn", "max_running_requests", *_SGLANG):
        yield Idle(f"rollout.{name}", "embodied policies choose actions and generate no text")
    yield Idle("rollout.weight_transfer", "an embodied policy is small: it travels through main memory")
    yield Idle("rollout.stop", "embodied policies choose actions and generate no text")
    yield Idle("rollout.partial_rollout", "the rollouts of an embodied policy have equal lengths: none is waited for")
    yield Idle("reward", "embodied rewards come from the environment")
    yield Idle("algorithm.reward_scaling", "it maps the scores of responses; see env.normalize_rewards")
    yield Idle("algorithm.reward_whitening", "it scales the scores of responses; see env.normalize_rewards")
    yield Idle("algorithm.overlong", "embodied episodes have no responses with a length")
    for name in ("max_epochs", "log_samples"):
        yield Idle(f"runner.{name}", "embodied training has no data set and no texts")
    yield from (Idle(*found) for found in idle_embodied_keys(config))
    yield Idle("actor.max_tokens_per_micro_batch", "transitions have no tokens; actor.micro_batch_size counts rows")
    yield Idle("actor.balance", "all transitions are the same work")
    yield from _action_levels(config)
    for name in ("observations", "rewards"):
        switch = f"env.normalize_{name}"
        if not getattr(config.env, f"normalize_{name}"):
            yield Idle(f"env.clip_{name}", f"only normalised {name} are clipped, and {switch} is off", (switch,))


def _action_levels(config: Config) -> Iterator[Idle]:
    algorithm = config.algorithm
    if config.actor.model.num_action_chunks == 1:
        yield Idle("algorithm.reward_type", f"a chunk is one action, {CHUNKS} is 1: both types are the same", (CHUNKS,))
    if algorithm.loss_agg_func in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        reason = f"loss_agg_func {algorithm.loss_agg_func} adds entropies up, which is the same at every level"
        yield Idle("algorithm.entropy_type", reason, ("algorithm.loss_agg_func",))


def _reasoning(config: Config) -> Iterator[Idle]:
    yield Idle("env", "reasoning tasks have no simulation")
    for role in ("actor", "critic", "reference"):
        for name in POLICY_KEYS:
            yield Idle(f"{role}.model.{name}", "only embodied policies are built from it")
    for name in ("reward_type", "logprob_type", "entropy_type", "bootstrap_type"):
        yield Idle(f"algorithm.{name}", "a response has no action chunks, and its rows hold one episode each")
    if config.rollout.sync == "delta":
        reason = "with rollout.sync delta they go through main memory, where it is seen what differs"
        yield Idle("rollout.weight_transfer", reason, ("rollout.sync",))
    if config.rollout.backend == "torch":
        for name in _SGLANG:
            yield Idle(f"rollout.{name}", "the torch engine has no such option", ("rollout.backend",))
    kind = config.data.task.type if config.data.task is not None else None
    switch = ("data.task.type",)
    if kind is not None and kind != "reasoning_gym":
        yield Idle("data.task.name", "it belongs to data.task.type reasoning_gym", switch)
    if kind == "jsonl":
        yield Idle("data.task.params", "it belongs to generated tasks", switch)
    if kind is not None and kind != "jsonl":
        for name in ("path", "val_path", "prompt_column", "answer_column"):
            yield Idle(f"data.task.{name}", "it belongs to data.task.type jsonl", switch)
    if kind == "jsonl":
        yield Idle("data.train_size", "a file has the size it has; only generated tasks are sized", switch)
    if not config.data.use_chat_template:
        reason = "without data.use_chat_template there is no system turn"
        yield Idle("data.system_prompt", reason, ("data.use_chat_template",))


def _cluster(config: Config) -> Iterator[Idle]:
    if config.cluster.runtime == "local":
        for name in ("address", "restarts"):
            yield Idle(f"cluster.{name}", "cluster.runtime local is one process without Ray", ("cluster.runtime",))
        reason = "in one process the rollout reads the actor's weights where they are"
        for name in ("sync", "weight_transfer"):
            yield Idle(f"rollout.{name}", reason, ("cluster.runtime",))


def _losses(config: Config) -> Iterator[Idle]:
    algorithm = config.algorithm
    if algorithm.loss_agg_func != "seq-mean-token-sum-norm":
        reason = "only algorithm.loss_agg_func seq-mean-token-sum-norm divides by it"
        yield Idle("algorithm.loss_agg_horizon", reason, ("algorithm.loss_agg_func",))
    if not config.critic.use_critic_model:
        separate = ("algorithm.critic_ppo_epochs", "algorithm.policy_training_start_step")
        for key in (*(f"critic.{name}" for name in _CRITIC), *separate):
            reason = "there is no separate critic, critic.use_critic_model is false"
            yield Idle(key, reason, ("critic.use_critic_model", "algorithm.loss_type"))
    if not estimator_of(algorithm.adv_type).values and not has_values(config):
        for name in ("value_clip", "huber_delta", "value_loss_scale"):
            reason = f"adv_type {algorithm.adv_type} without a critic trains no values"
            yield Idle(f"algorithm.{name}", reason, ("algorithm.adv_type", "critic.use_critic_model"))


def _policy_loss(config: Config) -> Iterator[Idle]:
    kind, switch = config.algorithm.policy_loss, ("algorithm.policy_loss",)
    if kind == "reinforce":
        for name in ("clip_ratio_low", "clip_ratio_high"):
            yield Idle(f"algorithm.{name}", "policy_loss reinforce has no ratio to clip", switch)
    if kind in ("reinforce", "cispo"):
        reason = f"policy_loss {kind} weighs log-probs, whose loss has no bound that a dual clip could set"
        yield Idle("algorithm.clip_ratio_c", reason, switch)
    correction, section = config.algorithm.rollout_is, "algorithm.rollout_is"
    if correction is not None and correction.mode is None:
        for name in ("level", "low", "high", "batch_normalize"):
            yield Idle(f"{section}.{name}", f"{section}.mode is null, so there are no weights", (f"{section}.mode",))
    elif correction is not None and correction.mode == "sequence_mask":
        reason = "mode sequence_mask judges sequences and keeps the ratios of their tokens"
        yield Idle(f"{section}.level", reason, (f"{section}.mode",))


def _kl(config: Config) -> Iterator[Idle]:
    algorithm = config.algorithm
    reward, loss, control = "algorithm.use_kl_in_reward", "algorithm.use_kl_loss", "algorithm.kl_ctrl.type"
    if not algorithm.use_kl_in_reward:
        for name in ("kl_penalty", "kl_ctrl"):
            yield Idle(f"algorithm.{name}", f"{reward} is off", (reward,))
    elif algorithm.kl_ctrl.type == "fixed":
        for name in ("horizon", "target_kl"):
            yield Idle(f"algorithm.kl_ctrl.{name}", f"only {control} adaptive reacts to the KL", (control,))
    if not algorithm.use_kl_loss:
        for name in ("kl_loss_coef", "kl_loss_type", "kl_loss_grad"):
            yield Idle(f"algorithm.{name}", f"{loss} is off", (loss,))
    elif algorithm.kl_loss_type.endswith("+"):
        kind = "algorithm.kl_loss_type"
        yield Idle("algorithm.kl_loss_grad", f"the + of {kind} says it: the gradient is that of k2", (kind,))
    elif algorithm.kl_loss_type == "full":
        kind = "algorithm.kl_loss_type"
        yield Idle("algorithm.kl_loss_grad", f"{kind} full has one gradient, the exact one", (kind,))
    if not (algorithm.use_kl_in_reward and algorithm.use_kl_loss):
        yield Idle("algorithm.allow_both_kl", f"{reward} and {loss} are not both on", (reward, loss))
    if not algorithm.needs_reference:
        yield Idle("reference", f"no KL term is on ({reward}, {loss})", (reward, loss))


def _batches(config: Config) -> Iterator[Idle]:
    algorithm, embodied = config.algorithm, config.runner.task_type == "embodied"
    if embodied:
        yield Idle("algorithm.dynamic_sampling", "embodied training has no prompts to sample")
    if not algorithm.use_pf_ppo:
        yield Idle("algorithm.pf_ppo", "algorithm.use_pf_ppo is off", ("algorithm.use_pf_ppo",))
    elif algorithm.pf_ppo.method != "pow":
        method = "algorithm.pf_ppo.method"
        yield Idle("algorithm.pf_ppo.power", f"only {method} pow has an exponent", (method,))
    sizes: tuple[str, ...] = ("data.train_batch_size", "algorithm.group_size")
    rows = config.data.train_batch_size * algorithm.group_size
    if embodied:
        sizes, rows = ("env.num_envs", "env.rollout_steps", "actor.model.num_action_chunks"), config.transitions
    if algorithm.ppo_epochs == 1 and rows <= config.data.mini_batch_size:
        reason = "a rollout is one optimizer step (algorithm.ppo_epochs, data.mini_batch_size): none is left to skip"
        switches = ("algorithm.ppo_epochs", "data.mini_batch_size", *sizes, "runner.task_type")
        yield Idle("algorithm.target_kl", reason, switches)
    if rows <= config.data.mini_batch_size:
        reason = "a rollout is one mini-batch, in which the order of the rows does not matter"
        yield Idle("algorithm.shuffle_mini_batches", reason, ("data.mini_batch_size", *sizes, "runner.task_type"))


def _rewards(config: Config) -> Iterator[Idle]:
    if config.runner.task_type == "reasoning":
        yield from (Idle(*found) for found in idle_reward_keys(config))
    if config.algorithm.overlong.buffer_length is None:
        switch = "algorithm.overlong.buffer_length"
        for name in ("penalty", "max_length"):
            yield Idle(f"algorithm.overlong.{name}", f"{switch} is null: no soft punishment", (switch,))


def _optimizers(config: Config) -> Iterator[Idle]:
    for role, optim in (("actor", config.actor.optim), ("critic", config.critic.optim)):
        if optim.lr_schedule == "constant":
            switch = f"{role}.optim.lr_schedule"
            yield Idle(f"{role}.optim.min_lr", f"the learning rate does not decay, {switch} is constant", (switch,))
