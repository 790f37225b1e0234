"""Controls of the loss reach the parameters of a real actor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_platform.components.actor import LanguageActor

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
