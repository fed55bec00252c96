"""Results of other libraries' operators that are positions in a slice: the same in every storage, or stored densely.

An operator sees the stored elements of a slice one behind the other; its rule says which results count them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
import op_registry
from op_registry.authoring import REDUCTION, Slices, lowest, masked_rule, reduction, scan

nan = math.nan


def found(chosen: Tensor, dim: int, none: int) -> Tensor:
    """The first True along `dim`, `none` where there is none."""
    return torch.where(chosen.any(dim), chosen.to(torch.int8).argmax(dim), none)


@torch.library.custom_op("positions::greatest", mutates_args=())
def greatest(x: Tensor, dim: int) -> Tensor:
    return x.argmax(dim)


@torch.library.custom_op("positions::first_above", mutates_args=())
def first_above(x: Tensor, dim: int) -> Tensor:
    """The first element above 4; the size of the slice if there is none."""
    return found(x > 4, dim, x.shape[dim])


@torch.library.custom_op("positions::first_above_or_minus_one", mutates_args=())
def first_above_or_minus_one(x: Tensor, dim: int) -> Tensor:
    return found(x > 4, dim, -1).to(torch.int32)


@torch.library.custom_op("positions::value_and_place", mutates_args=())
def value_and_place(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return tuple(t.clone() for t in x.max(dim))  # type: ignore[return-value]


@torch.library.custom_op("positions::in_all", mutates_args=())
def in_all(x: Tensor) -> Tensor:
    return x.argmax()


@torch.library.custom_op("positions::first_in_all", mutates_args=())
def first_in_all(x: Tensor) -> Tensor:
    return found(x.flatten() > 400, 0, x.numel())


@torch.library.custom_op("positions::greatest_so_far", mutates_args=())
def greatest_so_far(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return tuple(t.clone() for t in x.cummax(dim))  # type: ignore[return-value]


@torch.library.custom_op("positions::how_many_above", mutates_args=())
def how_many_above(x: Tensor, dim: int) -> Tensor:
    return (x > 4).sum(dim)


@torch.library.custom_op("positions::unsaid", mutates_args=())
def unsaid(x: Tensor, dim: int) -> Tensor:
    return x.argmax(dim)


@torch.library.custom_op("positions::unsaid_by_hand", mutates_args=())
def unsaid_by_hand(x: Tensor, dim: int) -> Tensor:
    return x.argmax(dim)


OPS: Any = torch.ops.positions
for _name in ("greatest", "first_above", "first_above_or_minus_one"):
    reduction(getattr(OPS, _name), identity=lowest, dims=Slices(positions=(0,)))
reduction(OPS.value_and_place, identity=lowest, dims=Slices(positions=(1,)))
for _name in ("in_all", "first_in_all"):
    reduction(getattr(OPS, _name), identity=lowest, dims=Slices(dim=None, positions=(0,)))
scan(OPS.greatest_so_far, identity=lowest, dims=Slices("each", positions=(1,)))
reduction(OPS.how_many_above, identity=0, dims=Slices(positions=()))
reduction(OPS.unsaid, identity=lowest)


@masked_rule(OPS.unsaid_by_hand, category=REDUCTION, dims=Slices())
def _unsaid_by_hand(x: Any, dim: int) -> Any:
    return type(x)(OPS.unsaid_by_hand(x.filled(lowest(x.dtype)), dim), x.any_valid(dim))


ALONG = ["greatest", "first_above", "first_above_or_minus_one", "value_and_place", "greatest_so_far", "how_many_above"]
WHOLE = ["in_all", "first_in_all"]
UNSAID = ["unsaid", "unsaid_by_hand"]
STORED: dict[str, Callable[[Any], Any]] = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_layout(torch.sparse_bsr, blocksize=(1, 2)),
    "rows": lambda x: x.to_layout(torch.sparse_coo, sparse_dim=1),
    "transposed": lambda x: x.mT.to_sparse_csr().mT,
    "packed": lambda x: x.to_packed(),
}


def matrix(dtype: torch.dtype, storage: str) -> Any:
    data = torch.tensor([[nan, nan, 5, 1], [0, nan, 7, nan], [nan, 2, nan, 3], [nan] * 4])
    x = md.masked_tensor(data.nan_to_num(9).to(dtype), ~data.isnan())
    return md.from_lengths(x, torch.tensor([4, 3, 4, 0])) if storage == "packed" else x


def leaves(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else (result,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("name", [*ALONG, *WHOLE, *UNSAID])
def test_positions_are_those_of_the_slice_in_every_storage(name: str, storage: str, dtype: torch.dtype) -> None:
    x = matrix(dtype, storage)
    for dims in [()] if name in WHOLE else [(1,), (0,), (-1,)]:
        wanted, stored = (leaves(getattr(OPS, name)(y, *dims)) for y in (x, STORED[storage](x)))
        for a, b in zip(wanted, stored, strict=True):
            assert b.dtype is a.dtype
            md.testing.assert_close(b.to_dense().without_extent(), a.without_extent())


def test_what_the_positions_are() -> None:
    x = matrix(torch.float32, "csr").to_sparse_csr()
    with md.densify("never"):
        assert OPS.greatest(x, 1)[:3].tolist() == [2, 2, 3]
        assert OPS.first_above(x, 1)[:3].tolist() == [2, 2, 4]
        assert OPS.first_above_or_minus_one(x, 1)[:3].tolist() == [2, 2, -1]
        assert OPS.first_in_all(x).item() == 16
        assert OPS.how_many_above(x, 1)[:3].tolist() == [1, 1, 0]


@pytest.mark.parametrize("name", UNSAID)
def test_a_rule_that_does_not_say_which_results_are_positions_is_asked(name: str) -> None:
    x = matrix(torch.float32, "csr").to_sparse_csr()
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match=r"dims=Slices\(positions=\(0,\)\)"):
        getattr(OPS, name)(x, 1)


@pytest.mark.parametrize("name", ["greatest", "first_above_or_minus_one", "in_all", "how_many_above"])
def test_the_laws_know_of_positions(name: str) -> None:
    verdict = op_registry.check(getattr(OPS, name), allow={"P7": "it has no fake implementation"})
    assert verdict.of("P2") == "holds", verdict
    assert verdict.of("P4") == "holds", verdict
    assert bool(verdict), verdict
