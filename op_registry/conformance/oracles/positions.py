"""Movement, indexing, assignment and accumulation: where each element of the result comes from.

For movement the operator itself is run on a tensor of position numbers; looking them up tells which element, with its
validity, arrived where. A number that is no position was written by the operation itself, and is valid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from op_registry.conformance.oracles.slots import Call, NoOracle, Refused, Slot, all_true, oracle, valid

OFFSET = 1 << 20


def movement(c: Call) -> Any:
    """Each element with its validity; what the operation writes of its own is valid."""
    tables: list[Tensor] = []
    start = OFFSET

    def numbered(slot: Slot) -> Tensor:
        nonlocal start
        numbers = torch.arange(start, start + slot.data.numel()).reshape(slot.shape)
        start += slot.data.numel()
        tables.append(slot.mask.reshape(-1))
        if slot.data.is_contiguous() or not slot.data.numel():
            return numbers
        return torch.empty_strided(slot.shape, slot.data.stride(), dtype=torch.int64).copy_(numbers)

    def numbered_as_floats(slot: Slot) -> Tensor:
        return numbered(slot).to(torch.float64)

    for name in ("start", "tensor_indices_or_sections"):
        if isinstance(c.get(name), Slot):
            if not c[name].all_valid:
                raise Refused(f"{c.name} at an unknown place")
            c = Call(c.op, {**c.bound, name: c[name].data})
    data = c.plainly()
    try:
        positions = c.run(c.bound, numbered)
    except RuntimeError:
        start, tables = OFFSET, []
        positions = c.run(c.bound, numbered_as_floats)
    table = torch.cat(tables) if tables else torch.ones(0, dtype=torch.bool)

    def looked_up(out: Tensor, where: Tensor) -> Slot:
        index = where.to(torch.int64) - OFFSET
        written = (index < 0) | (index >= table.numel())
        found = torch.cat([table, torch.ones(1, dtype=torch.bool)])[torch.where(written, table.numel(), index)]
        return Slot(out, found)

    flat, spec = tree_flatten(data)
    return tree_unflatten([looked_up(d, p) for d, p in zip(flat, tree_leaves(positions), strict=True)], spec)


oracle(
    """cat concat concatenate stack hstack vstack dstack column_stack block_diag diag_embed diagonal diagonal_copy
    linalg_diagonal diag diagflat expand expand_as expand_copy broadcast_to broadcast_tensors view view_as view_copy
    reshape reshape_as _reshape_alias _unsafe_view flatten unflatten ravel squeeze squeeze_copy unsqueeze unsqueeze_copy
    t t_copy transpose transpose_copy permute permute_copy movedim moveaxis swapaxes swapdims numpy_T matrix_H mT mH
    adjoint select select_copy slice slice_copy narrow narrow_copy split split_with_sizes split_copy
    split_with_sizes_copy unsafe_split unsafe_split_with_sizes chunk unsafe_chunk tensor_split hsplit vsplit dsplit
    unbind unbind_copy unfold unfold_copy as_strided as_strided_copy alias_copy flip fliplr flipud roll rot90 repeat
    tile tril triu constant_pad_nd pad reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle im2col
    meshgrid cartesian_prod combinations atleast_1d atleast_2d atleast_3d repeat_interleave.self_int _chunk_cat
    fft_fftshift fft_ifftshift resolve_conj_view"""
)(movement)


@oracle("real", "imag")
def part(c: Call) -> Slot:
    """A part of a complex number is valid where the number is."""
    return Slot(c.plainly(), c["self"].mask)


@oracle("view_as_real")
def view_as_real(c: Call) -> Slot:
    """Both parts with the validity of the number."""
    return Slot(c.plainly(), c["self"].mask.unsqueeze(-1).expand(*c["self"].shape, 2))


@oracle("view_as_complex")
def view_as_complex(c: Call) -> Slot:
    """Valid iff both parts are."""
    return Slot(c.plainly(), c["self"].mask.all(-1))


@oracle("repeat_interleave.self_Tensor")
def repeat_interleave(c: Call) -> Any:
    """Each element with its validity; unknown numbers of repetitions have no shape."""
    if not c["repeats"].all_valid:
        raise NoOracle(f"{c.name} of unknown repeats")
    return movement(Call(c.op, {**c.bound, "repeats": c["repeats"].data}))


def gathered(x: Slot, numbers: Tensor, index_valid: Tensor, out: Tensor) -> Slot:
    """The elements of `x` at flat positions `numbers`, with their validity, where the index is valid."""
    if not x.mask.numel():
        return Slot(out, all_true(out))
    return Slot(out, x.mask.reshape(-1)[numbers] & index_valid.expand(out.shape))


def _numbers(x: Slot) -> Tensor:
    return torch.arange(x.data.numel()).reshape(x.shape)


@oracle("gather", "take", "take_along_dim")
def gather(c: Call) -> Slot:
    """An invalid index gives an invalid element."""
    index = c.get("index", c.get("indices"))
    out = c.plainly()
    known = index.mask if index.ndim == out.ndim else index.mask.reshape(out.shape)
    return gathered(c["self"], c.plainly({"self": _numbers(c["self"])}), known, out)


@oracle("index_select")
def index_select(c: Call) -> Slot:
    """As gather, one index for a whole slice."""
    x, index, dim = c["self"], c["index"], c["dim"]
    out = c.plainly()
    shape = [1] * out.ndim
    if out.ndim:
        shape[dim] = index.mask.numel()
    return gathered(x, c.plainly({"self": _numbers(x)}), index.mask.reshape(shape), out)


@oracle("one_hot")
def one_hot(c: Call) -> Slot:
    """A row for each index, valid where the index is."""
    x, classes = c["self"], c["num_classes"]
    if classes == -1 and not x.all_valid:
        classes = int(x.data[x.mask].max()) + 1 if bool(x.mask.any()) else 1
    if classes == -1:
        return valid(c.plainly())
    out = c.plainly({"self": torch.where(x.mask, x.data, 0), "num_classes": classes})
    return Slot(out, x.mask.unsqueeze(-1).expand(out.shape))


@oracle("embedding")
def embedding(c: Call) -> Slot:
    """A row of the weight, valid where the index and the row's elements are."""
    weight, indices = c["weight"], c["indices"]
    # Only valid indices are looked up: they alone count for scale_grad_by_freq.
    kept = indices.mask.reshape(-1).nonzero()[:, 0]
    asked = indices.data.reshape(-1)[kept]
    found = c.run({**c.bound, "indices": valid(asked)}, lambda slot: slot.data)
    plain = c.plainly()
    rows = torch.where(indices.mask, indices.data, 0)
    looked_up = plain.detach().reshape(-1, plain.shape[-1]).index_put((kept,), found).reshape(plain.shape)
    return Slot(looked_up, weight.mask[rows] & indices.mask.unsqueeze(-1))


