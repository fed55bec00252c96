"""x[index] = value of sparsely stored tensors: what torch writes through a view is written by coordinates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from storages import storages_but

STORAGES = storages_but("dense")
MASK = torch.tensor([[True, False, True, True], [False, True, True, False], [True, True, False, True]])
Masked = Callable[[Tensor, Tensor], Tensor]
IS_VALID = torch.tensor([True, False])

INDICES: dict[str, Callable[[Masked], Any]] = {
    "a number without dimensions": lambda masked: masked(torch.tensor(1), torch.tensor(True)),
    "two of them": lambda masked: (torch.tensor(-1), masked(torch.tensor(1), torch.tensor(True))),
    "numbers": lambda masked: masked(torch.tensor([0, 2]), IS_VALID),
    "numbers and a number": lambda masked: (masked(torch.tensor([0, 2]), IS_VALID), 1),
    "a number and numbers": lambda masked: (np.int64(1), masked(torch.tensor([0, 2]), IS_VALID)),
    "numbers twice": lambda masked: (masked(torch.tensor([0, 2]), IS_VALID), masked(torch.tensor([0, -1]), IS_VALID)),
    "numbers and a slice": lambda masked: (masked(torch.tensor([0, 2]), IS_VALID), slice(1, 3)),
    "numbers and everything": lambda masked: (masked(torch.tensor([0, 2]), IS_VALID), slice(None)),
    "a slice and numbers": lambda masked: (slice(1, None, 2), masked(torch.tensor([0, 2]), IS_VALID)),
    "... and numbers": lambda masked: (..., masked(torch.tensor([0, 2]), IS_VALID)),
    "None and numbers": lambda masked: (None, masked(torch.tensor([0, 2]), IS_VALID)),
    "numbers and None": lambda masked: (masked(torch.tensor([0, 2]), IS_VALID), None),
    "a mask of rows": lambda masked: masked(torch.tensor([True, True, False]), torch.tensor([True, False, True])),
    "a mask of rows and a number": lambda masked: (
        masked(torch.tensor([True, True, False]), torch.tensor([True, False, True])),
        1,
    ),
    "a mask": lambda masked: masked(MASK.roll(1, 0), MASK),
    "a list and a slice": lambda masked: ([0, 2], slice(1, 3)),
    "None": lambda masked: None,
    "...": lambda masked: ...,
    "None in between": lambda masked: (0, None, slice(1, 3)),
    "None at the end": lambda masked: (..., None),
}


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("masked", [lambda t, _: t, md.masked_tensor], ids=["plain", "masked"])
def test_an_index_means_what_it_means_in_dense_storage(masked: Masked, storage: str, index: str) -> None:
    dense = md.masked_tensor(torch.arange(12.0).reshape(3, 4), MASK)
    x = STORAGES[storage](dense)
    for tensor in (dense, x):
        entries = INDICES[index](masked)
        value = md.masked_tensor(tensor[entries].to_tensor(0) + 20)
        tensor[entries] = value
    assert torch.equal(x.get_mask(), dense.get_mask())
    assert torch.equal(x.to_tensor(0), dense.to_tensor(0))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("index", "message"),
    [((0, 0, 0), "too many indices"), (3, "out of bounds"), ((slice(None), torch.tensor([4]), None), "out of bounds")],
    ids=["too many", "beyond", "beyond, by a tensor"],
)
def test_an_index_that_does_not_fit_raises_torchs_error(index: Any, message: str, storage: str) -> None:
    x = STORAGES[storage](md.masked_tensor(torch.arange(12.0).reshape(3, 4), MASK))
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
