"""Fake quantisation: rounding to the values that an integer type would have, in floating point.

Law: elementwise, with the scale and the zero point among the operands; valid where all of them are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import ELEMENTWISE, Along, Dense, Permuted, Sparse, masked_rule, never, valid_in_all

aten = torch.ops.aten


@masked_rule(aten.fake_quantize_per_tensor_affine_cachemask.default, category=ELEMENTWISE, takes_op=True)
def fake_quantize_per_tensor_affine_cachemask(
    op: OpOverload, self: Dense, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> tuple[Dense, Dense]:
    """The rounded values, and whether each was in range."""
    results = op(self.filled(0), scale, zero_point, quant_min, quant_max)
    return self.like(results[0]), self.like(results[1])


@masked_rule(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default, category=ELEMENTWISE)
def _fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
    self: Dense, scale: Dense, zero_point: Dense, fake_quant_enabled: Dense, quant_min: int, quant_max: int
) -> tuple[Dense, Dense]:
    """The same with a scale and a zero point of one element each, in tensors."""
    parameters = (scale.filled(1), zero_point.filled(0), fake_quant_enabled.filled(1))
    op = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default
    results = op(self.filled(0), *parameters, quant_min, quant_max)
    ones = [p.map(lambda t: t.reshape((1,) * self.ndim)) for p in (scale, zero_point, fake_quant_enabled)]
    validity = valid_in_all(self, *ones)
    return Dense(results[0], validity), Dense(results[1], validity)


@masked_rule(aten.fake_quantize_per_channel_affine_cachemask.default, category=ELEMENTWISE, dims=Along(None, "axis"))
def fake_quantize_per_channel_affine_cachemask(
    self: Dense, scale: Dense, zero_point: Dense, axis: int, quant_min: int, quant_max: int
) -> tuple[Dense, Dense]:
    """The same with a scale and a zero point for each index of `axis`."""
    op = aten.fake_quantize_per_channel_affine_cachemask.default
    results = op(self.filled(0), scale.filled(1), zero_point.filled(0), axis, quant_min, quant_max)

    def along_axis(t: Tensor) -> Tensor:
        return t.reshape([-1 if d == axis % self.ndim else 1 for d in range(self.ndim)])

    validity = valid_in_all(self, scale.map(along_axis), zero_point.map(along_axis))
    return Dense(results[0], validity), Dense(results[1], validity)


for rule in (
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams,
    fake_quantize_per_channel_affine_cachemask,
):
    for record in (Sparse, Permuted):
        rule.lowering(record)(never("its scale and zero point are tensors of another shape"))
