"""Who owns a mask.

A tensor and its views form a *family*: what is written through one shows in all, validity included. As long as no write
has changed validity, each member simply holds a validity tensor that nobody may write to, and results of operators
hold the same one. The first write that changes validity gives the family memory of its own: one int8 for each element
that the family's data spans, addressed with the data's own strides, so that every view, however it was made, finds its
validity where it finds its data. Whoever was given the family's validity in the meantime keeps it: the next write
copies first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masked_dispatch.torch_internals import as_value
from op_registry import MaskedSemanticsError
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_int8

if TYPE_CHECKING:
    from masked_dispatch.tensor.masked_tensor import MaskedTensor


class Family:
    """A tensor and its views, which share one validity.

    data      the plain data of the tensor that the views were made from; they address parts of it
    validity  its validity when the family was founded
    memory    int8, one for each element from the first to the last of `data`; None until a write changes validity
    lent      whether a result outside the family holds `memory`, so that it must be copied before the next write
    external  whether members' validity is memory of the caller's, who may write to it at any time
    writes    how often the graph under construction, or a functorch transform, has written to the validity
    graph_writes  who is told that a graph writes to the validity of one of its inputs

    Members know their family, not the other way round: they look their validity up (`validity_of`), and cut it anew
    from memory that has been exchanged. (Weak references to tensors would keep nn.Module.to from swapping them.)
    """

    __slots__ = ("data", "external", "graph_writes", "lent", "memory", "validity", "writes")

    def __init__(self, founder: MaskedTensor, external: bool = False) -> None:
        self.data = founder._data
        self.validity = founder._stored
        self.memory: Tensor | None = None
        self.lent = False
        self.external = external
        self.writes = 0
        self.graph_writes = founder._graph_writes
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
                "that it was made from, where nothing is known to be valid. Mask the larger tensor instead."
            )
        return self.memory.as_strided(data.shape, data.stride(), max(offset, 0))


class GraphWrites:
    """Whether a graph that was traced with a tensor among its inputs writes into the tensor's validity.

    A graph writes where the validity lies, and other tensors may hold it. So the guards of such a graph, which see its
    inputs before every run, give each a validity of its own. The flatten context carries what they need to do so.
    """

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = False

    def on(self, tensor: MaskedTensor) -> Writable:
        """What the flatten context of `tensor` carries."""
        return Writable(self, None if being_traced(tensor._data) else tensor)


class Writable:
    """A tensor whose validity a graph may write into; while it is traced, and kept in guards: none. All are equal."""

    __slots__ = ("common", "tensor")

    def __init__(self, common: GraphWrites, tensor: MaskedTensor | None = None) -> None:
        self.common = common
        self.tensor = tensor

    def make_way(self) -> None:
        """Give the tensor a validity that nobody else holds."""
        tensor = self.tensor
        if tensor is None:
            return
        family = tensor._family or Family(tensor)
        if not family.external:
            family.own()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Writable)

    def __hash__(self) -> int:
        return hash(Writable)

    def __repr__(self) -> str:
        return "Writable()"

    def __deepcopy__(self, memo: dict[int, Any]) -> Writable:
        return Writable(self.common)

    def __reduce__(self) -> tuple[Any, ...]:
        return Writable, (GraphWrites(),)


def _last_element(data: Tensor) -> int:
    start = int(data.storage_offset())
    if not data.numel():
        return start
    return start + sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True))


def shared_validity(tensor: MaskedTensor) -> Tensor | None:
    """The tensor's validity for a result to keep: it will not change under it."""
    family = tensor._family
    if family is None:
        return tensor._validity
    validity = tensor._validity
    if validity is None:
        return None
    if tensor._carries_transform or being_traced(tensor._data):
        # Nothing can be copied afterwards, when a write comes.
        keeper = family.graph_writes
        if keeper is not None and not keeper.seen and not family.external:
            return as_value(validity)
        return _snapshot(tensor, validity, family.writes)
    if family.memory is not None:
        family.lent = True
    elif family.external and not validity.is_inference():
        return _snapshot(tensor, validity, validity._version)
    return validity


def _snapshot(tensor: MaskedTensor, validity: Tensor, version: int) -> Tensor:
    """A copy of validity that is going to be written to, taken once for each state it has been in."""
    if tensor._snapshot is None or tensor._snapshot[0] != version:
        tensor._snapshot = (version, validity.clone())
    return tensor._snapshot[1]


def make_view_family(base: MaskedTensor, view: MaskedTensor, addressed: bool = False) -> None:
    """`view` shares the validity of `base` from now on; `addressed`: it is only to be found where its data is."""
    family = base._family or Family(base)
    if addressed and family.memory is None:
        family.own()
    view._family = family


def copy_validity_before_views(base: MaskedTensor) -> None:
    """While tracing and inside functorch transforms, before the first view of `base`: a validity of its own.

    The views' validities are views of it, and a write goes into it; it must not be an argument's or earlier result's.
    """
    if base._family is None and base._stored is not None:
        if base._carries_transform:
            # Mapped over as the data is.
            base._stored = torch.zeros_like(base._data, dtype=torch.int8) + base._stored
        else:
            base._stored = base._stored.clone()


def write_validity(tensor: MaskedTensor, validity: Tensor | None) -> None:
    """Let `tensor`, and every view of the same memory, have `validity` from now on."""
    current = tensor._validity
    if current is validity:
        return
    if being_traced(tensor._data) or tensor._carries_transform:
        _write_in_place(tensor, validity)
        return
    if validity is not None:
        validity = as_int8(validity)
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
    if tensor._snapshot is not None and tensor._snapshot[0] == family.writes and tensor._snapshot[1] is validity:
        return
    where = "functorch transform" if tensor._carries_transform else "compiled region"
    if current is None or current.shape != tensor._data.shape or family.memory is not None:
        raise MaskedSemanticsError(
            f"inside a {where}, this write would change how the validity of a tensor of shape {tuple(tensor.shape)} is "
            f"stored ({'none' if current is None else f'broadcast from {tuple(current.shape)}'} to one value per "
            "element), which cannot be done there. Give it a full mask before (x.mask_with(x.get_mask())), or write "
            "out of place."
        )
    family.writes += 1
    if family.graph_writes is not None:
        family.graph_writes.seen = True
    if validity is None:
        current.fill_(1)
    else:
        current.copy_(as_int8(validity))
