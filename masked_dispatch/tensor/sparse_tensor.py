"""SparseMaskedTensor: stored values and a sparsity pattern instead of data and a validity."""

from __future__ import annotations

import copy
import copyreg
import math
from collections.abc import Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from masked_dispatch.compiler_internals import dynamo_is_loaded, mark_dynamic, never_compiled, prepare_for_tracing
from masked_dispatch.policies import Mode, Policy, densifying
from masked_dispatch.policies import updating as current_updates
from masked_dispatch.tensor.assignment import as_source, put
from masked_dispatch.tensor.extents import NAMES, pieces_of, take_extent_from_graph
from masked_dispatch.tensor.file_format import (
    builder,
    check_saved,
    own,
    parts_of_extent,
    problem_of_places,
    problem_of_stored,
    problem_of_wrapper,
    saved_as,
    saved_extent,
)
from masked_dispatch.tensor.in_transform import InTransform
from masked_dispatch.tensor.masked_tensor import MaskedTensor, inference_mode_of, with_extent, wrap
from masked_dispatch.tensor.messages import tangent_stored_otherwise
from masked_dispatch.tensor.storage import StoredPieces
from masked_dispatch.tensor.traced import check_stored_sparsely, keep_functions_whole
from masked_dispatch.torch_internals import PRE_DISPATCH, make_data_pointer_raise, make_wrapper_subclass
from op_registry import MaskedSemanticsError, registry
from op_registry.extents.pieces import Known, serves
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_int8
from op_registry.sparse.layout import DENSE, Layout, layout_named, version_of
from op_registry.sparse.permuted import AnyRecord, Permuted, base_shape_of, groups_of
from op_registry.sparse.record import Pattern, Sparse

# A compiled graph guards on these: the layout's name, the number of sparse dimensions, the block size, the order of
# dimensions, the version of the rules (and of a third-party layout), the densify policy, the mode of `updates`, and the
# padding that is known.
Context = tuple[str, int, tuple[int, int] | None, tuple[int, ...] | None, str, Policy, Mode, Known | None]


def needs_dense_storage(tensor: SparseMaskedTensor) -> MaskedSemanticsError:
    """The error for code that reads dense data and validity; dispatch serves sparse storage before such code."""
    return MaskedSemanticsError(
        f"a masked tensor of shape {tuple(tensor.shape)} is stored as {tensor.storage_layout}, and only "
        "dense storage is supported here: use x.to_dense()"
    )


