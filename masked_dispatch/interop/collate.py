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

from masked_dispatch.autograd.sparse import unwrap_any
from masked_dispatch.interop.crossing import knows_padding, without_extent
from masked_dispatch.replacements.replacing import replace_entry
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent
from masked_dispatch.torch_internals import default_collate_fn_map
from op_registry.extents.batches import extent_of_samples


def has_masked_example(batch: Sequence[Tensor], **options: Any) -> bool:
    """Return whether an example of a batch is masked."""
    return any(isinstance(example, MaskedTensor) for example in batch)


def stacked(original: Callable[..., Any], batch: Sequence[Tensor], **options: Any) -> Tensor:
    """Stack the batch in new memory; each example keeps the positions that it has."""
    if not any(map(knows_padding, batch)):
        return torch.stack(list(batch), 0)
    records = [unwrap_any(example) for example in batch]
    batched: Any = torch.stack([without_extent(example) for example in batch], 0)
    return with_extent(batched, extent_of_samples(records, "default_collate"))


def install() -> None:
    """The package calls this once, on import."""
    what = "torch.utils.data._utils.collate.default_collate_fn_map[torch.Tensor]"
    replace_entry(default_collate_fn_map, Tensor, what, stacked, has_masked_example)
