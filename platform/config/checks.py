"""Rules between keys, each with its reason.

What a single key accepts is said by the schema. Whether the resources of a placement exist is not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from rl_platform.config.action_level_rules import CHUNKS
from rl_platform.config.batch_rules import broken_batch_rules
from rl_platform.config.cluster_rules import broken_cluster_rules
from rl_platform.config.controls import broken_controls
from rl_platform.config.conversation_rules import broken_conversation_rules
from rl_platform.config.effects import idle_keys
from rl_platform.config.embodied_rules import broken_embodied_rules
from rl_platform.config.estimators import check_estimator, estimator_of
from rl_platform.config.explain import show
from rl_platform.config.language_model_rules import broken_language_model_rules
from rl_platform.config.offload_rules import broken_offload_rules
from rl_platform.config.parallel_rules import broken_parallel_rules
from rl_platform.config.policy_loss_rules import broken_policy_loss_rules
from rl_platform.config.reward_rules import broken_reward_rules
from rl_platform.config.rules import FUNCTION, BrokenRule
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Model, Optim
from rl_platform.config.schema.rollout import Sampling
from rl_platform.config.suggest import nearest
from rl_platform.errors import Problem

COMPONENTS = ("actor", "critic", "actor_critic", "reference", "rollout", "reward", "env")
PLACEMENT = "cluster.component_placement"

_PARTS = (  # keys that decide which components a run has
    "runner.task_type",
    "critic.use_critic_model",
    "algorithm.use_kl_in_reward",
    "algorithm.use_kl_loss",
    "actor.lora",
    "reference.model",
)
_REWARD_TYPES = ("task", "math_verify", "exact_match", "model", "http")


def check(
    config: Config, written: dict[str, Any], where: Callable[[str], str], doubtful: Collection[str] = ()
) -> list[Problem]:
    """All rules that `config` breaks. `written` is what the user wrote (defaults not filled in); rules about keys in
    `doubtful`, which hold a default because what was written is wrong, are not judged."""
    rules = _Rules(config, where, doubtful)
    rules.losses()
    check_estimator(config, rules.fail)
    rules.kl()
    rules.placement()
    rules.report(broken_cluster_rules(config))
    rules.schedule()
    parts = (broken_policy_loss_rules, broken_batch_rules, broken_parallel_rules, broken_offload_rules, broken_controls)
    for broken_rules in parts:
        rules.report(broken_rules(config))
    rules.trainable("actor")
    if config.critic.use_critic_model:
        rules.trainable("critic")
    if config.runner.task_type == "embodied":
        rules.embodied()
        rules.report(broken_embodied_rules(config))
    else:
        rules.reasoning()
        rules.report(broken_reward_rules(config))
        rules.report(broken_conversation_rules(config))
    rules.without_effect(written)
    return rules.problems


class _Rules:
    def __init__(self, config: Config, where: Callable[[str], str], doubtful: Collection[str]) -> None:
        self.config = config
        self.where = where
        self.doubtful = doubtful
        self.problems: list[Problem] = []

    def fail(self, key: str, message: str, *involved: str, hint: str = "") -> None:
        """A problem with `key`; the `involved` keys take part in the rule."""
        doubted = (
            known == name or name.startswith(f"{known}.") for name in (key, *involved) for known in self.doubtful
        )
        if not any(doubted):
            self.problems.append(Problem(key, message, self.where(key), show(self._value(key)), hint=hint))

    def report(self, broken: Iterable[BrokenRule]) -> None:
        for rule in broken:
            self.fail(rule.key, rule.message, *rule.involved, hint=rule.hint)

    def _value(self, key: str) -> Any:
        return _get(self.config.model_dump(mode="json"), key)

    def losses(self) -> None:
        algorithm, critic = self.config.algorithm, self.config.critic
        task = self.config.runner.task_type
        fitting = "actor_critic" if task == "embodied" else "actor"
        loss, switch = "algorithm.loss_type", "critic.use_critic_model"
        if algorithm.loss_type != fitting:
            reason = {
                "embodied": "the values of an embodied policy come from a head on its own backbone",
                "reasoning": "the values of a language model come from a separate critic",
            }[task]
            self.fail(loss, f"{task} training needs {fitting}: {reason}", "runner.task_type", hint=f"{loss}: {fitting}")
        elif fitting == "actor" and estimator_of(algorithm.adv_type).values and not critic.use_critic_model:
            message = (
                f"adv_type {algorithm.adv_type} with loss_type actor needs values, which only a critic model gives"
            )
            self.fail(switch, message, loss, "algorithm.adv_type", "runner.task_type", hint=f"{switch}: true")
        if algorithm.loss_type == "actor_critic" and critic.use_critic_model:
            message = (
                "loss_type actor_critic already trains values on the policy's backbone: a second critic is not used"
            )
            self.fail(switch, message, loss, hint=f"{switch}: false")
        if task == "embodied" and algorithm.group_size > 1:
            message = "embodied episodes have no prompt to group by"
            self.fail("algorithm.group_size", message, "runner.task_type", hint="more samples: env.num_envs")

    def kl(self) -> None:
        algorithm = self.config.algorithm
        reward, loss, task = "algorithm.use_kl_in_reward", "algorithm.use_kl_loss", "runner.task_type"
        both = "algorithm.allow_both_kl"
        if algorithm.use_kl_in_reward and algorithm.use_kl_loss and not algorithm.allow_both_kl:
            message = "the KL is already in the reward; in both places it would count twice"
            self.fail(loss, message, reward, both, hint=f"if you want that: {both}: true")
        if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive" and algorithm.kl_ctrl.kl_coef == 0:
            message = "an adaptive coefficient is multiplied at each step: from 0 it never moves"
            self.fail("algorithm.kl_ctrl.kl_coef", message, "algorithm.kl_ctrl.type", reward)
        if self.config.runner.task_type == "embodied":
            for key, used in ((reward, algorithm.use_kl_in_reward), (loss, algorithm.use_kl_loss)):
                if used:
                    self.fail(key, "the reference of an embodied policy would be its random start", task)

    def placement(self) -> None:
        if PLACEMENT in self.doubtful or "cluster" in self.doubtful:
            return
        keys = self.config.cluster.component_placement
        embodied = self.config.runner.task_type == "embodied"
        named = Counter(name.strip() for key in keys for name in key.split(","))
        if not any(known.startswith(f"{PLACEMENT}.") for known in self.doubtful):
            self._names(keys, named, embodied)
        needed = self._needed_components()
        misspelt = {nearest(name, COMPONENTS) for name in named if name not in COMPONENTS}
        missing = [name for name in needed if name not in named and name not in misspelt]
        if embodied and "actor" in named:
            missing = [name for name in missing if name != "actor_critic"]
        if missing:
            reasons = "; ".join(dict.fromkeys(needed[name] for name in missing))
            hint = f"add {', '.join(missing)} to one of the keys or as keys of their own"
            self.fail(PLACEMENT, f"{', '.join(missing)} without a place: {reasons}", *_PARTS, hint=hint)
        accepted = {*needed, "actor"} if embodied else set(needed)
        for key in keys:
            for name in (part.strip() for part in key.split(",")):
                if name in COMPONENTS and name not in accepted:
                    message = f"{name} is placed, but {self._unneeded(name)}"
                    self.fail(f"{PLACEMENT}.{key}", message, *_PARTS, hint=f"take {name} out of this key")

    def _names(self, keys: Iterable[str], named: Counter[str], embodied: bool) -> None:
        for key in keys:
            for name in (part.strip() for part in key.split(",")):
                self._component(f"{PLACEMENT}.{key}", name, named)
        if embodied and {"actor", "actor_critic"} <= set(named):
            self.fail(PLACEMENT, "actor and actor_critic are two names of one component here", hint="keep actor_critic")

    def _component(self, key: str, name: str, named: Counter[str]) -> None:
        if name not in COMPONENTS:
            close = nearest(name, COMPONENTS)
            hint = f"did you mean {close}?" if close else f"components are {', '.join(COMPONENTS)}"
            self.fail(key, f"{name!r} is no component" if name else "a component name is missing at a comma", hint=hint)
        elif named[name] > 1:
            self.fail(key, f"{name} is named {named[name]} times, but has one placement")

    def _needed_components(self) -> dict[str, str]:
        if self.config.runner.task_type == "embodied":
            parts = ("actor_critic", "env", "rollout")
            return dict.fromkeys(parts, f"embodied training consists of {', '.join(parts)}")
        needed = dict.fromkeys(("actor", "rollout", "reward"), "reasoning needs actor, rollout and reward")
        if self.config.critic.use_critic_model:
            needed["critic"] = "critic.use_critic_model is true"
        if self.config.has_reference:
            needed["reference"] = "the KL terms compare to it"
        return needed

    def _unneeded(self, name: str) -> str:
        if name == "reference" and self.config.reference_is_base:
            return "with actor.lora it is the actor without its adapters; reference.model would name another model"
        if name == "reference":
            return "no KL term is on: it would hold a model that nobody asks"
        if name == "critic":
            return "critic.use_critic_model is false"
        return f"{self.config.runner.task_type} training has no such component"

    def schedule(self) -> None:
        runner, start = self.config.runner, self.config.algorithm.policy_training_start_step
        if runner.max_steps <= start:
            message = f"the policy would never train: it starts at step {start} of {runner.max_steps}"
            self.fail("algorithm.policy_training_start_step", message, "runner.max_steps")
        if self.config.algorithm.kl_ctrl.type == "adaptive" and self.config.algorithm.kl_ctrl.kl_coef == 0:
            message = "an adaptive coefficient is multiplied step by step: from 0 it never moves"
            self.fail("algorithm.kl_ctrl.kl_coef", message, "algorithm.kl_ctrl.type")
        if runner.resume not in ("auto", "never") and not Path(runner.resume).exists():
            self.fail("runner.resume", "neither auto nor never, and no checkpoint is at this path")

    def trainable(self, role: str) -> None:
        part = self.config.actor if role == "actor" else self.config.critic
        micro, tokens, mini = f"{role}.micro_batch_size", f"{role}.max_tokens_per_micro_batch", "data.mini_batch_size"
        if part.micro_batch_size is not None and part.max_tokens_per_micro_batch is not None:
            self.fail(tokens, f"{micro} is set too, and a micro-batch is sized by rows or by tokens, not both", micro)
        if part.micro_batch_size is not None and self.config.data.mini_batch_size % part.micro_batch_size:
            message = f"micro-batches of {part.micro_batch_size} do not fill a mini-batch of {self._of(mini)}"
            self.fail(micro, message, mini)
        longest = self.config.data.max_prompt_length + self.config.data.max_response_length
        if part.max_tokens_per_micro_batch is not None and part.max_tokens_per_micro_batch < longest:
            message = f"the longest sequence would not fit: prompt and response together may have {longest} tokens"
            self.fail(tokens, message, "data.max_prompt_length", "data.max_response_length", "runner.task_type")
        self._optim(f"{role}.optim", part.optim)

    def _of(self, key: str) -> str:
        return f"{self._value(key)} ({key})"

    def _optim(self, path: str, optim: Optim) -> None:
        if optim.min_lr > optim.lr:
            message = f"the end of the decay lies above its start: {path}.lr is {optim.lr}"
            self.fail(f"{path}.min_lr", message, f"{path}.lr", f"{path}.lr_schedule")

    def embodied(self) -> None:
        env, mini = self.config.env, self.config.data.mini_batch_size
        if not env.id:
            self.fail("env.id", "embodied training needs an environment", "runner.task_type", hint="as CartPole-v1")
        rows = self.config.transitions
        if rows % mini:
            chunks = f" / {CHUNKS}" if self.config.actor.model.num_action_chunks > 1 else ""
            sizes = f"env.num_envs * env.rollout_steps{chunks}"
            message = f"mini-batches of {mini} do not divide the {rows} transitions of {sizes}"
            involved = ("env.num_envs", "env.rollout_steps", CHUNKS, "runner.task_type")
            self.fail("data.mini_batch_size", message, *involved)
        if env.num_workers > env.num_envs:
            message = f"more processes than environments: env.num_envs is {env.num_envs}"
            self.fail("env.num_workers", message, "env.num_envs", "runner.task_type")
        elif env.num_workers and env.num_envs % env.num_workers:
            message = f"{env.num_envs} environments (env.num_envs) cannot be shared equally by these processes"
            self.fail("env.num_workers", message, "env.num_envs", "runner.task_type")
        for key in ("num_envs", "num_workers"):
            if getattr(env, key) % env.pipeline_stages:
                message = f"these stages cannot share the {getattr(env, key)} of env.{key} equally"
                self.fail("env.pipeline_stages", message, f"env.{key}", "runner.task_type")

    def reasoning(self) -> None:
        config, task = self.config, "runner.task_type"
        data = config.data
        rows = data.train_batch_size * config.algorithm.group_size
        if rows % data.mini_batch_size:
            message = f"mini-batches of {data.mini_batch_size} do not divide the {rows} sequences of a step"
            hint = "a step has data.train_batch_size * algorithm.group_size sequences"
            self.fail("data.mini_batch_size", message, "data.train_batch_size", "algorithm.group_size", task, hint=hint)
        self._task()
        self._model("actor.model", config.actor.model)
        if config.critic.use_critic_model and config.critic.model is not None:
            self._model("critic.model", config.critic.model)
        if config.has_reference and config.reference.model is not None:
            self._model("reference.model", config.reference.model)
        for name in ("sampling", "val_sampling"):
            sampling: Sampling = getattr(config.rollout, name)
            if sampling.max_new_tokens is not None and sampling.max_new_tokens > data.max_response_length:
                message = f"responses are cut at data.max_response_length, {data.max_response_length} tokens"
                self.fail(f"rollout.{name}.max_new_tokens", message, "data.max_response_length", task)
        if config.reward.type not in _REWARD_TYPES and not FUNCTION.fullmatch(config.reward.type):
            close = nearest(config.reward.type, _REWARD_TYPES)
            message = f"neither one of {', '.join(_REWARD_TYPES)} nor a function written as module:function"
            self.fail("reward.type", message, task, hint=f"did you mean {close}?" if close else "")
        if "{question}" not in data.prompt_template:
            self.fail("data.prompt_template", "without {question} all prompts would be the same", task)

    def _task(self) -> None:
        task = self.config.data.task
        if task is None:
            message = "reasoning needs a task: where prompts and answers come from"
            self.fail("data.task", message, "runner.task_type", hint="as data.task: {type: digits}")
        elif task.type == "jsonl" and not task.path:
            self.fail("data.task.path", "type jsonl needs the file to read", "data.task.type", "runner.task_type")
        elif task.type == "reasoning_gym" and not task.name:
            message = "type reasoning_gym needs the name of its data set"
            self.fail("data.task.name", message, "data.task.type", "runner.task_type", hint="as chain_sum")

    def _model(self, path: str, model: Model) -> None:
        task, inside = "runner.task_type", f"{path}.random_init"
        self.report(broken_language_model_rules(path, model))
        if (random := model.random_init) is None:
            return
        longest = self.config.data.max_prompt_length + self.config.data.max_response_length
        if random.max_positions < longest:
            message = f"prompt and response together may have {longest} tokens"
            lengths = ("data.max_prompt_length", "data.max_response_length")
            self.fail(f"{inside}.max_positions", message, *lengths, task)

    def without_effect(self, written: dict[str, Any]) -> None:
        """Keys that were written although nothing reads them here. An explicit null means off and is fine."""
        reported: list[str] = []
        for idle in sorted(idle_keys(self.config)):  # a section comes before the keys inside it
            inside = any(idle.key.startswith(f"{section}.") for section in reported)
            if not inside and _get(written, idle.key) is not None:
                reported.append(idle.key)
                hint = f"remove it, so that every key acts; an inherited one: {idle.key}: !unset"
                self.fail(idle.key, f"has no effect here: {idle.reason}", *idle.switches, hint=hint)


def _get(tree: dict[str, Any], key: str) -> Any:
    value: Any = tree
    for step in key.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value
