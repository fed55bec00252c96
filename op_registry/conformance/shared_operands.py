"""Calls whose operands have one mask, or are one tensor, as in f(x, x): shortcuts recognise both by identity.

Torch's samples have few operands of one shape (its queries are fewer than its keys, its matrices are not square), so
that these calls are made from them: operands of one dtype get the shape of the largest, where torch accepts it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator

from torch import Tensor

from op_registry.conformance import plain_torch
from op_registry.conformance.masks import ITSELF, SHARED, masking
from op_registry.conformance.sample import Sample
from op_registry.conformance.trees import tree_leaves

# What the operands have in common whose shapes become one, the least first.
Key = Callable[[Tensor], object]
_KEYS: tuple[Key, ...] = (lambda t: t.dtype, lambda t: (t.dtype, t.ndim), lambda t: (t.dtype, t.shape))


def asked_once(stored: bool) -> tuple[str, ...]:
    """The kinds of masks under which one sample is asked, as all these calls of an operator meet the same shortcuts."""
    return (SHARED, ITSELF) if stored else (ITSELF,)


@functools.lru_cache(maxsize=256)  # every law asks, and what plain torch does is remembered by sample
def call_under(kind: str, sample: Sample, any_shape: bool = True) -> Sample | None:
    """The call for a kind of masks: under SHARED and ITSELF with operands alike; None if plain torch can't make it.

    any_shape  whether operands may get other shapes. (Samples of a user's own operator are what its author means, and
               what the oracle takes.)
    """
    if kind not in (SHARED, ITSELF):
        return sample
    calls = _with_tensors_alike if kind == SHARED else _with_one_tensor
    tried = _from(calls, sample) if any_shape else filter(None, [calls(sample, _KEYS[2])])
    return next((call for call in tried if plain_torch.forward(call).error is None), None)


def _from(calls: Callable[[Sample, Key], Sample | None], sample: Sample) -> Iterator[Sample]:
    """The calls to try: the most operands alike first, and matrices cut to squares last."""
    for key in _KEYS:
        yield from filter(None, [calls(sample, key)])
    smallest = min((size for t in sample.tensors for size in t.shape if size > 1), default=1)
    args, kwargs = sample.with_tensors(lambda t: t[(slice(smallest),) * t.ndim].clone())
    yield from filter(None, [calls(dataclasses.replace(sample, args=args, kwargs=kwargs), _KEYS[1])])


def _largest(sample: Sample, key: Key) -> dict[object, Tensor]:
    largest: dict[object, Tensor] = {}
    for tensor in sample.tensors:
        if tensor.numel() > largest.setdefault(key(tensor), tensor).numel():
            largest[key(tensor)] = tensor
    return largest


def _with_tensors_alike(sample: Sample, key: Key) -> Sample | None:
    """Operands of one key in one shape, if two have one: those of other shapes are the largest one in reverse."""
    largest = _largest(sample, key)

    def alike(tensor: Tensor) -> Tensor:
        wanted = largest[key(tensor)]
        return tensor if tensor.shape == wanted.shape else plain_torch.in_reverse(wanted)

    args, kwargs = sample.with_tensors(alike)
    call = dataclasses.replace(sample, args=args, kwargs=kwargs)
    return None if masking(SHARED, call.tensors) is None else call


def _with_one_tensor(sample: Sample, key: Key) -> Sample | None:
    """One tensor in place of all operands of a key, if two have one, and if none of them is written to."""
    largest = _largest(sample, key)
    args, kwargs = sample.with_tensors(lambda t: largest[key(t)])
    call = dataclasses.replace(sample, args=args, kwargs=kwargs)
    times = Counter(id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    if not any(times[id(t)] > 1 and t.numel() > 1 for t in call.tensors):
        return None
    if sample.variables is not None:  # differentiated only where each operand that it stands for is
        others = {id(largest[key(t)]) for n, t in enumerate(sample.tensors) if n not in sample.variables}
        kept = frozenset(n for n, t in enumerate(call.tensors) if id(t) not in others)
        call = dataclasses.replace(call, variables=kept)
    return None if plain_torch.forward(call).touched else call
