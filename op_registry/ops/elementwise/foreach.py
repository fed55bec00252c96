"""`_foreach_*` operators that need a rule: those that have no single-tensor form, or write to more than the list.

Law: the same as on each tensor alone. All other `_foreach_*` operators run their single-tensor form on each tensor of
the list.
"""

from __future__ import annotations

import torch

from op_registry.authoring import (
    ASSIGNMENT,
    REDUCTION,
    Dense,
    Number,
    Unknown,
    accumulation_dtype,
    by_rule,
    masked_rule,
)

aten = torch.ops.aten


@masked_rule(aten._foreach_norm.Scalar, category=REDUCTION, dims=Unknown("it is one call for each of a list"))
def _foreach_norm(self: list[Dense], ord: Number = 2, dtype: torch.dtype | None = None) -> list[Dense]:
    """The vector norm of each tensor over its valid elements."""
    return [by_rule(aten.linalg_vector_norm.default, x, ord, dtype=dtype) for x in self]


@masked_rule(aten._foreach_powsum.Scalar, category=REDUCTION, dims=Unknown("it is one call for each of a list"))
def _foreach_powsum(self: list[Dense], ord: Number = 2, dtype: torch.dtype | None = None) -> list[Dense]:
    """For each tensor the sum of ``abs(x) ** ord`` over its valid elements."""

    def powsum(x: Dense) -> Dense:
        if x.validity is None:
            return Dense(aten._foreach_powsum([x.data], ord, dtype)[0])
        powers = x.filled(1).to(dtype or accumulation_dtype(x.dtype)).abs().pow(ord)
        return Dense(x.like(powers).filled(0).sum().to(dtype or x.dtype), x.any_valid())

    return [powsum(x) for x in self]


@masked_rule(
    aten._amp_foreach_non_finite_check_and_unscale_.default,
    category=ASSIGNMENT,
    dims=Unknown("it writes to a list of tensors"),
)
def _amp_foreach_non_finite_check_and_unscale_(self: list[Dense], found_inf: Dense, inv_scale: Dense) -> None:
    """Unscale gradients in place, and set `found_inf` if a valid element of one is not finite.

    Invalid elements are set to 0 before the check. The operator has no functional form that could be written back, so
    this rule itself writes to the data of its records.
    """
    for x in self:
        if x.validity is not None:
            x.data.copy_(x.filled(0))
    aten._amp_foreach_non_finite_check_and_unscale_([x.data for x in self], found_inf.data, inv_scale.data)
