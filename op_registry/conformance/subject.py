"""What conformance is asked about: a subject wraps plain tensors, calls functions, and lets results be looked at.

Conformance knows no tensor subclass. A subject is found by entry point (group ``op_registry.subjects``), by the name
``module:attribute``, or is one of the two that ship here: ``records`` (the rules themselves on bare records) and
``zeros`` (plain torch with zeros filled in: what the laws have to catch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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

    def can_store(self, storage: str) -> bool:
        """Whether it knows a storage: one of those, or one that somebody else has registered."""
        return storage in self.storages

    def stored(self, value: Any, storage: str, requires_grad: bool, explicit_invalid: bool = False) -> Any:
        """A new leaf like `value`, stored otherwise; `value` itself where that storage does not fit its shape.

        With `explicit_invalid`, some of its invalid elements are stored too, with the data that they have.
        """
        return value

    def densified(self) -> list[str]:
        """The operators for which something was stored densely since this was last asked."""
        return []

    def modes(self) -> dict[str, Subject]:
        """The same implementation run otherwise (compiled, vmapped): by name, to be compared with this one."""
        return {}
