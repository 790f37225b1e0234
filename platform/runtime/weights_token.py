"""The token that stands for published weights in messages to other processes.

The transfers that read a token are in the extras `runtime/weights/` and `runtime/ray/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rl_platform.records import Weights

if TYPE_CHECKING:
    from rl_platform.runtime.weights.weight_transfer import TensorShape


@dataclass(frozen=True)
class WeightsToken:
    """A message that stands for published weights: their rank, the number of the publication, and their version.

    copies: tokens of the same weights from other ranks of a learner. tensors: those that a process group can send, on
    `device` (see `WeightsOffer`); None: no group can. held: the process of the rank holds the tensors; otherwise only
    the object store does. receivers: number of receivers that get the token at the same time and join one group.
    """

    host: str
    label: str
    number: int
    version: int
    delta: bool
    copies: tuple[WeightsToken, ...] = ()
    tensors: tuple[TensorShape, ...] | None = None
    device: str = "cpu"
    held: bool = True
    receivers: int = 1

    def at(self, host: str) -> WeightsToken | None:
        """Returns the publication in the process of `host`; None if that process holds none."""
        return next((token for token in (self, *self.copies) if token.host == host and token.held), None)


def merge_published(published: Sequence[Weights | WeightsToken]) -> Weights | WeightsToken:
    """Returns one token for the publications of all ranks of a learner.

    A receiver reads from the rank in its own process, if there is one.
    """
    first, *others = published
    if not isinstance(first, WeightsToken):
        return first
    return replace(first, copies=tuple(token for token in others if isinstance(token, WeightsToken) and token.held))
