"""The category of whole slices: a slice gives its result if nothing in it is missing, and none otherwise.

A matrix with a missing element has no inverse, and a line with a missing sample has no spectrum. A batch of which one
matrix is padding still has the inverses of the others. So, slice by slice, all or nothing::

    linalg_inv_ex = whole_slices(aten.linalg_inv_ex)  # the slices are matrices
    _fft_c2c = whole_slices(aten._fft_c2c, dims=Slices("each"), replacement=0)  # blocks over those in `dim`

*Before* the operator runs, each slice that is not whole is replaced by a constant, by selection. The operator then
neither raises for it nor gives NaN, its derivatives neither, and no gradient passes the replacement. For matrices the
constant is a diagonal of distinct positive numbers: the derivatives of eigenvectors and singular vectors divide by
differences of eigenvalues, and those of an identity are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.bound import argument
from op_registry.dimensions.movements import Along
from op_registry.dimensions.slices import Slices
from op_registry.laws.words import of_category
from op_registry.records.arguments import Number
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.fill import fill_where_invalid
from op_registry.records.layout import aligned_validity
from op_registry.records.validity import as_bool, as_int8, intersect
from op_registry.rule import Category
from op_registry.traits import NO_TRAITS, Traits

MATRIX = (-2, -1)

# What stands for a slice that is not whole: a number, or a tensor made for the data of which it replaces a part.
Replacement = Number | Callable[[Tensor], Tensor]


def spread_diagonal(data: Tensor) -> Tensor:
    """A matrix of the size of those in `data`, distinct positive numbers on its diagonal and zeros elsewhere.

    The numbers lie between √½ and √2 and their product is 1 (from two of them on), so that determinants and powers of
    matrices of any size stay in range.
    """
    rows, columns = data.shape[-2:]
    size = min(rows, columns)
    numbers = torch.linspace(-0.5, 0.5, size, device=data.device, dtype=torch.float32).exp2()
    diagonal = torch.diag_embed(numbers.to(data.dtype))
    return torch.nn.functional.pad(diagonal, (0, columns - size, 0, rows - size))


def whole_validity(x: Dense, dims: Sequence[int] = MATRIX, read: Tensor | None = None) -> Tensor | None:
    """Where each slice over `dims` is whole, these dimensions kept with size 1; None where every slice is.

    `read` is True where the operator reads a slice; it broadcasts to `x`. A slice without elements is whole.
    """
    validity = aligned_validity(x)
    if validity is None or x.ndim < len(dims) or math.prod(x.shape[d] for d in dims) == 0:
        return None
    valid = as_bool(validity)
    if read is not None:
        valid = valid | ~read
    return as_int8(valid.all(tuple(dims), keepdim=True) if len(dims) else valid)


def replaced(x: Dense, whole: Tensor | None, replacement: Replacement, partly_read: bool = False) -> Tensor:
    """The data of `x` with `replacement` in the slices that are not `whole`.

    A slice that is only `partly_read` may be whole and have invalid elements where it is not read: they are replaced.
    """
    if whole is None:
        return x.data
    kept = intersect(whole, aligned_validity(x)) if partly_read else whole
    value = replacement(x.data) if callable(replacement) else replacement
    return fill_where_invalid(x.data, kept, value)


def for_each_slice(result: Tensor, validity: Tensor | None, batch: int) -> Dense:
    """A result of which the first `batch` dimensions number the slices, and `validity` says which of them are valid.

    The validity broadcasts to these dimensions. A result without elements is all valid: operators return such for what
    they are told not to compute.
    """
    if validity is None or result.numel() == 0:
        return Dense(result)
    lead, rest = batch - validity.ndim, result.ndim - batch
    return Dense(result, validity.reshape((1,) * lead + tuple(validity.shape) + (1,) * rest))


def each_matrix(whole: Tensor | None) -> Tensor | None:
    """The validity of each matrix, without the dimensions of the matrix."""
    return None if whole is None else whole[..., 0, 0]


def run_whole_slices(op: OpOverload, x: Dense, *args: Any, _traits: Traits = NO_TRAITS, **kwargs: Any) -> Any:
    """The operator on its first operand, with the slices that are not whole replaced. Other arguments are no tensors.

    The traits say which slices:

    dims         Slices("each"): an argument has the dimensions of a slice, which the result keeps; without it, slices
                 are matrices, and every result has dimensions of its own after those of the batch
    replacement  the constant (default: a spread diagonal)
    """
    over = _traits.dims.dim if isinstance(_traits.dims, (Slices, Along)) else None
    whole = whole_validity(x, MATRIX if over is None else argument(op, over, (x, *args), kwargs))
    replacement = spread_diagonal if _traits.replacement is None else _traits.replacement
    results = op(replaced(x, whole, replacement), *args, **kwargs)
    if over is not None:
        return Dense(results, whole)
    matrices = each_matrix(whole)
    return map_tensors(lambda result: for_each_slice(result, matrices, x.ndim - 2), results, Tensor)


WHOLE_SLICES = Category(
    "whole slices",
    "the op on each slice (a matrix, a line, a row); valid where every element of the slice is",
    run_whole_slices,
    why_dense="it works on a whole slice at once, whose elements have to lie side by side",
    traits=("replacement",),
)
whole_slices = of_category(WHOLE_SLICES)
