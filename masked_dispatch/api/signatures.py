"""What torch's reductions and scans are called with here, each as a function that is never run.

`reduction` and `scan` (skipna.py) give what they make the signature of one of these: a type checker sees it as that
function, and at run time it is where the names of the other keyword arguments, and the default of `dim`, are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, overload

import torch
from torch import Tensor

from op_registry.records.dims import Number

Dims = int | Sequence[int] | None


class ValuesAndIndices(Protocol):
    """Two tensors by name and in order: one of torch.return_types."""

    @property
    def values(self) -> Tensor: ...

    @property
    def indices(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor: ...

    def __iter__(self) -> Iterator[Tensor]: ...


# ---------------------------------------------------------------------------------------------------------- reductions


def over_dims(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> Tensor:
    """Any number of dimensions, all of them if none is given."""
    raise NotImplementedError


def over_dims_given(
    x: Tensor, dim: int | Sequence[int], keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> Tensor:
    """Any number of dimensions, which torch wants to be given."""
    raise NotImplementedError


def over_dims_in_dtype(
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    skipna: bool = True,
    min_count: int | None = None,
) -> Tensor:
    """Any number of dimensions, and the dtype to convert to before."""
    raise NotImplementedError


def over_one_dim_in_dtype(
    x: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    skipna: bool = True,
    min_count: int | None = None,
) -> Tensor:
    """One dimension or all, and the dtype to convert to before."""
    raise NotImplementedError


def over_dims_corrected(
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    correction: Number | None = 1,
    skipna: bool = True,
    min_count: int | None = None,
) -> Tensor:
    """Any number of dimensions, and what the divisor is less than the number of elements."""
    raise NotImplementedError


def two_over_dims_corrected(
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    correction: Number | None = 1,
    skipna: bool = True,
    min_count: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same with two results."""
    raise NotImplementedError


def index_over_one_dim(
    x: Tensor, dim: int | None = None, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> Tensor:
    """One dimension, or all as if flattened."""
    raise NotImplementedError


def least_and_greatest(
    x: Tensor, dim: int | None = None, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> torch.return_types.aminmax:
    """One dimension or all; the two results by name."""
    raise NotImplementedError


@overload
def chosen(x: Tensor, dim: None = None, *, skipna: bool = True, min_count: int | None = None) -> Tensor: ...


@overload
def chosen(
    x: Tensor, dim: int, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> ValuesAndIndices: ...


def chosen(
    x: Tensor, dim: int | None = None, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> Tensor | ValuesAndIndices:
    """An element of each slice and where it was; of the whole tensor, the element alone."""
    raise NotImplementedError


def chosen_over_one_dim(
    x: Tensor, dim: int = -1, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> ValuesAndIndices:
    """An element of each slice and where it was, along the last dimension if none is given."""
    raise NotImplementedError


# --------------------------------------------------------------------------------------------------------------- scans


def along_dim(x: Tensor, dim: int, *, skipna: bool = True) -> Tensor:
    """One dimension."""
    raise NotImplementedError


def along_dim_in_dtype(x: Tensor, dim: int, *, dtype: torch.dtype | None = None, skipna: bool = True) -> Tensor:
    """One dimension, and the dtype to convert to before."""
    raise NotImplementedError


def chosen_along_dim(x: Tensor, dim: int, *, skipna: bool = True) -> ValuesAndIndices:
    """One dimension: the elements, and where they were."""
    raise NotImplementedError
