"""Matrix products, alone and with an added operand; bilinear forms; affine grids.

Law: a contraction is the sum of products over the index tuples whose factors are all valid. It is valid where there is
at least one such tuple, or no tuple at all (a contracted dimension of size 0). An added `self` or bias is elementwise:
it never makes an invalid element valid, and with ``beta=0`` neither its values nor its mask take part.

Every factor is filled with 0, and the operator itself runs once. The mask follows from the equation (contracted.py of
the records), as do the forms on sparse storage. As in every padded batch, 0 · inf is NaN: a valid infinity times an
invalid factor spoils the sum.

tensordot, inner, outer, kron, bilinear and chains of products are left to torch's decompositions, and so are the steps
of einsum: contracting in steps sums over the same tuples as contracting at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    COMPOSITE,
    CONTRACTION,
    Bound,
    Dense,
    Equation,
    NotLowered,
    Permuted,
    Sparse,
    Unknown,
    call,
    contraction,
    first_of,
    masked_rule,
    never,
    on_call,
    refused,
    run_contraction,
)
from op_registry.dimensions.movements import Unsqueezed
from op_registry.records.fill import zeroed
from op_registry.sparse.contraction import BY_ELEMENTS, BY_EQUATION, sampled_sum
from op_registry.sparse.on_values import ON_STORED_ROWS

aten = torch.ops.aten

MM, BMM = Equation("mk,kn->mn"), Equation("bmk,bkn->bmn")
ADDMM, BADDBMM = Equation("+,mk,kn->mn"), Equation("+,bmk,bkn->bmn")
MATMUL = Equation("*mk,*kn->*mn", "*mk,k->*m", "k,*kn->*n", "k,k->")

mm = contraction(aten.mm.default, dims=MM, sparse_factors=True)
bmm = contraction(aten.bmm.default, dims=BMM, sparse_factors=True)
matmul = contraction(aten.matmul.default, aten.linalg_matmul.default, dims=MATMUL, sparse_factors=True)
mv = contraction(aten.mv.default, dims=Equation("mk,k->m"), sparse_factors=True)
dot = contraction(aten.dot.default, dims=Equation("k,k->"), sparse_factors=True)
addmm = contraction(aten.addmm.default, dims=ADDMM, sparse_factors=True)
baddbmm = contraction(aten.baddbmm.default, dims=BADDBMM, sparse_factors=True)
addmv = contraction(aten.addmv.default, dims=Equation("+,mk,k->m"), sparse_factors=True)
addbmm = contraction(aten.addbmm.default, dims=Equation("+,bmk,bkn->mn"))
addr = contraction(aten.addr.default, dims=Equation("+,m,n->mn"))
# These compute more than the sum: another dtype, an activation, a conjugate.
wide_mm = contraction(aten.mm.dtype, aten._int_mm.default, dims=MM, sparse_factors=True)
wide_bmm = contraction(aten.bmm.dtype, dims=BMM, sparse_factors=True)
wide_addmm = contraction(aten.addmm.dtype, dims=ADDMM, sparse_factors=True)
wide_baddbmm = contraction(aten.baddbmm.dtype, dims=BADDBMM, sparse_factors=True)
_addmm_activation = contraction(aten._addmm_activation.default, dims=ADDMM)
vdot = contraction(aten.vdot.default, dims=Equation("k,k->"), sparse_factors=True)
# The core of bilinear: three factors.
_trilinear = contraction(aten._trilinear.default, dims=Unsqueezed())


@masked_rule(
    aten.linear.default,
    category=CONTRACTION,
    takes_op=True,
    dims=Equation("*k,nk,+->*n", "*k,k,+->*"),
    sparse_factors=True,
)
def linear(op: OpOverload, input: Dense, weight: Dense, bias: Dense | None = None) -> Dense:
    """Rows without a valid element are zeroed, so that the operators of the next layer need no fill."""
    result = run_contraction(op, input, weight, bias, _traits=linear.traits)
    return result.like(zeroed(result.data, result.validity))


@masked_rule(aten.einsum.default, category=COMPOSITE)
def einsum(equation: str, tensors: Sequence[Tensor], *, path: Sequence[int] | None = None) -> Tensor:
    """torch's own steps, which tell dimensions apart by their sizes: those of size 1 lose the samples that they belong
    to. So where there is one, the steps are products of matrices by letter, from left to right.
    """
    if all(1 not in tensor.shape for tensor in tensors):
        return aten.einsum.default.decompose(equation, tensors, path=path)  # type: ignore[no-any-return]
    shapes = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
    dtype = aten.einsum.default(equation, shapes).dtype  # (it raises torch's errors)
    tensors = [t.to(dtype) for t in tensors]
    terms, arrow, kept = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = terms.replace(",", "").replace("...", "")
        kept = "..." * ("..." in terms) + "".join(a for a in sorted(set(letters)) if letters.count(a) == 1)
    # Digits are the dimensions that "..." stands for, counted from the last one.
    named = [len(term.replace("...", "")) for term in terms.split(",")]
    digits = ["".join(map(str, reversed(range(t.ndim - n)))) for t, n in zip(tensors, named, strict=True)]
    owns = [term.replace("...", d) for term, d in zip(terms.split(","), digits, strict=True)]
    kept = kept.replace("...", max(digits, key=len))
    own, product = _summed_alone(owns[0], tensors[0], kept + "".join(owns[1:]))
    for n, (other, tensor) in enumerate(zip(owns[1:], tensors[1:], strict=True), 2):
        wanted = kept + "".join(owns[n:])
        own, product = _product(own, product, *_summed_alone(other, tensor, wanted + own), wanted)
    return product.permute([own.index(a) for a in kept])


def _summed_alone(own: str, x: Tensor, wanted: str) -> tuple[str, Tensor]:
    """A factor of einsum without the letters that it has twice, or that nothing else has."""
    for a in [b for n, b in enumerate(own) if b in own[:n]]:
        first, second = own.index(a), own.rindex(a)
        own, x = own[:first] + own[first + 1 : second] + own[second + 1 :] + a, x.diagonal(0, first, second)
    alone = [d for d, a in enumerate(own) if a not in wanted]
    return "".join(a for a in own if a in wanted), x.sum(alone, dtype=x.dtype) if alone else x


def _product(left: str, x: Tensor, right: str, y: Tensor, wanted: str) -> tuple[str, Tensor]:
    """The product of two factors of einsum, by matrices whose rows and columns have no dimension of size 1."""
    ones = [a for own, t in ((left, x), (right, y)) for a, size in zip(own, t.shape, strict=True) if size == 1]
    batch = [a for a in dict.fromkeys(left + right) if a in ones or (a in left and a in right and a in wanted)]
    inner = [a for a in left if a in right and a not in batch]
    rows, columns = ([a for a in own if a not in batch and a not in inner] for own in (left, right))
    product = _as_matrices(left, x, batch, rows, inner) @ _as_matrices(right, y, batch, inner, columns)
    for d, own, t, letters in ((-1, right, y, columns), (-1 - len(columns), left, x, rows)):
        sizes = [t.shape[own.index(a)] for a in letters]
        product = product.unflatten(d, sizes) if sizes else product.squeeze(d)
    return _summed_alone("".join([*batch, *rows, *columns]), product, wanted)


def _as_matrices(own: str, x: Tensor, batch: list[str], rows: list[str], columns: list[str]) -> Tensor:
    x = x.permute([own.index(a) for a in [*batch, *rows, *columns] if a in own])
    for d, a in enumerate(batch):
        x = x if a in own else x.unsqueeze(d)
    x = x.flatten(len(batch) + len(rows)) if columns else x.unsqueeze(-1)
    return x.flatten(len(batch), -2) if rows else x.unsqueeze(-2)


@masked_rule(
    aten.affine_grid_generator.default,
    category=CONTRACTION,
    dims=Unknown("`size` says how many dimensions the grid has"),
)
def affine_grid_generator(theta: Dense, size: Sequence[int], align_corners: bool) -> Dense:
    """Each coordinate of the grid is a row of theta times a base point whose coordinates are all valid."""
    grid = aten.affine_grid_generator(theta.filled(0), size, align_corners)
    rows = theta.any_valid(-1)
    return Dense(grid, None if rows is None else rows[(slice(None), *[None] * (grid.ndim - 2))])


@affine_grid_generator.samples
def _affine_grids(make: Callable[[tuple[int, ...]], Tensor]) -> Iterator[tuple[Any, ...]]:
    """In two and in three dimensions."""
    for corners in (False, True):
        yield (make((2, 2, 3)), [2, 1, 3, 4], corners)
        yield (make((2, 3, 4)), [2, 1, 3, 2, 4], corners)


sampled_addmm = refused(
    aten.sparse_sampled_addmm.default,
    reason="it works on a torch.sparse tensor, in which unspecified elements are zero",
    instead="Make the first operand a masked tensor in sparse storage, as_masked_tensor(x) of a torch.sparse tensor or "
    "x.to_sparse_csr() of a masked one, in which they are invalid",
    dims=ADDMM,
)

# ------------------------------------------------------------------------------------------------------ sparse storage

for rule in (wide_mm, wide_bmm, wide_addmm, wide_baddbmm, _addmm_activation):
    rule.lowering(Sparse)(ON_STORED_ROWS)
# Not on stored rows: of no rows, torch.addmv has the shape of what is added.
addmv.lowering(Sparse)(first_of(BY_EQUATION, BY_ELEMENTS))
addmv.lowering(Permuted)(never("dense dimensions stand before sparse ones"))


@vdot.lowering(Sparse)
@on_call
def dot_of_conjugate(c: Bound) -> Any:
    return call(aten.dot.default, call(aten.conj_physical.default, c.self), c.other)


# Refused on torch.sparse tensors, whose unspecified elements are zero. Here they are invalid, so it is well defined.
@sampled_addmm.lowering(Sparse)
@on_call
def sampled_by_sparse(c: Bound) -> Any:
    if not c.self.dtype == c.mat1.dtype == c.mat2.dtype:  # torch refuses it as well
        raise RuntimeError(
            f"sampled_addmm of {c.self.dtype} with factors of {c.mat1.dtype} and {c.mat2.dtype}: it needs one dtype. "
            f"Convert the first operand, x.to({c.mat1.dtype}), or the factors"
        )
    if not isinstance(c.self, Sparse) or c.self.dense_sizes or 0 in (*c.self.shape, *c.mat1.shape):
        raise NotLowered("its first operand is no sparse matrix, or it is empty")
    return sampled_sum(c)
