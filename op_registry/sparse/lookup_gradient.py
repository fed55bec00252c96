"""Gradients of a table of which rows were looked up: the rows alone, merged and in order.

Law: what duplicate look-ups contribute to a row is accumulated, in the order in which they come, half precision in
float32 and rounded once. A row is there if a look-up that counts has asked for it.

This is the one place where a plain tensor's gradient is masked, because torch's own would be sparse. How a record
becomes a tensor is not known here: the layer that knows the tensor says so once, by `set_wrapper`. On bare records, and
where a graph is traced or a transform runs, gradients are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced, under_transform
from op_registry.sparse.coalesce import merge_duplicates
from op_registry.sparse.layout import COO
from op_registry.sparse.pattern import Pattern
from op_registry.sparse.record import Sparse

aten = torch.ops.aten

_wrapper: Callable[[Sparse], Tensor] | None = None


def set_wrapper(closer: Callable[[Sparse], Tensor]) -> None:
    """Let the layer that knows the tensor make one of a record."""
    global _wrapper
    _wrapper = closer


def gradient_can_be_sparse(table: Tensor, index: Tensor) -> bool:
    """Whether a gradient that may be asked of `table` can be made of the rows that `index` has asked for."""
    return (
        _wrapper is not None
        and torch.is_grad_enabled()
        and table.requires_grad
        and not being_traced(table)
        and not being_traced(index)
        and not under_transform()
    )


def rows_record(listed: Tensor, values: Tensor, rows: int) -> Sparse:
    """The record of a tensor of `rows` rows, of which those `listed` (distinct, ascending) are there."""
    return Sparse(Dense(values), Pattern(COO, (rows,), (listed.unsqueeze(0),)))


class Lookup(torch.autograd.Function):
    """`table[rows]`, whose gradient is the rows that counted: a backward of its own, since torch's cannot say which."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, counted: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, counted)
        ctx.rows = table.shape[0]
        return aten.embedding(table, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        assert _wrapper is not None
        rows, counted = ctx.saved_tensors
        return _wrapper(rows_record(*merge_duplicates(rows, grad, counted), ctx.rows)), None, None
