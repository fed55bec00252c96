"""What each operator has to give, said independently of the rules: `expected` runs a call on oracles alone.

Each operator call that a function makes goes to the oracle of its name; a composite operator without one is taken
apart by torch, and its pieces are asked; an in-place form is its functional form written back. Where nothing is left to
ask, :class:`NoOracle` names the operator, and conformance counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.oracles import (
    attention,
    by_category,
    derivatives,
    losses,
    norms,
    pairs,
    pointwise,
    positions,
    products,
    queries,
    recurrent,
    rows,
    slices,
    torch_masked,
    windows,
)
from op_registry.conformance.oracles.slots import TABLE, Call, NoOracle, Oracle, Refused, Slot, valid
from op_registry.conformance.trees import tree_map
from op_registry.conformance.watching import Interpreter
from op_registry.registry import registry
from op_registry.schema import functional_form, is_inplace, is_out, written_arguments

__all__ = [
    "Call",
    "NoOracle",
    "Refused",
    "Slot",
    "attention",
    "by_category",
    "derivatives",
    "expected",
    "losses",
    "norms",
    "pairs",
    "oracle_for",
    "pointwise",
    "positions",
    "products",
    "queries",
    "recurrent",
    "rows",
    "slices",
    "torch_masked",
    "valid",
    "windows",
]


def oracle_for(op: OpOverload) -> Oracle | None:
    """The oracle of an overload: by name, by torch's own pointwise tag, by its rule's own or its rule's category."""
    name = op._schema.name.removeprefix("aten::")
    found = TABLE.get(f"{name}.{op._overloadname}") or TABLE.get(name)
    if found is not None:
        return found
    if torch.Tag.pointwise in op.tags and not op._schema.is_mutable:
        return pointwise.elementwise
    rule = registry.get(op)
    if rule is None:
        return None
    if rule.oracles:
        own = rule.oracles[0]
        return lambda c: own(*[c[a.name] for a in c.op._schema.arguments])
    return by_category.BY_CATEGORY.get(rule.category.name) if not op._can_decompose() else None


class OracleInterpreter(Interpreter):
    """Every call answered by its oracle; a note is the Slot that a tensor stands for."""

    def slots_of(self, value: Any) -> Any:
        """Tensors as slots: a plain tensor as one with nothing missing."""

        def slot_of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            note = self.noted(leaf)
            return note if note is not None else Slot(leaf, torch.ones(leaf.shape, dtype=torch.bool), masked=False)

        return tree_map(slot_of, value)

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.anything_noted(args, kwargs):
            return op(*args, **kwargs)
        asked, base = op, functional_form(op)
        if is_out(op) and base is not None:
            return self._into_out(op, base, args, kwargs)
        found = oracle_for(op)
        if found is None and base is not None:
            asked, found = base, oracle_for(base)
        if found is None:
            if op._can_decompose():
                return self.decompose(op, args, kwargs)
            raise NoOracle(str(op))
        call = Call.of(op, self.slots_of(args), self.slots_of(kwargs))
        if asked is not op:
            # By name: polygamma_ takes its arguments in another order than polygamma.
            names = {argument.name for argument in asked._schema.arguments}
            call = Call.of(asked, (), {name: value for name, value in call.bound.items() if name in names})
        result = found(call)
        given = Call.of(op, args, kwargs)
        for name, slot in call.updates.items():
            self.note(given[name], slot)
        if is_inplace(op):
            # What the target holds from now on is in its note: autograd would miss what it saved of the tensor itself.
            target = self.slots_of(args[0])
            result = Slot(result.data.to(target.data.dtype), result.mask, result.masked)
            if not target.masked:
                # On a plain tensor it is an update: where something is missing, the old value stays.
                result = Slot(torch.where(result.mask, result.data, target.data), target.mask, masked=False)
            if target.data.requires_grad and not torch.is_grad_enabled():
                # Written under no_grad: another value, with the derivative that the old one had.
                with torch.enable_grad():
                    step = (result.data - target.data).detach()
                    result = Slot(target.data + step, result.mask, result.masked)
            return self.note(args[0], result)
        return tree_map(lambda value: self.note(value.data, value, op) if isinstance(value, Slot) else value, result)

    def _into_out(self, op: OpOverload, base: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The functional form's answer, which is what the out= tensors hold from now on."""
        names = written_arguments(op)
        result = self.evaluate(base, args, {k: v for k, v in kwargs.items() if k not in names})
        results = [result] if isinstance(result, Tensor) else list(result)
        targets = [kwargs[name] for name in names]
        for target, given in zip(targets, results, strict=True):
            # What was written to in place holds what its note says.
            known = self.noted(given)
            answer = known if known is not None else Slot(given, torch.ones_like(given, dtype=torch.bool))
            self.note(target, Slot(answer.data, answer.mask))
        return targets[0] if len(targets) == 1 else tuple(targets)


def expected(
    fn: Callable[..., Any], args: Any, kwargs: Any, masks: dict[int, Tensor], also: Sequence[Tensor] = ()
) -> Any:
    """What `fn` has to give: a structure of Slots (masked results), plain tensors and Python values.

    `masks` has the bool mask of each tensor that is masked, by its id. With `also`: the result, and what these
    arguments hold after the call.
    """
    interpreter = OracleInterpreter()

    def enter(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and id(leaf) in masks:
            interpreter.note(leaf, Slot(leaf, masks[id(leaf)]))
        return leaf

    tree_map(enter, (args, kwargs))
    result = interpreter.run(fn, *args, **kwargs)

    def leave(leaf: Any) -> Any:
        note = interpreter.noted(leaf) if isinstance(leaf, Tensor) else None
        if note is None:
            return leaf
        return note if note.masked else note.data

    return tree_map(leave, (result, list(also)) if also else result)
