"""Permuted sparse records: dimensions in another order than they are stored in, and adjacent ones merged.

Models move the dimensions of a packed batch around: attention wants heads before time, (B, T, H, d) → (B, H, T, d),
torch.nn's attention computes with time first, (T, B, H·d), and merges batch and heads, (T, B·H, d). A
:class:`Permuted` record remembers how the dimensions of a sparse record are shown, and moves no element; undoing it is
free. It is a separate type so that lowerings for sparse records cannot accept it by mistake. What handles it:

    elementwise   the lowering for sparse records, after bringing every operand to the dimensions of the base
    movement      orders compose; dimensions merge and split (ops/movement/sparse.py)
    last dims     rules on dense dimensions that are still last (on_values.py)
    attention     a lowering of its own (ops/attention/packed.py)

Other operators run on the record with its sparse dimensions first (`sparse_dims_first`), where that is possible. Else
they raise NotLowered; the caller then stores the operand densely, or refuses the call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.records.arguments import Dims, with_leading_dims, wrap_dims
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.extent import Extent
from op_registry.records.layout import aligned_validity, reshape_validity
from op_registry.sparse.convert import (
    from_coordinates,
    sum_of_union,
    unpadded_elements,
    with_coordinates,
    with_sparse_dims,
)
from op_registry.sparse.convert import to_dense as sparse_to_dense
from op_registry.sparse.coordinates import ravel
from op_registry.sparse.layout import COO
from op_registry.sparse.record import NotLowered, Pattern, Sparse, pattern_of

# The dimensions of the base that each visible dimension consists of.
Groups = tuple[tuple[int, ...], ...]


class Permuted:
    """A view of a sparse record: its dimensions in another order, some of them merged.

    base   the record
    order  the dimensions of `base` in the order in which they are shown. ``~d`` in place of ``d`` shows `d` merged
           into the dimension before it: (1, 0, ~2, 3) shows (B, T, H, d) as (T, B·H, d). The dense dimensions of the
           base are in the order in which they are shown, and a merged dimension has at most one of them; so views
           with the same sparse dimensions in the same places have the same order. Never the identity.
    extent which positions of a padded batch are there, in the dimensions that are shown

    Only the dimensions of packed batches are merged, and only their sparse dimensions are shown in another order:
    for other layouts, views have elements at other coordinates.
    """

    __slots__ = ("base", "extent", "order")

    def __init__(self, base: Sparse, order: Sequence[int], extent: Extent | None = None) -> None:
        self.base = base
        self.order = tuple(order)
        self.extent = extent

    def __repr__(self) -> str:
        return f"Permuted({self.base!r}, order={self.order})"

    @property
    def groups(self) -> Groups:
        return groups_of(self.order)

    @property
    def shape(self) -> torch.Size:
        sizes = self.base.shape
        return torch.Size([math.prod(map(sizes.__getitem__, group)) for group in self.groups])

    @property
    def ndim(self) -> int:
        return len(self.groups)

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    def like(self, base: Sparse) -> Permuted:
        """Another record shown in the same way."""
        return Permuted(base, self.order)

    def count(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """Number of valid elements over `dim`, as torch means it: int64."""
        groups, dims = self.groups, wrap_dims(dim, self.ndim)
        counts = self.base.count_over([d for dim in dims for d in groups[dim]], keepdim=True)
        shape = [1 if dim in dims else size for dim, size in enumerate(self.shape)]
        counts = counts.permute([d for group in groups for d in group]).reshape(shape)
        return counts if keepdim or not dims else counts.squeeze(tuple(dims))

    def base_dim(self, dim: int) -> int:
        """The dimension of the base that `dim`, non-negative, shows; NotLowered if it shows several."""
        group = self.groups[dim]
        if len(group) > 1:
            raise NotLowered("it works along a dimension that is merged of sparse and dense ones, or of sparse ones")
        return group[0]

    def to_base(self, t: Tensor) -> Tensor:
        """A view of a tensor of the record's shape, or one that broadcasts to it, with the dimensions of the base."""
        return in_base_dims(t, self.order, self.base.shape)


AnyRecord = Dense | Sparse | Permuted
# The kinds of records, for isinstance.
RECORDS = (Dense, Sparse, Permuted)


