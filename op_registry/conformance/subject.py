"""A subject is a masked tensor to be tested: it wraps plain tensors, calls functions, and exposes data and masks.

Conformance doesn't depend on any tensor subclass. A subject is found by entry point (group ``op_registry.subjects``) or
by the name ``module:attribute``. Two ship here: ``records`` (the rules themselves on bare records) and ``zeros`` (plain
torch with zeros filled in, which the laws must catch).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.compare import Observed as Observed
from op_registry.conformance.plain_torch import Interpreter
from op_registry.conformance.sample import Sample, tree_map
from op_registry.errors import MaskedSemanticsError
from op_registry.laws.categories import COMPOSITE
from op_registry.records.dense import Dense
from op_registry.records.fill import known_zero, remember_zero
from op_registry.records.validity import as_int8
from op_registry.resolve import resolve
from op_registry.schema import is_inplace


class Subject:
    """A masked tensor implementation, seen from outside."""

    name = "a subject"
    # The laws that can be tested on it; None: all.
    laws: tuple[str, ...] | None = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8")
    # The storages and modes in which values may know which of their positions are there (P9).
    padded_storages: tuple[str, ...] = ()
    padded_modes: tuple[str, ...] = ()
    # Whether P1 also requires torch's own errors. (Bare rules can't raise all of them: they never see out=, for one.)
    own_errors = True

    def prepare(self, device: torch.device) -> None:
        """Called before the first call on a device."""

    def placed(self, tensor: Tensor) -> Tensor:
        """A plain tensor on the subject's device."""
        return tensor

    def brought(self, value: Any) -> Any:
        """A plain result on the CPU; other values as they are."""
        return value

    def excuse(self, sample: Sample) -> str | None:
        """Why a call on the subject's device cannot be compared with the CPU, plain tensors included; else None."""
        return None

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Any:
        """A masked value; `mask` is bool, broadcastable to the data, None where all is valid."""
        raise NotImplementedError

    def sharing(self, value: Any, owner: Any) -> Any:
        """A new wrapped value, of which `owner` has the shape, storage and mask, under the owner's own mask object.

        So that what is recognised by identity is, as for x and x.clone(). An equal mask is right, too.
        """
        return value

    def padded(
        self,
        data: Tensor,
        mask: Tensor | None,
        there: Tensor,
        samples: int,
        positions: int | list[int],
        requires_grad: bool = False,
    ) -> Any:
        """A masked value that knows which positions are there (P9).

        mask       bool, of the data's shape; None: what is there is valid
        there      bool, broadcastable to the data: which positions are there
        samples    the dimension whose indices are samples
        positions  the dimension that numbers their positions, or those that do
        """
        raise NotImplementedError

    def extent(self, value: Any) -> Tensor | None:
        """bool of full shape: which positions of a value are there; None: all (P9)."""
        return None

    def observe(self, value: Any) -> Observed:
        """The data of a value, differentiable, and its bool mask of full shape; None for a plain tensor."""
        raise NotImplementedError

    def remember_zero(self, value: Any) -> None:
        """Tell the implementation that the data under the mask of a wrapped value is zero; it may use this fact."""

    def check_remembered(self, value: Any) -> None:
        """Raise AssertionError if the implementation wrongly remembers that the data under a value's mask is zero."""

    def is_value(self, value: object) -> bool:
        """Whether `observe` accepts it."""
        return isinstance(value, Tensor)

    def requires_grad(self, value: Any) -> bool:
        """Whether a value, wrapped or plain, requires grad."""
        return bool(value.requires_grad)

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`fn` on wrapped and plain arguments."""
        return fn(*args, **kwargs)

    def call_twice(
        self, fn: Callable[..., Any], first: tuple[Any, Any], second: tuple[Any, Any], before: Callable[[], None]
    ) -> Any:
        """The result of `fn` on the second (args, kwargs), after a call on the first; `before` runs before each call.

        A mode that compiles reuses the graph of the first call, and raises if the second call would recompile.
        """
        before()
        self.call(fn, *first[0], **first[1])
        before()
        return self.call(fn, *second[0], **second[1])

    def gradients(self, scalar: Tensor, inputs: Sequence[Any], create_graph: bool = False) -> list[Any]:
        """The gradient of a plain scalar with respect to each input, wrapped or plain; None for an unused input."""
        return list(torch.autograd.grad(scalar, list(inputs), create_graph=create_graph, allow_unused=True))

    # The storages other than dense that the implementation supports, by name (P4).
    storages: tuple[str, ...] = ()
    # Lines of Python for random programs that torch does not have, each with the line for plain tensors; {0} and {1}
    # are the operands.
    own_calls: tuple[tuple[str, str], ...] = ()

    def can_store(self, storage: str) -> bool:
        """Whether it supports a storage: one of `storages`, or one registered by another library."""
        return storage in self.storages

    def stored(self, value: Any, storage: str, requires_grad: bool, explicit_invalid: bool = False) -> Any:
        """A new leaf like `value` in another storage; `value` itself if its shape doesn't fit that storage.

        With `explicit_invalid`, some of its invalid elements are stored too, with their data.
        """
        return value

    def densified(self) -> list[str]:
        """The operators for which a tensor was converted to dense storage since the last call of this method."""
        return []

    def modes(self) -> dict[str, Subject]:
        """The same implementation in other modes (compiled, vmapped), by name, to be compared with this one."""
        return {}


# ------------------------------ finds the masked tensor to test by name, so that op_registry imports no tensor subclass

GROUP = "op_registry.subjects"
SHIPPED = {
    "records": "op_registry.conformance.subject:records",
    "zeros": "op_registry.conformance.subject:zeros",
}


def find_subject(name: str | None = None) -> Subject:
    """The subject called `name`: an entry point, ``module:attribute``, ``records`` or ``zeros``.

    Without a name: the environment variable OP_REGISTRY_SUBJECT, else the entry point ``default``. LookupError if there
    is none. Bare records are not the default, because rules may obey laws on them that a masked tensor breaks.
    """
    name = name or os.environ.get("OP_REGISTRY_SUBJECT")
    declared = declared_subjects()
    if name is None and "default" not in declared:
        raise LookupError(
            f"no masked tensor to test: nothing declares the entry point 'default' in the group {GROUP!r}. Install the "
            "library that does (pip install -e . in a checkout), or choose one: subject='module:attribute' (--subject "
            "on the command line, OP_REGISTRY_SUBJECT in the environment), or subject='records' for the rules on bare "
            "records, which have dense storage and no compiled mode."
        )
    name = name or "default"
    if name not in declared and ":" not in name:
        raise LookupError(
            f"no subject is called {name!r}; use one of {', '.join(sorted(declared))}, or module:attribute"
        )
    module, _, attribute = declared.get(name, name).partition(":")
    declared_object = getattr(importlib.import_module(module), attribute)
    subject = declared_object() if isinstance(declared_object, type) else declared_object
    if not isinstance(subject, Subject):
        raise TypeError(f"{name} is {subject!r}, not an op_registry.conformance.Subject")
    return subject


def declared_subjects() -> dict[str, str]:
    """``module:attribute`` by name: the installed entry points, and those of the checkout that this file is in.

    A checkout on PYTHONPATH has no entry points, but its pyproject.toml declares them.
    """
    return SHIPPED | _declared_in_checkout() | _installed()


@functools.cache  # reading the metadata of every installed distribution takes longer than many a trial
def _installed() -> dict[str, str]:
    return {p.name: p.value for p in importlib.metadata.entry_points(group=GROUP)}


@functools.cache
def _declared_in_checkout() -> dict[str, str]:
    project = Path(__file__).parents[2] / "pyproject.toml"
    if sys.version_info < (3, 11) or not project.is_file():
        return {}  # Python 3.10 has no tomllib: install the checkout there, or pass a name
    import tomllib

    declared = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("entry-points", {})
    return dict(declared.get(GROUP, {}))


# ----------------------------------------------------------------------------------------------------------------------
# Two subjects that are no tensor subclass: the rules on bare records, and plain torch with zeros filled in.


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
