"""Collation of masked tensors by `torch.utils.data.DataLoader`: they are stacked, like any tensors.

In a worker process, torch's collate function allocates the batch in shared memory, as a tensor of the first example's
type, and stacks into it. A masked tensor cannot be built on such a storage, and a plain one would lose the masks. So a
batch with a masked tensor is stacked without preallocation; it moves to shared memory when it is sent, as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.replacements.replacing import replace_entry
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.torch_internals import default_collate_fn_map


def has_masked_example(batch: Sequence[Tensor], **options: Any) -> bool:
    """Whether an example of a batch is masked."""
    return any(isinstance(example, MaskedTensor) for example in batch)


def stacked(original: Callable[..., Any], batch: Sequence[Tensor], **options: Any) -> Tensor:
    """The batch, in memory of its own."""
    return torch.stack(list(batch), 0)


def install() -> None:
    """Called once, when the package is imported."""
    what = "torch.utils.data._utils.collate.default_collate_fn_map[torch.Tensor]"
    replace_entry(default_collate_fn_map, Tensor, what, stacked, has_masked_example)
