"""The record through which a rule reads a masked tensor, and helper functions for it.

A rule never meets the tensor subclass. It receives every tensor argument as a :class:`Dense` record (a plain tensor
as a record whose elements are all valid), and returns records (masked results) or plain tensors (plain results).

Records store validity as int8 (1 = valid), because bool masks make masked code slow on CPU: compilers load them byte by
byte. Rules do not see that: they read ``x.valid`` (bool, or None if all are valid), fill with ``x.filled``, count with
``x.count``, and pass validity on without looking inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.arguments import Dims, Number, wrap_dims
from op_registry.records.extent import Extent
from op_registry.records.fill import fill_where_invalid, known_zero
from op_registry.records.tracing import being_traced, may_be_read, under_transform
from op_registry.records.validity import as_bool, as_int8, count_ones, intersect, kept_with


def valid_in_all(*records: Any) -> Tensor | None:
    """Where every record among `records` is valid, after broadcasting (None: everywhere). Skips other values."""
    validity: Tensor | None = None
    for record in records:
        if isinstance(record, Dense):
            validity = intersect(validity, record.validity)
    return validity


def all_valid(*arguments: Any) -> bool:
    """Whether no record among `arguments`, or in lists in them, stores a validity: torch's own operator then serves."""
    return all(record.validity is None for record in records_in(arguments))


