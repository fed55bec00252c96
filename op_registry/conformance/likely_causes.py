"""What is likely wrong with a rule of a user's own: additions to the messages of P2 and P4."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.compare import difference
from op_registry.conformance.oracles import by_category
from op_registry.conformance.oracles.call import Expected
from op_registry.conformance.trees import tree_leaves
from op_registry.conformance.trial import Trial
from op_registry.laws.categories import REDUCTION
from op_registry.registry import registry
from op_registry.rule import path_in_package
from op_registry.sparse.lowering import OnCall, ways_of


def likely_cause(trial: Trial, result: int, got: Tensor, want: Expected) -> str:
    """What the rule of a reduction states wrongly, by its oracle under another statement; "" if nothing is known."""
    op = trial.sample.fn
    rule = registry.get(op) if isinstance(op, OpOverload) else None
    if rule is None or rule.is_built_in or rule.category is not REDUCTION:
        return ""
    if got.dtype is torch.int64 and result not in (rule.positions or ()):
        as_positions = _expected(trial, result, by_category.Stated(positions=(result,)))
        if as_positions is not None and difference(got, as_positions.data, want.mask) is None:
            return f". It looks like a position in the slice: dims=Slices(positions=({result},))"
    identity = rule.traits.identity
    if identity is None:
        return ""
    with_one_more = _expected(trial, result, by_category.Stated(one_more=identity))
    if with_one_more is not None and difference(with_one_more.data, want.data, want.mask) is not None:
        number = "identity" if callable(identity) else f"identity={identity}"
        return (
            f". {number} is none of this operator: a slice with one such element more has another result. Write the "
            "rule with over_slices"
        )
    return ""


def own_lowerings(trial: Trial) -> str:
    """Where the lowerings are written that the rule has itself; "" if it has none."""
    op = trial.sample.fn
    rule = registry.get(op) if isinstance(op, OpOverload) else None
    if rule is None or rule.is_built_in:
        return ""
    ways = [way for run in rule.lowerings.values() for way in ways_of(run)]
    functions = [inspect.unwrap(way.run if isinstance(way, OnCall) else way) for way in ways]
    functions = [function for function in functions if hasattr(function, "__code__")]
    places = [f"{path_in_package(f.__code__.co_filename, f.__module__)}:{f.__code__.co_firstlineno}" for f in functions]
    return f" (its lowering is at {', '.join(places)})" if places else ""


def _expected(trial: Trial, result: int, stated: by_category.Stated) -> Expected | None:
    """What the oracle gives if the rule had stated this."""
    with by_category.stating(stated):
        try:
            found = tree_leaves(trial.expected())[result]
        except Exception:  # an operator that does not take it
            return None
    return found if isinstance(found, Expected) else None
