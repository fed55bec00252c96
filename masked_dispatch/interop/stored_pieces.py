"""Return the stored values and index tensors of a masked tensor in torch's shapes; see MaskedTensor.values()."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.autograd.sparse import unwrap_sparse
from masked_dispatch.interop.torch_sparse import Structure, structure_for
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry import InvalidValueError, MaskedSemanticsError
from op_registry.records.dims import Number
from op_registry.records.fill import fill_where_invalid
from op_registry.records.validity import as_int8
from op_registry.sparse.layout import Layout
from op_registry.sparse.record import Sparse

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
                "or list valid elements alone: x.to_sparse().values()."
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
