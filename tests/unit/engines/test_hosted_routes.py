"""Routes that an engine in a process of its own reports: their encoding, and their end at a stop text."""

from __future__ import annotations

import base64

import pytest
import torch

from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.hosted.hosted_engine import decoded_routes
from rl_platform.engines.rollout.stopping.stop_texts import StopTexts
from rl_platform.errors import WorkerError

ROUTES = torch.arange(5 * 2 * 3, dtype=torch.int32).view(5, 2, 3)  # 5 tokens, 2 layers, 3 experts each


def encoded(routes: torch.Tensor) -> str:
    return base64.b64encode(routes.numpy().tobytes()).decode()


def test_routes_of_each_token_and_layer() -> None:
    routes = decoded_routes(encoded(ROUTES), tokens=5, layers=2)
    assert routes.dtype == torch.int16
    assert torch.equal(routes.int(), ROUTES)


def test_routes_of_other_tokens_are_refused() -> None:
    with pytest.raises(WorkerError, match="reported 30 selected experts for 4 tokens in 2 layers"):
        decoded_routes(encoded(ROUTES), tokens=4, layers=2)


def test_routes_that_no_kernel_wrote_are_refused() -> None:
    with pytest.raises(WorkerError, match="recorded no selected experts"):
        decoded_routes(encoded(torch.zeros_like(ROUTES)), tokens=5, layers=2)


def test_a_cut_response_has_no_route_of_its_last_token() -> None:
    stop = StopTexts(["8 9 "], lambda tokens: "".join(f"{token} " for token in tokens))
    whole = Completion(0, (7, 8, 9, 6), (0.0,) * 4, "length", ROUTES)
    cut = stop.cut(Request(0, (1, 2), 0), whole)
    assert cut.token_ids == (7, 8, 9)
    assert cut.routes is not None
    assert torch.equal(cut.routes, ROUTES[:4])
