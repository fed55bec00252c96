"""Reading and writing at computed positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from op_registry.bound import Bound
from op_registry.dimensions.labels import Dimension, Elementwise, Label, Labels, atoms
from op_registry.dimensions.movements import AtIndices, Indexed
from op_registry.dimensions.sizes import known_to_hold
from op_registry.dimensions.views import View
from op_registry.extents import slices
from op_registry.extents.factors import factors_of, first_known, narrowed, there, with_extent
from op_registry.extents.follow import (
    any_stored,
    carried_to,
    followed,
    only_padded,
    records_of,
    refuse,
    sizes_of,
    with_factors,
)
from op_registry.extents.meetings import carried, check_holds, check_meetings, combined
from op_registry.extents.slices import differs
from op_registry.laws.categories import ASSIGNMENT
from op_registry.records.dense import Dense
from op_registry.records.extent import (
    SAMPLES,
    SCATTERED,
    Along,
    Boolean,
    Extent,
    Factor,
    made_of,
    numbers_positions,
    without_order,
)
from op_registry.records.tracing import being_traced, may_be_read, recording
from op_registry.records.validity import as_bool, as_int8, intersect
from op_registry.rule import Run, packet_name
from op_registry.sparse.permuted import AnyRecord
from op_registry.sparse.record import NotLowered

# The arguments of assignments that are written.
_SOURCES = frozenset(("src", "source", "value", "values"))
NAMES_OTHERS = (
    "its index names positions that the tensor does not have: a sample's positions are counted in the batch there"
)


def looked_up(call: Bound, labels: Labels, run: Run) -> Any:
    """Elements at the positions that an index names: its extent, and that of other dimensions, is the result's.

    An element is valid only where the position that it is read from is there.
    """
    records = records_of(call)
    if call.rule.category.name == "accumulation":
        return written(call, labels, run)
    _check_meetings(call, labels, records)
    first, record = next(iter(records.items()))
    indexed = [d for d, dim in enumerate(labels.operands[first]) if labels.role_of(dim) == "indexed"]
    hidden = [f for f in factors_of(record) if any(f.along[d] is not None for d in indexed)]
    if not hidden:
        return followed(call, labels, call.applied(run))
    # (mask within extent: what is not there is invalid)
    result: AnyRecord = call.with_(**{first: with_extent(record, None)}).applied(run)
    sizes, dims = sizes_of(call, labels), labels.results[0]
    rest = [f for f in factors_of(record) if f not in hidden]
    operands = [[carried(f, labels.operands[first], dims, sizes) for f in rest]]
    operands += [
        [carried(f, labels.operands[name], dims, sizes) for f in factors_of(r)]
        for name, r in records.items()
        if name != first
    ]
    others = [[f for f in each if f is not None] for each in operands]
    if len(hidden) == 1 and not any(others) and only_padded(records) and not _differing(call, first, hidden[0], labels):
        return with_factors(result, [Factor(_known_of_read(first, hidden[0], labels))], padded=True, grows=False)
    if any_stored(call):
        raise NotLowered("it reads at positions of samples, on dense storage")
    moved = []
    for f in hidden:
        numbered = any(numbers_positions(f.along[d]) for d in indexed)
        moved.append(_where_read(call, read(call, first, f, labels), others, numbered))
    return with_factors(result, combined([*others, moved], call.rule.name), only_padded(records))


def _where_read(call: Bound, factor: Factor, others: Sequence[Sequence[Factor]], numbered: bool) -> Factor:
    """A factor of what is read, there only where the index is: at its padding nothing is read.

    numbered  whether the index numbers positions, and not samples: then one that is there and reads where nothing is
              counts other positions, those of another batch
    """
    for other in (f for factors in others for f in factors if set(f.depends) <= set(factor.depends)):
        if numbered:
            why = f"{NAMES_OTHERS}. Where samples do not begin at index 0, masked_dispatch.align moves them there"
            check_holds(as_bool(factor.there) | ~as_bool(other.there), refuse(call, why))
        factor = replace(factor, said=Boolean(intersect, (factor.there, other.there)))
    return factor


def _check_meetings(call: Bound, labels: Labels, records: Mapping[str, AnyRecord]) -> None:
    """Refuse operands at different places where they meet: indices one another, and a boolean what it selects from."""
    operands, covered = dict(labels.operands), 0
    if isinstance(call.rule.dims, AtIndices):
        dims = labels.operands[next(iter(records))]
        for n, index in enumerate(call["indices"]):
            selects = index is not None and index.dtype in (torch.bool, torch.uint8)
            width = index.ndim if selects else 1
            if selects:
                operands[f"indices[{n}]"] = dims[covered : covered + width]
            covered += width
    given = {name: factors_of(record) for name, record in records.items()}
    check_meetings(call, replace(labels, operands=operands), given, sizes_of(call, labels))


def read(call: Bound, first: str, factor: Factor, labels: Labels) -> Factor:
    """A factor of the operand that is read, at the positions that are read. (A missing index is there.)"""
    record = call.tensors[first]
    read = call.with_(**{first: Dense(factor.there.expand(record.shape))}).run()
    there = as_int8(read.data)
    if read.validity is not None:
        there = torch.where(as_bool(read.validity), there, 1)
    known = list(_known_of_read(first, factor, labels))
    for d in _differing(call, first, factor, labels):
        numbered = any(numbers_positions(f.along[n]) for n, f in _along(call, labels, labels.results[0][d]))
        found = differs(there, d)
        if found is None and not numbered:  # (a graph would take features for samples)
            why = f"along dimension {d} of its result some indices read padding and others do not, in a graph"
            check_holds(as_bool(there) == as_bool(there).any(d, keepdim=True), refuse(call, why))
        elif found is not False:
            known[d] = SCATTERED if numbered else SAMPLES
    return Factor(tuple(known), narrowed(there, known))


def _differing(call: Bound, first: str, factor: Factor, labels: Labels) -> list[int]:
    """The dimensions of a result along which an index may read other positions; the factor knows nothing of these."""
    free = {
        a for dim, along in zip(labels.operands[first], factor.along, strict=True) if along is None for a in atoms(dim)
    }
    by_index = {
        dim
        for name, tensor in call.tensors.items()
        if name != first and name in labels.operands
        for dim, size, step in zip(labels.operands[name], tensor.shape, _strides(tensor), strict=True)
        if dim in free and dim is not None and step != 0 and not known_to_hold(size == 1)
    }
    return [d for d, dim in enumerate(labels.results[0]) if dim in by_index]


def _strides(tensor: Any) -> Sequence[int | None]:
    data = tensor.data if isinstance(tensor, Dense) else tensor
    return data.stride() if isinstance(data, torch.Tensor) else [None] * tensor.ndim


def _along(call: Bound, labels: Labels, dim: Dimension) -> Iterator[tuple[int, Factor]]:
    """The factors of all operands that depend on a dimension, each with that dimension's number there."""
    for name, record in records_of(call).items():
        for n, own in enumerate(labels.operands[name]):
            if own == dim:
                yield from ((n, f) for f in (record.extent.factors if record.extent is not None else ()))


