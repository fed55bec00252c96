"""Words for sparse runs that are written in other operators, or in single elements.

call         an operator on records, by its sparse run or by its rule
elements_at  the elements at given places, of a record stored anyhow
listed       the stored elements with all dimensions sparse, and where they are
from_listed  the reverse
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.broadcast import present
from op_registry.lowering import run_sparsely
from op_registry.patterns import PACKED, Places, unraveled
from op_registry.places import gathered
from op_registry.records import Dense, as_bool, as_int8, being_traced, map_tensors
from op_registry.registry import registry
from op_registry.sparse import NotLowered, Sparse, arranged, coalesced, from_dense, stored_valid, unblocked
from op_registry.turned import AnyRecord, Turned, to_dense


def call(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """An operator on records, as the rule book has it, by its lowering where one of them is sparse."""
    rule = registry.written(op)
    if rule is None:
        raise NotLowered(f"{op} has no rule")
    sparse: list[Any] = []
    map_tensors(sparse.append, [*args, *kwargs.values()], (Sparse, Turned))
    if sparse:
        return run_sparsely(op, rule, args, kwargs)
    return rule.bind(op)(*args, **kwargs)


def only_sparse_records(*records: AnyRecord | None) -> None:
    """NotLowered where a record has its dimensions in another order."""
    if any(isinstance(r, Turned) for r in records):
        raise NotLowered("an operand has dense dimensions before sparse ones")


def elements_at(x: Dense | Sparse, places: Sequence[Tensor]) -> Dense:
    """The single elements at places given for every dimension: (n,), invalid where none is stored."""
    if isinstance(x, Dense):
        if x.ndim == 0:
            number = places[0].shape if places else (1,)
            return x.moved(lambda t: t.expand(number))
        v = x.full_validity
        return Dense(gathered(x.data, tuple(places)), None if v is None else gathered(v, tuple(places)))
    sparse = x.pattern.ndim
    position, found = x.pattern.find(tuple(places[:sparse]))
    where = (position, *places[sparse:])
    return x.flat_to_point_at().moved(lambda t: t[where]).keep(as_int8(found))


def listed(x: Sparse) -> tuple[Dense, Places]:
    """The valid elements one after another, (n,), and the place of each in every dimension."""
    flat, places = stored_valid(x)
    if not x.dense_sizes:
        if flat.validity is None or being_traced(flat.data):
            return flat, places
        kept = as_bool(as_int8(flat.full_validity)).nonzero()[:, 0]  # type: ignore[arg-type]
        return Dense(flat.data.index_select(0, kept)), tuple(p[kept] for p in places)
    if being_traced(flat.data):
        raise NotLowered("how many elements of dense dimensions are valid is not known while tracing")
    row, *rest = as_bool(as_int8(present(flat))).nonzero(as_tuple=True)
    return Dense(flat.data[(row, *rest)]), (*(p[row] for p in places), *rest)


def listed_of(x: Dense | Sparse) -> tuple[Dense, Places]:
    """`listed`, of a record stored anyhow; a number is listed though it be invalid."""
    if isinstance(x, Dense) and x.ndim == 0:
        return x.moved(lambda t: t.reshape(1)), ()
    return listed(x if isinstance(x, Sparse) else from_dense(x, torch.sparse_coo))


def from_listed(x: Sparse, flat: Dense, places: Sequence[Tensor], sizes: Sequence[int], *, summed: bool = False) -> Any:
    """Elements at places in every dimension, with as many dense dimensions as `x` has and its layout, if there is room.

    `summed` says that several may be at one place; what is valid of them is summed.
    """
    dense = len(x.dense_sizes)
    if len(sizes) <= dense:
        raise NotLowered("no sparse dimension is left")
    layout = layout_for(x, len(sizes) - dense)
    if not dense:
        join = coalesced if summed else arranged
        return join(layout, tuple(places), flat, sizes)
    sparse = len(sizes) - dense
    inner = list(sizes[sparse:])
    number, each = flat.shape[0], math.prod(inner)
    # Every element as a row of which it alone is valid.
    inside = torch.zeros(number, dtype=torch.int64, device=flat.device)
    for p, size in zip(places[sparse:], inner, strict=True):
        inside = inside * size + p
    at = torch.arange(number, device=flat.device) * each + inside
    data = flat.data.new_zeros(number * each).index_copy(0, at, flat.data)
    there = torch.zeros(number * each, dtype=torch.int8, device=flat.device).index_copy(0, at, as_int8(present(flat)))
    rows = Dense(data.reshape(number, *inner), there.reshape(number, *inner))
    return coalesced(layout, tuple(places[:sparse]), rows, sizes[:sparse])


def layout_for(x: Sparse, sparse: int) -> torch.layout:
    """The layout of `x` without blocks, if it has room for so many sparse dimensions; else COO."""
    fits = sparse == 2 or (sparse > 2 and x.pattern.layout is not PACKED)
    return unblocked(x.pattern.layout) if fits else torch.sparse_coo


def grid(shape: Sequence[int], device: torch.device) -> Places:
    """The place of every element of a dense tensor."""
    return unraveled(torch.arange(math.prod(shape), device=device), shape)


def densely(x: Dense | Sparse | None) -> Any:
    """A record as a dense one: for operands that are no larger than the result, which is dense."""
    return x if x is None else to_dense(x)
