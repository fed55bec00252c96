"""The short way for the commonest calls, no derivative asked for: elementwise operators with one or two operands, and
reductions of what is valid everywhere.

Everything else goes the general way. What these kernels leave out is bookkeeping only; the law is the same:
the operator on the data, valid where every operand is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

from masked_dispatch.autograd.dense import checked_validity
from masked_dispatch.autograd.engine import sum_of_gradients
from masked_dispatch.dispatch.run_rule import Kernel, rule_kernel
from masked_dispatch.tensor.mask_sharing import shared_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import (
    DispatchKeySet,
    called_by_engine,
    direct_call,
    engine_run,
    outside_of_transforms,
)
from op_registry.categories import run_elementwise, run_reduction
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced
from op_registry.records.validity import intersect
from op_registry.rule import Rule

_grad_enabled = torch.is_grad_enabled


def elementwise_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """The quickest kernel that serves the overload."""
    returns = op._schema.returns
    if (
        len(returns) != 1
        or str(returns[0].type) != "Tensor"
        or rule.run is not run_elementwise
        or "traps" in rule.traits
    ):
        return rule_kernel(op, rule)
    operands = [a for a in op._schema.arguments if "Tensor" in str(a.type)]
    if len(operands) == 1 and str(op._schema.arguments[0].type) == "Tensor":
        return unary_kernel(op, rule)
    if len(operands) == 2 and len([a for a in op._schema.arguments if not a.kwarg_only]) == 2:
        return binary_kernel(op, rule)
    return rule_kernel(op, rule)


def unary_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """One tensor operand, and perhaps numbers."""
    general, call = rule_kernel(op, rule), direct_call(op)

    def kernel(keyset: DispatchKeySet, x: Any, *rest: Any, **kwargs: Any) -> Any:
        if (
            kwargs
            or (type(x) is not MaskedTensor and type(x) is not SparseMaskedTensor)
            or (x.requires_grad and _grad_enabled())
            or forward_ad._current_level >= 0
            or not outside_of_transforms()
        ):
            return general(keyset, x, *rest, **kwargs)
        if isinstance(x, SparseMaskedTensor):
            if being_traced(x._kept_values) or rule.lowerings:
                return general(keyset, x, *rest)
            return x.storing(call(x._kept_values, *rest), x._kept_validity)
        return wrap(call(x._data, *rest), x._stored if x._family is None else shared_validity(x))

    return kernel


def reduction_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """A reduction to one tensor: of what is valid everywhere it is torch's own, and so is what it costs."""
    general, call, returns = rule_kernel(op, rule), direct_call(op), op._schema.returns
    if rule.run is not run_reduction or len(returns) != 1 or str(returns[0].type) != "Tensor":
        return general

    def kernel(keyset: DispatchKeySet, x: Any, *rest: Any, **kwargs: Any) -> Any:
        if (
            kwargs
            or type(x) is not MaskedTensor
            or x._stored is not None
            or x._family is not None
            or (x.requires_grad and _grad_enabled())
            or forward_ad._current_level >= 0
            or not outside_of_transforms()
        ):
            return general(keyset, x, *rest, **kwargs)
        return wrap(call(x._data, *rest), None)

    return kernel


def of_one_pattern(call: Any, x: SparseMaskedTensor, y: Any) -> SparseMaskedTensor | None:
    """Two operands stored in one pattern, or one and a number: the operator on the values. None: not so simple."""
    validity = x._kept_validity
    if being_traced(x._kept_values) or (_grad_enabled() and x.requires_grad):
        return None
    if type(y) is not SparseMaskedTensor:
        return x.storing(call(x._kept_values, y), validity)
    if (
        y._pattern is not x._pattern
        or y._order != x._order
        or y._kept_values.shape != x._kept_values.shape
        or (_grad_enabled() and y.requires_grad)
    ):
        return None
    return x.storing(call(x._kept_values, y._kept_values), intersect(validity, y._kept_validity))


def binary_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """Two tensor operands, or one and a number."""
    general, call = rule_kernel(op, rule), direct_call(op)
    adds = op is torch.ops.aten.add.Tensor

    def kernel(keyset: DispatchKeySet, x: Any, y: Any, **kwargs: Any) -> Any:
        if adds and engine_run() >= 0 and called_by_engine(1):
            return sum_of_gradients(x, y)
        if kwargs or forward_ad._current_level >= 0 or not outside_of_transforms():
            return general(keyset, x, y, **kwargs)
        if type(x) is SparseMaskedTensor and (type(y) is SparseMaskedTensor or not isinstance(y, Tensor)):
            result = None if rule.lowerings else of_one_pattern(call, x, y)
            return general(keyset, x, y) if result is None else result
        if type(x) is not MaskedTensor:
            return general(keyset, x, y)
        validity = x._stored if x._family is None else shared_validity(x)
        if _grad_enabled() and (
            x.requires_grad or (isinstance(y, Tensor) and y.requires_grad) or being_traced(x._data)
        ):
            return general(keyset, x, y)
        if type(y) is MaskedTensor:
            other = y._stored if y._family is None else shared_validity(y)
            if other is not validity:
                if x.shape != y.shape:
                    return general(keyset, x, y)
                validity = intersect(validity, other)
            y = y._data
        elif isinstance(y, MaskedTensor):
            return general(keyset, x, y)
        data = call(x._data, y)
        if validity is not None and validity.ndim != data.ndim:
            validity = checked_validity(Dense(data, validity))
        return wrap(data, validity)

    return kernel
