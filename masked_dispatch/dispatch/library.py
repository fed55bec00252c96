"""The library's own differentiable operators, which construct, fill, convert and take apart masked tensors.

They are torch.library operators, not Python functions, so that each becomes one node in a graph of torch.compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from masked_dispatch.autograd.dense import masked_gradient, plain_gradient, wrap_record
from masked_dispatch.autograd.reached import join, joined
from masked_dispatch.autograd.sparse import in_stored_order, unwrap_any, values_at, wrap_any, wrap_sparse_record
from masked_dispatch.compiler_internals import never_compiled, prepare_for_tracing
from masked_dispatch.dispatch.kernel_table import kernel_table
from masked_dispatch.dispatch.run_rule import accumulate_sparse
from masked_dispatch.dispatch.selections import (
    align,
    ends,
    keep_top,
    keep_where,
    order_of_samples,
    placed_like,
    places_of_groups,
    positions,
)
from masked_dispatch.interop.torch_sparse import stored_indices, stored_values, to_torch_sparse
from masked_dispatch.policies import check_allowed
from masked_dispatch.tensor.checks import check_mask, check_mask_source, stored_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.tensor.traced import check_stored_sparsely, code_version, transformed_elsewhere, wrappers
from masked_dispatch.torch_internals import overload_named
from op_registry import MaskedSemanticsError
from op_registry.extents.factors import there, with_extent
from op_registry.extents.found import as_stated, in_layout, padded, padded_along, stores_whole_rows
from op_registry.extents.writes import extent_under, under, united
from op_registry.records.arguments import Number, on_signed_bits, shape_alone, wrap_dims
from op_registry.records.dense import Dense
from op_registry.records.fill import fill_where_invalid, memory_exposed
from op_registry.records.sums import accumulate
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_bool
from op_registry.sparse.convert import to_layout, with_sparse_dims
from op_registry.sparse.layout import COO, DENSE, layout_named
from op_registry.sparse.on_values import align_to
from op_registry.sparse.permuted import (
    AnyRecord,
    Permuted,
    base_shape_of,
    in_visible_order,
    sparse_dims_first,
    to_dense,
)
from op_registry.sparse.record import NotLowered, Pattern, Sparse

_library = Library("masked_dispatch", "DEF")


def _as_masked_tensor(data: Tensor, mask: Tensor | None, version: str) -> MaskedTensor:
    _check_graph(data, version)
    return around(data, mask)


def around(data: Tensor, mask: Tensor | None) -> MaskedTensor:
    """A masked tensor that shares memory with plain `data`, with a copy of a checked mask; differentiable."""
    return wrap_record(Dense(data, None if mask is None else stored_validity(data, mask)))


def _check_graph(data: Tensor, version: str) -> None:
    # Every graph that makes a masked tensor holds `version` as a constant, which keeps torch's caches from returning a
    # graph compiled under other rules or by another version of this library.
    _check_exported(version)
    if being_traced(data):
        prepare_for_tracing()


def _check_exported(version: str) -> None:
    """Refuse a program that torch.export recorded under other rules, by the version that it holds.

    This does not check graphs of torch.compile: they guard on the version, and scopes may have ended by the time they
    compile.
    """
    if version != code_version() and (torch.compiler.is_exporting() or not torch.compiler.is_compiling()):
        raise MaskedSemanticsError(
            "this exported program makes masked tensors by operators of masked_dispatch, and was exported by another "
            "version of the library, or under other rules (windows, an overlay of the registry), so its operators may "
            "mean something else now. Export it again; a program of masked_dispatch.export, or one after "
            "run_decompositions(), does not depend on the library."
        )


def _masked_tensor(data: Tensor, mask: Tensor | None, version: str) -> MaskedTensor:
    _check_exported(version)
    return new_leaf(data, mask)


def new_leaf(data: Tensor, mask: Tensor | None) -> MaskedTensor:
    """A masked tensor of copies of detached data, plain or masked, and of a checked mask."""
    record = _record(data)
    if mask is None:
        return wrap_record(Dense(record.data.clone(), record.validity, record.extent))
    return wrap_record(under(record, record.data.clone(), stored_validity(record.data, mask)))


def _record(tensor: Tensor) -> Dense:
    record = unwrap_any(tensor)
    return record if isinstance(record, Dense) else to_dense(record)


def _to_tensor(tensor: Tensor, fill: Number | Tensor) -> Tensor:
    record = _record(tensor)
    if isinstance(fill, Tensor):
        fill = fill.to(record.dtype)
    filled = fill_where_invalid(record.data, record.validity, fill)
    if record.validity is None:
        return filled.clone()  # as for partly invalid tensors: result and input do not share memory
    return filled.to(record.dtype) if filled.dtype is not record.dtype else filled


def _for_every_element(operation: str, tensor: Tensor) -> Dense:
    """The record for an operation that returns every element in a plain tensor; the policy decides if it is sparse."""
    _check_every_element(operation, tensor)
    return _record(tensor)


def _check_every_element(operation: str, tensor: Tensor) -> None:
    if isinstance(tensor, SparseMaskedTensor):
        check_allowed(
            operation,
            [tensor],
            "it gives a plain tensor of every element, stored or not",
            "Of what is stored, x.to_sparse().indices() are the positions, x.values() the values, x.count() the number "
            "of what is valid. ",
        )


def _get_data(tensor: Tensor) -> Tensor:
    data = _for_every_element("get_data", tensor).data
    memory_exposed()
    return data.view_as(data)


def _get_mask(tensor: Tensor) -> Tensor:
    record = _for_every_element("get_mask", tensor)
    validity = record.full_validity
    if validity is None:
        return torch.ones_like(record.data, dtype=torch.bool, memory_format=torch.contiguous_format)
    if being_traced(validity):
        return as_bool(validity)
    return validity.to(torch.bool)


def _compressed(tensor: Tensor) -> Tensor:
    record = in_stored_order("compressed", tensor, unwrap_any(tensor))
    if isinstance(record, Sparse):  # COO lists elements in order of position
        record = to_layout(with_sparse_dims(record, record.ndim), COO).flat
    validity = record.full_validity
    if validity is None:
        return record.data.clone(memory_format=torch.contiguous_format).view(-1)
    mask = as_bool(validity)
    return on_signed_bits(lambda bits: torch.masked_select(bits, mask), record.data)


def _count(tensor: Tensor, dim: list[int] | None, keepdim: bool) -> Tensor:
    if isinstance(tensor, SparseMaskedTensor):
        dims, stored = wrap_dims(dim, tensor.ndim), tensor.record
        return stored.count(dims, keepdim)
    record = _record(tensor)
    count = record.count(dim, keepdim)
    shape = shape_alone(record.shape).sum(dim, keepdim).shape
    if isinstance(count, Tensor):
        # The count broadcasts like the validity: one count may serve several slices.
        return count.to(torch.int64, copy=True).expand(shape).contiguous()
    return torch.full(shape, count, dtype=torch.int64, device=record.device)


def _padded(tensor: Tensor, extent: Tensor | None, dims: list[int] | None, samples: int = 0) -> MaskedTensor:
    record = unwrap_any(tensor)
    if isinstance(tensor, SparseMaskedTensor) and extent is None and not stores_whole_rows(record):
        check_allowed("padded", [tensor], "what is there is read off the mask of every element")
    found = padded(record, None if extent is None else stored_validity(tensor, extent), dims, samples)
    found = in_layout(found, found.pattern.layout, None, None) if isinstance(found, Sparse) else found
    return joined(tensor, record, wrap_any(found), moving="all")


def _padded_as(tensor: Tensor, extent: Tensor | None, known: str) -> MaskedTensor:
    record = _record(tensor)
    return joined(tensor, record, wrap_record(as_stated(record, extent, known)))


def _padded_along(tensor: Tensor, there: Tensor, known: str, version: str) -> MaskedTensor:
    _check_graph(there, version)  # (plain, and a value of the graph where the tensor is)
    there = stored_validity(tensor, check_mask(tensor, there))
    record = unwrap_any(tensor)
    return joined(tensor, record, wrap_any(padded_along(record, there, known)))


def _without_extent(tensor: Tensor) -> MaskedTensor:
    record = unwrap_any(tensor)
    return joined(tensor, record, wrap_any(with_extent(record, None)))


def _extent(tensor: Tensor) -> Tensor:
    _check_every_element("extent", tensor)
    return there(unwrap_any(tensor)).clone()


def _own_extent(tensor: Tensor) -> list[Tensor]:
    """The extent as a list, which is empty for a tensor without one, or whose extent is its mask."""
    record = _record(tensor)
    extent = record.extent
    return [] if extent is None or extent.is_mask or not extent.factors else [there(record).clone()]


def _mask_with(tensor: Tensor, mask: Tensor) -> MaskedTensor:
    check_mask(tensor, mask)
    return _masked_with(tensor, mask)


def _masked_with(tensor: Tensor, mask: Tensor, other: AnyRecord | None = None) -> MaskedTensor:
    record = unwrap_any(tensor)
    if isinstance(record, Dense):
        masked = under(record, record.data.clone(), stored_validity(record.data, mask), other)
        return joined(tensor, record, wrap_record(masked))
    if isinstance(record, Permuted):
        stored: AnyRecord = record.like(_masked_by(record.base, record.to_base(mask.expand(record.shape))))
    else:
        stored = _masked_by(record, mask)
    return joined(tensor, record, wrap_any(with_extent(stored, extent_under(record, other))))


def _masked_by(record: Sparse, mask: Tensor) -> Sparse:
    # Read the mask before copying: expanded to the shape of a sparse tensor, it may exceed the memory.
    validity = align_to(Dense(mask), record).data.to(torch.int8, copy=True)
    values = record.values.masked_by(validity.expand(record.values.shape))
    return record.like(values.like(values.data.clone()))


def _mask_like(tensor: Tensor, other: Tensor) -> Tensor:
    check_mask_source(tensor, other)
    source, record = unwrap_any(other), unwrap_any(tensor)
    if isinstance(source, Sparse) and source.shape == tensor.shape and not isinstance(record, Permuted):
        aligned = _values_like(record, source, tensor)
        values = aligned.map(lambda t: t.expand(source.values.shape)).masked_by(source.values.validity)
        masked = with_extent(source.like(values.like(values.data.clone())), extent_under(record, source))
        return joined(tensor, record, wrap_any(masked), moving="some")
    if not isinstance(source, Dense) or isinstance(tensor, SparseMaskedTensor):
        return _masked_with(tensor, _get_mask(other), source)
    dense = _record(tensor)
    return joined(tensor, dense, wrap_record(under(dense, dense.data.clone(), source.validity, source)))


def _values_like(record: Dense | Sparse, source: Sparse, tensor: Tensor) -> Dense:
    """The elements of `record` at the coordinates of `source`; uses dense storage if other dimensions are sparse."""
    try:
        return align_to(record, source)
    except NotLowered as reason:
        assert isinstance(tensor, SparseMaskedTensor)
        check_allowed("mask_like", [tensor], str(reason))
        return align_to(to_dense(record), source)


def _accumulate(tensors: list[Tensor]) -> Tensor:
    if any(isinstance(tensor, SparseMaskedTensor) for tensor in tensors):
        return accumulate_sparse(tensors)
    records = [_record(tensor) for tensor in tensors]
    total = united(accumulate(records), records)
    if not any(isinstance(tensor, MaskedTensor) for tensor in tensors):
        return total.data
    wrapped = wrap_record(total)
    join(None, None, (tensors, {}), (records, {}), wrapped)
    return wrapped


def _data_of(tensor: Tensor) -> Tensor:
    data = _record(tensor).data
    if type(data) in wrappers:
        raise MaskedSemanticsError(transformed_elsewhere(tensor))
    return data


def _validity_of(tensor: Tensor) -> Tensor:
    validity = _record(tensor).validity
    assert validity is not None
    return validity


def _from_parts(data: Tensor, validity: Tensor | None) -> MaskedTensor:
    return wrap_record(Dense(data, validity))


def _stored_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors of a sparsely stored tensor: values, index tensors, and the validity if there is one."""
    record = unwrap_any(tensor)
    base = record.base if isinstance(record, Permuted) else record
    assert isinstance(base, Sparse)
    validity = base.values.full_validity
    return [base.values.data, *base.pattern.pieces, *([] if validity is None else [validity])]


