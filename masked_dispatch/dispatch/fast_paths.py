"""Fast paths for the most common calls: elementwise operators with one or two operands, reductions, and operators that
treat each row by itself; with derivatives, where all that an operand stores sparsely is valid.

Everything else takes the general path. These kernels only leave out bookkeeping and obey the same law: they call the
operator on the data, and the result is valid where every operand is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.autograd.dense import checked_validity
from masked_dispatch.autograd.engine import sum_of_gradients
from masked_dispatch.autograd.reached import join
from masked_dispatch.autograd.sparse import unwrap_any, wrap_sparse_record
from masked_dispatch.dispatch.kernel_table import Kernel
from masked_dispatch.dispatch.run_rule import name_selections, rule_kernel
from masked_dispatch.engine_internals import called_by_engine, engine_run
from masked_dispatch.tensor.mask_sharing import shared_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, wrap_sparse
from masked_dispatch.torch_internals import DispatchKeySet, direct_call, plain_eager, schema_of
from op_registry.bound import argument
from op_registry.dimensions.slices import row_reader
from op_registry.extents.remembered import planned
from op_registry.laws.categories import ONE_FOR_EACH_SLICE, reduction_steps, run_elementwise, run_reduction
from op_registry.records.arguments import Number
from op_registry.records.dense import Dense
from op_registry.records.fill import hand_on, known_tensors, known_zero, remember_zero, zero_selector
from op_registry.records.slices import nonzero_count
from op_registry.records.tracing import being_traced
from op_registry.records.validity import intersect, kept_with
from op_registry.rule import Rule
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import Sparse

_grad_enabled = torch.is_grad_enabled
_inference_mode_enabled = torch.is_inference_mode_enabled

_PLAIN = (Tensor, torch.nn.Parameter)
_REAL = (torch.float32, torch.float64)

# A reduction's fill value; the mask of `zero_selector`, if that does the fill; the divisor of the sum, for a mean; the
# validity of the result.
Steps = tuple[Number | None, Tensor | None, Tensor | None, Tensor | None]


def elementwise_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """The fastest kernel for the overload."""
    schema = schema_of(op)
    returns = schema.returns
    if len(returns) != 1 or str(returns[0].type) != "Tensor" or rule.run is not run_elementwise or rule.traits.traps:
        return rule_kernel(op, rule)
    if not rule.is_built_in:
        return rule_kernel(op, rule)  # this kernel checks that the operator does what the rule says
    operands = [a for a in schema.arguments if "Tensor" in str(a.type)]
    if len(operands) == 1 and str(schema.arguments[0].type) == "Tensor":
        return unary_kernel(op, rule)
    if len(operands) == 2 and len([a for a in schema.arguments if not a.kwarg_only]) == 2:
        return binary_kernel(op, rule)
    return rule_kernel(op, rule)


def unary_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """One tensor operand, possibly with numbers and options."""
    general, call = rule_kernel(op, rule), direct_call(op)
    keeps_zero = rule.traits.keeps_zero

    def kernel(keyset: DispatchKeySet, x: Any, *rest: Any, **kwargs: Any) -> Any:
        derived = x.requires_grad and _grad_enabled()
        if (
            (type(x) is not MaskedTensor and (kwargs or type(x) is not SparseMaskedTensor))
            or (derived and type(x) is MaskedTensor)
            or not plain_eager()
        ):
            return general(keyset, x, *rest, **kwargs)
        if isinstance(x, SparseMaskedTensor):
            values, validity, pattern = x._kept.copied()
            if being_traced(values) or rule.lowerings:
                return general(keyset, x, *rest)
            if not derived:
                return x.storing(call(values, *rest), validity, pattern)
            return on_values(rule, op, (x, *rest)) if validity is None else general(keyset, x, *rest)
        data = op(x._data, *rest, **kwargs) if kwargs else call(x._data, *rest)
        if x._family is None:
            validity, extent = x._stored_validity, x._stored_extent
        else:
            validity, extent = shared_validity(x), x._extent
        if keeps_zero and not rest and not kwargs and id(x._data) in known_tensors:
            hand_on(x._data, data, validity)
        result = wrap(data, validity)
        return result if extent is None else with_extent(result, extent.settled)

    return kernel


def reduction_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """A reduction to one tensor: it fills the data with an identity. If its input is valid everywhere, it costs little
    more than torch's own. A mean divides a sum by the count.
    """
    general, call, returns = rule_kernel(op, rule), direct_call(op), schema_of(op).returns
    name = op.name()
    select = direct_call(torch.ops.aten.threshold_backward.default)
    always = rule.run is run_reduction  # other rules do only that for plain elements of the dtypes in _REAL
    if not rule.is_built_in or rule.traits.identity is None or len(returns) != 1 or str(returns[0].type) != "Tensor":
        return general
    sum_up = torch.sum if rule.traits.divided else call

    def kernel(keyset: DispatchKeySet, x: Any, *rest: Any, **kwargs: Any) -> Any:
        if (
            kwargs
            or type(x) is not MaskedTensor
            or (x.requires_grad and _grad_enabled())
            or not plain_eager()
            or x.is_inference()
        ):
            return general(keyset, x, *rest, **kwargs)
        apart = x._family is None
        validity, extent = (x._stored_validity, x._stored_extent) if apart else (shared_validity(x), x._extent)
        data, everywhere = x._data, False
        if extent is not None:
            plan = planned(rule, op, (Dense(data, validity, extent), *rest))
            if plan is None:
                return general(keyset, x, *rest)
            extent, everywhere = plan
        if validity is None:
            return with_extent(wrap(call(data, *rest), None), extent)
        if not (always or (type(data) is Tensor and data.dtype in _REAL and data.numel())):
            return general(keyset, x, *rest)
        value, zero_by, divisor, some = kept_steps(op, name, rule, data, validity, rest)
        if zero_by is not None:
            data = data if id(data) in known_tensors and known_zero(data, validity) else select(data, zero_by, 0)
        elif value is not None:
            data = Dense(data, validity).filled(value)
        found = call(data, *rest) if divisor is None else sum_up(data, *rest) / divisor
        result = wrap(found, None if everywhere else some)
        return result if extent is None else with_extent(result, extent)

    return kernel


def rows_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """The operator on each row by itself, with plain operands: an invalid row affects only its own result, so nothing
    needs a fill. (A derivative with respect to the other operands would sum over all rows.) Sparse storage with dense
    rows has no invalid rows.
    """
    general, call = rule_kernel(op, rule), direct_call(op)
    if len(schema_of(op).returns) != 1 or rule.dims is None:
        return general
    rows = row_reader(op, rule.dims)

    def kernel(keyset: DispatchKeySet, x: Any, *rest: Any, **kwargs: Any) -> Any:
        if not kwargs and plain_eager():
            if type(x) is MaskedTensor:
                data, validity = x._data, x._stored_validity if x._family is None else shared_validity(x)
                dims = plain_rows(rows, x, data, rest)
                extent = x._extent
                of_rows = extent is None or dims <= extent.last_dims
                if 0 < dims <= data.ndim and of_rows and (validity is None or validity.shape[-dims:].numel() == 1):
                    return with_extent(wrap(call(data, *rest), validity), extent and extent.settled)
            elif type(x) is SparseMaskedTensor and x._order is None and x._pattern.lead == 1:
                data, validity, pattern = x._kept.copied()
                derived = _grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in (x, *rest))
                row = 0 if validity is not None else plain_rows(rows, x, data, rest, derived)
                extent = x._extent
                if 0 < row < data.ndim and (extent is None or row <= extent.last_dims):
                    if derived:
                        found = on_values(rule, op, (x, *rest))
                        if found is not None:
                            return found
                    else:
                        values = call(data, *rest)
                        if values.shape == data.shape:
                            return x.storing(values, None, pattern)
                        if extent is None or values.ndim == data.ndim:
                            return wrap_sparse(Sparse(Dense(values), pattern, extent))
        return general(keyset, x, *rest, **kwargs)

    return kernel


def plain_rows(rows: Callable[..., int], x: Tensor, data: Tensor, rest: tuple[Any, ...], recorded: bool = False) -> int:
    """How many of the last dimensions of `data` make up a row; 0 if there are none, if autograd records the call
    (unless that is `recorded`), or if an operand is neither torch's own strided tensor nor a number.
    """
    derived = _grad_enabled() and not recorded
    if type(data) is not Tensor or not data.numel() or (derived and x.requires_grad):
        return 0
    others: list[Any] = []
    for operand in rest:
        if not isinstance(operand, Tensor):
            others.append(tuple(operand) if type(operand) is list else operand)
        elif type(operand) in _PLAIN and operand.layout is torch.strided and not (derived and operand.requires_grad):
            others.append(operand.ndim)
        else:
            return 0
    return rows(x.ndim, data.ndim, *others)


def kept_steps(op: OpOverload, name: str, rule: Rule, data: Tensor, validity: Tensor, rest: tuple[Any, ...]) -> Steps:
    """The steps of a reduction (reduction_steps), with the selector of zeros and the divisor; cached with the mask.

    name  the operator's name: to hash an overload itself calls Python
    """
    if type(data) is not Tensor or validity.is_inference() or _inference_mode_enabled():
        return steps_of(op, rule, Dense(data, validity), rest)
    kept = kept_with(validity)
    key: tuple[Any, ...] = (name, data.dtype, data.shape)
    if rest:
        key = (*key, *(tuple(a) if type(a) is list else a for a in rest))
    steps: Steps | None = kept.get(key)
    if steps is None:
        value, _, divisor, some = steps_of(op, rule, Dense(data, validity), rest)
        zero_by = None if value is None else zero_selector(data, validity, value)
        steps = kept[key] = (value, zero_by, divisor, some)
    return steps


def steps_of(op: OpOverload, rule: Rule, x: Dense, rest: tuple[Any, ...]) -> Steps:
    """The steps of a reduction with these arguments."""
    value, some = reduction_steps(op, x, rest, rule.traits, {})
    if value is None or not rule.traits.divided:
        return value, None, None, some
    slices = rule.slices or ONE_FOR_EACH_SLICE
    dim, keepdim = (argument(op, name, (x, *rest), {}) for name in (slices.dim, slices.keepdim))
    count = nonzero_count(x.count(dim, bool(keepdim)))
    assert isinstance(count, Tensor)  # all-valid data needs no fill
    return value, None, count.to(x.dtype), some


def same_pattern_kernel(op: OpOverload, rule: Rule, call: Callable[..., Tensor], general: Kernel) -> Kernel:
    """The operator on the values of two operands with the same pattern, or of one and a number."""

    def kernel(keyset: DispatchKeySet, x: SparseMaskedTensor, y: Any) -> Any:
        values, validity, pattern = x._kept.copied()
        derived = _grad_enabled() and (x.requires_grad or (isinstance(y, Tensor) and y.requires_grad))
        if being_traced(values) or (derived and validity is not None):
            return general(keyset, x, y)
        if type(y) is not SparseMaskedTensor:
            return on_values(rule, op, (x, y)) if derived else x.storing(call(values, y), validity, pattern)
        if y._extent is not x._extent:
            return general(keyset, x, y)
        others, validity_of_others, others_pattern = y._kept.copied()
        same = others_pattern is pattern and y._order == x._order and others.shape == values.shape
        if not same or (derived and validity_of_others is not None):
            return general(keyset, x, y)
        if derived:
            return on_values(rule, op, (x, y))
        return x.storing(call(values, others), intersect(validity, validity_of_others), pattern)

    return kernel


def on_values(rule: Rule, op: OpOverload, args: tuple[Any, ...]) -> SparseMaskedTensor | None:
    """The operator on stored values, all of them valid, with derivatives: stored in the first operand's pattern. None
    if the result has other dimensions than an operand with an extent.
    """
    records: list[Any] = [unwrap_any(a) if isinstance(a, Tensor) else a for a in args]
    values = Dense(op(*map(_values_of, records)))
    x = records[0]
    extent = x.extent and x.extent.settled
    if extent is not None and values.ndim != _values_of(x).ndim:
        return None
    if type(x) is Permuted:
        result = wrap_sparse_record(Permuted(Sparse(values, x.base.pattern), x.order, extent))
    else:
        result = wrap_sparse_record(Sparse(values, x.pattern, extent))
    join(rule, op, (args, {}), (records, {}), result)
    return result


def _values_of(argument: Any) -> Any:
    """What a record stores; another argument as it is."""
    if type(argument) is Permuted:
        argument = argument.base
    return argument.values.data if type(argument) is Sparse else argument.data if type(argument) is Dense else argument


def binary_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """Two tensor operands, or a tensor and a number."""
    general, call = rule_kernel(op, rule), direct_call(op)
    on_sparse = same_pattern_kernel(op, rule, call, general)
    adds = op is torch.ops.aten.add.Tensor
    keeps_zero = rule.traits.keeps_zero

    def kernel(keyset: DispatchKeySet, x: Any, y: Any, **kwargs: Any) -> Any:
        if adds and engine_run() >= 0 and called_by_engine(1):
            return sum_of_gradients(x, y)
        if kwargs or not plain_eager():
            return general(keyset, x, y, **kwargs)
        if type(x) is not MaskedTensor:
            served = type(x) is SparseMaskedTensor and (type(y) is SparseMaskedTensor or not isinstance(y, Tensor))
            return (on_sparse if served and not rule.lowerings else general)(keyset, x, y)
        apart = x._family is None
        validity, extent = (x._stored_validity, x._stored_extent) if apart else (shared_validity(x), x._extent)
        other_kind = isinstance(y, Tensor) and (
            y._extent is not extent  # type: ignore[attr-defined]
            if type(y) is MaskedTensor
            else isinstance(y, MaskedTensor) or y.layout is not torch.strided
        )
        if other_kind or (
            _grad_enabled()
            and (x.requires_grad or (isinstance(y, Tensor) and y.requires_grad) or being_traced(x._data))
        ):
            return general(keyset, x, y)
        both_zero, given = False, y
        if type(y) is MaskedTensor:
            if keeps_zero and id(y._data) in known_tensors:
                both_zero = known_zero(x._data, validity) and known_zero(y._data, validity)
            other = y._stored_validity if y._family is None else shared_validity(y)
            if other is not validity:
                if x.shape != y.shape or extent is not None:
                    return general(keyset, x, y)
                validity = intersect(validity, other)
            y = y._data
        try:
            data = call(x._data, y)
        except RuntimeError as error:
            name_selections(error, (x, given))
            raise
        if extent is not None and data.shape != x.shape:
            return general(keyset, x, given)
        if both_zero and validity is not None:
            remember_zero(data, validity)
        if validity is not None and validity.ndim != data.ndim:
            validity = checked_validity(Dense(data, validity))
        wrapped = wrap(data, validity)
        return wrapped if extent is None else with_extent(wrapped, extent.settled)

    return kernel
