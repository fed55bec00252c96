"""Which tensors share a mask, and when a write copies it.

A tensor and its views form a *family*: a write through one member is visible in all, validity included. Until a write
changes validity, each member holds a read-only validity tensor, which results of operators share. The first write that
changes validity gives the family its own memory: one int8 for each element that the family's data spans, addressed with
the data's strides, so that every view finds its validity at the offsets of its data. If results share this memory, the
next write copies it first, and their validity does not change.
"""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masked_dispatch.process import Lock
from masked_dispatch.tensor.assignment import assign_validity, may_share, same_places
from masked_dispatch.tensor.extents import SharedExtent
from masked_dispatch.torch_internals import (
    as_value,
    copied_back_by_aot,
    tracking_views_and_versions,
    without_torch_dispatch,
)
from op_registry import MaskedSemanticsError
from op_registry.records.dense import same_sizes
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_int8, graph_writes_to_masks, in_order, once_in_graph

if TYPE_CHECKING:
    from masked_dispatch.tensor.masked_tensor import MaskedTensor
    from op_registry.records.extent import Extent


class ViewFamily(SharedExtent):
    """A tensor and its views, which share one validity.

    data      the plain data of the base tensor; views address parts of it
    validity  the base's validity at the family's creation
    parts     for a family that a graph returned: the members' data and validity
    memory    int8, one for each element that `data` spans; None until a write changes validity
    held      the memory that a result outside the family shares, if any: if it is `memory`, the next write copies first
    in_place  whether we never replace `memory`, because other processes may share it: results get a copy of it
    lock      a thread holds it while it replaces `memory` or writes to it
    writing   whether a thread is writing to `memory`
    writes    how often the graph being traced, or a functorch transform, has written to the validity
    graph_writes  receives a notice when a graph writes to the validity of one of its inputs
    number    for a family in a graph: identifies the family among the graph's outputs
    separated  for a family read from a pickle: the families of members whose data the pickle copied (`apart`)

    Members refer to their family, but not the reverse: they look their validity up (`validity_of`), and slice it again
    after a write replaced the memory. (Weak references to tensors would prevent nn.Module.to from swapping them.)
    """

    __slots__ = (
        "__weakref__", "data", "graph_writes", "held", "in_place", "lock", "memory", "number", "parts", "separated",
        "validity", "writes", "writing",
    )  # fmt: skip

    def __init__(self, data: Tensor, validity: Tensor | None, in_place: bool = False) -> None:
        super().__init__()
        self.data = data
        self.validity = validity
        self.parts: list[tuple[Tensor, Tensor | None]] = []
        self.memory: Tensor | None = None
        self.held: weakref.ref[Tensor] | None = None
        self.in_place = in_place
        self.lock = Lock()
        self.writes = 0
        self.writing = False
        self.graph_writes: GraphWrites | None = None
        self.number: int | None = None
        self.separated: weakref.WeakValueDictionary[int, ViewFamily] | None = None

    @property
    def span(self) -> int:
        """How many elements `memory` has."""
        return _last_element(self.data) - int(self.data.storage_offset()) + 1

    @property
    def has_one_for_each(self) -> bool:
        """Whether members hold views of a full validity: a write to a member is visible in its bases."""
        validity = self.validity
        return self.memory is None and validity is not None and same_sizes(validity.shape, self.data.shape)

    def unshare(self) -> None:
        """Give the family memory that nothing else shares."""
        with self.lock.here:
            self._become(self._unshared())

    def write(self, data: Tensor, validity: Tensor | None) -> None:
        """Assign `validity` to the elements of `data`, a view of the family's data."""
        with self.lock.here:
            self.writing = True  # before `_unshared` asks whether the memory is shared: see `share`
            try:
                memory = self._unshared(but_for=data)
                part = self.part_of(data, memory)
                if validity is None:
                    part.fill_(1)
                else:
                    assign_validity(part, validity)
                self._become(memory)  # after the write: an exception, as from a signal handler, leaves old or new
            finally:
                self.writing = False

    def share(self) -> None:
        """Let a result keep the memory: the next write copies it first.

        This waits for a write that has not seen it. A reader sets `held` and then checks `writing`, and a writer does
        the reverse, so one of them sees the other; only then does the reader take the lock.
        """
        memory = self.memory
        self.held = None if memory is None else weakref.ref(memory)
        if self.writing:
            with self.lock.here:
                pass

    def _unshared(self, but_for: Tensor | None = None) -> Tensor:
        """The family's memory, or a copy if results share it; the copy may leave out the elements of `but_for`."""
        memory = self.memory
        if memory is None:
            memory = torch.ones(self.span, dtype=torch.int8, device=self.data.device)
            for data, validity in [(self.data, self.validity), *self.parts]:
                if validity is not None and not (but_for is not None and same_places(data, but_for)):
                    assign_validity(self.part_of(data, memory), validity)
            return memory
        held = self.held is not None and self.held() is memory
        return memory.clone() if held and not self.in_place else memory

    def _become(self, memory: Tensor) -> None:
        """Replace the memory in one step: readers do not take the lock, and an exception may come after any step."""
        self.memory = memory
        self.validity, self.parts = None, []

    def share_with_processes(self) -> None:
        """Move the full validity to shared memory; from now on, writes change it in place."""
        with self.lock.here:
            memory = self._unshared()
            memory.share_memory_()
            self._become(memory)
            self.in_place = True

    def contents(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Data, validity and memory, which determine everything else."""
        if self.parts:
            self.unshare()
        return self.data, self.validity, self.memory

    def __deepcopy__(self, memo: dict[int, Any]) -> ViewFamily:
        """A family for the copies of the members, whose data deepcopy copies with the same `memo`."""
        data, validity, memory = self.contents()
        copied = ViewFamily(copy.deepcopy(data, memo), _cloned(validity))
        copied.memory = _cloned(memory)
        copied.extent, copied.extent_written = self.extent, self.extent_written
        return copied

    def has_memory_of(self, data: Tensor) -> bool:
        """Whether `data` lies in the memory of the family's data."""
        if being_traced(data) or being_traced(self.data):
            return False
        mine, other = self.data.untyped_storage(), data.untyped_storage()
        return mine.device == other.device and mine.data_ptr() == other.data_ptr() and self.data.dtype is data.dtype

    def apart(self, data: Tensor, validity: Tensor | None, extent: Extent | None) -> ViewFamily:
        """The family of members with a copy of the family's data; all members with the same copy share it."""
        if self.separated is None:
            self.separated = weakref.WeakValueDictionary()
        found = self.separated.get(id(data))  # which holds the data
        if found is None:
            found = self.separated[id(data)] = ViewFamily(data, validity)
            found.extent = extent
        return found

    def validity_of(self, member: MaskedTensor) -> Tensor | None:
        """A member's current validity."""
        memory = self.memory
        if memory is None:
            return member._stored_validity
        part = member._part_of_memory
        if part is None or part[0] is not memory:
            # Assign both at once, so that no other thread sees a part of one memory together with another memory. Below
            # autograd, too, the part is a view whose version writes to the memory raise.
            with tracking_views_and_versions():
                member._part_of_memory = part = (memory, self.part_of(member._data, memory))
        return part[1]

    def base_validity(self) -> Tensor | None:
        return self.validity if self.memory is None else self.part_of(self.data, self.memory)

    def part_of(self, data: Tensor, memory: Tensor) -> Tensor:
        """The part of the family's memory that is the validity of `data`, a view of the family's data."""
        offset = data.storage_offset() - self.data.storage_offset()
        if data.numel() and (offset < 0 or offset + _last_element(data) - data.storage_offset() >= memory.numel()):
            raise MaskedSemanticsError(
                f"a view of shape {tuple(data.shape)} and strides {data.stride()} reaches beyond the masked tensor it "
                "was made from, where there is no mask. Mask the larger tensor instead."
            )
        return memory.as_strided(data.shape, data.stride(), max(offset, 0))


class GraphWrites:
    """Whether a graph that was traced with a tensor among its inputs writes to the tensor's validity.

    A graph writes in place, and other tensors may share the memory. So the guards of such a graph, which see its inputs
    before every run, give each input its own validity. They find this object in the flatten context.
    """

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = False

    def guarded(self, tensor: MaskedTensor) -> GuardedInput:
        """The entry for `tensor` in its flatten context."""
        family = tensor._family
        if not being_traced(tensor._data):
            return GuardedInput(self, tensor)
        if family is not None and family.number is None:
            family.number = next(_numbers)
        return GuardedInput(self, None, None if family is None else family.number)


_numbers = itertools.count()


class GuardedInput:
    """A graph input whose validity guards can unshare. All instances are equal.

    `tensor` is None while tracing and in stored guards. For graph outputs, `number` identifies the family.
    """

    __slots__ = ("graph_writes", "number", "tensor")

    def __init__(
        self, graph_writes: GraphWrites, tensor: MaskedTensor | None = None, number: int | None = None
    ) -> None:
        self.graph_writes = graph_writes
        self.tensor = tensor
        self.number = number

    def unshare(self) -> None:
        """Give the tensor a validity that nothing else shares."""
        tensor = self.tensor
        if tensor is None:
            return
        family_of(tensor).unshare()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GuardedInput)

    def __hash__(self) -> int:
        return hash(GuardedInput)

    def __repr__(self) -> str:
        return "GuardedInput()"

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardedInput:
        return GuardedInput(self.graph_writes, None, self.number)

    def __reduce__(self) -> tuple[Any, ...]:
        return GuardedInput, (GraphWrites(), None, self.number)


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _last_element(data: Tensor) -> int:
    start = int(data.storage_offset())
    if not data.numel():
        return start
    return start + sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True))


