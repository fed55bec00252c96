"""Masked tensors in torch.distributed.checkpoint: what is written, and what a checkpoint has to be to be loaded.

A masked tensor is one entry of a checkpoint, as a plain one is: torch saves data and mask, or what is stored sparsely,
in one piece, and on loading copies it whole. With distributed tensors inside, each rank writes its part of data and
mask in one piece, and torch reads the parts that a rank needs, so that the placements may differ.

torch compares shapes alone. Here the metadata of an entry says that it is masked and how it is stored, and a load whose
tensors differ is refused while it is planned: on all ranks, before anything is read.

This module is loaded with torch.distributed.checkpoint (`masked_dispatch/later_import.py`), or by the metadata of a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from masked_dispatch.distributed.agreement import described, named
from masked_dispatch.distributed.staging import install as install_stagers
from masked_dispatch.replacements.replacing import replace
from masked_dispatch.tensor.file_format import VERSION
from masked_dispatch.tensor.mask_sharing import ViewFamily
from masked_dispatch.tensor.masked_tensor import MaskedTensor, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor

# ---------------------------------------------------------------------------------------------------- what is written


@dataclass
class MaskedProperties(TensorProperties):
    """What the metadata of a checkpoint says of a masked entry.

    stored   its storage, which has to be that of the tensor it is loaded into
    version  of the format of files of masked tensors
    """

    stored: str = "torch.strided"
    version: int = VERSION

    def __getstate__(self) -> Any:
        return super().__getstate__(), self.stored, self.version  # type: ignore[no-untyped-call]

    def __setstate__(self, state: Any) -> None:
        properties, self.stored, self.version = state
        super().__setstate__(properties)


def properties_of(tensor: MaskedTensor) -> MaskedProperties:
    layout = tensor.storage_layout if isinstance(tensor.storage_layout, torch.layout) else torch.strided
    return MaskedProperties(tensor.dtype, layout, tensor.requires_grad, stored=stored_as(tensor))


def stored_as(tensor: MaskedTensor) -> str:
    """The storage, with the order of a tensor whose dimensions are shown in another order than they are stored."""
    if not isinstance(tensor, SparseMaskedTensor):
        return "torch.strided"
    order = "" if tensor._order is None else f" in the order {tensor._order}"
    return described(tensor).partition(", stored as ")[2] + order


def write_items(tensor: MaskedTensor, name: str, given: object) -> list[WriteItem]:
    """What this rank writes of a tensor: `MaskedTensor.__create_write_items__`, which torch's planners call."""
    kind = WriteItemType.SHARD if is_distributed(tensor) else WriteItemType.TENSOR
    properties = properties_of(tensor)
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets), kind, tensor_data=TensorWriteData(chunk, properties, tensor.shape)
        )
        for chunk in chunks_of(tensor)
    ]


def chunks_of(tensor: MaskedTensor) -> list[ChunkStorageMetadata]:
    """The part of the tensor that this rank has."""
    if not is_distributed(tensor):
        return [ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)]
    data: Any = tensor._data
    return data.__create_chunk_list__() if data.device_mesh.get_coordinate() is not None else []


def chunks_to_read(tensor: MaskedTensor) -> list[ChunkStorageMetadata]:
    """`MaskedTensor.__create_chunk_list__`, which torch's planners call before they load into the tensor."""
    if is_distributed(tensor):
        own_validity(tensor)
    return chunks_of(tensor)


def part_on_this_rank(tensor: MaskedTensor, index: MetadataIndex) -> MaskedTensor:
    """What is read from when saving, and written to when loading: `MaskedTensor.__get_tensor_shard__`."""
    if not is_distributed(tensor):
        return tensor
    data, validity = local(tensor._data), placed_validity(tensor)
    part = wrap(data, None)
    if validity is not None:
        part._family = ViewFamily(data, None, in_place=True)
        part._family.memory = as_memory(local(validity), data)
    return part


# -------------------------------------------------------------------------------------- with distributed tensors inside


def is_distributed(tensor: MaskedTensor) -> bool:
    return not isinstance(tensor, SparseMaskedTensor) and isinstance(tensor._data, DTensor)


