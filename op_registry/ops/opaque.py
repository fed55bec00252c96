"""Operators whose results depend on every element of their operands, so that no slice has a result of its own.

Law: they run if every element is valid, and are refused otherwise; while tracing, nobody knows whether a stored mask is
all valid. Raw factors of matrices (`geqrf`, `ormqr`, `householder_product`, `ldl_*`) are an encoding that LAPACK reads
back; their single elements have no meaning.
"""

from __future__ import annotations

import torch

from op_registry.authoring import opaque

aten = torch.ops.aten

# --------------------------------------------------------------------------------------------- raw factors of matrices

RAW_FACTORS = "raw factors are an encoding that LAPACK reads back, whose elements mean nothing one by one"

linalg_ldl_factor_ex = opaque(aten.linalg_ldl_factor_ex, reason=RAW_FACTORS)
linalg_ldl_solve = opaque(aten.linalg_ldl_solve, reason=RAW_FACTORS)
geqrf = opaque(aten.geqrf, reason=RAW_FACTORS)
linalg_householder_product = opaque(aten.linalg_householder_product, reason=RAW_FACTORS)
ormqr = opaque(aten.ormqr, reason=RAW_FACTORS)
# A step of the matrix exponential.
_compute_linear_combination = opaque(aten._compute_linear_combination)

# ---------------------------------------------------------------------------------- products of block-scaled matrices

_scaled_mm = opaque(
    aten._scaled_mm.default,
    aten._scaled_mm_v2.default,
    aten._scaled_grouped_mm.default,
    aten._scaled_grouped_mm_v2.default,
    reason="a block with an invalid element has no scale of its own",
)
