"""Operators and rules that call several others, while Dynamo runs them on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.compiler_internals import pending_sizes, sizes_to_be_found
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.torch_internals import tree_flatten

Part = Tensor | torch.SymInt | torch.SymFloat | torch.SymBool


def run_in_steps(run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of `run`, which calls several operators.

    Where Dynamo runs it on fake tensors, sizes that depend on data and that only tensors in between have, or that the
    result has in a sum alone, are taken off the list of those that the result must have. (Later stages record each
    operator that `run` calls.)
    """
    pending = pending_sizes()
    kept = set(pending)
    try:
        result = run(*args, **kwargs)
        if len(pending) > len(kept):
            kept |= sizes_to_be_found(_parts_of(result), pending)
    finally:
        pending[:] = [size for size in pending if size in kept]
    return result


def _parts_of(result: object) -> list[Part]:
    """The tensors and numbers in a result; in place of a masked tensor those that it is made of."""
    found: list[Part] = []
    for leaf in tree_flatten(result)[0]:
        if isinstance(leaf, MaskedTensor):
            found += [getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]]
        elif isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            found.append(leaf)
    return found
