"""The routers of mixture-of-experts models, as transformers writes them: a module per layer, called with its tokens.

Routes are the numbers of the selected experts: [...,L,K] over all L layers, -1 where a layer has no router or the
selection is not known.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rl_platform.models.packed import PackedTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel


class Routing(NamedTuple):
    """logits [N,E] of all experts; weights, routes [N,K]: of the selected experts."""

    logits: Tensor
    weights: Tensor
    routes: Tensor

    @classmethod
    def of(cls, output: tuple[Tensor, Tensor, Tensor]) -> Routing:
        """Returns the output of a router. Granite's begins with the routes, all others with the logits."""
        first, weights, last = output
        return cls(first, weights, last) if first.is_floating_point() else cls(last, weights, first)


def routers(backbone: PreTrainedModel) -> dict[int, Any]:
    """Returns the routers by the number of their layer, from 0; none of a dense model."""
    return {
        number: module
        for number, layer in enumerate(backbone.layers)
        for module in layer.modules()
        if type(module).__name__.endswith("Router")
    }


def scores(router: nn.Module, logits: Tensor) -> Tensor:
    """Returns the scores [N,E] float32 that a router selects experts by, without corrections of the selection."""
    sigmoid = hasattr(router, "e_score_correction_bias")  # DeepSeek-V3 and its descendants
    return logits.float().sigmoid() if sigmoid else logits.float().softmax(dim=-1)


class RecordedRouters:
    """Keeps the routes of a forward pass."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        self._layers, self._routes = len(backbone.layers), dict[int, Tensor]()
        for layer, router in routers(backbone).items():
            router.register_forward_hook(partial(self._keep, layer))

    def _keep(self, layer: int, _router: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._routes[layer] = Routing.of(output).routes

    def take(self) -> Tensor:
        """Returns the routes of the last pass, int16 [N,L,K] in host memory."""
        some = next(iter(self._routes.values()))
        none = torch.full_like(some, -1)
        return torch.stack([self._routes.get(layer, none) for layer in range(self._layers)], dim=1).short().cpu()


class ReplayedRouters:
    """Lets the routers select the experts that another pass has selected; their weights are computed anew.

    "Rollout Routing Replay" (Ma et al. 2025, arXiv 2510.11370). `begin` comes before each forward. A recomputed layer
    replays the routes of the last one.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        self._routes: Tensor | None = None
        for layer, router in routers(backbone).items():
            router.forward = partial(self._forward, layer, router, router.forward)

    def begin(self, routes: Tensor | None, packed: PackedTokens, lengths: Tensor) -> None:
        """`routes` [B,T,L,K] of sequences of `lengths` [B] that are `packed`; None: the routers select themselves."""
        self._routes = None if routes is None else packed_routes(routes, packed.flat_index, lengths, len(packed.tokens))

    def _forward(self, layer: int, router: Any, forward: Callable[[Tensor], object], hidden: Tensor) -> object:
        if self._routes is None:
            return forward(hidden)
        with _Selected(self._routes[:, layer], router.num_experts):
            return forward(hidden)


class _Selected(TorchFunctionMode):
    """Replaces the selection of a router, which is its `topk` over all experts, by `routes` [N,K] where they are known.

    A selection of groups before it leaves none out: the routes respected it when they were selected.
    """

    def __init__(self, routes: Tensor, experts: int) -> None:
        super().__init__()
        self.routes, self.experts = routes, experts

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        routed = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk) or args[0].dim() != 2:
            return routed
        if args[0].shape[1] != self.experts:
            return args[0].topk(args[0].shape[1])
        routes = torch.where(self.routes >= 0, self.routes, routed.indices)
        return torch.return_types.topk((args[0].gather(1, routes), routes))


def packed_routes(routes: Tensor, flat_index: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Returns the routes [N,L,K] int64 of `count` packed tokens, from those of the sequences [B,T,L,K].

    flat_index [B,T]: the index of a position among the tokens; others are outside [0, count). A prefix that sequences
    share has the routes of the first one.
    """
    packed = routes.new_full((count, *routes.shape[2:]), -1)
    for row in range(len(lengths) - 1, -1, -1):
        own, index = routes[row, : lengths[row]], flat_index[row, : lengths[row]]
        there = (index >= 0) & (index < count) & (own >= 0).flatten(1).any(dim=1)
        packed[index[there]] = own[there]
    return packed.long()