@oracle("index.Tensor", "_unsafe_index.Tensor")
def index(c: Call) -> Slot:
    """An invalid integer index gives an invalid element; an invalid entry of a boolean index selects nothing."""
    x, indices = c["self"], c["indices"]
    seen = [
        None if i is None else (i.data & i.mask if i.data.dtype in (torch.bool, torch.uint8) else i.data)
        for i in indices
    ]
    out, moved = c.op(x.data, seen), c.op(_numbers(x), seen)
    index_valid = torch.ones((), dtype=torch.bool)
    integers = [i for i in indices if i is not None and i.data.dtype not in (torch.bool, torch.uint8)]
    if integers and not all(i.all_valid for i in integers):
        # The place of the index dimensions in the result: index a tensor that says how each index element got there.
        shape = torch.broadcast_shapes(*(i.shape for i in integers))
        known = torch.ones(shape, dtype=torch.bool)
        for i in integers:
            known = known & i.mask
        numbers = [
            None
            if i is None
            else (
                torch.arange(known.numel()).reshape(shape) if i.data.dtype not in (torch.bool, torch.uint8) else i.data
            )
            for i in indices
        ]
        if any(i is not None and i.data.dtype in (torch.bool, torch.uint8) for i in indices):
            raise Refused("index with boolean and invalid integer indices")
        sizes = [
            known.numel() if n is not None else size
            for n, size in zip([*numbers, *[None] * (x.ndim - len(numbers))], x.shape, strict=True)
        ]
        first = next(d for d, n in enumerate(numbers) if n is not None)
        ways = torch.arange(known.numel()).reshape([-1 if d == first else 1 for d in range(x.ndim)]).expand(sizes)
        index_valid = known.reshape(-1)[c.op(ways, numbers)]
    return gathered(x, moved, index_valid, out)


