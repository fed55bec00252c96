"""Who owns a mask.

A tensor and its views form a *family*: what is written through one shows in all, validity included. As long as no write
has changed validity, each member simply holds a validity tensor that nobody may write to, and results of operators
hold the same one. The first write that changes validity gives the family memory of its own: one int8 for each element
that the family's data spans, addressed with the data's own strides, so that every view, however it was made, finds its
validity where it finds its data. Whoever was given the family's validity in the meantime keeps it: the next write
copies first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from op_registry import MaskedSemanticsError
from op_registry.records import as_int8, being_traced

if TYPE_CHECKING:
    from masked_dispatch.tensor import MaskedTensor


class Family:
    """A tensor and its views, which share one validity.

    data      the plain data of the tensor that the views were made from; they address parts of it
    validity  its validity when the family was founded
    memory    int8, one for each element from the first to the last of `data`; None until a write changes validity
    lent      whether a result outside the family holds `memory`, so that it must be copied before the next write
    external  whether members' validity is memory of the caller's, who may write to it at any time
    written_in_graph  whether the graph under construction has written to the validity

    Members know their family, not the other way round: they look their validity up (`validity_of`), and cut it anew
    from memory that has been exchanged. (Weak references to tensors would keep nn.Module.to from swapping them.)
    """

    __slots__ = ("data", "external", "lent", "memory", "snapshots", "validity", "written_in_graph")

    def __init__(self, founder: MaskedTensor, external: bool = False) -> None:
        self.data = founder._data
        self.validity = founder._stored
        self.memory: Tensor | None = None
        self.lent = False
        self.external = external
        self.written_in_graph = False
        self.snapshots: dict[int, tuple[int, Tensor]] = {}
        founder._family = self

    def own(self) -> None:
        """Give the family memory that is nobody else's."""
        if self.memory is None:
            span = _last_element(self.data) - self.data.storage_offset() + 1
            self.memory = torch.ones(span, dtype=torch.int8, device=self.data.device)
            if self.validity is not None:
                self.part_of(self.data).copy_(self.validity)
            self.validity = None
        elif self.lent:
            self.memory = self.memory.clone()
        self.lent = False

    def validity_of(self, member: MaskedTensor) -> Tensor | None:
        """A member's validity as it is now."""
        if self.memory is not None and member._cut_from is not self.memory:
            member._stored = self.part_of(member._data)
            member._cut_from = self.memory
        return member._stored

    def part_of(self, data: Tensor) -> Tensor:
        """The validity of a tensor of the family, found where its data is."""
        assert self.memory is not None
        offset = data.storage_offset() - self.data.storage_offset()
        if data.numel() and (offset < 0 or offset + _last_element(data) - data.storage_offset() >= self.memory.numel()):
            raise MaskedSemanticsError(
                f"a view of shape {tuple(data.shape)} and strides {data.stride()} reaches beyond the masked tensor "
                f"that "
                "it was made from, where nothing is known to be valid. Mask the larger tensor instead."
            )
        return self.memory.as_strided(data.shape, data.stride(), max(offset, 0))


def _last_element(data: Tensor) -> int:
    start = int(data.storage_offset())
    if not data.numel():
        return start
    return start + sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True))


def lent_validity(tensor: MaskedTensor) -> Tensor | None:
    """The tensor's validity for a result to keep: it will not change under it."""
    family = tensor._family
    if family is None:
        return tensor._validity
    if tensor._carries_transform:
        return tensor._validity if tensor._validity is None else tensor._validity.clone()
    if being_traced(tensor._data):
        return _lent_while_tracing(tensor, family)
    if family.memory is not None:
        family.lent = True
    elif family.external:
        return _snapshot(family, tensor)
    return tensor._validity


def _lent_while_tracing(tensor: MaskedTensor, family: Family) -> Tensor | None:
    """In a graph nothing can be copied afterwards: copy once a write was seen, and remember that others hold it."""
    validity = tensor._validity
    if validity is None:
        return None
    if family.written_in_graph:
        return validity.clone()
    family.lent = True
    return validity


def _snapshot(family: Family, tensor: MaskedTensor) -> Tensor | None:
    """A copy of validity that the caller may write to, taken once for each state it has been in."""
    validity = tensor._validity
    if validity is None or being_traced(validity) or validity.is_inference():
        return validity
    version, copy = family.snapshots.get(id(tensor), (-1, validity))
    if version != validity._version:
        copy = validity.clone()
        family.snapshots[id(tensor)] = (validity._version, copy)
    return copy


def make_view_family(base: MaskedTensor, view: MaskedTensor, addressed: bool = False) -> None:
    """`view` shares the validity of `base` from now on; `addressed`: it is only to be found where its data is."""
    family = base._family or Family(base)
    if addressed and family.memory is None:
        family.own()
    view._family = family


def own_validity_in_transform(base: MaskedTensor) -> None:
    """Before the first view of `base` inside a functorch transform: a validity of its own, mapped as the data is.

    The views' validities are views of it, and a write goes into it; it must not be an argument's or earlier result's.
    """
    if base._family is None and base._validity is not None:
        base._stored = torch.zeros_like(base._data, dtype=torch.int8) + base._validity


def write_validity(tensor: MaskedTensor, validity: Tensor | None) -> None:
    """Let `tensor`, and every view of the same memory, have `validity` from now on."""
    current = tensor._validity
    if current is validity:
        return
    if validity is not None:
        validity = as_int8(validity)
    if being_traced(tensor._data) or tensor._carries_transform:
        _write_in_place(tensor, validity)
        return
    family = tensor._family
    if family is None:
        tensor._stored = validity
        return
    if family.external and current is not None:
        current.copy_(1 if validity is None else validity)  # type: ignore[arg-type]
        return
    family.own()
    part = tensor._validity
    assert part is not None
    if validity is None:
        part.fill_(1)
    else:
        part.copy_(validity)


def _write_in_place(tensor: MaskedTensor, validity: Tensor | None) -> None:
    """A graph cannot swap the inner tensors of its inputs, nor of what has views: it writes into those that are there.

    So do functorch transforms, under which the views' validities are views of their base's.
    """
    current = tensor._validity
    family = tensor._family
    if family is None:
        tensor._stored = validity
        return
    where = "functorch transform" if tensor._carries_transform else "compiled region"
    if current is None or current.shape != tensor._data.shape:
        raise MaskedSemanticsError(
            f"inside a {where}, this write would change how the validity of a tensor of shape {tuple(tensor.shape)} is "
            f"stored ({'none' if current is None else f'broadcast from {tuple(current.shape)}'} to one value per "
            f"element), which "
            "cannot be done there. Give it a full mask before (x.mask_with(x.get_mask())), or write out of place."
        )
    if family.lent:
        raise MaskedSemanticsError(
            f"inside a {where}, this write would change the validity of a tensor of shape {tuple(tensor.shape)} that "
            "earlier results of the region share. Write before you read, or write to a copy: x = x.clone()."
        )
    family.written_in_graph = True
    if validity is None:
        current.fill_(1)
    else:
        current.copy_(validity)