class Dense:
    """A strided tensor and its validity.

    data      the values, of any shape and dtype; meaningless where invalid
    validity  int8 (or bool) with data's number of dimensions, each of data's size or 1; None if all are valid
    extent    which positions of a padded batch are there (op_registry.extents); rules need not return it
    """

    __slots__ = ("data", "extent", "validity")

    def __init__(self, data: Tensor, validity: Tensor | None = None, extent: Extent | None = None) -> None:
        self.data = data
        self.validity = validity
        self.extent = extent

    def __repr__(self) -> str:
        mask = "all valid" if self.validity is None else f"valid={as_bool(self.validity)!r}"
        return f"Dense({self.data!r}, {mask})"

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def valid(self) -> Tensor | None:
        """The validity as bool, broadcastable to the data; None if every element is valid."""
        return None if self.validity is None else as_bool(self.validity)

    @property
    def full_validity(self) -> Tensor | None:
        """The validity expanded to the data's shape (a stride-0 view where it was broadcast)."""
        v = self.validity
        if v is None:
            return v
        same = same_sizes(v.shape, self.data.shape) if being_traced(v) else v.shape == self.data.shape
        return v if same else v.expand(self.data.shape)

    def filled(self, value: Number | Tensor) -> Tensor:
        """The data with `value` wherever it is invalid: the only way a rule may let data meet other data.

        Callers must not write to the result: it may be the data itself.
        """
        if type(value) is int and value == 0 and known_zero(self.data, self.validity):
            return self.data
        return fill_where_invalid(self.data, self.validity, value)

    def like(self, data: Tensor) -> Dense:
        """New values under the same mask."""
        return Dense(data, self.validity)

    def masked_by(self, validity: Tensor | None) -> Dense:
        """The same values, valid where they were and `validity` agrees."""
        return Dense(self.data, intersect(self.validity, validity))

    def map(self, move: Callable[[Tensor], Tensor]) -> Dense:
        """`move` applied to data and validity."""
        v = self.full_validity
        return Dense(move(self.data), None if v is None else move(v))

    def take_rows(self, index: Tensor) -> Dense:
        """The elements at `index` of the first dimension."""
        return self.map(lambda t: t[index])

    def count(self, dim: Dims = None, keepdim: bool = False) -> Tensor | int:
        """Number of valid elements over `dim`: an int64 tensor, or a plain int if all are valid."""
        dims = wrap_dims(dim, self.ndim)
        if self.validity is None:
            return math.prod(self.shape[d] for d in dims)
        return self._fact("count", dims, keepdim)

    def any_valid(self, dim: Dims = None, keepdim: bool = False) -> Tensor | None:
        """Validity of a reduction over `dim`: the slice has a valid element, or no elements at all (a size of 0)."""
        validity = self.validity
        if validity is None:
            return None
        dims = wrap_dims(dim, self.ndim)
        one_for_all = keepdim and all(known_to_hold(validity.shape[d] == 1) for d in dims)
        if one_for_all and not any(known_to_hold(self.shape[d] == 0) for d in dims):
            return validity  # each slice has one validity: return the same object, so that masks stay shared
        return self._fact("some", dims, keepdim)

    def each_slice_has_one(self, dim: Dims) -> bool:
        """Whether we know that every slice over `dim` has a valid element. False while tracing, and if the answer would
        have to wait for another device.
        """
        validity = self.validity
        if validity is None:
            return True
        if not may_be_read(validity) or under_transform():
            return False
        return bool(self._fact("each", wrap_dims(dim, self.ndim), True))

    def _fact(self, kind: str, dims: tuple[int, ...], keepdim: bool) -> Tensor:
        """A fact about the mask, cached with it.

        We do not cache while tracing or in inference mode, whose tensors autograd cannot save for backward.
        """
        validity = self.validity
        assert validity is not None
        if being_traced(validity) or torch.is_inference_mode_enabled() or validity.is_inference() or under_transform():
            return self._compute_fact(kind, dims, keepdim)
        facts = kept_with(validity)
        key = (kind, dims, keepdim, self.data.shape)
        fact: Tensor | None = facts.get(key)
        if fact is None:
            fact = facts[key] = self._compute_fact(kind, dims, keepdim)
        return fact

    def _compute_fact(self, kind: str, dims: tuple[int, ...], keepdim: bool) -> Tensor:
        validity = self.validity
        assert validity is not None
        if kind == "each":
            return self._fact("some", dims, keepdim).all()
        places = math.prod(map(self.data.shape.__getitem__, dims))
        if kind == "some" and dims and not being_traced(validity) and places:
            return as_int8(validity).amax(dims, keepdim)  # which torch vectorises, unlike a count
        if not dims:
            count = validity.to(torch.int64)
        else:
            # Sum floats if a compiler fuses this with the data's sum: it does not vectorise int64 sums.
            # (Never read an exported program's sizes: that would bound them.)
            exact_in_float = (
                being_traced(validity)
                and not torch.compiler.is_exporting()
                and known_to_hold(math.prod(validity.shape[d] for d in dims) <= 2**24)
            )
            ones = as_int8(validity)
            summed = ones.sum(dims, keepdim=keepdim, dtype=torch.float32) if exact_in_float else None
            count = (count_ones(ones, dims, keepdim) if summed is None else summed).to(torch.int64)
        if kind == "count":
            # Count a broadcast dimension by multiplying, without reading its elements again.
            repeated = [self.shape[d] for d in dims if known_to_hold(validity.shape[d] == 1)]
            return count * math.prod(repeated) if repeated else count
        if known_to_hold(places == 0):
            return torch.ones_like(count, dtype=torch.int8)
        if known_to_hold(places != 0):
            return as_int8(count > 0)
        return as_int8((count > 0) | (torch.full_like(count, places) == 0))


# Types of the items of most lists among arguments: sizes and dimensions.
_NUMBERS = frozenset((int, bool, float))


def map_tensors(f: Callable[[Any], Any], value: Any, kind: type | tuple[type, ...]) -> Any:
    """Apply `f` to every `kind` in `value`, through lists and tuples."""
    if isinstance(value, kind):
        return f(value)
    if isinstance(value, (list, tuple)) and not _NUMBERS.issuperset(map(type, value)):
        return type(value)([map_tensors(f, v, kind) for v in value])
    return value


def same_sizes(validity: Sequence[int], data: Sequence[int]) -> bool:
    """Whether a validity in a graph has its data's sizes, without comparing a data-dependent size with 1."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    for mine, size in zip(validity, data, strict=False):
        broadcast = type(mine) is int and mine == 1 and type(size) is not int
        if broadcast or not guard_or_false(mine == size):
            return False
    return len(validity) == len(data)


def records_in(values: Iterable[Any]) -> Iterator[Dense]:
    """Every record among `values`, through lists and tuples."""
    for value in values:
        if isinstance(value, Dense):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from records_in(value)


def detached_data(record: Dense | None) -> Tensor | None:
    """The detached data of a record; None for None."""
    return None if record is None else record.data.detach()
