"""Padded batches: which positions are there, the ends of samples, and their layout; and masks that mark padding."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from masked_dispatch.interop.crossing import takes
from masked_dispatch.tensor.checks import checked_dim, checked_dims, values_unknown
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.windows import Meaning, windows_mean

T = TypeVar("T", bound=Tensor)


@takes(x=Tensor)
def padded(x: Tensor, extent: Tensor | None = None, *, dim: int | tuple[int, ...] | None = None) -> MaskedTensor:
    """The tensor with an extent: which of its positions are there. What is not there is padding, not missing.

    A batch with an extent gives, for each sample, what the sample gives by itself: see *Padding* in docs/semantics.md.

    x       masked, or plain (then every position of its extent is valid); its first dimension numbers samples
    extent  bool, of the tensor's shape or broadcastable to it, True where a position is there; None: the mask
    dim     the dimensions that number positions; None: all but the first along which the extent varies

    Memory is shared with `x`; differentiable. Raises TypeError (dtype), ValueError (shape, device, dimensions, or a
    valid element where nothing is there).
    """
    if extent is not None:
        _check_extent(x, extent)
    elif not isinstance(x, MaskedTensor):
        raise TypeError(
            f"padded takes a masked tensor, or a plain one with its extent: padded(x, extent). This one of shape "
            f"{tuple(x.shape)} is plain, and all of it would be there"
        )
    if x.ndim < 2:
        raise ValueError(f"padded takes a batch, (B, ..., T, ...), not a tensor of shape {tuple(x.shape)}")
    dims = None if dim is None else sorted({*checked_dims("padded", x, dim)})
    if dims is not None and 0 in dims:
        raise ValueError("padded: dimension 0 numbers samples; positions are numbered by others")
    return torch.ops.masked_dispatch.padded(x, extent, dims)


@takes(x=Tensor)
def first(x: T, dim: int = 1, k: int | None = None) -> T:
    """Each sample's own first position along `dim`, or its first k.

    x    a batch whose extent knows the positions along `dim`; a tensor without an extent, a plain one too, is there
         everywhere, and these are its own
    k    None: one position, without the dimension, as ``x[:, 0]`` of a sample. A number: that many, as ``x[:, :k]``, in
         order from index 0 and at most as many as the dimension has; what a shorter sample lacks is not there

    A sample without positions has none: its result is invalid, and not there, in a batch of nothing else too. A copy;
    differentiable. Raises ValueError for a dimension that numbers no positions of a batch that knows some, and a
    negative k; IndexError for one position of a dimension of size 0 of a tensor without an extent.
    """
    return _ends("first", x, dim, k)


@takes(x=Tensor)
def last(x: T, dim: int = 1, k: int | None = None) -> T:
    """Each sample's own last position along `dim`, or its last k: ``x[:, -1]`` and ``x[:, -k:]`` are the batch's.

    Everything else is as in :func:`first`: the last k are in the sample's order, from index 0.
    """
    return _ends("last", x, dim, k)


def _ends(name: Literal["first", "last"], x: T, dim: int, k: int | None) -> T:
    if k is not None and k < 0:
        raise ValueError(f"{name} takes a number of positions, k >= 0, not {k}")
    dim = checked_dim(name, x, dim)
    ends: T = torch.ops.masked_dispatch.ends(x, dim, 1 if k is None else min(k, x.shape[dim]), name == "last")
    return ends.select(dim, 0) if k is None else ends  # type: ignore[return-value]


@takes(x=Tensor)
def align(x: T, dim: int = 1) -> T:
    """Each sample's positions along `dim` in order from index 0, with the padding behind; of the same shape.

    Batches that are padded at different sides can be combined then, and slices count each sample's own positions. `x`
    itself where samples are known to begin at 0, and without an extent; else a copy. Differentiable. Raises ValueError
    as :func:`first` does.
    """
    return torch.ops.masked_dispatch.align(x, checked_dim("align", x, dim))  # type: ignore[no-any-return]


@takes(x=Tensor)
def positions(x: T, dim: int = 1) -> T:
    """The number of each position within its sample, from 0 along `dim`: int64, (B, T) for a padded batch (B, T, …).

    It has the dimensions of `x` on which depends what is there along `dim`, in their order, and is valid, and there,
    where these say so. A table of positions goes with a batch that is padded in front as well:
    ``x + table[positions(x)]``. Without an extent it counts along `dim`, plain, with the first dimension in front of
    it. Raises ValueError as :func:`first` does.
    """
    return torch.ops.masked_dispatch.positions(x, checked_dim("positions", x, dim))  # type: ignore[no-any-return]


def _check_extent(x: Tensor, extent: Tensor) -> None:
    if not isinstance(extent, Tensor) or isinstance(extent, MaskedTensor) or extent.dtype is not torch.bool:
        raise TypeError(f"extent has to be a plain bool tensor, True where a position is there; got {_kind(extent)}")
    if extent.device != x.device:
        raise ValueError(f"extent is on {extent.device}, the tensor on {x.device}: extent.to(x.device)")
    if extent.ndim > x.ndim or any(
        e not in (1, s) for e, s in zip(reversed(extent.shape), reversed(x.shape), strict=False)
    ):
        raise ValueError(f"extent of shape {tuple(extent.shape)} does not broadcast to {tuple(x.shape)}")
    if isinstance(x, MaskedTensor) and not values_unknown(extent):
        beyond = int(torch.ops.masked_dispatch.mask_with(x.detach(), ~extent).count())
        if beyond:
            raise ValueError(
                f"{beyond} elements of the tensor of shape {tuple(x.shape)} are valid where the extent says that "
                "nothing is there. An extent contains the mask: pass x.mask_with(extent), or extent | mask"
            )


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


# ----------------------------------------- whether a mask marks missing values or padding, for convolutions and pooling

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
