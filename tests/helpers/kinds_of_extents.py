"""Batches of each kind of extent, in each storage, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import masked_dispatch as md
from op_registry.extents.factors import factors_of
from op_registry.extents.found import contradiction

LENGTHS, OTHERS = torch.tensor([3, 1, 2]), torch.tensor([1, 2, 0])
DATA = torch.arange(1.0, 19.0).view(3, 3, 2)
HOLES = torch.arange(18).view(3, 3, 2) % 4 != 1


def there(lengths: Tensor) -> Tensor:
    return (torch.arange(3) < lengths[:, None])[..., None].expand(3, 3, 2)


# Batches of these lengths, by what they know.
FORMS: dict[str, Callable[[Tensor], Any]] = {
    "holes": lambda n: md.masked_tensor(DATA * len(n), HOLES & (n.sum() > 3)),
    "one object": lambda n: md.from_lengths(DATA + n[0], n),
    "two objects": lambda n: md.padded(md.masked_tensor(DATA + n[0], there(n)), there(n)),
    "missing": lambda n: md.padded(md.masked_tensor(DATA + n[0], there(n) & HOLES), there(n)),
    "front": lambda n: md.padded(md.masked_tensor(DATA + n[0], (there(n) & HOLES).flip(1)), there(n).flip(1)),
}
STORED: dict[str, Callable[[Any], Any]] = {
    "dense": lambda x: x,
    "packed": lambda x: x.to_packed(),
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_layout(torch.sparse_csr, sparse_dim=2),
}


def same(found: Any, expected: Any) -> None:
    assert found.storage_layout == expected.storage_layout
    assert not any(contradiction(f.along, f.there) for f in factors_of(found._printed_record))
    md.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=0, atol=0, check_extent=True)
