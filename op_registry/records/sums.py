"""The validity of sums and products, by the labels of their factors' dimensions, and what meets what in them."""

from __future__ import annotations

import functools
import string
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.dimensions.equation import Equation
from op_registry.dimensions.labels import Dimension, Labels, Role
from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.arguments import accumulation_dtype
from op_registry.records.dense import Dense
from op_registry.records.layout import aligned_validity, broadcast_along
from op_registry.records.validity import as_int8, intersect, unite

# ------------------------------------------------------------------------------------------------- products of matrices

_PRODUCT = Equation("*nk,*km->*nm")


def product_validity(a: Dense, b: Dense) -> Tensor | None:
    """Validity of ``a @ b`` for matrices a (…, n, k) and b (…, k, m): (…, n or 1, m or 1); None if all are valid."""
    factors = {"self": a, "other": b}
    labels = _PRODUCT.labels(torch.ops.aten.matmul.default, factors)
    assert labels is not None
    return validity_of_sum(labels, factors)


def transposed(x: Dense) -> Dense:
    """Exchange the last two dimensions of a record; its validity stays as small as it was."""
    v = aligned_validity(x)
    return Dense(x.data.mT, None if v is None else v.mT)


# ----------------------------------------------------------------------------------------------------- sums of products

Own = tuple[Dimension, ...]


def validity_of_sum(labels: Labels, tensors: Mapping[str, Any]) -> Tensor | None:
    """The validity of a contraction; None if all of it is valid; of size 1 in dimensions over which it broadcasts.

    Operands that are added take no part.
    """
    factors = [(labels.operands[name], x) for name, x in tensors.items() if name not in labels.added]
    masked = [(own, x) for own, x in factors if x.validity is not None]
    if not masked or sums_nothing(labels, factors):
        return None
    if len(masked) == 1:
        return _some(labels, *masked[0])
    varying = [label for own, x in masked for label in _varying(labels, own, x)]
    if len(varying) == len(set(varying)):
        validity = None
        for own, x in masked:
            validity = intersect(validity, _some(labels, own, x))
        return validity
    kept = tuple(label for label in labels.results[0] if any(label in own for own, _ in masked))
    ones = [v.to(torch.float32) for _, x in masked if (v := aligned_validity(x)) is not None]
    # Counts sum non-negative terms: a single term keeps them ≥ 1 at any precision.
    terms = tuple(own for own, _ in masked)
    if _is_matmul(terms, kept):
        count = torch.matmul(*ones)
    elif _is_matmul((*terms[:-1], (*terms[-1][:-2], *terms[-1][:-3:-1])), kept):
        count = torch.matmul(ones[0], ones[1].mT)
    else:
        count = torch.einsum(_as_einsum(terms, kept), ones)
    return _spread(count > 0.5, _missing(kept, labels.results[0]))


def sums_nothing(labels: Labels, factors: Sequence[tuple[Own, Any]]) -> bool:
    """Whether a contracted dimension has size 0."""
    for own, x in factors:
        for label, size in zip(own, x.shape, strict=True):
            if label in labels.roles and known_to_hold(size == 0):
                return True
    return False


def _varying(labels: Labels, own: Own, x: Dense) -> list[Dimension]:
    """The contracted labels along which the validity of a factor varies."""
    validity = aligned_validity(x)
    assert validity is not None
    return [label for d, label in enumerate(own) if label in labels.roles and not broadcast_along(validity, d)]


def _some(labels: Labels, own: Own, x: Dense) -> Tensor | None:
    """Where some element along the contracted dimensions is valid, in the dimensions of the result."""
    dims, in_place, order, missing = _reduction(own, labels.results[0], frozenset(labels.roles))
    validity = x.any_valid(dims, keepdim=in_place) if dims else aligned_validity(x)
    if in_place or validity is None:
        return validity
    if order != tuple(range(len(order))):
        validity = validity.permute(order)
    return _spread(validity, missing)


def _spread(validity: Tensor, missing: Sequence[int]) -> Tensor:
    """With dimensions of size 1 at some places of the result."""
    for d in missing:
        validity = validity.unsqueeze(d)
    return validity


@functools.lru_cache(maxsize=1024)
def _reduction(
    own: Own, result: Own, contracted: frozenset[Dimension]
) -> tuple[tuple[int, ...], bool, tuple[int, ...], tuple[int, ...]]:
    """How a factor's validity becomes the result's: the contracted dimensions; whether the others are in place if those
    are kept with size 1; else the order of the others in the result, and the dimensions that they lack.
    """
    dims = tuple(d - len(own) for d, label in enumerate(own) if label in contracted)
    pairs = zip(reversed(own), reversed(result), strict=False)
    in_place = len(own) <= len(result) and all(mine == label or mine in contracted for mine, label in pairs)
    remaining = [label for label in own if label not in contracted]
    kept = tuple(label for label in result if label in remaining)
    return dims, in_place, tuple(remaining.index(label) for label in kept), _missing(kept, result)


