"""Numbers from sizes that place something, and would place it elsewhere for a shorter sample alone.

Coordinates that a size spaces (``linspace(-1, 1, x.shape[1])``, ``arange(x.shape[1]) / x.shape[1]``), padding in front
by a number of a size, as "same" padding computes it, and an index that is a size (``x[:, -x.shape[1]]``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.seeing.recorder import leaves
from masked_dispatch.seeing.sizes import Alone, Followed, Size, at, numbers_in, with_each
from masked_dispatch.seeing.watching import unrecorded
from masked_dispatch.tensor.masked_tensor import MaskedTensor

PLACED = "placed by size"
# What has no values of its own to compare.
_DRAWN = ("rand", "normal", "empty", "bernoulli")


def placed_by(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    sizes: Mapping[int, Mapping[int, Alone]],
) -> int | None:
    """How many elements a call has placed by a size that is another for some sample alone; None if it has not.

    sizes   what the samples alone have of each tensor that it takes, by its id and dimension
    """
    name = str(getattr(function, "__name__", ""))
    tensors = list(leaves([args, kwargs]))
    batch = next((t for t in tensors if isinstance(t, MaskedTensor)), None)
    if batch is not None:
        if batch._extent is None or not any(_that_place(name, args, kwargs)):
            return None
        return (result if isinstance(result, Tensor) else batch).numel()
    if type(result) is not Tensor or name.startswith(_DRAWN) or any(result is t for t in tensors):
        return None
    samples = max(len(n.alone) for n in numbers_in([args, kwargs]))
    for index in range(samples):
        own = functools.partial(_alone, index=index, samples=samples, sizes=sizes)
        try:
            with unrecorded(), torch.no_grad():
                made = function(*with_each(args, own), **with_each(kwargs, own))
                if made.shape != result.shape and not bool(torch.isin(made, result).all()):
                    return result.numel()
        except Exception:  # sizes that other tensors have, or values that are not compared
            return None
    return None


def _alone(value: Any, index: int, samples: int, sizes: Mapping[int, Mapping[int, Alone]]) -> Any:
    """An argument as the sample of this index has it."""
    if isinstance(value, Followed):
        number = at(value.alone, index, samples)
        return int(number) if isinstance(value, Size) else number
    if isinstance(value, Tensor):
        for dim, each in sizes.get(id(value), {}).items():
            value = value.narrow(dim, 0, int(at(each, index, samples)))
    return value


def _that_place(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[bool]:
    """Of each number in a call that places something, whether it comes from a size."""
    if name in ("pad", "constant_pad_nd"):
        amounts = kwargs.get("pad", args[1] if len(args) > 1 else ())
        yield from (isinstance(n, Followed) for n in amounts[::2])
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        yield from (isinstance(n, Followed) for n in index)
    if name == "select":
        yield isinstance(kwargs.get("index", args[-1]), Followed)
