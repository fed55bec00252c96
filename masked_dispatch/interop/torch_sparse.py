"""Convert from and to torch.sparse tensors: specified elements are valid elements.

The conversion from torch accepts all five sparse layouts. It shares a tensor's pieces if they list every element once
and in order, and coalesces them otherwise. It refuses indices out of bounds, including those that torch accepts.
Both conversions are differentiable to any order: a :class:`Structure` holds everything except the values, and each
conversion is the derivative of the other. functorch's transforms do not support autograd functions of this kind; there,
both conversions use torch's own operators, which are differentiable in `grad` and `vjp` of COO.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.autograd.sparse import unwrap_sparse, wrap_sparse_record
from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import under_transform
from op_registry import InvalidValueError, MaskedSemanticsError
from op_registry.records.arguments import Number, accumulation_dtype
from op_registry.records.dense import Dense
from op_registry.records.fill import OwnFunction, fill_where_invalid
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_bool, as_int8
from op_registry.sparse.convert import coalesce, without_invalid
from op_registry.sparse.coordinates import problem_of_compressed
from op_registry.sparse.layout import COO, CSR, Compressed, Layout, layout_named, layout_of
from op_registry.sparse.on_values import align_to
from op_registry.sparse.record import NotLowered, Pattern, Sparse


@dataclass(frozen=True)
class Structure:
    """Everything in a torch.sparse tensor except its values.

    layout, size  the layout and size of the tensor
    pieces        its index tensors, in torch's shapes: (sparse dimensions, n) for COO, which may list an element twice;
                  (*batch, rows + 1) and (*batch, n) for the others
    block         rows and columns of a block, if the layout has blocks
    coalesced     `is_coalesced()` of a COO tensor
    """

    layout: Layout
    size: tuple[int, ...]
    pieces: tuple[Tensor, ...]
    block: tuple[int, int] | None = None
    coalesced: bool = False

    @property
    def batch(self) -> tuple[int, ...]:
        """Return the sizes of the batch dimensions, the leading dimensions of torch's values and indices."""
        return tuple(self.pieces[0].shape[:-1]) if isinstance(self.layout, Compressed) else ()

    @property
    def sparse_sizes(self) -> tuple[int, ...]:
        """Return the sizes of the batch and the sparse dimensions."""
        if isinstance(self.layout, Compressed):
            return self.size[: len(self.batch) + 2]
        return self.size[: self.pieces[0].shape[0]]

    def pattern(self) -> Pattern:
        """Return the pattern of the values with all batches concatenated; its elements are in torch's order."""
        if not self.batch:
            return Pattern(self.layout, self.sparse_sizes, self.pieces, self.block)
        compressed, plain = self.pieces
        flat = compressed.reshape(-1, compressed.shape[-1])
        nnz = plain.shape[-1]
        offsets = torch.arange(flat.shape[0], device=flat.device, dtype=torch.int64)[:, None] * nnz
        dtype = flat.dtype if flat.shape[0] * nnz <= torch.iinfo(flat.dtype).max else torch.int64
        ends = (flat[:, 1:] + offsets).reshape(-1).to(dtype)
        pieces = (torch.cat([ends.new_zeros(1), ends]), plain.reshape(-1).to(dtype))
        return Pattern(self.layout, self.sparse_sizes, pieces, self.block)

    def concatenated(self, values: Tensor) -> Tensor:
        """Concatenate the batches of torch's values, as for `pattern`."""
        return values.flatten(0, len(self.batch)) if self.batch else values

    def build(self, values: Tensor) -> Tensor:
        """Build the torch.sparse tensor from `values`, which are concatenated as for `pattern`."""
        if self.batch:
            values = values.reshape(*self.pieces[1].shape, *values.shape[1:])
        return self.layout.torch_tensor(self.pieces, values, self.size, self.coalesced)

    def element_by_element(self, dense: int, listed: Tensor | None = None) -> Structure:
        """Return the same elements in COO, with `dense` dense dimensions; only those at positions `listed` if given."""
        coordinates = self.pattern().coordinates()
        assert len(coordinates) + dense == len(self.size)
        if listed is not None:
            each = math.prod(self.block or ())
            coordinates = tuple(along.reshape(-1, each)[listed].flatten() for along in coordinates)
        return Structure(COO, self.size, COO.pieces_of(coordinates, self.sparse_sizes))

    def first_of_each(self) -> Tensor | None:
        """Return the position of the first value of each coordinate; None if no coordinate is listed twice."""
        pattern = self.pattern()
        if being_traced(self.pieces[0]) or pattern.layout.lists_in_order(pattern.pieces, pattern.listed_sizes()):
            return None
        place = pattern.listed_positions()
        listed, number = place.unique(return_inverse=True)
        if len(listed) == len(place):
            return None
        positions = torch.arange(len(place), device=place.device)
        return positions.new_empty(len(listed)).scatter_reduce(0, number, positions, "amin", include_self=False)


