"""A cache on each mask object for values computed from the mask; a write to the mask empties it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# The limit exceeds the operators, dimensions and sizes that one mask meets in a model. But a mask of size 1 may meet
# any number of sizes, and lives as long as its parameter.
MOST_KEPT = 256

_ATTRIBUTE = "_masked_dispatch_kept"


class Kept(dict[Any, Any]):
    """The cache of one mask: it holds at most MOST_KEPT entries, and drops the oldest first.

    Another thread may drop an entry at any time: read entries with `get`.
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > MOST_KEPT:
            # Copy the keys in one step: another thread may add one meanwhile.
            self.pop(list(self)[0], None)  # noqa: RUF015


def kept_with(validity: Tensor) -> Kept:
    """The cache of this mask: empty if the mask has changed since the last call.

    A key begins with the name of the cached value, so that no two callers use one key. Callers must not cache while
    tracing, nor tensors computed in inference mode, which autograd cannot save; a mask made in inference mode has no
    version, and so no cache.
    """
    version: int = validity._version
    kept: tuple[int, Kept] | None = getattr(validity, _ATTRIBUTE, None)
    if kept is None or kept[0] != version:
        kept = (version, Kept())
        setattr(validity, _ATTRIBUTE, kept)
    return kept[1]


def without_kept(tensor: Tensor) -> Tensor:
    """The tensor to write to a file: it shares the memory but not the cache, and each call returns the same object."""
    if not hasattr(tensor, _ATTRIBUTE):
        return tensor
    kept = kept_with(tensor)
    found: Tensor | None = kept.get(("alone",))
    if found is None:
        found = kept[("alone",)] = tensor.detach()
    return found
