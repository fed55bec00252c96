"""Sparse gradients of embedding tables: the rows that were looked up, sorted and with duplicates merged.

Law: contributions of duplicate look-ups to a row are accumulated in the order of the look-ups, half precision in
float32 and rounded once. A row is stored if a look-up that counts selects it.

Only here does a plain tensor get a masked gradient, because torch's own would be sparse. This module does not know how
a record becomes a tensor; the layer that does registers a function for it with `set_wrapper`. On bare records, while
tracing and under functorch transforms, gradients are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

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


def set_wrapper(wrapper: Callable[[Sparse], Tensor]) -> None:
    """Set the function that makes a tensor of a record."""
    global _wrapper
    _wrapper = wrapper


def gradient_can_be_sparse(table: Tensor, index: Tensor) -> bool:
    """Whether `table` needs a gradient that can be stored as the rows that `index` selects."""
    return (
        _wrapper is not None
        and torch.is_grad_enabled()
        and table.requires_grad
        and not being_traced(table)
        and not being_traced(index)
        and not under_transform()
    )


def rows_record(index: Tensor, values: Tensor, rows: int) -> Sparse:
    """The record of a tensor with `rows` rows that stores those at `index` (distinct, ascending)."""
    return Sparse(Dense(values), Pattern(COO, (rows,), (index.unsqueeze(0),)))


class _Context(Protocol):
    """What a look-up saves for its backward: rows, counted, and the number of rows of the table."""

    saved_tensors: tuple[Tensor, Tensor | None]
    table_rows: int

    def save_for_backward(self, rows: Tensor, counted: Tensor | None) -> None: ...


class Lookup(torch.autograd.Function):
    """`table[rows]` with a gradient that stores the counted rows only; torch's backward cannot leave out the others."""

    @staticmethod
    def forward(ctx: _Context, table: Tensor, rows: Tensor, counted: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, counted)
        ctx.table_rows = table.shape[0]
        return aten.embedding(table, rows)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> Any:
        assert _wrapper is not None
        rows, counted = ctx.saved_tensors
        return _wrapper(rows_record(*merge_duplicates(rows, grad, counted), ctx.table_rows)), None, None
