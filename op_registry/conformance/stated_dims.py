"""The law "dims": what a rule states of its operator's dimensions (:mod:`op_registry.dimensions`) is true.

It is asked of plain torch, without masks. An operand is changed at one index of one of its dimensions, and the results
say which of their elements depend on it:

*   Sizes: dimensions with one label have one size (1 broadcasts); reduced and contracted labels are in no result.
*   A batch label: the results change at this index alone.
*   A label that is stated contracted, reduced or each: in some call, results change at another index too. Otherwise it
    could be batch.
*   An operand without a batch label of the results: in some call, results change at several indices of it.

The last two are asked of all calls together, because one call may hide it (``maximum``, an index that is not read).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.dims_of_calls import Shown, Together, copied
from op_registry.conformance.report import Status
from op_registry.conformance.sample import Operator, Sample, chosen
from op_registry.conformance.stored_samples import storable
from op_registry.conformance.trees import tree_leaves, tree_map
from op_registry.conformance.trial import Broken
from op_registry.conformance.watching import RecordedCall, Recorder
from op_registry.dimensions.labels import Dimensions
from op_registry.dimensions.movements import Unknown
from op_registry.registry import registry
from op_registry.resolve import resolve
from op_registry.rule import packet_name

# Operators whose results depend on more than their operands, or on chance in such a way that one element moves others.
NOT_ASKED: Mapping[str, str] = {
    "empty_like": "it reads uninitialised memory",
    "new_empty": "it reads uninitialised memory",
    "new_empty_strided": "it reads uninitialised memory",
    "poisson": "how many random numbers an element draws depends on its value",
    "binomial": "how many random numbers an element draws depends on its value",
    "_standard_gamma": "how many random numbers an element draws depends on its value",
    "rrelu": "random numbers are drawn for negative elements alone",
    "_sample_dirichlet": "how many random numbers an element draws depends on its value",
}

# How many samples of an operator are asked at most, and how many calls of one overload that they make among others.
MOST_ASKED, MOST_AMONG_OTHERS = 16, 3
# The most elements in the tensors of a call.
MOST_ELEMENTS = 1 << 12


def outcomes(operator: Operator, seed: int = 0) -> Iterator[tuple[OpOverload, Status, str]]:
    """For each overload that an operator's samples call and whose rule states dimensions: whether they are true."""
    shown: dict[OpOverload, Shown] = {}
    together: dict[Dimensions, Together] = {}
    for sample in _samples(operator):
        made = calls_of_operators(sample)
        for op, args, kwargs in made:
            dims = _statement(op)
            if dims is not None and size_of_call(args, kwargs) <= MOST_ELEMENTS:
                asked = shown.setdefault(op, Shown(op, dims, together.setdefault(dims, Together())))
                asked.directly |= len(made) == 1
                if len(made) == 1 or asked.calls < MOST_AMONG_OTHERS:
                    _ask(asked, args, kwargs, seed)
    for op, asked in shown.items():
        found = asked.found
        if found is not None:
            yield op, "broken", f"{op}: {found} (stated: {asked.dims})"
        elif asked.changes:
            yield op, "pass", ""
        else:
            yield op, "not asked", NOT_ASKED.get(packet_name(op), "no change of an operand changes a result")


def _statement(op: OpOverload) -> Dimensions | None:
    """What the rule of an overload states; None if nothing is known."""
    rule = registry.get(op)
    return None if rule is None or isinstance(rule.dims, Unknown) else rule.dims


def _ask(asked: Shown, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> None:
    """Compare one call, unless one was wrong before."""
    if asked.wrong is None and packet_name(asked.op) not in NOT_ASKED:
        try:
            asked.ask(args, kwargs, seed)
        except Broken as reason:
            asked.wrong = str(reason)


def _samples(operator: Operator) -> list[Sample]:
    if not operator.dtypes or not operator.leading:
        return []
    samples = [s for s in operator.samples(operator.preferred_dtype) if s.tensors]
    if all(t.ndim < 2 or t.numel() < 2 for s in samples for t in s.tensors):
        samples += storable(samples)  # folded: unary operators have none of two dimensions
    return chosen([s for s in samples if all(t.numel() for t in s.tensors)] or samples, MOST_ASKED)


def calls_of_operators(sample: Sample) -> list[RecordedCall]:
    """The calls of operators that a sample makes; none if plain torch does not run it."""
    args, kwargs, _ = sample.copies()
    return _Copying().recorded(sample.fn, *args, **kwargs)


class _Copying(Recorder):
    """Records each call with copies of its operands, which may be written to later."""

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op not in registry and resolve(op).kind == "decomposes":
            return self.decompose(op, args, kwargs)
        number = len(self.calls)
        copies = tree_map(copied, (args, kwargs))
        result = super().evaluate(op, args, kwargs)
        self.calls[number] = (op, *copies)
        return result


def size_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return sum(leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
