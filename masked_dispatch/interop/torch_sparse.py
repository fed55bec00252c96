"""torch.sparse tensors in and out: what is specified there is what is valid here.

In: the pieces of a tensor of any of torch's five layouts, taken as they are where they list every element once and in
order, accumulated where not. Indices that point nowhere are refused, whatever torch let pass.
Out: the same the other way round. Both are differentiable, to any order: what is known of a tensor's indices is kept in
a :class:`Structure`, and each direction is the other's derivative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.autograd.sparse import unwrap_sparse, wrap_sparse_record
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import never_compiled
from op_registry.records.dense import Dense, fill_where_invalid
from op_registry.records.dtypes import accumulation_dtype
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_bool, as_int8
from op_registry.sparse.elementwise import align_to
from op_registry.sparse.layout import COO, CSR, Compressed, Layout, layout_named, layout_of
from op_registry.sparse.pattern import Pattern
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import NotLowered, Sparse, coalesce, without_invalid
from op_registry.sparse.well_formed import problem_of_compressed


@dataclass(frozen=True)
class Structure:
    """All of a torch.sparse tensor but its values.

    layout, size  of the tensor
    pieces        its index tensors, in the shapes that torch gives them: COO (sparse dimensions, n), which may list an
                  element twice; the others (*batch, rows + 1) and (*batch, n)
    block         rows and columns of a block, where the layout has blocks
    coalesced     what a COO tensor says of itself
    """

    layout: Layout
    size: tuple[int, ...]
    pieces: tuple[Tensor, ...]
    block: tuple[int, int] | None = None
    coalesced: bool = False

    @property
    def batch(self) -> tuple[int, ...]:
        """The batch dimensions, which torch's values and indices have in front."""
        return tuple(self.pieces[0].shape[:-1]) if isinstance(self.layout, Compressed) else ()

    @property
    def sparse_sizes(self) -> tuple[int, ...]:
        """Sizes of the sparse dimensions and of the batch."""
        if isinstance(self.layout, Compressed):
            return self.size[: len(self.batch) + 2]
        return self.size[: self.pieces[0].shape[0]]

    def pattern(self) -> Pattern:
        """Where the values are, batches one after another; in whatever order torch has them."""
        if not self.batch:
            return Pattern(self.layout, self.sparse_sizes, self.pieces, self.block)
        compressed, plain = self.pieces
        flat = compressed.reshape(-1, compressed.shape[-1])
        each = plain.shape[-1]
        before = torch.arange(flat.shape[0], device=flat.device, dtype=torch.int64)[:, None] * each
        dtype = flat.dtype if flat.shape[0] * each <= torch.iinfo(flat.dtype).max else torch.int64
        lines = (flat[:, 1:] + before).reshape(-1).to(dtype)
        pieces = (torch.cat([lines.new_zeros(1), lines]), plain.reshape(-1).to(dtype))
        return Pattern(self.layout, self.sparse_sizes, pieces, self.block)

    def listed(self, values: Tensor) -> Tensor:
        """torch's values as a pattern lists them."""
        return values.flatten(0, len(self.batch)) if self.batch else values

    def build(self, values: Tensor) -> Tensor:
        """The torch.sparse tensor with `values`, which come as a pattern lists them."""
        if self.batch:
            values = values.reshape(*self.pieces[1].shape, *values.shape[1:])
        return self.layout.torch_tensor(self.pieces, values, self.size, self.coalesced)

    def element_by_element(self, dense: int) -> Structure:
        """The same elements as COO, with so many dense dimensions."""
        places = self.pattern().places()
        assert len(places) + dense == len(self.size)
        return Structure(COO, self.size, COO.pieces_of(places, self.sparse_sizes))


def structure_of(tensor: Tensor) -> Structure:
    """The structure of a torch.sparse tensor; its indices are shared with it."""
    tensor, size = tensor.detach(), tuple(tensor.shape)
    layout = _layout_of(tensor)
    pieces, values = layout.pieces_in(tensor)
    block = None
    if layout.blocks:
        at = pieces[0].ndim
        rows, columns = values.shape[at : at + 2]
        block = (int(rows), int(columns))
    return Structure(layout, size, pieces, block, coalesced=layout == COO and tensor.is_coalesced())


def _layout_of(tensor: Tensor) -> Layout:
    layout = layout_of(tensor.layout)
    assert layout is not None
    return layout


