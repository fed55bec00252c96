"""Collation of masked tensors by `torch.utils.data.DataLoader`: they are stacked, like any tensors.

In a worker process, torch's collate function allocates the batch in shared memory, as a tensor of the first example's
type, and stacks into it. A masked tensor cannot be built on such a storage, and a plain one would lose the masks. So a
batch with a masked tensor is stacked without preallocation; it moves to shared memory when it is sent, as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.torch_internals import default_collate_fn_map

# From the type of an example to the function that collates examples of it.
CollateMap = dict[type | tuple[type, ...], Callable[..., Any]]


def install() -> None:
    """Register the collate function: called once, when the package is imported."""
    torch_collate = default_collate_fn_map[torch.Tensor]

    @functools.wraps(torch_collate)
    def collate_tensors(batch: Sequence[Tensor], *, collate_fn_map: CollateMap | None = None) -> Any:
        if any(isinstance(example, MaskedTensor) for example in batch):
            return torch.stack(list(batch), 0)
        return torch_collate(batch, collate_fn_map=collate_fn_map)

    default_collate_fn_map[torch.Tensor] = collate_tensors
