"""Methods that store the same tensor in another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.tensor.conversions import converted
from masked_dispatch.tensor.fills import checked_fill
from masked_dispatch.tensor.layout_checks import check_layout, check_torch_sparse, sparse_dims_beside
from op_registry.records.dims import Number
from op_registry.sparse.layout import Layout

if TYPE_CHECKING:
    from masked_dispatch.tensor.masked_tensor import MaskedTensor


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
