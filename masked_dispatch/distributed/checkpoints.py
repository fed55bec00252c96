"""Save and load masked tensors with torch.distributed.checkpoint, at once or from copies while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import Future
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
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager
from torch.distributed.tensor import DTensor

from masked_dispatch.distributed.agreement import described, of_each
from masked_dispatch.distributed.messages import settle
from masked_dispatch.replacements import replace
from masked_dispatch.tensor.checks import contains_masked
from masked_dispatch.tensor.extents import forget_extent, receive_extent
from masked_dispatch.tensor.file_format import VERSION
from masked_dispatch.tensor.mask_sharing import ViewFamily
from masked_dispatch.tensor.masked_tensor import MaskedTensor, rebuild, with_extent, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, rebuild_sparse, stored_parts
from op_registry.records.extent import Extent

# ------------------------------------------------------------------------------------------------------------- saving


@dataclass
class MaskedProperties(TensorProperties):
    """The metadata of a masked entry in a checkpoint.

    stored   its storage, which must equal the storage of the tensor that loads it
    version  the version of the file format of masked tensors
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
    """Describe the storage, with the order of dimensions if the tensor stores them in another order than it shows."""
    if not isinstance(tensor, SparseMaskedTensor):
        return "torch.strided"
    order = "" if tensor._order is None else f" in the order {tensor._order}"
    return described(tensor).partition(", stored as ")[2] + order


def write_items(tensor: MaskedTensor, name: str, given: object) -> list[WriteItem]:
    """Return the items this rank writes: `MaskedTensor.__create_write_items__`, which torch's planners call."""
    kind = WriteItemType.SHARD if is_distributed(tensor) else WriteItemType.TENSOR
    properties = properties_of(tensor)
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets), kind, tensor_data=TensorWriteData(chunk, properties, tensor.shape)
        )
        for chunk in chunks_of(tensor)
    ]


def chunks_of(tensor: MaskedTensor) -> list[ChunkStorageMetadata]:
    """Return the chunks of the tensor that this rank holds."""
    if not is_distributed(tensor):
        return [ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)]
    data: Any = tensor._data
    return data.__create_chunk_list__() if data.device_mesh.get_coordinate() is not None else []


def chunks_to_read(tensor: MaskedTensor) -> list[ChunkStorageMetadata]:
    """Implement `MaskedTensor.__create_chunk_list__`, which torch's planners call before they load into the tensor."""
    if is_distributed(tensor):
        own_validity(tensor)
    return chunks_of(tensor)


def part_on_this_rank(tensor: MaskedTensor, index: MetadataIndex) -> MaskedTensor:
    """Return the tensor that a save reads and a load writes: `MaskedTensor.__get_tensor_shard__`."""
    if not is_distributed(tensor):
        return tensor
    tensor._check_no_extent("a checkpoint of distributed tensors")
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
    """Return the full validity, with the placements of the data."""
    data: Any = tensor._data
    validity: Any = tensor._validity
    if validity is None or (validity.shape == data.shape and validity.placements == data.placements):
        return validity
    mask: Any = tensor.get_mask().to(torch.int8)
    return mask.redistribute(data.device_mesh, data.placements)


def own_validity(tensor: MaskedTensor) -> None:
    """Give the tensor a full validity in memory of its own, which a load can write to."""
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
    """Return the memory of a validity with the strides of the data; copy the validity if its strides differ."""
    if not data.numel():  # an empty shard
        return torch.zeros(ViewFamily(data, None).span, dtype=torch.int8, device=data.device)
    if validity.stride() != data.stride():
        copied = torch.empty_strided(data.shape, data.stride(), dtype=torch.int8, device=data.device)
        validity = copied.copy_(validity)
    return validity.as_strided((ViewFamily(data, None).span,), (1,))


# ------------------------------------------------------------------------------------------------------------ planning


