"""Sample calls of torch's Python functions: from torch's operator database, and written by hand where it has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from op_registry.conformance.sample import Sample, chosen, start_all_random_numbers
from op_registry.conformance.samples import DatabaseOperator, database


def _clipped(call: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients after `call(parameters, …)` on parameters whose gradients are the arguments."""

    def clip(*gradients: Tensor) -> Any:
        parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        call(parameters)
        return [p.grad for p in parameters]

    return clip


def _by_hand() -> dict[str, list[tuple[Any, ...]]]:
    """Calls (function, *arguments) of functions that the database lacks, by name."""
    x, line = torch.randn(4, 3), torch.randn(4, 2, 6)
    image, cube = torch.randn(3, 2, 6, 6), torch.randn(3, 2, 4, 4, 4)
    utils = nn.utils
    pooled, places = F.max_pool2d(image, 2, return_indices=True)
    pooled_line, line_places = F.max_pool1d(line, 2, return_indices=True)
    pooled_cube, cube_places = F.max_pool3d(cube, 2, return_indices=True)
    return {
        "torch.lobpcg": [(torch.lobpcg, torch.diag(torch.arange(1.0, 10.0)), 1)],
        "functional.pca_lowrank": [(lambda t: torch.pca_lowrank(t, 2), torch.randn(4, 4))],
        "functional.svd_lowrank": [(lambda t: torch.svd_lowrank(t, 2), torch.randn(4, 4))],
        "nn.functional.local_response_norm": [(F.local_response_norm, image, 3)],
        "nn.functional.max_unpool1d": [(F.max_unpool1d, pooled_line, line_places, 2)],
        "nn.functional.max_unpool2d": [(F.max_unpool2d, pooled, places, 2)],
        "nn.functional.max_unpool3d": [(F.max_unpool3d, pooled_cube, cube_places, 2)],
        "nn.functional.fractional_max_pool2d": [(lambda t: F.fractional_max_pool2d(t, 2, output_size=2), image)],
        "nn.functional.fractional_max_pool3d": [(lambda t: F.fractional_max_pool3d(t, 2, output_size=2), cube)],
        "nn.functional.group_norm": [(F.group_norm, image, 2)],
        "nn.functional.glu": [(F.glu, image)],
        "nn.functional.adaptive_max_pool1d_with_indices": [(F.adaptive_max_pool1d_with_indices, line, 2)],
        "nn.functional.adaptive_max_pool2d_with_indices": [(F.adaptive_max_pool2d_with_indices, image, 2)],
        "nn.functional.adaptive_max_pool3d_with_indices": [(F.adaptive_max_pool3d_with_indices, cube, 2)],
        "nn.functional.affine_grid": [(F.affine_grid, torch.randn(3, 2, 3), (3, 2, 4, 4))],
        "nn.functional.dropout1d": [(F.dropout1d, line)],
        "nn.functional.fold": [(F.fold, torch.randn(3, 8, 9), (4, 4), 2)],
        "nn.functional.fractional_max_pool2d_with_indices": [
            (lambda t: F.fractional_max_pool2d_with_indices(t, (2, 2), output_size=(2, 2)), image)
        ],
        "nn.functional.fractional_max_pool3d_with_indices": [
            (lambda t: F.fractional_max_pool3d_with_indices(t, (2, 2, 2), output_size=(2, 2, 2)), cube)
        ],
        "nn.functional.grouped_mm": [(F.grouped_mm, torch.randn(3, 4, 8), torch.randn(3, 8, 4))],
        "nn.functional.gumbel_softmax": [(F.gumbel_softmax, x)],
        "nn.functional.log_softmax": [(F.log_softmax, x, -1), (F.log_softmax, x, 0)],
        "nn.functional.lp_pool1d": [(F.lp_pool1d, line, 2.0, 2), (F.lp_pool1d, line, 1.0, 4, 3, True)],
        "nn.functional.lp_pool2d": [(F.lp_pool2d, image, 2.0, 2), (F.lp_pool2d, image, 2.0, (2, 4), 3, True)],
        "nn.functional.lp_pool3d": [(F.lp_pool3d, cube, 2.0, 2)],
        "nn.functional.max_pool1d_with_indices": [(F.max_pool1d_with_indices, line, 2)],
        "nn.functional.max_pool2d_with_indices": [(F.max_pool2d_with_indices, image, 2)],
        "nn.functional.max_pool3d_with_indices": [(F.max_pool3d_with_indices, cube, 2)],
        "nn.functional.sigmoid": [(F.sigmoid, x)],
        "nn.functional.softmax": [(F.softmax, x, -1), (F.softmax, x, 0)],
        "nn.functional.tanh": [(F.tanh, x)],
        "nn.functional.upsample": [(lambda t: F.upsample(t, scale_factor=2), image)],
        "functional.chain_matmul": [(torch.chain_matmul, x, torch.randn(3, 2), torch.randn(2, 5))],
        "nn.utils.clip_grad_norm": [(_clipped(lambda p: utils.clip_grad_norm_(p, 0.5)), x)],
        "nn.utils.clip_grad_norm_": [(_clipped(lambda p: utils.clip_grad_norm_(p, 0.5, foreach=False)), x)],
        "nn.utils.clip_grad_value_": [(_clipped(lambda p: utils.clip_grad_value_(p, 0.5)), x)],
        "nn.utils.clip_grads_with_norm_": [
            (_clipped(lambda p: utils.clip_grads_with_norm_(p, 0.5, torch.tensor(2.0))), x)
        ],
        "nn.utils.get_total_norm": [(lambda t: utils.get_total_norm([t]), x)],
        "nn.utils.parameters_to_vector": [(lambda t: utils.parameters_to_vector([t]).reshape(t.shape), x)],
        "nn.utils.vector_to_parameters": [],
        "nn.utils.spectral_norm": [(lambda t: utils.spectral_norm(nn.Linear(3, 2))(t), x)],
        "nn.utils.weight_norm": [(lambda t: utils.weight_norm(nn.Linear(3, 2))(t), x)],
    }


