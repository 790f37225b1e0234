"""Names that other systems use for what is configured here, so that a pasted key is answered with the right one.

Only a dictionary: nothing is converted silently, because equal names do not always mean equal numbers (see the notes).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignName:
    """`here` are our keys for it, `note` tells a difference in meaning."""

    system: str
    here: tuple[str, ...]
    note: str = ""


def translate(path: str) -> ForeignName | None:
    """What the dotted `path` is called here. The longest known ending of the path decides; `-` counts as `_`."""
    steps = path.replace("-", "_").split(".")
    for start in range(len(steps)):
        found = _NAMES.get(".".join(steps[start:]))
        if found is not None:
            return found
    return None


# Top-level sections of other systems -> (system, where their content goes here).
FOREIGN_SECTIONS: dict[str, tuple[str, str]] = {
    "ppo": ("NeMo-RL", "algorithm, data and runner"),
    "grpo": ("NeMo-RL", "algorithm, data and runner"),
    "loss_fn": ("NeMo-RL", "algorithm"),
    "value_loss_fn": ("NeMo-RL", "algorithm"),
    "policy": ("NeMo-RL", "actor, data and rollout"),
    "value": ("NeMo-RL", "critic"),
    "checkpointing": ("NeMo-RL", "runner"),
    "logger": ("NeMo-RL", "runner"),
    "actor_rollout_ref": ("verl", "actor, rollout, reference, algorithm and data"),
    "trainer": ("verl", "runner and cluster"),
    "reward_model": ("verl", "reward"),
    "custom_reward_function": ("verl", "reward"),
    "inference": ("RLinf", "actor: log-probabilities are computed by the actor"),
    "defaults": ("Hydra", "the one file: there are no config groups"),
    "hydra": ("Hydra", "nowhere: overrides are key=value arguments"),
}

_EPSILON = "one number for both sides there, two keys here"
_PLACED = "derived from cluster.component_placement, as 0-7:0-3 for 4 ranks of 2 GPUs each"

# One line per name: "foreign ending of a path | our keys | note".
_TABLES: dict[str, str] = {
    "NeMo-RL": """
        adv_estimator.name | algorithm.adv_type
        adv_estimator.gae_lambda | algorithm.gae_lambda
        adv_estimator.normalize_advantages | algorithm.normalize_advantages
        adv_estimator.gae_lambda_policy | algorithm.gae_lambda_policy
        adv_estimator.gae_lambda_value | algorithm.gae_lambda_value
        adv_estimator.length_adaptive_alpha | algorithm.length_adaptive_alpha
        adv_estimator.normalize_rewards | algorithm.grpo_std_normalization
        use_leave_one_out_baseline | algorithm.grpo_leave_one_out
        advantage_clip_low | algorithm.advantage_clip | a list of both bounds here
        advantage_clip_high | algorithm.advantage_clip | a list of both bounds here
        force_on_policy_ratio | algorithm.old_log_probs | true there is current here
        batch_multiplier | algorithm.dynamic_sampling.prompts_per_round | a factor on data.train_batch_size there
        gae_gamma | algorithm.gamma
        num_prompts_per_step | data.train_batch_size
        num_generations_per_prompt | algorithm.group_size
        max_num_steps | runner.max_steps
        max_num_epochs | runner.max_epochs
        val_period | runner.val_check_interval
        use_dynamic_sampling | algorithm.dynamic_sampling | a section that is there is switched on
        dynamic_sampling_max_gen_batches | algorithm.dynamic_sampling.max_rounds
        max_val_samples | data.val_size
        ratio_clip_min | algorithm.clip_ratio_low
        ratio_clip_max | algorithm.clip_ratio_high
        ratio_clip_c | algorithm.clip_ratio_c
        positive_example_nll_weight | algorithm.positive_nll_coef
        use_importance_sampling_correction | algorithm.rollout_is
        truncated_importance_sampling_type | algorithm.rollout_is.mode | tis there is truncate here
        truncated_importance_sampling_ratio | algorithm.rollout_is.high
        truncated_importance_sampling_ratio_min | algorithm.rollout_is.low
        token_level_loss | algorithm.loss_agg_func | true there is token-mean here, false is seq-mean-token-mean
        overlong_buffer_length | algorithm.overlong.buffer_length
        overlong_buffer_penalty | algorithm.overlong.penalty
        overlong_filtering | algorithm.overlong.filter
        stop_properly_penalty_coef | algorithm.overlong.stop_properly_coef
        reward_shaping.max_response_length | algorithm.overlong.max_length
        reference_policy_kl_penalty | algorithm.kl_loss_coef algorithm.kl_ctrl.kl_coef | loss or reward
        reference_policy_kl_type | algorithm.kl_loss_type algorithm.kl_penalty | loss or reward
        value_loss_fn.cliprange | algorithm.value_clip
        value_loss_fn.scale | algorithm.value_loss_scale
        policy.model_name | actor.model.path
        value.model_name | critic.model.path
        policy.tokenizer.name | actor.model.tokenizer
        policy.precision | actor.model.dtype
        policy.max_grad_norm | actor.optim.clip_grad
        policy.optimizer.kwargs.lr | actor.optim.lr
        value.optimizer.kwargs.lr | critic.optim.lr
        value.max_grad_norm | critic.optim.clip_grad
        train_global_batch_size | data.mini_batch_size
        policy.train_micro_batch_size | actor.micro_batch_size
        value.train_micro_batch_size | critic.micro_batch_size
        train_mb_tokens | actor.max_tokens_per_micro_batch
        max_total_sequence_length | data.max_prompt_length data.max_response_length | their sum
        generation.temperature | rollout.sampling.temperature
        generation.top_p | rollout.sampling.top_p
        generation.top_k | rollout.sampling.top_k
        generation.max_new_tokens | rollout.sampling.max_new_tokens
        generation.backend | rollout.backend
        checkpoint_dir | runner.output_dir
        checkpointing.save_period | runner.save_interval
        keep_top_k | runner.keep_checkpoints
        checkpointing.enabled | runner.save_interval | 0 saves only at the end
        wandb_enabled | runner.logger_backends | a list, as [tensorboard, wandb]
        tensorboard_enabled | runner.logger_backends | a list, as [tensorboard, wandb]
        log_dir | runner.output_dir
        wandb.name | runner.experiment_name
    """,
    "verl": f"""
        lam | algorithm.gae_lambda
        adv_estimator | algorithm.adv_type
        norm_adv_by_std_in_grpo | algorithm.grpo_std_normalization
        clip_ratio | algorithm.clip_ratio_low algorithm.clip_ratio_high | {_EPSILON}
        cliprange | algorithm.clip_ratio_low algorithm.clip_ratio_high | {_EPSILON}
        actor.clip_ratio_low | algorithm.clip_ratio_low
        actor.clip_ratio_high | algorithm.clip_ratio_high
        actor.clip_ratio_c | algorithm.clip_ratio_c
        policy_loss.loss_mode | algorithm.policy_loss
        rollout_correction | algorithm.rollout_is
        rollout_correction.rollout_is | algorithm.rollout_is.level
        bypass_mode | algorithm.old_log_probs | true there is rollout here
        actor.shuffle | algorithm.shuffle_mini_batches
        balance_batch | actor.balance critic.balance
        gen_batch_size | algorithm.dynamic_sampling.prompts_per_round
        rollout_is_threshold | algorithm.rollout_is.high algorithm.rollout_is.low
        rollout_is_batch_normalize | algorithm.rollout_is.batch_normalize
        rollout_rs | algorithm.rollout_is.reject
        rollout_rs_threshold | algorithm.rollout_is.reject.threshold | of the KL here, of the ratio for k1 there
        cliprange_value | algorithm.value_clip
        critic_warmup | algorithm.policy_training_start_step | K means K-1 critic-only steps there, exactly K here
        ppo_mini_batch_size | data.mini_batch_size | prompts there, sequences here: multiply by algorithm.group_size
        actor.ppo_micro_batch_size_per_gpu | actor.micro_batch_size
        critic.ppo_micro_batch_size_per_gpu | critic.micro_batch_size
        actor.ppo_max_token_len_per_gpu | actor.max_tokens_per_micro_batch
        critic.ppo_max_token_len_per_gpu | critic.max_tokens_per_micro_batch
        pf_ppo.reweight_method | algorithm.pf_ppo.method
        pf_ppo.weight_pow | algorithm.pf_ppo.power
        filter_groups | algorithm.dynamic_sampling | a section that is there is switched on
        filter_groups.max_num_gen_batches | algorithm.dynamic_sampling.max_rounds
        use_dynamic_bsz | actor.max_tokens_per_micro_batch critic.max_tokens_per_micro_batch | a token budget
        log_prob_micro_batch_size_per_gpu | algorithm.logprob_forward_micro_batch_size
        actor.ppo_epochs | algorithm.ppo_epochs
        critic.ppo_epochs | algorithm.critic_ppo_epochs
        actor.use_kl_loss | algorithm.use_kl_loss
        actor.kl_loss_coef | algorithm.kl_loss_coef
        actor.kl_loss_type | algorithm.kl_loss_type
        overlong_buffer_cfg.len | algorithm.overlong.buffer_length
        overlong_buffer_cfg.penalty_factor | algorithm.overlong.penalty
        max_resp_len | algorithm.overlong.max_length
        entropy_coeff | algorithm.entropy_bonus
        loss_agg_mode | algorithm.loss_agg_func
        loss_scale_factor | algorithm.loss_agg_horizon
        actor.grad_clip | actor.optim.clip_grad
        critic.grad_clip | critic.optim.clip_grad
        actor.optim.lr | actor.optim.lr
        actor.optim.weight_decay | actor.optim.weight_decay
        lr_warmup_steps_ratio | actor.optim.lr_warmup_steps critic.optim.lr_warmup_steps | in steps here
        actor.strategy | actor.training_backend
        critic.strategy | critic.training_backend
        megatron.tensor_model_parallel_size | actor.parallel.tensor critic.parallel.tensor
        megatron.pipeline_model_parallel_size | actor.parallel.pipeline critic.parallel.pipeline
        megatron.sequence_parallel | actor.parallel.sequence critic.parallel.sequence
        enable_gradient_checkpointing | actor.gradient_checkpointing critic.gradient_checkpointing
        actor_rollout_ref.model.path | actor.model.path
        rollout.n | algorithm.group_size
        actor_rollout_ref.rollout.name | rollout.backend
        actor_rollout_ref.rollout.temperature | rollout.sampling.temperature
        actor_rollout_ref.rollout.top_p | rollout.sampling.top_p
        actor_rollout_ref.rollout.top_k | rollout.sampling.top_k
        max_num_seqs | rollout.max_running_requests
        tensor_model_parallel_size | cluster.component_placement | {_PLACED}
        train_files | data.task.path | with data.task.type jsonl
        val_files | data.task.val_path | with data.task.type jsonl
        prompt_key | data.task.prompt_column
        n_gpus_per_node | cluster.gpus_per_node
        nnodes | cluster.num_nodes
        total_epochs | runner.max_epochs
        total_training_steps | runner.max_steps
        test_freq | runner.val_check_interval
        save_freq | runner.save_interval
        default_local_dir | runner.output_dir
        resume_mode | runner.resume
        resume_from_path | runner.resume
        max_actor_ckpt_to_keep | runner.keep_checkpoints
        trainer.logger | runner.logger_backends
        project_name | runner.experiment_name
        trainer.experiment_name | runner.experiment_name
        custom_reward_function.path | reward.type | as module:function
    """,
    "slime": f"""
        lambd | algorithm.gae_lambda
        advantage_estimator | algorithm.adv_type
        disable_grpo_std_normalization | algorithm.grpo_std_normalization | true there is false here
        eps_clip | algorithm.clip_ratio_low algorithm.clip_ratio_high | the lower side; the upper one is eps_clip_high
        eps_clip_high | algorithm.clip_ratio_high
        eps_clip_c | algorithm.clip_ratio_c
        use_tis | algorithm.rollout_is
        use_rollout_logprobs | algorithm.old_log_probs | true there is rollout here
        balance_data | actor.balance critic.balance
        over_sampling_batch_size | algorithm.dynamic_sampling.prompts_per_round
        tis_clip | algorithm.rollout_is.high
        tis_clip_low | algorithm.rollout_is.low
        entropy_coef | algorithm.entropy_bonus
        num_critic_only_steps | algorithm.policy_training_start_step
        use_unbiased_kl | algorithm.kl_loss_grad | true there is score here
        calculate_per_token_loss | algorithm.loss_agg_func | token-mean here; without it seq-mean-token-mean
        n_samples_per_prompt | algorithm.group_size
        rollout_batch_size | data.train_batch_size
        dynamic_sampling_filter_path | algorithm.dynamic_sampling | max - min of the metric; no filter of your own
        global_batch_size | data.mini_batch_size
        max_tokens_per_gpu | actor.max_tokens_per_micro_batch
        num_rollout | runner.max_steps
        eval_interval | runner.val_check_interval
        hf_checkpoint | actor.model.path
        rollout_temperature | rollout.sampling.temperature
        rollout_max_response_len | data.max_response_length
        rm_type | reward.type
        rm_url | reward.url | with reward.type: http
        actor_num_nodes | cluster.num_nodes | {_PLACED}
        actor_num_gpus_per_node | cluster.gpus_per_node | {_PLACED}
    """,
    "RLinf": f"""
        kl_beta | algorithm.kl_loss_coef algorithm.kl_ctrl.kl_coef | loss or reward
        kl_penalty_type | algorithm.kl_loss_type algorithm.kl_penalty | loss or reward
        ratio_clip_eps | algorithm.clip_ratio_low algorithm.clip_ratio_high | {_EPSILON}
        update_epoch | algorithm.ppo_epochs
        sampling_params | rollout.sampling
        rollout_backend | rollout.backend
        total_num_envs | env.num_envs
        env.train.max_episode_steps | env.max_episode_steps
        env.train.seed | runner.seed
        env.eval.seed | env.evaluation.seed
        logger.log_path | runner.output_dir
        logger.experiment_name | runner.experiment_name
        logger.logger_backends | runner.logger_backends
        resume_dir | runner.resume
        val_freq | runner.val_check_interval
        seq_length | data.max_prompt_length data.max_response_length | their sum
    """,
    "TRL": """
        num_ppo_epochs | algorithm.ppo_epochs
        vf_coef | algorithm.value_loss_scale
        whiten_advantages | algorithm.normalize_advantages
        kl_estimator | algorithm.kl_penalty
        whiten_rewards | algorithm.reward_whitening | of tokens there, of responses here
        per_device_train_batch_size | actor.micro_batch_size
        response_length | data.max_response_length
        sft_model_path | actor.model.path
        reward_model_path | reward.model.path | with reward.type: model
        total_episodes | runner.max_steps | in steps here, each of data.train_batch_size prompts
        local_rollout_forward_batch_size | algorithm.rollout_micro_batch_size
        learning_rate | actor.optim.lr critic.optim.lr
        max_grad_norm | actor.optim.clip_grad critic.optim.clip_grad
    """,
    "Stable-Baselines3": f"""
        n_steps | env.rollout_steps
        n_envs | env.num_envs
        n_epochs | algorithm.ppo_epochs
        batch_size | data.mini_batch_size
        ent_coef | algorithm.entropy_bonus
        clip_range | algorithm.clip_ratio_low algorithm.clip_ratio_high | {_EPSILON}
        clip_range_vf | algorithm.value_clip
        normalize_advantage | algorithm.normalize_advantages
        total_timesteps | runner.max_steps | in steps here, each of env.num_envs * env.rollout_steps transitions
        env_id | env.id
        net_arch | actor.model.hidden_sizes
        activation_fn | actor.model.activation
        log_std_init | actor.model.initial_log_std
        squash_output | actor.model.action_distribution | squashed or gaussian here
        n_stack | env.pixels.frame_stack
        tensorboard_log | runner.output_dir
        norm_obs | env.normalize_observations
        norm_reward | env.normalize_rewards
        clip_obs | env.clip_observations
        clip_reward | env.clip_rewards
    """,
    "CleanRL": f"""
        num_steps | env.rollout_steps
        update_epochs | algorithm.ppo_epochs
        clip_coef | algorithm.clip_ratio_low algorithm.clip_ratio_high | {_EPSILON}
        clip_vloss | algorithm.value_clip | a distance here, not a switch
        norm_adv | algorithm.normalize_advantages
        num_minibatches | data.mini_batch_size | a size here: num_envs * rollout_steps / num_minibatches
        minibatch_size | data.mini_batch_size
        anneal_lr | actor.optim.lr_schedule | linear or constant here
        exp_name | runner.experiment_name
        capture_video | env.evaluation.video
        track | runner.logger_backends | a list, as [tensorboard, wandb]
    """,
}


def _read(tables: dict[str, str]) -> dict[str, ForeignName]:
    names: dict[str, ForeignName] = {}
    for system, table in tables.items():
        for line in table.strip().splitlines():
            name, here, *note = (part.strip() for part in line.split("|"))
            names.setdefault(name, ForeignName(system, tuple(here.split()), note[0] if note else ""))
    return names


_NAMES = _read(_TABLES)


def all_names() -> dict[str, ForeignName]:
    """The whole dictionary, for the reference page and tests."""
    return dict(_NAMES)
