"""Explain errors about sizes after a mask with invalid entries has selected fewer elements than the user expected.

An invalid entry of a boolean index selects nothing. So ``x[mask] + y`` may add 5 elements to 6, and an error that
names only these numbers does not say where the sixth is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from masked_dispatch.tensor.checks import values_unknown
from masked_dispatch.tensor.masked_tensor import MaskedTensor

SELECTING = frozenset((torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default))
# Maps a selected tensor to the mask that selected it, as long as the caller holds both.
_masks: Any = WeakTensorKeyDictionary()


def remembering(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an operator that selects."""

    @functools.wraps(kernel)
    def selecting(keyset: Any, x: Any, by: Any, **kwargs: Any) -> Any:
        result = kernel(keyset, x, by, **kwargs)
        for mask in _masks_among(by if isinstance(by, (list, tuple)) else (by,)):
            if not values_unknown(mask._data):
                _masks[result] = weakref.ref(mask)
        return result

    return selecting


def _masks_among(indices: Iterable[object]) -> Iterator[MaskedTensor]:
    """The indices that are dense boolean masks with a stored validity."""
    for index in indices:
        if type(index) is MaskedTensor and index.dtype is torch.bool and index._validity is not None:
            yield index


def name_selections(error: RuntimeError, operands: Iterable[object]) -> None:
    """Add to an error about sizes, before the caller raises it again, which operand a mask with holes selected."""
    if "must match" not in str(error):
        return
    for operand in operands:
        if not isinstance(operand, Tensor) or operand not in _masks:
            continue
        mask = _masks[operand]()
        holes = 0 if mask is None else mask.numel() - int(mask.count())
        if holes:
            error.args = (
                f"{error}. The operand of shape {tuple(operand.shape)} was selected by a mask of shape "
                f"{tuple(mask.shape)} in which {holes} entries are invalid, and these select nothing: select the other "
                "operand by the same mask, or say what they stand for, x[mask.to_tensor(True)]",
            )
