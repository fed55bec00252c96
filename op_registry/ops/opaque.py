"""Linear algebra and Fourier transforms: every output element depends on every input element.

Law: they run where every element is valid and are refused otherwise; while tracing, a stored mask is not known to be
all valid. A matrix with a missing element has no inverse, and the transform of a signal with missing samples would need
a model of the signal. Operators that torch composes of these (inv, solve, fft2 …) decompose into them.
"""

from __future__ import annotations

import torch

from op_registry.authoring import opaque

aten = torch.ops.aten

# Raises depending on a factorisation's `info`: that must not depend on invalid elements.
_linalg_check_errors = opaque(aten._linalg_check_errors)

# ---------------------------------------------------------------------------------------- inverses and linear systems

linalg_inv_ex = opaque(aten.linalg_inv_ex)
linalg_pinv = opaque(aten.linalg_pinv.atol_rtol_tensor)
_linalg_solve_ex = opaque(aten._linalg_solve_ex)
linalg_solve_triangular = opaque(aten.linalg_solve_triangular)
triangular_solve = opaque(aten.triangular_solve)
linalg_lstsq = opaque(aten.linalg_lstsq)
linalg_lu_solve = opaque(aten.linalg_lu_solve)
linalg_ldl_solve = opaque(aten.linalg_ldl_solve)
cholesky_solve = opaque(aten.cholesky_solve, aten._cholesky_solve_helper)
cholesky_inverse = opaque(aten.cholesky_inverse)

# --------------------------------------------------------------------------- factorisations and functions of a matrix

linalg_cholesky_ex = opaque(aten.linalg_cholesky_ex)
cholesky = opaque(aten.cholesky)
linalg_lu = opaque(aten.linalg_lu)
linalg_lu_factor_ex = opaque(aten.linalg_lu_factor_ex)
lu_unpack = opaque(aten.lu_unpack)
linalg_ldl_factor_ex = opaque(aten.linalg_ldl_factor_ex)
linalg_qr = opaque(aten.linalg_qr)
geqrf = opaque(aten.geqrf)
linalg_householder_product = opaque(aten.linalg_householder_product)
ormqr = opaque(aten.ormqr)
_linalg_svd = opaque(aten._linalg_svd)
linalg_eig = opaque(aten.linalg_eig)
linalg_eigvals = opaque(aten.linalg_eigvals, aten._linalg_eigvals)
_linalg_eigh = opaque(aten._linalg_eigh)
# Composites that also compute vectors for tensor subclasses, by another routine with other rounding errors.
linalg_eigvalsh = opaque(aten.linalg_eigvalsh)
linalg_svdvals = opaque(aten.linalg_svdvals)
linalg_cond = opaque(aten.linalg_cond)
# A composite that compares singular values with tolerances, which may be masked even if the matrix is not.
linalg_matrix_rank = opaque(aten.linalg_matrix_rank)
_linalg_det = opaque(aten._linalg_det)
_linalg_slogdet = opaque(aten._linalg_slogdet)
linalg_matrix_exp = opaque(aten.linalg_matrix_exp, aten._compute_linear_combination)

# ---------------------------------------------------------------------------------- products of block-scaled matrices

# A block with an invalid element has no scale of its own.
_scaled_mm = opaque(aten._scaled_mm.default, aten._scaled_mm_v2.default)
_scaled_grouped_mm = opaque(aten._scaled_grouped_mm.default, aten._scaled_grouped_mm_v2.default)

# -------------------------------------------------------------------------------------------- transforms and sampling

_fft_r2c = opaque(aten._fft_r2c)
_fft_c2r = opaque(aten._fft_c2r)
_fft_c2c = opaque(aten._fft_c2c)
# Composites of transforms and of operators that have a masked meaning: opaque as a whole, like the transforms.
stft = opaque(aten.stft)
istft = opaque(aten.istft)
