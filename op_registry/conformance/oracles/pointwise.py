"""Elementwise operators, choices, random draws and factories: the value is plain torch's, in its place.

An elementwise value depends on nothing but the operands at its own position, so plain torch on the untouched data says
what it is wherever all of them are valid. Nothing here could be mistaken for a rule: no filling, no mask arithmetic
beyond "all operands are valid here".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import Call, NoOracle, Refused, Slot, broadcast_valid, oracle, valid
from op_registry.conformance.trees import tree_leaves, tree_map


def elementwise(c: Call) -> Any:
    """Valid where every tensor operand is valid, after broadcasting."""
    slots = c.slots()
    plain = c.plainly()
    if any(slot.data.requires_grad for slot in slots):
        return tree_map(lambda out: Slot(out, broadcast_valid(out.shape, slots)), _where_valid(c, slots, plain))
    return tree_map(lambda out: Slot(out, broadcast_valid(out.shape, slots)), plain)


def _where_valid(c: Call, slots: list[Slot], plain: Any) -> Any:
    """The same on the valid positions alone, laid out in a row: no derivative comes from anywhere else."""
    if not isinstance(plain, Tensor) or "memory_format" in c:
        return plain
    mask = broadcast_valid(plain.shape, slots)
    if bool(mask.all()) or not bool(mask.any()):
        return plain if bool(mask.all()) else torch.zeros_like(plain)

    def in_a_row(slot: Slot) -> Tensor:
        # A 0-d operand stays one: it takes another part in type promotion.
        return slot.data.expand(plain.shape)[mask] if slot.ndim else slot.data

    values = c.run(c.bound, in_a_row)
    return torch.zeros_like(plain).masked_scatter(mask, values.to(plain.dtype))


# Elementwise operators that torch does not tag as pointwise.
oracle(
    """complex polar hardswish bernoulli floor_divide rsub special_ndtr special_polygamma isclose isreal chalf divide
    subtract multiply true_divide float_power log_sigmoid selu relu6 square conj_physical positive isfinite absolute
    to _to_copy type_as clone contiguous detach lift_fresh alias negative greater greater_equal less less_equal
    not_equal fix clip arccos arccosh arcsin arcsinh arctan arctanh arctan2 special_expit special_logit
    special_round special_sinc special_erf special_erfc special_erfinv special_exp2 special_expm1 special_gammaln
    special_gammainc special_gammaincc special_digamma special_psi special_i0 special_log1p special_multigammaln
    special_xlogy _conj conj _conj_physical celu elu softplus mish hardsigmoid silu heaviside threshold trunc max.other
    min.other resolve_conj resolve_neg ldexp _autocast_to_reduced_precision _autocast_to_full_precision"""
)(elementwise)


@oracle("prelu", "_prelu_kernel")
def prelu(c: Call) -> Slot:
    """Elementwise, one slope for each channel (dimension 1) or for all."""
    x, weight = c["self"], c["weight"]
    mask = weight.mask
    if weight.shape != x.shape and mask.numel() > 1:
        mask = mask.reshape(-1, *[1] * (x.ndim - 2)) if x.ndim >= 2 else mask
    return Slot(c.plainly(), x.mask & mask.expand(x.shape) if mask.numel() > 1 else x.mask & mask.reshape(()))


@oracle("masked_fill")
def masked_fill(c: Call) -> Slot:
    """An elementwise op never revives; an invalid fill value counts only where it is written."""
    x, where, value = c["self"], c["mask"], c["value"]
    out = c.plainly()
    mask = broadcast_valid(out.shape, [x, where])
    if isinstance(value, Slot):
        mask = mask & (value.mask | ~where.data).expand(out.shape)
    return Slot(out, mask)


@oracle("index_fill")
def index_fill(c: Call) -> Slot:
    """As masked_fill: an invalid element stays invalid, an invalid index fills nothing."""
    x, index, value, dim = c["self"], c["index"], c["value"], c["dim"]
    out, mask = x.data.clone(), x.mask.clone()
    value_valid = value.mask.reshape(()) if isinstance(value, Slot) else torch.tensor(True)
    number = value.data.reshape(()) if isinstance(value, Slot) else value
    for i, known in zip(index.data.reshape(-1).tolist(), index.mask.reshape(-1).tolist(), strict=True):
        if known and x.ndim:
            at = [slice(None)] * x.ndim
            at[dim] = i
            out[tuple(at)] = number
            mask[tuple(at)] &= value_valid
        elif known:
            out, mask = torch.as_tensor(number, dtype=out.dtype), mask & value_valid
    return Slot(out, mask)


@oracle("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(c: Call) -> Slot:
    """The chosen branch, valid where the condition and the chosen branch are."""
    out = c.plainly()
    condition = c["condition"]
    chosen = condition.data.expand(out.shape)

    def mask_of(value: Any) -> Tensor:
        return value.mask.expand(out.shape) if isinstance(value, Slot) else torch.ones(out.shape, dtype=torch.bool)

    picked = (chosen & mask_of(c["self"])) | (~chosen & mask_of(c["other"]))
    return Slot(out, picked & condition.mask.expand(out.shape))


@oracle("glu")
def glu(c: Call) -> Slot:
    """Elementwise on two halves."""
    first, second = c["self"].mask.chunk(2, c["dim"])
    return Slot(c.plainly(), first & second)


@oracle(
    """dropout native_dropout alpha_dropout feature_dropout feature_alpha_dropout
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like"""
)
def as_torch_under_the_input(c: Call) -> Any:
    """Drawn or written at every position as torch does; valid where the input is."""
    first = c.slots()[0]
    result = c.plainly()
    if any(isinstance(out, Tensor) and out.shape != first.shape for out in tree_leaves(result)):
        raise NoOracle(str(c.op))
    return tree_map(lambda out: Slot(out, first.mask) if isinstance(out, Tensor) else out, result)


@oracle("rrelu", "rrelu_with_noise")
def rrelu(c: Call) -> Any:
    """Torch draws for negative elements only, so that the stream depends on what is under the mask."""
    if c["training"] and not c["self"].all_valid:
        raise NoOracle("rrelu's draws, which depend on the data")
    return elementwise(c)


@oracle("linspace", "logspace")
def spaced(c: Call) -> Slot:
    """Every step reads both ends."""
    out = c.plainly()
    return Slot(out, torch.full(out.shape, all(slot.all_valid for slot in c.slots())))


@oracle("multinomial")
def multinomial(c: Call) -> Any:
    """Not said by the semantics."""
    raise NoOracle(str(c.op))


@oracle("new_zeros", "new_ones", "new_full", "new_empty")
def new(c: Call) -> Tensor:
    """Plain tensors of another size."""
    out: Tensor = c.plainly()
    return out


@oracle("new_empty_strided")
def new_empty_strided(c: Call) -> Any:
    """Of the same size masked (the engine keeps gradients so), of another plain."""
    out = c.plainly()
    return Slot(out, c["self"].mask) if out.shape == c["self"].shape else out


@oracle("normal_", "uniform_", "exponential_", "cauchy_", "geometric_", "log_normal_", "random_", "zero_", "fill_")
def generated(c: Call) -> Slot:
    """Assignments: everything written is valid, except where what is written is not."""
    out = c.plainly()
    value = c.get("value")
    return Slot(out, value.mask.expand(out.shape)) if isinstance(value, Slot) else valid(out)


@oracle("normal")
def normal(c: Call) -> Any:
    """A draw for each position, valid where its mean and deviation are."""
    return elementwise(c)


@oracle(
    """linalg_inv linalg_inv_ex inverse linalg_solve linalg_solve_ex _linalg_solve_ex linalg_solve_triangular cholesky
    linalg_cholesky linalg_cholesky_ex cholesky_inverse cholesky_solve linalg_qr qr geqrf ormqr
    linalg_householder_product linalg_svd _linalg_svd svd linalg_svdvals linalg_eig linalg_eigh _linalg_eigh
    linalg_eigvals linalg_eigvalsh linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve lu_unpack lu_solve
    _lu_with_info linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_det _linalg_det
    linalg_slogdet _linalg_slogdet logdet det slogdet linalg_matrix_exp matrix_exp linalg_pinv pinverse
    linalg_matrix_rank linalg_cond linalg_tensorinv linalg_tensorsolve triangular_solve
    fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn
    fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft istft _fft_c2c _fft_r2c _fft_c2r
    ctc_loss _ctc_loss grid_sampler grid_sampler_2d grid_sampler_3d masked_scatter"""
)
def opaque(c: Call) -> Any:
    """Mixes everything: plain torch where all is valid, refused elsewhere."""
    if not all(slot.all_valid for slot in c.slots()):
        raise Refused(c.name)
    return tree_map(lambda out: valid(out) if isinstance(out, Tensor) else out, c.plainly())


@oracle("resize_ resize_as_")
def resize(c: Call) -> Slot:
    """Nothing happens where the size is the same already; what another would show is for nobody to say."""
    x = c["self"]
    size = c["the_template"].shape if "the_template" in c else c["size"]
    if tuple(size) != tuple(x.shape):
        raise Refused(c.name)
    slot: Slot = x
    return slot


def refused(c: Call) -> Any:
    """Registered as refused: whatever the mask."""
    raise Refused(c.name)
