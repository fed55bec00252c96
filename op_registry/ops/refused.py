"""Operators that have no meaning on masked tensors, each with the reason, and what to do instead.

Law: refused, whatever the mask. A tensor whose memory is exchanged or made larger has elements of which nobody said
whether they are valid, and one that is stored otherwise than densely has no place for its mask yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from op_registry.authoring import REFUSED, Dense, MaskedSemanticsError, masked_rule, refusal, refused

aten = torch.ops.aten

# -------------------------------------------------------------------------------------------- memory that is exchanged

UNSAID = "it shows memory of which nothing says whether it is valid"
NEW_SIZE = (
    "x.reshape(size) keeps the elements, slicing says which of them go, and torch.nn.functional.pad(x, widths) says "
    "what is new"
)


@masked_rule(aten.resize_.default, category=REFUSED, reason=UNSAID)
def resize_(self: Dense, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Dense:
    return kept_as_it_is(aten.resize_.default, self, size, memory_format)


@masked_rule(aten.resize_as_.default, category=REFUSED, reason=UNSAID)
def resize_as_(self: Dense, the_template: Dense, *, memory_format: torch.memory_format | None = None) -> Dense:
    return kept_as_it_is(aten.resize_as_.default, self, the_template.shape, memory_format)


def kept_as_it_is(op: OpOverload, x: Dense, size: Sequence[int], memory_format: torch.memory_format | None) -> Dense:
    """The record itself, where it has that size already; where it has not, or its strides would change, an error."""
    if tuple(size) == tuple(x.shape) and memory_format is None:
        return x
    asked = f"from {tuple(x.shape)} to {tuple(size)}" if memory_format is None else f"with {memory_format=}"
    raise MaskedSemanticsError(refusal(op, f"{UNSAID} ({asked})", NEW_SIZE))


resize = refused(aten.resize.default, aten.resize_as.default, reason=UNSAID, instead=NEW_SIZE)
set_ = refused(
    *(getattr(aten.set_, name) for name in aten.set_.overloads()),
    *(getattr(aten.set, name) for name in aten.set.overloads() if not name.endswith("out")),
    reason="it would exchange the memory under the mask, or hand on memory without the mask over it",
    instead="Copy values and mask with x.copy_(y), or make a masked tensor of the other memory with "
    "as_masked_tensor(data, mask)",
)

# ---------------------------------------------------------------------------------------------------- other storage

NOT_DENSE = "a masked tensor is stored in strides or in one of the sparse layouts, and in no other way"

_to_sparse = refused(
    aten._to_sparse.default,
    aten._to_sparse.sparse_dim,
    aten._to_sparse_csr.default,
    aten._to_sparse_csc.default,
    aten._to_sparse_bsr.default,
    aten._to_sparse_bsc.default,
    reason="it makes one of torch's own sparse tensors, in which what is absent is zero",
    instead="Call x.to_sparse(), or x.to_layout(layout), which stores what is valid",
)
_to_other_storage = refused(
    aten.to_mkldnn.default,
    aten.quantize_per_tensor.default,
    aten.quantize_per_tensor.tensor_qparams,
    aten.quantize_per_tensor.tensors,
    aten.quantize_per_tensor_dynamic.default,
    aten.quantize_per_channel.default,
    reason=NOT_DENSE,
    instead="Fill it first, x.to_tensor(0), and keep x.get_mask() beside it",
)
_OF_TORCH = "it works on a sparse tensor of torch's own, in which what is absent is zero"
_with_sparse = refused(
    aten._sparse_mm_reduce_impl.default,
    aten._sparse_addmm.default,
    aten.sparse_mask.default,
    reason=_OF_TORCH,
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
    aten.is_coalesced.default,
    aten.coalesce.default,
    aten.sparse_dim.default,
    aten.dense_dim.default,
    aten._nnz.default,
    aten._dimI.default,
    aten._dimV.default,
    reason="it asks for a part of one of torch's own sparse tensors, and the layout of a masked tensor is strided "
    "whatever it is stored in (x.storage_layout, x.nnz)",
    instead="Call it on x.to_torch_sparse()",
)
