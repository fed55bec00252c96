"""The wrapper of sparse storage: values and a pattern in place of data and a validity."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from masked_dispatch.densify_policy import Policy, current
from masked_dispatch.tensor.in_transform import InTransform
from masked_dispatch.tensor.indexing import as_index_tensors
from masked_dispatch.tensor.masked_tensor import MaskedTensor, inference_mode_of, wrap
from masked_dispatch.tensor.messages import tangent_stored_otherwise
from masked_dispatch.tensor.saved import check_saved, problem_of_sparse
from masked_dispatch.torch_internals import (
    PRE_DISPATCH,
    dynamo_is_loaded,
    make_data_pointer_raise,
    make_wrapper_subclass,
    mark_dynamic,
    never_compiled,
    prepare_for_tracing,
    print_options,
)
from op_registry import MaskedSemanticsError, registry
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced, savable
from op_registry.sparse.layout import DENSE, Layout, layout_named, version_of
from op_registry.sparse.pattern import Pattern
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import Sparse

# What a compiled graph relies on: the layout's name, how many dimensions are sparse, the block size, the order in which
# dimensions are seen, the rules (and somebody's layout), and what may be stored densely.
Context = tuple[str, int, tuple[int, int] | None, tuple[int, ...] | None, str, Policy]


def needs_dense_storage(tensor: SparseMaskedTensor) -> MaskedSemanticsError:
    """The refusal for what reads a tensor's data as a whole: dispatch takes sparse storage another way."""
    return MaskedSemanticsError(
        f"a masked tensor of shape {tuple(tensor.shape)} is stored as {tensor.storage_layout}, and only "
        "dense storage is supported here yet: use x.to_dense()"
    )


class StoredPieces:
    """What is stored, shared by a tensor and what was detached from it: a write to one is a write to both."""

    __slots__ = ("pattern", "validity", "values")

    def __init__(self, values: Tensor, validity: Tensor | None, pattern: Pattern) -> None:
        self.values, self.validity, self.pattern = values, validity, pattern

    def make_savable(self) -> None:
        """Let a backward save what says where the values are: see :func:`op_registry.records.dense.savable`."""
        pattern = self.pattern
        pieces = tuple(savable(piece) for piece in pattern.pieces)
        if any(new is not old for new, old in zip(pieces, pattern.pieces, strict=True)):
            self.pattern = pattern.with_pieces(pieces)
        if self.validity is not None:
            self.validity = savable(self.validity)


