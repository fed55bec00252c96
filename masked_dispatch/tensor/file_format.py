"""The format in which pickle and torch.save write masked tensors, and its versions.

A file holds every object as a call ``load(version, kind, *parts)``, so that `load` refuses a later version by name,
whatever the file contains. We still read earlier versions; 1 and 2 called the function of a kind directly.

    1  writes the parts of a tensor
    2  writes the parts that tensors share with their views once
    3  writes the version first
    4  writes which positions of a padded batch are there
    5  writes whether every sample of it has a position
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.tensor.saved import check_saved
from op_registry.records.kept import without_kept

VERSION = 5
# The first version that `load` is called with.
_FIRST = 3

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
    return load, (VERSION, kind, *(without_kept(part) if isinstance(part, Tensor) else part for part in parts))


@never_compiled
def load(version: int, kind: str, *parts: Any) -> Any:
    """pickle and torch.load call this function.

    Raises ValueError for a version that this library does not know, and for parts that do not fit together.
    """
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
