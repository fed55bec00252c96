"""Movement, indexing, assignment and accumulation: which element of the input each element of the result is.

For movement, the operator itself runs on a tensor of flat indices, and so each result element is the index of an input
element, whose validity it has. A number that is not an index was written by the operator itself, and is valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from op_registry.conformance.oracles.call import Call, Expected, NoOracle, Refused, broadcast_valid, oracle, valid

# Added to flat indices, to distinguish them from zeros and other numbers that an operator writes.
OFFSET = 1 << 20


def movement(c: Call) -> Any:
    """Each element keeps its validity; elements that the operator itself writes are valid."""
    tables: list[Tensor] = []
    start = OFFSET

    def as_indices(operand: Expected) -> Tensor:
        nonlocal start
        indices = torch.arange(start, start + operand.data.numel()).reshape(operand.shape)
        start += operand.data.numel()
        tables.append(operand.mask.reshape(-1))
        if operand.data.is_contiguous() or not operand.data.numel():
            return indices
        return torch.empty_strided(operand.shape, operand.data.stride(), dtype=torch.int64).copy_(indices)

    def as_float_indices(operand: Expected) -> Tensor:
        return as_indices(operand).to(torch.float64)

    for name in ("start", "tensor_indices_or_sections"):
        if isinstance(c.get(name), Expected):
            if not c[name].all_valid:
                raise Refused(f"{c.name} at an invalid index")
            c = Call(c.op, {**c.bound, name: c[name].data})
    data = c.plain()
    try:
        moved = c.run({}, as_indices)
    except RuntimeError:
        start, tables = OFFSET, []
        moved = c.run({}, as_float_indices)
    table = torch.cat(tables) if tables else torch.ones(0, dtype=torch.bool)

    def with_validity(out: Tensor, indices: Tensor) -> Expected:
        index = indices.to(torch.int64) - OFFSET
        written = (index < 0) | (index >= table.numel())
        mask = torch.cat([table, torch.ones(1, dtype=torch.bool)])[torch.where(written, table.numel(), index)]
        return Expected(out, mask)

    outs, spec = tree_flatten(data)
    return tree_unflatten([with_validity(d, i) for d, i in zip(outs, tree_leaves(moved), strict=True)], spec)


# Composites, beside the operators whose rule is of this category.
oracle(
    """concat concatenate hstack vstack dstack column_stack linalg_diagonal diag diagflat expand_as broadcast_to
    broadcast_tensors view_as reshape reshape_as flatten unflatten ravel movedim moveaxis swapaxes swapdims numpy_T
    matrix_H mT mH adjoint narrow chunk unsafe_chunk tensor_split hsplit vsplit dsplit alias_copy fliplr flipud tile
    pad native_channel_shuffle meshgrid cartesian_prod combinations atleast_1d atleast_2d atleast_3d
    repeat_interleave.self_int fft_fftshift fft_ifftshift resolve_conj_view"""
)(movement)


@oracle("view_as_real")
def view_as_real(c: Call) -> Expected:
    """Both parts are valid where the number is."""
    return Expected(c.plain(), c["self"].mask.unsqueeze(-1).expand(*c["self"].shape, 2))


@oracle("view_as_complex")
def view_as_complex(c: Call) -> Expected:
    """Valid where both parts are."""
    return Expected(c.plain(), c["self"].mask.all(-1))


@oracle("repeat_interleave.self_Tensor")
def repeat_interleave(c: Call) -> Any:
    """Each element keeps its validity; with invalid numbers of repetitions the shape is undefined."""
    if not c["repeats"].all_valid:
        raise NoOracle(f"{c.name} of invalid repeats")
    return movement(Call(c.op, {**c.bound, "repeats": c["repeats"].data}))


def gathered(x: Expected, flat: Tensor, index_valid: Tensor, out: Tensor) -> Expected:
    """`out`, the elements of `x` at flat indices: valid where the element and its index are."""
    if not x.mask.numel():
        return valid(out)
    return Expected(out, x.mask.reshape(-1)[flat] & index_valid.expand(out.shape))


def _flat_indices(x: Expected) -> Tensor:
    """The flat index of each element, in the shape of `x`."""
    return torch.arange(x.data.numel()).reshape(x.shape)


@oracle("gather", "take", "take_along_dim")
def gather(c: Call) -> Expected:
    """An invalid index gives an invalid element."""
    index = c.get("index", c.get("indices"))
    out = c.plain()
    known = index.mask if index.ndim == out.ndim else index.mask.reshape(out.shape)
    return gathered(c["self"], c.plain(self=_flat_indices(c["self"])), known, out)


@oracle("index_select")
def index_select(c: Call) -> Expected:
    """Like gather, with one index for each slice."""
    x, index, dim = c["self"], c["index"], c["dim"]
    out = c.plain()
    shape = [1] * out.ndim
    if out.ndim:
        shape[dim] = index.mask.numel()
    return gathered(x, c.plain(self=_flat_indices(x)), index.mask.reshape(shape), out)


@oracle("one_hot")
def one_hot(c: Call) -> Expected:
    """A row for each index, valid where the index is."""
    x, classes = c["self"], c["num_classes"]
    if classes == -1 and not x.all_valid:
        classes = int(x.data[x.mask].max()) + 1 if bool(x.mask.any()) else 1
    if classes == -1:
        return valid(c.plain())
    out = c.plain(self=torch.where(x.mask, x.data, 0), num_classes=classes)
    return Expected(out, x.mask.unsqueeze(-1).expand(out.shape))


@oracle("index.Tensor", "_unsafe_index.Tensor")
def index(c: Call) -> Expected:
    """An invalid integer index gives an invalid element; an invalid entry of a boolean index selects nothing."""
    x, indices = c["self"], c["indices"]
    selecting = [_as_selected(i) for i in indices]
    out, flat = c.op(x.data, selecting), c.op(_flat_indices(x), selecting)
    integers = _integer_indices(indices)
    if all(i.all_valid for i in integers):
        return gathered(x, flat, torch.ones((), dtype=torch.bool), out)
    if any(i is not None and _is_boolean(i) for i in indices):
        raise Refused("index with boolean and invalid integer indices")
    # To find out where torch puts the index dimensions, index a tensor of index numbers by these numbers.
    known = broadcast_valid(torch.broadcast_shapes(*(i.shape for i in integers)), integers)
    numbers = torch.arange(known.numel())
    by_number = [None if i is None else numbers.reshape(known.shape) for i in indices]
    indexed = [d for d, i in enumerate(indices) if i is not None]
    sizes = [known.numel() if d in indexed else size for d, size in enumerate(x.shape)]
    source = numbers.reshape([-1 if d == indexed[0] else 1 for d in range(x.ndim)]).expand(sizes)
    return gathered(x, flat, known.reshape(-1)[c.op(source, by_number)], out)


def _is_boolean(index: Expected) -> bool:
    return index.data.dtype in (torch.bool, torch.uint8)


def _as_selected(index: Expected | None) -> Tensor | None:
    """An index for plain torch: an invalid entry of a boolean index selects nothing."""
    if index is None:
        return None
    return index.data & index.mask if _is_boolean(index) else index.data


def _integer_indices(indices: Sequence[Expected | None]) -> list[Expected]:
    return [i for i in indices if i is not None and not _is_boolean(i)]


@oracle("masked_select")
def masked_select(c: Call) -> Expected:
    """x[m]: an invalid entry of the mask selects nothing."""
    x, chosen = c["self"], c["mask"]
    shape = torch.broadcast_shapes(x.shape, chosen.shape)
    selected = (chosen.data & chosen.mask).expand(shape)
    return x.map(lambda t: t.expand(shape)[selected])


# --------------------------------------------------------------------------------------- assignment, accumulation


def write(x: Expected, targets: Tensor, source: Expected, kind: str = "last", include_self: bool = True) -> Expected:
    """`x` with the elements of a 1-d source at the flat indices `targets`.

    kind          "last": they are written one after the other; else the reduction of the valid ones for each target
    include_self  whether the target's own element, if it is valid, takes part in the reduction
    """
    flat = x.map(lambda t: t.reshape(-1).clone())
    contributions: dict[int, list[Tensor]] = {}
    for target, value, known in zip(targets.tolist(), source.data, source.mask.tolist(), strict=True):
        if kind == "last":
            flat.data[target], flat.mask[target] = value, known
        elif known:
            contributions.setdefault(target, []).append(value)
    for target, values in contributions.items():
        if include_self and bool(flat.mask[target]):
            values.insert(0, x.data.reshape(-1)[target])
        flat.data[target], flat.mask[target] = _combined(kind, values, x.data), True
    return flat.map(lambda t: t.reshape(x.shape))


def _combined(kind: str, contributions: list[Tensor], like: Tensor) -> Tensor:
    values = torch.stack(contributions)
    if values.dtype is torch.complex32:
        values = values.to(torch.complex64)  # torch does not sum complex32
    if kind == "mean":
        # Integer means round down, as scatter_reduce does.
        total = values.sum(0)
        return total / len(values) if like.dtype.is_floating_point or like.dtype.is_complex else total // len(values)
    if kind in ("sum", "add"):
        return values.sum(0).to(like.dtype)
    if kind in ("prod", "multiply"):
        return values.prod(0).to(like.dtype)
    return values.amax(0) if kind == "amax" else values.amin(0)


@oracle("select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter")
def scattered(c: Call) -> Expected:
    """A written element takes the value and the validity of the source's element."""
    mask = c.run({}, lambda operand: operand.mask)
    return Expected(c.plain(), mask)