def problem_of_entry(tensor: object, saved: TensorStorageMetadata | BytesStorageMetadata) -> str | None:
    """Say why a tensor cannot load an entry, where at least one of the two is masked; None if it can."""
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
    """Raise one error that lists all entries of the checkpoint that do not match their tensors."""
    saved = metadata.state_dict_metadata
    found = ((name, problem_of_entry(tensor, saved[name])) for name, tensor in state_dict.items() if name in saved)
    problems = [f"{name!r} {problem}" for name, problem in found if problem]
    if problems:
        raise ValueError(f"this checkpoint does not fit, and nothing was loaded: {'; '.join(problems)}.")


def check_ranks(plans: Iterable[SavePlan]) -> None:
    """Raise if ranks save one entry masked and plain, or in different storage: torch would write only one of them."""
    found: dict[str, dict[tuple[int, str], None]] = {}  # by name, in the order of ranks
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            text = "an object" if data is None else in_words(data.properties, data.size)
            found.setdefault(item.index.fqn, {})[rank, f"has {text}"] = None
    for name, each in found.items():
        texts = {text for _, text in each}
        if len(texts) > 1 and any(text.startswith("has masked") for text in texts):
            raise ValueError(f"{name!r} differs between the ranks that save it: {of_each(each)}. Nothing was saved.")


def check_files(reader: FileSystemReader, plan: LoadPlan) -> None:
    """Raise if a file is too short for the data that the plan reads from it."""
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
    """A load plan that reads masked tensors."""


def loads_masked(planner: DefaultLoadPlanner) -> bool:
    """Return whether the planner loads masked tensors or masked entries."""
    entries = () if planner.metadata is None else planner.metadata.state_dict_metadata.values()
    return any(isinstance(tensor, MaskedTensor) for tensor in planner.state_dict.values()) or any(
        isinstance(getattr(entry, "properties", None), MaskedProperties) for entry in entries
    )


def plan_load(create_local_plan: Callable[..., LoadPlan], planner: DefaultLoadPlanner) -> LoadPlan:
    """Check the entries and return the plan of one rank."""
    if planner.metadata is not None:
        check_entries(planner.state_dict, planner.metadata)
    plan = create_local_plan(planner)
    masked = any(isinstance(tensor, MaskedTensor) for tensor in planner.state_dict.values())
    return MaskedLoadPlan(plan.items, plan.storage_data, plan.planner_data) if masked else plan


def loads_into_masked(planner: DefaultLoadPlanner, read_item: ReadItem, *rest: Any) -> bool:
    """Return whether the planner loads an entry into a masked tensor."""
    return isinstance(planner.state_dict.get(read_item.dest_index.fqn), MaskedTensor)


def resolve(resolve_tensor: Callable[..., Tensor], planner: DefaultLoadPlanner, read_item: ReadItem) -> Tensor:
    """Return the tensor to load into, without what it knows of padding: what is loaded replaces that."""
    found = resolve_tensor(planner, read_item)
    if isinstance(found, MaskedTensor) and found._extent is not None:
        found = copy.copy(found)
        forget_extent(found)
    return found


def commit(commit_tensor: Callable[..., None], planner: DefaultLoadPlanner, read_item: ReadItem, loaded: Any) -> None:
    """Let the tensor know what was loaded into the memory that it shares."""
    target = planner.state_dict[read_item.dest_index.fqn]
    if is_distributed(target):
        loaded._check_no_extent("a checkpoint of distributed tensors")
    received = loaded._extent
    forget_extent(target)
    receive_extent(target, received)
    commit_tensor(planner, read_item, loaded)


def saves_masked(planner: DefaultSavePlanner, plans: list[SavePlan]) -> bool:
    """Return whether some rank saves a masked tensor."""
    written = (item.tensor_data for plan in plans for item in plan.items)
    return any(isinstance(data.properties, MaskedProperties) for data in written if data is not None)


