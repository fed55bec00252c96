"""What lies on the device meta is not written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sixteen_elements import sample, state

META: dict[str, Callable[[Tensor, Tensor], object]] = {
    "x[i] = v": lambda x, i: x.__setitem__(i, 5.0),
    "x[i] = t": lambda x, i: x.__setitem__(i, torch.zeros(1, 4)),
    "x[i, j] = v": lambda x, i: x.__setitem__((i, i), 5.0),
    "index_put_": lambda x, i: x.index_put_((i,), torch.tensor(5.0)),
    "index_fill_": lambda x, i: x.index_fill_(0, i, 5.0),
    "index_copy_": lambda x, i: x.index_copy_(0, i, torch.zeros(1, 4)),
    "index_add_": lambda x, i: x.index_add_(0, i, torch.zeros(1, 4)),
    "scatter_": lambda x, i: x.scatter_(0, i[None], 5.0),
    "masked_fill_": lambda x, i: x.masked_fill_(i > 0, 5.0),
    "copy_": lambda x, i: x.copy_(i),
    "add_": lambda x, i: x.add_(i),
}


# Each write and each storage once; in a storage in which nothing but this check refuses the write, if there is one.
@pytest.mark.parametrize(
    "write, layout",
    zip(
        META,
        ["dense", "permuted", "coo", "dense", "csr", "hybrid", "csc", "packed", "bsr", "bsc", "coo"],
        strict=True,
    ),
)
def test_what_lies_on_meta_is_not_written(write: str, layout: str) -> None:
    x = sample(layout)
    before = state(x)
    with pytest.raises(RuntimeError, match=r"meta"):
        META[write](x, torch.tensor([1], device="meta"))
    assert state(x) == before
