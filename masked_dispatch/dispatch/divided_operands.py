"""Rules on distributed tensors (DTensor), one of whose operators DTensor has refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from masked_dispatch.distributed_internals import (
    constants_replicated,
    is_mixed_with_distributed,
    is_refused_by_all_ranks,
)
from op_registry.errors import MaskedSemanticsError
from op_registry.records.dense import Dense
from op_registry.records.divided import is_divided, undivided
from op_registry.rule import Run


def run_again(error: RuntimeError, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a rule whose first run raised an error; or that error, if operands are not distributed.

    A rule's own constants are not distributed, and the same on all ranks. Where DTensor does not take an operand as it
    is placed, or has no form of an operator, every rank runs the rule on all of the operands. That takes all ranks, and
    an error that one of them has alone stays one.
    """
    tensors = list(tensors_in([*args, *kwargs.values()]))
    divided = [tensor for tensor in tensors if is_divided(tensor)]
    numbers = [tensor for tensor in tensors if tensor.numel() == 1 and not is_divided(tensor)]
    if isinstance(error, MaskedSemanticsError) or not divided or len(divided) + len(numbers) < len(tensors):
        raise error
    if is_mixed_with_distributed(error):
        try:
            with constants_replicated():
                return run(*args, **kwargs)
        except RuntimeError as refused:
            error = refused
    if isinstance(error, MaskedSemanticsError) or not is_refused_by_all_ranks(error):
        raise error
    result = run(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})
    return with_tensors(result, lambda tensor: on_all_ranks(tensor, divided[0]))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The data of a rule's arguments."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, (Dense, Tensor)):
        yield value.data


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments or results of a rule with other tensors in them."""
    if isinstance(value, Dense):
        return Dense(change(value.data), None if value.validity is None else change(value.validity))
    if isinstance(value, (list, tuple)):
        parts = [with_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return change(value) if isinstance(value, Tensor) else value


def whole(value: Any) -> Any:
    """An argument with all that the ranks have, as plain tensors: differentiable."""

    def gathered(tensor: Any) -> Tensor:
        return undivided(tensor).to_local() if is_divided(tensor) else tensor  # type: ignore[attr-defined]

    return with_tensors(value, gathered)


def on_all_ranks(tensor: Tensor, like: Any) -> Tensor:
    """What every rank has computed, as a distributed tensor."""
    tensors = importlib.import_module("torch.distributed.tensor")
    replicated = [tensors.Replicate()] * len(like.placements)
    return tensors.DTensor.from_local(tensor, like.device_mesh, replicated, run_check=False)  # type: ignore[no-any-return]
