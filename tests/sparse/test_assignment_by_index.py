"""Indices of sparsely stored tensors: what is written by coordinates, and masks that select, in every storage.

Numbers in every index and storage are asked by masked_dispatch/assumptions/assignments.py, writes by index in every
storage by the conformance of ``index_put``. Here each kind of index stands once or twice, in storages by turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from door_samples import same
from storages import storages_but

STORAGES = storages_but("dense")
MASK = torch.tensor([[True, False, True, True], [False, True, True, False], [True, True, False, True]])
Masked = Callable[[Tensor, Tensor], Tensor]
IS_VALID = torch.tensor([True, False])
ROWS, ROWS_ARE_VALID = torch.tensor([True, True, False]), torch.tensor([True, False, True])

# Made by a function of `masked`, so that tensors among them are plain or masked ones.
INDICES: dict[str, Callable[[Masked], Any]] = {
    "a number without dimensions": lambda masked: masked(torch.tensor(1), torch.tensor(True)),
    "two of them": lambda masked: (torch.tensor(-1), masked(torch.tensor(1), torch.tensor(True))),
    "numbers": lambda masked: masked(torch.tensor([0, 2]), IS_VALID),
    "a number and numbers": lambda masked: (np.int64(1), masked(torch.tensor([0, 2]), IS_VALID)),
    "numbers twice": lambda masked: (masked(torch.tensor([0, 2]), IS_VALID), masked(torch.tensor([0, -1]), IS_VALID)),
    "numbers and a slice": lambda masked: (masked(torch.tensor([0, 2]), IS_VALID), slice(1, 3)),
    "a slice and numbers": lambda masked: (slice(1, None, 2), masked(torch.tensor([0, 2]), IS_VALID)),
    "... and numbers": lambda masked: (..., masked(torch.tensor([0, 2]), IS_VALID)),
    "None and numbers": lambda masked: (None, masked(torch.tensor([0, 2]), IS_VALID)),
    "numbers and None": lambda masked: (masked(torch.tensor([0, 2]), IS_VALID), None),
    "a mask of rows and a number": lambda masked: (masked(ROWS, ROWS_ARE_VALID), 1),
    "a mask": lambda masked: masked(MASK.roll(1, 0), MASK),
    "a list and a slice": lambda _: ([0, 2], slice(1, 3)),
    "None": lambda _: None,
    "...": lambda _: ...,
    "None and a number": lambda _: (None, 1),
    "None in between": lambda _: (0, None, slice(1, 3)),
    "None at the end": lambda _: (..., None),
    "None, a slice and a number": lambda _: (None, slice(1, 3), 2),
    "numbers of NumPy": lambda _: (np.int64(1), np.int32(2)),
    "a number of NumPy and a slice": lambda _: (np.int32(2), slice(1, 3)),
}


def matrix() -> md.MaskedTensor:
    return md.masked_tensor(torch.arange(12.0).reshape(3, 4), MASK)


def in_turns(cases: Iterable[Any], storages: Iterable[str] = STORAGES) -> list[tuple[Any, str]]:
    """Each case with one of the storages, which take turns."""
    return list(zip(cases, cycle(storages), strict=False))


def assigned(x: md.MaskedTensor, index: Any) -> md.MaskedTensor:
    """`x`, with values of its own and 20 more written to the index."""
    x[index] = md.masked_tensor(x[index].to_tensor(0) + 20)
    return x


@pytest.mark.parametrize(
    "index, storage",
    [
        *in_turns(INDICES),
        ("a slice and numbers", "hybrid"),
        ("... and numbers", "hybrid"),
        *((index, "permuted") for index in ("None and numbers", "None in between", "None, a slice and a number")),
    ],
)
def test_an_index_means_what_it_means_in_dense_storage(index: str, storage: str) -> None:
    for masked in (lambda t, _: t, md.masked_tensor):
        place = INDICES[index](masked)
        found = assigned(STORAGES[storage](matrix()), place)
        md.testing.assert_close(found, assigned(matrix(), place), rtol=0, atol=0)


SHAPE = (4, 5, 6)
OF_THREE = [(slice(1, 3), 2), (1, slice(0, 4, 2)), (0, ..., 1), (..., 2), (1, 2, 3), slice(0, 0)]
OF_THREE += [(slice(1, None), slice(None), slice(2, 4))]
VALUES: dict[str, Callable[[torch.Size], Any]] = {
    "a number": lambda shape: 3.0,
    "plain": torch.randn,
    "masked": lambda shape: md.masked_tensor(torch.randn(shape), torch.rand(shape) < 0.5),
    "one dimension more": lambda shape: torch.randn(1, *shape),
}


@pytest.mark.parametrize(
    "index, storage, value",
    [(*case, value) for case, value in zip(in_turns(OF_THREE, storages_but("dense", "permuted")), cycle(VALUES))],
)
def test_values_written_to_three_dimensions(index: Any, storage: str, value: str) -> None:
    """Of which torch makes a write through a view, where there are none."""
    expected = md.masked_tensor(torch.randn(SHAPE), torch.rand(SHAPE) < 0.5)
    found = STORAGES[storage](expected.clone())
    layout, values = found.storage_layout, VALUES[value](expected[index].shape)
    expected[index] = values
    found[index] = values
    assert found.storage_layout is layout
    md.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("stored", [lambda x: x, lambda x: x.to_sparse_csr(), lambda x: x.to_packed()])
def test_a_number_of_another_kind_is_not_assigned(stored: Callable[[Any], md.MaskedTensor]) -> None:
    x = stored(matrix())
    before = x.to_tensor(0)
    with pytest.raises(RuntimeError, match="value cannot be converted to type float without overflow"):
        x[1] = 1j  # type: ignore[call-overload]
    assert torch.equal(x.to_tensor(0), before)


@pytest.mark.parametrize(
    "index, message, storage",
    [
        ((0, 0, 0), "too many indices", "hybrid"),
        (3, "out of bounds", "csr"),
        ((slice(None), torch.tensor([4]), None), "out of bounds", "packed"),
    ],
    ids=["too many", "beyond", "beyond, by a tensor"],
)
def test_an_index_that_does_not_fit_raises_torchs_error(index: Any, message: str, storage: str) -> None:
    x = STORAGES[storage](matrix())
    with pytest.raises(IndexError, match=message):
        x[index] = 5.0
    assert torch.equal(x.get_mask(), MASK)


def test_what_is_written_alone_is_made_into_indices() -> None:
    """The whole tensor would have 2⁶⁰ elements."""
    plain = torch.sparse_coo_tensor(
        torch.tensor([[5], [7]]), torch.tensor([1.0]), (2**30, 2**30), check_invariants=True
    )
    x = md.as_masked_tensor(plain)
    x[torch.tensor([5, 2**29]), 6:8] = 2.0
    assert x.nnz == 4
    assert x.sum() == 8
    x[None, 5, 6] = 3.0
    x[-1, :4] = 1.0
    assert x.nnz == 8
    assert x.sum() == 13


def test_values_put_at_no_position_leave_a_sparse_tensor_as_it_is() -> None:
    x = md.masked_tensor(torch.arange(12.0).reshape(3, 4), MASK).to_sparse()
    with md.densify("never"):
        result = x.put(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert torch.equal(result.to_tensor(0), x.to_tensor(0))


# --------------------------------------------------------------------------------------------------- masks as indices


DENSE = md.masked_tensor(torch.arange(96.0).view(4, 6, 4), torch.arange(96).view(4, 6, 4) % 5 < 3)
STORED = {
    "coo": lambda x: x.to_sparse(),
    "hybrid": lambda x: x.to_sparse(x.ndim - 1),
    "csr": lambda x: x[..., 0].to_sparse_csr(),
    "csc": lambda x: x[..., 0].to_sparse_csc(),
    "bsr": lambda x: x[..., 0].to_sparse_bsr((2, 2)),
    "bsc": lambda x: x[..., 0].to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", STORED)
def test_a_mask_along_one_dimension(name: str, dim: int, masked: bool) -> None:
    x = STORED[name](DENSE)
    if dim >= x.ndim:
        return  # matrices have two
    mask = torch.arange(x.shape[dim]) % 3 != 1
    index = (*[slice(None)] * dim, md.masked_tensor(mask, torch.arange(len(mask)) > 0) if masked else mask)
    with md.densify("never"):
        found = x[index]
    assert found.storage_layout == x.storage_layout or name.startswith("bs")
    same(found.to_dense(), x.to_dense()[index])


def test_columns_with_enough_elements() -> None:
    x = DENSE[..., 0].to_sparse_csr()
    with md.densify("never"):
        assert x[:, x.count(0) > 2].shape == (4, int((x.count(0) > 2).sum()))
