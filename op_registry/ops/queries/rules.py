"""Operators with plain results: a Python value, counts, indices, the distinct values.

Law: only valid elements take part. `equal` and `allclose` require equal masks and compare the valid values. `item()`,
and with it `bool()` and `float()`, raise for an invalid element. Counts (`count_nonzero`, `histc` …) and `nonzero` skip
invalid elements. `unique` returns the distinct valid values, and an inverse that is masked like the input; along a
dimension it compares whole slices, and is refused unless every element is valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    QUERY,
    Along,
    Bound,
    Dense,
    MaskedSemanticsError,
    NotLowered,
    Number,
    Permuted,
    Sparse,
    as_bool,
    as_int8,
    broadcast_to,
    data_of,
    highest,
    intersect,
    known_all_valid,
    lowest,
    masked_rule,
    on_call,
    packet_name,
    raise_error_of_torch,
    ravel,
    reduction,
    run_opaque,
    shape_alone,
    valid_in_all,
)
from op_registry.errors import InvalidValueError
from op_registry.records.arguments import on_signed_bits
from op_registry.records.tracing import has_values
from op_registry.sparse.convert import lookup, sorted_coordinates, to_layout, valid_elements, valid_elements_of
from op_registry.sparse.layout import COO

aten = torch.ops.aten


# Numbers of bins (one, or one for each dimension), or the edges of bins.
Bins = int | Dense | Sequence[int] | Sequence[Dense]

_is_all_true = reduction(aten._is_all_true, identity=True)
_is_any_true = reduction(aten._is_any_true, identity=False)
# The exclusive or of the elements' bits.
hash_tensor = reduction(aten.hash_tensor, identity=0)


@masked_rule(aten.is_same_size, aten._has_same_storage_numel, aten.is_set_to, category=QUERY, takes_op=True)
def is_same_size(op: OpOverload, self: Dense, other: Dense) -> bool:
    """Depends on shapes and storage alone."""
    return bool(op(self.data, other.data))


@masked_rule(aten.is_pinned, category=QUERY)
def is_pinned(self: Dense, device: torch.device | None = None) -> bool:
    """Whether the data lies in pinned memory."""
    return bool(aten.is_pinned(self.data, device))


@masked_rule(aten._local_scalar_dense, category=QUERY)
def _local_scalar_dense(self: Dense) -> Any:
    """The value of the only element, if it is valid."""
    if self.validity is not None and self.data.numel() == 1:
        value = "False" if self.dtype is torch.bool else "0"
        compared = (
            " Python's max(), min() and sorted() ask so for each comparison: x.amax(), x.amin() and x.sort(), of a "
            "list torch.stack(list).amax(), leave out what is invalid."
        )
        message = (
            f"the value of a masked tensor of shape {tuple(self.shape)} and dtype {self.dtype} was asked for as a "
            f"Python value, and it is invalid. Replace an invalid element first, x.to_tensor({value}), or check "
            f"x.get_mask().{compared if self.dtype is torch.bool else ''}"
        )
        if not has_values(self.validity):
            torch._assert_async(as_bool(self.validity).reshape(()), message)  # checked when the graph runs
        elif not bool(as_bool(self.validity)):
            raise InvalidValueError(message)
    return aten._local_scalar_dense(self.data)


# ----------------------------------------------------------------------------------------------------------- equality


def same_mask(a: Dense, b: Dense) -> bool:
    """Whether two records, broadcast to each other, are valid at the same positions."""
    if a.validity is b.validity:
        return True

    def mask_of(x: Dense) -> Tensor:
        v = x.full_validity
        return torch.ones_like(x.data, dtype=torch.bool) if v is None else as_bool(v)

    return bool((mask_of(a) == mask_of(b)).all())


@masked_rule(aten.equal, category=QUERY)
def equal(self: Dense, other: Dense) -> bool:
    """Same shape, same mask, same valid values."""
    return bool(aten.equal(self.filled(0), other.filled(0))) and same_mask(self, other)


@masked_rule(aten.allclose, category=QUERY)
def allclose(self: Dense, other: Dense, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Same mask and valid values that agree to within the tolerances."""
    return bool(aten.allclose(self.filled(0), other.filled(0), rtol, atol, equal_nan)) and same_mask(self, other)