# The sparsity of a stored tensor, as arguments in a schema.
SPARSITY = "Tensor[] pieces, str layout, SymInt[] sizes, int[]? block, int[]? order"


def _stored_result(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Let `function` return its result in parts, as graphs of torch.export hold it (tensor/conversions.py)."""

    def stored(*args: Any) -> list[Tensor]:
        return _stored_of(function(*args))

    return stored


def _from_stored(values: Tensor, validity: Tensor | None, *sparsity: Any) -> Tensor:
    """The inverse of `_stored_of`; `sparsity` holds the arguments of `SPARSITY`."""
    pattern, order = _pattern(*sparsity)
    stored = Sparse(Dense(values, validity), pattern)
    return wrap_sparse_record(stored if order is None else Permuted(stored, order))


def _values_at(tensor: Tensor, *sparsity: Any) -> Tensor:
    """The elements of `tensor`, in any layout, at a pattern's coordinates in the pattern's order; 0 where invalid."""
    pattern, order = _pattern(*sparsity)
    known = dict(enumerate(pattern.sizes))
    base_shape = tensor.shape if order is None else base_shape_of(tensor.shape, order, known)
    shape = (pattern.pieces[-1].shape[-1], *(pattern.block or ()), *base_shape[pattern.ndim :])
    like = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(shape)
    return values_at(tensor, Sparse(Dense(like, None), pattern), order)


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
        return wrap_record(Dense(record.data.detach(), record.validity, record.extent))
    base = record.base if isinstance(record, Permuted) else record
    values = base.like(Dense(base.values.data.detach(), base.values.validity))
    detached = record.like(values) if isinstance(record, Permuted) else values
    return wrap_sparse_record(with_extent(detached, record.extent))


def _to_layout(tensor: Tensor, layout: str, sparse_dim: int | None, block: list[int] | None) -> Tensor:
    record = given = unwrap_any(tensor)
    extent = record.extent
    if layout == DENSE:
        return tensor if isinstance(record, Dense) else joined(tensor, record, wrap_record(to_dense(record)), "all")
    if isinstance(record, Dense):
        check_stored_sparsely(record.data)  # before anything is counted
    wanted = layout_named(layout)
    size = None if block is None else (block[0], block[1])
    if isinstance(record, Permuted):  # layouts need their sparse dimensions first
        with contextlib.suppress(NotLowered):
            record = sparse_dims_first(record)
    if isinstance(record, Permuted):
        if being_traced(record.base.values.data):
            assert isinstance(tensor, SparseMaskedTensor)
            check_allowed("to_layout", [tensor], "its dimensions are permuted, and a graph is being traced")
            record = to_dense(record)
        else:
            record = in_visible_order(record)
            sparse_dim = sparse_dim or wanted.default_dims(record.ndim)
    if isinstance(record, Sparse):
        current = record.pattern.ndim
        dims = sparse_dim or (current if wanted.has_room(current) else wanted.default_dims(record.ndim))
        if dims != current and being_traced(record.values.data):
            assert isinstance(tensor, SparseMaskedTensor)
            check_allowed("to_layout", [tensor], "the sparse dimensions change, and a graph is being traced")
            record = to_dense(record)
        else:
            record = with_sparse_dims(record, dims)
    stored = wrap_sparse_record(in_layout(with_extent(record, extent), wanted, sparse_dim, size))
    return joined(tensor, given, stored, moving="all")


def _bytes_of(mask: Tensor) -> Tensor:
    """A bool mask as int8, by a custom operator: compilers load bool into vectors one byte at a time."""
    return mask.view(torch.int8).clone() if mask.stride()[-1:] in ((1,), ()) else mask.to(torch.int8)


def _bytes_of_meta(mask: Tensor) -> Tensor:
    return torch.empty_like(mask, dtype=torch.int8)


def _define(schema: str, function: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    never_compiled(function)
    _library.define(schema)
    _library.impl(name, function, "CompositeImplicitAutograd")
    kernel_table.put(overload_named(f"masked_dispatch::{name}"), function, with_keyset=False)
    # Without a batching rule, vmap would run the operator on one example at a time.
    _library.impl(name, function, "FuncTorchBatched")


def install() -> None:
    """Define the operators; the package calls this once, at import."""
    _define("as_masked_tensor(Tensor data, Tensor? mask, str code_version) -> Tensor", _as_masked_tensor)
    _define("masked_tensor(Tensor data, Tensor? mask, str code_version) -> Tensor", _masked_tensor)
    _define("to_tensor.Scalar(Tensor x, Scalar fill) -> Tensor", _to_tensor)
    _define("to_tensor.Tensor(Tensor x, Tensor fill) -> Tensor", _to_tensor)
    _define("get_data(Tensor x) -> Tensor", _get_data)
    _define("get_mask(Tensor x) -> Tensor", _get_mask)
    _define("compressed(Tensor x) -> Tensor", _compressed)
    _define("count(Tensor x, int[]? dim, bool keepdim) -> Tensor", _count)
    _library.define("bytes_of(Tensor mask) -> Tensor")
    _library.impl("bytes_of", _bytes_of, "CompositeExplicitAutograd")
    _library.impl("bytes_of", _bytes_of_meta, "Meta")
    # The transforms of masked_dispatch.functional use these to take masked tensors apart and rebuild them.
    _define("data_of(Tensor x) -> Tensor", _data_of)
    _define("validity_of(Tensor x) -> Tensor", _validity_of)
    _define("from_parts(Tensor data, Tensor? validity) -> Tensor", _from_parts)
    _define("stored_of(Tensor x) -> Tensor[]", _stored_of)
    _define(f"from_stored(Tensor values, Tensor? validity, {SPARSITY}) -> Tensor", _from_stored)
    _define(f"values_at(Tensor x, {SPARSITY}) -> Tensor", _values_at)
    _define("detach(Tensor x) -> Tensor", _detach)
    # The backward of `Wrap` and `Unwrap`, for compiled autograd.
    _define("plain_gradient(Tensor grad, Tensor? validity) -> Tensor", plain_gradient)
    _define("masked_gradient(Tensor grad, Tensor? validity) -> Tensor", masked_gradient)
    for name, taken, function in (
        ("to_layout", "Tensor x, str layout, int? sparse_dim, int[]? block", _to_layout),
        ("keep_where", "Tensor x, Tensor condition, str layout, int? sparse_dim, int[]? block", keep_where),
        ("keep_top", "Tensor x, int k, int dim, bool largest, str layout, int[]? block", keep_top),
    ):
        _define(f"{name}({taken}) -> Tensor", function)
        _define(f"{name}_pieces({taken}) -> Tensor[]", _stored_result(function))
    _define(
        "to_torch_sparse(Tensor x, Scalar? fill, str? layout, int? sparse_dim, int[]? blocksize) -> Tensor",
        to_torch_sparse,
    )
    _define("stored_values(Tensor x, Scalar? fill) -> Tensor", stored_values)
    _define("stored_indices(Tensor x, str name) -> Tensor", stored_indices)
    _define("padded(Tensor x, Tensor? extent, int[]? dims, int samples=0) -> Tensor", _padded)
    _define("ends(Tensor x, int dim, SymInt k, bool last) -> Tensor", ends)
    _define("align(Tensor x, int dim) -> Tensor", align)
    _define("positions(Tensor x, int dim) -> Tensor", positions)
    _define("placed_like(Tensor x, Tensor other) -> Tensor", placed_like)
    _define("own_order(Tensor x, int dim) -> Tensor[]", order_of_samples)
    _define("places_of_groups(Tensor x, int dim, Tensor numbers, SymInt groups) -> Tensor", places_of_groups)
    _define("padded_as(Tensor x, Tensor? extent, str known) -> Tensor", _padded_as)
    _define("padded_along(Tensor x, Tensor there, str known, str code_version) -> Tensor", _padded_along)
    _define("without_extent(Tensor x) -> Tensor", _without_extent)
    _define("extent(Tensor x) -> Tensor", _extent)
    _define("own_extent(Tensor x) -> Tensor[]", _own_extent)
    _define("mask_with(Tensor x, Tensor mask) -> Tensor", _mask_with)
    _define("mask_like(Tensor x, Tensor other) -> Tensor", _mask_like)
    _define("accumulate(Tensor[] tensors) -> Tensor", _accumulate)
