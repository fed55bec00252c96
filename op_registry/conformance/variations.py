"""Other calls made from a sample: with other numbers, with operands alike, and folded to more dimensions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from op_registry.conformance import plain_torch
from op_registry.conformance.masks import ITSELF, SHARED, masking
from op_registry.conformance.plain_torch import Recorder
from op_registry.conformance.sample import Sample, chosen, start_random_numbers, tree_leaves, tree_map


def with_other_numbers(sample: Sample, seed: int = 0) -> Sample:
    """The sample with every number changed for which plain torch's results keep their shapes and dtypes.

    The sample itself if there is no such number.
    """
    positions = _positions_of_numbers(sample, seed)
    kinds = _kinds_of_results(sample, seed) if positions else None
    for position in positions if kinds is not None else ():
        changed = _with_other_number(sample, position)
        if _kinds_of_results(changed, seed) == kinds:
            sample = changed
    return sample


def _positions_of_numbers(sample: Sample, seed: int) -> list[int]:
    """Which leaves of the arguments are operands: floats, and values of arguments whose schema type is a number.

    Other ints and bools are sizes and options, and torch doesn't validate all of these: batch norm without running
    statistics crashes with training=False.
    """
    leaves = tree_leaves((sample.args, sample.kwargs))
    numbers = _numbers_of_schemas(sample, seed) if any(isinstance(leaf, int) for leaf in leaves) else []
    return [
        position
        for position, leaf in enumerate(leaves)
        if isinstance(leaf, (float, complex))
        or any(type(leaf) is type(number) and leaf == number for number in numbers if isinstance(leaf, int))
    ]


def _numbers_of_schemas(sample: Sample, seed: int) -> list[Any]:
    """The values that the call passes to operators for arguments whose schema type is a number."""
    args, kwargs, _ = sample.copies()
    start_random_numbers(seed)
    numbers: list[Any] = []
    for op, op_args, op_kwargs in Recorder().recorded(sample.fn, *args, **kwargs):
        numeric = {a.name for a in op._schema.arguments if "number" in str(a.type)}
        values = {**dict(zip((a.name for a in op._schema.arguments), op_args, strict=False)), **op_kwargs}
        numbers += tree_leaves([value for name, value in values.items() if name in numeric])
    return numbers


def _with_other_number(sample: Sample, position: int) -> Sample:
    """The sample with one leaf changed: a float is halved (it may be a probability), a bool negated, an int plus 1."""
    leaf_positions = itertools.count()

    def other(leaf: object) -> Any:
        if next(leaf_positions) != position or not isinstance(leaf, (int, float, complex)):
            return leaf
        if isinstance(leaf, bool):
            return not leaf
        return leaf + 1 if isinstance(leaf, int) or not leaf else leaf / 2

    args, kwargs = tree_map(other, (sample.args, sample.kwargs))
    return dataclasses.replace(sample, args=args, kwargs=kwargs)


def _kinds_of_results(sample: Sample, seed: int) -> list[Any] | None:
    """The shapes and dtypes of plain torch's results; None if it raises."""
    args, kwargs, _ = sample.copies()
    start_random_numbers(seed)
    try:
        results = tree_leaves(sample.fn(*args, **kwargs))
    except Exception:
        return None
    return [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in results]


# ----------------------------------------------------------------------------------------------------------------------
# Calls whose operands have one mask, or are one tensor, as in f(x, x): shortcuts recognise both by identity.

# Torch's samples have few operands of one shape (its queries are fewer than its keys, its matrices are not square), so
# that these calls are made from them: operands of one dtype get the shape of the largest, where torch accepts it.

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
    """Operands of one key in one shape, if two have one: those of other shapes are the largest one in reverse.

    What has no elements stays: of a batch of no samples, torch may not check the shape.
    """
    largest = _largest(sample, key)

    def alike(tensor: Tensor) -> Tensor:
        wanted = largest[key(tensor)]
        stays = tensor.shape == wanted.shape or not tensor.numel()
        return tensor if stays else plain_torch.in_reverse(wanted)

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


# -------------------------- the samples on which storages are compared: those with a tensor that can be stored sparsely

# Torch's samples of unary operators are 1-d, empty, or a single number. A few of them are folded to two and three
# dimensions, so that every layout is tested with every operator. So are the samples of operators whose 2-d samples all
# have a zero derivative (hardtanh between two close numbers).

# Folded samples are numbered from here, above the numbers of the database's samples.
FOLDED = 10_000
# How many 1-d samples are folded.
MOST = 3
# How many samples are differentiated to find one with a nonzero derivative.
SLOPES = 8


def storable(samples: Sequence[Sample]) -> list[Sample]:
    """Samples with a tensor of two or more dimensions; with folded ones too if none of these has a nonzero derivative.

    Without any such samples: the folded ones, or if nothing can be folded, all samples.
    """
    multidimensional = [s for s in samples if any(t.ndim >= 2 and t.numel() > 1 for t in s.tensors)]
    if not multidimensional:
        return list(_folded(samples)) or list(samples)
    if any(map(_sloped, chosen(multidimensional, SLOPES))):
        return multidimensional
    return [*multidimensional, *filter(_sloped, _folded(samples))]


def _sloped(sample: Sample) -> bool:
    """Whether plain torch's derivative is nonzero."""
    return plain_torch.derivative(sample).sloped


def _folded(samples: Sequence[Sample]) -> Iterator[Sample]:
    number = FOLDED
    seen: set[tuple[Any, ...]] = set()
    for sample in samples:
        shapes = {tuple(t.shape) for t in sample.tensors if t.ndim}
        if len(shapes) != 1 or sample.shape_of_call() in seen or len(seen) == MOST:
            continue
        (shape,) = shapes
        if len(shape) != 1 or not _factors(shape[0], 2):
            continue
        seen.add(sample.shape_of_call())
        for dims in (2, 3):
            sizes = _factors(shape[0], dims)
            number += 1
            if not sizes:
                continue
            args, kwargs = sample.with_tensors(lambda t, sizes=sizes: _reshaped(t, sizes))  # type: ignore[misc]
            folded = dataclasses.replace(sample, args=args, kwargs=kwargs, number=number)
            if plain_torch.forward(folded).error is None:
                yield folded


def _reshaped(t: Tensor, sizes: Sequence[int]) -> Tensor:
    return t.reshape(*sizes) if t.ndim else t


def _factors(size: int, dims: int) -> tuple[int, ...] | None:
    """`size` as a product of `dims` factors greater than 1, small ones first."""
    if dims == 1:
        return (size,) if size > 1 else None
    for factor in range(2, size):
        if size % factor == 0:
            rest = _factors(size // factor, dims - 1)
            if rest:
                return (factor, *rest)
    return None
