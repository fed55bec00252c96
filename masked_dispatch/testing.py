"""Comparing masked tensors in tests.

torch.testing.assert_close compares element by element and asks whether all are close, which skips invalid elements. So
masked tensors are compared here: masks first, then valid values. `install` teaches torch's own function the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from masked_dispatch.replacements.replacing import replace
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.torch_internals import PairOfTensors

__all__ = ["assert_close"]


def __dir__() -> list[str]:
    return [*__all__]


def assert_close(actual: object, expected: object, **options: Any) -> None:
    """Raise AssertionError unless masks are equal and valid values close; also inside lists, tuples and dicts.

    A plain tensor counts as valid everywhere. How something is stored makes no difference.
    options  those of torch.testing.assert_close: rtol, atol, equal_nan, check_dtype, check_device, msg …
    """
    torch.testing.assert_close(actual, expected, **options)


def difference_of_masks(actual: Tensor, expected: Tensor) -> str | None:
    """Where one of two tensors of one shape is valid and the other is not, in words."""
    masks = [
        t.to_dense().get_mask() if isinstance(t, MaskedTensor) else torch.ones_like(t, dtype=torch.bool)
        for t in (actual, expected)
    ]
    differs = masks[0] != masks[1].to(masks[0].device)
    places = differs.nonzero()
    if not len(places):
        return None
    first = tuple(places[0].tolist())
    is_valid = bool(masks[0][first])
    return (
        "Masks are not equal!\n\n"
        f"Mismatched elements: {len(places)} / {differs.numel()} ({len(places) / differs.numel():.1%})\n"
        f"First at index {first}: {_word(is_valid)} in actual, {_word(not is_valid)} in expected\n"
        f"Valid elements: {int(masks[0].sum())} in actual, {int(masks[1].sum())} in expected"
    )


def _word(is_valid: bool) -> str:
    return "valid" if is_valid else "invalid"


def are_masked(pair: Any) -> bool:
    """Whether one of the two tensors that torch is about to compare is masked."""
    return isinstance(pair.actual, MaskedTensor) or isinstance(pair.expected, MaskedTensor)


def compare_masks_first(compare: Any, pair: Any) -> None:
    """Compare masks, then valid values."""
    given = pair.actual, pair.expected
    if given[0].shape == given[1].shape and not any(t.device.type == "meta" for t in given):
        problem = difference_of_masks(*given)
        if problem:
            pair._fail(AssertionError, problem)
    pair.actual, pair.expected = (t.to_tensor(0) if isinstance(t, MaskedTensor) else t for t in given)
    compare(pair)


def install() -> None:
    """Teach torch.testing.assert_close to compare masks: called once, when the package is imported."""
    replace(PairOfTensors, "compare", compare_masks_first, are_masked)
