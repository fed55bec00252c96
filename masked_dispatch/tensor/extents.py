"""Which positions of a tensor are there: one extent for a tensor and its views, and its pieces in graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masked_dispatch.tensor.messages import written_through_view
from masked_dispatch.torch_internals import without_torch_dispatch
from op_registry import MaskedSemanticsError
from op_registry.extents.factors import conjunction, factors_of, there
from op_registry.extents.meetings import together
from op_registry.extents.pieces import Known, booleans_of, known_of, shape_of_sizes
from op_registry.extents.pieces import together as put_together
from op_registry.extents.writes import (
    are_same,
    explicit,
    extent_in,
    new_states,
    region_of,
    states_written,
    there_in,
    without_region,
    written,
)
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent, extent_of, made_of
from op_registry.records.tracing import assert_when_run, being_traced
from op_registry.records.validity import intersect

if TYPE_CHECKING:
    from masked_dispatch.tensor.masked_tensor import MaskedTensor


# --------------------------------------------------------------------------------------------- shared, as a validity is


class SharedExtent:
    """The part of a family that knows which positions of the base are there.

    extent          the base's; None: all are
    extent_written  whether a write has changed it
    """

    __slots__ = ("extent", "extent_written")

    data: Tensor

    def __init__(self) -> None:
        self.extent: Extent | None = None
        self.extent_written = False

    def base_validity(self) -> Tensor | None:
        """The base's current validity."""
        raise NotImplementedError

    def write(self, data: Tensor, validity: Tensor | None) -> None:
        """Assign `validity` to the elements of `data`, a view of the base's."""
        raise NotImplementedError

    def extent_of(self, member: MaskedTensor) -> Extent | None:
        """A member's extent, once a write has changed the family's.

        Raises MaskedSemanticsError if the member's dimensions are not those of the base.
        """
        extent = self.extent
        if extent is None:
            return None
        known = member._part_of_extent
        if known is None or known[0] is not extent:
            region = region_of(self.data, member._data)
            if region is None:
                raise MaskedSemanticsError(
                    f"a view of shape {tuple(member.shape)} has other dimensions than its base, and a write has "
                    "changed which positions of the base are there. Take the view again, after the write."
                )
            member._part_of_extent = known = (extent, extent_in(extent, region))
        return known[1]

    def validity_there(self, member: MaskedTensor, validity: Tensor | None) -> Tensor | None:
        """Before a write to a member of such a validity: the validity where the member is there.

        Only if the member's own extent does not know it: x[1, 2] of a padded batch is one position, and has no extent.
        """
        if self.extent is None:
            return validity
        own, extent = member._extent, self.extent
        if own and len(own.factors) == len(extent.factors) and (extent.is_mask or not extent.states):
            return validity
        region = region_of(self.data, member._data)
        if region is None:
            return validity
        factors = factors_of(Dense(self.data, self.base_validity(), self.extent))
        there = there_in(factors, region)
        if there is not None and validity is not None and self.extent.is_mask:
            self.extent = made_of(explicit(factors), is_mask=False, states=extent.states)
            self.extent_written = True
        return intersect(validity, there)

    def receive_extent(self, member: MaskedTensor, before: Dense, after: Dense) -> None:
        """Before a write that changes a member from the record `before` to `after`: its base has what they have.

        Raises MaskedSemanticsError if the base cannot have it.
        """
        old, now = factors_of(before), factors_of(after)
        was_mask, is_mask = (r.extent is not None and r.extent.is_mask for r in (before, after))
        steps = new_states(before.extent, after.extent)
        if before.extent is not None and are_same(old, now) and is_mask >= was_mask and not steps:
            return
        region = region_of(self.data, member._data)
        if region is None:
            raise MaskedSemanticsError(written_through_view(member))
        whole = all(region.whole)
        own = () if whole else factors_of(Dense(self.data, self.base_validity(), self.extent))
        factors = written(own, self.data.shape, region, () if whole else old, now)
        if factors is None:
            raise MaskedSemanticsError(written_through_view(member))
        before_steps = () if whole or self.extent is None else self.extent.states
        states, there = states_written(before_steps, self.data.shape, region, steps)
        if there:
            factors = together([factors, there])
        is_mask = whole and is_mask and not there
        self.extent = made_of(factors if is_mask else explicit(factors), is_mask, states=states)
        self.extent_written = True
        if there:  # what was written before is a state past the end of some samples
            self.write(self.data, intersect(self.base_validity(), conjunction(there)))

    def check_receives_own(self, member: MaskedTensor, before: Dense, after: Dense) -> None:
        """Assert that a write to a member changes no extent: a graph cannot change what others know that share memory.

        Raises MaskedSemanticsError if that is known of other extents.
        """
        own, received = before.extent, after.extent
        if own is None or received is None or len(own.states) != len(received.states):
            raise MaskedSemanticsError(written_through_view(member))
        if own.places != received.places or (own.is_mask and not received.is_mask):
            raise MaskedSemanticsError(written_through_view(member))
        assert_when_run(there(before) == there(after), written_through_view(member))

    def forget_extent(self, member: MaskedTensor) -> None:
        """Let all of a member be there, before it receives data with another extent.

        Raises MaskedSemanticsError if the base cannot learn of it.
        """
        region = region_of(self.data, member._data)
        if region is None:
            raise MaskedSemanticsError(written_through_view(member))
        if all(region.whole):
            self.extent = None
        else:
            factors = factors_of(Dense(self.data, self.base_validity(), self.extent))
            self.extent = extent_of([without_region(factor, region) for factor in factors], is_mask=False)
        self.extent_written = True


def forget_extent(tensor: MaskedTensor) -> None:
    """Let a tensor be there everywhere, and its part of its base too, before it receives data with another extent."""
    if tensor._extent is None:
        return
    if tensor._family is not None:
        tensor._family.forget_extent(tensor)
    tensor._replace_extent(None)


def receive_extent(tensor: MaskedTensor, extent: Extent | None) -> None:
    """After `forget_extent` and a write to a tensor's data and mask: it has this extent, and its base, too.

    Raises MaskedSemanticsError if the base cannot have it.
    """
    if tensor._family is None or extent is None:
        tensor._replace_extent(extent)
    else:
        data, validity = tensor._data, tensor._validity
        tensor._family.receive_extent(tensor, Dense(data, validity), Dense(data, validity, extent))


def know_extent(member: Any, extent: Extent | None) -> None:
    """A new member has this extent, until a write changes the family's."""
    family = member._family
    if family is not None and family.extent_written and family.extent is not None:
        member._part_of_extent = (family.extent, extent)


# --------------------------------------------------------------------------------- pieces, which graphs take and return

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
    tensor._extent = put_together(known, pieces[: known.booleans], pieces[-1].shape if known.sizes else ())
    if being_traced(tensor._stored_tensors[0]):
        tensor._kept_pieces = tensor._extent, known, pieces
