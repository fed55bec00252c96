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

    When Dynamo runs it on fake tensors, it expects every data-dependent size in the result. This removes from Dynamo's
    list the sizes that only intermediate tensors have, or that the result has only in a sum. (Later stages record each
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
    """The tensors and numbers in a result, with each masked tensor replaced by its parts."""
    found: list[Part] = []
    for leaf in tree_flatten(result)[0]:
        if isinstance(leaf, MaskedTensor):
            found += [getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]]
        elif isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            found.append(leaf)
    return found
