"""Rules for partly valid slices. Where each slice is valid as a whole or not at all, the operator itself runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.bound import argument, bind_by_name
from op_registry.dimensions.labels import Dimensions
from op_registry.dimensions.sizes import known_to_hold
from op_registry.dimensions.slices import LastDims, Slices
from op_registry.laws.categories import Operator, categories, results_like
from op_registry.records.dense import Dense, valid_in_all
from op_registry.records.fill import zeroed
from op_registry.records.slices import DenseSlices, any_masked, has_whole_slices, plain_data, reduced_dims
from op_registry.records.tracing import gradients_may_flow
from op_registry.registration import Registration
from op_registry.registry import registry
from op_registry.rule import Category, Rule, Run, written_at
from op_registry.sparse.lowering import first_of
from op_registry.sparse.record import Sparse
from op_registry.sparse.slicewise import SLICEWISE, Body, by_segments, for_body
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
    slices = dims if isinstance(dims, Slices) else None  # of other kinds, the rule itself sees to it

    def register(function: Run) -> Rule:
        registration.function(function, ops, takes_op=True)

        @functools.wraps(function)
        def run(op: OpOverload, x: Dense, *args: Any, **kwargs: Any) -> Any:
            others_masked = any_masked((*args, *kwargs.values()))
            if known_to_hold(x.data.numel() == 0) or (x.validity is None and not others_masked):
                return run_plainly(op, slices, x, args, kwargs)
            # (Where elements are put in order, torch leaves the order of equal ones open, and the rules do not.)
            if slices is not None and slices.neutral is not None and slices.gives != "front" and not others_masked:
                dims = dims_of_slices(op, slices, x, args, kwargs)
                if dims and has_whole_slices(x, dims):
                    return run_on_whole_slices(op, slices, slices.neutral, x, dims, args, kwargs)
            return function(op, x, *args, **kwargs)

        return registry.add(Rule(ops, category, run, takes_op=True, where=written_at(2), traits=stated))

    return register


def over_slices(
    *operators: Operator, category: Category, dims: Slices | LastDims, **traits: Any
) -> Callable[[Body], Rule]:
    """Decorator: a function of slices becomes the rule, on dense storage and, among stored elements, on sparse ones.

    ``function(op, over, x, *parameters, **options)`` gets the overload; the slices (`Over`); the elements, a dense
    record; with LastDims, the operator's other tensors, which broadcast with these; and its other arguments by name,
    except those that state dimensions. It returns a tensor for each result, with a value for each element or for each
    slice. What is valid, the law says: an element where it and its parameters are, one for a slice where the slice has
    a valid element. Otherwise as `masked_slices`.
    """
    registration = Registration.of_caller("over_slices")
    category = registration.category(category, categories())
    ops = registration.overloads(operators, category)
    stated = registration.traits({"dims": dims, **traits}, OF_A_FUNCTION)
    if not isinstance(dims, (Slices, LastDims)):
        raise registration.error(
            f"dims={type(dims).__name__}(...) states no slices, as Slices(...) and LastDims(...) do"
        )
    registration.dimensions(ops, dims, is_stated=True)

    def register(function: Body) -> Rule:
        registration.body(function, ops, dims)

        @functools.wraps(function)
        def run(op: OpOverload, x: Dense, *args: Any, **kwargs: Any) -> Any:
            return run_over_slices(function, op, dims, x, args, kwargs)

        rule = Rule(ops, category, run, takes_op=True, where=written_at(2), traits=stated)
        rule.lowering(Sparse)(first_of(by_segments(function), SLICEWISE))
        return registry.add(rule)

    return register


def run_over_slices(
    body: Body, op: OpOverload, stated: Slices | LastDims, x: Dense, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """A function of slices on a dense record; torch's own operator, where that gives the rule's results."""
    others_masked = any_masked((*args, *kwargs.values()))
    if known_to_hold(x.data.numel() == 0) or (x.validity is None and not others_masked):
        return run_plainly(op, stated, x, args, kwargs)
    dims = dims_of_slices(op, stated, x, args, kwargs)
    if not others_masked and dims and dims[0] >= 0 and has_whole_slices(x, dims):
        if isinstance(stated, Slices):
            if stated.neutral is not None:
                return run_on_whole_slices(op, stated, stated.neutral, x, dims, args, kwargs)
        elif stays_finite(op, x, args, kwargs):
            return run_on_whole_rows(op, x, args, kwargs)
    named = bind_by_name(op, (x, *args), kwargs)
    parameters, options = for_body(op, stated, args, kwargs)
    if isinstance(stated, LastDims) and not stated.sizes_match(x.shape, parameters, named):
        run_plainly(op, stated, x, args, kwargs)  # raises torch's error
    keepdim = not isinstance(stated, Slices) or bool(named.get(stated.keepdim))
    over = DenseSlices(dims, keepdim)

    def shown(n: int, values: Tensor) -> Dense:
        return Dense(values, valid_in_all(x, *parameters) if stated.is_of_elements(op, n) else over.exists(x))

    results = body(op, over, x, *parameters, **options)
    if isinstance(results, Tensor):
        return shown(0, results)
    return tuple(shown(n, values) for n, values in enumerate(results))


def run_plainly(
    op: OpOverload, stated: Dimensions | None, x: Dense, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """The operator itself, where nothing is masked."""
    data = _for_the_operator(stated, x.data)
    result = op(data, *map(plain_data, args), **{k: plain_data(v) for k, v in kwargs.items()})
    return Dense(result) if isinstance(result, Tensor) else results_like(result, None)


def dims_of_slices(
    op: OpOverload, stated: Slices | LastDims, x: Dense, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """The dimensions of a slice in this call, as non-negative numbers; torch's error for one out of range."""
    if isinstance(stated, LastDims):
        count = stated.count if isinstance(stated.count, int) else len(argument(op, stated.count, (x, *args), kwargs))
        return tuple(range(x.ndim - count, x.ndim))
    dim = argument(op, stated.dim, (x, *args), kwargs)
    if stated.none_for_no_dims and dim is not None and not isinstance(dim, int) and len(dim) == 0:
        return ()
    return reduced_dims(x, dim)


def stays_finite(op: OpOverload, x: Dense, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a norm of a row of zeros, which it divides by √eps, is finite."""
    eps = argument(op, "eps", (x, *args), kwargs)
    return eps is None or eps > 0


def run_on_whole_rows(op: OpOverload, x: Dense, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operator itself on rows that are valid as a whole or not at all.

    A parameter's derivative sums over all of them: 0 · NaN of an invalid one would show, so that they are filled.
    """
    result = op(x.filled(0), *map(plain_data, args), **{k: plain_data(v) for k, v in kwargs.items()})
    return results_like(zeroed(result, x.validity) if isinstance(result, Tensor) else result, x.validity)


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


def _for_the_operator(stated: Dimensions | None, data: Tensor) -> Tensor:
    """The data that torch's own kernel can run on."""
    own_memory = isinstance(stated, Slices) and stated.own_memory
    return data.contiguous() if own_memory and 0 in data.stride() else data
