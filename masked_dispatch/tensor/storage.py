"""What sparse storage stores: the tensors that copies share, their names, and other storage for the same tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.tensor.arguments import check_layout, check_torch_sparse, checked_fill, sparse_dims_beside
from op_registry.records.arguments import Number
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent
from op_registry.records.tracing import savable
from op_registry.sparse.layout import DENSE, Layout, layout_named
from op_registry.sparse.record import Pattern

if TYPE_CHECKING:
    from masked_dispatch.tensor.masked_tensor import MaskedTensor


class Stored(NamedTuple):
    """A consistent state of the storage: values, int8 validity (None: all are valid) and pattern."""

    values: Tensor
    validity: Tensor | None
    pattern: Pattern


class StoredPieces:
    """The storage that a tensor shares with its detached copies, so that a write to one is visible in all.

    A write replaces `now` as a whole, so other tensors may hold the old state, and no reader sees parts of two writes.
    If `in_place`, other processes share the memory: a write then changes values and validity in place, and readers get
    copies. `extent_written` holds the extent of all these tensors, once a write has changed it.
    """

    __slots__ = ("__weakref__", "extent_written", "in_place", "now")

    def __init__(self, values: Tensor, validity: Tensor | None, pattern: Pattern) -> None:
        self.now = Stored(values, validity, pattern)
        self.in_place = False
        self.extent_written: tuple[Extent | None] | None = None

    @property
    def values(self) -> Tensor:
        return self.now.values

    @property
    def validity(self) -> Tensor | None:
        return self.now.validity

    @property
    def pattern(self) -> Pattern:
        return self.now.pattern

    def copied(self) -> Stored:
        """The present state, for a reader to keep."""
        values, validity, pattern = self.now
        if not self.in_place:
            return self.now
        return Stored(values.clone(), None if validity is None else validity.clone(), pattern)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredPieces:
        values, validity, pattern = self.now
        pattern = pattern.with_pieces(tuple(piece.clone() for piece in pattern.pieces))
        return StoredPieces(values.clone(), None if validity is None else validity.clone(), pattern)

    def make_savable(self) -> None:
        """Replace pieces that autograd cannot save for backward; see :func:`op_registry.records.tracing.savable`."""
        values, validity, pattern = self.now
        stored = pattern.pieces if validity is None else (validity, *pattern.pieces)
        if not any(map(Tensor.is_inference, stored)):
            return
        pieces = tuple(savable(piece) for piece in pattern.pieces)
        changed = any(new is not old for new, old in zip(pieces, pattern.pieces, strict=True))
        savable_validity = None if validity is None else savable(validity)
        if changed or savable_validity is not validity:
            self.now = Stored(values, savable_validity, pattern.with_pieces(pieces) if changed else pattern)

    def share_with_processes(self) -> None:
        """Move everything, with a full validity, to shared memory; from now on, writes change it in place."""
        if not self.in_place:
            values = self.values.clone()  # other tensors may hold the present values
            full = Dense(values, self.validity).full_validity
            ones = torch.ones_like(values, dtype=torch.int8)
            self.now = Stored(values, ones if full is None else ones & full, self.pattern)
            self.in_place = True
        for piece in (self.values, self.validity, *self.pattern.pieces):
            assert piece is not None
            piece.share_memory_()

    def write_in_place(self, found: Dense) -> None:
        """Overwrite values and validity in place; an element becomes valid only after the write of its value."""
        assert self.validity is not None
        validity = found.full_validity
        if validity is not None:
            self.validity.mul_(validity)
        self.values.copy_(found.data.expand(self.values.shape))
        self.validity.copy_(torch.ones_like(self.validity) if validity is None else validity)


# ------------------------------------------------------------------------------- the stored tensors under torch's names


class NamedPieces(Tensor):
    """The accessors. Each raises MaskedSemanticsError if the storage has no such tensor.

    Index tensors have torch's shapes, and may share the tensor's memory: do not write to them.
    """

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored values, validity and index tensors; expanded dimensions count once."""
        stored = [(t.itemsize, zip(t.shape, t.stride(), strict=True)) for t in self._stored_tensors]
        return sum(itemsize * math.prod(size for size, stride in sizes if stride) for itemsize, sizes in stored)

    @property
    def _stored_tensors(self) -> list[Tensor]:
        raise NotImplementedError

    @never_compiled
    def values(self, fill: Number | None = None) -> Tensor:
        """The stored values in torch's shape for the layout, such as (nnz, *dense), a copy; differentiable.

        fill  replaces stored values that are invalid, in blocks or dense dimensions; None: they are an error

        Raises InvalidValueError for invalid values without a `fill`.
        """
        return torch.ops.masked_dispatch.stored_values(self, None if fill is None else checked_fill(self, fill))

    @never_compiled
    def indices(self) -> Tensor:
        """COO: the index of each stored element in each sparse dimension, int64 of shape (sparse dimensions, nnz)."""
        return torch.ops.masked_dispatch.stored_indices(self, "indices")

    @never_compiled
    def crow_indices(self) -> Tensor:
        """CSR, BSR: where each row starts and ends among the stored elements or blocks, (*batch, rows + 1)."""
        return torch.ops.masked_dispatch.stored_indices(self, "crow_indices")

    @never_compiled
    def col_indices(self) -> Tensor:
        """CSR, BSR, packed: the column of each stored element, block or row, (*batch, nnz)."""
        return torch.ops.masked_dispatch.stored_indices(self, "col_indices")

    @never_compiled
    def ccol_indices(self) -> Tensor:
        """CSC, BSC: where each column starts and ends among the stored elements or blocks, (*batch, columns + 1)."""
        return torch.ops.masked_dispatch.stored_indices(self, "ccol_indices")

    @never_compiled
    def row_indices(self) -> Tensor:
        """CSC, BSC: the row of each stored element or block, (*batch, nnz)."""
        return torch.ops.masked_dispatch.stored_indices(self, "row_indices")

    @never_compiled
    def offsets(self) -> Tensor:
        """Packed: where each sequence starts and ends among the stored rows, (B + 1)."""
        return torch.ops.masked_dispatch.stored_indices(self, "offsets")

    @never_compiled
    def lengths(self) -> Tensor:
        """Packed: the number of stored rows of each sequence, (B)."""
        return torch.ops.masked_dispatch.stored_indices(self, "lengths")

    @never_compiled
    def is_coalesced(self) -> bool:
        """COO: True, as each element is listed once. Raises RuntimeError elsewhere, as torch does."""
        return self._listed_once("is_coalesced")

    @never_compiled
    def coalesce(self) -> Tensor:
        """COO: the tensor itself, as each element is listed once. Raises RuntimeError elsewhere, as torch does."""
        self._listed_once("coalesce")
        return self

    def _listed_once(self, asked: str) -> bool:
        layout = self.storage_layout
        if layout is torch.sparse_coo:
            return True
        name = "".join(part.title() for part in str(layout).removeprefix("torch.").split("_"))
        raise RuntimeError(
            f"{asked} expected sparse coordinate tensor layout but got {name}, of a masked tensor of shape "
            f"{tuple(self.shape)}"
        )

    @property
    def storage_layout(self) -> object:
        raise NotImplementedError