@oracle("copy")
def copy(c: Call) -> Expected:
    """The value and the validity of the source."""
    x, source = c["self"], c["src"]
    return Expected(source.data.to(x.data.dtype).expand(x.shape).clone(), source.mask.expand(x.shape))


def _targets(c: Call) -> tuple[Tensor, Tensor]:
    """The flat index where each element of the source is written, and whether the index that says so is valid."""
    flat, index = _flat_indices(c["self"]), c["index"]
    named = torch.where(index.mask, index.data, 0)
    if c.name == "put":
        return flat.reshape(-1)[named], index.mask
    if c.name.startswith("scatter"):
        return flat.gather(c["dim"], named), index.mask
    targets = flat.index_select(c["dim"], named.reshape(-1))
    shape = [1] * flat.ndim
    if shape:
        shape[c["dim"]] = -1
    return targets, index.mask.reshape(shape).expand(targets.shape)


@oracle(
    """index_copy index_add index_reduce put scatter.src scatter.value scatter_add scatter_reduce scatter.reduce
    scatter.value_reduce"""
)
def written(c: Call) -> Expected:
    """Element by element, in order, or a reduction over valid contributions; an invalid index writes nothing."""
    x, (targets, known) = c["self"], _targets(c)
    source = c.get("src", c.get("source", c.get("value")))
    if not isinstance(source, Expected):
        source = valid(torch.full(targets.shape, source, dtype=x.data.dtype))
    if c.get("alpha", 1) != 1:
        source = Expected(source.data * c["alpha"], source.mask)
    if source.data.numel() == targets.numel():
        source = source.map(lambda t: t.reshape(targets.shape))
    # Of a source that is larger than the index, a corner is read.
    read = source.map(lambda t: t[tuple(map(slice, targets.shape))][known])
    adds = c.get("accumulate") or c.name in ("index_add", "scatter_add")
    return write(x, targets[known], read, "sum" if adds else c.get("reduce", "last"), c.get("include_self", True))


