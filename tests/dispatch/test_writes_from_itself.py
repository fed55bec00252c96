"""A tensor as its own index, and as its own value: what torch writes is written, and what it refuses is refused.

torch refuses operands in the memory that it writes, but runs an assignment by one boolean index as a fill, which reads
its number before it writes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md

Made = Callable[[Tensor], Any]


def _put(x: Tensor, index: Any, value: Any, accumulate: bool = False) -> None:
    indices = index if isinstance(index, tuple) else (index,)
    x.index_put_(indices, torch.as_tensor(value, dtype=x.dtype) if type(value) is not type(x) else value, accumulate)


SPELLINGS: dict[str, Callable[[Tensor, Any, Any], Any]] = {
    "x[i] = v": operator.setitem,
    "Tensor.__setitem__": lambda x, i, v: torch.Tensor.__setitem__(x, i, v),
    "index_put_": _put,
    "index_put_, accumulate": lambda x, i, v: _put(x, i, v, True),
    "masked_fill_": lambda x, i, v: x.masked_fill_(i, v),
    "index_fill_": lambda x, i, v: x.index_fill_(0, i, v),
    "index_copy_": lambda x, i, v: x.index_copy_(0, i, v),
    "index_add_": lambda x, i, v: x.index_add_(0, i, v),
    "scatter_": lambda x, i, v: x.scatter_(0, i, v),
    "put_": lambda x, i, v: x.put_(i, v),
    "copy_": lambda x, i, v: x.copy_(v),
    "fill_": lambda x, i, v: x.fill_(v),
    "x[:] = v": lambda x, i, v: operator.setitem(x, slice(None), v),
    "x[...] = v": lambda x, i, v: operator.setitem(x, ..., v),
}
INDICES: dict[str, Made] = {
    "itself": lambda x: x,
    "a view of itself": lambda x: x.view_as(x),
    "a part of itself": lambda x: x[1:],
    "transposed": lambda x: x.mT if x.ndim > 1 else x.flip(0),
    "a tuple of itself": lambda x: (x,),
    "of columns": lambda x: (slice(None), x[0]) if x.ndim > 1 else (..., x),
    "a copy": lambda x: x.clone(),
}
VALUES: dict[str, Made] = {
    "a number": lambda x: False if x.dtype is torch.bool else 0,
    "a tensor": lambda x: torch.zeros((), dtype=x.dtype),
    "an element of itself": lambda x: x.reshape(-1)[0],
    "one row of an element": lambda x: x.reshape(-1)[:1],
    "itself": lambda x: x,
    "a copy": lambda x: x.clone(),
}
DATA = {
    "bool": torch.tensor([True, False, True]),
    "bool matrix": torch.tensor([[True, False], [False, True]]),
    "uint8": torch.tensor([1, 0, 1], dtype=torch.uint8),
    "int64": torch.tensor([2, 0, 1]),
}
HELD: dict[str, Callable[[Tensor], Tensor]] = {
    "no mask": md.as_masked_tensor,
    "a mask": lambda data: md.masked_tensor(data, torch.ones(data.shape, dtype=torch.bool)),
}


def written(x: Tensor, spelling: str, index: str, value: str) -> str | None:
    """What torch says of a write; None if it writes."""
    try:
        SPELLINGS[spelling](x, INDICES[index](x), VALUES[value](x))
    except Exception as error:
        return type(error).__name__
    return None


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.filterwarnings("ignore:masked_fill_ received a mask with dtype torch.uint8")
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("kind", DATA)
def test_what_torch_writes_is_written(kind: str, held: str, spelling: str) -> None:
    for index in INDICES:
        for value in VALUES:
            plain, masked = DATA[kind].clone(), HELD[held](DATA[kind].clone())
            wanted, found = written(plain, spelling, index, value), written(masked, spelling, index, value)
            title = f"{spelling}: {kind} of {held} by {index}, {value}"
            assert (found is None) == (wanted is None), f"{title}: {found}, and torch: {wanted}"
            if wanted is None:
                assert masked.get_mask().all(), title
                assert torch.equal(masked.get_data(), plain), title


@pytest.mark.parametrize("storage", ["strided", "coo", "csr", "csc", "packed"])
def test_an_invalid_entry_of_itself_writes_nothing(storage: str) -> None:
    data = torch.tensor([[True, False], [True, True]])
    x = md.masked_tensor(data, torch.tensor([[True, True], [False, True]]))
    if storage == "packed":
        x = md.from_lengths(data, torch.tensor([1, 2])).without_extent().to_packed().without_extent()
    elif storage != "strided":
        x = x.to_layout(getattr(torch, f"sparse_{storage}"))
    wanted = x.clone().to_dense()
    wanted[wanted.clone()] = False
    x[x] = False
    md.testing.assert_close(x.to_dense(), wanted)
    assert not x.compressed().any()
