"""What every kernel does with a call: look for masked arguments, open them, run the rule, close the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.gradient import closed, opened
from masked_dispatch.interception import DispatchKeySet, redispatch
from masked_dispatch.storage.lower import lowered
from masked_dispatch.storage.wrapper import NotDense
from masked_dispatch.tensor import MaskedTensor
from op_registry.records import Dense
from op_registry.rule import Rule, Run

Kernel = Callable[..., Any]


def has_masked(args: Any) -> bool:
    """Whether a masked tensor is among `args`, through lists."""
    for a in args:
        if isinstance(a, MaskedTensor):
            return True
        if isinstance(a, (list, tuple)) and has_masked(a):
            return True
    return False


def masked_arguments(args: Any, kwargs: Any) -> str:
    """The masked arguments of a call, by name, with shape and dtype."""
    named = {f"argument {i}": a for i, a in enumerate(args)} | dict(kwargs)
    return ", ".join(
        f"{name} of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
        for name, value in named.items()
        for tensor in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(tensor, MaskedTensor)
    )


def open_argument(value: Any) -> Any:
    """An argument as rules take it: records in place of tensors."""
    if isinstance(value, MaskedTensor):
        return opened(value)
    if isinstance(value, Tensor):
        return Dense(value, None)
    if isinstance(value, (list, tuple)):
        return [open_argument(v) for v in value]
    return value


def close_result(value: Any, rule: Rule) -> Any:
    """A rule's result as callers take it: masked tensors in place of records.

    Raises TypeError for a plain tensor, unless it has no elements or the rule says that it is meant to be one.
    """
    if isinstance(value, tuple):
        return type(value)(_close(v, rule, n) for n, v in enumerate(value))
    return _close(value, rule, 0)


def _close(value: Any, rule: Rule, result: int) -> Any:
    if isinstance(value, Dense):
        return closed(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_close(v, rule, result) for v in value)
    if isinstance(value, Tensor) and 0 not in value.shape and not rule.is_plain(result):
        raise TypeError(
            f"the rule of {rule.name} [{rule.where}] returned a plain tensor of shape {tuple(value.shape)}, which "
            "would lose the mask; a rule returns Dense(data, validity). A plain answer about the valid elements (a "
            "count, positions) is for rules of the category QUERY, or said to be one: masked_rule(…, plain=(1,))."
        )
    return value


def run_rule(run: Run, rule: Rule, args: Any, kwargs: Any) -> Any:
    """Open, run, close. A rule that gives back a record that it was given means the argument itself."""
    if kwargs:
        kwargs = {k: open_argument(v) for k, v in kwargs.items()}
    records = [open_argument(a) for a in args]
    result = run(*records, **kwargs)
    if type(result) is Dense:
        for argument, record in zip(args, records, strict=True):
            if record is result:
                return argument
        return closed(result)
    return close_result(result, rule)


def rule_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """A kernel that runs the rule, opened and closed differentiably."""
    run = rule.bind(op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        try:
            return run_rule(run, rule, args, kwargs)
        except NotDense:
            pass
        return lowered(op, args, kwargs)

    return kernel