def _known_of_read(first: str, factor: Factor, labels: Labels) -> tuple[Along, ...]:
    """What is known of the dimensions of a result that is read at positions of the operand."""
    known: dict[Label, Along] = {}
    for dim, along in zip(labels.operands[first], factor.along, strict=True):
        known |= dict.fromkeys(atoms(dim), along)
    return tuple(
        known[label] if label in known else without_order(_indexed(labels, first, factor))
        for label in (atoms(dim)[0] for dim in labels.results[0])
    )


def _indexed(labels: Labels, first: str, factor: Factor) -> Any:
    found = [
        along
        for dim, along in zip(labels.operands[first], factor.along, strict=True)
        if along is not None and labels.role_of(dim) == "indexed"
    ]
    return found[0] if found else None


def written(call: Bound, labels: Labels, run: Run) -> Any:
    """Assignments and accumulations: what is written where nothing is there, is dropped.

    A source writes nothing from positions that it does not have; along what it writes, positions are there where it
    has them.
    """
    records = records_of(call)
    first, record = next(iter(records.items()))
    dims = call.rule.dims
    if isinstance(dims, Elementwise):
        if len([r for r in records.values() if r.extent is not None]) > 1:
            call = call.with_(**{first: with_extent(record, without_whole(record))})
        return followed(call, labels, call.applied(run), written=first)
    if packet_name(call.op) == "masked_scatter":
        return _in_order(call, labels, run)
    if not isinstance(dims, (View, Indexed, AtIndices)) and any(
        r.extent is not None for r in list(records.values())[1:]
    ):
        raise refuse(call, "it writes at places that an operand counts in the batch")  # (max_unpool)
    _check_meetings(call, labels, records)
    if isinstance(dims, View) and slices.hides_ends(call, labels, record):
        raise refuse(call, "bounds from the end are each sample's own in views alone: write x[:, a:-b] = value")
    result: Dense = call.applied(run)
    others = {n: r for n, r in records.items() if n != first and r.extent is not None and r.extent.factors}
    own: Sequence[Factor] = factors_of(record)
    if call.rule.category is ASSIGNMENT:
        if record.extent is not None and any(name.startswith("ind") for name in others):
            own = _known_of_target(call, first)
        for name in others:
            if not name.startswith("ind"):
                result = _from_what_is_there(call, first, name, result)
    given = [_of_source(call, labels, name, factors_of(other)) for name, other in others.items()]
    factors = combined([own, *given], call.rule.name)
    return with_factors(result, factors, padded=only_padded(records)) if factors else result


