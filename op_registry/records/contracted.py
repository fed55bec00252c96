"""The validity of a sum of products, by the labels of its factors' dimensions.

Law: a sum is valid where at least one index tuple has only valid factors, or where there is no tuple at all (a
contracted dimension of size 0).

With one masked factor, "some element of the row is valid" decides, and broadcasts over the other factors; so one
validity per token stays one validity per token. Only two masked factors need a product of validities, and only if both
vary along a contracted dimension.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.dimensions.labels import Dimension, Labels
from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.broadcast import aligned_validity, broadcast_along
from op_registry.records.dense import Dense
from op_registry.records.validity import intersect

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
