"""Elementwise operators, choices, random numbers and factories: each valid element is plain torch's.

An elementwise result depends only on the operands at its own index. So where all operands are valid, plain torch
computes it from the unchanged data. Unlike rules, these oracles fill nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import (
    Call,
    Expected,
    NoOracle,
    Refused,
    all_outputs_valid,
    all_true,
    broadcast_valid,
    invalid,
    oracle,
    valid,
)
from op_registry.conformance.trees import tree_leaves, tree_map


def elementwise(c: Call) -> Any:
    """Valid where every tensor operand is valid, after broadcasting."""
    operands = c.operands()
    plain = c.plain()
    if any(operand.data.requires_grad for operand in operands):
        plain = _on_valid_elements(c, operands, plain)
    return tree_map(lambda out: Expected(out, broadcast_valid(out.shape, operands)), plain)


def _on_valid_elements(c: Call, operands: list[Expected], plain: Any) -> Any:
    """The call on the valid elements alone, as 1-d tensors, so that invalid ones have no derivative."""
    if not isinstance(plain, Tensor) or "memory_format" in c:
        return plain
    mask = broadcast_valid(plain.shape, operands)
    if bool(mask.all()) or not bool(mask.any()):
        return plain if bool(mask.all()) else torch.zeros_like(plain)
    values = valid_elements(c, mask)
    return torch.zeros_like(plain).masked_scatter(mask, values.to(plain.dtype))


def valid_elements(c: Call, mask: Tensor) -> Any:
    """The call on the elements that `mask` selects, as 1-d tensors."""

    def as_vector(operand: Expected) -> Tensor:
        # A 0-d operand remains 0-d: type promotion treats it differently.
        return operand.data.expand(mask.shape)[mask] if operand.ndim else operand.data

    return c.run({}, as_vector)


# Elementwise operators that torch does not tag as pointwise.
oracle(
    """complex polar hardswish bernoulli floor_divide rsub special_ndtr special_polygamma isclose isreal chalf divide
    subtract multiply true_divide float_power log_sigmoid selu relu6 square conj_physical positive isfinite absolute
    to _to_copy type_as clone contiguous detach lift_fresh alias negative greater greater_equal less less_equal
    not_equal fix clip arccos arccosh arcsin arcsinh arctan arctanh arctan2 special_expit special_logit
    special_round special_sinc special_erf special_erfc special_erfinv special_exp2 special_expm1 special_gammaln
    special_gammainc special_gammaincc special_digamma special_psi special_i0 special_log1p special_multigammaln
    special_xlogy _conj conj _conj_physical celu elu softplus mish hardsigmoid silu heaviside threshold trunc max.other
    min.other resolve_conj resolve_neg ldexp normal _autocast_to_reduced_precision
    _autocast_to_full_precision"""
)(elementwise)


@oracle("prelu", "_prelu_kernel")
def prelu(c: Call) -> Expected:
    """Elementwise, one slope for each channel (dimension 1) or for all."""
    x, weight = c["self"], c["weight"]
    mask = weight.mask
    if weight.shape != x.shape and mask.numel() > 1:
        mask = mask.reshape(-1, *[1] * (x.ndim - 2)) if x.ndim >= 2 else mask
    return Expected(c.plain(), x.mask & mask.expand(x.shape) if mask.numel() > 1 else x.mask & mask.reshape(()))


@oracle("masked_fill")
def masked_fill(c: Call) -> Expected:
    """An elementwise op never revives an invalid element; an invalid fill value counts only where it is written."""
    x, chosen, value = c["self"], c["mask"], c["value"]
    out = c.plain()
    mask = broadcast_valid(out.shape, [x, chosen])
    if isinstance(value, Expected):
        mask = mask & (value.mask | ~chosen.data).expand(out.shape)
    return Expected(out, mask)


@oracle("index_fill")
def index_fill(c: Call) -> Expected:
    """Like masked_fill at the slices that valid indices name: an invalid index fills nothing."""
    x, index, value = c["self"], c["index"], c["value"]
    chosen = torch.zeros(x.shape, dtype=torch.bool).index_fill(c["dim"], index.data[index.mask].reshape(-1), True)
    number, known = (value.data, value.mask) if isinstance(value, Expected) else (value, torch.tensor(True))
    return Expected(x.data.masked_fill(chosen, number), x.mask & (known | ~chosen))


@oracle("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(c: Call) -> Expected:
    """The chosen branch, valid where the condition and the chosen branch are."""
    out = c.plain()
    condition = c["condition"]
    chosen = condition.data.expand(out.shape)

    def mask_of(branch: object) -> Tensor:
        return branch.mask.expand(out.shape) if isinstance(branch, Expected) else all_true(out)

    mask = (chosen & mask_of(c["self"])) | (~chosen & mask_of(c["other"]))
    return Expected(out, mask & condition.mask.expand(out.shape))


@oracle("glu")
def glu(c: Call) -> Expected:
    """Elementwise on two halves."""
    first, second = c["self"].mask.chunk(2, c["dim"])
    return Expected(c.plain(), first & second)


@oracle(
    """dropout native_dropout alpha_dropout feature_dropout feature_alpha_dropout
    zeros_like ones_like full_like rand_like randn_like randint_like"""
)
def as_torch_under_the_input(c: Call) -> Any:
    """Every element as torch draws or writes it; valid where the input is."""
    first = c.operands()[0]
    result = c.plain()
    if any(isinstance(out, Tensor) and out.shape != first.shape for out in tree_leaves(result)):
        raise NoOracle(str(c.op))
    return tree_map(lambda out: Expected(out, first.mask) if isinstance(out, Tensor) else out, result)


@oracle("rrelu", "rrelu_with_noise")
def rrelu(c: Call) -> Any:
    """Elementwise; torch draws random numbers for negative elements only, so they depend on data under the mask."""
    if c["training"] and not c["self"].all_valid:
        raise NoOracle("rrelu's random numbers, which depend on data under the mask")
    return elementwise(c)


@oracle("linspace", "logspace")
def spaced(c: Call) -> Expected:
    """Every element depends on both ends."""
    out = c.plain()
    return Expected(out, torch.full(out.shape, all(operand.all_valid for operand in c.operands())))


@oracle("multinomial")
def multinomial(c: Call) -> Any:
    """The semantics do not define it."""
    raise NoOracle(str(c.op))


@oracle("empty_like", "new_empty", "new_empty_strided")
def uninitialised(c: Call) -> Expected:
    """Memory to which nothing has been written: nothing is valid."""
    return invalid(c.plain())


@oracle(
    """new_zeros new_ones new_full fill zero fill_ zero_ normal_ uniform_ exponential_ cauchy_ geometric_ log_normal_
    random_"""
)
def generated(c: Call) -> Expected:
    """What torch writes or draws: everything is valid, except where an invalid value is written."""
    out = c.plain()
    value = c.get("value")
    return Expected(out, value.mask.expand(out.shape)) if isinstance(value, Expected) else valid(out)


@oracle("""geqrf ormqr linalg_householder_product linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve""")
def opaque(c: Call) -> Any:
    """Every result depends on all elements: plain torch's if all are valid, refused otherwise."""
    if not all(operand.all_valid for operand in c.operands()):
        raise Refused(c.name)
    return all_outputs_valid(c.plain())


@oracle("resize_ resize_as_")
def resize(c: Call) -> Expected:
    """A no-op if the size is the same already; uninitialised if there was nothing; else elements would be undefined."""
    x: Expected = c["self"]
    size = c["the_template"].shape if "the_template" in c else c["size"]
    if tuple(size) == tuple(x.shape):
        return x
    if x.data.numel():
        raise Refused(c.name)
    return invalid(c.plain())


def refused(c: Call) -> Any:
    """Refused for every mask."""
    raise Refused(c.name)