def local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def placed_validity(tensor: MaskedTensor) -> Tensor | None:
    """The validity in full, placed like the data."""
    data: Any = tensor._data
    validity: Any = tensor._validity
    if validity is None or (validity.shape == data.shape and validity.placements == data.placements):
        return validity
    mask: Any = tensor.get_mask().to(torch.int8)
    return mask.redistribute(data.device_mesh, data.placements)


def own_validity(tensor: MaskedTensor) -> None:
    """Give the tensor a validity that nothing else shares, in full, so that what is loaded can be written to it."""
    data: Any = tensor._data
    validity, part = placed_validity(tensor), local(data)
    values = torch.ones_like(part, dtype=torch.int8) if validity is None else local(validity)
    memory = torch.zeros(ViewFamily(part, None).span, dtype=torch.int8, device=part.device)
    memory = memory.as_strided(part.shape, part.stride(), 0).copy_(values)
    tensor._stored_validity = DTensor.from_local(
        memory, data.device_mesh, data.placements, shape=data.shape, stride=data.stride()
    )
    if tensor._family is not None:
        tensor._family.validity = tensor._stored_validity


def as_memory(validity: Tensor, data: Tensor) -> Tensor:
    """The memory of a validity that has the strides of the data; that of a copy, if it has others."""
    if not data.numel():  # an empty shard
        return torch.zeros(ViewFamily(data, None).span, dtype=torch.int8, device=data.device)
    if validity.stride() != data.stride():
        copied = torch.empty_strided(data.shape, data.stride(), dtype=torch.int8, device=data.device)
        validity = copied.copy_(validity)
    return validity.as_strided((ViewFamily(data, None).span,), (1,))


# ------------------------------------------------------------------------------------------------------------ planning


def problem_of_entry(tensor: object, saved: TensorStorageMetadata | BytesStorageMetadata) -> str | None:
    """Why an entry cannot be loaded into a tensor, of which one is masked; None if it can."""
    was, have = description_of(saved), described_target(tensor)
    if not was.startswith("masked") and not have.startswith("masked"):
        return None
    version = getattr(getattr(saved, "properties", None), "version", VERSION)
    if version > VERSION:
        return f"has format version {version}, and this library reads versions up to {VERSION}"
    if was == have:
        return None
    return f"is {was} in the checkpoint, and {have} here{way_out(was, have)}"


def way_out(was: str, have: str) -> str:
    if have.startswith("plain"):
        return ". A plain tensor has no place for the mask: load it into masked_dispatch.as_masked_tensor(x)"
    if was.startswith("plain"):
        return ". It has no mask: load it into a plain tensor, and choose the mask, masked_dispatch.as_masked_tensor"
    return ""


def description_of(saved: TensorStorageMetadata | BytesStorageMetadata) -> str:
    if not isinstance(saved, TensorStorageMetadata):
        return "an object"
    return in_words(saved.properties, saved.size)


def in_words(properties: TensorProperties, size: torch.Size) -> str:
    text = f"{str(properties.dtype).removeprefix('torch.')} of shape {tuple(size)}"
    if not isinstance(properties, MaskedProperties):
        return f"plain {text}"
    return f"masked {text}" + ("" if properties.stored == "torch.strided" else f", stored as {properties.stored}")


def described_target(tensor: object) -> str:
    if isinstance(tensor, MaskedTensor):
        return in_words(properties_of(tensor), tensor.shape)
    return f"plain {described(tensor)}" if isinstance(tensor, Tensor) else f"of type {type(tensor).__name__}"


def check_entries(state_dict: dict[str, Any], metadata: Metadata) -> None:
    """Raise if an entry of the checkpoint does not fit, with all those that do not."""
    saved = metadata.state_dict_metadata
    found = ((name, problem_of_entry(tensor, saved[name])) for name, tensor in state_dict.items() if name in saved)
    problems = [f"{name!r} {problem}" for name, problem in found if problem]
    if problems:
        raise ValueError(f"this checkpoint does not fit, and nothing was loaded: {'; '.join(problems)}.")


