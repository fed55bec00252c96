"""Convolutions.

Law: a contraction over channels and taps. An output sums the taps whose input and weight are both valid. It is valid
where there is at least one such tap, or where its window has no input elements at all: only padding, which does not
count as elements, or a gap between the strides of a transposed convolution. A bias is elementwise and never makes
an invalid output valid. Valid regions grow this way; `x.mask_like(other)` restores a mask.

The operator runs once, on factors filled with 0. With one masked factor, the result's mask costs a convolution of one
channel (per group): the other factor is all ones, and the mask is reduced over channels first. A mask with one value
for all channels, or for all samples, stays that small in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    CONTRACTION,
    ByArgument,
    Dense,
    Equation,
    aligned_validity,
    as_int8,
    broadcast_along,
    intersect,
    masked_rule,
)
from op_registry.bound import bind_by_name
from op_registry.records.divided import divided_by_rows, is_divided, undivided

aten = torch.ops.aten

# Input, weight and bias in one to three dimensions; channels in groups.
CONVOLUTION = Equation(
    "*(gc)x,(go)ci,(go)->*(go)x",
    "*(gc)xy,(go)cij,(go)->*(go)xy",
    "*(gc)xyz,(go)cijk,(go)->*(go)xyz",
    window="xyz",
    sizes={"g": "groups"},
)
TRANSPOSED = Equation(
    "*(gc)x,(gc)oi,(go)->*(go)x",
    "*(gc)xy,(gc)oij,(go)->*(go)xy",
    "*(gc)xyz,(gc)oijk,(go)->*(go)xyz",
    window="xyz",
    sizes={"g": "groups"},
)

# A convolution of fixed geometry, called with input, weight, bias and number of groups.
Convolve = Callable[[Tensor, Tensor, Tensor | None, int], Any]
Sizes = Sequence[int]


def convolved(
    convolve: Convolve,
    input: Dense,
    weight: Dense,
    bias: Dense | None,
    groups: int,
    transposed: bool = False,
    covered: bool = False,
) -> Dense:
    """The convolution of records. `covered`: every window is known to contain an input element."""
    if is_divided(input.data):
        input = _whole_samples(input, batched=input.ndim == weight.ndim)
        weight, bias = weight.map(undivided), None if bias is None else bias.map(undivided)
    data = convolve(input.filled(0), weight.filled(0), None if bias is None else bias.filled(0), groups)
    validity = convolved_validity(convolve, input, weight, groups, transposed, covered)
    if bias is not None and bias.validity is not None:
        per_channel = bias.validity.reshape(-1, *[1] * (weight.ndim - 2))
        validity = intersect(validity, per_channel)
    return Dense(data, validity)


def _whole_samples(input: Dense, batched: bool) -> Dense:
    """The input, redistributed among processes by samples or not at all.

    If channels or positions are sharded, DTensor convolves each process's part, exchanges the borders only for simple
    geometries, and takes the parts for the correct result.
    """
    rows_or_all = divided_by_rows if batched else undivided
    validity = aligned_validity(input)
    return Dense(rows_or_all(input.data), None if validity is None else rows_or_all(validity))


def convolved_validity(
    convolve: Convolve, input: Dense, weight: Dense, groups: int, transposed: bool, covered: bool
) -> Tensor | None:
    """Where at least one tap has a valid input and a valid weight, or no tap has an input element."""
    if (input.validity is None and weight.validity is None) or 0 in (*weight.shape, *input.shape[-weight.ndim + 1 :]):
        return None
    valid_inputs = aligned_validity(input)
    if valid_inputs is not None:
        if input.ndim < weight.ndim:
            valid_inputs = valid_inputs.unsqueeze(0)
        valid_inputs = as_int8(valid_inputs).expand(-1, -1, *input.shape[2 - weight.ndim :])
    one_position = weight.data.new_ones((1, 1, *input.shape[2 - weight.ndim :]), dtype=torch.float32)
    one_tap = weight.data.new_ones((1, 1, *weight.shape[2:]), dtype=torch.float32)
    if weight.validity is None:
        assert valid_inputs is not None
        taps = _valid_taps_by_group(convolve, valid_inputs, one_tap, weight, groups, transposed)
    elif valid_inputs is None or broadcast_along(valid_inputs, 1):
        one_channel = one_position if valid_inputs is None else valid_inputs.to(torch.float32)
        taps = convolve(one_channel, _any_input_channel(weight, groups, transposed), None, 1)
    else:
        full = weight.full_validity
        assert full is not None
        all_channels = valid_inputs.expand(-1, input.shape[1 - weight.ndim], *valid_inputs.shape[2:])
        taps = convolve(all_channels.to(torch.float32), full.to(torch.float32), None, groups)
    valid = taps > 0.5
    if not covered:
        valid = valid | (convolve(one_position, one_tap, None, 1) < 0.5)
    return as_int8(valid if input.ndim == weight.ndim else valid.squeeze(0))


def _valid_taps_by_group(
    convolve: Convolve, valid_inputs: Tensor, one_tap: Tensor, weight: Dense, groups: int, transposed: bool
) -> Tensor:
    """The number of valid inputs in each group's window, for each output channel (or one for all)."""
    if broadcast_along(valid_inputs, 1) or groups == 1:
        return convolve(valid_inputs.amax(1, keepdim=True).to(torch.float32), one_tap, None, 1)
    by_group = valid_inputs.unflatten(1, (groups, -1)).amax(2).to(torch.float32)
    taps = convolve(by_group.flatten(0, 1).unsqueeze(1), one_tap, None, 1).unflatten(0, (-1, groups))
    outputs = weight.shape[1] if transposed else weight.shape[0] // groups
    return taps.squeeze(2) if outputs == 1 else taps.expand(-1, -1, outputs, *taps.shape[3:]).flatten(1, 2)


