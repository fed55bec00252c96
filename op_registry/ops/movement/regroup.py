"""Views of permuted sparse records: which dimensions of the base make up each dimension of a new shape.

A view lists the same elements in the same order. So the new shape regroups the base's dimensions, in the order in which
the record shows them: sparse dimensions stay whole, adjacent dense ones merge and split freely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from op_registry.authoring import Groups


@dataclass
class _Reader:
    """The base's dimensions, in the order in which they are shown, taken from the left.

    sizes   sizes of the base
    sparse  the number of its sparse dimensions
    ahead   the dimensions not taken yet
    rest    the remaining size of a dense dimension that was taken in part; 1 if nothing remains
    dense   sizes of the dense dimensions taken, the result's
    """

    sizes: Sequence[int]
    sparse: int
    ahead: list[int]
    rest: int = 1
    dense: list[int] = field(default_factory=list)

    def next_is_single(self) -> bool:
        """Whether a sparse dimension of size 1 comes next."""
        return self.rest == 1 and bool(self.ahead) and self.ahead[0] < self.sparse and self.sizes[self.ahead[0]] == 1

    def next_is_dense(self) -> bool:
        """Whether a dense dimension comes next, after sparse ones of size 1."""
        others = (d for d in self.ahead if d >= self.sparse or self.sizes[d] != 1)
        return self.rest > 1 or next(others, 0) >= self.sparse

    def take_sparse(self) -> int:
        return self.ahead.pop(0)

    def take_dense(self, size: int) -> int:
        self.dense.append(size)
        return self.sparse + len(self.dense) - 1

    def take(self, size: int) -> list[int] | None:
        """The dimensions of the result that make up one of `size` elements, more than 1; None if none do."""
        group: list[int] = []
        has_dense = False
        while size > 1:
            if self.rest == 1 and not self.ahead:
                return None
            if self.rest == 1 and self.ahead[0] < self.sparse:
                own = self.sizes[self.ahead[0]]
                if size % own:
                    return None
                size //= own
                group.append(self.take_sparse())
                continue
            while self.ahead and self.ahead[0] >= self.sparse:  # adjacent dense dimensions are one
                self.rest *= self.sizes[self.ahead.pop(0)]
            taken = math.gcd(self.rest, size)
            if taken not in (self.rest, size) or (has_dense and taken > 1):
                return None
            if taken > 1:
                has_dense = True
                group.append(self.take_dense(taken))
                self.rest //= taken
                size //= taken
        return group


def regroup(
    groups: Groups, sizes: Sequence[int], sparse: int, shape: Sequence[int]
) -> tuple[Groups, tuple[int, ...]] | None:
    """The groups of a view in `shape`, and the sizes of the dense dimensions of its base; None if it has no elements,
    divides a sparse dimension, or mixes sparse with dense ones in several places.

    groups  those of the record that is viewed
    sizes   the shape of its base
    sparse  the number of sparse dimensions
    """
    if 0 in shape or 0 in sizes:
        return None
    reader = _Reader(sizes, sparse, [d for group in groups for d in group])
    result: list[list[int]] = []
    for size in shape:
        if size == 1:
            result.append([reader.take_sparse() if reader.next_is_single() else reader.take_dense(1)])
            continue
        # Sparse dimensions of size 1 may go with either neighbour: with sparse ones, unless dense ones come before.
        if result and all(d < sparse for d in result[-1]) and reader.next_is_dense():
            while reader.next_is_single():
                result[-1].append(reader.take_sparse())
        group = reader.take(size)
        if group is None:
            return None
        result.append(group)
    while result and reader.next_is_single():
        result[-1].append(reader.take_sparse())
    if any(d < sparse for d in reader.ahead):
        return None
    return tuple(map(tuple, result)), tuple(reader.dense)
