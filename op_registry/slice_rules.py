"""Rules for partly valid slices. Where each slice is valid as a whole or not at all, the operator itself runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.categories import Operator, argument, categories, results_like
from op_registry.dimensions import Dimensions, Slices
from op_registry.records.dense import Dense
from op_registry.records.dims import known_to_hold, wrap_dims
from op_registry.records.slices import any_masked, has_whole_slices, plain_data
from op_registry.records.tracing import gradients_may_flow
from op_registry.registration import Registration
from op_registry.registry import registry
from op_registry.rule import Category, Rule, Run, written_at
from op_registry.traits import OF_A_FUNCTION


def masked_slices(
    *operators: Operator, category: Category, dims: Dimensions | None = None, **traits: Any
) -> Callable[[Run], Rule]:
    """Decorator: registers a function of the overload and the operator's own arguments as the rule for masked input.

    If nothing is masked, or the input is empty, the operator itself runs and its result is valid. `dims` states which
    dimensions it works on. With ``Slices(…)`` it also runs itself where the mask is one for each slice, as the rows of
    a padded batch have it. More traits are those of `masked_rule`.
    """
    registration = Registration.of_caller("masked_slices")
    category = registration.category(category, categories())
    ops = registration.overloads(operators, category)
    stated = registration.traits(traits if dims is None else {"dims": dims, **traits}, OF_A_FUNCTION)
    registration.dimensions(ops, dims, is_stated=True)
    slices = dims if isinstance(dims, Slices) else None

    def register(function: Run) -> Rule:
        registration.function(function, ops, takes_op=True)

        @functools.wraps(function)
        def run(op: OpOverload, x: Dense, *args: Any, **kwargs: Any) -> Any:
            others_masked = any_masked((*args, *kwargs.values()))
            if known_to_hold(x.data.numel() == 0) or (x.validity is None and not others_masked):
                data = _for_the_operator(slices, x.data)
                result = op(data, *map(plain_data, args), **{k: plain_data(v) for k, v in kwargs.items()})
                return Dense(result) if isinstance(result, Tensor) else results_like(result, None)
            # (Where elements are put in order, torch leaves the order of equal ones open, and the rules do not.)
            if slices is not None and slices.neutral is not None and slices.gives != "front" and not others_masked:
                dims = dims_of_slices(op, slices, x, args, kwargs)
                if dims and has_whole_slices(x, dims):
                    return run_on_whole_slices(op, slices, slices.neutral, x, dims, args, kwargs)
            return function(op, x, *args, **kwargs)

        return registry.add(Rule(ops, category, run, takes_op=True, where=written_at(2), traits=stated))

    return register


def dims_of_slices(
    op: OpOverload, slices: Slices, x: Dense, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """The dimensions of a slice in this call, as non-negative numbers."""
    dim = argument(op, slices.dim, (x, *args), kwargs)
    if slices.none_for_no_dims and dim is not None and not isinstance(dim, int) and len(dim) == 0:
        return ()
    return wrap_dims(dim, x.ndim)


def run_on_whole_slices(
    op: OpOverload,
    slices: Slices,
    neutral: int,
    x: Dense,
    dims: tuple[int, ...],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """The operator itself; a result is valid where its slice is.

    What an invalid slice holds stays in it, as does its derivative, which only anomaly detection would look at; but it
    enters the derivative by another operand, as the levels of a quantile are.
    """
    plain = {name: plain_data(value) for name, value in kwargs.items()}
    others = [plain_data(arg) for arg in args]
    tensors = [other for other in others if isinstance(other, Tensor)]
    seen = torch.is_anomaly_enabled() or (tensors and gradients_may_flow(*tensors))
    result = op(_for_the_operator(slices, x.filled(neutral) if seen else x.data), *others, **plain)
    if slices.gives == "one":
        return results_like(result, x.any_valid(dims, bool(argument(op, slices.keepdim, (x, *args), kwargs))))
    return results_like(result, x.validity)


def _for_the_operator(slices: Slices | None, data: Tensor) -> Tensor:
    """The data that torch's own kernel can run on."""
    return data.contiguous() if slices is not None and slices.own_memory and 0 in data.stride() else data