@masked_rule(aten.isin, category=QUERY, takes_op=True)
def isin(
    op: OpOverload,
    elements: Dense | Number,
    test_elements: Dense | Number,
    *,
    assume_unique: bool = False,
    invert: bool = False,
) -> Dense:
    """Whether each element is among the valid `test_elements`; valid where the element is."""
    validity = elements.validity if isinstance(elements, Dense) else None
    options = {"assume_unique": assume_unique, "invert": invert}
    if not isinstance(test_elements, Dense) or test_elements.validity is None or test_elements.data.numel() == 0:
        return Dense(op(data_of(elements), data_of(test_elements), **options), validity)
    # Invalid test elements become a valid one: repeating that changes nothing, except that elements are not unique.
    filled = test_elements.filled(test_elements.filled(lowest(test_elements.dtype)).amax())
    is_in = op(data_of(elements), filled, assume_unique=False)
    any_valid = test_elements.any_valid()
    assert any_valid is not None
    is_in = is_in & as_bool(any_valid)
    return Dense(~is_in if invert else is_in, validity)


# ------------------------------------------------------------------------------------------------------------- counts


@masked_rule(aten.count_nonzero, category=QUERY, takes_op=True, dims=Along("reduced"))
def count_nonzero(op: OpOverload, self: Dense, *dim: Any, **options: Any) -> Tensor:
    """How many valid elements are not zero."""
    return op(self.filled(0), *dim, **options)


@masked_rule(aten.bincount, category=QUERY, data_sizes=True)
def bincount(self: Dense, weights: Dense | None = None, minlength: int = 0) -> Tensor:
    """How often each number occurs among the valid ones, or the sum of their valid weights."""
    records = [r for r in (self, weights) if r is not None]
    validity = valid_in_all(*records)
    datas = [r.data for r in records]
    if validity is not None and self.ndim == 1 and all(r.shape == self.shape for r in records):
        valid = as_bool(validity).expand(self.shape)
        datas = [data[valid] for data in datas]
    return aten.bincount(*datas, minlength=minlength)


@masked_rule(aten.histc, category=QUERY)
def histc(self: Dense, bins: int = 100, min: Number = 0, max: Number = 0) -> Tensor:
    """Counts of the valid elements in bins of equal width, which span their range when min and max are equal."""
    result: Tensor
    if self.validity is None or self.data.numel() == 0:
        result = aten.histc(self.data, bins, min, max)
        return result
    if min != max:
        result = aten.histc(self.filled(highest(self.dtype)), bins, min, max)
        return result
    # Count each invalid element in the bin of the greatest valid one, and subtract it again. That is the last bin, or,
    # where all valid elements are equal, the only bin that is not empty.
    any_valid = self.any_valid()
    assert any_valid is not None
    count, any_valid = self.count(), as_bool(any_valid)
    greatest = torch.where(any_valid, self.filled(lowest(self.dtype)).amax(), 0)
    least = torch.where(any_valid, self.filled(highest(self.dtype)).amin(), 0)
    result = aten.histc(self.filled(greatest), bins, min, max)
    is_last = torch.arange(bins, device=result.device) == bins - 1
    from_last_bin = result - torch.where(is_last, self.data.numel() - count, 0)
    in_one_bin = torch.where(result > 0, count, 0)
    return torch.where(greatest > least, from_last_bin, in_one_bin).to(result.dtype)


