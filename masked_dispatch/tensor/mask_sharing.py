"""Which tensors share a mask, and when it is copied on write.

A tensor and its views form a *family*: a write through one shows in all, validity included. Until a write changes
validity, each member holds a read-only validity tensor, and results of operators share it. The first write that changes
validity gives the family memory of its own: one int8 for each element that the family's data spans, addressed with the
data's own strides, so that every view, however it was made, finds its validity where it finds its data. If results
share this memory, the next write copies it first, and their validity does not change.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from masked_dispatch.torch_internals import as_value
from op_registry import MaskedSemanticsError
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_int8


class Masked(Protocol):
    """What this module uses of a masked tensor; `MaskedTensor`, which describes these attributes, has them all."""

    _stored_validity: Tensor | None
    _family: ViewFamily | None
    _family_memory: Tensor | None
    _snapshot: tuple[int, Tensor] | None

    @property
    def shape(self) -> torch.Size: ...

    @property
    def _data(self) -> Tensor: ...

    @property
    def _validity(self) -> Tensor | None: ...

    @property
    def _graph_writes(self) -> GraphWrites | None: ...

    @property
    def _carries_transform(self) -> bool: ...


class ViewFamily:
    """A tensor and its views, which share one validity.

    data      the plain data of the tensor that the views were made from; they address parts of it
    validity  its validity when the family was created
    memory    int8, one for each element that `data` spans; None until a write changes validity
    shared    whether a result outside the family shares `memory`, so that it must be copied before the next write
    external  whether the members' validity is the caller's memory, which the caller may write to at any time
    writes    how often the graph being traced, or a functorch transform, has written to the validity
    graph_writes  notified when a graph writes to the validity of one of its inputs

    Members refer to their family, not the other way round: they look their validity up (`validity_of`), and slice it
    again when the memory has been replaced. (Weak references to tensors would prevent nn.Module.to from swapping them.)
    """

    __slots__ = ("data", "external", "graph_writes", "memory", "shared", "validity", "writes")

    def __init__(self, founder: Masked, external: bool = False) -> None:
        self.data = founder._data
        self.validity = founder._stored_validity
        self.memory: Tensor | None = None
        self.shared = False
        self.external = external
        self.writes = 0
        self.graph_writes = founder._graph_writes
        founder._family = self

    def unshare(self) -> None:
        """Give the family memory that nothing else shares."""
        if self.memory is None:
            span = _last_element(self.data) - self.data.storage_offset() + 1
            self.memory = torch.ones(span, dtype=torch.int8, device=self.data.device)
            if self.validity is not None:
                self.part_of(self.data).copy_(self.validity)
            self.validity = None
        elif self.shared:
            self.memory = self.memory.clone()
        self.shared = False

    def validity_of(self, member: Masked) -> Tensor | None:
        """A member's current validity."""
        if self.memory is not None and member._family_memory is not self.memory:
            member._stored_validity = self.part_of(member._data)
            member._family_memory = self.memory
        return member._stored_validity

    def part_of(self, data: Tensor) -> Tensor:
        """The part of the family's memory that is the validity of `data`, a view of the family's data."""
        assert self.memory is not None
        offset = data.storage_offset() - self.data.storage_offset()
        if data.numel() and (offset < 0 or offset + _last_element(data) - data.storage_offset() >= self.memory.numel()):
            raise MaskedSemanticsError(
                f"a view of shape {tuple(data.shape)} and strides {data.stride()} reaches beyond the masked tensor it "
                "was made from, where there is no mask. Mask the larger tensor instead."
            )
        return self.memory.as_strided(data.shape, data.stride(), max(offset, 0))


class GraphWrites:
    """Whether a graph that was traced with a tensor among its inputs writes to the tensor's validity.

    A graph writes in place, and other tensors may share the memory. So the guards of such a graph, which see its inputs
    before every run, give each input a validity of its own. The flatten context carries what they need for that.
    """

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = False

    def guarded(self, tensor: Masked) -> GuardedInput:
        """The entry for `tensor` in its flatten context."""
        return GuardedInput(self, None if being_traced(tensor._data) else tensor)


