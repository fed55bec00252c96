"""Factories.

Law: `*_like` gives torch's result under the mask of the input. `new_zeros`, `new_ones` and `new_full` are masked and
valid everywhere. Uninitialised elements are invalid: the results of `empty_like`, `new_empty` and `new_empty_strided`
have no valid element until one is written. So a function that allocates a buffer from its masked argument and fills it
slice by slice keeps the mask, and nobody observes unwritten memory. (In a compiled region, such a buffer stores its
mask in full.) `linspace` and `logspace` between tensors are valid
where both ends are.

`zero_` and `fill_` are assignments: they are written back from `zero` and `fill`, whose results take the validity of
the value that is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    ASSIGNMENT,
    FACTORY,
    Dense,
    Elementwise,
    Equation,
    MaskedSemanticsError,
    Number,
    Permuted,
    Sparse,
    Unknown,
    by_rule,
    gradients_may_flow,
    masked_rule,
    on_device_of,
    run_elementwise,
)
from op_registry.dimensions.movements import OfSizes
from op_registry.records.layout import new_buffer
from op_registry.sparse.on_values import ON_PERMUTED_VALUES, ON_VALUES
from op_registry.traits import Traits

aten = torch.ops.aten


@masked_rule(aten.full_like, aten.ones_like, aten.zeros_like, category=FACTORY, takes_op=True)
def zeros_like(op: OpOverload, self: Dense, *value: Number, **options: Any) -> Dense:
    """torch's result under the mask of the input, which moves to the device of the result."""
    check_strided(op, options)
    data = op(self.data, *value, **options)
    return Dense(data, on_device_of(data, self.validity))


zeros_like.lowering(Sparse)(ON_VALUES)
zeros_like.lowering(Permuted)(ON_PERMUTED_VALUES)


@masked_rule(aten.new_full, aten.new_ones, aten.new_zeros, category=FACTORY, takes_op=True, dims=OfSizes())
def new_zeros(op: OpOverload, self: Dense, size: Sequence[int], *value: Number, **options: Any) -> Dense:
    """A tensor with the input's dtype and device, valid everywhere."""
    check_strided(op, options)
    return new_buffer(op(self.data, size, *value, **options), valid=True)


# ------------------------------------------------------------------------------------------------ uninitialised memory


@masked_rule(aten.empty_like, category=FACTORY)
def empty_like(self: Dense, **options: Any) -> Dense:
    """A tensor with the input's shape, dtype and device; nothing is valid."""
    check_strided(aten.empty_like.default, options)
    return new_buffer(aten.empty_like(self.data, **options), valid=False)


# We keep the input's sparsity pattern, so that the result stays sparse; `new_buffer` makes the stored values invalid.
empty_like.lowering(Sparse)(ON_VALUES)
empty_like.lowering(Permuted)(ON_PERMUTED_VALUES)


@masked_rule(aten.new_empty, category=FACTORY, dims=OfSizes())
def new_empty(self: Dense, size: Sequence[int], **options: Any) -> Dense:
    """A tensor with the input's dtype and device; nothing is valid."""
    check_strided(aten.new_empty.default, options)
    return new_buffer(aten.new_empty(self.data, size, **options), valid=False)


@masked_rule(aten.new_empty_strided, category=FACTORY, dims=OfSizes())
def new_empty_strided(self: Dense, size: Sequence[int], stride: Sequence[int], **options: Any) -> Dense:
    """A tensor with given strides, as the autograd engine allocates gradients; nothing is valid."""
    check_strided(aten.new_empty_strided.default, options)
    return new_buffer(aten.new_empty_strided(self.data, size, stride, **options), valid=False)


@new_empty_strided.lowering(Sparse)
def new_empty_strided_like_stored(
    op: OpOverload, self: Sparse, size: Sequence[int], stride: Sequence[int], **options: Any
) -> Dense | Sparse:
    """With the input's size (a gradient, say), the result has the input's sparsity pattern; otherwise it is dense."""
    if tuple(size) != tuple(self.shape):
        return new_empty_strided.run(self.values, size, stride, **options)
    return self.like(empty_like.run(self.values, **options))


def on_any_values(op: OpOverload, self: Sparse | Permuted, size: Sequence[int], *rest: Any, **options: Any) -> Dense:
    """A dense result of another size: it only reads the dtype and the device of a sparse operand."""
    values = (self.base if isinstance(self, Permuted) else self).values
    return by_rule(op, values, size, *rest, **options)


for allocates in (new_zeros, new_empty):
    allocates.lowering(Sparse)(on_any_values)
    allocates.lowering(Permuted)(on_any_values)
new_empty_strided.lowering(Permuted)(on_any_values)


def check_strided(op: OpOverload, options: Mapping[str, Any]) -> None:
    """Refuse the layout of a torch.sparse tensor, which has no place for a mask."""
    layout = options.get("layout")
    if layout not in (None, torch.strided):
        raise MaskedSemanticsError(
            f"{op} with layout={layout} would give a torch.sparse tensor, which has no place for a mask. Leave the "
            f"layout out, and store the masked result sparsely: y.to_layout({layout})."
        )


# ------------------------------------------------------------------------------------------------------------- others


@masked_rule(aten.linspace, aten.logspace, category=FACTORY, takes_op=True, dims=Equation(",->N", "->N"))
def linspace(
    op: OpOverload, start: Dense | Number, end: Dense | Number, steps: int, *base: float, **options: Any
) -> Dense:
    """Steps from one number to another; either may be a 0-d tensor. Valid where both are."""
    result = run_elementwise(op, start, end, steps, *base, _traits=Traits(traps=True), **options)
    return Dense(result.data, on_device_of(result.data, result.validity))


@masked_rule(
    aten._new_zeros_with_same_feature_meta, category=FACTORY, dims=Unknown("the sizes are those of two operands")
)
def _new_zeros_with_same_feature_meta(self: Dense, other: Dense, *, self_num_batch_dims: int = 0) -> Dense:
    """Zeros that serve as the tangent of `other`, hence under its mask."""
    data = aten._new_zeros_with_same_feature_meta(self.data, other.data, self_num_batch_dims=self_num_batch_dims)
    return Dense(data, on_device_of(data, other.validity))


# New tensors instead of the functional operators themselves, which have no vmap batching rules (zero_, fill_ do).


@masked_rule(aten.zero, category=ASSIGNMENT, dims=Elementwise())
def zero(self: Dense) -> Dense:
    """Zeros, all valid."""
    return Dense(overwritten(self, torch.zeros_like(self.data)))


@masked_rule(aten.fill.Scalar, category=ASSIGNMENT, dims=Elementwise())
def fill(self: Dense, value: Number) -> Dense:
    """One value, valid everywhere."""
    return Dense(overwritten(self, torch.full_like(self.data, value)))


@masked_rule(aten.fill.Tensor, category=ASSIGNMENT, dims=Elementwise())
def fill_tensor(self: Dense, value: Dense) -> Dense:
    """One value; the result is valid everywhere if it is, and nowhere otherwise."""
    if value.ndim > 0:
        return Dense(aten.fill(self.data, value.data))  # raises torch's error
    data = value.data.to(self.device, self.dtype).expand(self.shape).clone()
    return Dense(overwritten(self, data), on_device_of(data, value.validity))


def overwritten(self: Dense, data: Tensor) -> Tensor:
    """New data replaces all of the old; the old data stays in the graph with a gradient of zero, as in torch."""
    if not gradients_may_flow(self.data):
        return data
    return torch.where(torch.ones((), dtype=torch.bool, device=data.device), data, self.data)