@masked_rule(aten.histogram, category=QUERY, takes_op=True)
def histogram(
    op: OpOverload, self: Dense, bins: Bins = 100, *, weight: Dense | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Weighted counts, and the edges of the bins; an invalid element has weight 0."""
    values, weights = without_invalid(self.data, valid_in_all(self, weight), weight)
    hist, edges = op(values, plain_bins(op, bins), weight=weights, **options)
    return hist, edges


@masked_rule(aten.histogramdd, category=QUERY, takes_op=True)
def histogramdd(
    op: OpOverload,
    self: Dense,
    bins: Bins,
    range: Sequence[float] | None = None,
    weight: Dense | None = None,
    density: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """The same for points, with coordinates along the last dimension; one with an invalid coordinate has weight 0."""
    validity = self.full_validity
    if validity is not None:
        validity = as_bool(validity).all(-1, keepdim=True)
    if weight is not None and weight.validity is not None:
        validity = intersect(validity, weight.validity.unsqueeze(-1))
    values, weights = without_invalid(self.data, validity, weight, points=True)
    hist, edges = op(values, plain_bins(op, bins), range, weights, density)
    return hist, edges


def without_invalid(
    values: Tensor, validity: Tensor | None, weight: Dense | None, points: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Values and weights in which an invalid element has weight 0 and lies within the range of the valid ones.

    Where values are `points`, with coordinates along the last dimension, each coordinate has its own range.
    """
    shape = values.shape[:-1] if points else values.shape
    misfits = weight is not None and weight.shape != shape  # torch raises its error
    if validity is None or values.numel() == 0 or misfits:
        return values, None if weight is None else weight.data
    valid = as_bool(validity)
    candidates = torch.where(valid, values, -math.inf)
    greatest = candidates.flatten(0, -2).amax(0) if points else candidates.amax()
    # 0.5 where nothing is valid: torch extends an empty range by 0.5 on both sides, and uses [0, 1] for no elements.
    inside = torch.where(greatest > -math.inf, greatest, 0.5)
    weights = values.new_ones(shape) if weight is None else weight.data
    return torch.where(valid, values, inside), torch.where(valid.squeeze(-1) if points else valid, weights, 0)


def plain_bins(op: OpOverload, bins: Bins) -> Any:
    """The numbers of bins, or their edges, which must all be valid."""
    edges = [bins] if isinstance(bins, Dense) else bins if isinstance(bins, (list, tuple)) else []
    if not all(known_all_valid(edge) for edge in edges if isinstance(edge, Dense)):
        raise MaskedSemanticsError(
            f"{packet_name(op)} needs bin edges that are all valid: without one of them two bins would become one. "
            "Fill them with bins.to_tensor(value), or drop the invalid ones with bins.compressed()."
        )
    return data_of(bins)


# ----------------------------------------------------------------------------------------------- positions and values


@masked_rule(aten.nonzero, aten.nonzero_static, category=QUERY, takes_op=True)
def nonzero(op: OpOverload, self: Dense, **options: Any) -> Tensor:
    """The indices of the valid elements that are not zero."""
    return op(self.filled(0), **options)


def distinct(op: OpOverload, self: Dense, *flags: Any, inverse: bool) -> tuple[Any, ...]:
    """`op` on the valid elements in order. With `inverse`, its second result is scattered back to their positions."""
    valid = self.valid
    if valid is None:
        result = list(op(self.data, *flags))
        if inverse:
            result[1] = Dense(result[1])
        return tuple(result)
    valid = valid.expand(self.shape)
    # (an index would ask whether a 0-dim mask selects)
    result = list(op(on_signed_bits(lambda bits: bits.masked_select(valid), self.data), *flags))
    if inverse:
        result[1] = self.like(torch.zeros_like(self.data, dtype=torch.int64).masked_scatter(valid, result[1]))
    return tuple(result)


@masked_rule(aten._unique, category=QUERY, data_sizes=True)
def _unique(self: Dense, sorted: bool = True, return_inverse: bool = False) -> Any:
    """The distinct valid values, and for each element the index of its value."""
    return distinct(aten._unique.default, self, sorted, return_inverse, inverse=return_inverse)


@masked_rule(aten._unique2, category=QUERY, data_sizes=True)
def _unique2(self: Dense, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    """The distinct valid values, for each element the index of its value, and the number of elements of each value."""
    return distinct(aten._unique2.default, self, sorted, return_inverse, return_counts, inverse=return_inverse)


@masked_rule(aten.unique_consecutive, category=QUERY, data_sizes=True)
def unique_consecutive(
    self: Dense, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """The valid values, without those that equal the valid one before; invalid elements between are skipped."""
    op = aten.unique_consecutive.default
    if dim is not None:
        return data_of(run_opaque(op, self, return_inverse, return_counts, dim))
    return distinct(op, self, return_inverse, return_counts, inverse=return_inverse)


@masked_rule(aten.unique_dim, aten.unique_dim_consecutive, category=QUERY, takes_op=True)
def unique_dim(op: OpOverload, self: Dense, *args: Any, **options: Any) -> Any:
    """Distinct slices; refused for partly valid ones, which are neither equal nor different."""
    return data_of(run_opaque(op, self, *args, **options))


# --------------------------------------------------------------------------------------------------------- assertions


@masked_rule(aten._assert_async, category=QUERY, takes_op=True)
def _assert_async(op: OpOverload, self: Dense, *message: str) -> None:
    """Raise if the number is zero or invalid."""
    op(self.filled(0), *message)


@masked_rule(aten._assert_tensor_metadata.default, category=QUERY)
def _assert_tensor_metadata(a: Dense, *args: Any, **options: Any) -> None:
    """Raise if shape, dtype or device differ; masks do not matter. torch.export inserts this before conversions."""
    aten._assert_tensor_metadata.default(a.data, *args, **options)


# ------------------------------------------------------------------------------------------------------------- memory


@masked_rule(aten.record_stream.default, category=QUERY)
def record_stream(self: Dense, s: torch.Stream) -> None:
    """Tell the allocator that a stream uses the data and the mask."""
    for tensor in (self.data, self.validity):
        if tensor is not None:
            aten.record_stream(tensor, s)


# ---------------------------------------------------------------------------------------------------- on sparse storage

# -------------------------------------------------------------------------------------- counts, histograms, positions


@count_nonzero.lowering(Sparse)
def count_nonzero_sparse(op: OpOverload, self: Sparse, dim: int | Sequence[int] | None = None) -> Tensor:
    x = self.values
    nonzero_elements = self.like(x.masked_by(as_int8(x.data != 0)))
    dims = range(self.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    op(shape_alone(self.shape), *([] if dim is None else [dim]))  # raises torch's errors
    return nonzero_elements.count([d % self.ndim for d in dims])


@nonzero.lowering(Sparse)
@on_call(eager=True)
def nonzero_sparse(c: Bound) -> Tensor:
    flat, coordinates = valid_elements(c.self)
    indices = torch.stack(sorted_coordinates(flat.filled(0) != 0, coordinates, c.self.shape), 1)
    if "size" not in c:
        return indices
    raise_error_of_torch(c)
    missing = max(c.size - indices.shape[0], 0)
    return torch.cat([indices[: c.size], indices.new_full((missing, indices.shape[1]), c.fill_value)])


@histc.lowering(Sparse)
def histc_sparse(op: OpOverload, self: Sparse, *args: Any, **kwargs: Any) -> Any:
    return histc.run(valid_elements(self)[0], *args, **kwargs)


@histogram.lowering(Sparse)
@on_call(sparse="self", dense="bins")
def histogram_sparse(c: Bound) -> Any:
    if c.weight is not None and c.weight.shape != c.self.shape:
        raise NotLowered("the weights have another shape")
    flat, coordinates = valid_elements(c.self)
    weights = None if c.weight is None else lookup(c.weight, coordinates)
    if flat.shape[0] == 0:  # an invalid element instead, to get the range of the rule for dense storage, not torch's
        flat = Dense(flat.data.new_full((1,), 0.5), torch.zeros(1, dtype=torch.int8, device=flat.device))
        weights = None if weights is None else Dense(weights.data.new_zeros(1))
    return c.with_(self=flat, weight=weights).run()


# ---------------------------------------------------------------------------------------------------- distinct values


@_unique.lowering(Sparse)
@_unique2.lowering(Sparse)
@unique_consecutive.lowering(Sparse)
@on_call(only=(("dim", None),))
def distinct_sparse(c: Bound) -> tuple[Any, ...]:
    coo = to_layout(c.self, COO)  # whose values are in row-major order
    flat = coo.flat
    result = list(c.with_(self=Dense(flat.data, as_int8(_validity(flat)))).run())
    if c.return_inverse:
        result[1] = coo.folded(result[1])
    return tuple(result)


def _validity(flat: Dense) -> Tensor:
    v = flat.full_validity
    return torch.ones(flat.shape, dtype=torch.int8, device=flat.device) if v is None else v


# ----------------------------------------------------------------------------------------------------------- equality


@equal.lowering(Sparse)
@allclose.lowering(Sparse)
@on_call
def agree(c: Bound) -> bool:
    """Whether both masks are the same, and the operator is true of the valid values."""
    records = (c.self, c.other)
    if c.self.shape != c.other.shape and c.op is aten.equal.default:
        return False
    empty = (torch.empty(0, dtype=r.dtype, device=r.device) for r in records)
    c.with_(**dict(zip(("self", "other"), empty, strict=True))).applied(c.op)  # raises torch's errors
    shape = torch.broadcast_shapes(*(r.shape for r in records))
    (values, offsets), (other_values, other_offsets) = (_valid_in_order(r, shape) for r in records)
    same_mask = bool(torch.equal(offsets, other_offsets))
    return same_mask and bool(c.with_(self=values, other=other_values).applied(c.op))


def _valid_in_order(x: Dense | Sparse, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The valid values of a record expanded to a shape, in row-major order, and their offsets in a dense tensor."""
    expanded = broadcast_to(x, shape) if isinstance(x, Sparse) else x.map(lambda t: t.expand(shape))
    flat, coordinates = valid_elements_of(expanded)
    offsets = ravel(coordinates, shape)
    order = offsets.argsort()
    return flat.data[order], offsets[order]


# -------------------------------------------------------------------------------------------------------------- memory


@record_stream.lowering(Sparse)
def record_stream_sparse(op: OpOverload, self: Sparse, s: torch.Stream) -> None:
    record_stream.run(self.values, s)
    for piece in self.pattern.pieces:
        op(piece, s)


@record_stream.lowering(Permuted)
def record_stream_of_permuted(op: OpOverload, self: Permuted, s: torch.Stream) -> None:
    record_stream_sparse(op, self.base, s)
