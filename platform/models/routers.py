"""The routers of mixture-of-experts models, as transformers writes them: a module per layer, called with its tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Routing(NamedTuple):
    """logits [N,E] of all experts; weights, routes [N,K]: of the selected experts, and their numbers."""

    logits: Tensor
    weights: Tensor
    routes: Tensor

    @classmethod
    def of(cls, output: tuple[Tensor, Tensor, Tensor]) -> Routing:
        """The output of a router. Granite's begins with the routes, all others with the logits."""
        first, weights, last = output
        return cls(first, weights, last) if first.is_floating_point() else cls(last, weights, first)


def routers(backbone: nn.Module) -> list[nn.Module]:
    """The routers in the order of their layers; none of a dense model."""
    return [module for module in backbone.modules() if type(module).__name__.endswith("Router")]


def scores(router: nn.Module, logits: Tensor) -> Tensor:
    """The scores [N,E] float32 that a router selects experts by, without corrections of the selection."""
    sigmoid = hasattr(router, "e_score_correction_bias")  # DeepSeek-V3 and its descendants
    return logits.float().sigmoid() if sigmoid else logits.float().softmax(dim=-1)
