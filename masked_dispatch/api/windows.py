"""windows: whether a mask marks missing values or padding, for convolutions and pooling."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, TypeVar, overload

import torch
from torch import nn

from op_registry.windows import Meaning, windows_mean

Module = TypeVar("Module", bound=nn.Module)


@overload
def windows(meaning: Meaning) -> contextlib.AbstractContextManager[object]: ...
@overload
def windows(meaning: Meaning, module: Module) -> Module: ...
def windows(meaning: Meaning, module: nn.Module | None = None) -> Any:
    """Set how convolutions, transposed convolutions and pooling treat invalid elements, inside a ``with`` block.

    meaning  "missing" (the default): invalid elements are missing values, which a window may bridge. An output is valid
             where its window has a valid element, so masks grow.
             "padding": invalid elements around a sample are padding. Each sample counts as cropped to the bounding box
             of its valid elements, and an output is valid where the cropped sample would have one: a padded batch gives
             what its samples give one by one, through any number of layers. Holes inside the box stay missing values.
    module   set the meaning for this module's calls instead of a block, whatever scope they are made in. The module is
             returned: ``net = windows("padding", Net())``.

    Inside "padding", `count_include_pad` counts the padding around the cropped sample, and adaptive pools divide its
    box into bins. If a box begins between two multiples of the stride, the sample uses the windows of the batch that
    lie within its own. ``F.pad`` with a constant pads the batch, not each sample. Reflection, replication and circular
    padding and fractional pooling of partly valid tensors raise MaskedSemanticsError. The meaning also holds for the
    backward of what ran in the block, wherever it runs, and for what torch.utils.checkpoint computes again. A function
    that is compiled with torch.compile may be called inside the block; a module that has a meaning of its own is
    compiled in parts.

    Raises ValueError for any other meaning.
    """
    if module is None:
        return windows_mean(meaning)
    module.__class__ = with_meaning(_own_class(type(module)), meaning)  # type: ignore[arg-type]
    return module


class HasMeaning:
    """What `with_meaning` adds to a class."""

    own_class: type[nn.Module]
    meaning: Meaning


def _own_class(cls: type[nn.Module]) -> type[nn.Module]:
    return cls.own_class if issubclass(cls, HasMeaning) else cls


@functools.cache
def with_meaning(cls: type[nn.Module], meaning: Meaning) -> type[nn.Module]:
    """A subclass whose calls run in the scope; a class, because Dynamo guards on the types of modules, not on hooks."""

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with windows_mean(meaning):
            return cls.__call__(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        """Pickled and copied as a module of its own class, which is then given the meaning."""
        own = cls.__new__(cls)
        own.__dict__ = self.__dict__
        return windows, (meaning, own)

    members = {"__call__": call, "__reduce_ex__": reduce, "__module__": cls.__module__, "own_class": cls}
    members["meaning"] = meaning
    return type(cls.__name__, (HasMeaning, cls), members)
