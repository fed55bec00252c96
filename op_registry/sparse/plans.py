"""Plans: what of a lowering follows from a call's operator, the ranks and storages of its tensors, and its numbers.

It is worked out in the first of such calls, and kept for the next ones, which only do it: which rows a rule runs on,
which dimensions a product contracts. What depends on sizes, dtypes or elements belongs to the run, not to the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels
from op_registry.records.dense import Dense
from op_registry.sparse.permuted import RECORDS, Permuted
from op_registry.sparse.record import NotLowered, Sparse

Plan = TypeVar("Plan")

_PLANS: dict[Hashable, Any] = {}
_MOST = 4096


def planned(make: Callable[[Bound, Labels | None], Plan]) -> Callable[[Bound], Plan]:
    """Decorator: the plan of a call, which `make` works out once, with the labels of the call. A NotLowered that it
    raises is raised each time.

    A plan is not kept if the labels of dimensions depend on sizes, as those of views do.
    """

    def plan_of(c: Bound) -> Plan:
        try:
            c.form = c.form or tuple([_form(value) for value in c.named.values()])
            key = (make, c.rule, c.op, c.form)
            plan: Any = _PLANS.get(key)
        except TypeError:  # a number that is not known while tracing
            plan = key = None
        if plan is None:
            read: list[str] = []
            try:
                plan = make(c, c.map(lambda tensor: _Rank(tensor, read), RECORDS).labels)
            except NotLowered as refusal:
                plan = str(refusal)
            if key is not None and not read:
                if len(_PLANS) >= _MOST:
                    _PLANS.clear()
                _PLANS[key] = plan
        if type(plan) is str:
            raise NotLowered(plan)
        return plan

    return plan_of


class _Rank:
    """A tensor for labels of dimensions; what they read of it besides the rank is noted."""

    def __init__(self, tensor: Any, read: list[str]) -> None:
        self.ndim, self._tensor, self._read = tensor.ndim, tensor, read

    def __getattr__(self, name: str) -> Any:
        self._read.append(name)
        return getattr(self._tensor, name)


def _form(value: Any) -> Hashable:
    """What a plan may depend on: of a record, its ranks and its order of dimensions. TypeError for symbolic numbers."""
    kind = type(value)
    if kind is Dense:
        return _DENSE[value.data.ndim]
    if kind is Sparse:
        return kind, value.values.data.ndim, value.pattern.lead, len(value.pattern.sizes)
    if kind is Permuted:
        return kind, value.order, _form(value.base)
    if kind in _SYMBOLIC:
        raise TypeError(f"{value} is symbolic")
    return tuple(map(_form, value)) if kind in (list, tuple) else value


_DENSE = tuple((Dense, rank) for rank in range(65))  # torch's tensors have at most 64 dimensions
_SYMBOLIC = frozenset((torch.SymInt, torch.SymFloat, torch.SymBool))
