"""Checks of arguments: fills, which replace invalid elements, and storage layouts."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.records.arguments import Number, can_cast
from op_registry.sparse.layout import DENSE, Layout, layout_names, layout_of

# ---------------------------------------------------------------------------------------------------------------- fills


def checked_fill(tensor: Tensor, fill: object) -> Number | Tensor:
    """Convert a fill to a form that torch takes; refuse a fill that the tensor's dtype or shape cannot hold.

    This is stricter than torch's `masked_fill`, which rounds 1.5 to 1 for integers and turns -1 into 255 for uint8.
    """
    if isinstance(fill, Tensor):
        _check_tensor(tensor, fill)
        return fill
    if isinstance(fill, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return fill  # type: ignore[return-value]  # a number that the graph computes when it runs
    number = _number(fill)
    if fill is None:
        raise TypeError(
            "to_tensor(fill) takes the value of invalid elements, a number or a plain tensor, and there is no default: "
            "each use chooses. If every element is valid, any number will do"
        )
    if number is None:
        raise TypeError(
            f"the fill is {fill!r}; it has to be a number or a plain tensor that broadcasts to "
            f"{tuple(tensor.shape)}. To fill with a statistic, compute it first: x.to_tensor(x.mean().item())"
        )
    problem = problem_of_number(number, tensor.dtype)
    if problem:
        raise ValueError(
            f"the fill {fill!r} {problem} {tensor.dtype}, the dtype of this tensor of shape {tuple(tensor.shape)}. "
            f"Pass a number that it can represent, or convert the tensor first: x.to(dtype).to_tensor({fill!r})"
        )
    return number.real if isinstance(number, complex) and not tensor.dtype.is_complex else number


def _number(fill: object) -> bool | int | float | complex | None:
    """Convert a Python or NumPy scalar to a Python number; None for anything else."""
    if isinstance(fill, (bool, int, float, complex)):
        return fill
    if hasattr(fill, "__index__") and getattr(fill, "ndim", 0) == 0:
        return operator.index(fill)
    if hasattr(fill, "__complex__") and getattr(fill, "ndim", 0) == 0:
        number = complex(fill)
        return number if number.imag else number.real
    return float(fill) if hasattr(fill, "__float__") and getattr(fill, "ndim", 0) == 0 else None


def problem_of_number(number: bool | int | float | complex, dtype: torch.dtype) -> str | None:
    """Say why a dtype cannot hold a number; None if it can."""
    if isinstance(number, complex):
        if dtype.is_complex:
            parts = (number.real, number.imag)
            problems = [problem_of_number(part, dtype.to_real()) for part in parts]
            return next((problem for problem in problems if problem), None)
        if number.imag != 0:
            return "is complex, which cannot be a value of"
        number = number.real
    if dtype is torch.bool:
        return None if number in (0, 1) else "is neither True nor False, the values of"
    if dtype.is_floating_point or dtype.is_complex:
        if math.isfinite(number) and abs(number) > torch.finfo(dtype).max:
            return "is beyond the greatest value of"
        return None
    if not math.isfinite(number) or number != int(number):
        return "is not an integer, and cannot be a value of"
    limits = torch.iinfo(dtype)
    if not limits.min <= number <= limits.max:
        return f"lies outside {limits.min} to {limits.max}, the range of"
    return None


def _check_tensor(tensor: Tensor, fill: Tensor) -> None:
    if hasattr(fill, "get_mask"):
        raise TypeError(
            f"the fill is itself a masked tensor, of shape {tuple(fill.shape)}, and a plain result cannot keep its "
            "mask. Use torch.where(x.get_mask(), x, fill), which is masked, or fill.to_tensor(value)"
        )
    sizes = zip(reversed(fill.shape), reversed(tensor.shape), strict=False)
    if fill.ndim > tensor.ndim or any(n not in (1, m) for n, m in sizes):
        raise ValueError(
            f"the fill has shape {tuple(fill.shape)}, which does not broadcast to the tensor's shape "
            f"{tuple(tensor.shape)}"
        )
    if not can_cast(fill.dtype, tensor.dtype):
        raise ValueError(
            f"the fill has dtype {fill.dtype}, whose values {tensor.dtype} cannot hold. Convert it: "
            f"fill.to({tensor.dtype})"
        )


# ------------------------------------------------------------------------------------------------------ storage layouts


def check_layout(
    tensor: Tensor, layout: torch.layout | Layout, sparse_dim: int | None, blocksize: Sequence[int] | None
) -> str:
    """The name of a storage layout; ValueError if it does not fit the tensor's shape."""
    if layout is torch.strided:
        return DENSE
    known, shape = layout_of(layout), tuple(tensor.shape)
    if known is None:
        raise _unknown(layout)
    if not shape:
        raise ValueError("a tensor without dimensions cannot be stored sparsely; keep it dense")
    _check_integers(shape, sparse_dim, blocksize)
    dims = known.check_dims(shape, sparse_dim)
    known.check_block(shape[:dims], blocksize)
    return known.name


def sparse_dims_beside(tensor: Tensor, dense_dim: int | None) -> int:
    """The number of sparse dimensions of a tensor with `dense_dim` dense ones (None: 0); TypeError if no integer."""
    if dense_dim is not None and not _is_integer(dense_dim):
        raise TypeError(
            f"dense_dim is the number of trailing dense dimensions, an integer from 0 to {tensor.ndim - 1} for shape "
            f"{tuple(tensor.shape)}; got {dense_dim!r}"
        )
    return tensor.ndim - (dense_dim or 0)


def _check_integers(shape: tuple[int, ...], sparse_dim: object, blocksize: object) -> None:
    if sparse_dim is not None and not _is_integer(sparse_dim):
        raise TypeError(
            f"sparse_dim is the number of leading sparse dimensions, an integer from 1 to {len(shape)} for shape "
            f"{shape}; got {sparse_dim!r}. To choose a layout pass it by name: x.to_sparse(layout=torch.sparse_csr)"
        )
    if isinstance(blocksize, (tuple, list)) and not all(map(_is_integer, blocksize)):
        raise TypeError(f"a blocksize is two integers (rows, columns), not {blocksize!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) or hasattr(value, "__index__")


def check_torch_sparse(layout: torch.layout) -> str:
    """The name of one of torch's sparse layouts; ValueError for any other."""
    known = layout_of(layout)
    if layout is torch.strided or (known is not None and known.in_torch_sparse is not known):
        raise ValueError(f"{layout} is not a layout of torch.sparse: x.to_tensor(fill) gives a plain strided tensor")
    if known is None:
        raise _unknown(layout)
    return known.name


def _unknown(layout: object) -> ValueError:
    return ValueError(f"{layout} is not a storage layout; choose from {', '.join((DENSE, *layout_names()))}")