def _missing(kept: Own, result: Own) -> tuple[int, ...]:
    """The dimensions of the result that a tensor of the labels `kept` lacks."""
    return tuple(d for d, label in enumerate(result) if label not in kept)


@functools.lru_cache(maxsize=1024)
def _is_matmul(terms: tuple[Own, ...], result: Own) -> bool:
    """Whether the terms are matrices in the order of torch.matmul, which is faster to call than einsum."""
    if len(terms) != 2 or min(map(len, terms)) < 2 or len(result) != max(map(len, terms)):
        return False
    (*left, m, k), (*right, also_k, n) = terms
    longer = max(left, right, key=len)
    return k == also_k and k not in result and result == (*longer, m, n)


@functools.lru_cache(maxsize=1024)
def _as_einsum(terms: tuple[Own, ...], result: Own) -> str:
    letters = dict(zip({label: None for own in terms for label in own}, string.ascii_letters, strict=False))
    return f"{','.join(''.join(letters[label] for label in own) for own in terms)}->" + "".join(
        letters[label] for label in result
    )


# ------------------------------------------------------------------------------------------------ sums of contributions


def accumulate(records: Sequence[Dense]) -> Dense:
    """The sum of one or more records, in the dtype and shape that torch.add gives them; bool is "or".

    Half-precision contributions are summed in float32 and rounded once.
    """
    dtype = dtype_of_sum([record.data for record in records])
    validities = [record.validity for record in records]
    # Contributions under one mask are all valid at the same elements, so nothing needs a fill.
    together = all(validity is validities[0] for validity in validities)
    terms = [(record.data if together else record.filled(0)).to(accumulation_dtype(dtype)) for record in records]
    total = functools.reduce(torch.add, terms) if len(terms) > 1 else terms[0].clone()
    return Dense(total.to(dtype), functools.reduce(unite, validities))


def dtype_of_sum(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of a sum that adds the tensors in turn: type promotion gives 0-d tensors a lower priority."""
    total = tensors[0].new_empty([1] * (tensors[0].ndim > 0), device="meta")
    for tensor in tensors[1:]:
        dimensions = max(total.ndim, int(tensor.ndim > 0))
        total = total.new_empty([1] * dimensions, dtype=torch.result_type(total, tensor))
    return total.dtype


# -------------------------------------------------------------------------------------------------- which elements meet

# A dimension that is batch; those along which operands meet element by element, although no result has them.
BATCH: Collection[Role | None] = (None,)
OF_LOSSES: Collection[Role | None] = (None, "reduced")
OF_PRODUCTS: Collection[Role | None] = (None, "contracted")


def spread(
    part: Tensor,
    dims: Sequence[Dimension],
    labels: Labels,
    name: str,
    shape: Sequence[int],
    shared: Collection[Role | None] = BATCH,
) -> Tensor | None:
    """Which elements of the operand `name` meet `part`, int8 that broadcasts to something with these dimensions.

    Along a dimension that both have and whose role is `shared`, an element meets those at its index; along others, any.
    None: all of them.
    """
    mine = labels.operands[name]
    if len(mine) != len(shape):
        return None
    places: dict[Dimension, int] = {
        dim: d for d, dim in enumerate(dims) if dim is not None and labels.role_of(dim) in shared
    }
    source = [places.get(dim) for dim in mine]
    order = [d for d in source if d is not None]
    found = anywhere(part, [d for d in range(part.ndim) if d not in order])
    kept = sorted(order)
    found = found.permute([kept.index(d) for d in order])
    for d, place in enumerate(source):
        if place is None:
            found = found.unsqueeze(d)
    return broadcast_back(found, shape)


def broadcast_back(part: Tensor, shape: Sequence[int]) -> Tensor:
    """Which elements of an operand of this shape meet `part` of what it is broadcast to."""
    more = part.ndim - len(shape)
    found = anywhere(part, range(more))
    return anywhere(found, [d for d, size in enumerate(shape) if known_to_hold(size == 1)], keepdim=True)


def anywhere(part: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """Whether `part` has any index along these dimensions."""
    read = [d for d in dims if not known_to_hold(part.shape[d] == 1)]
    if read:
        part = as_int8(part.any(read, keepdim=True))
    return part.squeeze(tuple(dims)) if dims and not keepdim else part


def is_met_everywhere(x: Dense, dims: Sequence[Dimension], mine: Collection[Dimension]) -> bool:
    """Whether it is known that x has a valid element at each index of the dimensions that both have."""
    gone = [d for d, dim in enumerate(dims) if dim not in mine]
    return bool(gone) and x.each_slice_has_one(gone)