class Specified(torch.autograd.Function):
    """A torch.sparse tensor → the values that it specifies, as its pattern lists them."""

    @staticmethod
    @never_compiled
    def forward(ctx: Any, tensor: Tensor, structure: Structure) -> Tensor:
        ctx.structure = structure
        ctx.to_keep = tensor.is_leaf
        ctx.dense = len(structure.size) - len(structure.sparse_sizes)
        ctx.set_materialize_grads(False)
        return values_of(tensor, structure)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        structure: Structure = ctx.structure
        as_csr = structure.layout == CSR and not structure.batch and not ctx.dense
        if ctx.to_keep and structure.layout != COO and not as_csr:
            # torch can add to a .grad that is COO, or CSR of two dimensions; COO it takes as gradient of any layout.
            grad = grad if structure.block is None else grad.flatten(0, 2)
            structure = structure.element_by_element(ctx.dense)
        return Built.apply(grad, structure), None


class Built(torch.autograd.Function):
    """Values, as a pattern lists them → a torch.sparse tensor that specifies them."""

    @staticmethod
    @never_compiled
    def forward(ctx: Any, values: Tensor, structure: Structure) -> Tensor:
        ctx.structure = structure
        ctx.set_materialize_grads(False)
        ctx.like = values.new_empty(()).expand(values.shape)
        return structure.build(values.detach())

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return (None if grad is None else values_in(grad, ctx.structure, ctx.like)), None


def values_in(tensor: Tensor, structure: Structure, like: Tensor) -> Tensor:
    """What a plain tensor, strided or sparse, has where `structure` lists values; 0 where it specifies nothing."""
    lead = Sparse(Dense(like, None), structure.pattern())
    record: Any = Dense(tensor, None)
    if tensor.layout is not torch.strided:
        record = record_of(tensor)
    try:
        found = align_to(record, lead)
    except NotLowered:
        found = align_to(Dense(tensor.to_dense(), None), lead)
    return fill_where_invalid(found.data.expand(like.shape), found.full_validity, 0)


def values_of(tensor: Tensor, structure: Structure) -> Tensor:
    """The specified values as a pattern lists them, sharing memory, without derivatives."""
    tensor = tensor.detach()
    return structure.listed(structure.layout.pieces_in(tensor)[1]).detach()


# ------------------------------------------------------------------------------------------------------------------ in


def from_torch_sparse(tensor: Tensor) -> MaskedTensor:
    """A torch.sparse tensor as masked tensor, stored alike: specified = valid. Differentiable; shares memory.

    Elements that are listed twice are accumulated (half precision in float32, bool by "or"); a layout's order is
    restored. Raises ValueError for indices that point nowhere, and for pieces that do not fit each other.
    """
    record = record_of(tensor)
    return wrap_sparse_record(record) if isinstance(record, Sparse) else wrap_record(record)


def record_of(tensor: Tensor) -> Dense | Sparse:
    """The record of a torch.sparse tensor; a dense one where it has no sparse dimension."""
    structure = structure_of(tensor)
    known = not (being_traced(tensor) or tensor.device.type == "meta")
    if known:
        check_structure(structure, values_of(tensor, structure))
    if tensor.requires_grad and torch.is_grad_enabled():
        values: Tensor = Specified.apply(tensor, structure)
    else:
        values = values_of(tensor, structure)
    if not structure.sparse_sizes:
        return without_sparse_dimensions(values)
    pattern = structure.pattern()
    if not known or pattern.layout.lists_in_order(pattern.pieces, pattern.listed_sizes()):
        return Sparse(Dense(values, None), pattern)
    grid = pattern.listed_sizes()
    record = coalesce(
        pattern.layout.exact_sibling,
        tuple(p.to(torch.int64) for p in pattern.listed()),
        Dense(values, None),
        grid,
    )
    return Sparse(record.values, Pattern(pattern.layout, pattern.sizes, record.pattern.pieces, pattern.block))


def without_sparse_dimensions(values: Tensor) -> Dense:
    """What a COO tensor with dense dimensions alone is: the sum of its values, all invalid if there are none."""
    wide = torch.int64 if values.dtype is torch.bool else accumulation_dtype(values.dtype)
    total = values.to(wide).sum(0).to(values.dtype)
    return Dense(total, None if values.shape[0] else torch.zeros_like(total, dtype=torch.int8))


def check_structure(structure: Structure, values: Tensor) -> None:
    """Refuse pieces that do not fit each other, and indices that point nowhere."""
    problem = problem_of(structure, values)
    if problem:
        raise ValueError(
            f"a {structure.layout} tensor of shape {structure.size} is not well formed: {problem}. Make it with "
            "check_invariants=True to hear of it where it comes from."
        )


