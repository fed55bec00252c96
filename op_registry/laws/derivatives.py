"""Derivatives of rules: what torch's own gradient formulas mean on masked tensors.

Differentiating a masked computation needs nothing from here: rules run above autograd, on plain data. But the formulas
are operators too (`avg_pool2d_backward`, `nll_loss_backward` …), and users may call them. The meaning of each follows
from the operator whose derivative it is: run that operator's rule, and differentiate it.

Law: an element of the incoming gradient counts if both it and the element of the result that it belongs to are valid.
The gradient is masked like the tensor that it belongs to. If that tensor is not an argument, every element of the
gradient is valid; those without contributions are zeros, as in torch.

Most formulas are VJPs of the forward operator's rule (`derivative`), which recompute what the forward operator saved.
Formulas that are linear in the gradient and otherwise read only positions are run directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.autocast import autocast_off
from op_registry.bound import bind_by_name
from op_registry.laws.categories import DERIVATIVE, data_of, results_like
from op_registry.records.dense import Dense, all_valid, valid_in_all
from op_registry.records.fill import fill_where_invalid
from op_registry.registry import registry
from op_registry.resolve import by_rule
from op_registry.rule import Rule, Run, written_at

# Computes an argument of the forward operator from the arguments of its derivative, by their names in the schema.
Given = Callable[[Mapping[str, Any]], Any]


def vjp(forward: Callable[..., Any], inputs: Sequence[Dense | None], grad: Dense) -> tuple[Any, ...]:
    """The gradient of each input of `forward(*inputs)`, given `grad`, that of its result (it may broadcast).

    Computed by torch.func, so that it is differentiable itself, and works wherever rules do.
    """
    variables = [x for x in inputs if x is not None]

    def values(*data: Tensor) -> tuple[Tensor, list[Tensor]]:
        variables_data = iter(data)
        result: Dense = forward(*(None if x is None else x.like(next(variables_data)) for x in inputs))
        return result.data, [] if result.validity is None else [result.validity]

    # torch computes its formulas in the dtypes of their arguments, regardless of autocast.
    with autocast_off(grad.device):
        pulled: Any = torch.func.vjp(values, *(x.data for x in variables), has_aux=True)
        result, pull, validity = pulled
        incoming = grad.data.expand(result.shape)
        counted = fill_where_invalid(incoming, valid_in_all(grad, *(Dense(result, v) for v in validity)), 0)
        grads = iter(pull(counted.to(result.dtype)))
    return tuple(None if x is None else x.like(next(grads)) for x in inputs)


def run_plain(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator itself, for calls without a mask."""
    return results_like(op(*data_of(args), **{k: data_of(v) for k, v in kwargs.items()}), None)


def where_masked(function: Run, takes_op: bool) -> Run:
    """A rule's run, called with the overload first: `function` if something is masked, else the operator itself."""

    @functools.wraps(function)
    def run(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        if all_valid(*args, *kwargs.values()):
            return run_plain(op, args, kwargs)
        return function(op, *args, **kwargs) if takes_op else function(*args, **kwargs)

    return run


def derivative(op: OpOverload, *, of: OpOverload, by: Sequence[str] = ("self",), **given: Given) -> Rule:
    """Register `op`, whose first argument is the gradient of the result of `of` (of its first result).

    by     the arguments of `of` whose gradients `op` returns, in order
    given  functions of the arguments of `op` that compute arguments of `of` with another name, or implied ones; other
           arguments are passed on by name

    The rule of `of` recomputes what the forward operator saved (statistics, counts, other results).
    """
    names = [a.name for a in of._schema.arguments if not a.kwarg_only]
    options = [a.name for a in of._schema.arguments if a.kwarg_only]
    defaults = {a.name: a.default_value for a in of._schema.arguments}

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = bind_by_name(op, args, kwargs)
        forward_arguments = {**defaults, **{k: v for k, v in arguments.items() if k in defaults}}
        forward_arguments |= {name: compute(arguments) for name, compute in given.items()}

        def forward(*records: Dense) -> Dense:
            called = forward_arguments | dict(zip(by, records, strict=True))
            result = by_rule(of, *(called[n] for n in names), **{n: called[n] for n in options})
            return result[0] if isinstance(result, tuple) else result

        grads = vjp(forward, [forward_arguments[name] for name in by], arguments[op._schema.arguments[0].name])
        return grads if len(op._schema.returns) > 1 else grads[0]

    run.__name__ = run.__qualname__ = op._schema.name.removeprefix("aten::")
    run.__doc__ = f"The derivative of {of} with respect to {', '.join(by)}."
    return registry.add(Rule((op,), DERIVATIVE, where_masked(run, takes_op=False), takes_op=True, where=written_at(2)))


def requested_gradients(grads: Sequence[Dense | None], output_mask: Sequence[bool]) -> tuple[Dense | None, ...]:
    """The gradients that `output_mask` requests, None in place of the others."""
    return tuple(grad if requested else None for grad, requested in zip(grads, output_mask, strict=True))
