"""Convert from and to scipy.sparse: stored elements are valid, explicit zeros included; all others are invalid."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from masked_dispatch.interop.crossing import OF_NUMPY, as_masked, check_leaving, takes
from masked_dispatch.interop.numpy_arrays import tensor_of_array
from masked_dispatch.interop.torch_sparse import from_torch_sparse
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.sparse.layout import torch_compressed

COMPRESSED = {
    "csr": (torch.sparse_csr, scipy.sparse.csr_array),
    "csc": (torch.sparse_csc, scipy.sparse.csc_array),
    "bsr": (torch.sparse_bsr, scipy.sparse.bsr_array),
}


def from_scipy_sparse(matrix: Any) -> MaskedTensor:
    """Convert a SciPy sparse array or matrix in format coo, csr, csc or bsr to a masked tensor in that layout.

    Stored elements are valid, explicit zeros included, and duplicates are summed. (In SciPy, other elements are 0; to
    keep these zeros, pass ``torch.from_numpy(matrix.toarray())`` to `masked_tensor`.) The result shares the values if
    possible.

    Raises TypeError for other formats, and for arguments that are not sparse.
    """
    if not scipy.sparse.issparse(matrix):
        raise TypeError(
            f"from_scipy_sparse takes a sparse array of SciPy, not a {type(matrix).__name__}: pass "
            "scipy.sparse.coo_array(matrix), whose zeros are not stored and become invalid, or use masked_tensor"
        )
    kind = matrix.format
    if kind not in COMPRESSED and kind != "coo":
        raise TypeError(f"from_scipy_sparse takes the formats coo, csr, csc and bsr, not {kind}: pass matrix.tocsr()")
    values, size = tensor_of_array(matrix.data), tuple(matrix.shape)
    if kind == "coo":
        indices = torch.from_numpy(np.stack(matrix.coords).astype(np.int64))
        return from_torch_sparse(torch.sparse_coo_tensor(indices, values, size, check_invariants=True))
    if not matrix.has_canonical_format:
        matrix = matrix.copy()
        matrix.sum_duplicates()
        values = tensor_of_array(matrix.data)
    starts, plain = (torch.from_numpy(part.astype(np.int64)) for part in (matrix.indptr, matrix.indices))
    layout, _ = COMPRESSED[kind]
    return from_torch_sparse(torch_compressed(starts, plain, values, size, layout, check=True))


@takes(x=Tensor)
def to_scipy_sparse(x: Tensor) -> Any:
    """Convert the valid elements to a SciPy sparse array: csr, csc or bsr for a matrix in that layout, otherwise coo.

    Raises RuntimeError if `x` requires grad; TypeError if it is not on the CPU, or has a dtype that SciPy's sparse
    arrays lack; ValueError for a tensor without dimensions, or for invalid elements inside stored blocks.
    """
    check_leaving(x, "scipy.sparse", OF_NUMPY - {torch.float16})
    if not x.ndim:
        raise ValueError("a tensor of shape () cannot become a sparse array: SciPy's have one dimension or more")
    masked = as_masked(x)
    for layout, array in COMPRESSED.values():
        if masked.storage_layout is layout and masked.ndim == 2:
            stored = masked.to_torch_sparse()
            by_column = layout is torch.sparse_csc
            compressed = stored.ccol_indices() if by_column else stored.crow_indices()
            plain = stored.row_indices() if by_column else stored.col_indices()
            parts = (stored.values().numpy().copy(), plain.numpy().copy(), compressed.numpy().copy())
            return array(parts, shape=tuple(x.shape))
    stored = masked.to_torch_sparse(layout=torch.sparse_coo, sparse_dim=x.ndim).coalesce()
    indices = tuple(stored.indices().numpy().copy())
    return scipy.sparse.coo_array((stored.values().numpy().copy(), indices), shape=tuple(x.shape))
