"""Calls whose operands have one mask, or are one tensor, as in f(x, x): shortcuts recognise both by identity.

Torch's samples have few operands of one shape (its queries are fewer than its keys), so that these calls are made from
them: where torch accepts it, the operands of one dtype and number of dimensions have the shape of the first one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from torch import Tensor

from op_registry.conformance import plain_torch
from op_registry.conformance.masks import ITSELF, SHARED
from op_registry.conformance.sample import Sample

# What two operands have in common whose shapes become one: the most, and what always fits.
_ALIKE: tuple[Callable[[Tensor], object], ...] = (lambda t: (t.dtype, t.ndim), lambda t: (t.dtype, t.shape))


def asked_once(stored: bool) -> tuple[str, ...]:
    """The kinds of masks under which one sample is asked, as all these calls of an operator meet the same shortcuts."""
    return (SHARED, ITSELF) if stored else (ITSELF,)


@functools.lru_cache(maxsize=256)  # every law asks, and what plain torch does is remembered by sample
def call_under(kind: str, sample: Sample) -> Sample | None:
    """The call for a kind of masks: under SHARED and ITSELF with operands alike; None if plain torch can't make it."""
    if kind not in (SHARED, ITSELF):
        return sample
    for key in _ALIKE:
        call = _alike(sample, key, one_tensor=kind == ITSELF)
        if call is not None and _can_be_asked(call, kind):
            return call
    return None if kind == ITSELF else sample


def _alike(sample: Sample, key: Callable[[Tensor], object], one_tensor: bool) -> Sample | None:
    """The call with all operands of one key as the first one, or as other tensors of its shape; None if it is the same.

    Tensors of that shape are kept, with their values; others have the first one's values in reverse.
    """
    firsts: dict[object, Tensor] = {}

    def alike(tensor: Tensor) -> Tensor:
        first = firsts.setdefault(key(tensor), tensor)
        if one_tensor:
            return first
        return tensor if tensor.shape == first.shape else plain_torch.in_reverse(first)

    args, kwargs = sample.with_tensors(alike)
    call = dataclasses.replace(sample, args=args, kwargs=kwargs)
    if list(map(id, call.tensors)) == list(map(id, sample.tensors)):
        return None
    if one_tensor and sample.variables is not None:
        # Differentiated only where each operand that it stands for is.
        others = {id(firsts[key(t)]) for n, t in enumerate(sample.tensors) if n not in sample.variables}
        kept = frozenset(n for n, t in enumerate(call.tensors) if id(t) not in others)
        call = dataclasses.replace(call, variables=kept)
    return call


def _can_be_asked(call: Sample, kind: str) -> bool:
    """Whether plain torch runs it; and writes to nothing, where an operand that it writes to might be another, too."""
    forward = plain_torch.forward(call)
    return forward.error is None and not (kind == ITSELF and forward.touched)