def structure_of(tensor: Tensor) -> Structure:
    """Return the structure of a torch.sparse tensor; it shares the index tensors."""
    tensor, size = tensor.detach(), tuple(tensor.shape)
    layout = _layout_of(tensor)
    pieces, values = layout.pieces_in(tensor)
    block = None
    if layout.blocks:
        block_dim = pieces[0].ndim
        rows, columns = values.shape[block_dim : block_dim + 2]
        block = (int(rows), int(columns))
    return Structure(layout, size, pieces, block, coalesced=layout == COO and tensor.is_coalesced())


def _layout_of(tensor: Tensor) -> Layout:
    layout = layout_of(tensor.layout)
    assert layout is not None
    return layout


class StructureContext(Protocol):
    """The values that the functions below save for their derivatives."""

    structure: Structure
    # A tensor like the values, without memory.
    like: Tensor
    # Whether the torch.sparse tensor is a leaf.
    is_leaf: bool
    dense_dims: int

    def set_materialize_grads(self, value: bool) -> None: ...


class FromTorchSparse(OwnFunction):
    """Extract a torch.sparse tensor's specified values, concatenated as for `Structure.pattern`."""

    @staticmethod
    @never_compiled
    def forward(ctx: StructureContext, tensor: Tensor, structure: Structure) -> Tensor:
        ctx.structure = structure
        ctx.is_leaf = tensor.is_leaf
        ctx.dense_dims = len(structure.size) - len(structure.sparse_sizes)
        ctx.set_materialize_grads(False)
        return values_of(tensor, structure)

    @staticmethod
    @never_compiled
    def backward(ctx: StructureContext, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        structure = ctx.structure
        once = structure.first_of_each()
        if once is not None:  # all contributions to one element share its gradient, which is listed once
            grad = grad[once] if structure.block is None else grad[once].flatten(0, 2)
            structure = structure.element_by_element(ctx.dense_dims, once)
        as_csr = structure.layout == CSR and not structure.batch and not ctx.dense_dims
        if ctx.is_leaf and structure.layout != COO and not as_csr:
            # torch can accumulate into a .grad that is COO or two-dimensional CSR, and accepts COO for any layout.
            grad = grad if structure.block is None else grad.flatten(0, 2)
            structure = structure.element_by_element(ctx.dense_dims)
        return ToTorchSparse.apply(grad, structure), None


class ToTorchSparse(OwnFunction):
    """Build a torch.sparse tensor from values, which are concatenated as for `Structure.pattern`."""

    @staticmethod
    @never_compiled
    def forward(ctx: StructureContext, values: Tensor, structure: Structure) -> Tensor:
        ctx.structure = structure
        ctx.set_materialize_grads(False)
        ctx.like = values.new_empty(()).expand(values.shape)
        return structure.build(values.detach())

    @staticmethod
    @never_compiled
    def backward(ctx: StructureContext, grad: Tensor | None) -> Any:
        return (None if grad is None else values_in(grad, ctx.structure, ctx.like)), None


def values_in(tensor: Tensor, structure: Structure, like: Tensor) -> Tensor:
    """Read a plain tensor, strided or sparse, at the coordinates of `structure`; 0 where unspecified."""
    target = Sparse(Dense(like, None), structure.pattern())
    record = Dense(tensor, None) if tensor.layout is torch.strided else record_of(tensor)
    try:
        aligned = align_to(record, target)
    except NotLowered:
        aligned = align_to(Dense(tensor.to_dense(), None), target)
    return fill_where_invalid(aligned.data.expand(like.shape), aligned.full_validity, 0)


def values_of(tensor: Tensor, structure: Structure) -> Tensor:
    """Return the specified values, concatenated as for `Structure.pattern`; they share memory and lack a grad_fn."""
    tensor = tensor.detach()
    return structure.concatenated(structure.layout.pieces_in(tensor)[1]).detach()


# ------------------------------------------------------------------------------------------------------------------ in


def from_torch_sparse(tensor: Tensor) -> MaskedTensor:
    """Convert to a masked tensor in the same layout, valid where specified. Differentiable; shares memory.

    This accumulates duplicates (half precision in float32, bool by "or"), and sorts elements into the layout's order.
    Raises ValueError for indices out of bounds, and for inconsistent pieces.
    """
    record = record_of(tensor)
    return wrap_sparse_record(record) if isinstance(record, Sparse) else wrap_record(record)


def record_of(tensor: Tensor) -> Dense | Sparse:
    """Return the record of a torch.sparse tensor; a dense one if it has no sparse dimension."""
    in_transform = under_transform()
    if in_transform and tensor.is_sparse:
        tensor = tensor.coalesce()  # there, torch only differentiates the values of a coalesced tensor
    structure = structure_of(tensor)
    has_values = not (being_traced(tensor) or tensor.device.type == "meta")
    if has_values:
        check_structure(structure, values_of(tensor, structure))
    if in_transform:
        values = structure.concatenated(tensor.values())
    elif tensor.requires_grad and torch.is_grad_enabled():
        values = FromTorchSparse.apply(tensor, structure)
    else:
        values = values_of(tensor, structure)
    if not structure.sparse_sizes:
        return without_sparse_dimensions(values)
    pattern = structure.pattern()
    if not has_values or pattern.layout.lists_in_order(pattern.pieces, pattern.listed_sizes()):
        return Sparse(Dense(values, None), pattern)
    grid = pattern.listed_sizes()
    coordinates = tuple(along.to(torch.int64) for along in pattern.listed_coordinates())
    coalesced = coalesce(pattern.layout.exact_sibling, coordinates, Dense(values, None), grid)
    return Sparse(coalesced.values, Pattern(pattern.layout, pattern.sizes, coalesced.pattern.pieces, pattern.block))


def without_sparse_dimensions(values: Tensor) -> Dense:
    """Return the record of a COO tensor without sparse dimensions: the sum of its values, invalid if it has none."""
    sum_dtype = torch.int64 if values.dtype is torch.bool else accumulation_dtype(values.dtype)
    total = values.to(sum_dtype).sum(0).to(values.dtype)
    return Dense(total, None if values.shape[0] else torch.zeros_like(total, dtype=torch.int8))


def check_structure(structure: Structure, values: Tensor) -> None:
    """Raise ValueError for indices out of bounds, and for inconsistent pieces."""
    problem = problem_of(structure, values)
    if problem:
        raise ValueError(
            f"a {structure.layout} tensor of shape {structure.size} is not well formed: {problem}. Construct it "
            "with check_invariants=True to find where it comes from."
        )


def problem_of(structure: Structure, values: Tensor) -> str | None:
    """Describe the first problem of a structure and its concatenated values; None if they are correct."""
    layout, batch = structure.layout, structure.batch
    if not isinstance(layout, Compressed):
        return layout.problem_of_indices(structure.pieces, structure.sparse_sizes, values.shape[0])
    rows, columns = structure.size[len(batch) : len(batch) + 2]
    if structure.size[: len(batch)] != batch:
        return f"its indices have batch dimensions {batch}"
    compressed, plain = structure.pieces
    listed = values.shape[0]
    return problem_of_compressed(layout.by_column, (rows, columns), (compressed, plain), listed, structure.block, batch)


# ----------------------------------------------------------------------------------------------------------------- out


def to_torch_sparse(
    tensor: MaskedTensor,
    fill: Number | None,
    layout: str | None,
    sparse_dim: int | None,
    blocksize: tuple[int, int] | None,
) -> Tensor:
    """See MaskedTensor.to_torch_sparse; `layout` is the name of one of torch's layouts."""
    permuted = isinstance(tensor, SparseMaskedTensor) and tensor._order is not None
    pattern = tensor._pattern if isinstance(tensor, SparseMaskedTensor) and not permuted else None
    wanted = layout_named(layout) if layout else COO if pattern is None else pattern.layout.in_torch_sparse
    if pattern is None or sparse_dim is not None or blocksize is not None or wanted != pattern.layout:
        if pattern is not None and blocksize is None and wanted.blocks:
            blocksize = pattern.block
        if pattern is not None and sparse_dim is None and blocksize is not None:
            sparse_dim = pattern.ndim
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
                "torch.sparse tensor specifies all of them. Choose their value: x.to_torch_sparse(fill); or list "
                "elements one by one: x.to_torch_sparse(layout=torch.sparse_coo)."
            )
    structure = structure_for(pattern, tuple(tensor.shape))
    data = values.data
    if values.validity is not None:
        # `fill` is None only on the meta device, where there are no values to choose.
        data = fill_where_invalid(data, values.full_validity, 0 if fill is None else fill)
    if data.dtype is not tensor.dtype:
        data = data.to(tensor.dtype)
    if data.requires_grad and torch.is_grad_enabled() and not under_transform():
        return ToTorchSparse.apply(data, structure)
    return structure.build(data)


