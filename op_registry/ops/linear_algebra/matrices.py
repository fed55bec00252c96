"""Operators of one matrix: inverses, decompositions, determinants and functions of a matrix.

Law: a matrix gives its results, all of them, if every element of it is valid; `cholesky` and `eigh`, which read one
triangle, are no exception. Operators that torch composes of these (inv, det, eigh, nuclear norms …) decompose into
them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    WHOLE_SLICES,
    Dense,
    Equation,
    Unknown,
    each_matrix,
    for_each_slice,
    intersect,
    masked_rule,
    replaced,
    spread_diagonal,
    whole_slices,
    whole_validity,
)

aten = torch.ops.aten


@masked_rule(
    aten._linalg_check_errors, category=WHOLE_SLICES, plain=(0,), dims=Unknown("it raises, or returns nothing")
)
def _linalg_check_errors(info: Dense, api_name: str, *, is_matrix: bool) -> None:
    """Raises if a factorisation of a valid matrix failed; 0 stands for success."""
    aten._linalg_check_errors(info.filled(0), api_name, is_matrix=is_matrix)


# Composites are served whole where their out= form would keep `info` in a plain buffer of torch's own, in which what is
# invalid stays uninitialised.
linalg_inv = whole_slices(aten.linalg_inv, dims=Equation("*MN->*NM"))
linalg_inv_ex = whole_slices(aten.linalg_inv_ex, dims=Equation("*MN->*NM,*"))
linalg_cholesky = whole_slices(aten.linalg_cholesky, dims=Equation("*MN->*MN"))
linalg_cholesky_ex = whole_slices(aten.linalg_cholesky_ex, dims=Equation("*MN->*MN,*"))
if hasattr(aten, "cholesky"):  # torch 2.14 has linalg_cholesky alone
    cholesky = whole_slices(aten.cholesky, dims=Equation("*MN->*MN"))
# Takes a Cholesky factor and returns the inverse of its matrix.
cholesky_inverse = whole_slices(aten.cholesky_inverse, dims=Equation("*MN->*MN"))
linalg_lu = whole_slices(aten.linalg_lu, dims=Equation("*MN->*MM,*MK,*KN"))
linalg_lu_factor = whole_slices(aten.linalg_lu_factor, dims=Equation("*MN->*MN,*K"))
linalg_lu_factor_ex = whole_slices(aten.linalg_lu_factor_ex, dims=Equation("*MN->*MN,*K,*"))
linalg_qr = whole_slices(aten.linalg_qr, dims=Equation("*MN->*MK,*LN"))
_linalg_svd = whole_slices(aten._linalg_svd, dims=Equation("*MN->*MK,*J,*LN"))
linalg_eig = whole_slices(aten.linalg_eig, dims=Equation("*MN->*M,*MN"))
_linalg_eigh = whole_slices(aten._linalg_eigh, dims=Equation("*MN->*M,*MN"))
_linalg_det = whole_slices(aten._linalg_det, dims=Equation("*MN->*,*MN,*M"))
_linalg_slogdet = whole_slices(aten._linalg_slogdet, dims=Equation("*MN->*,*,*MN,*M"))
linalg_matrix_exp = whole_slices(aten.linalg_matrix_exp, dims=Equation("*MN->*MN"))
# Composites that also compute vectors for tensor subclasses, by another routine with other rounding errors.
linalg_eigvals = whole_slices(aten.linalg_eigvals, aten._linalg_eigvals, dims=Equation("*MN->*M"))
linalg_eigvalsh = whole_slices(aten.linalg_eigvalsh, dims=Equation("*MN->*M"))
linalg_svdvals = whole_slices(aten.linalg_svdvals, dims=Equation("*MN->*K"))
# torch composes it of norms. Some norms are defined for a matrix with holes; a condition number is not.
linalg_cond = whole_slices(aten.linalg_cond, dims=Equation("*MN->*"))


@masked_rule(
    aten.linalg_matrix_rank.default,
    aten.linalg_matrix_rank.atol_rtol_float,
    aten.linalg_matrix_rank.atol_rtol_tensor,
    aten.linalg_matrix_rank.tol_tensor,
    category=WHOLE_SLICES,
    takes_op=True,
    dims=Equation("*MN->*", "*MN,*,*->*", "*MN,*->*"),
)
def linalg_matrix_rank(op: OpOverload, input: Dense, *arguments: object, **options: object) -> Dense:
    """Tolerances may be tensors with one number for each matrix; an invalid tolerance makes the rank invalid."""
    return with_tolerances(op, input, arguments, options, dims=0)


@masked_rule(aten.linalg_pinv.atol_rtol_tensor, category=WHOLE_SLICES, takes_op=True, dims=Equation("*MN,*,*->*NM"))
def linalg_pinv(op: OpOverload, self: Dense, **options: object) -> Dense:
    """Like linalg_matrix_rank: an invalid tolerance makes the results for its matrix invalid."""
    return with_tolerances(op, self, (), options, dims=2)


def with_tolerances(
    op: OpOverload, x: Dense, arguments: tuple[object, ...], options: dict[str, object], dims: int
) -> Dense:
    """Run an operator that takes a matrix and tolerances for its singular values; invalid tolerances become 0.

    `dims` is the number of dimensions that the result has for each matrix.
    """

    def filled(value: object) -> object:
        return value.filled(0) if isinstance(value, Dense) else value

    whole = whole_validity(x)
    given = [filled(value) for value in arguments]
    named = {name: filled(value) for name, value in options.items()}
    result: Tensor = op(replaced(x, whole, spread_diagonal), *given, **named)
    validity = each_matrix(whole)
    for value in (*arguments, *options.values()):
        if isinstance(value, Dense):
            validity = intersect(validity, value.validity)
    return for_each_slice(result, validity, result.ndim - dims)
