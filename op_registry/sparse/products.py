"""Sums of products of two factors, one or both of them sparse, by the labels of their dimensions.

Valid factors are stored, so only pairs of stored factors are visited. Sparse by dense gives a dense result, sparse by
sparse a sparse one. Any two factors are matrices whose rows and columns are ravelled from their dimensions: along
*batch* labels, which both have and the result too; along *contracted* ones; and along those that one of them has alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from op_registry.dimensions.labels import Dimension
from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.broadcast import full_mask
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_int8, intersect
from op_registry.sparse.coordinates import unravel
from op_registry.sparse.record import NotLowered, Sparse, coalesce
from op_registry.sparse.segments import Segments
from op_registry.sparse.spmm import RowColumn, sddmm, spmm

# The label of each dimension of an operand; None for one of size 1 that broadcasts.
Own = tuple[Dimension, ...]


def among(own: Own, labels: Sequence[Dimension]) -> tuple[int, ...]:
    """The dimensions that have one of these labels, in the order of the labels."""
    return tuple(own.index(label) for label in labels if label in own)


class Places(NamedTuple):
    """The dimensions of two factors that make up matrices.

    rows     those of the first factor that the result has
    shared   those of the first factor that the other has as well
    along    those of the first factor that the result has not
    theirs   those of the other factor that the first has as well, in that one's order
    columns  those of the other factor alone that the result has
    order    where each dimension of the result comes from among `rows` and `columns`
    """

    rows: tuple[int, ...]
    shared: tuple[int, ...]
    along: tuple[int, ...]
    theirs: tuple[int, ...]
    columns: tuple[int, ...]
    order: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def places(own: Own, theirs: Own, result: Own) -> Places:
    """Which dimensions of two factors are rows, columns, and shared."""
    rows = among(own, [label for label in own if label in result])
    shared = [label for label in own if label in theirs]
    columns = among(theirs, [label for label in theirs if label in result and label not in own])
    along = tuple(d for d in range(len(own)) if d not in rows)
    found = (*(own[d] for d in rows), *(theirs[d] for d in columns))
    return Places(rows, among(own, shared), along, among(theirs, shared), columns, among(found, result))


def row_column(x: Sparse, rows: tuple[int, ...], columns: tuple[int, ...]) -> RowColumn:
    """The coordinates of the elements of `x` in a matrix whose rows are ravelled from some of its dimensions, and its
    columns from others; both may contain the same dimension, as batches do, whose matrix is block-diagonal.
    """
    if not _in_order(x, rows) and _in_order(x, columns):
        return row_column(x, columns, rows).transposed
    return x.pattern.cached(("row_column", rows, columns), lambda: _row_column(x, rows, columns))


def _in_order(x: Sparse, rows: tuple[int, ...]) -> bool:
    """Whether elements are stored row by row, if these dimensions make up the rows."""
    return x.pattern.layout.row_major and rows == tuple(range(x.pattern.ndim - 1))


def _row_column(x: Sparse, rows: tuple[int, ...], columns: tuple[int, ...]) -> RowColumn:
    pattern, in_order = x.pattern, _in_order(x, rows)
    row, column = (pattern.raveled(dims) for dims in (rows, columns))
    ends = pattern.ends() if in_order else None
    ends = ends if ends is None or ends.dtype is torch.int64 else ends.to(torch.int64)
    numbers = (math.prod(pattern.sizes[d] for d in dims) for dims in (rows, columns))
    return RowColumn(row, column, *numbers, in_order=in_order, ends=ends)


def matrix_of(x: Dense, rows: tuple[int, ...], columns: tuple[int, ...]) -> Dense:
    """A dense operand as a matrix whose rows and columns are ravelled from these dimensions; others have size 1."""
    if len(rows) == len(columns) == 1 and x.ndim == 2:
        return x if rows < columns else x.map(torch.t)
    left_out = [d for d in range(x.ndim) if d not in (*rows, *columns)]
    shape = [math.prod(x.shape[d] for d in dims) for dims in (rows, columns)]
    return x.map(lambda t: t.permute(*rows, *columns, *left_out).reshape(shape))


def sparse_by_dense(x: Sparse, own: Own, y: Dense, theirs: Own, result: Own) -> Dense:
    """A product of a sparse and a dense factor, in the result's order of dimensions."""
    at = places(own, theirs, result)
    dense = matrix_of(y.like(y.filled(0)), at.theirs, at.columns)
    product = stored_by_rows(x, dense, row_column(x, at.rows, at.shared), at.along)
    assert product.validity is not None
    if len(at.rows) != 1 or len(at.columns) != 1:
        sizes, wide = [x.pattern.sizes[d] for d in at.rows], [y.shape[d] for d in at.columns]
        narrow = [1] * len(wide) if known_to_hold(product.validity.shape[1] == 1) else wide
        product = Dense(product.data.reshape((*sizes, *wide)), product.validity.reshape((*sizes, *narrow)))
    if at.order == (*range(len(result)),):
        return product
    assert product.validity is not None
    return Dense(product.data.permute(at.order).contiguous(), product.validity.permute(at.order))


