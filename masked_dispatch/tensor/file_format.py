"""The format in which pickle and torch.save write masked tensors, its versions, and checks of what a file contains."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.tensor.mask_sharing import ViewFamily
from op_registry import MaskedSemanticsError
from op_registry.extents.factors import conjunction, factors_of
from op_registry.extents.found import contradiction
from op_registry.extents.pieces import in_plain_values, read
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent, Factor
from op_registry.records.tracing import being_traced
from op_registry.records.validity import without_kept
from op_registry.sparse.coordinates import INDEX_DTYPES
from op_registry.sparse.layout import Layout, layout_named, layout_names
from op_registry.sparse.permuted import AnyRecord
from op_registry.sparse.record import Pattern

VERSION = 6
# The first version that `load` is called with.
_FIRST = 3

# The functions of torch.serialization that write and read its older format.
_OLDER_FORMAT = ("_legacy_save", "_legacy_load")

_Piece = TypeVar("_Piece", Tensor, Tensor | None)

# Copies of the masks and indices of files, as long as the originals live.
_own: Any = WeakTensorKeyDictionary()

# The functions that rebuild objects, by kind.
_builders: dict[str, Callable[..., Any]] = {}


def builder(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for the function that checks the parts of one kind of object and rebuilds it from them."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _builders[kind] = function
        torch.serialization.add_safe_globals([function])  # versions 1 and 2
        return function

    return register


def saved_as(kind: str, *parts: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The result of `__reduce_ex__`."""
    check_format()
    return load, (VERSION, kind, *(without_kept(part) if isinstance(part, Tensor) else part for part in parts))


@never_compiled
def load(version: int, kind: str, *parts: Any) -> Any:
    """pickle and torch.load call this function.

    Raises ValueError for a version that this library does not know, and for parts that do not fit together.
    """
    check_format()
    if type(version) is not int or version < _FIRST:
        check_saved(f"its format version is {version!r}")
    if version > VERSION:
        raise ValueError(
            f"this file of a masked tensor has format version {version}, and this version of masked_dispatch reads "
            f"versions 1 to {VERSION}. Update masked_dispatch, or save the tensor again with the version that is "
            "installed here."
        )
    if kind not in _builders:
        check_saved(f"the kind of what was saved is {kind!r}, not one of {', '.join(sorted(_builders))}")
    return _builders[kind](*parts)


