"""Two subjects that are no tensor subclass: the rules on bare records, and plain torch with zeros filled in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.subject import Observed, Subject
from op_registry.conformance.trees import tree_map
from op_registry.conformance.watching import Interpreter
from op_registry.errors import MaskedSemanticsError
from op_registry.laws.categories import COMPOSITE
from op_registry.records.dense import Dense
from op_registry.records.validity import as_int8
from op_registry.records.zeros import known_zero, remember_zero
from op_registry.resolve import resolve
from op_registry.schema import is_inplace


class RuleInterpreter(Interpreter):
    """Computes every call by its rule; the note of a tensor is the record that it represents."""

    def _record(self, leaf: object) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        note = self.noted(leaf)
        return note if note is not None else Dense(leaf, None)

    def _noted_data(self, value: object, op: OpOverload) -> Any:
        """A record's data with the record as its note; other values unchanged."""
        if not isinstance(value, Dense):
            return value
        # A rule may return its argument's own data, which already has a note: note an alias instead.
        data = value.data if self.noted(value.data) is None else value.data.view_as(value.data)
        return self.note(data, Dense(data, value.validity), op)

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.anything_noted(args, kwargs):
            return op(*args, **kwargs)
        meaning = resolve(op)
        if meaning.rule is None or meaning.base is None:
            if meaning.kind == "decomposes":
                return self.decompose(op, args, kwargs)
            raise MaskedSemanticsError(f"{op} has no rule ({meaning.kind})")
        if meaning.rule.category is COMPOSITE:
            return self.run(meaning.rule.bind(meaning.base), *args, **kwargs)
        # Records are not pytree nodes, so lists of tensors become lists of records.
        result = meaning.rule.bind(meaning.base)(*tree_map(self._record, args), **tree_map(self._record, kwargs))
        if is_inplace(op):
            target = args[0]
            target.copy_(result.data)
            return self.note(target, Dense(target, result.validity))
        return tree_map(lambda value: self._noted_data(value, op), result)


class Records(Subject):
    """The rules on bare records: no subclass, no dispatch, gradients by plain autograd through the rules."""

    name = "records"
    laws = ("P1", "P2", "P3", "P5", "P8")
    own_errors = False

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Dense:
        leaf = data.detach().requires_grad_(requires_grad)
        return Dense(leaf, None if mask is None else as_int8(mask.clone(memory_format=torch.contiguous_format)))

    def sharing(self, value: Dense, owner: Dense) -> Dense:
        return Dense(value.data, owner.validity)

    def observe(self, value: Any) -> Observed:
        if not isinstance(value, Dense):
            return value, None
        valid = value.valid
        if valid is None:
            return value.data, torch.ones(value.shape, dtype=torch.bool)
        return value.data, valid.expand(value.shape)

    def remember_zero(self, value: Dense) -> None:
        if value.validity is not None:
            remember_zero(value.data, value.validity)

    def check_remembered(self, value: Any) -> None:
        if isinstance(value, Dense):
            known_zero(value.data, value.validity)  # inside zeros_verified, it raises

    def is_value(self, value: object) -> bool:
        return isinstance(value, (Dense, Tensor))

    def requires_grad(self, value: Any) -> bool:
        return bool(value.data.requires_grad if isinstance(value, Dense) else value.requires_grad)

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        interpreter = RuleInterpreter()

        def enter(leaf: object) -> Any:
            return interpreter.note(leaf.data, leaf) if isinstance(leaf, Dense) else leaf

        entered_args, entered_kwargs = tree_map(enter, (args, kwargs))
        result = interpreter.run(fn, *entered_args, **entered_kwargs)

        def leave(leaf: object) -> Any:
            note = interpreter.noted(leaf) if isinstance(leaf, Tensor) else None
            return leaf if note is None else note

        return tree_map(leave, result)

    def gradients(self, scalar: Tensor, inputs: Sequence[Any], create_graph: bool = False) -> list[Any]:
        leaves = [i.data if isinstance(i, Dense) else i for i in inputs]
        gradients = torch.autograd.grad(scalar, leaves, create_graph=create_graph, allow_unused=True)
        return [
            Dense(g, i.validity) if g is not None and isinstance(i, Dense) else g
            for g, i in zip(gradients, inputs, strict=True)
        ]


class Zeros(Subject):
    """Plain torch on data with zeros filled in: not a masked tensor at all, and the laws must notice."""

    name = "zeros"
    laws = ("P1", "P2", "P3", "P5")

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Tensor:
        filled = data.detach().clone() if mask is None else torch.where(mask, data, torch.zeros((), dtype=data.dtype))
        return filled.requires_grad_(requires_grad)

    def observe(self, value: Any) -> Observed:
        return value, None


records = Records()
zeros = Zeros()