class GuardedInput:
    """A graph input whose validity guards can unshare; no tensor while tracing and in stored guards. All are equal."""

    __slots__ = ("graph_writes", "tensor")

    def __init__(self, graph_writes: GraphWrites, tensor: Masked | None = None) -> None:
        self.graph_writes = graph_writes
        self.tensor = tensor

    def unshare(self) -> None:
        """Give the tensor a validity that nothing else shares."""
        tensor = self.tensor
        if tensor is None:
            return
        family = tensor._family or ViewFamily(tensor)
        if not family.external:
            family.unshare()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GuardedInput)

    def __hash__(self) -> int:
        return hash(GuardedInput)

    def __repr__(self) -> str:
        return "GuardedInput()"

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardedInput:
        return GuardedInput(self.graph_writes)

    def __reduce__(self) -> tuple[Any, ...]:
        return GuardedInput, (GraphWrites(),)


def _last_element(data: Tensor) -> int:
    start = int(data.storage_offset())
    if not data.numel():
        return start
    return start + sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True))


def shared_validity(tensor: Masked) -> Tensor | None:
    """The tensor's validity for a result to share: later writes to the tensor will not change it."""
    family = tensor._family
    if family is None:
        return tensor._validity
    validity = tensor._validity
    if validity is None:
        return None
    if tensor._carries_transform or being_traced(tensor._data):
        # A later write cannot copy the memory first, so the result gets its own value now.
        graph_writes = family.graph_writes
        if graph_writes is not None and not graph_writes.seen and not family.external:
            return as_value(validity)
        return _snapshot(tensor, validity, family.writes)
    if family.memory is not None:
        family.shared = True
    elif family.external and not validity.is_inference():
        return _snapshot(tensor, validity, validity._version)
    return validity


def _snapshot(tensor: Masked, validity: Tensor, version: int) -> Tensor:
    """A copy of a validity that may be written to later; cached for each version."""
    if tensor._snapshot is None or tensor._snapshot[0] != version:
        tensor._snapshot = (version, validity.clone())
    return tensor._snapshot[1]


def make_view_family(base: Masked, view: Masked, addressed: bool = False) -> None:
    """Let `view` share the validity of `base`; `addressed`: it must be sliced from memory by the view's strides."""
    family = base._family or ViewFamily(base)
    if addressed and family.memory is None:
        family.unshare()
    view._family = family


def copy_validity_before_views(base: Masked) -> None:
    """Give `base` a validity of its own before its first view, while tracing and inside functorch transforms.

    The views' validities are views of it and are written in place, so it must not be an input's or earlier result's.
    """
    if base._family is None and base._stored_validity is not None:
        if base._carries_transform:
            # Batched like the data.
            base._stored_validity = torch.zeros_like(base._data, dtype=torch.int8) + base._stored_validity
        else:
            base._stored_validity = base._stored_validity.clone()


def write_validity(tensor: Masked, validity: Tensor | None) -> None:
    """Assign `validity` to `tensor`, and thereby to every view of the same memory."""
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
        tensor._stored_validity = validity
        return
    if family.external and current is not None:
        current.copy_(1 if validity is None else validity)  # type: ignore[arg-type]
        return
    family.unshare()
    part = tensor._validity
    assert part is not None
    if validity is None:
        part.fill_(1)
    else:
        part.copy_(validity)


def _write_in_place(tensor: Masked, validity: Tensor | None) -> None:
    """Write to the existing validity: a graph cannot replace inner tensors of its inputs or of tensors with views.

    Functorch transforms write in place too, since the views' validities are views of their base's.
    """
    current = tensor._validity
    family = tensor._family
    if family is None:
        tensor._stored_validity = validity
        return
    if tensor._snapshot is not None and tensor._snapshot[0] == family.writes and tensor._snapshot[1] is validity:
        return
    context = "functorch transform" if tensor._carries_transform else "compiled region"
    if current is None or current.shape != tensor._data.shape or family.memory is not None:
        raise MaskedSemanticsError(
            f"inside a {context}, this write would change how the mask of a tensor of shape {tuple(tensor.shape)} is "
            f"stored ({'none' if current is None else f'broadcast from {tuple(current.shape)}'} to one value per "
            "element), which is not possible there. Give the tensor a full mask first (x.mask_with(x.get_mask())), "
            "or write out of place."
        )
    family.writes += 1
    if family.graph_writes is not None:
        family.graph_writes.seen = True
    if validity is None:
        current.fill_(1)
    else:
        current.copy_(as_int8(validity))
