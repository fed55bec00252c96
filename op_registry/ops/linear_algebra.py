"""Linear algebra: decompositions, functions of a matrix, and systems of linear equations.

Law: all or nothing for each matrix. A matrix without a hole gives what torch gives for it alone; one with a hole gives
nothing, raises nothing, and changes none of its neighbours. The results for a matrix share its validity; `cholesky` and
`eigh`, which read one triangle, are no exception. Operators that torch composes of these (inv, det, eigh, nuclear norms
…) decompose into them.

Law of systems of equations: all or nothing for each column of the solution, which depends on the whole matrix (in
`solve_triangular` on the named triangle alone) and on its own column of the right-hand side. With ``left=False``, this
holds for rows in place of columns. Results that describe the matrix (factors, pivots, `info`, rank) depend on the
matrix alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    WHOLE_SLICES,
    ByArgument,
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


# -------------------------------------------------------- one matrix: inverses, decompositions, determinants, functions


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


# --------------------------------------------------------- systems of linear equations, and the factors that solve them


def is_vector(matrix: Dense, right: Dense) -> bool:
    """Whether the right-hand side is one column for each matrix, without a dimension for columns, by torch's test."""
    return right.ndim == 1 or (right.ndim == matrix.ndim - 1 and right.shape == matrix.shape[:-1])


def whole_columns(right: Dense, left: bool = True, vector: bool = False) -> Tensor | None:
    """Where each column of the right-hand side is whole; each row with ``left=False``."""
    return whole_validity(right, (-2,) if left and not vector else (-1,))


def solution(result: Tensor, matrix: Tensor | None, columns: Tensor | None, vector: bool = False) -> Dense:
    """The solution, valid where its matrix and its column are."""
    if vector and matrix is not None:
        matrix = matrix[..., 0]
    validity = intersect(matrix, columns)
    return for_each_slice(result, validity, result.ndim)


@masked_rule(
    aten.linalg_solve,
    category=WHOLE_SLICES,
    dims=ByArgument(
        "left", Equation("MN,N->M", "bMN,bN->bM", "abMN,abN->abM", "*MN,*Nk->*Mk"), Equation("*MN,*kM->*kN")
    ),
)
def linalg_solve(A: Dense, B: Dense, *, left: bool = True) -> Dense:
    """A composite that has a rule because of its out= form, like linalg_inv."""
    vector = is_vector(A, B)
    matrices, columns = whole_validity(A), whole_columns(B, left, vector)
    result = aten.linalg_solve(replaced(A, matrices, spread_diagonal), replaced(B, columns, 0), left=left)
    return solution(result, matrices, columns, vector)


@masked_rule(
    aten._linalg_solve_ex,
    category=WHOLE_SLICES,
    dims=ByArgument(
        "left",
        Equation("MN,N->M,MN,M,", "bMN,bN->bM,bMN,bM,b", "abMN,abN->abM,abMN,abM,ab", "*MN,*Nk->*Mk,*MN,*M,*"),
        Equation("*MN,*kM->*kN,*MN,*M,*"),
    ),
)
def _linalg_solve_ex(
    A: Dense, B: Dense, *, left: bool = True, check_errors: bool = False
) -> tuple[Dense, Dense, Dense, Dense]:
    vector = is_vector(A, B)
    matrices, columns = whole_validity(A), whole_columns(B, left, vector)
    result, lu, pivots, info = aten._linalg_solve_ex(
        replaced(A, matrices, spread_diagonal), replaced(B, columns, 0), left=left, check_errors=check_errors
    )
    each = each_matrix(matrices)
    return (
        solution(result, matrices, columns, vector),
        for_each_slice(lu, each, lu.ndim - 2),
        for_each_slice(pivots, each, pivots.ndim - 1),
        for_each_slice(info, each, info.ndim),
    )


def triangle(matrix: Dense, upper: bool, unitriangular: bool) -> Tensor:
    """Where a triangular solve reads its matrix: one triangle, without its diagonal if that counts as ones."""
    everywhere = torch.ones(matrix.shape[-2:], dtype=torch.bool, device=matrix.device)
    return everywhere.triu(int(unitriangular)) if upper else everywhere.tril(-int(unitriangular))