def plan_save(create_global_plan: Callable[..., Any], planner: DefaultSavePlanner, plans: list[SavePlan]) -> Any:
    """Check the plans of the ranks and return the global plan."""
    check_ranks(plans)
    return create_global_plan(planner, plans)


def reads_masked(reader: FileSystemReader, plan: LoadPlan) -> bool:
    """Return whether the plan reads masked tensors."""
    return isinstance(plan, MaskedLoadPlan)


def plan_reading(prepare: Callable[..., LoadPlan], reader: FileSystemReader, plan: LoadPlan) -> LoadPlan:
    """Check the files and return the plan of the reader."""
    check_files(reader, plan)
    return prepare(reader, plan)


def install() -> None:
    """later_import.py calls this once, after the import of torch.distributed.checkpoint."""
    masked: Any = MaskedTensor
    setattr(masked, "__create_write_items__", write_items)  # noqa: B010
    setattr(masked, "__create_chunk_list__", chunks_to_read)  # noqa: B010
    setattr(masked, "__get_tensor_shard__", part_on_this_rank)  # noqa: B010
    replace(DefaultLoadPlanner, "create_local_plan", plan_load, loads_masked)
    replace(DefaultLoadPlanner, "resolve_tensor", resolve, loads_into_masked)
    replace(DefaultLoadPlanner, "commit_tensor", commit, loads_into_masked)
    replace(DefaultSavePlanner, "create_global_plan", plan_save, saves_masked)
    replace(FileSystemReader, "prepare_local_plan", plan_reading, reads_masked)
    install_staging()


# ------------------------------------------------------------------------------------------------ copies for async_save

Stage = Callable[..., Any]


def in_pieces(value: Any) -> Any:
    """Copy the nested containers, with a tuple of pieces in place of each masked tensor."""
    if isinstance(value, SparseMaskedTensor):
        return (*stored_parts(value._kept), value._order)
    if isinstance(value, MaskedTensor):
        return value._data.detach(), value._validity
    if isinstance(value, dict):
        return {key: in_pieces(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(in_pieces(inner) for inner in value)
    return value


def together(value: Any, staged: Any) -> Any:
    """Rebuild the masked tensors of `value` from the staged pieces."""
    if isinstance(value, SparseMaskedTensor):
        *parts, order = staged
        return with_extent(rebuild_sparse(*parts, False, False, order), on(parts[0].device, value._extent))
    if isinstance(value, MaskedTensor):
        return with_extent(rebuild(*staged, False), on(staged[0].device, value._extent))
    if isinstance(value, dict):
        return {key: together(inner, staged[key]) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(together(inner, copied) for inner, copied in zip(value, staged, strict=True))
    return staged


def on(device: torch.device, extent: Extent | None) -> Extent | None:
    """Return an extent with its booleans on a device; nobody writes to them, so they need no copies there."""
    if extent is None:
        return None
    moved = tuple(factor.moved_by(lambda there: there.to(device)) for factor in extent.factors)
    return Extent(moved, extent.is_mask)


def stages_masked(stager: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> bool:
    """Return whether the state contains masked tensors."""
    return contains_masked(state_dict)


def stage_pieces(stage: Stage, stager: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Copy a state, including the pieces of masked tensors."""
    copies = stage(stager, in_pieces(state_dict), *args, **kwargs)
    return later(state_dict, copies) if isinstance(copies, Future) else together(state_dict, copies)


def later(state_dict: dict[str, Any], copies: Future[Any]) -> Future[Any]:
    """Return a future of the staged state, which another thread copies."""
    done: Future[Any] = Future()
    copies.add_done_callback(lambda copied: settle(done, lambda: together(state_dict, copied.result())))
    return done


def install_staging() -> None:
    """later_import.py calls this once, after the import of torch.distributed.checkpoint."""
    for stager in (DefaultStager, BlockingAsyncStager):
        replace(stager, "stage", stage_pieces, stages_masked)