class SparseMaskedTensor(MaskedTensor):
    """A masked tensor that stores only some of its elements; the others are invalid."""

    _kept: StoredPieces
    # Whether this is an input of a graph being traced, whose stored tensors cannot be replaced.
    _is_graph_input = False
    # The order of a permuted record (op_registry/sparse/permuted.py); None if the visible order is the stored order.
    _order: tuple[int, ...] | None = None
    # The complex tensor if this is its `torch.view_as_real`, which torch.distributed passes on in its place.
    _real_view_of: SparseMaskedTensor | None = None

    @property
    def _extent(self) -> Extent | None:
        written = self._kept.extent_written
        return self._stored_extent if written is None else written[0]

    @_extent.setter
    def _extent(self, extent: Extent | None) -> None:
        self._stored_extent = extent

    def _replace_extent(self, extent: Extent | None) -> None:
        self._kept.extent_written = (extent,)

    @property
    def _kept_values(self) -> Tensor:
        # The values, in the pattern's order. They never require grad: the wrapper carries autograd.
        kept = self._kept
        return kept.values.clone() if kept.in_place else kept.values

    # AOTAutograd needs the setters: it makes the pieces of a traced tangent contiguous if they overlap in memory.
    @_kept_values.setter
    def _kept_values(self, values: Tensor) -> None:
        self._kept = StoredPieces(values, self._kept.validity, self._kept.pattern)

    @property
    def _kept_validity(self) -> Tensor | None:
        # int8, 1 where a stored value is valid; None if all are.
        kept, validity = self._kept, self._kept.validity
        return validity.clone() if kept.in_place and validity is not None else validity

    @_kept_validity.setter
    def _kept_validity(self, validity: Tensor | None) -> None:
        self._kept = StoredPieces(self._kept.values, validity, self._kept.pattern)

    @property
    def _pattern(self) -> Pattern:
        return self._kept.pattern

    @property
    def _data(self) -> Tensor:  # type: ignore[override]
        raise needs_dense_storage(self)

    @property  # type: ignore[misc]
    def _validity(self) -> Tensor | None:  # type: ignore[override]
        raise needs_dense_storage(self)

    @never_compiled
    def __setitem__(self, index: object, value: object) -> None:
        value = as_source(value, self)
        if not isinstance(value, Tensor):
            super().__setitem__(index, value)  # type: ignore[index, assignment]
            return
        source = value.to(self)
        if not put(self, index, source, wrap, views=False):
            super().__setitem__(index, source)

    def _written(self, index: object, value: object) -> SparseMaskedTensor:
        # Graphs write x[index] = value by this method, which returns the tensor itself.
        self[index] = value
        return self

    @property
    def _stored_tensors(self) -> list[Tensor]:
        values, validity, pattern = self._kept.now
        return [t for t in (values, validity, *pattern.pieces) if t is not None]

    @property
    def _printed_record(self) -> AnyRecord:
        return self.record

    @property
    def nnz(self) -> int:
        """Number of stored elements of the sparse dimensions; every element of a stored block counts."""
        return self._pattern.stored

    @property
    def storage_layout(self) -> torch.layout | Layout:
        """The storage layout of the values, whatever `layout` says."""
        return self._pattern.layout.public

    @property
    def record(self) -> Sparse | Permuted:
        """The record of this tensor, without derivatives."""
        values, validity, pattern = self._kept.copied()
        return self.permuted_like_self(Sparse(Dense(values, validity), pattern))

    def permuted_like_self(self, base: Sparse) -> Sparse | Permuted:
        """A record in the visible order of dimensions, from one in this tensor's stored order; with its extent."""
        if self._order is not None:
            return Permuted(base, self._order, self._extent)
        return base if self._extent is None else Sparse(base.values, base.pattern, self._extent)

    def storing(self, values: Tensor, validity: Tensor | None, pattern: Pattern) -> SparseMaskedTensor:
        """A cheap wrapper, without derivatives, for values of the same shape and device under another pattern."""
        return self._wrap_like_self(StoredPieces(values, validity, pattern))

    def detached(self) -> SparseMaskedTensor:
        """The same tensor without derivatives; it shares the stored tensors, so each shows the other's writes."""
        with inference_mode_of(self):
            wrapper = self._wrap_like_self(self._kept)
        wrapper._is_graph_input = self._is_graph_input
        wrapper._stands_for_a_view = self._stands_for_a_view
        return wrapper

    def _wrap_like_self(self, pieces: StoredPieces) -> SparseMaskedTensor:
        values = pieces.values
        wrapper: SparseMaskedTensor = make_wrapper_subclass(
            SparseInTransform if self._carries_transform else SparseMaskedTensor,
            self.shape,
            dtype=values.dtype,
            device=values.device,
            _extra_dispatch_keys=PRE_DISPATCH,
        )
        make_data_pointer_raise(wrapper)
        wrapper._kept, wrapper._order = pieces, self._order
        return with_extent(wrapper, self._extent)

    def share_memory_(self) -> MaskedTensor:
        """Move values, validity and index tensors to shared memory: other processes see writes to stored elements.

        From then on we refuse writes that would store other elements.
        """
        self._kept.share_with_processes()
        return self

    def is_shared(self) -> bool:
        """Whether the values lie in shared memory."""
        return self._kept.values.is_shared()

    @never_compiled
    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        flags = (self.requires_grad, getattr(self, "_is_param", False), self._order)
        return saved_as("sparse", self._kept, *flags, *parts_of_extent(self._extent))

    @property
    def _piece_0(self) -> Tensor:
        return self._pattern.pieces[0]

    @property
    def _piece_1(self) -> Tensor:
        return self._pattern.pieces[1]

    @never_compiled
    def __tensor_flatten__(self) -> tuple[list[str], Context]:  # type: ignore[override]
        # As for dense storage: no sizes, because the graph would guard on each; the registry's version.
        pattern = self._pattern
        names = ["_kept_values", *(["_kept_validity"] if self._kept_validity is not None else [])]
        names += ["_piece_0", "_piece_1"][: len(pattern.pieces)]
        if dynamo_is_loaded() and not being_traced(self._kept_values):
            self._mark_nnz_dynamic()
        keep_functions_whole(registry.version)
        version, known = registry.version + version_of(pattern.layout), None
        if self._extent is not None:
            _, known, of_extent = pieces_of(self)
            names += NAMES[: len(of_extent)]
        return names, (
            pattern.layout.name,
            pattern.ndim,
            pattern.block,
            self._order,
            version,
            densifying(),
            current_updates(),
            known,
        )

    def _mark_nnz_dynamic(self) -> None:
        """Mark nnz as dynamic: Dynamo flattens the tensor before it reads sizes, so the mark takes effect."""
        indices = self._pattern.pieces[-1]
        mark_dynamic(self._kept_values, 0)
        mark_dynamic(indices, indices.ndim - 1)
        if self._kept_validity is not None:
            mark_dynamic(self._kept_validity, 0)

    @staticmethod
    @never_compiled
    def __tensor_unflatten__(  # type: ignore[override]
        inner: dict[str, Tensor], context: Context, outer_size: torch.Size, outer_stride: tuple[int, ...]
    ) -> SparseMaskedTensor:
        layout, ndim, block, order, *_, known_of_extent = context
        sizes: Sequence[int] = outer_size
        values = inner["_kept_values"]
        pieces = tuple(inner[name] for name in ("_piece_0", "_piece_1") if name in inner)
        if order is not None:
            known = dict(enumerate(values.shape[3 if block else 1 :], start=ndim))
            if any({0, 1} <= set(group) for group in groups_of(order)):  # a packed batch (B · T, …)
                known[0] = pieces[0].shape[0] - 1
            sizes = base_shape_of(outer_size, order, known)
        pattern = Pattern(layout_named(layout), sizes[:ndim], pieces, block)
        stored = Sparse(Dense(values, inner.get("_kept_validity")), pattern)
        record = stored if order is None else Permuted(stored, order)
        # Use the given sizes: for merged dimensions, the record's sizes are expressions of these.
        wrapper = wrap_sparse(record, size=outer_size)
        if known_of_extent is not None:
            take_extent_from_graph(wrapper, known_of_extent, inner)
        if being_traced(values):
            prepare_for_tracing()
            torch._check(values.shape[0] == pieces[-1].shape[-1])  # gives the graph one symbol, not two
            for given, found in zip(outer_size, record.shape, strict=True):
                torch._check(given == found)
            wrapper._is_graph_input = True
        return wrapper

    @classmethod
    def __metadata_guard__(cls, expected: Context, actual: Context) -> bool:  # type: ignore[override]
        return expected[:-1] == actual[:-1] and serves(expected[-1], actual[-1])

    def __coerce_tangent_metadata__(self) -> SparseMaskedTensor:  # type: ignore[override]
        # Without an extent, so that nobody has to guess what a gradient knows of padding.
        if self._extent is None:
            return self
        plain = self.storing(*self._kept.now)
        plain._extent = None
        return plain

    def __coerce_same_metadata_as_tangent__(  # type: ignore[override]
        self, expected_meta: object, expected_type: type | None = None
    ) -> Tensor:
        if expected_type is None:  # the result is sparse
            known = self.__coerce_tangent_metadata__()
            if known.__tensor_flatten__()[1] != expected_meta:  # in another layout
                refuse_tangent(self)
            return known
        filled = self.to_tensor(0)
        return wrap(filled, None) if expected_type is MaskedTensor else filled

    def _stored_densely(self) -> MaskedTensor:
        return torch.ops.masked_dispatch.to_layout(self, DENSE, None, None)

    @never_compiled
    def __copy__(self) -> MaskedTensor:
        return self._with_flags_on(self.detached())

    def _copied(self, memo: dict[int, Any]) -> MaskedTensor:
        return self._with_flags_on(self._wrap_like_self(copy.deepcopy(self._kept, memo)))

    def _with_flags_on(self, wrapper: SparseMaskedTensor) -> SparseMaskedTensor:
        wrapper.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            wrapper._is_param = True  # type: ignore[attr-defined]
        return wrapper


