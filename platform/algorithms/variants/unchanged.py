"""Tensors that are lent to a user's function: changing one of them in place is an error.

Not covered: writes through a NumPy array or `tensor.data`, which PyTorch does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from rl_platform.records import RolloutBatch
    from rl_platform.user_code import Extension

Named = Mapping[str, object]
"""Arguments by name, of which only tensors count."""


@contextmanager
def unchanged(extension: Extension, name: str, lent: Callable[[], Named]) -> Iterator[None]:
    """Raises ConfigError if the block, a call of the function `name`, changes or replaces a tensor.

    lent: returns what the function may reach; called before and after it.
    """
    before = {label: (value, _version(value)) for label, value in lent().items()}
    yield
    after = lent()
    changed = [
        label
        for label, (value, version) in before.items()
        if after.get(label) is not value or _version(value) != version
    ]
    if changed:
        hint = f"work on a copy, as {changed[0]}.clone(): training reads the tensor again"
        raise extension.misfit(name, f"changed {', '.join(changed)}, which it is lent", hint)


def tensors_of(batch: RolloutBatch) -> dict[str, object]:
    """Returns the tensors of a batch, as `batch.rewards` and `batch.inputs['tokens']`."""
    tensors: dict[str, object] = {
        f"batch.{field}": value for field, value in vars(batch).items() if isinstance(value, Tensor)
    }
    return tensors | {f"batch.inputs[{label!r}]": value for label, value in batch.inputs.items()}


def _version(value: object) -> int:
    """Returns the number of changes of a tensor. PyTorch refuses changes of an inference tensor, and counts none."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0
