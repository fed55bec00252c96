"""The exceptions of the library: what went wrong, with which values, and what to do next."""

from __future__ import annotations


class MaskedSemanticsError(RuntimeError):
    """An operation has no meaning on masked tensors, or no known one, and is refused."""


class InvalidValueError(MaskedSemanticsError, ValueError):
    """A value was requested that is invalid."""
