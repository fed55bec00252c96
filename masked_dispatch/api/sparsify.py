"""Sparsely stored tensors of the elements that meet a condition. The others are absent: invalid, not 0.

None of these functions allocates a dense result, or indices for the whole tensor: the condition takes one byte per
element, and the conversion (op_registry/sparse/compaction.py) reads it in chunks. Only selected elements get gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.interop.crossing import takes
from masked_dispatch.tensor.arguments import check_layout
from masked_dispatch.tensor.checks import checked_dim
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.storage import converted
from op_registry.sparse.layout import Layout


@takes(x=Tensor, condition=Tensor)
def sparse_where(
    x: Tensor,
    condition: Tensor,
    *,
    layout: torch.layout | Layout | None = None,
    sparse_dim: int | None = None,
    blocksize: tuple[int, int] | None = None,
) -> MaskedTensor:
    """The elements of `x` where `condition` holds, sparsely stored; differentiable.

    x          a tensor, plain or masked, in any layout
    condition  a bool tensor that broadcasts to the shape of `x`; an invalid condition counts as False
    layout, sparse_dim, blocksize  as for :meth:`MaskedTensor.to_layout`; CSR by default, COO for a vector and for
        tensors stored in COO

    An element is valid if it is valid in `x` and the condition holds; the others are absent: invalid, not 0. To make a
    comparison ``c = x > y`` sparse, use ``sparse_where(c, c)``: True where it holds, absent elsewhere.

    Raises TypeError for a condition that is not bool, RuntimeError for one that does not broadcast to `x`, ValueError
    for a layout that does not fit the shape.
    """
    if condition.dtype is not torch.bool:
        raise TypeError(
            f"sparse_where takes a bool condition, and this one is {condition.dtype}; compare it, condition != 0"
        )
    layout = sparse_layout(x, layout)
    name = check_layout(x, layout, sparse_dim, blocksize)
    return converted("keep_where", x, condition, name, sparse_dim, blocksize, layout=name, block=blocksize)


@takes(x=Tensor)
def sparse_relu(
    x: Tensor,
    layout: torch.layout | Layout | None = None,
    *,
    sparse_dim: int | None = None,
    blocksize: tuple[int, int] | None = None,
) -> MaskedTensor:
    """The elements of `x` above 0, which relu keeps, sparsely stored; differentiable.

    :func:`sparse_threshold` at 0: elements ≤ 0 are absent, so a mean over the result is one over the active elements,
    and ``.to_tensor(0)`` is relu(x).
    """
    return sparse_threshold(x, 0, layout, sparse_dim=sparse_dim, blocksize=blocksize)


@takes(x=Tensor)
def sparse_threshold(
    x: Tensor,
    threshold: float,
    layout: torch.layout | Layout | None = None,
    *,
    sparse_dim: int | None = None,
    blocksize: tuple[int, int] | None = None,
) -> MaskedTensor:
    """The elements of `x` above a number, sparsely stored; differentiable.

    Elements at or below the threshold are absent: invalid, not 0. NaN is kept, as by torch's threshold.
    layout, sparse_dim, blocksize  as for :meth:`MaskedTensor.to_layout`; CSR by default, COO for a vector and for
        tensors stored in COO

    Raises ValueError for a layout that does not fit the shape.
    """
    return sparse_where(x, ~(x <= threshold), layout=layout, sparse_dim=sparse_dim, blocksize=blocksize)


@takes(x=Tensor)
def sparse_topk(
    x: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    *,
    layout: torch.layout | Layout | None = None,
    blocksize: tuple[int, int] | None = None,
) -> MaskedTensor:
    """The k largest (smallest) valid elements of each slice along `dim`, sparsely stored at their indices.

    Differentiable. The others are absent: invalid, not 0. A slice with fewer than k valid elements keeps them all; ties
    are broken as by torch.topk.
    layout, blocksize  as for :meth:`MaskedTensor.to_layout` (CSR by default, COO for a vector and for a tensor stored
        in COO); every dimension is stored sparsely

    Raises torch.topk's own errors for k and dim, and ValueError for a layout that does not fit the shape.
    """
    layout = sparse_layout(x, layout)
    name = check_layout(x, layout, x.ndim, blocksize)
    return converted(
        "keep_top", x, k, checked_dim("sparse_topk", x, dim), largest, name, blocksize, layout=name, block=blocksize
    )


def sparse_layout(x: Tensor, layout: torch.layout | Layout | None) -> torch.layout | Layout:
    """The layout that is asked for, or the default; dense storage, which would leave nothing out, is refused."""
    if layout is None:
        # CSR has memory for each row, of which COO may have more than fit.
        stored = x.storage_layout if isinstance(x, MaskedTensor) else x.layout
        return torch.sparse_csr if x.ndim > 1 and stored is not torch.sparse_coo else torch.sparse_coo
    if layout is torch.strided:
        raise ValueError(
            "torch.strided stores every element: pass a sparse layout, or mask the others, x.mask_with(condition)"
        )
    return layout
