"""The format in which pickle and torch.save write masked tensors, and its versions.

A file holds every object as a call ``load(version, kind, *parts)``, so that `load` refuses a later version by name,
whatever the file contains. We still read earlier versions; 1 and 2 called the function of a kind directly.

    1  writes the parts of a tensor
    2  writes the parts that tensors share with their views once
    3  writes the version first
    4  writes which positions of a padded batch are there
    5  writes whether every sample of it has a position
    6  writes which positions of the base of a view are there

The older format of torch.save is refused: its tensors are filled after all objects have been built and checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.tensor.saved import check_saved
from op_registry.records.kept import without_kept

VERSION = 6
# The first version that `load` is called with.
_FIRST = 3

# The functions of torch.serialization that write and read its older format.
_OLDER_FORMAT = ("_legacy_save", "_legacy_load")

_Piece = TypeVar("_Piece", Tensor, Tensor | None)

# Copies of the masks and indices of files, as long as the originals live.
_own: Any = WeakTensorKeyDictionary()

# The functions that rebuild objects, by kind.
_builders: dict[str, Callable[..., Any]] = {}


def builder(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for the function that checks the parts of one kind of object and rebuilds it from them."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _builders[kind] = function
        torch.serialization.add_safe_globals([function])  # versions 1 and 2
        return function

    return register


def saved_as(kind: str, *parts: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The result of `__reduce_ex__`."""
    check_format()
    return load, (VERSION, kind, *(without_kept(part) if isinstance(part, Tensor) else part for part in parts))


@never_compiled
def load(version: int, kind: str, *parts: Any) -> Any:
    """pickle and torch.load call this function.

    Raises ValueError for a version that this library does not know, and for parts that do not fit together.
    """
    check_format()
    if type(version) is not int or version < _FIRST:
        check_saved(f"its format version is {version!r}")
    if version > VERSION:
        raise ValueError(
            f"this file of a masked tensor has format version {version}, and this version of masked_dispatch reads "
            f"versions 1 to {VERSION}. Update masked_dispatch, or save the tensor again with the version that is "
            "installed here."
        )
    if kind not in _builders:
        check_saved(f"the kind of what was saved is {kind!r}, not one of {', '.join(sorted(_builders))}")
    return _builders[kind](*parts)


def check_format() -> None:
    """Refuse torch's older file format, to write and to read."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _OLDER_FORMAT and frame.f_globals.get("__name__") == "torch.serialization":
            raise ValueError(
                "torch's older file format (torch.save with _use_new_zipfile_serialization=False) takes no masked "
                "tensors, because its tensors are read too late for a mask to be checked. Leave out this argument; or "
                "save x.get_data() and x.get_mask()."
            )
        frame = frame.f_back


def own(piece: _Piece) -> _Piece:
    """A copy of a mask or an index tensor of a file. Tensors that share the original also share the copy.

    Another tensor of the file may share the original's memory, such as the result of ``x.crow_indices()``; after our
    checks, a write to that tensor could put indices out of bounds.
    """
    if piece is None:
        return None
    copied: Tensor | None = _own.get(piece)
    if copied is None:
        copied = _own[piece] = piece.clone()
    return copied


torch.serialization.add_safe_globals([load])
