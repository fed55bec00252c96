"""The engine of the oracles that loop: groups of elements, a plain function on the valid ones, and the expected result.

A group is the set of elements that one result reads: a slice, a window, a bag, a pair of rows. An oracle specifies its
groups, by flat indices into its operands, and what plain torch computes from a group's valid elements::

    reduce_groups(groups([x], slices(x.shape, dims)), lambda group: group.values[0].sum(), c.plain())

`reduce_groups` makes one result element of each group, `map_groups` one of each valid element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Expected, valid

# Flat indices into the operands: the same for all operands, or one tensor for each.
Indices = Tensor | Sequence[Tensor]
Results = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Group:
    """One group of elements, and its elements that are valid in every operand.

    number  the group's position among all groups
    size    the number of its elements, valid or not
    kept    the indices, within the group, of the elements that are valid in every operand
    flat    the flat indices of these elements in the first operand
    values  their values in each operand
    """

    number: int
    size: int
    kept: Tensor
    flat: Tensor
    values: tuple[Tensor, ...]


def slices(shape: Sequence[int], dims: Iterable[int]) -> Iterator[Tensor]:
    """The flat indices of each slice over `dims`, in the order of the remaining dimensions."""
    over = sorted(dims)
    rest = [d for d in range(len(shape)) if d not in over]
    indices = torch.arange(math.prod(shape)).reshape(tuple(shape)).permute([*rest, *over])
    yield from indices.reshape(math.prod(shape[d] for d in rest), math.prod(shape[d] for d in over))


def groups(operands: Sequence[Expected], indices: Iterable[Indices]) -> Iterator[Group]:
    """The valid elements of each group of flat indices."""
    flat_data = [operand.data.reshape(-1) for operand in operands]
    flat_masks = [operand.mask.reshape(-1) for operand in operands]
    for number, group in enumerate(indices):
        per_operand = [group] * len(operands) if isinstance(group, Tensor) else group
        mask = flat_masks[0][per_operand[0]]
        for other, index in zip(flat_masks[1:], per_operand[1:], strict=True):
            mask = mask & other[index]
        kept = mask.nonzero().reshape(-1)
        chosen = [index[kept] for index in per_operand]
        values = tuple(data[index] for data, index in zip(flat_data, chosen, strict=True))
        yield Group(number, len(mask), kept, chosen[0], values)


def reduce_groups(
    each: Iterable[Group], one: Callable[[Group], Results], plain: Results, least: int | Callable[[Group], int] = 1
) -> Any:
    """One result element (several, if `plain` is a sequence) from each group: `one` of the group's valid elements.

    Valid if at least `least` elements of the group are. A group that has fewer elements at all has plain torch's own
    result, which is valid.
    """

    def result(group: Group) -> tuple[bool, Results | None]:
        wanted = least if isinstance(least, int) else least(group)
        enough = len(group.kept) >= wanted
        return enough or group.size < wanted, one(group) if enough else None

    return collect(map(result, each), plain)


def collect(results: Iterable[tuple[bool, Results | None]], plain: Results) -> Any:
    """The expected result (several, if `plain` is a sequence), from each group's validity and results.

    A group without results has plain torch's own. If a group's result has several elements, they form the first
    dimension of the expected result.
    """
    outs = [plain] if isinstance(plain, Tensor) else list(plain)
    known, per_group = [], []
    for is_valid, parts in results:
        known.append(is_valid)
        per_group.append([parts] if isinstance(parts, Tensor) else parts)
    mask = torch.tensor(known, dtype=torch.bool)
    expected = []
    for n, out in enumerate(outs):
        if not known or not out.numel():
            expected.append(valid(out))
            continue
        own = out.reshape(-1, len(known))
        columns = [own[:, k] if parts is None else parts[n].reshape(-1) for k, parts in enumerate(per_group)]
        data = torch.stack(columns, -1)
        expected.append(Expected(data.reshape(out.shape).to(out.dtype), mask.expand(data.shape).reshape(out.shape)))
    return expected[0] if isinstance(plain, Tensor) else tuple(expected)


def map_groups(each: Iterable[Group], one: Callable[[Group], Results], plain: Results, mask: Tensor) -> Any:
    """`one` computes a result for each valid element of a group, which replaces the element; masked by `mask`."""
    outs = [plain] if isinstance(plain, Tensor) else list(plain)
    flat: list[Tensor] = []
    pieces: list[list[Tensor]] = [[] for _ in outs]
    for group in each:
        if not len(group.kept):
            continue
        results = one(group)
        flat.append(group.flat)
        for parts, result in zip(pieces, [results] if isinstance(results, Tensor) else results, strict=True):
            parts.append(result)
    expected = [
        Expected(scatter_back(out.shape, flat, [p.to(out.dtype) for p in parts], out.dtype), mask)
        for out, parts in zip(outs, pieces, strict=True)
    ]
    return expected[0] if isinstance(plain, Tensor) else tuple(expected)


def scatter_back(
    shape: Sequence[int], indices: Sequence[Tensor], pieces: Sequence[Tensor], dtype: torch.dtype
) -> Tensor:
    """A tensor with `pieces` at the flat `indices` and zeros elsewhere; differentiable."""
    out = torch.zeros(math.prod(shape), dtype=dtype)
    if indices:
        out = out.index_put((torch.cat(list(indices)),), torch.cat([p.reshape(-1) for p in pieces]))
    return out.reshape(tuple(shape))
