"""Shared code of all conversions: build a masked tensor from values and a mask, and split one for another library."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.traced import code_version
from op_registry import MaskedSemanticsError

# NumPy has these dtypes, and so do the libraries that store their columns as NumPy arrays.
OF_NUMPY = frozenset(
    (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)


P = ParamSpec("P")
R = TypeVar("R")


def takes(
    *, instead: str = "", words: Mapping[str, str] | None = None, further: str = "", **kinds: type | tuple[type, ...]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a conversion, so that it refuses arguments of other types with an error that names the function.

    kinds    the types that each of the function's leading parameters accepts
    instead  a hint for a likely wrong type of the first parameter, added to its error
    words    keywords of other libraries, and what is written here; unless None, errors name the function's own keywords
    further  of them, the one that another library has next after the function's own parameters
    """

    def decorate(door: Callable[P, R]) -> Callable[P, R]:
        every = list(inspect.signature(door).parameters)
        names = every[: len(kinds)]
        if names != list(kinds):
            raise TypeError(f"takes(...) names {list(kinds)}, and {door.__name__} begins with {names}")

        @functools.wraps(door)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for i, name in enumerate(names):
                if i < len(args) or name in kwargs:  # Python reports missing arguments itself
                    value = args[i] if i < len(args) else kwargs[name]
                    if not isinstance(value, kinds[name]):
                        raise TypeError(not_taken(door.__name__, name, kinds[name], value, "" if i else instead))
            if words is not None:
                if further and len(args) > len(every):
                    raise TypeError(
                        f"{door.__name__} takes {', '.join(every)}, and no further argument; {words[further]}"
                    )
                check_keywords(door.__name__, kwargs, every, words)
            return door(*args, **kwargs)

        return checked

    return decorate


def check_keywords(door: str, given: Iterable[str], names: Sequence[str], words: Mapping[str, str]) -> None:
    """Raise TypeError for a keyword that `door` does not have: it says what is written instead, or which there are."""
    for keyword in given:
        if keyword not in names:
            instead = words.get(keyword, f"it has {', '.join(name for name in names if name != 'self')}")
            raise TypeError(f"{door} takes no {keyword}=; {instead}")


def not_taken(door: str, name: str, kinds: type | tuple[type, ...], value: object, instead: str = "") -> str:
    """Return the error text for an unsupported value: the supported types, the value's type, and a hint."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    *most, last = (kind.__name__ for kind in kinds)
    wanted = f"{', '.join(most)}{' or ' if most else ''}{last} of {public(kinds[0])}"
    wanted = f"{'an' if wanted[0] in 'AEIOUaeiou' else 'a'} {wanted}"
    if kinds == (Tensor,):
        wanted, instead = "a tensor", instead or (f"pass torch.as_tensor({name})" if _is_numbers(value) else "")
    if kinds == (Mapping,):
        wanted = "a mapping of names"
    return f"{door} takes {wanted} as {name}, not {kind_of(value)}{instead and ': '}{instead}"


def public(kind: type) -> str:
    """Return the public name of a type's library, or of its part of torch."""
    parts = kind.__module__.split(".")
    return ".".join(parts[:2] if parts[0] == "torch" else parts[:1])


def _is_numbers(value: Any) -> bool:
    """Whether torch.as_tensor takes a value."""
    try:
        torch.as_tensor(value)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False
    return True


