"""The laws on operators of another library in the category that is all or nothing per slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry import check, registry
from op_registry.authoring import Slices, whole_slices


@torch.library.custom_op("slicewise_tests::centered", mutates_args=())
def centered(x: Tensor) -> Tensor:
    """Each matrix without its mean."""
    return x - x.mean((-2, -1), keepdim=True)


@torch.library.custom_op("slicewise_tests::summed", mutates_args=())
def summed(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The running sum of each block, counted from its first element."""
    for axis in axes:
        x = x.cumsum(axis)
    return x.clone()


for operator in (centered, summed):
    operator.register_fake(lambda x, *axes: torch.empty_like(x))


def matrices_to_center(make: Callable[..., Tensor]) -> Any:
    yield (make((3, 2, 2)),)
    yield (make((2, 3, 4)),)


def blocks_to_sum(make: Callable[..., Tensor]) -> Any:
    yield make((3, 4)), [1]
    yield make((2, 3, 4)), [0, 2]


@pytest.mark.parametrize(
    ("op", "traits", "samples"),
    [
        (centered, {}, matrices_to_center),
        (summed, {"dims": Slices("each", dim="axes"), "replacement": 0}, blocks_to_sum),
    ],
    ids=["matrices", "blocks"],
)
def test_the_category_serves_other_libraries(op: Any, traits: dict[str, Any], samples: Any) -> None:
    with registry.overlay():
        rule = whole_slices(op._opoverload, **traits)
        rule.samples(samples)
        verdict = check(op._opoverload)
        assert verdict, str(verdict)
        assert verdict.of("P2") == "holds"