class SparseMaskedTensor(MaskedTensor):
    """A masked tensor of which only some elements are stored; the others are invalid."""

    _kept: StoredPieces
    # Whether a graph that is being traced was given this: what it stores cannot be exchanged.
    _is_graph_input = False
    # Where dense dimensions are seen before sparse ones: which dimension of what is stored each is (turned.py).
    _order: tuple[int, ...] | None = None

    @property
    def _kept_values(self) -> Tensor:
        # As the pattern lists them. They never require grad: the wrapper carries autograd.
        return self._kept.values

    # The setters are for AOTAutograd, which lays out anew what repeats elements in memory in a tangent that it traces.
    @_kept_values.setter
    def _kept_values(self, values: Tensor) -> None:
        self._kept = StoredPieces(values, self._kept.validity, self._kept.pattern)

    @property
    def _kept_validity(self) -> Tensor | None:
        # int8, 1 where a stored value is valid; None where all are.
        return self._kept.validity

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

    def __setitem__(self, index: Any, value: Any) -> None:
        at = (
            as_index_tensors(index, self.shape, self.device)
            if isinstance(value, (Tensor, int, float, complex))
            else None
        )
        if at is None:
            super().__setitem__(index, value)
            return
        value = torch.as_tensor(value).to(self)
        meshed = torch.broadcast_shapes(*(p.shape for p in at))
        while value.ndim > len(meshed) + self.ndim - len(at) and value.shape[0] == 1:
            value = value[0]  # as torch has it for a view
        self.index_put_(at, value)

    def _body_and_facts(self) -> list[str]:
        stored = f"stored as {self.storage_layout}, nnz={self.nnz}"
        if being_traced(self._kept_values) or self.numel() > print_options().threshold:
            return ["...", f"size={tuple(self.shape)}", stored, f"dtype={self.dtype}", "True=valid"]
        with torch.no_grad():
            return [*self.to_layout(torch.strided)._body_and_facts(), stored]

    def _facts_of_autograd(self) -> list[str]:
        return []

    @property
    def nnz(self) -> int:
        """Number of stored elements of the sparse dimensions; of blocks, every element of each."""
        return self._pattern.stored

    @property
    def storage_layout(self) -> torch.layout | Layout:
        """How the values are stored, whatever `layout` says."""
        return self._pattern.layout.public

    @property
    def record(self) -> Sparse | Permuted:
        """What is stored, without derivatives."""
        return self.seen(Sparse(Dense(self._kept_values, self._kept_validity), self._pattern))

    def seen(self, base: Sparse) -> Sparse | Permuted:
        """Something stored in the order in which it is stored here, in the order in which its dimensions are seen."""
        return base if self._order is None else Permuted(base, self._order)

    def replace_record(self, record: Sparse | Permuted) -> None:
        """Store something else of the same shape, seen in the same order."""
        base = record.base if isinstance(record, Permuted) else record
        kept = self._kept
        kept.values, kept.validity, kept.pattern = base.values.data, base.values.full_validity, base.pattern

    def storing(self, values: Tensor, validity: Tensor | None) -> SparseMaskedTensor:
        """Other values of the same shape and device in the same places, without derivatives: the short way to wrap."""
        return self._beside(StoredPieces(values, validity, self._pattern))

    def detached(self) -> SparseMaskedTensor:
        """The same tensor without derivatives; it stores what this one does, also after a write."""
        with inference_mode_of(self):
            wrapper = self._beside(self._kept)
        wrapper._is_graph_input = self._is_graph_input
        wrapper._stands_for_a_view = self._stands_for_a_view
        return wrapper

    def _beside(self, kept: StoredPieces) -> SparseMaskedTensor:
        values = kept.values
        wrapper: SparseMaskedTensor = make_wrapper_subclass(
            SparseInTransform if self._carries_transform else SparseMaskedTensor,
            self.shape,
            dtype=values.dtype,
            device=values.device,
            _extra_dispatch_keys=PRE_DISPATCH,
        )
        make_data_pointer_raise(wrapper)
        wrapper._kept, wrapper._order = kept, self._order
        return wrapper

    def share_memory_(self) -> MaskedTensor:
        """Move all that is stored to shared memory, in place."""
        for piece in (self._kept_values, self._kept_validity, *self._pattern.pieces):
            if piece is not None:
                piece.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the values lie in shared memory."""
        return self._kept_values.is_shared()

    @never_compiled
    def __reduce_ex__(self, protocol: Any) -> Any:
        pattern = self._pattern
        stored = (
            self._kept_values,
            self._kept_validity,
            pattern.layout.name,
            pattern.sizes,
            pattern.pieces,
            pattern.block,
        )
        return rebuild_sparse, (*stored, self.requires_grad, getattr(self, "_is_param", False), self._order)

    @property
    def _piece_0(self) -> Tensor:
        return self._pattern.pieces[0]

    @property
    def _piece_1(self) -> Tensor:
        return self._pattern.pieces[1]

    @never_compiled
    def __tensor_flatten__(self) -> tuple[list[str], Context]:  # type: ignore[override]
        # As for dense storage: no sizes, each of which would be guarded on, and the registry's version.
        pattern = self._pattern
        names = ["_kept_values", *(["_kept_validity"] if self._kept_validity is not None else [])]
        names += ["_piece_0", "_piece_1"][: len(pattern.pieces)]
        if dynamo_is_loaded() and not being_traced(self._kept_values):
            self._let_nnz_change()
        version = registry.version + version_of(pattern.layout)
        return names, (pattern.layout.name, pattern.ndim, pattern.block, self._order, version, current())

    def _let_nnz_change(self) -> None:
        """Tell Dynamo, which asks for the pieces before it looks at their sizes, that the number stored will change."""
        stored = [self._kept_values, self._pattern.pieces[-1]]
        if self._kept_validity is not None:
            stored.append(self._kept_validity)
        for piece in stored:
            mark_dynamic(piece, 0 if piece is not stored[1] else piece.ndim - 1)

    @staticmethod
    @never_compiled
    def __tensor_unflatten__(  # type: ignore[override]
        inner: dict[str, Tensor], context: Context, outer_size: Any, outer_stride: Any
    ) -> SparseMaskedTensor:
        layout, ndim, block, order, *_ = context
        sizes = outer_size if order is None else [outer_size[order.index(d)] for d in range(len(order))]
        values = inner["_kept_values"]
        pieces = tuple(inner[name] for name in ("_piece_0", "_piece_1") if name in inner)
        pattern = Pattern(layout_named(layout), sizes[:ndim], pieces, block)
        stored = Sparse(Dense(values, inner.get("_kept_validity")), pattern)
        wrapper = wrap_sparse(stored if order is None else Permuted(stored, order))
        if being_traced(values):
            prepare_for_tracing()
            torch._check(values.shape[0] == pieces[-1].shape[-1])  # one number for the graph, not two
            wrapper._is_graph_input = True
        return wrapper

    @classmethod
    def __metadata_guard__(cls, expected: Context, actual: Context) -> bool:  # type: ignore[override]
        return expected == actual

    def __coerce_tangent_metadata__(self) -> SparseMaskedTensor:  # type: ignore[override]
        return self

    def __coerce_same_metadata_as_tangent__(  # type: ignore[override]
        self, expected_meta: Any, expected_type: type | None = None
    ) -> Tensor:
        if expected_type is None:  # stored sparsely, but otherwise
            refuse_tangent(self)
        filled = self.to_tensor(0)
        return wrap(filled, None) if expected_type is MaskedTensor else filled

    def _stored_densely(self) -> MaskedTensor:
        return torch.ops.masked_dispatch.to_layout(self, DENSE, None, None)

    @never_compiled
    def __copy__(self) -> MaskedTensor:
        return rebuilt_sparse(self.record, self.requires_grad, getattr(self, "_is_param", False))

    def _copied(self) -> MaskedTensor:
        validity = None if self._kept_validity is None else self._kept_validity.clone()
        pattern = self._pattern
        pieces = tuple(piece.clone() for piece in pattern.pieces)
        record = Sparse(Dense(self._kept_values.clone(), validity), pattern.with_pieces(pieces))
        return rebuilt_sparse(self.seen(record), self.requires_grad, getattr(self, "_is_param", False))


class SparseInTransform(InTransform, SparseMaskedTensor):
    """A sparsely stored tensor made inside a functorch transform: its values carry the transform."""

    @property
    def _inner(self) -> tuple[Tensor | None, ...]:
        return self._kept_values, self._kept_validity, *self._pattern.pieces


def refuse_tangent(found: Tensor) -> NoReturn:
    """What a compiled region's sparse result got as gradient cannot be laid out as the result is."""
    raise MaskedSemanticsError(tangent_stored_otherwise(found))


