"""Batches of masked tensors as `torch.utils.data.DataLoader` makes them: stacked, like any tensors.

torch's own collation in a worker process makes the result first, in shared memory, as a tensor of the first example's
kind, and stacks into it. A masked tensor cannot be made of a storage, and one that is plain would lose the masks of the
others. So a batch of which something is masked is stacked without that: what goes to the other process is moved to
shared memory there, as always.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.torch_internals import default_collate_fn_map


def install() -> None:
    """Teach `default_collate`: called once, when the package is imported."""
    plain = default_collate_fn_map[torch.Tensor]

    @functools.wraps(plain)
    def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> Any:
        if any(isinstance(example, MaskedTensor) for example in batch):
            return torch.stack(list(batch), 0)
        return plain(batch, collate_fn_map=collate_fn_map)

    default_collate_fn_map[torch.Tensor] = collate_tensors
