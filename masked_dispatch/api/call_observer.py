"""The interpreter under which :func:`masked_dispatch.explain` runs a call: it records every operator call.

A separate module because conformance's interpreter, on which it is built, is expensive to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.api.explanation import Step
from masked_dispatch.autograd.sparse import unwrap_any
from masked_dispatch.densification import Densification, collecting, storage_of
from masked_dispatch.dispatch.run_rule import has_masked
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry.conformance.plain_torch import Interpreter
from op_registry.laws.categories import COMPOSITE
from op_registry.records.dense import map_tensors
from op_registry.report.explain import taken_by
from op_registry.resolve import Meaning, resolve
from op_registry.schema import written_arguments

# The namespace of the operators that make, unpack and convert masked tensors (library.py).
OWN = "masked_dispatch"


class Observer(Interpreter):
    """Records every operator call with masked arguments; composite operators are recorded with the calls they make."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._depth = 0

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return op(*args, **kwargs)
        meaning = resolve(op)
        arguments = (*map(describe, args), *(f"{name}={describe(value)}" for name, value in kwargs.items()))
        position, depth = len(self.steps), self._depth
        self.steps.append(Step(op, depth, arguments, served(meaning)))
        lowering, result, error = "", "", ""
        densified: list[Densification] = []
        decomposition = _decomposition(meaning)
        try:
            if decomposition is not None:
                value = self._run_deeper(decomposition, args, kwargs)
            else:
                lowering = _lowering(meaning, args, kwargs)
                with collecting() as densified:
                    value = op(*args, **kwargs)
            result = describe(value)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            composite = decomposition is not None
            self.steps[position] = Step(
                op, depth, arguments, served(meaning), lowering, tuple(densified), result, error, composite
            )
        return value

    def _run_deeper(self, decomposition: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        try:
            return self.run(decomposition, *args, **kwargs)
        finally:
            self._depth -= 1


def _decomposition(meaning: Meaning) -> Callable[..., Any] | None:
    """The function that calls other operators for the overload, if it is composite or decomposes."""
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
    """The lowering that takes a call; "" if nothing is stored sparsely or none does."""
    sparse: list[SparseMaskedTensor] = []
    map_tensors(sparse.append, [*args, *kwargs.values()], SparseMaskedTensor)
    if not sparse or meaning.rule is None or meaning.base is None:
        return ""
    targets = written_arguments(meaning.op) if meaning.base is not meaning.op else ()
    records = [map_tensors(unwrap_any, a, Tensor) for a in args]
    named = {k: map_tensors(unwrap_any, v, Tensor) for k, v in kwargs.items() if k not in targets}
    return taken_by(meaning.base, meaning.rule, records, named)


def served(meaning: Meaning) -> str:
    """How an overload is served, in a line."""
    if meaning.op.namespace == OWN:
        return "an operator of this library, not of torch"
    if meaning.rule is None:
        how = {"decomposes": "decomposes", "each of a list": "the operator on each element of its lists"}
        return how.get(meaning.kind, "missing: no rule and no decomposition")
    rule = f"{meaning.rule.category.name} [{meaning.rule.where}]"
    return rule if meaning.base is meaning.op else f"{rule}, {meaning.base} written back"


def describe(value: object) -> str:
    """An argument or a result: kind, dtype, shape and bytes of a tensor, never its elements."""
    if isinstance(value, MaskedTensor):
        kind = str(value.dtype).removeprefix("torch.")
        if isinstance(value, SparseMaskedTensor):
            return f"masked {kind} of {storage_of(value)} ({value.stored_bytes:,} bytes)"
        return f"masked {kind} of shape {tuple(value.shape)} ({value.stored_bytes:,} bytes)"
    if isinstance(value, Tensor):
        return f"plain {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(describe, value[:4])) + (", ..." if len(value) > 4 else "")
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