def wrap_sparse(
    record: Sparse | Permuted, requires_grad: bool = False, kind: type[SparseMaskedTensor] = SparseMaskedTensor
) -> SparseMaskedTensor:
    """A masked tensor of a record as it is (nothing is checked, copied or differentiated)."""
    wrapper: SparseMaskedTensor = make_wrapper_subclass(
        kind,
        record.shape,
        dtype=record.dtype,
        device=record.device,
        requires_grad=requires_grad,
        _extra_dispatch_keys=PRE_DISPATCH,
    )
    make_data_pointer_raise(wrapper)
    if isinstance(record, Permuted):
        wrapper._order, record = record.order, record.base
    wrapper._kept = StoredPieces(record.values.data, record.values.full_validity, record.pattern)
    return wrapper


def rebuilt_sparse(record: Sparse | Permuted, requires_grad: bool, is_parameter: bool) -> SparseMaskedTensor:
    """A masked tensor of a record, a parameter where that is what it is (nothing is checked)."""
    wrapper = wrap_sparse(record, requires_grad)
    if is_parameter:
        wrapper._is_param = True  # type: ignore[attr-defined]
    return wrapper


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
    """What pickle and torch.load call (format 1: the arguments). Raises ValueError where they do not fit each other."""
    saved = (values, validity, layout, sizes, pieces, block, requires_grad, is_parameter, order)
    check_saved(problem_of_sparse(*saved, MaskedTensor))
    pattern = Pattern(layout_named(layout), sizes, pieces, block)
    stored = Sparse(Dense(values, validity), pattern)
    return rebuilt_sparse(stored if order is None else Permuted(stored, order), requires_grad, is_parameter)


torch.serialization.add_safe_globals([rebuild_sparse])
