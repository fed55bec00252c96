"""A padded batch is its samples in every storage: values, masks and extents are those of the dense call."""

from __future__ import annotations

import pytest
import torch
from extents.test_padded_batches import RIGHT_OR_LEFT, batch, check_loop
from torch import Tensor

import masked_dispatch as md
from masked_dispatch import MaskedSemanticsError

STORED = {
    "packed": lambda x: x.to_packed(),
    "coo": lambda x: x.to_sparse(),
    "coo of rows": lambda x: x.to_sparse(2),
    "csr": lambda x: x.to_sparse_csr(dense_dim=1),
    "csc": lambda x: x.to_sparse_csc(dense_dim=1),
    "bsr": lambda x: x.to_sparse_bsr((2, 1), dense_dim=1),
}
FEW = {name: STORED[name] for name in ("packed", "coo", "csr")}


def missing(side: str = "right") -> md.MaskedTensor:
    """A batch of which a row, and a feature of another, are missing."""
    x, _ = batch(2, side=side)
    mask = torch.ones(x.shape, dtype=torch.bool)
    mask[:, 1] = False
    mask[0, 2, 1] = False
    return x.mask_with(mask)


def check_same(found: Tensor, expected: Tensor) -> None:
    """Values, mask and extent of `found` are those of `expected`."""
    if not isinstance(expected, md.MaskedTensor):
        torch.testing.assert_close(found, expected)
        return
    md.testing.assert_close(found.to_dense(), expected, rtol=1e-12, atol=1e-12)
    assert (found.extent is None) == (expected.extent is None)
    if expected.extent is not None:
        assert found.extent.tolist() == expected.extent.tolist()


@pytest.mark.parametrize("storage", STORED)
def test_conversions_keep_it(storage: str) -> None:
    for x in (batch(2)[0], batch(2, side="left")[0], missing()):
        stored = STORED[storage](x)
        check_same(stored, x)
        check_same(stored.to_packed(), x)
        check_same(stored.to_sparse().to_packed().to_sparse_csr(dense_dim=1), x)
        assert stored.detach().extent.tolist() == x.extent.tolist()
        assert stored.without_extent().extent is None
        assert stored.without_extent().storage_layout == stored.storage_layout


def test_packed_storage_stores_the_positions_that_are_there() -> None:
    x, _ = batch(2)
    assert x.to_packed().nnz == 9
    assert missing().to_packed().nnz == 9
    assert missing().without_extent().to_packed().nnz == 6
    assert missing().to_sparse().to_packed().nnz == 9
    assert missing().to_packed().count(2).tolist()[0] == [2, 0, 1, 2, 0]


@pytest.mark.filterwarnings("ignore:x.* 0. is an end of the batch:masked_dispatch.BatchEndWarning")  # in the loop
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("storage", FEW)
@pytest.mark.parametrize("name", RIGHT_OR_LEFT)
def test_a_batch_is_its_samples(name: str, storage: str, side: str) -> None:
    f = RIGHT_OR_LEFT[name]
    x, samples = batch(2, side=side)
    check_loop(f, STORED[storage](x), samples)
    check_same(f(STORED[storage](x)), f(x))
    if name != "steps stacked":
        x = missing(side)
        check_same(f(STORED[storage](x)), f(x))


@pytest.mark.parametrize("storage", FEW)
@pytest.mark.parametrize("name", RIGHT_OR_LEFT)
def test_nothing_is_stored_densely_in_silence(name: str, storage: str) -> None:
    f = RIGHT_OR_LEFT[name]
    x, _ = batch(2)
    with md.densify("never"):
        try:
            found = f(STORED[storage](x))
        except MaskedSemanticsError as error:
            assert "has no sparse form for this call" in str(error)
            return
    check_same(found, f(x))
