"""Rules between keys: each broken alone, with its reason; and the valid neighbours that must pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_platform.config.describe import field_at, walk
from rl_platform.config.rules import broken, without_effect

PLACED = "cluster.component_placement"
REASONING = f"{PLACED}={{'actor,critic,rollout,reward,reference': all}}"
TINY = "actor.model={random_init: {}, tokenizer: bytes}"
COEF = "algorithm.overlong.stop_properly_coef"

NO_CRITIC = ["critic.use_critic_model=false", f"{PLACED}={{'actor,rollout,reward': all}}"]

BROKEN = [
    # task, overrides, key, part of the reason
    ("embodied", ["algorithm.loss_type=actor"], "algorithm.loss_type", "its own backbone"),
    ("reasoning", ["algorithm.loss_type=actor_critic"], "algorithm.loss_type", "separate critic"),
    ("reasoning", ["critic.use_critic_model=false"], "critic.use_critic_model", "needs values"),
    ("reasoning", ["algorithm.adv_type=grop", "algorithm.gae_lambda=0.5"], "algorithm.adv_type", "module:function"),
    ("embodied", ["algorithm.adv_type=raw"], "algorithm.adv_type", "gae only"),
    ("embodied", ["algorithm.adv_type=mine:estimate"], "algorithm.adv_type", "gae only"),
    ("embodied", ["algorithm.length_adaptive_alpha=0.05"], "algorithm.length_adaptive_alpha", "several episodes"),
    ("reasoning", [*NO_CRITIC, "algorithm.adv_type=grpo"], "algorithm.group_size", "at least 2"),
    ("reasoning", [*NO_CRITIC, "algorithm.adv_type=rloo"], "algorithm.group_size", "at least 2"),
    ("reasoning", ["algorithm.adv_type=raw"], "critic.use_critic_model", "never asked"),
    ("embodied", ["critic.use_critic_model=true"], "critic.use_critic_model", "a second critic is not used"),
    (
        "reasoning",
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.0}", REASONING],
        "algorithm.kl_ctrl.kl_coef",
        "never moves",
    ),
    ("embodied", ["algorithm.group_size=2"], "algorithm.group_size", "no prompt to group by"),
    ("embodied", ["algorithm.use_kl_loss=true"], "algorithm.use_kl_loss", "random start"),
    ("embodied", ["algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward", "random start"),
    ("embodied", ["actor.training_backend=megatron"], "actor.training_backend", "small network"),
    ("embodied", ["env.id=''"], "env.id", "needs an environment"),
    ("embodied", ["data.mini_batch_size=1000"], "data.mini_batch_size", "1024 transitions"),
    ("embodied", ["env.num_workers=9"], "env.num_workers", "more processes than environments"),
    ("embodied", ["env.num_workers=3"], "env.num_workers", "shared equally"),
    ("embodied", ["env.restarts=-1"], "env.restarts", "out of range"),
    ("embodied", ["env.pipeline_stages=3"], "env.pipeline_stages", "cannot share the 8 of env.num_envs"),
    ("embodied", ["env.num_workers=1", "env.pipeline_stages=2"], "env.pipeline_stages", "the 1 of env.num_workers"),
    ("embodied", ["actor.micro_batch_size=48"], "actor.micro_batch_size", "do not fill a mini-batch of 64"),
    ("embodied", ["actor.optim={lr_schedule: linear, min_lr: 1}"], "actor.optim.min_lr", "lies above its start"),
    ("reasoning", ["algorithm.policy_training_start_step=100"], "algorithm.policy_training_start_step", "never train"),
    ("embodied", ["algorithm.use_pf_ppo=true"], "algorithm.use_pf_ppo", "whole responses"),
    ("reasoning", ["algorithm.dynamic_sampling={}"], "algorithm.dynamic_sampling", "one sample per prompt never does"),
    (
        "reasoning",
        ["algorithm.dynamic_sampling={}", "algorithm.group_size=2", "rollout.sampling.temperature=0"],
        "algorithm.dynamic_sampling",
        "greedy",
    ),
    ("embodied", ["runner.resume=nowhere"], "runner.resume", "no checkpoint"),
    ("embodied", ["cluster.address=ray://head"], "cluster.address", "neither auto nor HOST:PORT"),
    (
        "embodied",
        ["cluster.devices_per_node=2", "cluster.gpus_per_node=2"],
        "cluster.devices_per_node",
        "CPU workers or GPUs",
    ),
    ("reasoning", [REASONING], f"{PLACED}.actor,critic,rollout,reward,reference", "no KL term is on"),
    ("reasoning", ["algorithm.use_kl_loss=true"], PLACED, "reference without a place"),
    (
        "reasoning",
        [REASONING, "algorithm.use_kl_loss=true", "algorithm.use_kl_in_reward=true"],
        "algorithm.use_kl_loss",
        "count twice",
    ),
    (
        "reasoning",
        [REASONING, "algorithm.use_kl_loss=true", "algorithm.kl_loss_type=k3+", "algorithm.kl_loss_grad=score"],
        "algorithm.kl_loss_grad",
        "the gradient is that of k2",
    ),
    (
        "reasoning",
        [REASONING, "algorithm={use_kl_loss: true, kl_loss_type: full, kl_loss_grad: k2}"],
        "algorithm.kl_loss_grad",
        "the exact one",
    ),
    (
        "reasoning",
        [REASONING, "algorithm.use_kl_loss=true", "algorithm.allow_both_kl=true"],
        "algorithm.allow_both_kl",
        "not both on",
    ),
    (
        "reasoning",
        [REASONING, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, kl_coef: 0}"],
        "algorithm.kl_ctrl.kl_coef",
        "never moves",
    ),
    ("embodied", [f"{PLACED}={{actor_critic: all}}"], PLACED, "env, rollout without a place"),
    ("embodied", [f"{PLACED}.actor=0"], PLACED, "two names of one component"),
    ("embodied", [f"{PLACED}.reward=0"], f"{PLACED}.reward", "no such component"),
    ("embodied", [f"{PLACED}.env=0"], f"{PLACED}.env", "named 2 times"),
    ("embodied", [f"{PLACED}={{'actor,env,rollot': 0}}"], f"{PLACED}.actor,env,rollot", "'rollot' is no component"),
    ("embodied", [f"{PLACED}={{'actor,env,,rollout': 0}}"], f"{PLACED}.actor,env,,rollout", "missing at a comma"),
    ("reasoning", ["data.task=null"], "data.task", "needs a task"),
    ("reasoning", ["data.task={type: jsonl}"], "data.task.path", "needs the file"),
    ("reasoning", ["data.task={type: reasoning_gym}"], "data.task.name", "name of its data set"),
    ("reasoning", ["data.task={type: digits, path: x}"], "data.task.path", "belongs to data.task.type jsonl"),
    ("reasoning", ["data.task={type: file, path: x.txt}"], "data.task.path", "type file reads .jsonl, .json, .csv"),
    ("reasoning", ["data.task={type: file, path: x.csv, val_path: y}"], "data.task.val_path", "type file reads .jsonl"),
    ("reasoning", ["data.task={type: file}"], "data.task.path", "type file needs the file to read"),
    ("reasoning", ["data.task={type: jsonl, path: x, name: y}"], "data.task.name", "type reasoning_gym"),
    ("reasoning", ["data.train_batch_size=60"], "data.mini_batch_size", "60 sequences"),
    ("reasoning", ["actor.model.path=null"], "actor.model", "neither is set"),
    ("reasoning", ["actor.model.random_init={}"], "actor.model", "both are set"),
    ("reasoning", ["critic.model={}"], "critic.model", "neither is set"),
    ("reasoning", ["actor.model={random_init: {}}"], "actor.model.tokenizer", "no tokenizer of its own"),
    ("reasoning", [TINY, "actor.model.random_init.num_heads=3"], "actor.model.random_init.num_heads", "do not divide"),
    ("reasoning", [TINY, "actor.model.random_init.num_kv_heads=3"], "actor.model.random_init.num_kv_heads", "serves"),
    ("reasoning", [TINY, "data.max_prompt_length=500"], "actor.model.random_init.max_positions", "564 tokens"),
    ("reasoning", ["critic.max_tokens_per_micro_batch=319"], "critic.max_tokens_per_micro_batch", "320 tokens"),
    (
        "reasoning",
        ["actor.micro_batch_size=8", "actor.max_tokens_per_micro_batch=999"],
        "actor.max_tokens_per_micro_batch",
        "not both",
    ),
    ("reasoning", ["rollout.multi_turn={tool: calculater}"], "rollout.multi_turn.tool", "neither calculator nor"),
    (
        "reasoning",
        ["rollout.multi_turn={max_observation_tokens: 63}"],
        "rollout.multi_turn.max_observation_tokens",
        "no room for a turn",
    ),
    (
        "reasoning",
        ["data.task={type: digits, params: {operation: quotient}}"],
        "data.task.params",
        "multi_turn is null",
    ),
    ("reasoning", ["rollout.sampling.max_new_tokens=65"], "rollout.sampling.max_new_tokens", "64 tokens"),
    ("reasoning", ["rollout.val_sampling.max_new_tokens=65"], "rollout.val_sampling.max_new_tokens", "64 tokens"),
    ("reasoning", ["algorithm.policy_loss=ppoclip"], "algorithm.policy_loss", "ppo_clip, reinforce, gspo, cispo"),
    ("reasoning", ["algorithm.policy_loss=my losses:f"], "algorithm.policy_loss", "module:function"),
    ("reasoning", ["algorithm.policy_loss=gspo"], "algorithm.loss_agg_func", "one ratio per sequence"),
    ("embodied", ["algorithm.policy_loss=gspo"], "algorithm.policy_loss", "one transition"),
    ("embodied", ["algorithm.policy_loss=dppo_tv"], "algorithm.policy_loss", "token probabilities"),
    (
        "reasoning",
        ["algorithm.policy_loss=cispo", "algorithm.clip_ratio_c=3.0"],
        "algorithm.clip_ratio_c",
        "no bound that a dual clip could set",
    ),
    ("embodied", ["algorithm.positive_nll_coef=0.1"], "algorithm.positive_nll_coef", "no row of an embodied rollout"),
    ("embodied", ["algorithm.rollout_is={}"], "algorithm.rollout_is", "no mismatch to correct"),
    ("reasoning", ["runner.max_staleness=1"], "runner.max_staleness", "without a correction they would count as new"),
    ("embodied", ["runner.max_staleness=1"], "runner.max_staleness", "without a correction they would count as new"),
    ("reasoning", ["runner.max_staleness=2"], "runner.max_staleness", "out of range"),
    (
        "embodied",
        ["runner.max_staleness=1", "algorithm.rollout_is.level=sequence"],
        "algorithm.rollout_is",
        "an embodied row is all that one environment did",
    ),
    ("reasoning", ["algorithm.rollout_is.mode=null"], "algorithm.rollout_is", "mode and reject are both null"),
    ("reasoning", ["algorithm.rollout_is={low: 1, high: 1}"], "algorithm.rollout_is.low", "nothing lies between"),
    ("reasoning", ["algorithm.rollout_is.low=1.1"], "algorithm.rollout_is.low", "out of range"),
    ("reasoning", ["algorithm.rollout_is.high=0.9"], "algorithm.rollout_is.high", "out of range"),
    ("reasoning", ["algorithm.rollout_is.reject={}"], "algorithm.rollout_is.reject.threshold", ""),
    ("reasoning", ["algorithm.rollout_is.reject.threshold=0"], "algorithm.rollout_is.reject.threshold", "out of range"),
    ("reasoning", ["reward.type=maths"], "reward.type", "module:function"),
    ("reasoning", ["reward.type=model"], "reward.model", "needs the classifier"),
    ("reasoning", ["reward.type=model", "reward.model={}"], "reward.model.path", ""),
    ("reasoning", ["reward.type=http"], "reward.url", "address of the server"),
    *(
        ("reasoning", ["reward.type=http", f"reward.url={url}"], "reward.url", "address of the server")
        for url in ("localhost:8000", "ftp://a/b", "http://", "http://a:x/", "http://me:word@a/", "'http://a/b c'")
    ),
    ("reasoning", ["reward={type: http, url: 'http://a', retries: -1}"], "reward.retries", "out of range"),
    ("reasoning", ["reward={type: http, url: 'http://a', max_batch_size: 0}"], "reward.max_batch_size", "out of range"),
    *(
        ("reasoning", ["algorithm.overlong.stop_properly_coef=0.5", f"reward={scorer}"], COEF, "may be negative")
        for scorer in ("{type: http, url: 'http://a'}", "{type: model, model: {path: x}}")
    ),
    ("reasoning", ["data.prompt_template=Answer"], "data.prompt_template", "{question}"),
    (
        "reasoning",
        ["algorithm.reward_scaling={source_min: 1, source_max: 1}"],
        "algorithm.reward_scaling.source_max",
        "must be above algorithm.reward_scaling.source_min, 1",
    ),
    ("reasoning", ["algorithm.reward_scaling.target_max=-2"], "algorithm.reward_scaling.target_max", "earn no more"),
    ("reasoning", ["algorithm.overlong.buffer_length=65"], "algorithm.overlong.buffer_length", "64 tokens (data.max_"),
    (
        "reasoning",
        ["algorithm.overlong={buffer_length: 9, max_length: 8}"],
        "algorithm.overlong.buffer_length",
        "8 tokens (algorithm.overlong.max_length)",
    ),
    (
        "reasoning",
        ["algorithm.overlong={buffer_length: 16, max_length: 80}"],
        "algorithm.overlong.buffer_length",
        "more than 64 tokens, and none has more than 64 (data.max_response_length)",
    ),
    (
        "reasoning",
        ["algorithm.overlong.buffer_length=16", "rollout.sampling.max_new_tokens=32"],
        "algorithm.overlong.buffer_length",
        "more than 48 tokens, and none has more than 32 (rollout.sampling.max_new_tokens)",
    ),
    (
        "reasoning",
        ["algorithm.overlong={buffer_length: 16, stop_properly_coef: 0.5}"],
        "algorithm.overlong.stop_properly_coef",
        "punished twice",
    ),
    (
        "reasoning",
        ["algorithm.overlong={filter: true, stop_properly_coef: 0.5}"],
        "algorithm.overlong.stop_properly_coef",
        "do not count",
    ),
    (
        "reasoning",
        ["algorithm.overlong.stop_properly_coef=0.5", "algorithm.reward_scaling={}"],
        "algorithm.overlong.stop_properly_coef",
        "would reward truncation, and algorithm.reward_scaling.target_min is -1",
    ),
    (
        "reasoning",
        ["algorithm.overlong.stop_properly_coef=0.5", "reward.type=my_package.rewards:score"],
        "algorithm.overlong.stop_properly_coef",
        "may be negative",
    ),
    (
        "reasoning",
        [REASONING, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, target_kl: 0}"],
        "algorithm.kl_ctrl.target_kl",
        "out of range",
    ),
    (
        "reasoning",
        [REASONING, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, horizon: 0}"],
        "algorithm.kl_ctrl.horizon",
        "out of range",
    ),
    (
        "reasoning",
        [REASONING, "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k3+"],
        "algorithm.kl_penalty",
        "not one of the allowed",
    ),
]

PASSES = [
    ("embodied", ["env.num_workers=4", "data.mini_batch_size=1024", "actor.micro_batch_size=128"]),
    ("embodied", [f"{PLACED}={{actor: 0, 'env, rollout': all}}"]),
    ("embodied", ["actor.optim={lr: 1e-3, lr_schedule: linear, min_lr: 1e-3, lr_warmup_steps: 200}"]),
    ("reasoning", ["algorithm.policy_training_start_step=99", "runner.resume=never"]),
    ("embodied", ["critic.use_critic_model=false", "data.task=null", "algorithm.loss_agg_horizon=null"]),
    ("reasoning", [REASONING, "algorithm.use_kl_loss=true", "algorithm.kl_loss_type=k2", "reference.group_name=r"]),
    ("reasoning", [REASONING, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, horizon: 9}"]),
    (
        "reasoning",
        [REASONING, "algorithm={use_kl_in_reward: true, use_kl_loss: true, allow_both_kl: true, kl_loss_grad: score}"],
    ),
    ("reasoning", [REASONING, "algorithm.use_kl_loss=true", "algorithm.kl_loss_type=low_var_kl+"]),
    ("reasoning", ["algorithm.group_size=2", "data.train_batch_size=32"]),
    ("reasoning", [*NO_CRITIC, "algorithm={adv_type: grpo, group_size: 8, grpo_std_normalization: false}"]),
    ("reasoning", [*NO_CRITIC, "algorithm={adv_type: rloo, group_size: 2, normalize_advantages: false}"]),
    ("reasoning", [*NO_CRITIC, "algorithm={adv_type: reinforce_plus_plus, gamma: 0.9, normalize_advantages: true}"]),
    ("reasoning", [*NO_CRITIC, "algorithm={adv_type: raw, normalize_advantages: true}"]),
    ("reasoning", [*NO_CRITIC, "algorithm={adv_type: 'my.mine:estimate', gae_lambda: 0.5, gamma: 0.9}"]),
    ("reasoning", ["algorithm={adv_type: 'mine:estimate', value_clip: 0.2}"]),
    ("reasoning", ["algorithm={gae_lambda_value: 1, length_adaptive_alpha: 0.05}"]),
    ("embodied", ["algorithm={loss_type: actor_critic, gae_lambda: 0.9, gae_lambda_value: 1}"]),
    ("reasoning", ["algorithm.reward_scaling={}", "algorithm.reward_whitening=true"]),
    ("reasoning", [REASONING, "algorithm={use_kl_loss: true, kl_loss_type: full}"]),
    ("reasoning", ["algorithm.overlong={buffer_length: 16, max_length: 48, penalty: 0.5, filter: true}"]),
    ("reasoning", ["algorithm.overlong.stop_properly_coef=0", "algorithm.reward_scaling.target_min=0"]),
    (
        "reasoning",
        ["algorithm={overlong: {stop_properly_coef: 0.5}, reward_scaling: {target_min: 0}}", "reward.type=a:b"],
    ),
    ("reasoning", ["reward.type=my_package.rewards:score", "actor.max_tokens_per_micro_batch=320"]),
    ("reasoning", ["reward={type: model, max_batch_size: 2, model: {path: x}}"]),
    ("reasoning", ["reward={type: http, url: 'https://a.b:1/c?d=e', retries: 0, num_workers: 9, timeout_s: 60}"]),
    ("reasoning", [TINY, "critic.model.path=other", "rollout.sampling.max_new_tokens=64"]),
    ("reasoning", ["data.task={type: jsonl, path: x, prompt_column: q}"]),
    ("reasoning", ["rollout.multi_turn={tool: 'my.tools:f', max_turns: 2, max_observation_tokens: 62}"]),
    (
        "reasoning",  # turns of 8 tokens each may come to more than the soft limit of 48
        [
            "rollout={multi_turn: {max_observation_tokens: 9}, sampling: {max_new_tokens: 8}}",
            "algorithm.overlong.buffer_length=16",
        ],
    ),
    ("reasoning", ["algorithm.dynamic_sampling={max_rounds: 3, surplus: drop}", "algorithm.group_size=2"]),
    ("reasoning", ["algorithm.use_pf_ppo=true", "algorithm.pf_ppo={power: 3, mode: weight}"]),
    ("reasoning", ["algorithm.target_kl=0.1", "algorithm.ppo_epochs=2"]),
    ("reasoning", ["algorithm.target_kl=0.1", "data.mini_batch_size=32"]),
    ("embodied", ["algorithm.target_kl=0.1"]),
    ("reasoning", ["algorithm.policy_loss=gspo", "algorithm.loss_agg_func=seq-mean-token-mean"]),
    ("reasoning", ["algorithm.policy_loss=cispo", "algorithm.clip_ratio_high=4.0", "algorithm.positive_nll_coef=0.1"]),
    ("reasoning", ["algorithm.policy_loss=my_package.losses:loss", "algorithm.clip_ratio_c=3.0"]),
    ("embodied", ["algorithm.policy_loss=reinforce"]),
    ("reasoning", ["algorithm.rollout_is={}"]),
    ("reasoning", ["algorithm.rollout_is={}", "runner.max_staleness=1"]),
    ("embodied", ["algorithm.rollout_is={}", "runner.max_staleness=1"]),
    ("reasoning", ["algorithm.rollout_is={level: sequence, low: 1, batch_normalize: true, reject: {threshold: 1}}"]),
    ("reasoning", ["algorithm.rollout_is={mode: null, reject: {stat: k1, level: token, threshold: 0.1}}"]),
    ("reasoning", ["algorithm.rollout_is={mode: sequence_mask, low: 0.999, high: null}"]),
]

UNREAD = [
    ("reasoning", "algorithm.pf_ppo.power=3", "algorithm.pf_ppo"),
    ("reasoning", "algorithm.target_kl=0.1", "algorithm.target_kl"),
    ("embodied", "algorithm.dynamic_sampling={}", "algorithm.dynamic_sampling"),
    ("embodied", "algorithm.pf_ppo.mode=weight", "algorithm.pf_ppo"),
    ("reasoning", "env.num_envs=8", "env"),
    ("reasoning", "actor.model.hidden_sizes=[8]", "actor.model.hidden_sizes"),
    ("reasoning", "data.task.name=x", "data.task.name"),
    ("reasoning", "reference.group_name=x", "reference"),
    ("reasoning", "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_ctrl"),
    ("reasoning", "algorithm.kl_penalty=k1", "algorithm.kl_penalty"),
    ("reasoning", "algorithm.kl_loss_coef=0.1", "algorithm.kl_loss_coef"),
    ("reasoning", "algorithm.kl_loss_grad=k2", "algorithm.kl_loss_grad"),
    ("reasoning", "algorithm.overlong.penalty=2", "algorithm.overlong.penalty"),
    ("reasoning", "algorithm.overlong.max_length=48", "algorithm.overlong.max_length"),
    ("embodied", "algorithm.overlong.filter=true", "algorithm.overlong"),
    ("embodied", "algorithm.reward_scaling.target_max=2", "algorithm.reward_scaling"),
    ("embodied", "algorithm.reward_whitening=true", "algorithm.reward_whitening"),
    ("reasoning", "algorithm.loss_agg_horizon=9", "algorithm.loss_agg_horizon"),
    ("reasoning", "critic.optim.min_lr=0", "critic.optim.min_lr"),
    ("reasoning", "algorithm={policy_loss: reinforce, clip_ratio_low: 0.2}", "algorithm.clip_ratio_low"),
    (
        "embodied",
        "algorithm={loss_type: actor_critic, policy_loss: reinforce, clip_ratio_high: 0.2}",
        "algorithm.clip_ratio_high",
    ),
    ("reasoning", "algorithm={policy_loss: reinforce, clip_ratio_c: 3}", "algorithm.clip_ratio_c"),
    ("reasoning", "algorithm.rollout_is={mode: sequence_mask, level: token}", "algorithm.rollout_is.level"),
    (
        "reasoning",
        "algorithm.rollout_is={mode: null, high: 2.0, reject: {threshold: 1}}",
        "algorithm.rollout_is.high",
    ),
    ("embodied", "data.task.type=digits", "data.task"),
    ("embodied", "data.train_batch_size=64", "data.train_batch_size"),
    ("embodied", "rollout.sampling.top_k=0", "rollout.sampling"),
    ("embodied", "rollout.backend=torch", "rollout.backend"),
    ("embodied", "rollout.multi_turn={}", "rollout.multi_turn"),
    ("embodied", "reward.type=task", "reward"),
    ("reasoning", "reward.max_batch_size=8", "reward.max_batch_size"),
    ("reasoning", "reward.url=http://a", "reward.url"),
    ("reasoning", "reward.model={path: x}", "reward.model"),
    ("reasoning", "reward={type: model, model: {path: x}, retries: 1}", "reward.retries"),
    ("reasoning", "reward={type: model, model: {path: x}, num_workers: 2}", "reward.num_workers"),
    ("reasoning", "reward={type: model, model: {path: x}, timeout_s: 9}", "reward.timeout_s"),
    ("reasoning", "reward={type: http, url: 'http://a', model: {path: x}}", "reward.model"),
    ("embodied", "runner.max_epochs=1", "runner.max_epochs"),
    ("embodied", "critic.optim.lr=0.1", "critic.optim"),
    ("embodied", "algorithm.critic_ppo_epochs=1", "algorithm.critic_ppo_epochs"),
    ("embodied", "algorithm.policy_training_start_step=1", "algorithm.policy_training_start_step"),
    ("embodied", "actor.model.path=x", "actor.model.path"),
    ("embodied", "actor.max_tokens_per_micro_batch=999", "actor.max_tokens_per_micro_batch"),
]


WITHOUT_CRITIC = [
    ("grpo", "gamma: 0.9", "algorithm.gamma"),
    ("grpo", "gae_lambda: 0.9", "algorithm.gae_lambda"),
    ("grpo", "gae_lambda_policy: 0.9", "algorithm.gae_lambda_policy"),
    ("grpo", "gae_lambda_value: 0.9", "algorithm.gae_lambda_value"),
    ("grpo", "length_adaptive_alpha: 0.05", "algorithm.length_adaptive_alpha"),
    ("grpo", "normalize_advantages: true", "algorithm.normalize_advantages"),
    ("rloo", "grpo_std_normalization: true", "algorithm.grpo_std_normalization"),
    ("raw", "value_clip: 0.2", "algorithm.value_clip"),
    ("raw", "huber_delta: 1", "algorithm.huber_delta"),
    ("raw", "value_loss_scale: 1", "algorithm.value_loss_scale"),
    ("raw", "critic_ppo_epochs: 2", "algorithm.critic_ppo_epochs"),
    ("raw", "policy_training_start_step: 2", "algorithm.policy_training_start_step"),
    ("reinforce_plus_plus", "normalize_advantages: false", "algorithm.normalize_advantages"),
    ("reinforce_plus_plus_baseline", "gamma: 0.9", "algorithm.gamma"),
    ("'mine:estimate'", "value_clip: 0.2", "algorithm.value_clip"),
]


@pytest.mark.parametrize(("name", "entry", "key"), WITHOUT_CRITIC)
def test_an_estimator_without_critic_refuses_what_it_does_not_read(
    problems: Any, name: str, entry: str, key: str
) -> None:
    (problem,) = problems("reasoning", *NO_CRITIC, f"algorithm={{adv_type: {name}, group_size: 8, {entry}}}").values()
    assert problem.key == key
    assert "has no effect here" in problem.message


def test_an_estimator_without_critic_refuses_the_section_of_the_critic(problems: Any) -> None:
    overrides = [*NO_CRITIC, "algorithm.adv_type=raw", "critic={use_critic_model: false, optim: {lr: 0.1}}"]
    assert list(problems("reasoning", *overrides)) == ["critic.optim"]


def test_lambdas_that_are_overruled_are_refused(problems: Any) -> None:
    both = "algorithm={gae_lambda: 0.9, gae_lambda_policy: 0.8, gae_lambda_value: 1}"
    assert list(problems("reasoning", both)) == ["algorithm.gae_lambda"]
    adaptive = "algorithm={gae_lambda_policy: 0.8, length_adaptive_alpha: 0.05}"
    assert list(problems("reasoning", adaptive)) == ["algorithm.gae_lambda_policy"]


def test_a_misspelt_estimator_is_answered_with_the_nearest(problems: Any) -> None:
    (problem,) = problems("reasoning", "algorithm.adv_type=reinforce++").values()
    assert "grpo, rloo, reinforce_plus_plus" in problem.message
    assert problem.hint == "did you mean reinforce_plus_plus?"


@pytest.mark.parametrize(("task", "overrides", "key", "reason"), BROKEN)
def test_broken_rule(problems: Any, task: str, overrides: list[str], key: str, reason: str) -> None:
    (problem,) = problems(task, *overrides).values()
    assert problem.key == key
    assert reason in problem.message
    assert problem.where


@pytest.mark.parametrize(("task", "overrides"), PASSES)
def test_valid_neighbour(load: Any, task: str, overrides: list[str]) -> None:
    load(task, *overrides)


@pytest.mark.parametrize(("task", "override", "key"), UNREAD)
def test_a_key_without_effect_is_refused_once(problems: Any, task: str, override: str, key: str) -> None:
    (problem,) = problems(task, override).values()
    assert problem.key == key
    assert "has no effect here" in problem.message
    assert problem.where == "command line"


def test_switched_off_parts_of_normalisation_and_kl(problems: Any) -> None:
    assert list(problems("embodied", "env.normalize_rewards=false", "env.clip_rewards=5")) == ["env.clip_rewards"]
    on = ["algorithm.use_kl_in_reward=true", REASONING]
    assert list(problems("reasoning", *on, "algorithm.kl_ctrl.horizon=5")) == ["algorithm.kl_ctrl.horizon"]
    assert list(problems("reasoning", *on, "algorithm.kl_ctrl.kl_coef=5")) == []


def test_only_ray_joins_a_cluster_and_starts_processes_again(problems: Any) -> None:
    for key, value in (("cluster.address", "10.0.0.1:6379"), ("cluster.restarts", "0")):
        assert list(problems("embodied", f"{key}={value}", "cluster.runtime=local")) == [key]
        assert list(problems("embodied", f"{key}={value}")) == []
    assert list(problems("embodied", "cluster.restarts=-1")) == ["cluster.restarts"]
    assert list(problems("embodied", "rollout.sync=delta", "cluster.runtime=local")) == ["rollout.sync"]
    assert "rollout.sync" in problems("embodied", "rollout.sync=partly")


def test_weights_go_by_a_group_where_an_engine_of_its_own_takes_them(problems: Any) -> None:
    group = "rollout.weight_transfer=group"
    for backend in ("rollout.backend=sglang", "rollout.backend=torch"):
        assert list(problems("reasoning", backend, group)) == []
        for other in ("rollout.sync=delta", "cluster.runtime=local"):
            assert "rollout.weight_transfer" in problems("reasoning", backend, group, other)
    assert list(problems("reasoning", "rollout.backend=vllm", group)) == ["rollout.weight_transfer"]
    assert list(problems("embodied", group)) == ["rollout.weight_transfer"]
    assert list(problems("reasoning", "rollout.weight_transfer=disk")) == ["rollout.weight_transfer"]


def test_keys_of_engines_in_processes_of_their_own(problems: Any) -> None:
    python = "rollout.vllm.python=/somewhere/python"
    assert list(problems("reasoning", "rollout.backend=vllm", python, "rollout.engine_args={swap_space: 0}")) == []
    for backend in ("auto", "torch", "sglang"):
        assert list(problems("reasoning", f"rollout.backend={backend}", python)) == ["rollout.vllm"]
    assert list(problems("embodied", python)) == ["rollout.vllm"]
    assert "rollout.vllm.python" in problems("reasoning", "rollout.backend=vllm", "rollout.vllm.python=''")


def test_switched_off_parts_of_pf_ppo(problems: Any) -> None:
    on = ["algorithm.use_pf_ppo=true", "algorithm.pf_ppo.method=max_min"]
    assert list(problems("reasoning", *on)) == []
    assert list(problems("reasoning", *on, "algorithm.pf_ppo.power=3")) == ["algorithm.pf_ppo.power"]


def test_pf_ppo_breaks_up_groups(load: Any) -> None:
    config = load("reasoning", "algorithm.use_pf_ppo=true").config
    grouped = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"adv_type": "grpo"})})
    (problem,) = (problem for problem in broken(grouped) if problem.key == "algorithm.use_pf_ppo")
    assert "break up groups" in problem.message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.pf_ppo.power=0", "above 0"),
        ("algorithm.pf_ppo.method=best", "max_random"),
        ("algorithm.dynamic_sampling.max_rounds=0", "at least 1"),
        ("rollout.multi_turn.max_turns=1", "at least 2"),
        ("algorithm.dynamic_sampling.tolerance=-1", "at least 0"),
        ("algorithm.dynamic_sampling.on_exhausted=stop", "fill_with_rejected"),
        ("algorithm.dynamic_sampling.surplus=keep", "carry"),
        ("algorithm.target_kl=0", "above 0"),
    ],
)
def test_values_out_of_range(problems: Any, override: str, words: str) -> None:
    switches = ["algorithm.use_pf_ppo=true", "algorithm.group_size=2", "algorithm.ppo_epochs=2"]
    problem = problems("reasoning", *switches, override)[override.partition("=")[0]]
    assert words in problem.allowed


def test_a_misspelt_switch_is_not_followed_by_guesses(problems: Any) -> None:
    reported = problems("reasoning", "algorithm.use_kl_in_rewards=true", "algorithm.kl_penalty=k2", REASONING)
    assert list(reported) == ["algorithm.use_kl_in_rewards"]


def test_doubt_about_one_switch_silences_only_its_own_keys(problems: Any) -> None:
    overrides = ["algorithm.loss_agg_func=x", "algorithm.loss_agg_horizon=9", "algorithm.kl_loss_coef=0.1"]
    assert set(problems("embodied", *overrides)) == {"algorithm.loss_agg_func", "algorithm.kl_loss_coef"}


def test_resume_accepts_an_existing_path(load: Any, tmp_path: Path) -> None:
    assert load("embodied", f"runner.resume={tmp_path}").config.runner.resume == str(tmp_path)


ONE_MISTAKE = [
    # task, overrides, key: the other rules that this breaks say nothing new
    ("reasoning", ["algorithm.kl_ctrl={type: adaptive, kl_coef: 0}"], "algorithm.kl_ctrl"),
    ("reasoning", ["actor.optim={lr: 0.1, min_lr: 0.2}"], "actor.optim.min_lr"),
    ("reasoning", ["critic.model.hidden_sizes=3"], "critic.model.hidden_sizes"),
    ("reasoning", ["actor.model={path: x, random_init: {}}"], "actor.model"),
    ("reasoning", ["rollout.weight_transfer=group", "rollout.sync=delta"], "rollout.weight_transfer"),
    ("reasoning", [f"{PLACED}={{'actor,critic': 0, 'critic,rollout,reward': 1}}"], f"{PLACED}.critic,rollout,reward"),
    ("reasoning", [f"{PLACED}={{actor: '${{no.key}}', 'critic,rollout,reward': 0}}"], f"{PLACED}.actor"),
    ("reasoning", ["algorithm.old_log_probs=current", "data.train_batch_size=1000"], "data.mini_batch_size"),
    ("embodied", ["actor.max_tokens_per_micro_batch=1"], "actor.max_tokens_per_micro_batch"),
    ("embodied", ["actor.model.cnn.channels=[3]"], "actor.model.cnn"),
    ("embodied", ["env={id: CartPole-v1, backend: mujoco_warp, pixels: {}}"], "env.pixels"),
    ("embodied", ["env={id: CartPole-v1, backend: mujoco_warp, num_workers: 9}"], "env.num_workers"),
    ("embodied", ["env.num_workers=9", "env.pipeline_stages=1"], "env.num_workers"),
    ("embodied", ["runner.max_staleness=1", "algorithm.rollout_is={}", "critic.offload=true"], "critic.offload"),
]


@pytest.mark.parametrize(("task", "overrides", "key"), ONE_MISTAKE)
def test_one_mistake_is_one_problem(problems: Any, task: str, overrides: list[str], key: str) -> None:
    assert list(problems(task, *overrides)) == [key]


@pytest.mark.parametrize("task", ["embodied", "reasoning"])
def test_keys_without_effect_and_what_decides_them_exist(load: Any, task: str) -> None:
    for unread in without_effect(load(task).config):
        assert all(field_at(key) is not None for key in (unread.key, *unread.switches)), unread


@pytest.mark.parametrize("task", ["embodied", "reasoning"])
def test_no_key_with_an_effect_of_its_own_is_refused(load: Any, task: str) -> None:
    """What is left acts in this task: the sections of the other task are gone, the common ones are not."""
    without = {rule.key for rule in without_effect(load(task).config)}
    gone = {path.partition(".")[0] for path, _ in walk() if path in without and "." not in path}
    assert gone == ({"reward", "reference"} if task == "embodied" else {"env", "reference"})
