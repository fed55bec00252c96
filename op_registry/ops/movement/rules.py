"""Operators that move elements and are not views.

Law: an element moves with its validity; padding values, and zeros that the operator itself writes, are valid. The
operator is applied to the validity just as to the data, or to the *in*validity where it writes zeros (`writes=True`).
None of them combines two elements, so garbage stays under the mask, in backward too. Those that sum elements landing
at the same position are accumulations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    ACCUMULATION,
    MOVEMENT,
    Along,
    Dense,
    Equation,
    MaskedSemanticsError,
    Number,
    Unknown,
    aligned_validity,
    as_int8,
    broadcast_along,
    contract,
    known_all_valid,
    masked_rule,
    movement,
)
from op_registry.dimensions.movements import Moved, OnDiagonal, Repeated, Windows
from op_registry.records.arguments import with_leading_dims
from op_registry.records.layout import expand_validity

aten = torch.ops.aten

# ---------------------------------------------------------------- each element is moved, once or to several positions

pixel_shuffle = movement(
    aten.pixel_shuffle.default,
    dims=Equation("*(crs)hw->*c(hr)(ws)", sizes=dict.fromkeys("rs", "upscale_factor")),
)
pixel_unshuffle = movement(
    aten.pixel_unshuffle.default,
    dims=Equation("*c(hr)(ws)->*(crs)hw", sizes=dict.fromkeys("rs", "downscale_factor")),
)
channel_shuffle = movement(aten.channel_shuffle.default, dims=Equation("n(gc)*->n(cg)*", sizes={"g": "groups"}))
reflection_pad = movement(
    aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default, dims=Windows()
)
replication_pad = movement(
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default, dims=Windows()
)
# torch's decomposition copies into a newly allocated tensor, and would return a plain one.
_pad_circular = movement(aten._pad_circular.default, dims=Windows("pad"))


@masked_rule(aten.flip.default, category=MOVEMENT, dims=Moved())
def flip(x: Dense, dims: Sequence[int]) -> Dense:
    # Flipping a dimension in which the validity is broadcast is a no-op.
    v = aligned_validity(x)
    return Dense(aten.flip(x.data, dims), None if v is None else aten.flip(v, dims))


@masked_rule(aten.rot90.default, category=MOVEMENT, dims=Along("moved", "dims"))
def rot90(x: Dense, k: int = 1, dims: Sequence[int] = (0, 1)) -> Dense:
    v = aligned_validity(x)
    return Dense(aten.rot90(x.data, k, dims), None if v is None else aten.rot90(v, k, dims))


@masked_rule(aten.roll.default, category=MOVEMENT, dims=Moved(by="shifts"))
def roll(x: Dense, shifts: Sequence[int], dims: Sequence[int] = ()) -> Dense:
    data = aten.roll(x.data, shifts, dims)
    # Without dims the flattened tensor is rolled, which a broadcast validity cannot follow.
    v = aligned_validity(x) if len(dims) else x.full_validity
    return Dense(data, None if v is None else aten.roll(v, shifts, dims))


@masked_rule(aten.repeat.default, category=MOVEMENT, dims=Repeated())
def repeat(x: Dense, repeats: Sequence[int]) -> Dense:
    data, v = aten.repeat(x.data, repeats), aligned_validity(x)
    if v is None:
        return Dense(data)
    v = with_leading_dims(v, data.ndim - v.ndim)
    return Dense(data, aten.repeat(v, [1 if broadcast_along(v, d) else times for d, times in enumerate(repeats)]))


@masked_rule(aten.repeat_interleave.Tensor, category=MOVEMENT, plain=(0,), dims=Equation("r->N"))
def repeat_interleave(repeats: Dense, *, output_size: int | None = None) -> Tensor:
    """The index of the element at each position of the result; an element with an invalid repeat count is left out.

    So with `output_size=`, a call with an invalid count is refused: the result would not have this size.
    """
    if output_size is not None and not known_all_valid(repeats):
        raise MaskedSemanticsError(
            f"repeat_interleave was given output_size={output_size}, but some of the {repeats.shape[0]} repeats are "
            "invalid and count as 0. Leave output_size out, or fill repeats first."
        )
    return aten.repeat_interleave.Tensor(repeats.filled(0), output_size=output_size)


# --------------------------------------------------------------------------- zeros that the operator writes are valid

diag_embed = movement(aten.diag_embed.default, writes=True, dims=OnDiagonal())
block_diag = movement(
    aten.block_diag.default, writes=True, dims=Unknown("each operand has rows and columns of its own")
)


@masked_rule(
    aten.tril.default, aten.triu.default, category=MOVEMENT, takes_op=True, dims=Equation("*rc->*rc", counted="rc")
)
def tril(op: OpOverload, x: Dense, diagonal: int = 0) -> Dense:
    data, v = op(x.data, diagonal), aligned_validity(x)
    if v is None:
        return Dense(data)
    return Dense(data, op(as_int8(expand_validity(v, x.shape, (-2, -1))) ^ 1, diagonal) ^ 1)


@masked_rule(aten.constant_pad_nd.default, category=MOVEMENT, dims=Windows("pad"))
def constant_pad_nd(x: Dense, pad: Sequence[int], value: Number = 0) -> Dense:
    data, v = aten.constant_pad_nd(x.data, pad, value), aligned_validity(x)
    if v is None:
        return Dense(data)
    padded = {x.ndim - 1 - i // 2 for i, width in enumerate(pad) if width != 0}
    return Dense(data, aten.constant_pad_nd(expand_validity(v, x.shape, padded), pad, 1))


@masked_rule(aten.im2col.default, category=MOVEMENT, dims=Equation("*cxy->*(cK)L", window="xy"))
def im2col(
    x: Dense, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Dense:
    data, v = aten.im2col(x.data, kernel_size, dilation, padding, stride), x.full_validity
    if v is None:
        return Dense(data)
    # The kernel does not support int8; zero padding must come out as "not invalid".
    invalid = aten.im2col((as_int8(v) ^ 1).to(torch.float32), kernel_size, dilation, padding, stride)
    return Dense(data, as_int8(invalid < 0.5))


@masked_rule(aten.one_hot.default, category=MOVEMENT, dims=Equation("*->*C"))
def one_hot(x: Dense, num_classes: int = -1) -> Dense:
    """Each row is as valid as its index; the number of classes is inferred from the valid indices."""
    data, v = aten.one_hot(x.filled(0), num_classes), aligned_validity(x)
    return Dense(data, None if v is None else v.unsqueeze(-1))


# --------------------------------------------------------------------------- elements at the same position are summed

col2im = masked_rule(aten.col2im.default, category=ACCUMULATION, takes_op=True, dims=Unknown("windows overlap"))(
    contract
)
