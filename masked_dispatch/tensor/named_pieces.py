"""Methods that return the stored values and index tensors of sparse storage as plain tensors, under torch's names.

    COO       values()  indices()
    CSR, BSR  values()  crow_indices()  col_indices()
    CSC, BSC  values()  ccol_indices()  row_indices()
    packed    values()  offsets()       lengths()      col_indices(): the position of each row in its sequence

These list each element once and in order: `is_coalesced()` of COO is True.

Unlike in torch's sparse tensors, a stored value may be invalid (in a block, or in dense dimensions): `values()` then
needs a fill.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.tensor.fills import checked_fill
from op_registry.records.dims import Number


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
