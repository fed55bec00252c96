"""Assignment by index, ``x[0, 1:] = v``, and to elements that share a memory location."""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry import MaskedSemanticsError, resolve
from op_registry.dimensions.sizes import known_to_hold
from op_registry.extents.factors import conjunction, factors_of, where_all
from op_registry.extents.remembered import PartOfEach
from op_registry.extents.run import run_with_extents
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_bool, as_int8
from op_registry.sparse.permuted import AnyRecord

_NUMBERS: Any = (numbers.Number, torch.SymInt, torch.SymFloat, torch.SymBool)


def as_source(value: Any, target: Tensor) -> Any:
    """Convert a number to a 0-d tensor of the target's dtype and device, or raise torch's error; else keep `value`."""
    return torch.full((), value, dtype=target.dtype, device=target.device) if isinstance(value, _NUMBERS) else value


def as_index_tensors(index: object, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...] | None:
    """Convert an index that makes a view to index tensors: one for each dimension up to the last that it restricts.

    They broadcast to the shape of ``x[index]`` without the remaining dimensions, and carry the masks of the index. The
    tuple is empty if the index restricts no dimension. None for an index of tensors alone, which makes no view, and for
    an index that does not fit `shape`, which torch then refuses.
    """
    entries = [as_entry(entry) for entry in (index if isinstance(index, tuple) else (index,))]
    if not any(_makes_view(entry) for entry in entries):
        return None
    while entries and (entries[-1] is ... or entries[-1] == slice(None)):
        del entries[-1]
    reach = len(shape) if any(entry is ... for entry in entries) else sum(dimensions(entry) for entry in entries)
    missing = reach - sum(dimensions(entry) for entry in entries)
    if reach > len(shape) or missing < 0:
        return None
    # For each dimension the positions that the index reads, and the same index into these positions.
    places: list[Tensor] = []
    within: list[Any] = []
    for entry in entries:
        if entry is None or isinstance(entry, bool):
            within.append(entry)
            continue
        for part in [slice(None)] * missing if entry is ... else _parts(entry):
            read = _places(part, shape[len(places)], device)
            if read is None:
                return None
            places.append(read.flatten())
            within.append(_within(part, read))
    sizes = [len(read) for read in places]
    return tuple(
        read.reshape(-1, *[1] * (reach - d - 1)).expand(sizes)[tuple(within)]  # torch itself orders the dimensions
        for d, read in enumerate(places)
    )


def _parts(entry: Any) -> list[Any]:
    """Split a part of an index into one part per indexed dimension: a mask becomes the indices of its True elements."""
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) and entry.ndim:
        return list(entry.nonzero().unbind(1))
    return [entry]


def _places(part: Any, size: int, device: torch.device) -> Tensor | None:
    """The indices that a number, a slice or a tensor reads along a dimension; None if torch would refuse it."""
    if isinstance(part, slice):
        if not isinstance(size, int):  # in a graph
            return torch.arange(size, device=device)[part]
        start, stop, step = part.indices(size)
        return torch.arange(start, max(start, stop), step, device=device) if step > 0 else None
    if isinstance(part, Tensor):
        return part
    if not -size <= part < size:
        return None
    return torch.tensor([part], device=device)


def _within(part: Any, read: Tensor) -> Any:
    """The same part of an index, for a dimension that consists only of the positions that the part reads."""
    if isinstance(part, slice):
        return slice(None)
    if isinstance(part, Tensor) and part.ndim:
        return torch.arange(read.numel(), device=read.device).reshape(read.shape)
    return 0


def as_number(entry: object) -> object:
    """Convert an integer of another library, such as NumPy, to an int; return anything else unchanged."""
    if isinstance(entry, (Tensor, bool)) or not hasattr(entry, "__index__"):
        return entry
    try:
        return operator.index(entry)
    except TypeError:  # an array
        return entry


def as_entry(entry: object) -> Any:
    """One part of an index: a number, a slice, ``...``, None or a tensor."""
    entry = as_number(entry)
    if isinstance(entry, Tensor):
        is_number = entry.ndim == 0 and entry.dtype not in (torch.bool, torch.uint8)
        return entry.item() if is_number and not being_traced(getattr(entry, "_data", entry)) else entry
    if entry is None or entry is ... or isinstance(entry, (bool, int, slice)):
        return entry
    return torch.as_tensor(entry)


def _makes_view(entry: object) -> bool:
    if isinstance(entry, Tensor):
        return entry.ndim == 0 and not entry.dtype.is_floating_point and entry.dtype is not torch.bool
    return not isinstance(entry, bool)


def dimensions(entry: object) -> int:
    """The number of dimensions of the tensor that a part of an index consumes."""
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.ndim
    return 0 if entry is None or entry is ... or isinstance(entry, bool) else 1


# ----------------------------------------------------------- an index that makes views, in one operator: x[:, 1:-1] = v

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


# ----------------------------------------------- elements that share memory: an expanded dimension, overlapping windows


def one_of_each(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A view with one element per memory location along dimensions whose `strides` are 0."""
    for d in [d for d, stride in enumerate(strides) if type(stride) is int and stride == 0 and tensor.shape[d] > 1]:
        tensor = tensor.narrow(d, 0, 1)
    return tensor


def same_places(a: Tensor, b: Tensor) -> bool:
    """Whether two views of the same memory have their elements at the same locations."""
    a, b = one_of_each(a, a.stride()), one_of_each(b, b.stride())
    return a.shape == b.shape and a.storage_offset() == b.storage_offset() and _steps(a) == _steps(b)


def assign_validity(places: Tensor, validity: Tensor) -> None:
    """Write a validity to memory that has the data's strides.

    Raises MaskedSemanticsError if elements that share a location differ: a write to one leaves the others undefined.
    """
    full = validity.expand(places.shape)
    one_of_each(places, places.stride()).copy_(one_of_each(full, places.stride()))
    if may_share(places) and not torch.equal(places, full):
        raise MaskedSemanticsError(
            f"a write to a masked tensor of shape {tuple(places.shape)} and strides {places.stride()}: elements that "
            "share one place in memory have different masks, so a write to one would change the values of the "
            "others, and their validity would be unknown. Write to x.clone(), where each element has its own "
            "memory."
        )


def may_share(tensor: Tensor) -> bool:
    """Whether several elements may share a location: a stride lies within the extent of smaller strides."""
    extent = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= extent:
                return True
            extent += step * (size - 1)
    return False


def _steps(tensor: Tensor) -> list[int]:
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