def problem_of(structure: Structure, values: Tensor) -> str | None:
    """What is wrong with a structure, beside values as its pattern lists them."""
    layout, batch = structure.layout, structure.batch
    if not isinstance(layout, Compressed):
        return layout.problem_of_indices(structure.pieces, structure.sparse_sizes, values.shape[0])
    rows, columns = structure.size[len(batch) : len(batch) + 2]
    if structure.size[: len(batch)] != batch:
        return f"its indices are those of batches {batch}"
    compressed, plain = structure.pieces
    listed = values.shape[0]
    return problem_of_compressed(layout.by_column, (rows, columns), (compressed, plain), listed, structure.block, batch)


# ----------------------------------------------------------------------------------------------------------------- out


def to_torch_sparse(
    tensor: MaskedTensor,
    fill: Any,
    layout: str | None,
    sparse_dim: int | None,
    blocksize: tuple[int, int] | None,
) -> Tensor:
    """See MaskedTensor.to_torch_sparse; `layout` is the name of one of torch's."""
    stored = isinstance(tensor, SparseMaskedTensor)
    if isinstance(tensor, SparseMaskedTensor) and isinstance(unwrap_sparse(tensor), Permuted):
        tensor, stored = tensor._stored_densely(), False
    pattern = tensor._pattern if stored else None  # type: ignore[attr-defined]
    wanted = layout_named(layout) if layout else COO if pattern is None else pattern.layout.in_torch_sparse
    if pattern is None or sparse_dim is not None or blocksize is not None or wanted != pattern.layout:
        if pattern is not None and blocksize is None and wanted.blocks:
            blocksize = pattern.block
        tensor = tensor.to_layout(wanted, sparse_dim=sparse_dim, blocksize=blocksize)
    assert isinstance(tensor, SparseMaskedTensor)
    record = unwrap_sparse(tensor)
    assert isinstance(record, Sparse)
    values, pattern = record.values, record.pattern
    validity = values.full_validity
    if validity is not None and tensor.device.type != "meta":
        record = simplified(record)
        values, pattern = record.values, record.pattern
        if values.validity is not None and fill is None:
            invalid = values.validity.numel() - int(as_int8(values.validity).sum(dtype=torch.int64))
            raise ValueError(
                f"{invalid} invalid elements lie among the valid ones of a "
                f"masked tensor of shape {tuple(tensor.shape)} that is stored as {tensor.storage_layout}"
                f"{f' in blocks of {pattern.block}' if pattern.block else ' with dense dimensions'}, and a "
                "torch.sparse tensor specifies all of them. Say what to put there: x.to_torch_sparse(fill); or list "
                "elements one by one: x.to_torch_sparse(layout=torch.sparse_coo)."
            )
    structure = structure_for(pattern, tuple(tensor.shape))
    data = values.data
    if values.validity is not None:
        # `fill` is None only on the meta device, where there are no values to choose.
        data = fill_where_invalid(data, values.full_validity, 0 if fill is None else fill)
    if data.dtype is not tensor.dtype:
        data = data.to(tensor.dtype)
    if data.requires_grad and torch.is_grad_enabled():
        result: Tensor = Built.apply(data, structure)
        return result
    return structure.build(data)


def simplified(record: Sparse) -> Sparse:
    """The record without stored elements that are wholly invalid, and without a validity if nothing else is invalid."""
    record = without_invalid(record)
    valid = record.values.validity
    if valid is None or not bool(as_bool(as_int8(valid)).all()):
        return record
    return record.like(Dense(record.values.data))


def structure_for(pattern: Pattern, size: tuple[int, ...]) -> Structure:
    """The structure of the torch.sparse tensor of `size` that has its values where `pattern` lists them."""
    if not isinstance(pattern.layout, Compressed):
        return Structure(pattern.layout, size, (pattern.pieces[0].to(torch.int64),), coalesced=True)
    batch = pattern.sizes[:-2]
    compressed, plain = pattern.pieces
    if not batch:
        return Structure(pattern.layout, size, pattern.pieces, pattern.block)
    lines = pattern.layout.index_order(pattern.listed_sizes())[-2]
    matrices = math.prod(batch)
    if lines and matrices:
        counted = compressed.unfold(0, lines + 1, lines)
        counted = counted - counted[:, :1]
    else:
        counted = compressed.new_zeros((matrices, lines + 1))
    each = [0]
    if compressed.device.type != "meta" and matrices:
        each = sorted(set(counted[:, -1].tolist()))
    if len(each) > 1:
        raise ValueError(
            f"the {matrices} matrices of a masked tensor of shape {size} store between {each[0]} and {each[-1]} "
            f"{'blocks' if pattern.block else 'values'} each, and a batched {pattern.layout} tensor of torch's own "
            "stores as many for each: use x.to_torch_sparse(layout=torch.sparse_coo)"
        )
    pieces = (counted.reshape(*batch, lines + 1), plain.reshape(*batch, each[0]))
    return Structure(pattern.layout, size, pieces, pattern.block)