# A thread holds this while it founds a tensor's family, which happens once, and while it writes without a family.
_founding = Lock()


class _ThreadState(threading.local):
    """The family of the tensor on which this thread is computing an in-place operation, if any."""

    written: ViewFamily | None = None


_this_thread = _ThreadState()


def family_of(tensor: MaskedTensor, in_place: bool = False) -> ViewFamily:
    """The family of a tensor; founds one if there is none, and `in_place` then says how writes change its validity."""
    family = tensor._family
    if family is None:
        with _founding.here:
            family = tensor._family
            if family is None:
                family = ViewFamily(tensor._data, tensor._stored_validity, in_place)
                family.graph_writes = tensor._graph_writes
                family.extent = tensor._stored_extent
                tensor._family = family
    return family


class computing_in_place:
    """Inside, this thread computes results that it writes back to `tensor`, so they do not share its validity."""

    __slots__ = ("_before", "_family")

    def __init__(self, tensor: MaskedTensor) -> None:
        self._family = tensor._family

    def __enter__(self) -> None:
        self._before, _this_thread.written = _this_thread.written, self._family

    def __exit__(self, *_: object) -> None:
        _this_thread.written = self._before


def shared_validity(tensor: MaskedTensor) -> Tensor | None:
    """The tensor's validity for a result to share: later writes to the tensor will not change it."""
    family = tensor._family
    if family is None:
        return tensor._validity
    validity = tensor._validity
    if validity is None:
        return None
    if tensor._carries_transform or being_traced(tensor._data):
        # A later write cannot copy the memory first, so give the result its own copy now.
        graph_writes = family.graph_writes
        written_later = family.in_place or (graph_writes is not None and graph_writes.seen)
        return _snapshot(tensor, validity, family.writes, torch.clone if written_later else as_value)
    if family.in_place:
        # Other processes write without raising the version, which the caches on a validity rely on.
        return validity.clone()
    if family.memory is not None and family is not _this_thread.written:
        family.share()
    return validity