@oracle("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(c: Call) -> Expected:
    """Assignment (an invalid index writes nothing), or with accumulate=True a sum over valid contributions."""
    x, indices, values = c["self"], c["indices"], c["values"]
    known = torch.ones((), dtype=torch.bool)
    if not all(i.all_valid for i in _integer_indices(indices)):
        if any(i is None or _is_boolean(i) for i in indices):
            raise Refused("index_put with slices and invalid indices")
        known = broadcast_valid(torch.broadcast_shapes(*(i.shape for i in indices)), indices)
    targets = torch.ops.aten.index.Tensor(_flat_indices(x), [_as_selected(i) for i in indices])
    known = known.reshape(*known.shape, *[1] * (targets.ndim - known.ndim)).expand(targets.shape)
    source = values.map(lambda t: t.expand(targets.shape)[known])
    return write(x, targets[known], source, "sum" if c["accumulate"] else "last")


@oracle("masked_scatter")
def masked_scatter(c: Call) -> Expected:
    """Element by element, in order; an invalid entry of the mask writes nothing and consumes nothing."""
    shape = torch.broadcast_shapes(c["self"].shape, c["mask"].shape)
    x, mask = (operand.map(lambda t: t.expand(shape)) for operand in (c["self"], c["mask"]))
    targets = _flat_indices(x)[mask.data & mask.mask]
    return write(x, targets, c["source"].map(lambda t: t.reshape(-1)[: len(targets)]))
