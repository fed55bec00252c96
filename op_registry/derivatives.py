"""Derivatives of rules: what torch's own gradient formulas mean on masked tensors.

Nothing here is needed to differentiate a masked computation: rules run above autograd, on plain data. But the formulas
are operators too (`avg_pool2d_backward`, `nll_loss_backward` …), and users may call them. Their meaning follows
from the operator that it is the derivative of: run that operator's rule, and take the derivative of what it did.

Law: an element of the incoming gradient counts where it is valid, and the result that it belongs to is. The gradient is
masked like the tensor that it belongs to; where that tensor is no argument, every element of the gradient is valid:
those that no contribution reaches are zeros, as in torch.

Most formulas are the derivative of the forward operator's rule (`derivative`), which recomputes what the forward
operator saved. Those that are linear in the gradient, and read nothing else but positions, run themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.autocast import autocast_off
from op_registry.categories import DERIVATIVE, data_of, results_like
from op_registry.records.dense import Dense, all_valid, fill_where_invalid, valid_in_all
from op_registry.registry import registry
from op_registry.resolve import by_rule
from op_registry.rule import Rule, written_at

# What an argument of the operator is in terms of its derivative's arguments, by their names in the schema.
Given = Callable[[Mapping[str, Any]], Any]


def vjp(forward: Callable[..., Any], inputs: Sequence[Dense | None], grad: Dense) -> tuple[Any, ...]:
    """The gradient of each input of `forward(*inputs)`, when that of its result is `grad` (or broadcasts to it).

    The derivative is taken by torch.func, so that it has derivatives itself, and works wherever rules do.
    """
    variables = [x for x in inputs if x is not None]

    def values(*data: Tensor) -> tuple[Tensor, list[Tensor]]:
        given = iter(data)
        result: Dense = forward(*(None if x is None else x.like(next(given)) for x in inputs))
        return result.data, [] if result.validity is None else [result.validity]

    # torch computes its formulas in the dtypes that they are given, whatever autocast says.
    with autocast_off(grad.device):
        pulled: Any = torch.func.vjp(values, *(x.data for x in variables), has_aux=True)
        result, pull, validity = pulled
        incoming = grad.data.expand(result.shape)
        counted = fill_where_invalid(incoming, valid_in_all(grad, *(Dense(result, v) for v in validity)), 0)
        found = iter(pull(counted.to(result.dtype)))
    return tuple(None if x is None else x.like(next(found)) for x in inputs)


def bind_by_name(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the schema, defaults included."""
    found = {}
    for position, argument in enumerate(op._schema.arguments):
        if argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif position < len(args):
            found[argument.name] = args[position]
        else:
            found[argument.name] = argument.default_value
    return found


def run_plain(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator itself, for calls without a mask."""
    return results_like(op(*data_of(args), **{k: data_of(v) for k, v in kwargs.items()}), None)


def derivative(op: OpOverload, *, of: OpOverload, by: Sequence[str] = ("self",), **given: Given) -> Rule:
    """Register `op`, whose first argument is the gradient of the result of `of` (of its first result).

    by     the arguments of `of` whose gradients `op` gives, in order
    given  arguments of `of` that `op` has under another name, or only implies; others are taken over by name

    What the forward operator saved (statistics, counts, other results) is recomputed by its rule.
    """
    names = [a.name for a in of._schema.arguments if not a.kwarg_only]
    options = [a.name for a in of._schema.arguments if a.kwarg_only]
    defaults = {a.name: a.default_value for a in of._schema.arguments}

    def run(*args: Any, **kwargs: Any) -> Any:
        if all_valid(*args, *kwargs.values()):
            return run_plain(op, args, kwargs)
        mine = bind_by_name(op, args, kwargs)
        theirs = {**defaults, **{k: v for k, v in mine.items() if k in defaults}}
        theirs |= {name: given_by(mine) for name, given_by in given.items()}

        def forward(*records: Dense) -> Dense:
            called = theirs | dict(zip(by, records, strict=True))
            result = by_rule(of, *(called[n] for n in names), **{n: called[n] for n in options})
            first: Dense = result[0] if isinstance(result, tuple) else result
            return first

        grads = vjp(forward, [theirs[name] for name in by], mine[op._schema.arguments[0].name])
        return grads if len(op._schema.returns) > 1 else grads[0]

    run.__name__ = run.__qualname__ = op._schema.name.removeprefix("aten::")
    run.__doc__ = f"The derivative of {of} by {', '.join(by)}."
    return registry.add(Rule((op,), DERIVATIVE, run, takes_op=False, where=written_at(2)))


def requested_gradients(grads: Sequence[Dense | None], output_mask: Sequence[bool]) -> tuple[Dense | None, ...]:
    """The gradients that `output_mask` requests, None in place of the others."""
    return tuple(grad if asked else None for grad, asked in zip(grads, output_mask, strict=True))