@oracle("masked_select")
def masked_select(c: Call) -> Slot:
    """x[m]: an invalid entry of the mask selects nothing."""
    x, chosen = c["self"], c["mask"]
    shape = torch.broadcast_shapes(x.shape, chosen.shape)
    where = (chosen.data & chosen.mask).expand(shape)
    return Slot(x.data.expand(shape)[where], x.mask.expand(shape)[where])


# --------------------------------------------------------------------------------------- assignment, accumulation


def _row(ndim: int, dim: int, i: Any) -> tuple[Any, ...]:
    at: list[Any] = [slice(None)] * ndim
    if ndim:
        at[dim] = i
    return tuple(at)


@oracle("select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter")
def scattered(c: Call) -> Slot:
    """The written element takes the value and the validity of what is written."""
    mask = c.run(c.bound, lambda slot: slot.mask)
    return Slot(c.plainly(), mask)


@oracle("copy")
def copy(c: Call) -> Slot:
    """The value and the validity of the source."""
    x, source = c["self"], c["src"]
    return Slot(source.data.to(x.data.dtype).expand(x.shape).clone(), source.mask.expand(x.shape))


@oracle("fill", "zero")
def fill(c: Call) -> Slot:
    """All valid, except where what is written is not."""
    return (
        Slot(c.plainly(), c["value"].mask.expand(c["self"].shape))
        if isinstance(c.get("value"), Slot)
        else valid(c.plainly())
    )


@oracle("index_copy")
def index_copy(c: Call) -> Slot:
    """Row by row, in order; an invalid index writes nothing."""
    x, index, source, dim = c["self"], c["index"], c["source"], c["dim"]
    data, mask = x.data.clone(), x.mask.clone()
    for k, (i, known) in enumerate(zip(index.data.reshape(-1).tolist(), index.mask.reshape(-1).tolist(), strict=True)):
        if known:
            data[_row(x.ndim, dim, i)] = source.data[_row(source.ndim, dim, k)]
            mask[_row(x.ndim, dim, i)] = source.mask[_row(source.ndim, dim, k)]
    return Slot(data, mask)


@oracle("scatter.src", "scatter.value")
def scatter(c: Call) -> Slot:
    """Element by element, in order; an invalid index writes nothing."""
    x, index, dim = c["self"], c["index"], c["dim"]
    source = c.get("src", c.get("value"))
    data, mask = x.data.clone(), x.mask.clone()
    for at in torch.ones(index.shape).nonzero().tolist() if index.ndim else [[]]:
        if not index.mask[tuple(at)]:
            continue
        to = list(at)
        if x.ndim:
            to[dim] = int(index.data[tuple(at)])
        if isinstance(source, Slot):
            data[tuple(to)], mask[tuple(to)] = source.data[tuple(at)], source.mask[tuple(at)]
        else:
            data[tuple(to)], mask[tuple(to)] = source, True
    return Slot(data, mask)


def _combined(kind: str, parts: list[Tensor], like: Tensor) -> Tensor:
    values = torch.stack(parts)
    if values.dtype is torch.complex32:
        values = values.to(torch.complex64)  # torch does not sum complex32
    if kind == "mean":
        # Integer means round down, as scatter_reduce does.
        total = values.sum(0)
        return total / len(parts) if like.dtype.is_floating_point or like.dtype.is_complex else total // len(parts)
    if kind == "sum":
        return values.sum(0).to(like.dtype)
    if kind == "prod":
        return values.prod(0).to(like.dtype)
    return values.amax(0) if kind == "amax" else values.amin(0)


def _accumulate(x: Slot, kind: str, include_self: bool, items: list[tuple[tuple[int, ...], Tensor, bool]]) -> Slot:
    """Reduce `items` (position, value, valid) into x: valid contributions only, self where it is included."""
    into: dict[tuple[int, ...], list[tuple[Tensor, bool]]] = {}
    for where_to, value, known in items:
        into.setdefault(where_to, []).append((value, known))
    data, mask = x.data.clone(), x.mask.clone()
    for where_to, contributions in into.items():
        parts = [value for value, known in contributions if known]
        own = bool(x.mask[where_to])
        if parts:
            if include_self and own:
                parts = [x.data[where_to], *parts]
            data[where_to], mask[where_to] = _combined(kind, parts, x.data), True
    return Slot(data, mask)


REDUCE = {
    "add": "sum",
    "multiply": "prod",
    "mean": "mean",
    "sum": "sum",
    "prod": "prod",
    "amax": "amax",
    "amin": "amin",
}


