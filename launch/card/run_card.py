"""The card of a run: its algorithm, sources of questions, reward functions, policy and warnings, in words."""

from __future__ import annotations

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import FLOW_POLICIES, Model
from rl_platform.launch.card.algorithm_card import algorithm_card, functions_card, sources_card
from rl_platform.launch.session import warnings_of
from rl_platform.user_code import is_named


def run_card(config: Config) -> list[tuple[str, str]]:
    """Returns the algorithm card of a config."""
    rows = config.rows_per_step
    if config.runner.task_type == "reasoning":
        rows = config.data.train_batch_size * config.algorithm.group_size
    lines = algorithm_card(
        config.algorithm,
        rows_per_rollout=rows,
        mini_batch_size=config.data.mini_batch_size,
        critic_mini_batch_size=config.critic.mini_batch_size,
        task_type=config.runner.task_type,
        has_values=config.has_values,
        num_action_chunks=config.actor.model.num_action_chunks,
    )
    lines += sources_card(config.data) + functions_card(config.reward)
    lines += [("warning", text) for text in warnings_of(config)]
    if config.runner.task_type == "embodied":
        lines += policy_card(config.actor.model, config.sequence_length)
    if (warm := config.runner.warm_start) is not None:
        text = f"{warm.updates} updates on {warm.demonstrations} clone it before PPO; deviations and values stay"
        term = f"; {warm.nll_coef:g} times its negative log-likelihood is in the loss" if warm.nll_coef else ""
        lines.append(("warm start", text + term))
    if config.runner.max_staleness:
        ahead = config.runner.max_staleness
        age = "one update" if ahead == 1 else f"{ahead} updates"
        lines.append(("staleness", f"rollouts are collected during updates, with weights {age} old"))
    if config.rollout.partial_rollout is not None:
        more = f"{config.prompts_in_flight} prompts in work, {config.data.train_batch_size} trained on per step"
        lines.append(("partial rollouts", f"{more}; the others continue in the next step with newer weights"))
    return lines


def policy_card(model: Model, sequence_length: int) -> list[tuple[str, str]]:
    """Returns (topic, text) rows about everything that differs from the default policy, for the run's card."""
    rows = []
    if is_named(model.type):
        rows.append(("network", f"{model.type}, with the platform's heads on its features"))
    if model.type == "gru":
        pieces = f"sequences of {sequence_length} steps, from the state the rollout was in"
        rows.append(("recurrent policy", f"{pieces}; the gradient flows to their first step, not across episodes"))
    if model.log_std == "state":
        rows.append(("deviations", "of continuous actions: a function of the state"))
    if model.action_distribution == "squashed":
        text = "tanh of a Gaussian, scaled to the bounds; log-probs exact, the entropy estimated by quadrature"
        rows.append(("actions inside bounds", text))
    if model.type == "vla":
        text = "components independent given the observation; one log-prob per action, their sum"
        used = "" if model.backbone_layers is None else f"; first {model.backbone_layers} layers of the language model"
        frozen = "" if model.train_backbone else "; language model frozen"
        rows.append(("vision-language-action", f"{text}{used}{frozen}"))
    if model.type == "vlm_tokens":
        text = f"{model.action_bins} bins, tokens at the end of the vocabulary; components independent, one pass"
        rows.append(("actions as tokens", text))
    if model.type in FLOW_POLICIES:
        flow = model.flow
        which = "one random step" if flow.stochastic_steps == "one" else "every step"
        text = f"{flow.method}, {which} of a chunk draws noise; log-probs are those of its denoising"
        rows.append(("flow matching", text))
    return rows
