"""Comparing masked tensors in tests.

torch.testing.assert_close compares element by element and asks whether all are close, which skips invalid elements. So
masked tensors are compared here: masks first, then extents if asked, then valid values. `install` teaches torch's own
function the same.
"""

from __future__ import annotations

import contextvars
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.interop.crossing import extent_of, mask_of
from masked_dispatch.replacements import replace
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.torch_internals import PairOfTensors

__all__ = ["assert_close"]


def __dir__() -> list[str]:
    return [*__all__]


_check_extent = contextvars.ContextVar("masked_dispatch.testing.check_extent", default=False)


def assert_close(actual: object, expected: object, *, check_extent: bool = False, **options: Any) -> None:
    """Raise AssertionError unless masks are equal and valid values close; also inside lists, tuples and dicts.

    A plain tensor counts as valid everywhere. How something is stored makes no difference.
    check_extent  whether the same positions have to be there (`x.extent`); a tensor without an extent has all
    options       those of torch.testing.assert_close: rtol, atol, equal_nan, check_dtype, check_device, msg …
    """
    token = _check_extent.set(check_extent)
    try:
        torch.testing.assert_close(actual, expected, **options)
    finally:
        _check_extent.reset(token)


def difference(kind: str, words: tuple[str, str, str], actual: Tensor, expected: Tensor) -> str | None:
    """Where the masks or extents of two tensors of one shape differ, in words: of an element without, of one with, and
    of the number of those with.
    """
    differs = actual != expected.to(actual.device)
    places = differs.nonzero()
    if not len(places):
        return None
    first = tuple(places[0].tolist())
    here = bool(actual[first])
    return (
        f"{kind} are not equal!\n\n"
        f"Mismatched elements: {len(places)} / {differs.numel()} ({len(places) / differs.numel():.1%})\n"
        f"First at index {first}: {words[here]} in actual, {words[not here]} in expected\n"
        f"{words[2]}: {int(actual.sum())} in actual, {int(expected.sum())} in expected"
    )


def are_masked(pair: Any) -> bool:
    """Whether one of the two tensors that torch is about to compare is masked."""
    return isinstance(pair.actual, MaskedTensor) or isinstance(pair.expected, MaskedTensor)


def compare_masks_first(compare: Any, pair: Any) -> None:
    """Compare masks, then valid values."""
    given = pair.actual, pair.expected
    if given[0].shape == given[1].shape and not any(t.device.type == "meta" for t in given):
        problem = difference("Masks", ("invalid", "valid", "Valid elements"), *map(mask_of, given))
        if problem is None and _check_extent.get():
            problem = difference("Extents", ("not there", "there", "Elements that are there"), *map(extent_of, given))
        if problem:
            pair._fail(AssertionError, problem)
    pair.actual, pair.expected = (t.to_tensor(0) if isinstance(t, MaskedTensor) else t for t in given)
    compare(pair)


def install() -> None:
    """Teach torch.testing.assert_close to compare masks: called once, when the package is imported."""
    replace(PairOfTensors, "compare", compare_masks_first, are_masked)
