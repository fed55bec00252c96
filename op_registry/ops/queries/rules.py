"""Questions about a tensor, whose answer is plain: a Python value, counts, indices, the distinct values.

Law: only what is valid takes part. `equal` and `allclose` say that masks are the same and that valid values agree.
`item()`, and `bool()` and `float()` with it, raise where there is no value to give. Counts (`count_nonzero`, `histc` …)
and `nonzero` pass over invalid elements. `unique` gives the distinct valid values, and an inverse that is masked like
the input; along a dimension it compares whole slices, and is refused unless all is valid.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    QUERY,
    Dense,
    InvalidValueError,
    MaskedSemanticsError,
    Number,
    as_bool,
    being_traced,
    data_of,
    highest,
    intersect,
    known_all_valid,
    lowest,
    masked_rule,
    packet_name,
    reduction,
    run_opaque,
    valid_in_all,
)

aten = torch.ops.aten

_is_all_true = reduction(aten._is_all_true, identity=True)
_is_any_true = reduction(aten._is_any_true, identity=False)
# The exclusive or of the elements' bits: those of 0 are none.
hash_tensor = reduction(aten.hash_tensor, identity=0)


@masked_rule(aten.is_same_size, aten._has_same_storage_numel, aten.is_set_to, category=QUERY, takes_op=True)
def is_same_size(op: OpOverload, self: Dense, other: Dense) -> bool:
    """Asks about shapes and storage alone."""
    return bool(op(self.data, other.data))


@masked_rule(aten.is_pinned, category=QUERY)
def is_pinned(self: Dense, device: torch.device | None = None) -> bool:
    """Whether the data lies in pinned memory."""
    return bool(aten.is_pinned(self.data, device))


@masked_rule(aten._local_scalar_dense, category=QUERY)
def _local_scalar_dense(self: Dense) -> Any:
    """The one value, if it is valid."""
    if self.validity is not None and self.data.numel() == 1:
        value = "False" if self.dtype is torch.bool else "0"
        invalid = (
            f"the value of a masked tensor of shape {tuple(self.shape)} and dtype {self.dtype} was asked for as a "
            f"Python value, and it is invalid. Say what an invalid element counts as, x.to_tensor({value}), or ask "
            "x.get_mask() first."
        )
        if being_traced(self.validity):
            torch._assert_async(as_bool(self.validity).reshape(()), invalid)  # when the graph runs
        elif not bool(as_bool(self.validity)):
            raise InvalidValueError(invalid)
    return aten._local_scalar_dense(self.data)


# ------------------------------------------------------------------------------------------------------- equality


def same_mask(a: Dense, b: Dense) -> bool:
    """Whether two records, one broadcast to the other if need be, are valid at the same positions."""
    if a.validity is b.validity:
        return True

    def each(x: Dense) -> Tensor:
        v = x.full_validity
        return torch.ones_like(x.data, dtype=torch.bool) if v is None else as_bool(v)

    return bool((each(a) == each(b)).all())


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
    op: OpOverload, elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Dense:
    """Whether each element is among the valid `test_elements`; valid where the element is."""
    validity = elements.validity if isinstance(elements, Dense) else None
    options = {"assume_unique": assume_unique, "invert": invert}
    if not isinstance(test_elements, Dense) or test_elements.validity is None or test_elements.data.numel() == 0:
        return Dense(op(data_of(elements), data_of(test_elements), **options), validity)
    # A valid value once more changes no answer, except to whoever relies on each being there only once.
    known = test_elements.filled(test_elements.filled(lowest(test_elements.dtype)).amax())
    found = op(data_of(elements), known, assume_unique=False)
    some = test_elements.any_valid()
    assert some is not None
    found = found & as_bool(some)
    return Dense(~found if invert else found, validity)


# --------------------------------------------------------------------------------------------------------- counts


@masked_rule(aten.count_nonzero, category=QUERY, takes_op=True)
def count_nonzero(op: OpOverload, self: Dense, *dim: Any, **options: Any) -> Tensor:
    """How many valid elements are not zero."""
    result: Tensor = op(self.filled(0), *dim, **options)
    return result


@masked_rule(aten.bincount, category=QUERY)
def bincount(self: Dense, weights: Dense | None = None, minlength: int = 0) -> Tensor:
    """How often each number occurs among the valid ones, or the sum of their valid weights."""
    records = [r for r in (self, weights) if r is not None]
    validity = valid_in_all(*records)
    datas = [r.data for r in records]
    if validity is not None and self.ndim == 1 and all(r.shape == self.shape for r in records):
        chosen = as_bool(validity).expand(self.shape)
        datas = [data[chosen] for data in datas]
    result: Tensor = aten.bincount(*datas, minlength=minlength)
    return result


@masked_rule(aten.histc, category=QUERY)
def histc(self: Dense, bins: int = 100, min: Number = 0, max: Number = 0) -> Tensor:
    """Counts of the valid elements in bins of equal width, which span those elements when min and max are equal."""
    result: Tensor
    if self.validity is None or self.data.numel() == 0:
        result = aten.histc(self.data, bins, min, max)
        return result
    if min != max:
        result = aten.histc(self.filled(highest(self.dtype)), bins, min, max)
        return result
    # Put each invalid element in the bin of the greatest valid one, and take it out again. That is the last bin, or,
    # where all valid elements are equal, the only one in which anything is.
    some = self.any_valid()
    assert some is not None
    count, some = self.count(), as_bool(some)
    greatest = torch.where(some, self.filled(lowest(self.dtype)).amax(), 0)
    least = torch.where(some, self.filled(highest(self.dtype)).amin(), 0)
    result = aten.histc(self.filled(greatest), bins, min, max)
    is_last = torch.arange(bins, device=result.device) == bins - 1
    spread = result - torch.where(is_last, self.data.numel() - count, 0)
    together = torch.where(result > 0, count, 0)
    return torch.where(greatest > least, spread, together).to(result.dtype)


@masked_rule(aten.histogram, category=QUERY, takes_op=True)
def histogram(
    op: OpOverload, self: Dense, bins: Any = 100, *, weight: Dense | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Weighted counts, and the edges of the bins; an invalid element weighs nothing."""
    values, weights = weightless(self.data, valid_in_all(self, weight), weight)
    hist, edges = op(values, plain_bins(op, bins), weight=weights, **options)
    return hist, edges