def check_format() -> None:
    """Refuse torch's older file format, to write and to read."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _OLDER_FORMAT and frame.f_globals.get("__name__") == "torch.serialization":
            raise ValueError(
                "torch's older file format (torch.save with _use_new_zipfile_serialization=False) takes no masked "
                "tensors, because its tensors are read too late for a mask to be checked. Leave out this argument; or "
                "save x.get_data() and x.get_mask()."
            )
        frame = frame.f_back


def own(piece: _Piece) -> _Piece:
    """A copy of a mask or an index tensor of a file. Tensors that share the original also share the copy.

    Another tensor of the file may share the original's memory, such as the result of ``x.crow_indices()``; after our
    checks, a write to that tensor could put indices out of bounds.
    """
    if piece is None:
        return None
    copied: Tensor | None = _own.get(piece)
    if copied is None:
        copied = _own[piece] = piece.clone()
    return copied


torch.serialization.add_safe_globals([load])


# --------------------------------------------------------------------------------------------------- checks of contents


def check_saved(problem: str | None) -> None:
    """Raise ValueError if there is a `problem`."""
    if problem:
        raise ValueError(
            f"this is not a saved masked tensor: {problem}. The file is damaged, or was not written by saving a masked "
            "tensor."
        )


# ------------------------------------------------------------------------------------------------------- both storages


def problem_of_dense(
    data: Tensor, validity: Tensor | None, requires_grad: object, is_parameter: object, masked: type[Tensor]
) -> str | None:
    """The problem with the pieces of a dense masked tensor, None if they fit; no piece may itself be a `masked`."""
    return (
        _problem_of_tensor("data", data, masked)
        or problem_of_validity(validity, "data", data, masked)
        or _problem_of_flags(data, requires_grad, is_parameter)
    )


def problem_of_family(data: Tensor, validity: Tensor | None, memory: Tensor | None, masked: type[Tensor]) -> str | None:
    """The problem with the pieces of a view family, None if they fit."""
    problem = _problem_of_tensor("data", data, masked) or problem_of_validity(validity, "data", data, masked)
    if problem or memory is None:
        return problem
    problem = _problem_of_tensor("mask", memory, masked) or problem_of_validity(memory, "mask", memory, masked)
    span = ViewFamily(data, validity).span
    if problem is None and (memory.shape != (span,) or memory.device != data.device):
        where = f"{tuple(memory.shape)} on {memory.device}"
        return f"its mask has shape {where}, and its data spans {span} elements on {data.device}"
    return problem


def problem_of_member(data: Tensor, family: object) -> str | None:
    """The reason why a tensor with this data cannot belong to a family, None if it can."""
    if not isinstance(family, ViewFamily):
        return f"the type of what it shares with its views is {type(family).__name__}"
    if family.memory is None or not family.has_memory_of(data):
        return None
    try:
        family.part_of(data, family.memory)
    except MaskedSemanticsError as reason:
        return str(reason).rstrip(".")
    return None


def problem_of_stored(
    values: Tensor,
    validity: Tensor | None,
    layout: str,
    sizes: tuple[int, ...],
    pieces: tuple[Tensor, ...],
    block: tuple[int, int] | None,
    masked: type[Tensor],
) -> str | None:
    """The problem with stored values, validity and index tensors, None if they fit."""
    return (
        _problem_of_tensor("values", values, masked)
        or problem_of_validity(validity, "values", values, masked)
        or _problem_of_layout(layout, sizes, block)
        or _problem_of_pieces(layout_named(layout), sizes, pieces, block, values, masked)
        or _problem_of_indices(layout_named(layout), sizes, pieces, block, values)
    )


def problem_of_wrapper(
    values: Tensor, ndim: int, requires_grad: object, is_parameter: object, order: object
) -> str | None:
    """The problem with the flags of a tensor of `ndim` dimensions, or with their visible order; None if they fit."""
    return _problem_of_flags(values, requires_grad, is_parameter) or _problem_of_order(order, ndim)


def _problem_of_tensor(name: str, tensor: object, masked: type[Tensor]) -> str | None:
    if not isinstance(tensor, Tensor) or isinstance(tensor, masked):
        return f"the type of its {name} is {type(tensor).__name__}, not a plain tensor"
    if tensor.layout is not torch.strided:
        return f"the layout of its {name} is {tensor.layout}, not torch.strided"
    if tensor.requires_grad:
        return f"requires_grad is set on its {name}, and may be set only on the masked tensor itself"
    return None


def problem_of_validity(
    validity: Tensor | None, of: str, data: Tensor, masked: type[Tensor], name: str = "validity"
) -> str | None:
    """The problem with an int8 boolean beside data, None if it fits."""
    if validity is None:
        return None
    problem = _problem_of_tensor(name, validity, masked)
    if problem:
        return problem
    if validity.dtype is not torch.int8:
        return f"its {name} has dtype {validity.dtype}, not int8"
    if validity.ndim != data.ndim or any(n not in (1, m) for n, m in zip(validity.shape, data.shape, strict=True)):
        return f"its {name} has shape {tuple(validity.shape)}, which does not fit {of} of shape {tuple(data.shape)}"
    if validity.device != data.device:
        return f"its {name} is on {validity.device} and its {of} on {data.device}"
    if has_values(validity) and validity.numel():
        least, most = (bound.item() for bound in validity.aminmax())
        if least < 0 or most > 1:
            return f"its {name} runs from {least} to {most}, and only 0 and 1 are allowed"
    return None


def _problem_of_flags(data: Tensor, requires_grad: object, is_parameter: object) -> str | None:
    for name, flag in (("requires_grad", requires_grad), ("is_parameter", is_parameter)):
        if not isinstance(flag, bool):
            return f"{name} is {flag!r}, not True or False"
    if requires_grad and not (data.is_floating_point() or data.is_complex()):
        return f"it requires grad, which is not possible for dtype {data.dtype}"
    return None


def has_values(tensor: Tensor) -> bool:
    """Whether we can read the values: not while tracing, not on the meta device."""
    return not being_traced(tensor) and tensor.device.type != "meta"


# ------------------------------------------------------------------------------------------------------ sparse storage


def _problem_of_layout(layout: object, sizes: tuple[int, ...], block: tuple[int, int] | None) -> str | None:
    if not isinstance(layout, str) or layout not in layout_names():
        return f"its layout is {layout!r}, not one of {', '.join(layout_names())}"
    known = layout_named(layout)
    if not _is_tuple_of_integers(sizes) or any(size < 0 for size in sizes):
        return f"the sizes of its sparse dimensions are {sizes!r}"
    if not known.has_room(len(sizes)):
        at_least = "at least " * (known.max_dims != known.min_dims)
        return f"{layout} has {at_least}{known.min_dims} sparse dimensions, and its sizes are {sizes}"
    if (block is not None) != known.blocks:
        return f"its layout is {layout} and its block size {block}"
    if block is not None and (not _is_tuple_of_integers(block) or len(block) != 2 or any(b < 1 for b in block)):
        return f"its block size is {block!r}, not two positive integers"
    if block is not None and (sizes[-2] % block[0] or sizes[-1] % block[1]):
        return f"blocks of {block} do not evenly divide a matrix of size {sizes[-2:]}"
    return None


def _is_tuple_of_integers(sizes: object) -> TypeGuard[tuple[int, ...]]:
    """Whether `sizes` is a tuple of integers (symbolic ones while tracing)."""
    return isinstance(sizes, tuple) and all(type(size) in (int, torch.SymInt) for size in sizes)


def _problem_of_pieces(
    layout: Layout,
    sizes: tuple[int, ...],
    pieces: tuple[Tensor, ...],
    block: tuple[int, int] | None,
    values: Tensor,
    masked: type[Tensor],
) -> str | None:
    """Check the number, kind, device and dimensions of the index tensors, and the shape of the values."""
    count = len(layout.piece_dims)
    if not isinstance(pieces, tuple) or len(pieces) != count:
        return f"{layout} has {count} index tensor{'s' * (count > 1)}, and the file has {_number_of(pieces)}"
    for piece, dims in zip(pieces, layout.piece_dims, strict=True):
        problem = _problem_of_tensor("indices", piece, masked)
        if problem:
            return problem
        if piece.dtype not in INDEX_DTYPES:
            return f"its indices have dtype {piece.dtype}, not int64 or int32"
        if piece.device != values.device:
            return f"its indices are on {piece.device} and its values on {values.device}"
        if piece.ndim != dims:
            return f"its indices have shapes {[tuple(p.shape) for p in pieces]}"
    problem = layout.problem_of_shapes(pieces, sizes)
    if problem:
        return problem
    listed = pieces[-1].shape[-1]
    shape = (listed, *(block or ()))
    if tuple(values.shape[: len(shape)]) != shape:
        return f"its values have shape {tuple(values.shape)}, and its indices list {listed} {_unit(block)}"
    return None


def _number_of(pieces: object) -> str:
    return str(len(pieces)) if isinstance(pieces, tuple) else repr(pieces)[:60]


def _unit(block: tuple[int, int] | None) -> str:
    return f"blocks of {block}" if block else "elements"


def _problem_of_indices(
    layout: Layout, sizes: tuple[int, ...], pieces: tuple[Tensor, ...], block: tuple[int, int] | None, values: Tensor
) -> str | None:
    """Find indices that are out of bounds, list an element twice or violate the layout's order."""
    if not all(map(has_values, pieces)):
        return None
    problem = layout.problem_of_indices(pieces, sizes, values.shape[0], block)
    if problem:
        return problem
    if not layout.lists_in_order(pieces, Pattern(layout, sizes, pieces, block).listed_sizes()):
        return f"its indices list an element twice, or are not in the order of {layout}"
    return None


