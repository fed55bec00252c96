"""Pointwise operators: arithmetic, comparisons, logic, elementary and special functions, casts, activations.

Law: the operator on the operands, element by element; valid where every tensor operand (after broadcast) is. An
elementwise operator never revives an invalid element.

With one operand there is nothing to protect: value and gradient stay at their position. With several, the derivative
with respect to a valid operand may be computed from the garbage of an invalid one. The ``derivative`` trait says how
other operands enter it:

* ``linear``: not at all. Sums; selections (maximum, clamp), whose derivative passes the gradient on or drops it; and
  operators without a derivative (comparisons, logic, bits).
* ``bilinear``: as a factor. Each operand is filled where it is itself invalid.
* ``general`` (the default): every operand is filled wherever the result is invalid, with a ``neutral`` value at
  which the function and its first two derivatives are finite. 1 is such a value for most: 1/1, 1**1, atan2(1, 1) …;
  not at the ends of a domain, where asin and acosh have an infinite slope, and logit a pole.

``traps`` marks kernels that must not see garbage even when no derivative is needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    COMPOSITE,
    ELEMENTWISE,
    Along,
    Dense,
    Number,
    Permuted,
    Sparse,
    as_int8,
    elementwise,
    intersect,
    masked_rule,
    never,
    on_device_of,
    valid_in_all,
)
from op_registry.records.validity import unite

aten = torch.ops.aten


# --------------------------------------------------------------------------------------------------------- arithmetic

add = elementwise(aten.add, derivative="linear", keeps_zero=True)
sub = elementwise(aten.sub, derivative="linear")
rsub = elementwise(aten.rsub, derivative="linear")
mul = elementwise(aten.mul, derivative="bilinear")
div = elementwise(aten.div.Tensor, aten.div.Scalar)
neg = elementwise(aten.neg, keeps_zero=True)
abs = elementwise(aten.abs)
sign = elementwise(aten.sign)
sgn = elementwise(aten.sgn)
signbit = elementwise(aten.signbit)
copysign = elementwise(aten.copysign)
reciprocal = elementwise(aten.reciprocal)
square = elementwise(aten.square)
sqrt = elementwise(aten.sqrt)
rsqrt = elementwise(aten.rsqrt)
pow = elementwise(aten.pow)
hypot = elementwise(aten.hypot)
ldexp = elementwise(aten.ldexp.Tensor)
addcmul = elementwise(aten.addcmul)
addcdiv = elementwise(aten.addcdiv)
# The weight of lerp.Scalar is a number, so its derivative reads neither end point.
lerp_scalar = elementwise(aten.lerp.Scalar, derivative="linear")
# The complex kernel picks one formula for a whole vector of elements, from all their weights.
lerp = elementwise(aten.lerp.Tensor, traps="complex")

# Integer division by a zero under the mask raises, and INT_MIN / -1 may kill the process.
div_mode = elementwise(aten.div.Tensor_mode, aten.div.Scalar_mode, traps="integers")
floor_divide = elementwise(aten.floor_divide, traps="integers")
fmod = elementwise(aten.fmod, traps="integers")
remainder = elementwise(aten.remainder, traps="integers")
gcd = elementwise(aten.gcd, derivative="linear", traps="integers")
lcm = elementwise(aten.lcm, derivative="linear", traps="integers")


# --------------------------------------------------------------------------------------------- rounding and selection

ceil = elementwise(aten.ceil)
floor = elementwise(aten.floor)
round = elementwise(aten.round)
trunc = elementwise(aten.trunc)
frac = elementwise(aten.frac)
clamp = elementwise(aten.clamp, derivative="linear")
clamp_max = elementwise(aten.clamp_max, derivative="linear")
clamp_min = elementwise(aten.clamp_min, derivative="linear")
maximum = elementwise(aten.maximum, derivative="linear")
minimum = elementwise(aten.minimum, derivative="linear")
fmax = elementwise(aten.fmax, derivative="linear")
fmin = elementwise(aten.fmin, derivative="linear")
heaviside = elementwise(aten.heaviside, derivative="linear")
nextafter = elementwise(aten.nextafter, derivative="linear")
nan_to_num = elementwise(aten.nan_to_num)


# -------------------------------------------------------------------------------------------------------- comparisons

eq = elementwise(aten.eq, derivative="linear")
ne = elementwise(aten.ne, derivative="linear")
ge = elementwise(aten.ge, derivative="linear")
gt = elementwise(aten.gt, derivative="linear")
le = elementwise(aten.le, derivative="linear")
lt = elementwise(aten.lt, derivative="linear")
isclose = elementwise(aten.isclose, derivative="linear")
isfinite = elementwise(aten.isfinite)
isinf = elementwise(aten.isinf)
isnan = elementwise(aten.isnan)
isneginf = elementwise(aten.isneginf)
isposinf = elementwise(aten.isposinf)


# ----------------------------------------------------------------------------------------------------- logic and bits

logical_and = elementwise(aten.logical_and, derivative="linear")
logical_not = elementwise(aten.logical_not)
logical_or = elementwise(aten.logical_or, derivative="linear")
logical_xor = elementwise(aten.logical_xor, derivative="linear")
bitwise_and = elementwise(aten.bitwise_and, derivative="linear")
bitwise_not = elementwise(aten.bitwise_not)
bitwise_or = elementwise(aten.bitwise_or, derivative="linear")
bitwise_xor = elementwise(aten.bitwise_xor, derivative="linear")
bitwise_left_shift = elementwise(aten.bitwise_left_shift, derivative="linear")
bitwise_right_shift = elementwise(aten.bitwise_right_shift, derivative="linear")
__lshift__ = elementwise(aten.__lshift__, derivative="linear")
__rshift__ = elementwise(aten.__rshift__, derivative="linear")


# ---------------------------------------------------------------------------------------------- exponentials and logs

exp = elementwise(aten.exp)
exp2 = elementwise(aten.exp2)
expm1 = elementwise(aten.expm1)
log = elementwise(aten.log)
log10 = elementwise(aten.log10)
log1p = elementwise(aten.log1p)
log2 = elementwise(aten.log2)
logaddexp = elementwise(aten.logaddexp)
logaddexp2 = elementwise(aten.logaddexp2)
logit = elementwise(aten.logit, neutral=0.5)
sigmoid = elementwise(aten.sigmoid)
xlogy = elementwise(aten.xlogy)


# ------------------------------------------------------------------------------------------------------- trigonometry

acos = elementwise(aten.acos, neutral=0.5)
acosh = elementwise(aten.acosh, neutral=2)
asin = elementwise(aten.asin, neutral=0.5)
asinh = elementwise(aten.asinh)
atan = elementwise(aten.atan)
atan2 = elementwise(aten.atan2)
atanh = elementwise(aten.atanh, neutral=0.5)
cos = elementwise(aten.cos)
cosh = elementwise(aten.cosh)
deg2rad = elementwise(aten.deg2rad)
rad2deg = elementwise(aten.rad2deg)
sin = elementwise(aten.sin)
sinc = elementwise(aten.sinc)
sinh = elementwise(aten.sinh)
tan = elementwise(aten.tan)
tanh = elementwise(aten.tanh, keeps_zero=True)


# ------------------------------------------------------------------------------------------------------------ complex

angle = elementwise(aten.angle)
complex = elementwise(aten.complex, derivative="linear")
_conj_physical = elementwise(aten._conj_physical)
polar = elementwise(aten.polar)


# -------------------------------------------------------------------------------------------------- special functions

digamma = elementwise(aten.digamma)
erf = elementwise(aten.erf)
erfc = elementwise(aten.erfc)
erfinv = elementwise(aten.erfinv, neutral=0.5)
i0 = elementwise(aten.i0)
igamma = elementwise(aten.igamma)
igammac = elementwise(aten.igammac)
lgamma = elementwise(aten.lgamma)
mvlgamma = elementwise(aten.mvlgamma)
polygamma = elementwise(aten.polygamma)
special_airy_ai = elementwise(aten.special_airy_ai)
special_bessel_j0 = elementwise(aten.special_bessel_j0)
special_bessel_j1 = elementwise(aten.special_bessel_j1)
special_bessel_y0 = elementwise(aten.special_bessel_y0)
special_bessel_y1 = elementwise(aten.special_bessel_y1)
special_entr = elementwise(aten.special_entr)
special_erfcx = elementwise(aten.special_erfcx)
special_i0e = elementwise(aten.special_i0e)
special_i1 = elementwise(aten.special_i1)
special_i1e = elementwise(aten.special_i1e)
special_log_ndtr = elementwise(aten.special_log_ndtr)
special_modified_bessel_i0 = elementwise(aten.special_modified_bessel_i0)
special_modified_bessel_i1 = elementwise(aten.special_modified_bessel_i1)
special_modified_bessel_k0 = elementwise(aten.special_modified_bessel_k0)
special_modified_bessel_k1 = elementwise(aten.special_modified_bessel_k1)
special_ndtri = elementwise(aten.special_ndtri, neutral=0.5)
special_scaled_modified_bessel_k0 = elementwise(aten.special_scaled_modified_bessel_k0)
special_scaled_modified_bessel_k1 = elementwise(aten.special_scaled_modified_bessel_k1)
special_spherical_bessel_j0 = elementwise(aten.special_spherical_bessel_j0)
special_xlog1py = elementwise(aten.special_xlog1py)
# zeta has a pole at 1; its derivative in the second operand is zeta again, with the first operand one higher.
special_zeta = elementwise(aten.special_zeta, neutral=2)

# These kernels loop `degree` times: a garbage degree could run for hours.
special_chebyshev_polynomial_t = elementwise(aten.special_chebyshev_polynomial_t, traps=True)
special_chebyshev_polynomial_u = elementwise(aten.special_chebyshev_polynomial_u, traps=True)
special_chebyshev_polynomial_v = elementwise(aten.special_chebyshev_polynomial_v, traps=True)
special_chebyshev_polynomial_w = elementwise(aten.special_chebyshev_polynomial_w, traps=True)
special_hermite_polynomial_h = elementwise(aten.special_hermite_polynomial_h, traps=True)
special_hermite_polynomial_he = elementwise(aten.special_hermite_polynomial_he, traps=True)
special_laguerre_polynomial_l = elementwise(aten.special_laguerre_polynomial_l, traps=True)
special_legendre_polynomial_p = elementwise(aten.special_legendre_polynomial_p, traps=True)
special_shifted_chebyshev_polynomial_t = elementwise(aten.special_shifted_chebyshev_polynomial_t, traps=True)
special_shifted_chebyshev_polynomial_u = elementwise(aten.special_shifted_chebyshev_polynomial_u, traps=True)
special_shifted_chebyshev_polynomial_v = elementwise(aten.special_shifted_chebyshev_polynomial_v, traps=True)
special_shifted_chebyshev_polynomial_w = elementwise(aten.special_shifted_chebyshev_polynomial_w, traps=True)


# ----------------------------------------------------------------------------------------- copies, casts, masked_fill

clone = elementwise(aten.clone, keeps_zero=True)


@masked_rule(aten._to_copy, category=ELEMENTWISE)
def _to_copy(self: Dense, **options: Any) -> Dense:
    """Change dtype, device or memory format; the mask moves to the same device."""
    data = aten._to_copy(self.data, **options)
    return Dense(data, on_device_of(data, self.validity))


@masked_rule(aten._pin_memory, category=ELEMENTWISE)
def _pin_memory(self: Dense, device: torch.device | None = None) -> Dense:
    """Data and mask in pinned memory."""
    pinned = None if self.validity is None else aten._pin_memory(self.validity, device)
    return Dense(aten._pin_memory(self.data, device), pinned)


@masked_rule(aten.conj_physical, category=ELEMENTWISE)
def conj_physical(self: Dense) -> Dense:
    """The conjugate in new memory; for real dtypes the input itself, as in torch."""
    return self.like(aten._conj_physical(self.data)) if self.dtype.is_complex else self


@masked_rule(aten.frexp.Tensor, category=ELEMENTWISE)
def frexp(self: Dense) -> tuple[Dense, Dense]:
    """Mantissa and exponent, both valid where the input is."""
    mantissa, exponent = aten.frexp(self.data)
    return self.like(mantissa), self.like(exponent)


@masked_rule(aten.masked_fill, category=ELEMENTWISE)
def masked_fill(self: Dense, mask: Dense, value: Number | Dense) -> Dense:
    """Invalid where `mask` is invalid; an invalid `value` invalidates only the elements that it fills."""
    validity = valid_in_all(self, mask)
    if not isinstance(value, Dense):
        return Dense(aten.masked_fill(self.data, mask.data, value), validity)
    # The gradient of `value` is a sum over what the mask selects; invalid entries must not change its summation order.
    data = aten.masked_fill(self.data, mask.filled(False), value.data)
    if value.validity is not None:
        validity = intersect(validity, unite(value.validity, as_int8(~mask.data)))
    return Dense(data, validity)


# ------------------------------------------------------------------------------------------------- activation functions

celu = elementwise(aten.celu)
elu = elementwise(aten.elu)
gelu = elementwise(aten.gelu, keeps_zero=True)
hardshrink = elementwise(aten.hardshrink)
hardsigmoid = elementwise(aten.hardsigmoid)
hardswish = elementwise(aten.hardswish)
hardtanh = elementwise(aten.hardtanh)
leaky_relu = elementwise(aten.leaky_relu)
log_sigmoid = elementwise(aten.log_sigmoid)
mish = elementwise(aten.mish)
relu = elementwise(aten.relu, keeps_zero=True)
relu6 = elementwise(aten.relu6)
selu = elementwise(aten.selu)
silu = elementwise(aten.silu, keeps_zero=True)
softplus = elementwise(aten.softplus)
softshrink = elementwise(aten.softshrink)
threshold = elementwise(aten.threshold)
# Fills call it (records/fill.py), in torch's older vmap of gradients on masked tensors.
threshold_backward = elementwise(aten.threshold_backward.default)
# The input times 1 or times the weight: the derivative in one operand has the other as its factor.
_prelu_kernel = elementwise(aten._prelu_kernel, derivative="bilinear")
# In training a slope is drawn wherever the input is not positive: garbage must not change how many are drawn.
rrelu = elementwise(aten.rrelu, traps=True, neutral=0)


@masked_rule(aten.rrelu_with_noise_functional, category=ELEMENTWISE)
def rrelu_with_noise_functional(
    self: Dense,
    noise: Dense,
    lower: Number = 0.125,
    upper: Number = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Dense, Dense]:
    """rrelu, and the slopes that were drawn. Without training nothing is drawn, and `noise` is returned."""
    result, drawn = aten.rrelu_with_noise_functional(self.filled(0), noise.data, lower, upper, training, generator)
    slopes = self.like(drawn)
    return self.like(result), slopes if training else slopes.masked_by(noise.validity)


@masked_rule(aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default, category=COMPOSITE, takes_op=True)
def rrelu_with_noise(
    op: OpOverload,
    self: Tensor,
    noise: Tensor,
    lower: Number = 0.125,
    upper: Number = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """rrelu; training writes the slopes to `noise`. A plain `noise` keeps its old values where the input is invalid."""
    if training:
        with torch.no_grad():
            _, drawn = aten.rrelu_with_noise_functional(self, noise, lower, upper, training, generator)
            noise.copy_(drawn)
        result = self * drawn  # torch's derivative of the functional form reads the noise that it was given
    else:
        result = aten.leaky_relu(self, (lower + upper) / 2)
    return self.copy_(result) if op is aten.rrelu_with_noise_.default else result


@masked_rule(aten.log_sigmoid_forward, category=ELEMENTWISE)
def log_sigmoid_forward(self: Dense) -> tuple[Dense, Any]:
    """log_sigmoid, and a buffer for backward, which is empty on some devices."""
    result, buffer = aten.log_sigmoid_forward(self.data)
    return self.like(result), self.like(buffer) if buffer.shape == self.shape else buffer


log_sigmoid_forward.lowering(Sparse)(never("its second result is an internal buffer of torch"))
log_sigmoid_forward.lowering(Permuted)(never("its second result is an internal buffer of torch"))


@masked_rule(aten.glu, category=ELEMENTWISE, dims=Along("window"))
def glu(self: Dense, dim: int = -1) -> Dense:
    """The first half times the sigmoid of the second; valid where both are."""
    data = aten.glu(self.filled(0), dim)
    if self.full_validity is None:
        return Dense(data)
    first, second = as_int8(self.full_validity).chunk(2, dim)
    return Dense(data, first & second)


# ------------------------- fake quantisation: rounding to the values that an integer type would have, in floating point


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
    """The same with a scale and a zero point of one element each, in tensors; valid where all operands are."""
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
    """The same with a scale and a zero point for each index of `axis`; valid where all operands are."""
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
