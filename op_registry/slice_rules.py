"""Rules for partly valid slices: if all elements are valid, the operator itself runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from op_registry.categories import Operator, results_like
from op_registry.records.dense import Dense
from op_registry.records.slices import any_masked, plain_data
from op_registry.registry import registry
from op_registry.rule import Category, Rule, Run, Slices, overloads_of, written_at


def masked_slices(*operators: Operator, category: Category, slices: Slices | None = None) -> Callable[[Run], Rule]:
    """Decorator: registers a function of the overload and the operator's own arguments as the rule for masked input.

    If nothing is masked, or the input is empty, the operator itself runs and its result is valid. `slices` states how
    the operator works on a slice, so that it can run on the stored elements of sparse slices.
    """
    traits = {"slices": slices} if slices else {}

    def register(function: Run) -> Rule:
        @functools.wraps(function)
        def run(op: OpOverload, x: Dense, *args: Any, **kwargs: Any) -> Any:
            if x.data.numel() != 0 and any_masked((x, *args, *kwargs.values())):
                return function(op, x, *args, **kwargs)
            result = op(*map(plain_data, (x, *args)), **{k: plain_data(v) for k, v in kwargs.items()})
            return Dense(result) if isinstance(result, Tensor) else results_like(result, None)

        ops = tuple(o for operator in operators for o in overloads_of(operator))
        return registry.add(Rule(ops, category, run, takes_op=True, where=written_at(2), traits=traits))

    return register
