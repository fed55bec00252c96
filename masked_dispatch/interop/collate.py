"""Collate masked tensors in `torch.utils.data.DataLoader` by stacking them, like plain tensors.

In a worker process, torch's collate function allocates the batch in shared memory, as a tensor of the first example's
type, and stacks into it. A masked tensor cannot use such a storage, and a plain tensor would lose the masks. This
module therefore stacks a batch with a masked tensor without preallocation; sending moves it to shared memory as usual.
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
    """Return whether an example of a batch is masked."""
    return any(isinstance(example, MaskedTensor) for example in batch)


def stacked(original: Callable[..., Any], batch: Sequence[Tensor], **options: Any) -> Tensor:
    """Stack the batch in new memory."""
    return torch.stack(list(batch), 0)


def install() -> None:
    """The package calls this once, on import."""
    what = "torch.utils.data._utils.collate.default_collate_fn_map[torch.Tensor]"
    replace_entry(default_collate_fn_map, Tensor, what, stacked, has_masked_example)