def _problem_of_order(order: object, ndim: int) -> str | None:
    if order is None or (
        _is_tuple_of_integers(order)
        and sorted(d if d >= 0 else ~d for d in order) == list(range(ndim))  # ~d: merged into the dimension before it
        and order[0] >= 0
        and list(order) != list(range(ndim))
    ):
        return None
    return f"the order of its {ndim} dimensions is {order!r}, not a permutation other than the identity"


# -------------------------------------------------------------------------------------------------------------- extents


def parts_of_extent(extent: Extent | None) -> tuple[tuple[Any, ...], ...]:
    """What a file holds of an extent, as the last argument of a builder; nothing for a tensor without one."""
    if extent is None or not extent.factors:  # (of which step a tensor is the state, a file does not say)
        return ()
    theres = (None if factor.said is None else without_kept(factor.there) for factor in extent.factors)
    return ((extent.is_mask, in_plain_values(extent, counts=True), *theres),)


def saved_extent(tensor: Tensor, parts: object, masked: type[Tensor]) -> Extent | None:
    """The extent of a tensor of any storage, from a file's parts. Raises ValueError if they do not fit the tensor."""
    if parts is None:
        return None
    is_mask, known, *theres = parts if isinstance(parts, tuple) and len(parts) > 1 else (None, None)
    if not isinstance(is_mask, bool) or not isinstance(known, tuple) or len(known) != len(theres):
        check_saved(f"its extent is its mask: {is_mask!r}, and of its {len(theres)} factors is known: {known!r}")
    factors = []
    for along, there in zip(known, theres, strict=True):
        if not isinstance(along, tuple) or len(along) != tensor.ndim:
            check_saved(f"its extent knows {along!r} of its {tensor.ndim} dimensions")
        try:
            factor = Factor(tuple(map(read, along)), there)
        except ValueError as problem:
            check_saved(str(problem))
        check_saved(_problem_of_factor(tensor, factor, is_mask and len(known) == 1, masked))
        factors.append(Factor(factor.along, own(there)))
    return Extent(tuple(factors), is_mask)