def stored_by_rows(x: Sparse, rows: Dense, coordinates: RowColumn, along: tuple[int, ...]) -> Dense:
    """The products of stored elements with rows of a dense matrix, which is 0 where invalid, summed along dimensions.

    If all of the matrix is valid, a row of the result is valid where `x` stores a valid element: validity (rows, 1).
    """
    flat = x.flat
    data = spmm(flat.filled(0), rows.data, coordinates)
    if rows.validity is None or known_to_hold(rows.shape[-1] == 0):
        return Dense(data, Segments(x, along).exists(flat).unsqueeze(1))
    valid_rows = as_int8(full_mask(rows)).to(torch.float32)
    valid_products = spmm(as_int8(full_mask(flat)).to(torch.float32), valid_rows, coordinates)
    return Dense(data, as_int8(valid_products > 0.5))


def sparse_by_sparse(a: Sparse, own: Own, b: Sparse, theirs: Own, result: Own) -> Dense | Sparse:
    """Each element of `a` times the elements of `b` that have its shared labels; products with equal coordinates are
    summed. A result without dimensions is dense.
    """
    if being_traced(a.values.data):
        raise NotLowered("the number of products is not known while tracing")
    at, left, right = places(own, theirs, result), a.flat, b.flat
    mine = row_column(a, at.rows, at.shared)
    order, columns, ends = row_column(b, at.theirs, at.columns).by_row()
    partner_counts = ends.diff()[mine.column]  # for every element of `a`
    source = torch.repeat_interleave(partner_counts)
    offset = ends[mine.column] - (partner_counts.cumsum(0) - partner_counts)
    partner = offset[source] + torch.arange(source.shape[0], device=a.device)
    row, column = mine.row[source], columns[partner]
    partner = partner if order is None else order[partner]
    validity = None
    if left.validity is not None or right.validity is not None:
        validity = intersect(as_int8(full_mask(left))[source], as_int8(full_mask(right))[partner])
    products = Dense(left.filled(0)[source] * right.filled(0)[partner], validity)
    if not result:
        some = Dense(products.data, as_int8(full_mask(products))).full_validity
        assert some is not None
        return Dense(products.filled(0).sum(dtype=products.dtype), as_int8(some.any()))
    sizes = dict(zip((*own, *theirs), (*a.shape, *b.shape), strict=True)) | dict(zip(own, a.shape, strict=True))
    found = [own[d] for d in at.rows], [theirs[d] for d in at.columns]
    coordinates: dict[Dimension, Tensor] = {}
    for labels, positions in zip(found, (row, column), strict=True):
        coordinates |= zip(labels, unravel(positions, [sizes[label] for label in labels]), strict=True)
    layout = a.pattern.layout.with_room(len(result))
    shape = tuple(sizes[label] for label in result)
    return coalesce(layout, tuple(coordinates[label] for label in result), products, shape)


def sampled(x: Sparse, a: Dense, own: Own, b: Dense, theirs: Own, result: Own) -> Dense:
    """The products of dense factors where `x`, which has the result's dimensions, stores elements: in storage order."""
    contracted = [label for label in own if label not in result]
    rows, columns = ([label for label in result if label in labels] for labels in (own, theirs))
    left = matrix_of(a.like(a.filled(0)), among(own, rows), among(own, contracted))
    right = matrix_of(b.like(b.filled(0)), among(theirs, columns), among(theirs, contracted))
    coordinates = row_column(x, among(result, rows), among(result, columns))
    products = sddmm(left.data, right.data, coordinates)
    if a.validity is None and b.validity is None:
        return Dense(products)
    a_valid, b_valid = (as_int8(full_mask(m)).to(torch.float32) for m in (left, right))
    return Dense(products, as_int8(sddmm(a_valid, b_valid, coordinates) > 0.5))
