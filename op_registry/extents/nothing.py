"""Where none of what a call reduces or contracts is there: the operator's own result for an empty dimension.

A sum of nothing is 0, and so is a contraction over nothing. Where torch has no number (a maximum), or NaN (a mean), the
result is invalid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.bound import Bound
from op_registry.dimensions.labels import Dimension, Label, Labels, atoms
from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import where_all, with_size
from op_registry.extents.regroup import known_of
from op_registry.records.dense import Dense
from op_registry.records.extent import Factor, is_nonempty, numbers_positions
from op_registry.records.tracing import may_be_read
from op_registry.records.validity import as_bool, unite
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import NotLowered, Sparse

# Roles of dimensions of which one result takes all elements (some operators have results for each element, too).
_USING = ("contracted", "reduced", "each", "scanned", "front")

# The factors of each operand that has an extent, by its name.
Given = Mapping[str, Sequence[Factor]]


def used_up(labels: Labels, dims: Sequence[Dimension], given: Given, sizes: Mapping[Label, int]) -> tuple[Label, ...]:
    """The labels on which factors depend that a result of these dimensions does not have; none if it is known that
    something is there along them, for every sample.
    """
    kept = {a for dim in dims for a in atoms(dim)}
    found: dict[Label, None] = {}
    certain = True
    for name, factors in given.items():
        for factor in factors:
            known = known_of(factor, labels.operands[name], sizes)
            gone = [a for a, along in known.items() if along is not None and a not in kept]
            found |= dict.fromkeys(a for a in gone if labels.roles.get(a) in _USING)
            numbered = [known[a] for a in gone if numbers_positions(known[a])]
            # (an index that samples alone give up is not there where no sample has it)
            hidden = not numbered and any(numbers_positions(along) for a, along in known.items() if a in kept)
            certain &= not gone or hidden or (bool(numbered) and all(map(is_nonempty, numbered)))
    return () if certain else tuple(found)


def of_nothing(call: Bound, labels: Labels, gone: Sequence[Label]) -> Any:
    """The results of a call whose operands have no element along these labels; None if it has none."""
    changed: dict[str, Any] = {}
    for name, tensor in call.tensors.items():
        for dim, label in enumerate(labels.operands.get(name, ())):
            if isinstance(label, tuple) and not set(label).isdisjoint(gone):
                return None
            if label in gone and label is not None:
                tensor = _without_elements(tensor, dim)
                changed[name] = tensor
    if callable(call.rule.traits.identity) or any(r.name == "indices" for r in call.op._schema.returns):
        return None  # (an extreme of nothing: torch would raise, and say so in a graph's log)
    emptied = call.with_tensors(changed)
    if any(isinstance(t, (Sparse, Permuted)) for t in emptied.tensors.values()):
        raise NotLowered("samples without positions have results of their own, on dense storage")
    try:
        return emptied.run()
    except (IndexError, RuntimeError, ValueError, MaskedSemanticsError):
        return None


def _without_elements(tensor: Any, dim: int) -> Any:
    """An operand without elements along a dimension, and so without a gradient."""
    if isinstance(tensor, Tensor):
        return tensor.detach().narrow(dim, 0, 0)
    if not isinstance(tensor, Dense):
        return Dense(torch.empty(with_size(tensor.shape, dim, 0), dtype=tensor.dtype, device=tensor.device))
    validity = tensor.full_validity
    return Dense(tensor.data.detach().narrow(dim, 0, 0), None if validity is None else validity.narrow(dim, 0, 0))


def without_any(factors: Sequence[Factor], number: int, result: Sequence[Factor]) -> Tensor | None:
    """Where a result is there and has nothing: none of its operands' elements are; None if each is known to have some.

    factors  of the operands, with the dimensions of the result and `number` more: those that are used up
    result   of the result
    """
    there = as_bool(where_all(factors))
    nothing = there.any(tuple(range(there.ndim - number, there.ndim))).logical_not()
    if result:
        nothing = nothing & as_bool(where_all(result))
    return None if may_be_read(nothing) and not bool(nothing.any()) else nothing


def where_nothing(record: Dense, nothing: Tensor, instead: Dense) -> Dense:
    """A result, and `instead`, where it is valid and a number, in place of what has nothing."""
    given = instead.full_validity
    if given is not None:
        nothing = nothing & as_bool(given)
    if instead.data.is_floating_point() or instead.data.is_complex():
        nothing = nothing & instead.data.isnan().logical_not()
    nothing = nothing.expand(record.shape)
    return Dense(torch.where(nothing, instead.data, record.data), unite(record.full_validity, nothing))