class SparseInTransform(InTransform, SparseMaskedTensor):
    """A sparsely stored tensor made inside a functorch transform: its values carry the transform."""

    @property
    def _inner(self) -> tuple[Tensor | None, ...]:
        return self._kept_values, self._kept_validity, *self._pattern.pieces


def refuse_tangent(gradient: Tensor) -> NoReturn:
    """Raise for a gradient whose layout differs from that of its sparse result of a compiled region."""
    raise MaskedSemanticsError(tangent_stored_otherwise(gradient))


def wrap_sparse(
    record: Sparse | Permuted,
    requires_grad: bool = False,
    kind: type[SparseMaskedTensor] = SparseMaskedTensor,
    size: torch.Size | None = None,
) -> SparseMaskedTensor:
    """A masked tensor around a record (this checks, copies and differentiates nothing).

    size  the tensor's sizes; default: the record's
    """
    values = (record.base if isinstance(record, Permuted) else record).values.data
    check_stored_sparsely(values)
    try:
        wrapper: SparseMaskedTensor = make_wrapper_subclass(
            kind,
            record.shape if size is None else size,
            dtype=values.dtype,
            device=values.device,
            requires_grad=requires_grad,
            _extra_dispatch_keys=PRE_DISPATCH,
        )
    except (RuntimeError, TypeError):
        refuse_too_large(record.shape)
        raise
    make_data_pointer_raise(wrapper)
    extent = record.extent
    if isinstance(record, Permuted):
        wrapper._order, record = record.order, record.base
    validity = record.values.full_validity
    wrapper._kept = StoredPieces(values, None if validity is None else as_int8(validity), record.pattern)
    return with_extent(wrapper, extent)