def _problem_of_factor(tensor: Tensor, factor: Factor, may_be_mask: bool, masked: type[Tensor]) -> str | None:
    if factor.said is None:
        return None if may_be_mask else "a factor of its extent is missing"
    there = factor.there
    problem = problem_of_validity(there, "data", tensor, masked, "extent")
    if problem is None and any(a is None and n != 1 for a, n in zip(factor.along, there.shape, strict=True)):
        return f"its extent has shape {tuple(there.shape)}, and does not depend on each of these dimensions"
    return problem


def check_extent(record: Dense) -> None:
    """Raise ValueError if an extent from a file contradicts itself or the mask."""
    if record.extent is not None:
        check_saved(problem_of_places(record) or problem_of_extent(record))


def problem_of_places(record: AnyRecord) -> str | None:
    """Find what a factor says otherwise than what it states of its dimensions."""
    if record.extent is None or 0 in record.shape:
        return None
    factors = [f for f in factors_of(record) if has_values(f.there)]
    return next((problem for f in factors if (problem := contradiction(f.along, f.there))), None)


def problem_of_extent(record: Dense) -> str | None:
    """Find what is valid and not there; where the mask is the extent, also what is there and not valid."""
    extent, there = record.extent, conjunction(factors_of(record))
    if extent is None or there is None or not has_values(there) or not record.data.numel():
        return None
    valid = torch.ones_like(there) if record.validity is None else record.validity
    if bool((valid > there).any()):
        return "an element is valid where its extent says that nothing is there"
    if extent.is_mask and bool((valid < there).any()):
        return "an element is invalid where its extent, which is its mask, says that something is there"
    return None