def simplified(record: Sparse) -> Sparse:
    """Drop stored elements that are fully invalid, and the validity if all remaining elements are valid."""
    record = without_invalid(record)
    valid = record.values.validity
    if valid is None or not bool(as_bool(as_int8(valid)).all()):
        return record
    return record.like(Dense(record.values.data))


def structure_for(pattern: Pattern, size: tuple[int, ...]) -> Structure:
    """Return the structure of a torch.sparse tensor of `size` with the sparsity pattern `pattern`."""
    if not isinstance(pattern.layout, Compressed):
        return Structure(pattern.layout, size, (pattern.pieces[0].to(torch.int64),), coalesced=True)
    batch = pattern.sizes[:-2]
    compressed, plain = pattern.pieces
    if not batch:
        return Structure(pattern.layout, size, pattern.pieces, pattern.block)
    compressed_size = pattern.layout.index_order(pattern.listed_sizes())[-2]
    matrices = math.prod(batch)
    if compressed_size and matrices:
        offsets = compressed.unfold(0, compressed_size + 1, compressed_size)
        offsets = offsets - offsets[:, :1]
    else:
        offsets = compressed.new_zeros((matrices, compressed_size + 1))
    nnz = [0]
    if compressed.device.type != "meta" and matrices:
        nnz = sorted(set(offsets[:, -1].tolist()))
    if len(nnz) > 1:
        raise ValueError(
            f"the {matrices} matrices of a masked tensor of shape {size} store between {nnz[0]} and {nnz[-1]} "
            f"{'blocks' if pattern.block else 'values'} each, and torch's batched {pattern.layout} "
            "tensors need the same number in each: use x.to_torch_sparse(layout=torch.sparse_coo)"
        )
    pieces = (offsets.reshape(*batch, compressed_size + 1), plain.reshape(*batch, nnz[0]))
    return Structure(pattern.layout, size, pieces, pattern.block)


