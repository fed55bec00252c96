"""Producers: sparsely stored tensors made from dense ones, by what qualifies. What does not is absent: invalid, not 0.

None of them makes a dense result, or an index of the whole tensor: one byte for each element says what qualifies, and
the conversion (op_registry/sparse/convert.py) reads that chunk by chunk. Gradients reach what is kept alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.tensor.masked_tensor import MaskedTensor, check_layout

CSR = torch.sparse_csr


def sparse_where(
    x: Tensor,
    condition: Tensor,
    *,
    layout: torch.layout = CSR,
    sparse_dim: int | None = None,
    blocksize: tuple[int, int] | None = None,
) -> MaskedTensor:
    """The elements of `x` where `condition` holds, sparsely stored; differentiable.

    x          a tensor, plain or masked, stored anyhow
    condition  a bool tensor that broadcasts to the shape of `x`; where it is invalid, it does not hold
    layout, sparse_dim, blocksize  as for :meth:`MaskedTensor.to_layout`

    An element is valid where it was, and the condition holds; the others are absent: not zero, but invalid. A
    comparison made sparse is ``sparse_where(c, c)`` of ``c = x > y``: True where it holds, absent elsewhere.

    Raises TypeError for a condition that is not bool, RuntimeError for one that does not broadcast to `x`, ValueError
    for storage that does not fit the shape.
    """
    if not isinstance(x, Tensor) or not isinstance(condition, Tensor):
        raise TypeError(
            f"sparse_where takes tensors (x, condition), not {type(x).__name__} and {type(condition).__name__}"
        )
    if condition.dtype is not torch.bool:
        raise TypeError(
            f"sparse_where takes a bool condition, and this one is {condition.dtype}; compare it, condition != 0"
        )
    check_sparse(layout)
    check_layout(x, layout, sparse_dim, blocksize)
    kept: MaskedTensor = torch.ops.masked_dispatch.keep_where(x, condition, layout, sparse_dim, blocksize)
    return kept


def sparse_relu(
    x: Tensor,
    layout: torch.layout = CSR,
    *,
    sparse_dim: int | None = None,
    blocksize: tuple[int, int] | None = None,
) -> MaskedTensor:
    """The elements of `x` that relu leaves as they are, those above 0, sparsely stored; differentiable.

    As :func:`sparse_threshold` at 0: what is 0 or less is absent, so that a mean over the result is one of the active
    elements, and ``.to_tensor(0)`` is relu(x).
    """
    return sparse_threshold(x, 0, layout, sparse_dim=sparse_dim, blocksize=blocksize)


def sparse_threshold(
    x: Tensor,
    threshold: float,
    layout: torch.layout = CSR,
    *,
    sparse_dim: int | None = None,
    blocksize: tuple[int, int] | None = None,
) -> MaskedTensor:
    """The elements of `x` above a number, sparsely stored; differentiable.

    What is at the threshold or below is absent: invalid, not 0. NaN is kept, as torch's threshold keeps it.
    layout, sparse_dim, blocksize  as for :meth:`MaskedTensor.to_layout`

    Raises ValueError for storage that does not fit the shape.
    """
    return sparse_where(x, ~(x <= threshold), layout=layout, sparse_dim=sparse_dim, blocksize=blocksize)


def sparse_topk(
    x: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    *,
    layout: torch.layout = CSR,
    blocksize: tuple[int, int] | None = None,
) -> MaskedTensor:
    """The k largest (smallest) valid elements of each slice along `dim`, in their places, sparsely stored.

    Differentiable. The others are absent: invalid, not 0. A slice with fewer than k valid elements keeps what it has;
    of equal elements torch.topk decides which.
    layout, blocksize  as for :meth:`MaskedTensor.to_layout`; every dimension is stored sparsely

    Raises torch.topk's own errors for k and dim, and ValueError for storage that does not fit the shape.
    """
    check_sparse(layout)
    check_layout(x, layout, x.ndim, blocksize)
    kept: MaskedTensor = torch.ops.masked_dispatch.keep_top(x, k, dim, largest, layout, blocksize)
    return kept


def check_sparse(layout: torch.layout) -> None:
    """Refuse storage that would be dense: nothing would be left out."""
    if layout is torch.strided:
        raise ValueError(
            "torch.strided stores every element: name a sparse layout, or mask what is unwanted, x.mask_with(condition)"
        )
