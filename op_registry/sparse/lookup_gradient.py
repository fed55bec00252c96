"""Sparse gradients of embedding tables: the rows that were looked up, sorted and with duplicates merged.

Law: contributions of duplicate look-ups to a row are accumulated in the order of the look-ups, half precision in
float32 and rounded once. A row is stored if a look-up that counts selects it.

Only here does a plain tensor get a masked gradient, because torch's own would be sparse. This module does not know how
a record becomes a tensor; the layer that does registers a function with `set_wrappers`, which says it for a table. On
bare records, while tracing and under functorch transforms, gradients are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from op_registry.records.dense import Dense
from op_registry.records.fill import OwnFunction
from op_registry.records.tracing import being_traced, under_transform
from op_registry.sparse.coordinates import merge_duplicates
from op_registry.sparse.layout import COO
from op_registry.sparse.record import Pattern, Sparse

aten = torch.ops.aten

# Makes a tensor of a record.
Wrapper = Callable[[Sparse], Tensor]

_wrapper_for: Callable[[Tensor], Wrapper] | None = None


def set_wrappers(wrapper_for: Callable[[Tensor], Wrapper]) -> None:
    """Set the function that says, when a table is looked up in, how its gradient becomes a tensor."""
    global _wrapper_for
    _wrapper_for = wrapper_for


def gradient_can_be_sparse(table: Tensor, index: Tensor) -> bool:
    """Whether `table` needs a gradient that can be stored as the rows that `index` selects."""
    return (
        _wrapper_for is not None
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
    """What a look-up saves for its backward: rows, counted, the table's number of rows, and how to make a tensor."""

    saved_tensors: tuple[Tensor, Tensor | None]
    table_rows: int
    wrapper: Wrapper

    def save_for_backward(self, rows: Tensor, counted: Tensor | None) -> None: ...


class Lookup(OwnFunction):
    """`table[rows]` with a gradient that stores the counted rows only; torch's backward cannot leave out the others."""

    @staticmethod
    def forward(ctx: _Context, table: Tensor, rows: Tensor, counted: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, counted)
        assert _wrapper_for is not None
        ctx.table_rows, ctx.wrapper = table.shape[0], _wrapper_for(table)
        return aten.embedding(table, rows)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> Any:
        rows, counted = ctx.saved_tensors
        return ctx.wrapper(rows_record(*merge_duplicates(rows, grad, counted), ctx.table_rows)), None, None
