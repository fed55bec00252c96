"""Factories.

Law: `*_like` gives torch's result under the mask of the input. `new_*` gives plain tensors, whatever it is called on;
but `new_empty_strided` of the same size, with which autograd allocates gradients, is masked. `linspace` and `logspace`
between tensors are valid where both ends are.

`zero_` and `fill_` are assignments: they are written back from `zero` and `fill`, whose results take the validity of
the value that is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    ASSIGNMENT,
    FACTORY,
    ON_PERMUTED_VALUES,
    ON_VALUES,
    Dense,
    Number,
    Permuted,
    Sparse,
    masked_rule,
    on_device_of,
    run_elementwise,
)

aten = torch.ops.aten


@masked_rule(aten.empty_like, aten.full_like, aten.ones_like, aten.zeros_like, category=FACTORY, takes_op=True)
def zeros_like(op: OpOverload, self: Dense, *value: Number, **options: Any) -> Dense:
    """Under the mask of the input, which moves to the device of the result."""
    data = op(self.data, *value, **options)
    return Dense(data, on_device_of(data, self.validity))


zeros_like.lowering(Sparse)(ON_VALUES)
zeros_like.lowering(Permuted)(ON_PERMUTED_VALUES)


@masked_rule(aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros, category=FACTORY, takes_op=True)
def new_zeros(op: OpOverload, self: Dense, size: Sequence[int], *value: Number, **options: Any) -> Tensor:
    """A plain tensor of the input's dtype and device."""
    result: Tensor = op(self.data, size, *value, **options)
    return result


new_zeros.lowering(Sparse)(ON_VALUES)
new_zeros.lowering(Permuted)(ON_PERMUTED_VALUES)


@masked_rule(aten.new_empty_strided, category=FACTORY)
def new_empty_strided(self: Dense, size: Sequence[int], stride: Sequence[int], **options: Any) -> Dense | Tensor:
    """Masked like the input if it has the input's size; else a plain tensor."""
    data: Tensor = aten.new_empty_strided(self.data, size, stride, **options)
    if data.shape != self.shape:
        return data
    return Dense(data, on_device_of(data, self.validity))


@new_empty_strided.lowering(Sparse)
def new_empty_strided_sparse(
    op: OpOverload, self: Sparse, size: Sequence[int], stride: Sequence[int], **options: Any
) -> Any:
    """Stored like the input if it has the input's size."""
    if tuple(size) != tuple(self.shape):
        return aten.new_empty_strided(self.values.data, size, stride, **options)
    return self.like(self.values.like(torch.empty_like(self.values.data, dtype=options.get("dtype"))))


@masked_rule(aten.linspace, aten.logspace, category=FACTORY, takes_op=True)
def linspace(
    op: OpOverload, start: Dense | Number, end: Dense | Number, steps: int, *base: float, **options: Any
) -> Dense:
    """From one number to another, each of which may be a 0-d tensor; valid where both are."""
    result = run_elementwise(op, start, end, steps, *base, _traits={"traps": True}, **options)
    return Dense(result.data, on_device_of(result.data, result.validity))


@masked_rule(aten._new_zeros_with_same_feature_meta, category=FACTORY)
def _new_zeros_with_same_feature_meta(self: Dense, other: Dense, *, self_num_batch_dims: int = 0) -> Dense:
    """Zeros that serve as the tangent of `other`, hence under its mask."""
    data = aten._new_zeros_with_same_feature_meta(self.data, other.data, self_num_batch_dims=self_num_batch_dims)
    return Dense(data, on_device_of(data, other.validity))


# New tensors instead of the functional operators themselves, which have no vmap batching rules (zero_, fill_ do).


@masked_rule(aten.zero, category=ASSIGNMENT)
def zero(self: Dense) -> Dense:
    """Zeros, all valid."""
    return Dense(torch.zeros_like(self.data))


@masked_rule(aten.fill.Scalar, category=ASSIGNMENT)
def fill(self: Dense, value: Number) -> Dense:
    """One value, valid everywhere."""
    return Dense(torch.full_like(self.data, value))


@masked_rule(aten.fill.Tensor, category=ASSIGNMENT)
def fill_tensor(self: Dense, value: Dense) -> Dense:
    """One value; the result is valid everywhere if it is, and nowhere otherwise."""
    if value.ndim > 0:
        return Dense(aten.fill(self.data, value.data))  # raises torch's error
    data = value.data.to(self.device, self.dtype).expand(self.shape).clone()
    return Dense(data, on_device_of(data, value.validity))
