"""The pieces of an extent as inner tensors of a masked tensor: graphs take and return them, and guard on the rest.

Inner tensors are the booleans that factors have of their own, and, for an extent that records sizes of parts, a tensor
without elements whose shape these are: so a graph for one size serves others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from masked_dispatch.torch_internals import without_torch_dispatch
from op_registry import MaskedSemanticsError
from op_registry.extents.pieces import Known, booleans_of, known_of, shape_of_sizes, together
from op_registry.records.extent import Extent
from op_registry.records.tracing import being_traced

if TYPE_CHECKING:
    from masked_dispatch.tensor.masked_tensor import MaskedTensor

# More booleans than any call of torch has operands with positions.
MOST = 8
NAMES = tuple(f"_extent_piece_{n}" for n in range(MOST))

# An extent with what is known of it, and its inner tensors.
Pieces = tuple[Extent, Known, list[Tensor]]


class ExtentPieces:
    """Gives a masked tensor the attributes of `NAMES`, its inner tensors."""

    _kept_pieces: Pieces | None = None


def _piece(number: int) -> property:
    return property(lambda tensor: pieces_of(tensor)[2][number])


for _number, _name in enumerate(NAMES):
    setattr(ExtentPieces, _name, _piece(_number))


def pieces_of(tensor: MaskedTensor) -> Pieces:
    """The pieces of a tensor's extent. Graphs get aliases of the booleans, which no other tensor has: otherwise they
    would guard on two being the same object.
    """
    extent, kept = tensor._extent, tensor._kept_pieces
    assert extent is not None
    if kept is None or kept[0] is not extent:
        kept = tensor._kept_pieces = _pieces(tensor, extent)
    return kept


def _pieces(tensor: MaskedTensor, extent: Extent) -> Pieces:
    traced = being_traced(tensor._stored_tensors[0]) or tensor._carries_transform
    booleans = booleans_of(extent)
    if not traced:
        booleans = [boolean.detach() for boolean in booleans]
    sizes = [_sized(tensor, extent, traced)] if extent.has_parts else []
    if len(booleans) + len(sizes) > MOST:
        raise MaskedSemanticsError(
            f"a masked tensor of shape {tuple(tensor.shape)} has {len(booleans)} separate kinds of padding, more than "
            f"a graph takes ({MOST - len(sizes)}). Pass masked_dispatch.padded(x, x.extent), which has one."
        )
    return extent, known_of(extent), [*booleans, *sizes]


def _sized(tensor: MaskedTensor, extent: Extent, traced: bool) -> Tensor:
    shape = shape_of_sizes(extent)
    if traced:
        return tensor._stored_tensors[0].new_empty_strided(shape, [0] * len(shape), dtype=torch.int8)
    with without_torch_dispatch():  # Dynamo calls this while it makes fake tensors
        return torch.empty([0] + [1] * (len(shape) - 1), dtype=torch.int8, device=tensor.device).expand(shape)


def take_extent_from_graph(tensor: MaskedTensor, known: Known, inner: dict[str, Tensor]) -> None:
    """Give a masked tensor that a graph takes or returns the extent of these inner tensors."""
    pieces = [inner[name] for name in NAMES if name in inner]
    tensor._extent = together(known, pieces[: known.booleans], pieces[-1].shape if known.sizes else ())
    if being_traced(tensor._stored_tensors[0]):
        tensor._kept_pieces = tensor._extent, known, pieces
