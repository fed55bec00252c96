"""Two subjects without a tensor subclass: the rules on bare records, and plain torch with zeros filled in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.categories import COMPOSITE
from op_registry.conformance.subject import Subject
from op_registry.conformance.trees import tree_map
from op_registry.conformance.watching import Interpreter
from op_registry.errors import MaskedSemanticsError
from op_registry.records.dense import Dense
from op_registry.records.validity import as_int8
from op_registry.resolve import resolve
from op_registry.schema import is_inplace


class RuleInterpreter(Interpreter):
    """Every call answered by its rule; a note is the record that a tensor stands for."""

    def _record(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        note = self.noted(leaf)
        return note if note is not None else Dense(leaf, None)

    def _stands_for(self, value: Any, op: OpOverload) -> Any:
        if not isinstance(value, Dense):
            return value
        # A rule may give back its argument's own data; an alias keeps the two apart.
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
        # A record is no pytree node, so that rules get lists of records where they had lists of tensors.
        result = meaning.rule.bind(meaning.base)(*tree_map(self._record, args), **tree_map(self._record, kwargs))
        if is_inplace(op):
            target = args[0]
            target.copy_(result.data)
            return self.note(target, Dense(target, result.validity))
        return tree_map(lambda value: self._stands_for(value, op), result)


class Records(Subject):
    """The rules on bare records: no subclass, no dispatch, gradients by plain autograd through what a rule does."""

    name = "records"
    laws = ("P1", "P2", "P3", "P5", "P8")
    own_errors = False

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Dense:
        leaf = data.detach().requires_grad_(requires_grad)
        return Dense(leaf, None if mask is None else as_int8(mask.clone(memory_format=torch.contiguous_format)))

    def observe(self, value: Any) -> tuple[Tensor, Tensor | None]:
        if not isinstance(value, Dense):
            return value, None
        valid = value.valid
        if valid is None:
            return value.data, torch.ones(value.shape, dtype=torch.bool)
        return value.data, valid.expand(value.shape)

    def is_value(self, value: Any) -> bool:
        return isinstance(value, (Dense, Tensor))

    def requires_grad(self, value: Any) -> bool:
        return bool(value.data.requires_grad if isinstance(value, Dense) else value.requires_grad)

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        interpreter = RuleInterpreter()

        def enter(leaf: Any) -> Any:
            return interpreter.note(leaf.data, leaf) if isinstance(leaf, Dense) else leaf

        entered_args, entered_kwargs = tree_map(enter, (args, kwargs))
        result = interpreter.run(fn, *entered_args, **entered_kwargs)

        def leave(leaf: Any) -> Any:
            note = interpreter.noted(leaf) if isinstance(leaf, Tensor) else None
            return leaf if note is None else note

        return tree_map(leave, result)

    def gradients(self, scalar: Tensor, inputs: Sequence[Any], create_graph: bool = False) -> list[Any]:
        leaves = [i.data if isinstance(i, Dense) else i for i in inputs]
        found = torch.autograd.grad(scalar, leaves, create_graph=create_graph, allow_unused=True)
        return [
            Dense(g, i.validity) if g is not None and isinstance(i, Dense) else g
            for g, i in zip(found, inputs, strict=True)
        ]


class Zeros(Subject):
    """Plain torch on data with zeros filled in, results given the first mask that fits: no masked tensor at all."""

    name = "zeros"
    laws = ("P1", "P2", "P3", "P5")

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Tensor:
        filled = data.detach().clone() if mask is None else torch.where(mask, data, torch.zeros((), dtype=data.dtype))
        return filled.requires_grad_(requires_grad)

    def observe(self, value: Any) -> tuple[Tensor, Tensor | None]:
        return value, None


records = Records()
zeros = Zeros()
