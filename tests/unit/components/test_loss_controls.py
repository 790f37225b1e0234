"""Controls of the loss reach the parameters of a real actor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from rl_platform.components.actor import LanguageActor
from rl_platform.components.critic import LanguageCritic
from rl_platform.records import RolloutBatch

CHANGES = [
    # keys of both runs, the key that must make a difference
    ({}, {"loss_agg_func": "token-sum"}),
    ({"loss_agg_func": "seq-mean-token-sum"}, {"loss_agg_denominator": "nominal"}),
    ({"positive_nll_coef": 0.5}, {"positive_nll_norm": "all_tokens"}),
]


@pytest.mark.parametrize(("base", "change"), CHANGES, ids=str)
def test_a_control_changes_the_update(
    base: dict[str, Any], change: dict[str, Any], context: Any, reasoning: Any, token_batch: Any
) -> None:
    """Two of eight rows do not count; weights are clipped nowhere, so that the size of a loss shows in the step."""
    some = torch.arange(8) % 4 > 0
    batch = replace(token_batch(), correct=torch.arange(8) % 2 == 0, sample_mask=some)

    def trained(keys: dict[str, Any]) -> torch.Tensor:
        optim = {"lr": 1e-2, "eps": 1.0, "clip_grad": None}  # far above the gradients: a step shows their size
        model = reasoning().actor.model.model_dump()
        actor = LanguageActor(context(), reasoning(algorithm=keys, actor={"model": model, "optim": optim}))
        actor.update(batch, 0)
        return torch.cat([tensor.flatten() for tensor in actor.publish(1).state.values()])

    assert not torch.allclose(trained(base), trained(base | change), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0},
        {"policy_loss": "gspo", "loss_agg_func": "seq-mean-token-mean"},
        {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_grad": "score"},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [None, 3])
def test_current_log_probs_give_the_update_of_recomputed_ones(
    keys: dict[str, Any], rows: int | None, context: Any, reasoning: Any, token_batch: Any
) -> None:
    """A rollout is one optimizer step; without old log-probs in the batch and with any micro-batches."""
    model, data = reasoning().actor.model.model_dump(), {"mini_batch_size": 8, "max_response_length": 8}
    states, metrics = [], []
    for source in ("recompute", "current"):
        section = {"model": model, "optim": {"lr": 1e-2, "eps": 1e-3}, "micro_batch_size": rows}
        config = reasoning(algorithm=keys | {"old_log_probs": source}, data=data, actor=section)
        actor = LanguageActor(context(), config)
        batch = replace(token_batch(), log_probs=None)
        batch.reference_log_probs = batch.rollout_log_probs - 5.0
        if source == "recompute":
            batch = replace(batch, **actor.evaluate(batch))
        metrics.append(actor.update(batch, 0))
        states.append(torch.cat([tensor.flatten() for tensor in actor.publish(1).state.values()]))
    assert metrics[1]["actor/ratio_max"] == metrics[1]["actor/ratio_min"] == 1.0
    assert metrics[1]["actor/approx_kl"] == 0
    assert metrics[1]["actor/pg_loss"] == pytest.approx(metrics[0]["actor/pg_loss"], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5)


def test_rows_in_order_make_the_same_mini_batches_in_every_epoch(
    context: Any, reasoning: Any, token_batch: Any
) -> None:
    def seen(**keys: Any) -> list[list[int]]:
        actor, found = LanguageActor(context(), reasoning(algorithm={"ppo_epochs": 2} | keys)), []
        step = actor.engine.step

        def recorded(mini_batch: Any, *rest: Any) -> Any:
            found.append(mini_batch.group_ids.tolist())
            return step(mini_batch, *rest)

        actor.engine.step = recorded  # type: ignore[method-assign]
        actor.update(token_batch(), 0)
        return found

    assert seen(shuffle_mini_batches=False) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    shuffled = seen()
    assert sorted(shuffled[0] + shuffled[1]) == sorted(shuffled[2] + shuffled[3]) == list(range(8))
    assert shuffled[:2] != shuffled[2:]


def test_first_and_last_optimizer_step_of_an_update(context: Any, reasoning: Any, token_batch: Any) -> None:
    """Old log-probs are those of the start, so that the first step has not moved and the last one has."""
    actor = LanguageActor(context(), reasoning(algorithm={"ppo_epochs": 3}))
    batch = replace(token_batch(), **actor.evaluate(token_batch()))
    found = actor.update(batch, 0)
    assert abs(found["actor/approx_kl_first"]) < 1e-6
    assert found["actor/clip_frac_first"] == 0
    assert found["actor/clip_frac_last"] > 0
    assert abs(found["actor/approx_kl_last"]) > 1e-3
    once = LanguageActor(context(), reasoning(data={"mini_batch_size": 8, "max_response_length": 8})).update(batch, 0)
    assert once["actor/approx_kl_first"] == once["actor/approx_kl_last"] == once["actor/approx_kl"]


@pytest.mark.parametrize("rows", [None, 3])
def test_the_critic_values_the_state_after_a_response_that_was_cut(
    rows: int | None, context: Any, reasoning: Any, token_batch: Any
) -> None:
    """Equal to the value it has in a response that is one token longer, whatever that token is."""
    critic = LanguageCritic(context("critic"), reasoning(algorithm={"logprob_forward_micro_batch_size": rows}))
    torch.nn.init.normal_(critic.engine.model.model.head.weight)
    batch = token_batch()
    last = batch.inputs["lengths"] - 1
    cut = torch.arange(8) % 2 == 0
    bootstrapped = (torch.arange(8) == last[:, None]) & cut[:, None]
    found = critic.evaluate(replace(batch, bootstrapped=bootstrapped))
    plain = critic.evaluate(batch)["values"]
    torch.testing.assert_close(found["values"], plain, rtol=1e-5, atol=1e-6)
    inputs = {"tokens": F.pad(batch.inputs["tokens"], (0, 1), value=7), "lengths": last + 2}
    after = torch.arange(9) == (last + 1)[:, None]
    longer = RolloutBatch(inputs, after, batch.sample_mask, batch.group_ids, torch.zeros(8, 9), torch.zeros(8, 9))
    following = critic.evaluate(longer)["values"].sum(dim=1)
    expected = torch.where(bootstrapped, following[:, None], 0.0)
    torch.testing.assert_close(found["end_values"], expected, rtol=1e-5, atol=1e-6)
    assert expected[cut].any(dim=1).all()


@pytest.mark.parametrize("balance", [True, False])
def test_balance_reaches_the_engine_of_each_role(balance: bool, context: Any, reasoning: Any) -> None:
    model = reasoning().actor.model.model_dump()
    config = reasoning(
        actor={"model": model, "balance": balance}, critic={"use_critic_model": True, "balance": not balance}
    )
    assert LanguageActor(context(), config).engine.balance is balance
    assert LanguageCritic(context("critic"), config).engine.balance is not balance