def shown(x: Sparse | Permuted) -> tuple[Sparse, Groups]:
    """The record whose dimensions a record shows, and the dimensions of that one that each of its own consists of."""
    return (x.base, x.groups) if isinstance(x, Permuted) else (x, groups_of(tuple(range(x.ndim))))


@functools.lru_cache(maxsize=1024)
def groups_of(order: tuple[int, ...]) -> Groups:
    """The dimensions of the base that each visible dimension consists of."""
    groups: list[tuple[int, ...]] = []
    for d in order:
        if d < 0:
            groups[-1] = (*groups[-1], ~d)
        else:
            groups.append((d,))
    return tuple(groups)


def order_of(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The inverse of `groups_of`."""
    return tuple([d if n == 0 else ~d for group in groups for n, d in enumerate(group)])


def in_base_dims(t: Tensor, order: tuple[int, ...], base_shape: Sequence[int]) -> Tensor:
    """A view of `t`, whose dimensions are shown in `order`, with the dimensions of the base; it may be broadcast."""
    groups = groups_of(order)
    missing = len(groups) - t.ndim
    if missing:
        t = with_leading_dims(t, missing)
    for dim in reversed(range(len(groups))):
        group = groups[dim]
        if len(group) > 1:
            t = t.unflatten(dim, [1] * len(group) if t.shape[dim] == 1 else [base_shape[d] for d in group])
    listed = [d for group in groups for d in group]
    return t.permute(sorted(range(len(listed)), key=listed.__getitem__))


def base_shape_of(shape: Sequence[int], order: tuple[int, ...], known: Mapping[int, int]) -> tuple[int, ...]:
    """The shape of the base of a record with this shape and order.

    known  sizes of dimensions of the base: of all but one in each merged dimension
    """
    sizes = dict(known)
    for group, size in zip(groups_of(order), shape, strict=True):
        for d in group:
            if d not in sizes:
                others = [sizes[other] for other in group if other != d]
                sizes[d] = size // math.prod(others) if others else size
    return tuple(sizes[d] for d in range(len(order)))


def to_dense(x: AnyRecord) -> Dense:
    """The same tensor with every element stored."""
    if isinstance(x, Dense):
        return x
    if isinstance(x, Sparse):
        return sparse_to_dense(x)
    # Contiguous in the permuted order, as the tensor's strides say: callers have chosen view operators by those.
    listed = [d for group in x.groups for d in group]
    base = sparse_to_dense(x.base)
    data, validity = base.data.permute(listed).contiguous(), aligned_validity(base)
    validity = None if validity is None else validity.permute(listed).contiguous()
    if len(listed) == x.ndim:
        return Dense(data, validity, x.extent)
    moved = None if validity is None else reshape_validity(validity, data.shape, x.shape)
    return Dense(data.reshape(x.shape), moved, x.extent)


def in_visible_order(x: Permuted) -> Sparse:
    """The same valid elements one by one, in COO, with every dimension sparse; not while tracing."""
    flat, coordinates = unpadded_elements(with_sparse_dims(x.base, x.base.ndim))
    visible = [ravel(tuple(coordinates[d] for d in group), tuple(x.base.shape[d] for d in group)) for group in x.groups]
    return from_coordinates(COO, tuple(visible), flat, x.shape)


def to_base_order(record: AnyRecord, permuted: Permuted) -> Dense | Sparse:
    """An operand beside `permuted`, with the dimensions of its base; NotLowered if that would move elements."""
    if isinstance(record, Permuted):
        if record.order != permuted.order:
            raise NotLowered("its operands have their dimensions in different orders")
        if any(len(group) > 1 for group in record.groups) and record.base.shape != permuted.base.shape:
            raise NotLowered("its operands have dimensions that are merged of others")
        return record.base
    if isinstance(record, Sparse):
        raise NotLowered("some of its sparse operands have dense dimensions before sparse ones, and some do not")
    if record.ndim > permuted.ndim:
        raise NotLowered(f"a dense operand of shape {tuple(record.shape)} has more dimensions than the sparse one")
    if record.ndim == 0:
        return record  # stays 0-d, since torch's type promotion counts only the category of 0-d tensors
    return record.map(permuted.to_base)


def in_base_order(run: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering for permuted records, made from `run`, which lowers sparse records and keeps their coordinates."""

    def permuted_run(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        permuted = first_permuted([*args, *kwargs.values()])

        def restored(record: AnyRecord) -> Dense | Sparse:
            return to_base_order(record, permuted)

        args, named = map_tensors(restored, (args, list(kwargs.items())), RECORDS)
        return map_tensors(permuted.like, run(op, *args, **dict(named)), Sparse)

    return permuted_run


def first_permuted(values: Sequence[Any]) -> Permuted:
    """The first permuted record among arguments, including those in lists."""
    permuted: list[Permuted] = []
    map_tensors(permuted.append, list(values), Permuted)
    return permuted[0]


# ------------------------------------------------------------------------------------------------ order of dimensions


def keeps_dims_in_view(pattern: Pattern) -> bool:
    """Whether views may show the sparse dimensions of a pattern in another order, or merged: so of packed batches."""
    return pattern.layout.of_sequences and pattern.ndim == 2


def shown_as(x: Sparse, groups: Sequence[Sequence[int]]) -> Sparse | Permuted:
    """`x` with its dimensions in the order of `groups`, the dimensions of a group merged into one."""
    sparse = x.pattern.ndim
    listed = [d for group in groups for d in group]
    dense = [d for d in listed if d >= sparse]
    if dense != sorted(dense):
        inner = [*range(x.pattern.lead), *(d - sparse + x.pattern.lead for d in dense)]
        x = x.like(x.values.map(lambda t: t.permute(inner)))
        new = {d: sparse + n for n, d in enumerate(dense)} | {d: d for d in range(sparse)}
        groups, listed = [[new[d] for d in group] for group in groups], [new[d] for d in listed]
    merged = len(groups) < len(listed)
    if listed == list(range(x.ndim)) and not merged:
        return x
    if merged or set(listed[:sparse]) != set(range(sparse)) or keeps_dims_in_view(x.pattern):
        return Permuted(x, order_of(groups))
    flat, coordinates = unpadded_elements(x)
    order = listed[:sparse]
    return with_coordinates(x, [coordinates[d] for d in order], flat, [x.pattern.sizes[d] for d in order])


# ------------------------------------------------------------------------------------------- sparse dimensions first


def sparse_dims_first(x: Permuted) -> Sparse:
    """The same elements as a sparse record; NotLowered if dense dimensions are shown before sparse ones.

    Rows are sorted if the sparse dimensions are not in stored order. The pattern is remembered, so that two records of
    one pattern have one pattern again.
    """
    pattern, groups = x.base.pattern, x.groups
    leading, sparse = 0, 0
    while sparse < pattern.ndim and all(d < pattern.ndim for d in groups[leading]):
        sparse += len(groups[leading])
        leading += 1
    if sparse < pattern.ndim:
        raise NotLowered("dense dimensions stand before sparse ones, or are merged with them")
    # The dense dimensions of the base are in the order in which they are shown.
    moved, rows = pattern.cached(("shown", groups[:leading]), lambda: _shown(pattern, groups[:leading]))
    flat = x.base.flat
    return Sparse((flat if rows is None else flat.take_rows(rows)).map(moved.fold), moved)


def _shown(pattern: Pattern, groups: Groups) -> tuple[Pattern, Tensor | None]:
    """The pattern of the same elements with these dimensions, and their positions in `pattern` (None: the same)."""
    sizes = tuple(math.prod(pattern.sizes[d] for d in group) for group in groups)
    layout = pattern.layout.with_room(len(groups))
    if [d for group in groups for d in group] == list(range(pattern.ndim)) and pattern.layout.row_major:
        return pattern.viewed(sizes, layout), None
    listed = pattern.coordinates()
    coordinates = tuple(ravel([listed[d] for d in group], [pattern.sizes[d] for d in group]) for group in groups)
    rows = layout.order_of(coordinates, sizes)
    return pattern_of(layout, tuple(c[rows] for c in coordinates), sizes), rows


def sum_of_any_order(records: Sequence[Sparse | Permuted]) -> Sparse | Permuted:
    """`sum_of_union` of records whose dimensions may be shown in another order, each in its own."""
    first = records[0]
    orders = {record.order if isinstance(record, Permuted) else None for record in records}
    if len(orders) == 1 and isinstance(first, Permuted):
        return first.like(sum_of_union([to_base_order(record, first) for record in records]))  # type: ignore[misc]
    return sum_of_union([sparse_dims_first(r) if isinstance(r, Permuted) else r for r in records])
