"""Records with extents in another layout."""

from __future__ import annotations

from op_registry.extents import stored
from op_registry.extents.factors import conjunction, factors_of, with_extent
from op_registry.extents.found import of_packed
from op_registry.records.dense import Dense
from op_registry.sparse.layout import Block, Layout
from op_registry.sparse.record import Sparse, from_dense, to_layout


def in_layout(record: Dense | Sparse, layout: Layout, dims: int | None, block: Block | None) -> Sparse:
    """The record in a layout, with its extent, which is carried beside what is stored.

    Packed storage stores the positions that are there: a row that is there and missing is stored, and invalid.
    """
    extent = record.extent
    if extent is None:
        found = _converted(record, layout, dims, block)
        return of_packed(found) if layout.of_sequences else found
    there = None if extent.is_mask or not layout.of_sequences else conjunction(factors_of(record))
    is_so = isinstance(record, Sparse) and record.pattern.layout == layout
    if there is None or is_so:
        found = _converted(record, layout, dims, block)
    else:
        found = stored.packed(record, there, layout)
    result: Sparse = with_extent(found, extent)
    return result


def _converted(record: Dense | Sparse, layout: Layout, dims: int | None, block: Block | None) -> Sparse:
    return from_dense(record, layout, dims, block) if isinstance(record, Dense) else to_layout(record, layout, block)