def check_ranks(plans: Iterable[SavePlan]) -> None:
    """Raise if one rank would save what is masked, or stored otherwise, on another: one of them would be written."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            text = "an object" if data is None else in_words(data.properties, data.size)
            found.setdefault(item.index.fqn, {}).setdefault(text, []).append(rank)
    for name, ranks in found.items():
        if len(ranks) > 1 and any(text.startswith("masked") for text in ranks):
            parts = "; ".join(f"{named(sorted(set(which)))} has {text}" for text, which in ranks.items())
            raise ValueError(f"{name!r} differs between the ranks that save it: {parts}. Nothing was saved.")


def check_files(reader: FileSystemReader, plan: LoadPlan) -> None:
    """Raise if a file ends before what has to be read from it."""
    ends: dict[str, int] = {}
    for item in plan.items:
        info = reader.storage_data[item.storage_index]
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = reader.fs.concat_path(reader.path, name)
        if not reader.fs.exists(path):
            raise ValueError(f"this checkpoint is not complete, and nothing was loaded: {name} is missing.")
        with reader.fs.create_stream(path, "rb") as stream:
            size = stream.seek(0, 2)
        if size < end:
            raise ValueError(
                f"this checkpoint is not complete, and nothing was loaded: {name} has {size} bytes, and should have at "
                f"least {end}."
            )


# -------------------------------------------------------------------------------------------------------- installation


@dataclass
class MaskedLoadPlan(LoadPlan):
    """A plan to read masked tensors."""


def loads_masked(planner: DefaultLoadPlanner) -> bool:
    """Whether tensors are masked that are loaded, or entries that they are loaded from."""
    entries = () if planner.metadata is None else planner.metadata.state_dict_metadata.values()
    return any(isinstance(tensor, MaskedTensor) for tensor in planner.state_dict.values()) or any(
        isinstance(getattr(entry, "properties", None), MaskedProperties) for entry in entries
    )


def plan_load(create_local_plan: Callable[..., LoadPlan], planner: DefaultLoadPlanner) -> LoadPlan:
    """The plan of one rank, after a check of the entries."""
    if planner.metadata is not None:
        check_entries(planner.state_dict, planner.metadata)
    plan = create_local_plan(planner)
    masked = any(isinstance(tensor, MaskedTensor) for tensor in planner.state_dict.values())
    return MaskedLoadPlan(plan.items, plan.storage_data, plan.planner_data) if masked else plan


def saves_masked(planner: DefaultSavePlanner, plans: list[SavePlan]) -> bool:
    """Whether a rank saves a masked tensor."""
    written = (item.tensor_data for plan in plans for item in plan.items)
    return any(isinstance(data.properties, MaskedProperties) for data in written if data is not None)


def plan_save(create_global_plan: Callable[..., Any], planner: DefaultSavePlanner, plans: list[SavePlan]) -> Any:
    """The plan of all ranks, after a check of theirs."""
    check_ranks(plans)
    return create_global_plan(planner, plans)


def reads_masked(reader: FileSystemReader, plan: LoadPlan) -> bool:
    """Whether masked tensors are read."""
    return isinstance(plan, MaskedLoadPlan)


def plan_reading(prepare: Callable[..., LoadPlan], reader: FileSystemReader, plan: LoadPlan) -> LoadPlan:
    """The plan of a reader, after a check of the files."""
    check_files(reader, plan)
    return prepare(reader, plan)


def install() -> None:
    """Called once, when torch.distributed.checkpoint has been imported."""
    masked: Any = MaskedTensor
    setattr(masked, "__create_write_items__", write_items)  # noqa: B010
    setattr(masked, "__create_chunk_list__", chunks_to_read)  # noqa: B010
    setattr(masked, "__get_tensor_shard__", part_on_this_rank)  # noqa: B010
    replace(DefaultLoadPlanner, "create_local_plan", plan_load, loads_masked)
    replace(DefaultSavePlanner, "create_global_plan", plan_save, saves_masked)
    replace(FileSystemReader, "prepare_local_plan", plan_reading, reads_masked)
    install_stagers()