# We test P2 on these only if the first tensor has this many dimensions. Leaving out an element of a smaller tensor
# would change the meaning of numbers in another argument or in the result, or change the broadcasting.
NUMBERED = {
    "masked.argmax": 9,  # positions
    "masked.argmin": 9,
    "functional.lu": 3,  # a matrix, all or nothing
    "functional.norm": 3,  # the nuclear norm is of a matrix
    "functional.stft": 2,  # a signal
    "functional.tensordot": 9,  # contracts a dimension of size 1 with any other
    "nn.functional.embedding": 9,  # rows of the table
    "nn.functional.embedding_bag": 9,
    "nn.functional.multi_margin_loss": 2,  # classes of one sample
    "nn.functional.multilabel_margin_loss": 2,
    "nn.MultiLabelMarginLoss": 2,
    "nn.MultiMarginLoss": 2,
    "nn.LazyConv1d": 3,  # channels, whose number gives a lazy module's weights their size
    "nn.LazyConv2d": 4,
    "nn.LazyConv3d": 5,
    "nn.LazyConvTranspose1d": 3,
    "nn.LazyConvTranspose2d": 4,
    "nn.LazyConvTranspose3d": 5,
}

# Functions whose results may be valid or plain where a sample is invalid: values of torch's own or of other arguments.
OWN_VALUES = {
    **dict.fromkeys(
        (
            "nn.functional.pad", "nn.functional.unfold", "nn.ConstantPad1d", "nn.ConstantPad2d", "nn.ConstantPad3d",
            "nn.ZeroPad1d", "nn.ZeroPad2d", "nn.ZeroPad3d",
        ),
        "padding",
    ),
    **dict.fromkeys(
        (
            "nn.functional.max_unpool1d", "nn.functional.max_unpool2d", "nn.functional.max_unpool3d",
            "nn.MaxUnpool1d", "nn.MaxUnpool2d", "nn.MaxUnpool3d", "distributions.LowerCholeskyTransform.forward",
            "distributions.LowerCholeskyTransform.inverse", "distributions.PositiveDefiniteTransform.forward",
            "distributions.PositiveDefiniteTransform.inverse", "distributions.CorrCholeskyTransform.forward",
        ),
        "zeros that the operation writes",
    ),
    **dict.fromkeys(
        (
            "masked.cumprod", "masked.cumsum", "masked.log_softmax", "masked.logaddexp", "masked.median",
            "masked.softmax", "masked.softmin",
        ),
        "what mask= excludes",
    ),
    "distributions.Multinomial.sample": "a count of nothing is 0",
    **dict.fromkeys(
        ("functional.broadcast_tensors", "functional.cartesian_prod", "functional.meshgrid"),
        "each result, or column, is of one argument alone",
    ),
    **dict.fromkeys(
        (
            "distributions.Categorical.mean", "distributions.Categorical.variance",
            "distributions.Categorical.stddev", "distributions.Cauchy.mean", "distributions.Cauchy.variance",
            "distributions.Cauchy.stddev", "distributions.HalfCauchy.mean", "distributions.HalfCauchy.variance",
            "distributions.HalfCauchy.stddev", "distributions.ReshapeTransform.log_abs_det_jacobian",
        ),
        "a constant, made of sizes alone",
    ),
}  # fmt: skip

# The semantics refuse these for a partly valid matrix, although each of their lines has a meaning.
MUST_REFUSE = ("torch.lobpcg", "functional.pca_lowrank", "functional.svd_lowrank")

NOT_CALLED = {
    "nn.functional.scaled_grouped_mm": "runs on a GPU",
    "nn.functional.scaled_mm": "runs on a GPU",
    "nn.utils.vector_to_parameters": "writes to .data, which torch gives no hook for",
    "nn.utils.fuse_conv_bn_eval": "makes a module of two",
    "nn.utils.fuse_conv_bn_weights": "makes parameters of two modules'",
    "nn.utils.fuse_linear_bn_eval": "makes a module of two",
    "nn.utils.fuse_linear_bn_weights": "makes parameters of two modules'",
}


def samples_of_function(name: str, most: int = 6) -> list[Sample]:
    """Calls of a function, in float32 if it takes that: at most `most` from each of its entries in the database."""
    start_all_random_numbers()
    group, _, last = name.rpartition(".")
    last = last if group == "torch" else name
    by_hand = _by_hand().get(name, [])
    found = [Sample(fn, tuple(args), {}, number, torch.float32) for number, (fn, *args) in enumerate(by_hand)]
    for operator in database().values():
        if operator.info.name in (name, last, name.removeprefix("functional.")) and operator.dtypes:
            with_tensors = [s for s in operator.samples(operator.preferred_dtype) if s.tensors]
            found += [_unseeded(name, operator, s) for s in chosen(with_tensors, most)]
    return found


def _unseeded(name: str, operator: DatabaseOperator, sample: Sample) -> Sample:
    """The call without the seed that the database sets, so that a trial recognises its results as random."""
    wrappers = (*getattr(operator.info.op, "__code__", _NO_CODE).co_names, operator.info.gradcheck_wrapper.__name__)
    if "wrapper_set_seed" not in wrappers:
        return sample
    group, _, last = name.rpartition(".")
    function = getattr(F if group == "nn.functional" else torch, last)
    return Sample(function, sample.args, sample.kwargs, sample.number, sample.dtype)


_NO_CODE = (lambda: None).__code__