def _of_source(call: Bound, labels: Labels, name: str, factors: Sequence[Factor]) -> list[Factor]:
    """The factors of what is written, or of an index, as factors of the result."""
    if isinstance(call.rule.dims, View):
        return [_of_a_part(call, next(iter(call.tensors)), name, f, labels) for f in factors]
    moved = [carried(f, labels.operands[name], labels.results[0], sizes_of(call, labels)) for f in factors]
    return [f for f in moved if f is not None]


def without_whole(record: AnyRecord) -> Extent | None:
    """A record's extent without factors of which all is known to be there, as of a buffer's row that nobody has written
    yet: what is written to it may lie anywhere.
    """
    extent = record.extent
    if extent is None or not extent.says:
        return extent
    factors = [f for f in extent.factors if f.said is None or not (may_be_read(f.there) and bool(f.there.all()))]
    return extent if len(factors) == len(extent.factors) else made_of(factors, extent.is_mask, states=extent.states)


def _in_order(call: Bound, labels: Labels, run: Run) -> Any:
    """masked_scatter: the elements of a source go, in order, where the mask is True and the position is there."""
    records = records_of(call)
    if "source" in records and records["source"].extent is not None:
        raise refuse(
            call,
            "it writes the elements of its source one after another, padding too; write those that are there, "
            "x[mask] = source[source.extent], say",
        )
    if any_stored(call):
        raise NotLowered("elements are written where positions are there, in order, on dense storage")
    records.pop("source", None)
    target, mask = call.tensors["self"], call.tensors["mask"]
    selected = mask.filled(False) if isinstance(mask, Dense) else mask
    for record in records.values():
        selected = selected & there(record)
    result = call.with_(mask=Dense(selected)).applied(run)
    dims, sizes = labels.results[0], sizes_of(call, labels)
    found = [
        carried_to(factors_of(record), labels.operands[name], dims, sizes, record, result)
        for name, record in records.items()
    ]
    return with_factors(result, combined(found, call.rule.name), only_padded({"self": target}))