def _snapshot(tensor: MaskedTensor, validity: Tensor, version: int, taken: Callable[[Tensor], Tensor]) -> Tensor:
    """A snapshot of a validity, `taken` once per version, so that we recognise a write of the unchanged value."""
    if tensor._snapshot is None or tensor._snapshot[0] != version:
        tensor._snapshot = (version, once_in_graph(validity, taken.__name__, lambda: taken(in_order(validity))))
    return tensor._snapshot[1]


def laid_out_as_data(tensor: MaskedTensor, validity: Tensor) -> Tensor:
    """The tensor's validity, with the data's strides if it is full; the tensor keeps this validity from now on.

    Graphs guard on strides, and a graph that writes to the validity addresses it like the data.
    """
    data = tensor._data
    if validity.shape != data.shape or validity.stride() == data.stride() or type(data) is not Tensor:
        return validity
    with without_torch_dispatch():  # Dynamo calls this while it makes fake tensors
        laid_out = torch.empty_like(data, dtype=torch.int8)
        if laid_out.stride() == data.stride():
            tensor._stored_validity = laid_out.copy_(validity)
        elif not may_share(data):  # each element has its own memory location, as in most views
            family_of(tensor).unshare()
    found = tensor._validity
    assert found is not None
    return found


def make_view_family(base: MaskedTensor, view: MaskedTensor, addressed: bool = False) -> None:
    """Let `view` share the validity of `base`; `addressed`: slice it from memory by the view's strides."""
    family = family_of(base)
    if addressed and family.memory is None:
        family.unshare()
    view._family = family


