"""The library's own operators: how a masked tensor is made, filled and asked for its parts, differentiably.

They are torch.library operators, not Python functions, so that torch.compile takes them into its graphs whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from masked_dispatch.autograd.dense import masked_gradient, plain_gradient, wrap_record
from masked_dispatch.autograd.sparse import unwrap_any, values_at, wrap_sparse_record
from masked_dispatch.densify_policy import check_allowed
from masked_dispatch.dispatch.sparse import accumulate_sparse
from masked_dispatch.dispatch.sparsify import keep_top, keep_where
from masked_dispatch.interop.torch_sparse import to_torch_sparse
from masked_dispatch.tensor.checks import check_mask, check_mask_source, mark_as_external, stored_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import never_compiled, prepare_for_tracing
from op_registry.records.accumulate import accumulate
from op_registry.records.dense import Dense, fill_where_invalid
from op_registry.records.dims import wrap_dims
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_bool, intersect
from op_registry.sparse.elementwise import align_to
from op_registry.sparse.layout import DENSE, layout_named
from op_registry.sparse.pattern import Pattern
from op_registry.sparse.permuted import Permuted, to_dense
from op_registry.sparse.record import NotLowered, Sparse, from_dense, to_layout, with_sparse_dims

_library = Library("masked_dispatch", "DEF")


def _as_masked_tensor(data: Tensor, mask: Tensor | None, book: str) -> MaskedTensor:
    # `book` is only there to be a constant of every graph that makes a masked tensor: a graph that was compiled
    # under other rules, or by another version of this library, is not found again in torch's caches.
    del book
    if being_traced(data):
        prepare_for_tracing()
    if mask is None:
        return wrap_record(Dense(data, None))
    validity, shared = stored_validity(data, mask)
    tensor = wrap_record(Dense(data, validity))
    if shared:
        mark_as_external(tensor)
    return tensor


def _masked_tensor(data: Tensor, mask: Tensor | None, book: str) -> MaskedTensor:
    del book
    record = _record(data)
    if mask is not None:
        validity, shared = stored_validity(record.data, mask)
        record = record.masked_by(validity.clone() if shared else validity)
    return wrap_record(Dense(record.data.clone(), record.validity))


def _record(tensor: Tensor) -> Dense:
    record = unwrap_any(tensor)
    return record if isinstance(record, Dense) else to_dense(record)


def _to_tensor(tensor: Tensor, fill: Any) -> Tensor:
    record = _record(tensor)
    if isinstance(fill, Tensor):
        fill = fill.to(record.dtype)
    filled = fill_where_invalid(record.data, record.validity, fill)
    return filled.to(record.dtype) if filled.dtype is not record.dtype else filled


def _get_data(tensor: Tensor) -> Tensor:
    data = _record(tensor).data
    return data.view_as(data)


def _get_mask(tensor: Tensor) -> Tensor:
    record = _record(tensor)
    validity = record.full_validity
    if validity is None:
        return torch.ones_like(record.data, dtype=torch.bool, memory_format=torch.contiguous_format)
    if being_traced(validity):
        return as_bool(validity)
    return validity.to(torch.bool)


def _count(tensor: Tensor, dim: list[int] | None, keepdim: bool) -> Tensor:
    if isinstance(tensor, SparseMaskedTensor):
        dims, stored = wrap_dims(dim, tensor.ndim), tensor.record
        if isinstance(stored, Sparse):
            return stored.count(dims, keepdim)
        number = stored.base.count([stored.order[d] for d in dims], keepdim=True).permute(stored.order)
        return number if keepdim or not dims else number.squeeze(dims)
    record = _record(tensor)
    count = record.count(dim, keepdim)
    shape = torch.empty(record.shape, device="meta").sum(dim, keepdim).shape
    if isinstance(count, Tensor):
        # One number may stand for several, as one validity does.
        return count.to(torch.int64, copy=True).expand(shape).contiguous()
    return torch.full(shape, count, dtype=torch.int64, device=record.device)


def _mask_with(tensor: Tensor, mask: Tensor) -> MaskedTensor:
    check_mask(tensor, mask)
    sparse = unwrap_any(tensor)
    if isinstance(sparse, Permuted):
        return wrap_sparse_record(sparse.like(_kept(sparse.base, mask.expand(sparse.shape).permute(sparse.back))))
    if isinstance(sparse, Sparse):
        return wrap_sparse_record(_kept(sparse, mask))
    record = _record(tensor)
    validity, _ = stored_validity(record.data, mask)
    return wrap_record(Dense(record.data, intersect(record.validity, validity)))


def _kept(record: Sparse, mask: Tensor) -> Sparse:
    there = align_to(Dense(mask.to(torch.int8)), record)
    return record.like(record.values.masked_by(there.data.expand(record.values.shape)))


def _mask_like(tensor: Tensor, other: Tensor) -> Tensor:
    check_mask_source(tensor, other)
    lead, record = unwrap_any(other), unwrap_any(tensor)
    if isinstance(lead, Sparse) and lead.shape == tensor.shape and not isinstance(record, Permuted):
        found = _values_like(record, lead, tensor)
        values = found.map(lambda t: t.expand(lead.values.shape)).masked_by(lead.values.validity)
        return wrap_sparse_record(lead.like(values))
    if not isinstance(lead, Dense) or isinstance(tensor, SparseMaskedTensor):
        return _mask_with(tensor, _get_mask(other))
    dense = _record(tensor)
    return wrap_record(Dense(dense.data, intersect(dense.validity, lead.validity)))


def _values_like(record: Dense | Sparse, lead: Sparse, tensor: Tensor) -> Dense:
    """What a record has where `lead` stores values; through dense storage where they are sparse in other dimensions."""
    try:
        return align_to(record, lead)
    except NotLowered as reason:
        assert isinstance(tensor, SparseMaskedTensor)
        check_allowed("mask_like", [tensor], str(reason))
        return align_to(to_dense(record), lead)


def _accumulate(tensors: list[Tensor]) -> Tensor:
    if any(isinstance(tensor, SparseMaskedTensor) for tensor in tensors):
        return accumulate_sparse(tensors)
    total = accumulate([_record(tensor) for tensor in tensors])
    return wrap_record(total) if any(isinstance(tensor, MaskedTensor) for tensor in tensors) else total.data


def _data_of(tensor: Tensor) -> Tensor:
    return _record(tensor).data


def _validity_of(tensor: Tensor) -> Tensor:
    validity = _record(tensor).validity
    assert validity is not None
    return validity


def _from_parts(data: Tensor, validity: Tensor | None) -> MaskedTensor:
    return wrap_record(Dense(data, validity))


def _stored_of(tensor: Tensor) -> list[Tensor]:
    """What a sparsely stored tensor is made of: values, index tensors, and a validity where there is one."""
    record = unwrap_any(tensor)
    base = record.base if isinstance(record, Permuted) else record
    assert isinstance(base, Sparse)
    validity = base.values.full_validity
    return [base.values.data, *base.pattern.pieces, *([] if validity is None else [validity])]


# Where a sparsely stored tensor has its values, in a schema's words.
PLACES = "Tensor[] pieces, str layout, int[] sizes, int[]? block, int[]? order"


def _from_stored(values: Tensor, validity: Tensor | None, *places: Any) -> Tensor:
    """The inverse of `_stored_of`; `places` as `PLACES` has them."""
    pattern, order = _pattern(*places)
    stored = Sparse(Dense(values, validity), pattern)
    return wrap_sparse_record(stored if order is None else Permuted(stored, order))


def _values_in_places(given: Tensor, *places: Any) -> Tensor:
    """What `given`, stored anyhow, has in the places of a pattern, as that lists them: 0 where it is invalid."""
    pattern, order = _pattern(*places)
    seen = given.shape if order is None else [given.shape[order.index(d)] for d in range(len(order))]
    shape = (pattern.pieces[-1].shape[-1], *(pattern.block or ()), *seen[pattern.ndim :])
    like = torch.empty((), dtype=given.dtype, device=given.device).expand(shape)
    return values_at(given, Sparse(Dense(like, None), pattern), order)


def _pattern(
    pieces: list[Tensor], layout: str, sizes: list[int], block: list[int] | None, order: list[int] | None
) -> tuple[Pattern, tuple[int, ...] | None]:
    pattern = Pattern(
        layout_named(layout), tuple(sizes), tuple(pieces), None if block is None else (block[0], block[1])
    )
    return pattern, None if order is None else tuple(order)


def _detach(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, MaskedTensor):
        return tensor.detach()
    if isinstance(tensor, SparseMaskedTensor) and not tensor._carries_transform:
        return tensor.detached()
    record = unwrap_any(tensor)
    if isinstance(record, Dense):
        return wrap_record(Dense(record.data.detach(), record.validity))
    base = record.base if isinstance(record, Permuted) else record
    values = base.like(Dense(base.values.data.detach(), base.values.validity))
    return wrap_sparse_record(record.like(values) if isinstance(record, Permuted) else values)


def _to_layout(tensor: Tensor, layout: str, sparse_dim: int | None, block: list[int] | None) -> Tensor:
    record = unwrap_any(tensor)
    if layout == DENSE:
        return tensor if isinstance(record, Dense) else wrap_record(to_dense(record))
    wanted = layout_named(layout)
    size = None if block is None else (block[0], block[1])
    if isinstance(record, Permuted):
        record = to_dense(record)  # a layout has its sparse dimensions in front
    if isinstance(record, Sparse):
        kept = record.pattern.ndim
        dims = sparse_dim or (kept if wanted.has_room(kept) else wanted.default_dims(record.ndim))
        if dims != record.pattern.ndim and being_traced(record.values.data):
            assert isinstance(tensor, SparseMaskedTensor)
            check_allowed("to_layout", [tensor], "others of its dimensions are to be sparse, and a graph is traced")
            record = to_dense(record)
        else:
            record = with_sparse_dims(record, dims)
    if isinstance(record, Dense):
        return wrap_sparse_record(from_dense(record, wanted, sparse_dim, size))
    return wrap_sparse_record(to_layout(record, wanted, size))


def _bytes_of(mask: Tensor) -> Tensor:
    """A bool mask as int8, in an operator of its own: compilers load bool into vectors one byte at a time."""
    return mask.view(torch.int8).clone() if mask.stride()[-1:] in ((1,), ()) else mask.to(torch.int8)


def _bytes_of_meta(mask: Tensor) -> Tensor:
    return torch.empty_like(mask, dtype=torch.int8)


def _define(schema: str, function: Any) -> None:
    name = schema.partition("(")[0]
    never_compiled(function)
    _library.define(schema)
    _library.impl(name, function, "CompositeImplicitAutograd")
    _library.impl(name, function, "PreDispatch")
    # vmap would take an operator without a batching rule apart into single examples.
    _library.impl(name, function, "FuncTorchBatched")


def install() -> None:
    """Define the operators: called once, when the package is imported."""
    _define("as_masked_tensor(Tensor data, Tensor? mask, str book) -> Tensor", _as_masked_tensor)
    _define("masked_tensor(Tensor data, Tensor? mask, str book) -> Tensor", _masked_tensor)
    _define("to_tensor.Scalar(Tensor x, Scalar fill) -> Tensor", _to_tensor)
    _define("to_tensor.Tensor(Tensor x, Tensor fill) -> Tensor", _to_tensor)
    _define("get_data(Tensor x) -> Tensor", _get_data)
    _define("get_mask(Tensor x) -> Tensor", _get_mask)
    _define("count(Tensor x, int[]? dim, bool keepdim) -> Tensor", _count)
    _library.define("bytes_of(Tensor mask) -> Tensor")
    _library.impl("bytes_of", _bytes_of, "CompositeExplicitAutograd")
    _library.impl("bytes_of", _bytes_of_meta, "Meta")
    # How the functorch transforms of masked_dispatch.functional take a masked tensor apart and put it together.
    _define("data_of(Tensor x) -> Tensor", _data_of)
    _define("validity_of(Tensor x) -> Tensor", _validity_of)
    _define("from_parts(Tensor data, Tensor? validity) -> Tensor", _from_parts)
    _define("stored_of(Tensor x) -> Tensor[]", _stored_of)
    _define(f"from_stored(Tensor values, Tensor? validity, {PLACES}) -> Tensor", _from_stored)
    _define(f"values_in_places(Tensor given, {PLACES}) -> Tensor", _values_in_places)
    _define("detach(Tensor x) -> Tensor", _detach)
    # What the backward of `Wrap` and `Unwrap` does, for compiled autograd.
    _define("plain_gradient(Tensor grad, Tensor? validity) -> Tensor", plain_gradient)
    _define("masked_gradient(Tensor grad, Tensor? validity) -> Tensor", masked_gradient)
    _define("to_layout(Tensor x, str layout, int? sparse_dim, int[]? block) -> Tensor", _to_layout)
    _define("keep_where(Tensor x, Tensor condition, str layout, int? sparse_dim, int[]? block) -> Tensor", keep_where)
    _define("keep_top(Tensor x, int k, int dim, bool largest, str layout, int[]? block) -> Tensor", keep_top)
    _define(
        "to_torch_sparse(Tensor x, Scalar? fill, str? layout, int? sparse_dim, int[]? blocksize) -> Tensor",
        to_torch_sparse,
    )
    _define("mask_with(Tensor x, Tensor mask) -> Tensor", _mask_with)
    _define("mask_like(Tensor x, Tensor other) -> Tensor", _mask_like)
    _define("accumulate(Tensor[] tensors) -> Tensor", _accumulate)
