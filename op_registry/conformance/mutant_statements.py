"""Ways of being wrong about dimensions: what a rule states of them is made wrong, and the rule runs as before.

A way leaves a call alone in which its statement says nothing else: of dimensions of size 1, or of two with one role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from op_registry.conformance.mutant_calls import restating
from op_registry.dimensions.labels import Label, Labels, Role, atoms

# Roles of labels whose indices are not independent.
MIXING = ("contracted", "reduced", "each", "scanned", "window")
EXCHANGED: Mapping[str, Role] = {"each": "reduced", "reduced": "each", "contracted": "each"}


@restating("states a wrong axis")
def wrong_axis(right: Labels, tensors: Mapping[str, Any]) -> Labels | None:
    """The first operand's dimensions are stated in another order."""
    name, dims = next(iter(right.operands.items()))
    roles = [right.roles.get(dim) if not isinstance(dim, tuple) else None for dim in dims]
    large = [n for n, size in enumerate(tensors[name].shape) if size > 1]
    kept = {a for result in right.results for dim in result for a in atoms(dim)}
    for n in large:
        for m in large:
            told_apart = roles[n] != roles[m] or (roles[n] is None and dims[n] in kept)
            if n < m and told_apart and dims[n] != dims[m]:
                other = [*dims]
                other[n], other[m] = dims[m], dims[n]
                return replace(right, operands={**right.operands, name: tuple(other)})
    return None


@restating("states a contracted dimension as batch")
def contracted_as_batch(right: Labels, tensors: Mapping[str, Any]) -> Labels | None:
    """The first label along which the operator mixes is stated batch."""
    label = next((a for a in _large(right, tensors) if right.roles.get(a) in MIXING), None)
    return None if label is None else replace(right, roles={a: r for a, r in right.roles.items() if a != label})


@restating("states a batch dimension as contracted")
def batch_as_contracted(right: Labels, tensors: Mapping[str, Any]) -> Labels | None:
    """The first batch label is stated as if results depended on the whole slice along it."""
    label = next((a for a in _large(right, tensors) if a not in right.roles), None)
    return None if label is None else replace(right, roles={**right.roles, label: "each"})


@restating("leaves an operand out of its dimensions")
def operand_left_out(right: Labels, tensors: Mapping[str, Any]) -> Labels | None:
    """The last operand is stated to have no dimensions."""
    last = list(right.operands)[-1]
    return replace(right, operands={**right.operands, last: ()}) if right.operands[last] else None


@restating("exchanges each and reduced")
def each_and_reduced_exchanged(right: Labels, tensors: Mapping[str, Any]) -> Labels | None:
    """What gives one result for each element of a slice is stated to give one for all of them, and the reverse."""
    exchanged = {a: EXCHANGED[role] for a in _large(right, tensors) if (role := right.roles.get(a, "")) in EXCHANGED}
    return replace(right, roles={**right.roles, **exchanged}) if exchanged else None


def _large(labels: Labels, tensors: Mapping[str, Any]) -> list[Label]:
    """The labels of operands' dimensions that have more than one index."""
    found = [
        dim
        for name, dims in labels.operands.items()
        for dim, size in zip(dims, tensors[name].shape, strict=True)
        if size > 1 and not isinstance(dim, tuple)
    ]
    return [label for label in dict.fromkeys(found) if label is not None]
