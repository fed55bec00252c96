"""Run a rule again on whole operands if DTensor has refused one of its operators."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from masked_dispatch.distributed_internals import (
    constants_replicated,
    is_mixed_with_distributed,
    is_refused_by_all_ranks,
)
from op_registry.errors import MaskedSemanticsError
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.divided import is_divided, undivided
from op_registry.rule import Run


def run_again(error: RuntimeError, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a rule again after its first run raised an error; raise that error if no operand is distributed.

    A rule's own constants are not distributed, and equal on all ranks. If DTensor refuses an operand's placement, or
    does not implement an operator, every rank runs the rule on whole operands. That needs all ranks; an error on one
    rank alone stays an error.
    """
    tensors: list[Tensor] = []
    map_tensors(lambda operand: tensors.append(operand.data), [*args, *kwargs.values()], (Dense, Tensor))
    divided = [tensor for tensor in tensors if is_divided(tensor)]
    numbers = [tensor for tensor in tensors if tensor.numel() == 1 and not is_divided(tensor)]
    if not divided or len(divided) + len(numbers) < len(tensors):
        raise error
    if is_mixed_with_distributed(error):
        try:
            with constants_replicated():
                return run(*args, **kwargs)
        except RuntimeError as refused:
            error = refused
    if isinstance(error, MaskedSemanticsError) or not is_refused_by_all_ranks(error):
        raise error
    positional, named = map_tensors(whole, (list(args), list(kwargs.items())), (Dense, Tensor))
    result = run(*positional, **dict(named))
    return map_tensors(lambda part: on_all_ranks(part, divided[0]), result, (Dense, Tensor))


def whole(operand: Any) -> Any:
    """An operand, gathered from all ranks, as plain tensors; differentiable."""
    if isinstance(operand, Dense):
        return operand.map(whole)
    return undivided(operand).to_local() if is_divided(operand) else operand  # type: ignore[attr-defined]


def on_all_ranks(result: Any, like: Any) -> Any:
    """Wrap a result that every rank has computed in a distributed tensor."""
    if isinstance(result, Dense):
        return result.map(lambda tensor: on_all_ranks(tensor, like))
    tensors = importlib.import_module("torch.distributed.tensor")
    replicated = [tensors.Replicate()] * len(like.placements)
    return tensors.DTensor.from_local(result, like.device_mesh, replicated, run_check=False)