def kind_of(value: object) -> str:
    """Return the name of a value's type, with its article."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def tensors_of(door: str, name: str, value: object) -> list[Tensor]:
    """Return the elements of an iterable of tensors; errors about other values name the function `door`."""
    elements = list(value) if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)) else [value]
    tensors = [element for element in elements if isinstance(element, Tensor)]
    for element in elements:
        if not isinstance(element, Tensor):
            raise TypeError(
                f"{door} takes a list of tensors, plain or masked, and {name} has {kind_of(element)}: pass "
                f"[torch.as_tensor(part) for part in {name}]"
            )
    return tensors


class Parts(NamedTuple):
    """The parts to export: plain values on the CPU, 0 or False where invalid, and the mask, True where valid."""

    values: Tensor
    valid: Tensor


def as_masked(data: Tensor, mask: Tensor | None = None) -> MaskedTensor:
    """Build a masked tensor that shares memory with `data` and copies a mask of the same shape; differentiable.

    Masked data is copied, and the result is valid where both masks are.
    """
    if isinstance(data, MaskedTensor):
        return data if mask is None else torch.ops.masked_dispatch.mask_with(data, mask)
    return torch.ops.masked_dispatch.as_masked_tensor(data, mask, code_version())


def as_padded(data: Tensor, there: Tensor, along: str) -> MaskedTensor:
    """Build a batch of which those positions are there that `there` says; shares `data`, differentiable.

    there  bool or integers 0 and 1, of size 1 in dimensions on which it does not depend, True where a position is
    along  a letter for each dimension: "s" numbers samples, "p" positions from index 0 on, "P" these, and no sample
           without one, "c" positions that follow one another, "?" positions in an order that is to be read; "-" neither

    An element of masked data is valid where it was and its position is there.
    """
    return torch.ops.masked_dispatch.padded_along(data, there, along, code_version())


def knows_padding(value: object) -> bool:
    """Return whether a value is a tensor that knows which of its positions are there."""
    return isinstance(value, MaskedTensor) and value._extent is not None


def numbers_positions(tensor: Tensor, dim: int) -> bool:
    """Return whether a dimension of a tensor numbers the positions of its samples."""
    extent = tensor._extent if isinstance(tensor, MaskedTensor) else None
    return extent is not None and extent.numbers(dim % tensor.ndim)


def extent_of(tensor: Tensor) -> Tensor:
    """Return which positions of a tensor are there; without an extent, all."""
    if isinstance(tensor, MaskedTensor):
        return torch.ops.masked_dispatch.extent(tensor.to_dense())
    return torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)


def missing_of(tensor: MaskedTensor) -> Tensor:
    """Return where a position is there and its element invalid; of a batch that is only padded, nowhere."""
    return torch.ops.masked_dispatch.extent(tensor) & ~tensor.get_mask()


def placed_like(tensor: Tensor, other: Tensor) -> Any:
    """Return the tensor with the extent of `other`, which broadcasts to it: what is not there in `other` is not."""
    return torch.ops.masked_dispatch.placed_like(tensor, other) if isinstance(other, MaskedTensor) else tensor


def without_extent(value: Any) -> Any:
    """Return a tensor in which padding counts as missing; other values are returned as they are."""
    return value.without_extent() if knows_padding(value) else value


def filled(tensor: Tensor) -> Tensor:
    """Return the values of a masked or plain tensor, 0 or False where invalid; differentiable."""
    return tensor.to_tensor(False if tensor.dtype is torch.bool else 0) if isinstance(tensor, MaskedTensor) else tensor


def mask_of(tensor: Tensor) -> Tensor:
    """Return the mask of a tensor; a plain tensor's mask is True everywhere."""
    if isinstance(tensor, MaskedTensor):
        return tensor.to_dense().get_mask()
    return torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)


def check_leaving(tensor: Tensor, library: str, dtypes: frozenset[torch.dtype] = OF_NUMPY) -> None:
    """Refuse a tensor that knows its padding, requires grad, is not on the CPU, or has a dtype outside of `dtypes`."""
    described = f"a tensor of shape {tuple(tensor.shape)}"
    if knows_padding(tensor):
        raise MaskedSemanticsError(
            f"{described} knows which of its positions are there, and {library} has no place for that: pass "
            "x.without_extent(), in which padding counts as missing"
        )
    if tensor.requires_grad:
        raise RuntimeError(f"{described} requires grad, and {library} has no gradients: pass x.detach()")
    if tensor.device.type != "cpu":
        raise TypeError(f"{described} is on {tensor.device}, and {library} computes on the CPU: pass x.cpu()")
    if tensor.dtype not in dtypes:
        other = "x.real and x.imag" if tensor.is_complex() else "x.float()"
        raise TypeError(f"{library} has no dtype for {tensor.dtype}, the dtype of {described}: pass {other}")


def leaving(tensor: Tensor, library: str, dtypes: frozenset[torch.dtype] = OF_NUMPY) -> Parts:
    """Check that a library can hold a tensor, and return the tensor's parts."""
    check_leaving(tensor, library, dtypes)
    return Parts(filled(tensor).detach().resolve_conj().resolve_neg(), mask_of(tensor))


# --------------------------------------------------------------------------------------------------- columns of a table


def stacked(columns: dict[str, Parts], rows: int, dtype: torch.dtype | None, instead: str) -> MaskedTensor:
    """Stack the columns side by side, shape (rows, columns), converted to `dtype`.

    Raises TypeError, with the hint `instead`, for columns of several dtypes without `dtype`.
    """
    check_dtype(dtype)
    if dtype is None and len({parts.values.dtype for parts in columns.values()}) > 1:
        kinds = ", ".join(f"{name} {parts.values.dtype}" for name, parts in columns.items())
        raise TypeError(f"a tensor has one dtype, and these columns have several: {kinds}. Choose one, {instead}")
    if not columns:
        return as_masked(torch.empty(rows, 0, dtype=dtype))
    values = [parts.values if dtype is None else parts.values.to(dtype) for parts in columns.values()]
    return as_masked(torch.stack(values, 1), torch.stack([parts.valid for parts in columns.values()], 1))


def check_dtype(dtype: object) -> None:
    """Refuse names of dtypes, which other libraries accept."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r} is not a dtype of torch: pass one, such as torch.float64")
