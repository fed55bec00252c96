"""Follows a call with masked arguments from operator to operator; :func:`masked_dispatch.explain` runs it under this.

A module of its own because it is built on conformance's interpreter, which is expensive to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.api.explanation import Step
from masked_dispatch.autograd.sparse import unwrap_any
from masked_dispatch.densification import Densification, collecting, storage_of
from masked_dispatch.dispatch.run_rule import has_masked
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry.categories import COMPOSITE
from op_registry.conformance.watching import Interpreter
from op_registry.records.dense import map_tensors
from op_registry.report.explain_storage import taken_by
from op_registry.resolve import Meaning, resolve
from op_registry.schema import written_arguments

# The namespace of operators that masked tensors are made, taken apart and converted by (library.py).
OWN = "masked_dispatch"


class Observer(Interpreter):
    """Writes down every operator call that a masked tensor takes part in, and takes composite operators apart."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._depth = 0

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return op(*args, **kwargs)
        meaning = resolve(op)
        arguments = (*map(described, args), *(f"{name}={described(value)}" for name, value in kwargs.items()))
        position, depth = len(self.steps), self._depth
        self.steps.append(Step(op, depth, arguments, served(meaning)))
        lowering, result, error = "", "", ""
        densified: list[Densification] = []
        pieces = _pieces(meaning)
        try:
            if pieces is not None:
                value = self._deeper(pieces, args, kwargs)
            else:
                lowering = _lowering(meaning, args, kwargs)
                with collecting() as densified:
                    value = op(*args, **kwargs)
            result = described(value)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            self.steps[position] = Step(
                op, depth, arguments, served(meaning), lowering, tuple(densified), result, error, pieces is not None
            )
        return value

    def _deeper(self, pieces: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._depth += 1
        try:
            return self.run(pieces, *args, **kwargs)
        finally:
            self._depth -= 1


def _pieces(meaning: Meaning) -> Callable[..., Any] | None:
    """What an overload is written in, where that is other operators."""
    if meaning.op.namespace == OWN:
        return None
    if meaning.kind == "decomposes":
        return meaning.op.decompose
    rule = meaning.rule
    return (
        rule.bind(meaning.op)
        if rule is not None and rule.category is COMPOSITE and meaning.base is meaning.op
        else None
    )


def _lowering(meaning: Meaning, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Which sparse run takes a call; "" where nothing is stored sparsely or none does."""
    found: list[SparseMaskedTensor] = []
    map_tensors(found.append, [*args, *kwargs.values()], SparseMaskedTensor)
    if not found or meaning.rule is None or meaning.base is None:
        return ""
    targets = written_arguments(meaning.op) if meaning.base is not meaning.op else ()
    records = [map_tensors(unwrap_any, a, Tensor) for a in args]
    named = {k: map_tensors(unwrap_any, v, Tensor) for k, v in kwargs.items() if k not in targets}
    return taken_by(meaning.base, meaning.rule, records, named)


def served(meaning: Meaning) -> str:
    """How an overload is served, in a line."""
    if meaning.op.namespace == OWN:
        return "this library's own, no operator of torch's"
    if meaning.rule is None:
        how = {"decomposes": "decomposes", "each of a list": "the operator on each element of its lists"}
        return how.get(meaning.kind, "missing: no rule, and no decomposition")
    rule = f"{meaning.rule.category.name} [{meaning.rule.where}]"
    return rule if meaning.base is meaning.op else f"{rule}, {meaning.base} written back"


def described(value: Any) -> str:
    """An argument or a result, with sizes: in a few words, never by its elements."""
    if isinstance(value, MaskedTensor):
        kind = str(value.dtype).removeprefix("torch.")
        if isinstance(value, SparseMaskedTensor):
            pieces = (value._kept_values, value._kept_validity, *value._pattern.pieces)
            return f"masked {kind} of {storage_of(value)} ({_bytes(pieces)})"
        return f"masked {kind} of shape {tuple(value.shape)} ({_bytes((value._data, value._validity))})"
    if isinstance(value, Tensor):
        return f"plain {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(described, value[:4])) + (", …" if len(value) > 4 else "")
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _bytes(pieces: Iterable[Tensor | None]) -> str:
    """What tensors hold together: their elements, whatever memory they share."""
    return f"{sum(p.numel() * p.element_size() for p in pieces if p is not None):,} bytes"