def _any_input_channel(weight: Dense, groups: int, transposed: bool) -> Tensor:
    """A weight with one input channel: 1 where any of the group's input channels has a valid weight."""
    full = weight.full_validity
    assert full is not None
    if transposed:
        full = full.unflatten(0, (groups, -1)).amax(1).flatten(0, 1).unsqueeze(0)
    else:
        full = full.amax(1, keepdim=True)
    return full.to(torch.float32)


def covers(weight: Dense, padding: Sizes | str, dilation: Sizes) -> bool:
    """Whether every window surely contains an element: it has no gaps, and the padding is narrower than the kernel."""
    if padding == "valid":
        return True
    kernel = weight.shape[2:]
    no_gaps = all(d == 1 for d in per_dim(dilation, len(kernel)))
    if isinstance(padding, str):
        return no_gaps
    pads = per_dim(padding, len(kernel))
    return all(p == 0 or (no_gaps and p < k) for p, k in zip(pads, kernel, strict=True))


def per_dim(sizes: Sizes, ndim: int) -> Sizes:
    """One number for each dimension, from a list that may hold a single number for all."""
    return list(sizes) * ndim if len(sizes) == 1 else sizes


# ------------------------------------------------------------------------------------------------------------ operators


def is_transposed(named: Mapping[str, Any]) -> bool:
    """Whether these are the arguments of a transposed convolution."""
    return "output_padding" in named and named.get("transposed", True)


def convolution(op: OpOverload, input: Dense, weight: Dense, bias: Dense | None = None, *geometry: Any) -> Dense:
    """A convolution of any geometry.

    A padding by name is torch's own: its decomposition may pad first, and those zeros would count as elements.
    """
    named = bind_by_name(op, (input, weight, bias, *geometry), {})
    names, values = list(named), list(named.values())
    at = names.index("groups")
    before, after = values[3:at], values[at + 1 :]

    def convolve(x: Tensor, w: Tensor, b: Tensor | None, groups: int) -> Any:
        return op(x, w, b, *before, groups, *after)

    transposed = is_transposed(named)
    covered = not transposed and covers(weight, named["padding"], named["dilation"])
    return convolved(convolve, input, weight, bias, named["groups"], transposed, covered)


conv = masked_rule(
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
    aten._convolution_mode.default,
    category=CONTRACTION,
    takes_op=True,
    dims=CONVOLUTION,
)(convolution)
conv_transpose = masked_rule(
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    category=CONTRACTION,
    takes_op=True,
    dims=TRANSPOSED,
)(convolution)
any_convolution = masked_rule(
    aten.convolution.default,
    aten._convolution.default,
    aten._convolution.deprecated,
    category=CONTRACTION,
    takes_op=True,
    dims=ByArgument("transposed", TRANSPOSED, CONVOLUTION),
)(convolution)


@masked_rule(aten.conv_tbc.default, category=CONTRACTION, dims=Equation("tbc,kco,o->tbo", window="t"))
def conv_tbc(self: Dense, weight: Dense, bias: Dense, pad: int = 0) -> Dense:
    """Time, batch, channel: conv1d with dimensions in another order (weight: taps, in, out)."""
    data = aten.conv_tbc(self.filled(0), weight.filled(0), bias.filled(0), pad)

    def convolve(x: Tensor, w: Tensor, b: Tensor | None, g: int) -> Any:
        return aten.conv1d(x, w, b, [1], [pad], [1], g)

    input, filter = permuted(self, (1, 2, 0)), permuted(weight, (2, 1, 0))
    valid = convolved_validity(convolve, input, filter, 1, transposed=False, covered=covers(filter, [pad], [1]))
    return Dense(data, intersect(None if valid is None else valid.permute(2, 0, 1), bias.validity))


def permuted(x: Dense, dims: tuple[int, ...]) -> Dense:
    v = aligned_validity(x)
    return Dense(x.data.permute(dims), None if v is None else v.permute(dims))
