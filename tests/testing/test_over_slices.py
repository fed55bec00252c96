"""An operator of another library, written once on slices: a line of declaration and a formula serve every storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import masked_dispatch as md
from op_registry import registry
from op_registry.authoring import NORMALIZATION, REDUCTION, Dense, Slices, over_slices
from op_registry.dimensions.slices import LastDims
from op_registry.records.slices import Over

LIBRARY = torch.library.Library("over_slices", "DEF")
LIBRARY.define("energy(Tensor x, int[]? dim=None, bool keepdim=False) -> Tensor")
LIBRARY.impl("energy", lambda x, dim=None, keepdim=False: (x * x).sum(dim, keepdim), "CompositeExplicitAutograd")
LIBRARY.define("shares(Tensor x, int[] shape, Tensor? weight=None) -> (Tensor, Tensor)")
OWN = torch.ops.over_slices


def plain_shares(x: Tensor, shape: list[int], weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total = x.sum(list(range(x.ndim - len(shape), x.ndim)), keepdim=True)
    shares = x / total
    return (shares if weight is None else shares * weight), total


LIBRARY.impl("shares", plain_shares, "CompositeExplicitAutograd")


@pytest.fixture(autouse=True)
def _rules() -> Iterator[None]:
    with registry.overlay():

        @over_slices(OWN.energy, category=REDUCTION, dims=Slices())
        def energy(op: Any, over: Over, x: Dense) -> Tensor:
            return over.sum(x.filled(0) ** 2)

        @over_slices(OWN.shares, category=NORMALIZATION, dims=LastDims("shape", statistics=1))
        def shares(op: Any, over: Over, x: Dense, weight: Dense | None = None) -> tuple[Tensor, Tensor]:
            total = over.sum(x.filled(0))
            of_each = x.filled(0) / over.broadcast_to_elements(torch.where(total == 0, 1, total))
            return (of_each if weight is None else of_each * weight.filled(1)), total

        yield


def stored() -> list[md.MaskedTensor]:
    x = md.from_nan(torch.tensor([[1.0, torch.nan, 3.0], [torch.nan] * 3, [4.0, 4.0, torch.nan]]))
    return [x, x.to_sparse_coo(), x.to_sparse_csr(), x.to_sparse_csc(), x.to_sparse_csr().mT.mT]


@pytest.mark.parametrize("x", stored(), ids=lambda x: str(x.storage_layout))
def test_a_reduction_and_a_norm_with_a_parameter_and_a_statistic(x: md.MaskedTensor) -> None:
    weight = md.masked_tensor([2.0, 1.0, 1.0], [True, True, False])
    with md.densify("never"):
        assert_close(OWN.energy(x, [1]).to_tensor(-1), torch.tensor([10.0, -1.0, 32.0]))
        assert_close(OWN.energy(x, [0], True).to_tensor(-1), torch.tensor([[17.0, 16.0, 9.0]]))
        assert_close(OWN.energy(x).to_tensor(-1), torch.tensor(42.0))
        shares, total = OWN.shares(x, [3], weight)
    assert_close(shares.to_tensor(-1), torch.tensor([[0.5, -1.0, -1.0], [-1.0] * 3, [1.0, 0.5, -1.0]]))
    assert_close(total.to_tensor(-1), torch.tensor([[4.0], [-1.0], [8.0]]))


def test_rows_of_a_packed_batch() -> None:
    data = torch.tensor([[[1.0, 3.0], [9.0, 9.0]], [[2.0, 2.0], [1.0, 0.0]]])
    rows = md.masked_tensor(data, torch.tensor([[[True], [False]], [[True], [True]]])).to_packed()
    want = torch.tensor([[[0.25, 0.75], [-1.0, -1.0]], [[0.5, 0.5], [1.0, 0.0]]])
    with md.densify("never"):
        shares, of_transposed = OWN.shares(rows, [2])[0], OWN.shares(rows.transpose(0, 1), [2])[0]
    assert_close(shares.to_tensor(-1), want)
    assert_close(of_transposed.to_tensor(-1), want.transpose(0, 1))
