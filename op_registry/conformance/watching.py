"""Intercepts every operator call that Python code makes, above autograd and before composite operators decompose.

``torch.var(x, 1)`` is intercepted as ``aten.var.dim`` and ``F.linear`` as ``aten.linear.default``. An
:class:`Interpreter` computes the result of each call. It keeps notes about tensors in a side table, so that the code
under test runs on plain tensors, without a tensor subclass.

Torch admits only three classes of mode at the PreDispatch key; an interpreter derives from one of them
(:class:`SchemaCheckMode`) for that reason only, and uses nothing of it. Checked with torch 2.11 to 2.13;
tests/conformance/test_conformance.py tests this assumption.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode

from op_registry.conformance.trees import tree_leaves
from op_registry.ops.reductions.torch_masked import OPERATORS

# Factories that take tensors: their results reach Python as copies.
FACTORIES = ("_like", "::linspace", "::logspace")


@contextlib.contextmanager
def torch_masked_as_operators() -> Iterator[None]:
    """Route each reduction of torch.masked to the custom operator that represents it."""
    # By hand: mock.patch.object takes longer than the calls that are watched.
    functions = {name: getattr(torch.masked, name) for name in OPERATORS}
    try:
        for name, operator in OPERATORS.items():
            setattr(torch.masked, name, _named(operator, name))
        yield
    finally:
        for name, function in functions.items():
            setattr(torch.masked, name, function)


def _named(operator: OpOverload, name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    function.__name__ = name
    return function


class Interpreter(SchemaCheckMode):  # type: ignore[misc, no-any-unimported]
    """Runs code with every operator call computed by `evaluate`, and keeps notes about tensors."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, _dispatch_key=torch._C.DispatchKey.PreDispatch)  # type: ignore[attr-defined]
        # By id. The tensor is kept alive with its note, because ids are reused.
        self._notes: dict[int, tuple[Tensor, Any]] = {}
        # Results of FACTORIES, by address: they are copied on the way to Python, with the same memory.
        self._factory_notes: dict[int, tuple[Tensor, Any]] = {}

    def note(self, tensor: Tensor, note: object, op: OpOverload | None = None) -> Tensor:
        """Store `note` about `tensor`, a result of `op`; returns the tensor."""
        self._notes[id(tensor)] = (tensor, note)
        if op is not None and op._schema.name.endswith(FACTORIES) and tensor.numel():
            self._factory_notes[tensor.data_ptr()] = (tensor, note)
        return tensor

    def noted(self, tensor: Tensor) -> Any:
        """The note about `tensor`, or None."""
        entry = self._notes.get(id(tensor))
        if entry is None and self._factory_notes and tensor.layout is torch.strided and tensor.numel():
            entry = self._factory_notes.get(tensor.data_ptr())
            if entry is not None and entry[0].shape != tensor.shape:
                return None
        return entry[1] if entry is not None else None

    def anything_noted(self, args: object, kwargs: object) -> bool:
        """Whether a tensor among the arguments has a note."""
        return any(self.noted(leaf) is not None for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn`, with every operator call that it makes computed by this interpreter."""
        with torch_masked_as_operators(), enable_python_dispatcher(), self:
            return fn(*args, **kwargs)

    def decompose(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run torch's own decomposition of a composite operator; each call that it makes is computed in turn."""
        return self.run(op.decompose, *args, **kwargs)

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of one call on plain tensors, whose notes say what they represent."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # With the Python dispatcher, Python implementations would replace some C++ kernels, and change rounding.
        with no_python_dispatcher():
            result = self.evaluate(func, args, kwargs or {})
        # In-place operators of torch.library.custom_op return nothing.
        return result if func._schema.returns else None


# The overload and the arguments of a call.
RecordedCall = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


class Recorder(Interpreter):
    """Records every call and runs it in plain torch, without decomposing composite operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        # For each call, the number of elements in its results.
        self.elements: list[int] = []

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = len(self.calls)
        self.calls.append((op, args, kwargs))
        self.elements.append(0)
        result = op(*args, **kwargs)
        self.elements[number] = sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def recorded(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[RecordedCall]:
        """The calls that a call of `fn` makes; none if plain torch cannot run it on this machine."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.run(fn, *args, **kwargs)
            except Exception:
                return []
        return self.calls


def calls_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[OpOverload]:
    """The overloads that a call of `fn` makes, in order; none where the call fails."""
    return [op for op, _, _ in Recorder().recorded(fn, *args, **kwargs)]