@masked_rule(aten.histogramdd, category=QUERY, takes_op=True)
def histogramdd(
    op: OpOverload, self: Dense, bins: Any, range: Any = None, weight: Dense | None = None, density: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The same for points, whose coordinates lie along the last dimension; one with an invalid coordinate is none."""
    validity = self.full_validity
    if validity is not None:
        validity = as_bool(validity).all(-1, keepdim=True)
    if weight is not None and weight.validity is not None:
        validity = intersect(validity, weight.validity.unsqueeze(-1))
    values, weights = weightless(self.data, validity, weight, points=True)
    hist, edges = op(values, plain_bins(op, bins), range, weights, density)
    return hist, edges


def weightless(
    values: Tensor, validity: Tensor | None, weight: Dense | None, points: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Values and weights, such that what is invalid weighs 0 and widens no range.

    Where values are `points`, with coordinates along the last dimension, each coordinate has a range of its own.
    """
    if validity is None or values.numel() == 0:
        return values, None if weight is None else weight.data
    valid = as_bool(validity)
    each = torch.where(valid, values, -math.inf)
    greatest = each.flatten(0, -2).amax(0) if points else each.amax()
    # Half, where there is nothing: torch widens a range of no width by half on both sides, and gives nothing [0, 1].
    inside = torch.where(greatest > -math.inf, greatest, 0.5)
    shape = values.shape[:-1] if points else values.shape
    weights = values.new_ones(shape) if weight is None else weight.data
    return torch.where(valid, values, inside), torch.where(valid.squeeze(-1) if points else valid, weights, 0)


def plain_bins(op: OpOverload, bins: Any) -> Any:
    """The number of bins, or their edges, which all have to be valid."""
    edges = [bins] if isinstance(bins, Dense) else bins if isinstance(bins, (list, tuple)) else []
    if not all(known_all_valid(edge) for edge in edges if isinstance(edge, Dense)):
        raise MaskedSemanticsError(
            f"{packet_name(op)} needs bin edges that are all valid: without one of them two bins would become one. "
            "Fill them with bins.to_tensor(value), or leave out the invalid ones with bins.compressed()."
        )
    return data_of(bins)


# -------------------------------------------------------------------------------------------- positions and values


@masked_rule(aten.nonzero, aten.nonzero_static, category=QUERY, takes_op=True)
def nonzero(op: OpOverload, self: Dense, **options: Any) -> Tensor:
    """Where there is a valid element that is not zero."""
    result: Tensor = op(self.filled(0), **options)
    return result


def distinct(op: OpOverload, self: Dense, *flags: Any, inverse: bool) -> tuple[Any, ...]:
    """`op` on the valid elements, in order; its second result, asked for by `inverse`, put back to where they were."""
    valid = self.valid
    if valid is None:
        result = list(op(self.data, *flags))
        if inverse:
            result[1] = Dense(result[1])
        return tuple(result)
    valid = valid.expand(self.shape)
    result = list(op(self.data[valid], *flags))
    if inverse:
        result[1] = self.like(torch.zeros_like(self.data, dtype=torch.int64).masked_scatter(valid, result[1]))
    return tuple(result)


@masked_rule(aten._unique, category=QUERY)
def _unique(self: Dense, sorted: bool = True, return_inverse: bool = False) -> Any:
    """The distinct valid values, and for each element which one it is."""
    return distinct(aten._unique.default, self, sorted, return_inverse, inverse=return_inverse)


@masked_rule(aten._unique2, category=QUERY)
def _unique2(self: Dense, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    """The distinct valid values, for each element which one it is, and how many there are of each."""
    return distinct(aten._unique2.default, self, sorted, return_inverse, return_counts, inverse=return_inverse)


@masked_rule(aten.unique_consecutive, category=QUERY)
def unique_consecutive(
    self: Dense, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """The valid values without repetitions of the one before; an invalid element between two changes nothing."""
    op = aten.unique_consecutive.default
    if dim is not None:
        return data_of(run_opaque(op, self, return_inverse, return_counts, dim))
    return distinct(op, self, return_inverse, return_counts, inverse=return_inverse)


for rule in (bincount, _unique, _unique2, unique_consecutive):
    rule.gap("P7", why="how many elements are valid is a size inside the rule, known only when the graph runs")


@masked_rule(aten.unique_dim, aten.unique_dim_consecutive, category=QUERY, takes_op=True)
def unique_dim(op: OpOverload, self: Dense, *args: Any, **options: Any) -> Any:
    """Distinct slices: slices with holes are neither equal nor different."""
    return data_of(run_opaque(op, self, *args, **options))