def copy_validity_before_views(base: MaskedTensor) -> None:
    """Give `base` its own validity before its first view, while tracing and inside functorch transforms.

    The views' validities are views of it and are written in place, so it must not be an input's or earlier result's.
    """
    if base._family is None and base._stored_validity is not None:
        if base._carries_transform:
            # Batched like the data.
            base._stored_validity = torch.zeros_like(base._data, dtype=torch.int8) + base._stored_validity
        else:
            # Until the family is written to, results share what was copied, and are known to have one mask.
            base._snapshot = (0, base._stored_validity)
            repeats = any(type(stride) is int and stride == 0 for stride in base._stored_validity.stride())
            taken = torch.clone if repeats else as_value  # (elements that share memory cannot be written to)
            base._stored_validity = taken(base._stored_validity)


def check_write(tensor: MaskedTensor) -> None:
    """Refuse, before writing, to write only some of several elements that share memory but differ in validity."""
    family = tensor._family
    if family is None or family.memory is not None or family.validity is None:
        return
    if being_traced(tensor._data) or tensor._carries_transform or same_places(tensor._data, family.data):
        return
    if may_share(family.data):
        family.unshare()


def write_validity(tensor: MaskedTensor, validity: Tensor | None) -> None:
    """Assign `validity` to `tensor`, and so to every view of the same memory."""
    current = tensor._validity
    if current is validity:
        return
    if being_traced(tensor._data) or tensor._carries_transform:
        _write_in_place(tensor, validity)
        return
    if validity is not None:
        validity = as_int8(validity)
    if tensor._family is None:
        with _founding.here:
            if tensor._family is None:
                tensor._stored_validity = validity
                return
    family_of(tensor).write(tensor._data, validity)


def _write_in_place(tensor: MaskedTensor, validity: Tensor | None) -> None:
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
    if family.graph_writes is not None and not family.graph_writes.seen and copied_back_by_aot(tensor._data):
        return  # the graph's writes changed no validity
    context = "functorch transform" if tensor._carries_transform else "compiled region"
    if current is None or current.shape != tensor._data.shape or not family.has_one_for_each:
        stored = current if current is None or current.shape != tensor._data.shape else family.validity
        raise MaskedSemanticsError(
            f"inside a {context}, this write would change how the mask of a tensor of shape {tuple(tensor.shape)} is "
            f"stored ({'none' if stored is None else f'broadcast from {tuple(stored.shape)}'} to one value per "
            "element), which is not possible there. Give the tensor a full mask first (x.mask_with(x.get_mask())), "
            "or write out of place."
        )
    family.writes += 1
    if family.graph_writes is not None:
        family.graph_writes.seen = True
    graph_writes_to_masks()
    if validity is None:
        current.fill_(1)
    else:
        current.copy_(as_int8(validity))


def found_family_in_graph(tensor: MaskedTensor, in_place: bool, guarded: GuardedInput | None) -> None:
    """Give each input and output of a graph its own family, because the graph writes to validity and never replaces it.

    `guarded` is the entry of its flatten context, and `in_place` says how writes outside the graph change its validity.
    """
    tensor._graph_writes = None if guarded is None else guarded.graph_writes
    family_of(tensor, in_place).number = None if guarded is None else guarded.number


# Live outputs of compiled graphs, by the address of their data and the number of their family.
_returned: weakref.WeakValueDictionary[tuple[int, int | None], Any] = weakref.WeakValueDictionary()


def join_family_from_graph(tensor: MaskedTensor, guarded: GuardedInput | None) -> None:
    """Join the outputs of a graph that view the same memory into one family, as in the graph.

    The number in `guarded` identifies the family; outputs that are valid everywhere have only their data's address.
    """
    data, validity = tensor._data, tensor._stored_validity
    number = None if guarded is None else guarded.number
    if type(data) is not Tensor or not data.numel() or (validity is not None and number is None):
        return
    address = data.untyped_storage().data_ptr()
    earlier = _returned.setdefault((address, number), tensor) if address else tensor
    if earlier is tensor or earlier._data.dtype is not data.dtype:
        return
    elements = data.untyped_storage().nbytes() // data.element_size()
    family = earlier._family
    if family is None:
        family = earlier._family = ViewFamily(data.detach().as_strided((elements,), (1,), 0), None)
        family.parts.append((earlier._data, earlier._stored_validity))
    if family.parts:
        # The first part suffices if it has all of the memory's elements.
        if family.parts[0][0].numel() < elements and not any(same_places(data, part) for part, _ in family.parts):
            family.parts.append((data, validity))
        tensor._family = family
