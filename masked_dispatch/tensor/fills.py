"""Checks of fills, which replace invalid elements: a number of the dtype, or a plain tensor of the shape."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor

from op_registry.records.dims import Number
from op_registry.records.dtypes import can_cast


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
