"""The expected result of each operator, computed independently of the rules: `expected` runs a call on oracles alone.

Each operator call is computed by the oracle of its name. A composite operator without an oracle is decomposed by torch,
and an in-place form is computed as its functional form and written back. Any other operator raises :class:`NoOracle`,
which conformance counts.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.oracles import by_category, pointwise
from op_registry.conformance.oracles.call import (
    TABLE,
    Call,
    Expected,
    Misdeclared,
    NoOracle,
    Oracle,
    OracleFailed,
    Refused,
    all_true,
)
from op_registry.conformance.oracles.pointwise import as_oracles_run
from op_registry.conformance.plain_torch import Interpreter, first_line
from op_registry.conformance.sample import tree_map
from op_registry.dimensions.equation import Equation
from op_registry.laws.categories import CONTRACTION
from op_registry.laws.whole_slices import WHOLE_SLICES
from op_registry.registry import registry
from op_registry.schema import functional_form, is_inplace, is_out, written_arguments

# Categories whose rules serve a composite by their equation, and not by its steps.
STATED = (CONTRACTION, WHOLE_SLICES)

# Each module of this folder registers its oracles when it is imported.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def oracle_for(op: OpOverload) -> Oracle | None:
    """The oracle of an overload: by its name, by torch's pointwise tag, from its rule, or by its rule's category."""
    name = op._schema.name.removeprefix("aten::")
    by_name = TABLE.get(f"{name}.{op._overloadname}") or TABLE.get(name)
    if by_name is not None:
        return by_name
    if torch.Tag.pointwise in op.tags and not op._schema.is_mutable:
        return pointwise.elementwise
    rule = registry.get(op)
    if rule is None:
        return None
    if rule.oracles:
        rule_oracle = rule.oracles[0]
        return lambda c: rule_oracle(*[c[a.name] for a in c.op._schema.arguments])
    decomposes = op._can_decompose() and not (rule.category in STATED and isinstance(rule.dims, Equation))
    return None if decomposes else by_category.BY_CATEGORY.get(rule.category.name)


def _which(op: OpOverload) -> str:
    """The oracle of an overload, with where it is written."""
    rule = registry.get(op)
    own = rule.oracles[0] if rule is not None and rule.oracles else None
    if own is None or not hasattr(own, "__code__"):
        return f"the oracle of {op}"
    where = f"{own.__code__.co_filename.rpartition('/')[2]}:{own.__code__.co_firstlineno}"
    return f"the oracle of {op} ({own.__name__}, {where})"


class OracleInterpreter(Interpreter):
    """Computes every call by its oracle; the note of a tensor is its expected value."""

    def with_masks(self, value: object) -> Any:
        """Replace each tensor with its note, or without one with a plain Expected whose every element is valid."""

        def with_mask(leaf: object) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            note = self.noted(leaf)
            return note if note is not None else Expected(leaf, all_true(leaf), masked=False)

        return tree_map(with_mask, value)

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.anything_noted(args, kwargs):
            return op(*args, **kwargs)
        served, base = op, functional_form(op)
        if is_out(op) and base is not None:
            return self._into_out(op, base, args, kwargs)
        oracle = oracle_for(op)
        if oracle is None and base is not None:
            served, oracle = base, oracle_for(base)
        if oracle is None:
            if op._can_decompose():
                return self.decompose(op, args, kwargs)
            raise NoOracle(str(op))
        call = Call.of(op, self.with_masks(args), self.with_masks(kwargs))
        if served is not op:
            # By name, because polygamma_ takes its arguments in another order than polygamma.
            names = {argument.name for argument in served._schema.arguments}
            call = Call.of(served, (), {name: value for name, value in call.bound.items() if name in names})
        try:
            result = oracle(call)
        except (NoOracle, Refused, Misdeclared, OracleFailed):
            raise
        except Exception as error:
            raise OracleFailed(f"{_which(served)} raises {type(error).__name__}: {first_line(error)}") from error
        tensors = Call.of(op, args, kwargs)
        for name, updated in call.updates.items():
            self.note(tensors[name], updated)
        if is_inplace(op):
            # The target's new value is only in its note: writing to the tensor would invalidate what autograd saved.
            return self.note(args[0], _written(self.with_masks(args[0]), result))
        return tree_map(lambda out: self.note(out.data, out, op) if isinstance(out, Expected) else out, result)

    def _into_out(self, op: OpOverload, base: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The functional form's results, as the new values of the out= tensors."""
        names = written_arguments(op)
        result = self.evaluate(base, args, {k: v for k, v in kwargs.items() if k not in names})
        results = [result] if isinstance(result, Tensor) else list(result)
        targets = [kwargs[name] for name in names]
        for target, out in zip(targets, results, strict=True):
            value = self.with_masks(out)
            self.note(target, Expected(value.data, value.mask))
        return targets[0] if len(targets) == 1 else tuple(targets)


def _written(target: Expected, result: Expected) -> Expected:
    """The value of `target` after an in-place form whose functional form gives `result`."""
    new = Expected(result.data.to(target.data.dtype), result.mask, result.masked)
    if not target.masked:
        # On a plain tensor it is an update: the old value remains where the result is invalid.
        new = Expected(torch.where(new.mask, new.data, target.data), target.mask, masked=False)
    if target.data.requires_grad and not torch.is_grad_enabled():
        # Written under no_grad: another value, with the derivative of the old one.
        with torch.enable_grad():
            step = (new.data - target.data).detach()
            new = Expected(target.data + step, new.mask, new.masked)
    return new


def expected(
    fn: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    masks: Mapping[int, Tensor],
    also: Sequence[Tensor] = (),
) -> Any:
    """The expected result of `fn`: Expected for masked results, plain tensors and Python values.

    masks  the bool mask of each masked tensor, by the tensor's id
    also   arguments whose values after the call are returned too: (result, values)
    """
    interpreter = OracleInterpreter()

    def enter(leaf: object) -> object:
        if isinstance(leaf, Tensor) and id(leaf) in masks:
            interpreter.note(leaf, Expected(leaf, masks[id(leaf)]))
        return leaf

    tree_map(enter, (args, kwargs))
    result = interpreter.run(as_oracles_run(fn), *args, **kwargs)

    def leave(leaf: object) -> Any:
        note = interpreter.noted(leaf) if isinstance(leaf, Tensor) else None
        if note is None:
            return leaf
        return note if note.masked else note.data

    return tree_map(leave, (result, list(also)) if also else result)
