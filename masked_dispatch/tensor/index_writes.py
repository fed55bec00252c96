"""Assignment by an index that makes views, in one operator: ``x[:, 1:-1] = v``.

Bounds count as in views that are read: of a padded batch, ``x[:, :-1]`` is all but each sample's last position. So an
index that leaves out what other samples have becomes index tensors that are invalid there: these write nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.tensor.indexing import as_entry, as_index_tensors, as_number, dimensions
from op_registry import resolve
from op_registry.dimensions.sizes import known_to_hold
from op_registry.extents.factors import conjunction, factors_of, where_all
from op_registry.extents.remembered import PartOfEach
from op_registry.extents.run import run_with_extents
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_bool, as_int8
from op_registry.sparse.permuted import AnyRecord

_WHOLE = slice(None)


def put(x: Any, index: Any, source: Any, masked: Callable[[Tensor, Tensor], Tensor], views: bool) -> bool:
    """Whether ``x[index] = source`` has been written, by index tensors; if not, torch's own way does.

    masked  makes a masked tensor of data and validity
    views   whether torch can write through views of `x`, so that only their ends need index tensors
    """
    if views and (x._extent is None or not _leaves_out_ends(index)):
        return False
    indices = as_index_tensors(index, x.shape, x.device)
    there = None if indices is None or x._extent is None else _own_part(x._printed_record, index)
    if indices is None or (views and there is None):
        return False
    written: Sequence[Tensor] = indices
    if there is not None:
        written, source = _writing_where(there, list(indices), x.shape, source, masked)
    places = torch.broadcast_shapes(*(i.shape for i in written))
    while source.ndim > len(places) + x.ndim - len(written) and source.shape[0] == 1:
        source = source[0]  # torch drops leading dimensions of size 1 when it writes through a view
    if written:
        x.index_put_(tuple(written), source)
    else:
        x.copy_(source)
    return True


def _writing_where(
    there: Tensor, indices: list[Tensor], shape: torch.Size, source: Any, masked: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Sequence[Tensor], Any]:
    """Index tensors of a tensor of this shape that write only where `there` (broadcasts to what they show) is True, and
    what they write.
    """
    places = torch.broadcast_shapes(*(i.shape for i in indices))
    sizes = shape[len(indices) :]
    if any(size != 1 for size in there.shape[len(places) :]):  # it depends on dimensions that the index leaves whole
        arange = functools.partial(torch.arange, device=there.device)
        indices = [i.reshape(*i.shape, *[1] * len(sizes)) for i in indices]
        indices += [i.reshape(*i.shape, *[1] * (len(sizes) - d - 1)) for d, i in enumerate(map(arange, sizes))]
        places = (*places, *sizes)
    there = there.reshape(there.shape[: len(places)]).expand(places)
    if _has_all_of(source, there.reshape(*places, *[1] * (len(shape) - len(indices)))):
        source = source.without_extent()
    n = next(
        n for n, i in enumerate(indices) if not _is_masked(i)
    )  # (a masked index tensor writes to other dimensions)
    indices[n] = masked(indices[n].expand(places).contiguous(), as_int8(there.contiguous()))
    return indices, source


def _has_all_of(source: Any, written: Tensor) -> bool:
    """Whether a source with an extent is there wherever it is written, so that its target keeps all its positions."""
    extent = getattr(source, "_extent", None)
    mine = None if extent is None else conjunction(factors_of(source._printed_record))
    return mine is not None and not being_traced(mine) and bool((as_bool(mine) | ~written).all())


def _leaves_out_ends(index: object) -> bool:
    """Whether a part of an index leaves out positions at an end: only such a part may end where each sample does."""
    slices = [entry for entry in (index if isinstance(index, tuple) else (index,)) if isinstance(entry, slice)]
    return any((first := _sign(s.start)) >= 0 and (first > 0 or _sign(s.stop) < 0) for s in slices)


def _sign(bound: Any) -> int:
    """1 and -1 for bounds that are known to be above and below 0."""
    number: Any = _number(bound)
    return 0 if number is None else int(known_to_hold(number > 0)) - int(known_to_hold(number < 0))


def _number(bound: Any) -> Any:
    return bound.item() if isinstance(bound, Tensor) and not being_traced(bound) else as_number(bound)


def _own_part(record: AnyRecord, index: Any) -> Tensor | None:
    """Where ``x[index] = value`` writes: bool that broadcasts to ``x[index]``; None: wherever the index says."""
    factors, data = factors_of(record), torch.zeros((), dtype=torch.int8, device=record.device)
    shown = Dense(data.expand(record.shape), conjunction(factors), Extent(factors, is_mask=False))
    entries = [as_entry(entry) for entry in (index if isinstance(index, tuple) else (index,))]
    left, dim, hides = record.ndim - sum(map(dimensions, entries)), 0, False
    within: list[Any] = []
    for entry in entries:
        if entry is ...:
            dim += left
            within += [_WHOLE] * left
        elif type(entry) is int:
            shown = _viewed(torch.ops.aten.select.int, shown, dim, entry)
        elif isinstance(entry, slice):
            if entry != _WHOLE:
                bounds = (_number(entry.start), _number(entry.stop), _number(entry.step) or 1)
                shown = _viewed(torch.ops.aten.slice.Tensor, shown, dim, *bounds)
            dim += 1
            within.append(_WHOLE)
        else:
            dim += dimensions(entry)
            within.append(entry)
        hides |= isinstance(shown, PartOfEach)
    if not hides:
        return None
    there = as_bool(where_all(factors_of(shown)))
    by_tensors = any(isinstance(part, Tensor) for part in within)
    found: Any = (there.expand(shown.shape) if by_tensors else there)[tuple(within)]
    return found.to_tensor(False) if _is_masked(found) else found  # type: ignore[no-any-return]


def _is_masked(tensor: Tensor) -> bool:
    return hasattr(tensor, "get_mask")


def _viewed(op: OpOverload, record: Dense, *args: Any) -> Dense:
    rule = resolve(op).rule
    assert rule is not None
    viewed: Dense = run_with_extents(rule.bind(op), rule, op, record, *args)
    return viewed
