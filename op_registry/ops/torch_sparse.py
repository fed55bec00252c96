"""The functions of torch.sparse, which expect torch.sparse tensors: mm, addmm, sum, softmax, log_softmax and others.

Law: as the function of the same name outside torch.sparse. In torch.sparse, an unspecified element is 0 in a product or
a sum, and absent from a softmax. A masked tensor's unspecified elements are invalid, so they are absent from all three,
which changes no sum. So each rule calls the other function, for any storage of its operands, and returns its result.

Law of torch.sparse operands: a torch.sparse tensor beside a masked one is plain, valid everywhere, and 0 where it
specifies nothing. The call gives what it gives with ``t.to_dense()``, and stores it densely if
`masked_dispatch.densify` allows it; torch's own sparse product takes it as it is if it requires no gradient. Functorch
transforms take COO alone. Nothing can be written to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import COMPOSITE, MaskedSemanticsError, Number, masked_rule, refused

aten = torch.ops.aten


@masked_rule(aten._sparse_mm.default, aten.smm.default, aten.hspmm.default, category=COMPOSITE, sparse_factors=True)
def _sparse_mm(sparse: Tensor, dense: Tensor) -> Tensor:
    return torch.mm(sparse, dense)


@masked_rule(aten._sparse_mm.reduce, category=COMPOSITE, sparse_factors=True)
def _sparse_mm_reduce(sparse: Tensor, dense: Tensor, reduce: str) -> Tensor:
    """Refused, but for the sum: nothing keeps the products of a row, of which some are invalid."""
    if reduce == "sum":
        return torch.mm(sparse, dense)
    raise MaskedSemanticsError(
        f"torch.sparse.mm(..., {reduce!r}) of masked tensors is refused: it reduces over the products of each row "
        "without keeping them, and has no kernel that knows which of them are valid. Make the products, "
        f"(x.unsqueeze(-1) * y).{reduce}(-2), of as many rows at a time as there is memory for."
    )


@masked_rule(aten._sparse_addmm.default, aten.sspaddmm.default, category=COMPOSITE, sparse_factors=True)
def _sparse_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    return torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha)


@masked_rule(aten._sparse_sum.default, aten._sparse_sum.dtype, category=COMPOSITE)
def _sparse_sum(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.sum(self, dtype=dtype)


@masked_rule(aten._sparse_sum.dim, aten._sparse_sum.dim_dtype, category=COMPOSITE)
def _sparse_sum_along(self: Tensor, dim: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.sum(self, list(dim), dtype=dtype)


@masked_rule(aten._sparse_softmax.int, aten._sparse_log_softmax.int, category=COMPOSITE, takes_op=True)
def _sparse_softmax(op: OpOverload, self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    function = torch.log_softmax if "log" in op._schema.name else torch.softmax
    return function(self, dim, dtype=dtype)


_sparse_solve = refused(
    aten._spsolve.default,
    reason="it hands the pieces of a torch.sparse tensor to a solver, in which unspecified elements are zero",
    instead="Call torch.linalg.solve(x.to_dense(), b), in which a matrix counts as a whole, or fill it first, "
    "x.to_torch_sparse(0)",
)
_sparse_diagonals = refused(
    aten._spdiags.default,
    reason="it makes a torch.sparse tensor, in which unspecified elements are zero",
    instead="Call torch.diag_embed(x[i], offset) for each diagonal, and add the results",
)
