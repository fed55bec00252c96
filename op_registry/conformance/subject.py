"""A subject is a masked tensor to be tested: it wraps plain tensors, calls functions, and exposes data and masks.

Conformance doesn't depend on any tensor subclass. A subject is found by entry point (group ``op_registry.subjects``) or
by the name ``module:attribute``. Two ship here: ``records`` (the rules themselves on bare records) and ``zeros`` (plain
torch with zeros filled in, which the laws must catch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.sample import Sample

# The data of a tensor and its bool mask of full shape; the mask is None for a plain tensor.
Observed = tuple[Tensor, Tensor | None]


class Subject:
    """A masked tensor implementation, seen from outside."""

    name = "a subject"
    # The laws that can be tested on it.
    laws: tuple[str, ...] = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8")
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