def refuse_too_large(sizes: Sequence[int]) -> None:
    """Raise ValueError for sizes with more elements than torch can number, even if it would not store them all."""
    if all(type(size) is int for size in sizes) and math.prod(sizes) >= 2**63:
        raise ValueError(
            f"the result has sizes {tuple(sizes)}, {math.prod(sizes):,} elements, more than int64 can number, and "
            "torch makes no such tensor, stored sparsely or not: concatenate, repeat or expand less, or keep the parts "
            "in a list"
        )


@builder("sparse with all parts")
@never_compiled
def rebuild_sparse(
    values: Tensor,
    validity: Tensor | None,
    layout: str,
    sizes: tuple[int, ...],
    pieces: tuple[Tensor, ...],
    block: tuple[int, int] | None,
    requires_grad: bool,
    is_parameter: bool,
    order: tuple[int, ...] | None = None,
) -> SparseMaskedTensor:
    """Rebuild a sparsely stored tensor from a file of version 1.

    Raises ValueError if the arguments do not form a masked tensor.
    """
    stored = rebuild_stored(values, validity, layout, sizes, pieces, block)
    return rebuild_sparse_of(stored, requires_grad, is_parameter, order)


@builder("stored")
@never_compiled
def rebuild_stored(
    values: Tensor,
    validity: Tensor | None,
    layout: str,
    sizes: tuple[int, ...],
    pieces: tuple[Tensor, ...],
    block: tuple[int, int] | None,
) -> StoredPieces:
    """Rebuild the storage, which a file holds once for all tensors that share it."""
    stored = stored_around(values, validity, layout, sizes, pieces, block)
    full = Dense(values, own(validity)).full_validity
    return StoredPieces(values, full, stored.pattern.with_pieces(tuple(map(own, pieces))))


def stored_around(
    values: Tensor,
    validity: Tensor | None,
    layout: str,
    sizes: tuple[int, ...],
    pieces: tuple[Tensor, ...],
    block: tuple[int, int] | None,
) -> StoredPieces:
    """The same, without copying these tensors."""
    check_saved(problem_of_stored(values, validity, layout, sizes, pieces, block, MaskedTensor))
    return StoredPieces(values, validity, Pattern(layout_named(layout), sizes, pieces, block))


@builder("sparse")
@never_compiled
def rebuild_sparse_of(
    stored: StoredPieces, requires_grad: bool, is_parameter: bool, order: tuple[int, ...] | None, extent: Any = None
) -> SparseMaskedTensor:
    """Rebuild a sparsely stored tensor from a file. Raises ValueError if the arguments do not fit."""
    if not isinstance(stored, StoredPieces):
        check_saved(f"the type of what it stores is {type(stored).__name__}")
    record = Sparse(Dense(stored.values, stored.validity), stored.pattern)
    check_saved(problem_of_wrapper(stored.values, record.ndim, requires_grad, is_parameter, order))
    tensor = wrap_sparse(record if order is None else Permuted(record, order), requires_grad)
    if is_parameter:
        tensor._is_param = True  # type: ignore[attr-defined]
    tensor._kept, tensor._extent = stored, saved_extent(tensor, extent, MaskedTensor)
    if extent is not None:
        check_saved(problem_of_places(tensor.record))
    return tensor


def stored_parts(stored: StoredPieces) -> tuple[Any, ...]:
    """The storage, as the arguments of :func:`rebuild_stored`."""
    values, validity, pattern = stored.now
    return values, validity, pattern.layout.name, pattern.sizes, pattern.pieces, pattern.block


@never_compiled
def _reduce_stored(stored: StoredPieces) -> Any:
    return saved_as("stored", *stored_parts(stored))


copyreg.pickle(StoredPieces, _reduce_stored)
