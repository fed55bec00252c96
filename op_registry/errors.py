"""The exceptions of the library: what went wrong, with which values, and what to do next."""

from __future__ import annotations

from collections.abc import Callable

import torch

_name_called: Callable[[str], str] = str


def name_by(name: Callable[[str], str]) -> None:
    """From now on, the text of a refusal is `name(text)`, which may say by which function the caller came here."""
    global _name_called
    _name_called = name


class MaskedSemanticsError(RuntimeError):
    """An operation has no meaning on masked tensors, or no known one, and is refused."""

    def __init__(self, *args: object) -> None:  # (`__new__` has set `args`, and Dynamo traces no more than this)
        if torch.compiler.is_dynamo_compiling() or isinstance(self, InvalidValueError) or not args:
            return
        if isinstance(args[0], str):
            self.args = (_name_called(args[0]), *args[1:])


class InvalidValueError(MaskedSemanticsError, ValueError):
    """A value was requested that is invalid."""
