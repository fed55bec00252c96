"""Products of stored elements with rows of a dense matrix, and the derivatives of them.

Of stored elements it is known in which row and in which column each is. Then

    multiply   (rows, n) = Σ over the elements of a row: element · dense[its column]
    sample     (stored,) = left[its row] · right[its column], summed

and each is the derivative of the other: of every order, without the (stored × n) table that plain indexing would make.
In a graph the compiler fuses that table away, and plain indexing it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry.records.dtypes import accumulation_dtype
from op_registry.records.tracing import computed_at_once

aten = torch.ops.aten

# What torch's kernels for sums of rows and for sampled products take; everything else goes by plain indexing.
_BY_ROWS = (torch.float32, torch.float64)


class RowColumn:
    """Where the stored elements of a matrix are, in the order of its rows.

    row, column  of every stored element as it is stored, int64 (stored,)
    rows         how many rows there are
    columns      how many columns

    `in_order`: they are stored row by row. `ends`, where it is known: see :meth:`by_row`.
    """

    def __init__(
        self, row: Tensor, column: Tensor, rows: int, columns: int, *, in_order: bool, ends: Tensor | None = None
    ) -> None:
        self.row, self.column, self.rows, self.columns = row, column, rows, columns
        self._in_order = in_order
        self._ends = ends
        self._sorted: tuple[Tensor | None, Tensor] | None = None
        self._transposed: RowColumn | None = None

    @property
    def transposed(self) -> RowColumn:
        if self._transposed is None:
            self._transposed = RowColumn(self.column, self.row, self.columns, self.rows, in_order=False)
            self._transposed._transposed = self
        return self._transposed

    def by_row(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """The elements row by row.

        order    the permutation that sorts them so, None where they are
        columns  int64 (stored,), in that order
        ends     int64 (rows + 1,): where the elements of each row begin and end, in that order
        """
        if self._sorted is None:
            order = None if self._in_order else self.row.argsort(stable=True)
            self._sorted = (order, self.column if order is None else self.column[order])
        if self._ends is None:
            counts = torch.zeros(self.rows + 1, dtype=torch.int64, device=self.row.device)
            self._ends = counts.scatter_add(0, self.row + 1, torch.ones_like(self.row)).cumsum(0)
        return (*self._sorted, self._ends)


def spmm(values: Tensor, dense: Tensor, placed: RowColumn) -> Tensor:
    """(rows, n) of values (stored,) and dense (columns, n), of one dtype; differentiable as often as is wished."""
    if not _has_kernel(values, dense):
        wide = accumulation_dtype(values.dtype)
        terms = values.to(wide).unsqueeze(1) * dense.to(wide).index_select(0, placed.column)
        return terms.new_zeros((placed.rows, dense.shape[1])).index_add(0, placed.row, terms).to(values.dtype)
    result: Tensor = _Multiply.apply(values, dense, placed)
    return result


def sddmm(left: Tensor, right: Tensor, placed: RowColumn) -> Tensor:
    """(stored,) of left (rows, n) and right (columns, n), of one dtype; differentiable as often as is wished."""
    if not _has_kernel(left, right):
        wide = accumulation_dtype(left.dtype)
        terms = left.to(wide).index_select(0, placed.row) * right.to(wide).index_select(0, placed.column)
        return terms.sum(1).to(left.dtype)
    result: Tensor = _Sample.apply(left, right, placed)
    return result


def _has_kernel(*factors: Tensor) -> bool:
    fits = all(t.dtype in _BY_ROWS and t.device.type == "cpu" for t in factors)
    return fits and computed_at_once(*factors)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dense: Tensor, placed: RowColumn) -> Tensor:
        ctx.save_for_backward(values, dense)
        ctx.save_for_forward(values, dense)
        ctx.placed = placed
        if 0 in (values.shape[0], placed.rows, dense.shape[1]):
            return dense.new_zeros((placed.rows, dense.shape[1]))
        order, columns, ends = placed.by_row()
        # torch's sum of embeddings is a product with a sparse matrix by another name, and twice as fast as that.
        weights = values if order is None else values[order]
        result: Tensor = aten._embedding_bag_forward_only(
            dense.contiguous(), columns, ends, False, 0, False, weights.contiguous(), True
        )[0]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        values, dense = ctx.saved_tensors
        of_values = sddmm(grad, dense, ctx.placed) if ctx.needs_input_grad[0] else None
        of_dense = spmm(values, grad, ctx.placed.transposed) if ctx.needs_input_grad[1] else None
        return of_values, of_dense, None

    @staticmethod
    def jvp(ctx: Any, of_values: Tensor | None, of_dense: Tensor | None, _: Any) -> Any:
        return _both(spmm, of_values, of_dense, ctx)


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, placed: RowColumn) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.save_for_forward(left, right)
        ctx.placed = placed
        stored = placed.row.shape[0]
        if 0 in (stored, placed.rows, placed.columns, left.shape[1]):
            return left.new_zeros(stored)
        # The derivative of that sum of embeddings by its weights; in any order.
        result: Tensor = aten._embedding_bag_per_sample_weights_backward(
            left.contiguous(), right.contiguous(), placed.column, placed.column[:1], placed.row, 0
        )
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        left, right = ctx.saved_tensors
        of_left = spmm(grad, right, ctx.placed) if ctx.needs_input_grad[0] else None
        of_right = spmm(grad, left, ctx.placed.transposed) if ctx.needs_input_grad[1] else None
        return of_left, of_right, None

    @staticmethod
    def jvp(ctx: Any, of_left: Tensor | None, of_right: Tensor | None, _: Any) -> Any:
        return _both(sddmm, of_left, of_right, ctx)


def _both(product: Any, of_first: Tensor | None, of_second: Tensor | None, ctx: Any) -> Any:
    """The derivative of a product of two: of the one, times the other, and the other way round."""
    first, second = ctx.saved_tensors
    terms = [product(of_first, second, ctx.placed)] if of_first is not None else []
    terms += [product(first, of_second, ctx.placed)] if of_second is not None else []
    return sum(terms[1:], terms[0])