@masked_rule(
    aten.linalg_solve_triangular,
    category=WHOLE_SLICES,
    dims=ByArgument("left", Equation("*MN,*Nk->*Mk"), Equation("*MN,*kM->*kN")),
)
def linalg_solve_triangular(
    self: Dense, B: Dense, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Dense:
    read = triangle(self, upper, unitriangular)
    matrices, columns = whole_validity(self, read=read), whole_columns(B, left)
    result = aten.linalg_solve_triangular(
        replaced(self, matrices, spread_diagonal, partly_read=True),
        replaced(B, columns, 0),
        upper=upper,
        left=left,
        unitriangular=unitriangular,
    )
    return solution(result, matrices, columns)


@masked_rule(aten.triangular_solve, category=WHOLE_SLICES, dims=Equation("*Nk,*MN->*Mk,*MN"))
def triangular_solve(
    self: Dense, A: Dense, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Dense, Dense]:
    """Like linalg_solve_triangular. The second result copies the whole matrix, including the triangle not read."""
    read = triangle(A, upper, unitriangular)
    matrices, columns = whole_validity(A, read=read), whole_columns(self)
    result, copied = aten.triangular_solve(
        replaced(self, columns, 0),
        replaced(A, matrices, spread_diagonal, partly_read=True),
        upper,
        transpose,
        unitriangular,
    )
    whole = whole_validity(A)
    return solution(result, matrices, columns), for_each_slice(copied, each_matrix(whole), copied.ndim - 2)


@masked_rule(aten.cholesky_solve, aten._cholesky_solve_helper, category=WHOLE_SLICES, dims=Equation("*Nk,*MN->*Mk"))
def cholesky_solve(self: Dense, input2: Dense, upper: bool = False) -> Dense:
    """`input2` is a Cholesky factor; both of its triangles must be valid, as they are in a result of `cholesky`."""
    matrices, columns = whole_validity(input2), whole_columns(self)
    result = aten.cholesky_solve(replaced(self, columns, 0), replaced(input2, matrices, spread_diagonal), upper)
    return solution(result, matrices, columns)


def no_exchange(pivots: Tensor) -> Tensor:
    """Pivots that leave every row where it is; LAPACK counts from 1."""
    return torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)


def whole_pivots(pivots: Dense) -> Tensor | None:
    """Where the pivots of a matrix are whole, with two dimensions of size 1 in place of the matrix."""
    whole = whole_validity(pivots, (-1,))
    return None if whole is None else whole.unsqueeze(-1)


@masked_rule(
    aten.linalg_lu_solve,
    category=WHOLE_SLICES,
    dims=ByArgument("left", Equation("*MN,*M,*Nk->*Mk"), Equation("*MN,*M,*kM->*kN")),
)
def linalg_lu_solve(LU: Dense, pivots: Dense, B: Dense, *, left: bool = True, adjoint: bool = False) -> Dense:
    matrices, exchanges, columns = whole_validity(LU), whole_pivots(pivots), whole_columns(B, left)
    result = aten.linalg_lu_solve(
        replaced(LU, matrices, spread_diagonal),
        replaced(pivots, None if exchanges is None else exchanges[..., 0], no_exchange),
        replaced(B, columns, 0),
        left=left,
        adjoint=adjoint,
    )
    return solution(result, intersect(matrices, exchanges), columns)


@masked_rule(aten.lu_unpack, category=WHOLE_SLICES, dims=Equation("*MN,*K->*PP,*MJ,*LN"))
def lu_unpack(
    LU_data: Dense, LU_pivots: Dense, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Dense, ...]:
    """The operator does not read the factors that it does not unpack; their results have no elements."""
    matrices, exchanges = whole_validity(LU_data), whole_pivots(LU_pivots)
    results = aten.lu_unpack(
        replaced(LU_data, matrices, spread_diagonal),
        replaced(LU_pivots, None if exchanges is None else exchanges[..., 0], no_exchange),
        unpack_data,
        unpack_pivots,
    )
    read = intersect(matrices if unpack_data else None, exchanges if unpack_pivots else None)
    return tuple(for_each_slice(result, each_matrix(read), result.ndim - 2) for result in results)


@masked_rule(
    aten.linalg_lstsq,
    category=WHOLE_SLICES,
    dims=Unknown("which results there are depends on the sizes and the driver"),
)
def linalg_lstsq(
    self: Dense, b: Dense, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Dense, Dense, Dense, Dense]:
    """No single equation is dropped: a hole in the matrix invalidates every column, a hole in `b` its own column."""
    vector = is_vector(self, b)
    matrices, columns = whole_validity(self), whole_columns(b, vector=vector)
    found, residuals, rank, singular_values = aten.linalg_lstsq(
        replaced(self, matrices, spread_diagonal), replaced(b, columns, 0), rcond, driver=driver
    )
    each = each_matrix(matrices)
    solved = solution(found, matrices, columns, vector)
    # There is one residual for each column, and the solution stores one validity for each column.
    per_column = solved.validity if vector or solved.validity is None else solved.validity[..., 0, :]
    return (
        solved,
        for_each_slice(residuals, per_column, residuals.ndim),
        for_each_slice(rank, each, rank.ndim),
        for_each_slice(singular_values, each, singular_values.ndim - 1),
    )
