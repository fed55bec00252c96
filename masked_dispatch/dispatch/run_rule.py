"""Run a rule: find the masked arguments, unwrap arguments to records, run the rule on them, wrap the results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.autograd.dense import follow_plain, unwrap, wrap_record
from masked_dispatch.autograd.reached import MASKED, join
from masked_dispatch.autograd.sparse import strided_operand
from masked_dispatch.compiler_internals import modes_in_force
from masked_dispatch.dispatch.divided_operands import run_again
from masked_dispatch.dispatch.measures import name_pairs
from masked_dispatch.dispatch.plain_results import refuse_plain
from masked_dispatch.dispatch.selections import SELECTING, name_selections, remembering
from masked_dispatch.dispatch.sparse import lowered
from masked_dispatch.dispatch.steps import run_in_steps
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import DispatchKeySet, redispatch, under_transform
from op_registry.extents.run import has_extent, run_with_extents
from op_registry.laws.categories import ELEMENTWISE
from op_registry.records.dense import Dense
from op_registry.rule import Rule, Run
from op_registry.sparse.layout import OF_TORCH

Kernel = Callable[..., Any]


# The storage of a call's arguments: the maximum over all arguments.
PLAIN, DENSE, SPARSE = 0, 1, 2


def storage_among(args: Iterable[object]) -> int:
    """SPARSE if `args`, or lists in it, contain a sparsely stored tensor; else DENSE if a masked one; else PLAIN."""
    storage = PLAIN
    for a in args:
        if isinstance(a, MaskedTensor):
            if isinstance(a, SparseMaskedTensor):
                return SPARSE
            storage = DENSE
        elif isinstance(a, (list, tuple)):
            nested = storage_among(a)
            if nested == SPARSE:
                return SPARSE
            storage = max(storage, nested)
    return storage


def has_masked(args: Iterable[object]) -> bool:
    """Whether `args`, or lists in it, contain a masked tensor."""
    return storage_among(args) != PLAIN


def masked_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """The masked arguments of a call, by name, with shape and dtype."""
    named = {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
    return ", ".join(
        f"{name} of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
        for name, value in named.items()
        for tensor in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(tensor, MaskedTensor)
    )


def unwrap_argument(value: object) -> object:
    """Convert an argument for a rule: records instead of tensors."""
    if isinstance(value, MaskedTensor):
        return unwrap(value)
    if isinstance(value, Tensor):
        return Dense(strided_operand(value), None)
    if isinstance(value, (list, tuple)):
        return [unwrap_argument(v) for v in value]
    return value


def is_sparse_factor(value: object) -> bool:
    """Whether products can take an argument as a torch.sparse tensor: without grad, for the gradient would differ."""
    return (
        isinstance(value, Tensor)
        and value.layout is not torch.strided
        and value.layout in OF_TORCH
        and not (value.requires_grad and torch.is_grad_enabled())
    )


def has_sparse_factor(args: Sequence[object]) -> bool:
    """Whether a product takes an operand as a torch.sparse tensor; in torch.func, only a product of matrices does."""
    return any(is_sparse_factor(a) for a in args) and not (
        under_transform() and any(isinstance(a, Tensor) and a.ndim != 2 for a in args)
    )


def unwrap_factor(value: object) -> object:
    """Convert an argument for a rule that multiplies torch.sparse tensors directly."""
    return Dense(value, None) if is_sparse_factor(value) else unwrap_argument(value)  # type: ignore[arg-type]


def wrap_result(value: object, rule: Rule) -> Any:
    """Convert a rule's result for the caller: masked tensors instead of records.

    Raises TypeError for a plain tensor, unless it has no elements or the rule declares that result as plain.
    """
    if isinstance(value, tuple):
        return type(value)(_wrap_records(v, rule, n) for n, v in enumerate(value))
    return _wrap_records(value, rule, 0)


def _wrap_records(value: object, rule: Rule, result: int) -> Any:
    if isinstance(value, Dense):
        return wrap_record(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrap_records(v, rule, result) for v in value)
    refuse_plain(value, rule, result)
    return value


def run_rule(op: OpOverload, run: Run, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Unwrap, run, wrap. If the rule returns one of its argument records, the result is that argument itself."""
    if modes_in_force():
        return run_in_steps(_run_rule, (op, run, rule, args, kwargs), {})
    return _run_rule(op, run, rule, args, kwargs)


def _run_rule(op: OpOverload, run: Run, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = kwargs
    if kwargs:
        kwargs = {k: unwrap_argument(v) for k, v in kwargs.items()}
    if rule.traits.sparse_factors and has_sparse_factor(args):
        with contextlib.suppress(RuntimeError):  # torch multiplies only some layouts, from some sides
            return wrap_result(run(*[unwrap_factor(a) for a in args], **kwargs), rule)
    records = [unwrap_argument(a) for a in args]
    if rule.category is ELEMENTWISE and rule.traits.derivative != "linear":
        follow_plain(args, records)
    if has_extent(records) or (kwargs and has_extent(kwargs.values())):
        run = functools.partial(run_with_extents, run, rule, op)
    try:
        result = run(*records, **kwargs)
    except RuntimeError as error:
        name_selections(error, args)
        name_pairs(error)
        result = run_again(error, run, records, kwargs)
    if type(result) is Dense:
        for argument, record in zip(args, records, strict=True):
            if record is result:
                return argument
        wrapped = wrap_record(result)
    else:
        wrapped = wrap_result(result, rule)
    if type(wrapped) not in MASKED or wrapped.requires_grad:
        join(rule, op, (args, given), (records, kwargs), wrapped)
    return wrapped


def rule_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """A kernel that runs the rule, unwrapping and wrapping differentiably."""
    run, steps, unchanged = rule.bind(op), rule.traits.data_sizes, rule.traits.unchanged

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if unchanged is not None and unchanged(*args[1:], **kwargs):
            return args[0]
        storage = storage_among(args)
        if kwargs:
            storage = max(storage, storage_among(kwargs.values()))
        if storage == DENSE:
            arguments = (op, run, rule, args, kwargs)
            return run_in_steps(run_rule, arguments, {}) if steps else run_rule(*arguments)
        return redispatch(op, keyset, args, kwargs) if storage == PLAIN else lowered(op, args, kwargs)

    return remembering(kernel) if op in SELECTING else kernel