# ---------------------------------------------------------------- the stored values and index tensors in torch's shapes

# The names of the index tensors, in the order in which a layout stores them.
NAMES: dict[torch.layout | Layout, tuple[str, ...]] = {
    torch.sparse_coo: ("indices",),
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
    torch.jagged: ("offsets", "col_indices"),
}


def stored_values(tensor: MaskedTensor, fill: Number | None) -> Tensor:
    """See MaskedTensor.values()."""
    structure = stored_structure(tensor, "values")
    record = unwrap_sparse(tensor)  # type: ignore[arg-type]
    assert isinstance(record, Sparse)
    data, validity = record.values.data, record.values.full_validity
    invalid = 0
    if validity is not None:
        invalid = validity.numel() - int(as_int8(validity).sum(dtype=torch.int64))
        if invalid and fill is None:
            raise InvalidValueError(
                f"values() of a masked tensor of shape {tuple(tensor.shape)}, stored as {tensor.storage_layout}: "
                f"{invalid} of {validity.numel()} stored values are invalid. Choose what they become: x.values(fill); "
                "or list valid elements alone: x.compressed(), or store no others: "
                "as_masked_tensor(x.to_torch_sparse())."
            )
    # The result has its own memory, even if every element is valid.
    data = fill_where_invalid(data, validity, 0 if fill is None else fill) if invalid else data.clone()
    return data.reshape(*structure.pieces[1].shape, *data.shape[1:]) if structure.batch else data


def stored_indices(tensor: MaskedTensor, name: str) -> Tensor:
    """Return the index tensor of this name."""
    pieces = stored_structure(tensor, name).pieces
    if name == "lengths":
        return pieces[0].diff()
    return pieces[NAMES[tensor.storage_layout].index(name)].detach()


def stored_structure(tensor: MaskedTensor, name: str) -> Structure:
    """Return the index tensors in torch's shapes; raise MaskedSemanticsError if the storage has none of that name."""
    layout, shape = tensor.storage_layout, tuple(tensor.shape)
    if not isinstance(tensor, SparseMaskedTensor):
        instead = (
            "the lengths of a padded batch are masked_dispatch.interop.to_lengths(x)."
            if name == "lengths"
            else "its values and its mask are x.get_data() and x.get_mask(); x.to_sparse() lists valid elements."
        )
        raise MaskedSemanticsError(f"{name}() of a masked tensor of shape {shape}, which is stored densely: {instead}")
    known = ["values", *NAMES.get(layout, ()), *(["lengths"] if layout is torch.jagged else [])]
    if name not in known:
        raise MaskedSemanticsError(
            f"{name}() of a masked tensor of shape {shape}, which is stored as {layout}: it has "
            f"{', '.join(f'{n}()' for n in known)}."
        )
    if tensor._order is not None:
        raise MaskedSemanticsError(
            f"{name}() of a masked tensor of shape {shape}, which shows the dimensions of packed storage in another "
            "order: undo transpose and flatten first, or store it anew: x.to_sparse()."
        )
    return structure_for(tensor._pattern, shape)
