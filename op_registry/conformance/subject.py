"""What conformance is asked about: a subject wraps plain tensors, calls functions, and lets results be looked at.

Conformance knows no tensor subclass. A subject is found by entry point (group ``op_registry.subjects``), by the name
``module:attribute``, or is one of the two that ship here: ``records`` (the rules themselves on bare records) and
``zeros`` (plain torch with zeros filled in: what the laws have to catch).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GROUP = "op_registry.subjects"


class Subject:
    """A masked tensor implementation, seen from outside."""

    name = "a subject"
    # The laws that make sense of it.
    laws: tuple[str, ...] = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8")
    # Whether P1 asks for torch's own errors too (not of bare rules, which out= does not reach, for one).
    own_errors = True

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Any:
        """A masked value; `mask` is bool, broadcastable to the data, None where all is valid."""
        raise NotImplementedError

    def observe(self, value: Any) -> tuple[Tensor, Tensor | None]:
        """The data of a value, differentiable, and its bool mask of full shape; None for a plain tensor."""
        raise NotImplementedError

    def is_value(self, value: Any) -> bool:
        """Whether `observe` can look at it."""
        return isinstance(value, Tensor)

    def requires_grad(self, value: Any) -> bool:
        """Whether a value, wrapped or plain, is one to differentiate by."""
        return bool(value.requires_grad)

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`fn` on wrapped and plain arguments."""
        return fn(*args, **kwargs)

    def call_twice(
        self, fn: Callable[..., Any], first: tuple[Any, Any], second: tuple[Any, Any], before: Callable[[], None]
    ) -> Any:
        """`fn` on one (args, kwargs), then on the second, whose result counts; `before` is called before each.

        A mode that compiles uses what the first call compiled, and raises where that does not serve the second.
        """
        before()
        self.call(fn, *first[0], **first[1])
        before()
        return self.call(fn, *second[0], **second[1])

    def gradients(self, scalar: Tensor, inputs: Sequence[Any], create_graph: bool = False) -> list[Any]:
        """The gradient of a plain scalar with respect to each input, wrapped or plain; None where it takes no part."""
        return list(torch.autograd.grad(scalar, list(inputs), create_graph=create_graph, allow_unused=True))

    # How else it can store a tensor, by name (P4).
    storages: tuple[str, ...] = ()

    def stored(self, value: Any, storage: str, requires_grad: bool, roomy: bool = False) -> Any:
        """A new leaf like `value`, stored otherwise; `value` itself where that storage does not fit its shape.

        With `roomy`, some of its invalid elements are stored too, with the data that they have.
        """
        return value

    def densified(self) -> list[str]:
        """The operators for which something was stored densely since this was last asked."""
        return []

    def modes(self) -> dict[str, Subject]:
        """The same implementation run otherwise (compiled, vmapped): by name, to be compared with this one."""
        return {}


def find_subject(name: str | None = None) -> Subject:
    """The subject called `name`: an entry point, ``module:attribute``, ``records`` or ``zeros``.

    Without a name: the environment's OP_REGISTRY_SUBJECT, else the entry point ``default``. Where nobody has declared
    one, LookupError: rules on bare records obey laws that a masked tensor made of them breaks, so they have to be
    asked for by name.
    """
    name = name or os.environ.get("OP_REGISTRY_SUBJECT")
    declared = declared_subjects()
    if name is None and "default" not in declared:
        raise LookupError(
            f"no masked tensor to test: nothing declares the entry point 'default' in the group {GROUP!r}. Install the "
            "library that does (pip install -e . in a checkout), or choose: subject='module:attribute' (--subject on "
            "the command line, OP_REGISTRY_SUBJECT in the environment), or subject='records' for the rules on bare "
            "records, which have dense storage and no compiled mode."
        )
    name = name or "default"
    if name in ("records", "zeros"):
        from op_registry.conformance import record_subject

        return record_subject.records if name == "records" else record_subject.zeros
    if name not in declared and ":" not in name:
        known = ", ".join(sorted({"records", "zeros", *declared}))
        raise LookupError(f"no subject is called {name!r}; there are {known}, and module:attribute")
    module, _, attribute = declared.get(name, name).partition(":")
    found = getattr(importlib.import_module(module), attribute)
    subject = found() if isinstance(found, type) else found
    if not isinstance(subject, Subject):
        raise TypeError(f"{name} is {subject!r}, not an op_registry.conformance.Subject")
    return subject


def declared_subjects() -> dict[str, str]:
    """``module:attribute`` by name: the entry points of what is installed, and of the checkout that this file is in.

    A checkout on PYTHONPATH has no entry points, but its pyproject.toml says which it would have.
    """
    return _declared_in_checkout() | {p.name: p.value for p in importlib.metadata.entry_points(group=GROUP)}


def _declared_in_checkout() -> dict[str, str]:
    project = Path(__file__).parents[2] / "pyproject.toml"
    if sys.version_info < (3, 11) or not project.is_file():
        return {}  # no TOML reader before Python 3.11: an installation, or a name, is needed there
    import tomllib

    declared = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("entry-points", {})
    return dict(declared.get(GROUP, {}))