def _of_a_part(call: Bound, first: str, name: str, factor: Factor, labels: Labels) -> Factor:
    """A factor of a source that is written to a part of a tensor; the rest of the tensor is there."""
    if any_stored(call):
        raise NotLowered("positions are written to a part of a dimension, on dense storage")
    record, source = call.tensors[first], call.tensors[name]
    everywhere = torch.ones(record.shape, dtype=torch.int8, device=record.device)
    there = call.with_(**{first: Dense(everywhere), name: Dense(factor.there.expand(source.shape))}).run().data
    known = dict(zip(labels.operands[name], factor.along, strict=True))
    along = tuple(without_order(known[dim]) if dim in known else SAMPLES for dim in labels.results[0])
    return Factor(along, narrowed(there, along))


def _known_of_target(call: Bound, first: str) -> Sequence[Factor]:
    """What is known of the target of an index that knows its own positions.

    A buffer that nobody has written has the positions that the index names, if it names one for each of its own: so the
    inverse of an order is the sample's own. Else, an index that names some at which the target has none is refused.
    """
    target = call.tensors[first]
    if not isinstance(target, Dense):
        return factors_of(target)
    is_written = _where_written(call, first)
    inside = ~is_written | there(target).bool()
    read = not (being_traced(inside) or recording())
    if read and not bool(inside.all()) and _is_unwritten(target) and _names_all(call, first):
        along = [without_order(a) for a in first_known(factors_of(target))]
        return [Factor(tuple(along), narrowed(as_int8(is_written), along))]
    why = (
        f"{NAMES_OTHERS}, and the tensor has others (as the results of argsort have, of samples that do not begin at "
        "index 0; see masked_dispatch.align). A buffer that nobody has written takes them, torch.empty_like(index)"
    )
    check_holds(inside, refuse(call, why))
    return factors_of(target)


def _is_unwritten(target: Dense) -> bool:
    return target.validity is not None and not bool(as_bool(target.validity).any())


def _names_all(call: Bound, first: str) -> bool:
    """Whether indices are valid wherever they are there."""
    indices = [r for name, r in records_of(call).items() if name != first and name.startswith("ind")]
    return all(bool((as_bool(r.full_validity) | ~there(r).bool()).all()) for r in indices if r.validity is not None)


def _from_what_is_there(call: Bound, first: str, name: str, result: Dense) -> Dense:
    """The result of an assignment with what it was before wherever the source is not there."""
    if any_stored(call):
        raise NotLowered("a source with positions of its own is written on dense storage")
    target = call.tensors[first]
    is_written = _where_written(call, first, there(call.tensors[name]))
    kept = target.full_validity
    validity = result.full_validity
    if validity is None and kept is None:
        return Dense(torch.where(is_written, result.data, target.data), None)
    ones = torch.ones(target.shape, dtype=torch.int8, device=result.device)
    mine, its = (ones if v is None else as_int8(v) for v in (validity, kept))
    # (where the operator writes nothing, both are the same)
    return Dense(torch.where(is_written, result.data, target.data), torch.where(is_written, mine, its))


def _where_written(call: Bound, first: str, given: Tensor | None = None) -> Tensor:
    """bool of the target's shape: where an assignment writes, of a source that is there where `given` is."""
    target = call.tensors[first]
    marks: dict[str, Any] = {first: Dense(torch.zeros(target.shape, dtype=torch.int8, device=target.device))}
    for name in _SOURCES.intersection(call.named):
        source = call.named[name]
        if isinstance(source, (Tensor, Dense)):
            ones = torch.ones(source.shape, dtype=torch.int8, device=target.device)
            marks[name] = Dense(ones if given is None else as_int8(given))
        else:
            marks[name] = 1
    return call.with_(**marks).run().data != 0
