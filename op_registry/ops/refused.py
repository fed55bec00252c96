"""Operators that have no meaning on masked tensors, each with the reason and an alternative.

Law: refused, whatever the mask. Replacing or growing a tensor's memory exposes elements of unknown validity, and
quantized, MKL-DNN and torch.sparse tensors have no place for a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from op_registry.authoring import REFUSED, Dense, MaskedSemanticsError, masked_rule, refusal, refused

aten = torch.ops.aten

# ----------------------------------------------------------------------------------------- replaced or resized memory

UNKNOWN_VALIDITY = "it exposes memory of unknown validity"
NEW_SIZE = (
    "Use x.reshape(size) to keep the elements, slicing to drop some, and torch.nn.functional.pad(x, widths) to add some"
)


@masked_rule(aten.resize_.default, category=REFUSED, reason=UNKNOWN_VALIDITY)
def resize_(self: Dense, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Dense:
    """Refused if there are elements and the size would change. What has no element gets memory with nothing valid."""
    return unchanged_or_refused(aten.resize_.default, self, size, memory_format)


@masked_rule(aten.resize_as_.default, category=REFUSED, reason=UNKNOWN_VALIDITY)
def resize_as_(self: Dense, the_template: Dense, *, memory_format: torch.memory_format | None = None) -> Dense:
    """As resize_ to the size of the template."""
    return unchanged_or_refused(aten.resize_as_.default, self, the_template.shape, memory_format)


def unchanged_or_refused(
    op: OpOverload, x: Dense, size: Sequence[int], memory_format: torch.memory_format | None
) -> Dense:
    """The record itself if it already has that size and its strides stay; else the refusal."""
    if tuple(size) == tuple(x.shape) and memory_format is None:
        return x
    change = f"from {tuple(x.shape)} to {tuple(size)}" if memory_format is None else f"with {memory_format=}"
    raise MaskedSemanticsError(refusal(op, f"{UNKNOWN_VALIDITY} ({change})", NEW_SIZE))


resize = refused(aten.resize.default, aten.resize_as.default, reason=UNKNOWN_VALIDITY, instead=NEW_SIZE)
set_ = refused(
    *(getattr(aten.set_, name) for name in aten.set_.overloads()),
    *(getattr(aten.set, name) for name in aten.set.overloads() if not name.endswith("out")),
    reason="it would replace the memory under the mask, or share memory without its mask",
    instead="Copy values and mask with x.copy_(y), or wrap the other memory with as_masked_tensor(data, mask)",
)

# ----------------------------------------------------------------------------------------------------- other storages

STORAGES = "a masked tensor is stored as strided data or in one of its sparse layouts only"

_to_sparse = refused(
    aten._to_sparse.default,
    aten._to_sparse.sparse_dim,
    aten._to_sparse_csr.default,
    aten._to_sparse_csc.default,
    aten._to_sparse_bsr.default,
    aten._to_sparse_bsc.default,
    reason="it makes a torch.sparse tensor, in which unspecified elements are zero",
    instead="Call x.to_sparse(), or x.to_layout(layout), which stores the valid elements",
)
_to_other_storage = refused(
    aten.to_mkldnn.default,
    aten.quantize_per_tensor.default,
    aten.quantize_per_tensor.tensor_qparams,
    aten.quantize_per_tensor.tensors,
    aten.quantize_per_tensor_dynamic.default,
    aten.quantize_per_channel.default,
    reason=STORAGES,
    instead="Fill it first, x.to_tensor(0), and keep x.get_mask() separately",
)
_TORCH_SPARSE = "it works on a torch.sparse tensor, in which unspecified elements are zero"
_with_sparse = refused(
    aten._sparse_mm_reduce_impl.default,
    aten.sparse_mask.default,
    reason=_TORCH_SPARSE,
    instead="Fill the masked operands first, x.to_tensor(0), or work with dense tensors throughout",
)
_part_of_sparse = refused(
    aten.indices.default,
    aten._indices.default,
    aten.values.default,
    aten._values.default,
    aten.crow_indices.default,
    aten.col_indices.default,
    aten.ccol_indices.default,
    aten.row_indices.default,
    aten.sparse_dim.default,
    aten.dense_dim.default,
    aten._nnz.default,
    aten._dimI.default,
    aten._dimV.default,
    reason="it reads a part of a torch.sparse tensor, and the layout of a masked tensor is strided in any storage "
    "(see x.storage_layout, x.nnz)",
    instead="Call the method of that name (x.values(), x.indices(), x.crow_indices() ...), or x.to_torch_sparse()",
)

_nothing_to_coalesce = refused(
    aten.is_coalesced.default,
    aten.coalesce.default,
    reason="sparse storage lists each element once, so there is nothing to coalesce",
    instead="Call the methods, x.is_coalesced() and x.coalesce(), or go on with x.to_torch_sparse()",
)

# -------------------------------------------------------------------------------------------------- parts of operators

_part_of_batch_norm = refused(
    aten._batch_norm_impl_index.default,
    reason="it is a step of batch_norm that chooses a library, and may leave buffers that it returns unwritten",
    instead="Call torch.batch_norm(...), or torch.native_batch_norm(...) for the statistics",
)