# -------------------------------------------------------------------------------------------------------- other storage


class Conversions(Tensor):
    """Conversions of a masked tensor between storages."""

    def to_layout(
        self, layout: torch.layout | Layout, *, sparse_dim: int | None = None, blocksize: Sequence[int] | None = None
    ) -> MaskedTensor:
        """The same tensor in another storage layout; differentiable.

        layout      torch.strided, one of torch's five sparse layouts, torch.jagged: packed (see :meth:`to_packed`), or
                    a layout of your own (docs/add-a-storage.md)
        sparse_dim  number of leading sparse dimensions (default: all; packed: 2); the others are dense
        blocksize   rows and columns of a block, for sparse_bsr and sparse_bsc

        A 0-d tensor stays dense for torch.sparse_coo.

        Raises ValueError for a layout, a number of dimensions or a block size that does not fit the shape.
        """
        if layout is torch.sparse_coo and not self.ndim and not sparse_dim and blocksize is None:
            return self  # type: ignore[return-value]
        name = check_layout(self, layout, sparse_dim, blocksize)
        if blocksize is not None and sparse_dim is None:
            sparse_dim = self.ndim  # whatever its present layout
        return converted("to_layout", self, name, sparse_dim, blocksize, layout=name, block=blocksize)

    def to_sparse(  # type: ignore[override]
        self,
        sparse_dim: int | None = None,
        *,
        layout: torch.layout | Layout | None = None,
        blocksize: Sequence[int] | None = None,
        dense_dim: int | None = None,
    ) -> MaskedTensor:
        """The valid elements in COO storage, or in `layout`; see :meth:`to_layout`."""
        dims = sparse_dim if dense_dim is None else sparse_dims_beside(self, dense_dim)
        return self.to_layout(layout or torch.sparse_coo, sparse_dim=dims, blocksize=blocksize)

    def to_sparse_csr(self, dense_dim: int | None = None) -> MaskedTensor:
        """The valid elements by rows; see :meth:`to_layout`."""
        return self.to_layout(torch.sparse_csr, sparse_dim=sparse_dims_beside(self, dense_dim))

    def to_sparse_csc(self, dense_dim: int | None = None) -> MaskedTensor:
        """The valid elements by columns; see :meth:`to_layout`."""
        return self.to_layout(torch.sparse_csc, sparse_dim=sparse_dims_beside(self, dense_dim))

    def to_sparse_bsr(  # type: ignore[override]
        self, blocksize: Sequence[int], dense_dim: int | None = None
    ) -> MaskedTensor:
        """Blocks with valid elements, by rows of blocks; see :meth:`to_layout`."""
        return self.to_layout(torch.sparse_bsr, sparse_dim=sparse_dims_beside(self, dense_dim), blocksize=blocksize)

    def to_sparse_bsc(  # type: ignore[override]
        self, blocksize: Sequence[int], dense_dim: int | None = None
    ) -> MaskedTensor:
        """Blocks with valid elements, by columns of blocks; see :meth:`to_layout`."""
        return self.to_layout(torch.sparse_bsc, sparse_dim=sparse_dims_beside(self, dense_dim), blocksize=blocksize)

    def to_packed(self) -> MaskedTensor:
        """A padded batch (B, T, …) without its padding, one sequence after another; see :meth:`to_layout`.

        It stores a row (b, t) if the batch has that position; without an extent, if any of the row's elements is valid,
        and these rows are what is there from then on. Operators on rows (linear, norms, activations, dropout,
        embeddings, losses) then run on the stored rows only, and attention runs one sequence at a time; see
        docs/packed-models.md. A mask inside a stored row marks its invalid elements. `x.to_dense()` restores the
        padding.
        """
        return self.to_layout(torch.jagged)

    def to_dense(self, dtype: torch.dtype | None = None, *, masked_grad: bool | None = None) -> MaskedTensor:  # type: ignore[override]
        """The same tensor in dense storage."""
        dense = self.to_layout(torch.strided)
        return dense if dtype is None else dense.to(dtype)  # type: ignore[return-value]

    @never_compiled
    def to_torch_sparse(
        self,
        fill: Number | Tensor | None = None,
        *,
        layout: torch.layout | None = None,
        sparse_dim: int | None = None,
        blocksize: Sequence[int] | None = None,
    ) -> Tensor:
        """A torch.sparse tensor that specifies the valid elements, including zeros; differentiable.

        fill    replaces invalid elements inside blocks or dense dimensions; None: they are an error
        layout  one of torch's five sparse layouts; None: the current one, COO for dense storage
        sparse_dim, blocksize  as for :meth:`to_layout`

        Raises ValueError for invalid elements in blocks without a `fill`, and for batches of a compressed layout that
        store different numbers of values, which torch cannot represent.
        """
        name = None if layout is None else check_torch_sparse(layout)
        if fill is not None:
            fill = checked_fill(self, fill)
        return torch.ops.masked_dispatch.to_torch_sparse(self, fill, name, sparse_dim, blocksize)


# -------------------------------------------------------------------------- as torch.export and torch.compile record it


def converted(operator: str, *args: Any, layout: str, block: Sequence[int] | None) -> Any:
    """The result of ``torch.ops.masked_dispatch.<operator>``, with the shape of the first argument, in a layout.

    In a graph the number of stored elements is a new symbol. torch binds it to the result; for an inner tensor of a
    masked tensor it does so by an attribute, which torch's verifier of exported programs refuses. In an export the
    operator therefore returns plain tensors, and another operator makes the masked tensor from them.
    """
    operators = torch.ops.masked_dispatch
    if layout == DENSE or not torch.compiler.is_exporting():
        return getattr(operators, operator)(*args)
    values, *tensors = getattr(operators, f"{operator}_pieces")(*args)
    pieces = len(layout_named(layout).piece_dims)
    dense_dims = values.ndim - (1 if block is None else 3)
    validity = tensors[pieces] if len(tensors) > pieces else None
    shape = args[0].shape
    sizes = shape[: len(shape) - dense_dims]
    return operators.from_stored(values, validity, tensors[:pieces], layout, sizes, block, None)
