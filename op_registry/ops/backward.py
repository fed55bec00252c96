"""Operators that torch's own gradient formulas are made of, called by hand. (Pointwise ones: activations.py, views:
movement.py, norms: norm_backward.py.)

Law: what autograd gives for the masked operator. An element of the incoming gradient adds something where it is valid,
and the result that it belongs to is; the gradient is masked as the tensor is that it belongs to, and where that tensor
is no argument, every element of it is valid: those to which nothing came are torch's own zeros.

Most are the derivative of the forward operator's rule (`derivative`), which finds again what the forward operator
saved. Those that are linear in the gradient, and read nothing else but positions, run themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.categories import DERIVATIVE, elementwise, known_all_valid, masked_rule, opaque
from op_registry.errors import MaskedSemanticsError
from op_registry.ops.interpolation import EVERY, LINEAR, NEAREST
from op_registry.pullback import derivative, named, plainly, pullback
from op_registry.records import Dense, all_valid, fill_where_invalid, intersect
from op_registry.resolve import by_rule
from op_registry.rule import packet_name

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------------------------ softmax


@masked_rule(
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, category=DERIVATIVE, takes_op=True
)
def _softmax_backward_data(
    op: OpOverload, grad_output: Dense, output: Dense, dim: int, input_dtype: torch.dtype
) -> Dense:
    """What each valid element of the slice weighs in it, `output` says; one that is invalid weighs nothing."""
    counted = fill_where_invalid(grad_output.data, intersect(grad_output.validity, output.validity), 0)
    return output.like(op(counted, output.filled(0), dim, input_dtype))


# ------------------------------------------------------------------------------------------------------ two operands

glu_backward = derivative(aten.glu_backward.default, of=aten.glu.default)


@masked_rule(aten._prelu_kernel_backward.default, category=DERIVATIVE)
def _prelu_kernel_backward(grad_output: Dense, self: Dense, weight: Dense) -> tuple[Dense, ...]:
    """Element by element, for the weight too, which here is as large as the input."""
    if all_valid(grad_output, self, weight):
        return plainly(aten._prelu_kernel_backward.default, (grad_output, self, weight), {})
    slopes = weight.moved(lambda t: t.expand(self.shape))
    return pullback(lambda x, w: by_rule(aten._prelu_kernel.default, x, w), (self, slopes), grad_output)


# ------------------------------------------------------------------------------------------------- pointwise formulas

rrelu_with_noise_backward = elementwise(aten.rrelu_with_noise_backward.default)
_standard_gamma_grad = elementwise(aten._standard_gamma_grad.default)
_dirichlet_grad = elementwise(aten._dirichlet_grad.default, neutral=0.5)


@masked_rule(aten.log_sigmoid_backward.default, category=DERIVATIVE)
def log_sigmoid_backward(grad_output: Dense, self: Dense, buffer: Dense) -> Dense:
    """Elementwise in gradient and input; the buffer, on some devices empty, follows from the input."""
    both = intersect(grad_output.validity, self.validity)
    grad, x = (fill_where_invalid(t, both, 0) for t in (grad_output.data, self.data))
    saved = buffer.data if both is None else aten.log_sigmoid_forward(x)[1]
    return Dense(aten.log_sigmoid_backward(grad, x, saved), both)


# ------------------------------------------------------------------------------------------------------------- losses

mse_loss_backward = derivative(aten.mse_loss_backward.default, of=aten.mse_loss.default)
smooth_l1_loss_backward = derivative(aten.smooth_l1_loss_backward.default, of=aten.smooth_l1_loss.default)
huber_loss_backward = derivative(aten.huber_loss_backward.default, of=aten.huber_loss.default)
soft_margin_loss_backward = derivative(aten.soft_margin_loss_backward.default, of=aten.soft_margin_loss.default)
binary_cross_entropy_backward = derivative(
    aten.binary_cross_entropy_backward.default, of=aten.binary_cross_entropy.default
)
nll_loss_backward = derivative(aten.nll_loss_backward.default, of=aten.nll_loss_forward.default)
nll_loss2d_backward = derivative(aten.nll_loss2d_backward.default, of=aten.nll_loss2d_forward.default)
multi_margin_loss_backward = derivative(aten.multi_margin_loss_backward.default, of=aten.multi_margin_loss.default)
multilabel_margin_loss_backward = derivative(
    aten.multilabel_margin_loss_backward.default, of=aten.multilabel_margin_loss.default
)

# ------------------------------------------------------------------------------------------------------------ windows

avg_pool2d_backward = derivative(aten.avg_pool2d_backward.default, of=aten.avg_pool2d.default)
avg_pool3d_backward = derivative(aten.avg_pool3d_backward.default, of=aten.avg_pool3d.default)
_adaptive_avg_pool2d_backward = derivative(
    aten._adaptive_avg_pool2d_backward.default,
    of=aten._adaptive_avg_pool2d.default,
    output_size=lambda given: given["grad_output"].shape[-2:],
)
_adaptive_avg_pool3d_backward = derivative(
    aten._adaptive_avg_pool3d_backward.default,
    of=aten._adaptive_avg_pool3d.default,
    output_size=lambda given: given["grad_output"].shape[-3:],
)


@masked_rule(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.fractional_max_pool2d_backward.default,
    aten.fractional_max_pool3d_backward.default,
    category=DERIVATIVE,
    takes_op=True,
)
def max_pool_backward(op: OpOverload, grad_output: Dense, self: Dense, *arguments: Any) -> Dense:
    """To where the indices, which come last, say that a maximum was found; one that is invalid says nothing."""
    *geometry, indices = arguments
    counted = fill_where_invalid(grad_output.data, intersect(grad_output.validity, indices.validity), 0)
    return self.like(op(counted, self.data, *geometry, indices.filled(0)))


@masked_rule(aten.convolution_backward.default, category=DERIVATIVE)
def convolution_backward(
    grad_output: Dense,
    input: Dense,
    weight: Dense,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Dense | None, ...]:
    """Of input, weight and bias. A bias is known by its size alone, and all of it is valid."""
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    if all_valid(grad_output, input, weight):
        arguments = (grad_output, input, weight, bias_sizes, *geometry, output_mask)
        return plainly(aten.convolution_backward.default, arguments, {})
    bias = Dense(weight.data.new_zeros((grad_output.shape[1],)))

    def convolve(x: Dense, w: Dense, b: Dense) -> Any:
        return by_rule(aten.convolution.default, x, w, b, *geometry)

    return wanted(pullback(convolve, (input, weight, bias), grad_output), output_mask)


@masked_rule(aten._slow_conv2d_backward.output_mask, category=DERIVATIVE)
def _slow_conv2d_backward(
    grad_output: Dense,
    self: Dense,
    weight: Dense,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_mask: Sequence[bool],
) -> Any:
    """The same, without dilation and groups."""
    if all_valid(grad_output, self, weight):
        arguments = (grad_output, self, weight, kernel_size, stride, padding, output_mask)
        return plainly(aten._slow_conv2d_backward.output_mask, arguments, {})
    geometry = (stride, padding, [1, 1], False, [0, 0], 1)
    return convolution_backward.run(grad_output, self, weight, None, *geometry, output_mask)


def wanted(grads: Sequence[Dense | None], output_mask: Sequence[bool]) -> tuple[Dense | None, ...]:
    """The gradients that are asked for, None in place of the others."""
    return tuple(grad if asked else None for grad, asked in zip(grads, output_mask, strict=True))


# ----------------------------------------------------------------------------------------- distances, runs, attention

_cdist_backward = derivative(aten._cdist_backward.default, of=aten._cdist_forward.default, by=("x1",))
_pdist_backward = derivative(aten._pdist_backward.default, of=aten._pdist_forward.default)
_segment_reduce_backward = derivative(
    aten._segment_reduce_backward.default, of=aten.segment_reduce.default, by=("data",)
)
_scaled_dot_product_flash_attention_for_cpu_backward = derivative(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    of=aten._scaled_dot_product_flash_attention_for_cpu.default,
    by=("query", "key", "value"),
)

# ----------------------------------------------------------- linear in the gradient: what is invalid in it adds nothing


@masked_rule(
    *(getattr(aten, f"{packet_name(packet)}_backward").default for packet in (*NEAREST, *LINEAR, *EVERY)),
    category=DERIVATIVE,
    takes_op=True,
)
def upsample_backward(op: OpOverload, grad_output: Dense, *sizes: Any) -> Dense:
    return Dense(op(grad_output.filled(0), *sizes))


@masked_rule(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
    category=DERIVATIVE,
    takes_op=True,
)
def pad_backward(op: OpOverload, grad_output: Dense, self: Dense, padding: Sequence[int]) -> Dense:
    """Each element gets what came to its copies."""
    return self.like(op(grad_output.filled(0), self.data, padding))


# ----------------------------------------------------------------------------------------------------------- look-ups


@masked_rule(aten.embedding_dense_backward.default, category=DERIVATIVE)
def embedding_dense_backward(
    grad_output: Dense, indices: Dense, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Dense:
    """Each row gets what came to its copies; invalid indices ask for one row more, which is cut off again."""
    rows = num_weights if indices.validity is None else num_weights + 1
    asked = indices.filled(num_weights)
    table = aten.embedding_dense_backward(grad_output.filled(0), asked, rows, padding_idx, scale_grad_by_freq)
    return Dense(table if rows == num_weights else table[:num_weights])


@masked_rule(
    aten._embedding_bag_backward.default,
    aten._embedding_bag_dense_backward.default,
    aten._embedding_bag_per_sample_weights_backward.default,
    category=DERIVATIVE,
    takes_op=True,
)
def _embedding_bag_backward(op: OpOverload, *args: Any, **kwargs: Any) -> Dense:
    """Each row (or its weight in the bag) gets what came to the bags that it is in."""
    given = named(op, args, kwargs)
    if given.get("sparse"):
        raise MaskedSemanticsError(
            f"{packet_name(op)} with sparse=True: its gradient is not stored sparsely yet. Use sparse=False."
        )
    for name in ("indices", "offsets", "offset2bag", "bag_size", "maximum_indices"):
        if name in given and not known_all_valid(given[name]):
            raise MaskedSemanticsError(
                f"{packet_name(op)} has no meaning where {name} (of shape {tuple(given[name].shape)}) is partly "
                "invalid: nothing says which rows are in which bag. Let autograd differentiate embedding_bag, or fill "
                "it first with x.to_tensor(value)."
            )
    return Dense(op(**{name: value.filled(0) if isinstance(value, Dense) else value for name, value in given.items()}))


# ------------------------------------------------------------------ of operators that are opaque, or of forward mode

_grid_sampler_backward = opaque(
    aten.grid_sampler_2d_backward.default,
    aten.grid_sampler_3d_backward.default,
    aten._grid_sampler_2d_cpu_fallback_backward.default,
)
_ctc_loss_backward = opaque(aten._ctc_loss_backward)
masked_scatter_backward = opaque(aten.masked_scatter_backward.default)
# The engine's own, in forward mode: on masked tensors it differentiates what the rule of glu does instead.
glu_jvp = opaque(aten.glu_jvp.default, aten.glu_backward_jvp.default)
# A softmax that is given a padding mask of its own, which torch.nn uses inside its fused layers.
_masked_softmax = opaque(aten._masked_softmax.default, aten._masked_softmax_backward.default)