@oracle("scatter_add", "scatter_reduce", "scatter.reduce", "scatter.value_reduce")
def scatter_reduce(c: Call) -> Slot:
    """A reduction over valid contributions, and self where it is included."""
    x, index, dim = c["self"], c["index"], c["dim"]
    source = c.get("src", c.get("value"))
    items = []
    for at in torch.ones(index.shape).nonzero().tolist() if index.ndim else [[]]:
        if index.mask[tuple(at)]:
            to = list(at)
            if x.ndim:
                to[dim] = int(index.data[tuple(at)])
            if isinstance(source, Slot):
                items.append((tuple(to), source.data[tuple(at)], bool(source.mask[tuple(at)])))
            else:
                items.append((tuple(to), torch.as_tensor(source).to(x.data), True))
    return _accumulate(x, REDUCE[c.get("reduce") or "sum"], c.get("include_self", True), items)


@oracle("index_add", "index_reduce")
def index_add(c: Call) -> Slot:
    """As scatter_add, whole slices at a time."""
    x, index, source, dim = c["self"], c["index"], c["source"], c["dim"]
    alpha = c.get("alpha", 1)
    items = []
    shape = source.shape if source.ndim else torch.Size([1] * x.ndim)
    data, mask = source.data.reshape(shape), source.mask.reshape(shape)
    for at in torch.ones(shape).nonzero().tolist() if shape else [[]]:
        k = at[dim] if shape else 0
        if bool(index.mask.reshape(-1)[k]):
            to = list(at)
            if x.ndim:
                to[dim] = int(index.data.reshape(-1)[k])
            value = data[tuple(at)] * alpha if alpha != 1 else data[tuple(at)]
            items.append((tuple(to), value, bool(mask[tuple(at)])))
    return _accumulate(x, REDUCE[c.get("reduce") or "sum"], c.get("include_self", True), items)


@oracle("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(c: Call) -> Slot:
    """Assignment (an invalid index writes nothing), or with accumulate=True a sum over valid contributions."""
    x, indices, values = c["self"], c["indices"], c["values"]
    seen = [
        None if i is None else (i.data & i.mask if i.data.dtype in (torch.bool, torch.uint8) else i.data)
        for i in indices
    ]
    if any(i is not None and i.data.dtype not in (torch.bool, torch.uint8) and not i.all_valid for i in indices):
        known = torch.ones((), dtype=torch.bool)
        for i in indices:
            if i is not None and i.data.dtype not in (torch.bool, torch.uint8):
                known = known & i.mask
        if any(i is None or i.data.dtype in (torch.bool, torch.uint8) for i in indices):
            raise Refused("index_put with slices and invalid indices")
    else:
        known = torch.ones((), dtype=torch.bool)
    to = torch.ops.aten.index.Tensor(_numbers(x), seen)
    data, mask = values.data.expand(to.shape), values.mask.expand(to.shape)
    known = known.reshape(*known.shape, *[1] * (to.ndim - known.ndim)).expand(to.shape)
    flat, flat_mask = x.data.reshape(-1).clone(), x.mask.reshape(-1).clone()
    triples = zip(
        to.reshape(-1).tolist(), data.reshape(-1), mask.reshape(-1).tolist(), known.reshape(-1).tolist(), strict=True
    )
    if c["accumulate"]:
        items: list[tuple[tuple[int, ...], Tensor, bool]] = [((p,), v, m) for p, v, m, k in triples if k]
        out = _accumulate(Slot(flat, flat_mask), "sum", True, items)
        return Slot(out.data.reshape(x.shape), out.mask.reshape(x.shape))
    for position, value, is_valid, k in triples:
        if k:
            flat[position], flat_mask[position] = value, is_valid
    return Slot(flat.reshape(x.shape), flat_mask.reshape(x.shape))


@oracle("put")
def put(c: Call) -> Slot:
    """index_put on the flat tensor."""
    x, index, source = c["self"], c["index"], c["source"]
    flat = Call.of(
        torch.ops.aten.index_put.default,
        [
            Slot(x.data.reshape(-1), x.mask.reshape(-1)),
            [Slot(index.data.reshape(-1), index.mask.reshape(-1))],
            Slot(source.data.reshape(-1), source.mask.reshape(-1)),
            c["accumulate"],
        ],
        {},
    )
    out = index_put(flat)
    return Slot(out.data.reshape(x.shape), out.mask.reshape(x.shape))
