"""What has been computed from a mask, kept with the mask object until the mask is written to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# More than the operators, dimensions and sizes that one mask meets in a model. A mask of size 1 may meet any number of
# sizes, and lives as long as the parameter that it belongs to.
MOST_KEPT = 256

_ATTRIBUTE = "_masked_dispatch_kept"


class Kept(dict[Any, Any]):
    """What is kept with one mask: at most MOST_KEPT things, of which the first is the first to go.

    Another thread may make what is kept go at any time: read with `get`.
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > MOST_KEPT:
            # A copy of the keys in one step: another thread may add one meanwhile.
            self.pop(list(self)[0], None)  # noqa: RUF015


def kept_with(validity: Tensor) -> Kept:
    """What is kept with this mask: empty when the mask has changed since it was last asked.

    A key begins with the name of what is kept, so that no two callers use one key. Nothing may be kept while tracing,
    and nothing that was computed in inference mode, since autograd cannot save such tensors; a mask made in inference
    mode has no version, and can keep nothing.
    """
    version: int = validity._version
    kept: tuple[int, Kept] | None = getattr(validity, _ATTRIBUTE, None)
    if kept is None or kept[0] != version:
        kept = (version, Kept())
        setattr(validity, _ATTRIBUTE, kept)
    return kept[1]


def without_kept(tensor: Tensor) -> Tensor:
    """The tensor as a file has it: on the same memory, without what is kept with it, and always one object."""
    if not hasattr(tensor, _ATTRIBUTE):
        return tensor
    kept = kept_with(tensor)
    found: Tensor | None = kept.get(("alone",))
    if found is None:
        found = kept[("alone",)] = tensor.detach()
    return found
