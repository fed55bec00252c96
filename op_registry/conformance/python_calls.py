"""Sample calls of torch's Python functions and modules: from torch's databases, or written by hand."""

from __future__ import annotations

import functools
import warnings
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


# ----------------------------------------------------------------------------------------------------------------------
# Sample calls of torch.nn's modules: from torch's module database, and written by hand where it has none.

MODULES_NOT_CALLED = {
    "Container": "a base class",
    "Module": "a base class",
    "RNNBase": "a base class",
    "RNNCellBase": "a base class",
    "ModuleDict": "holds modules, and has no forward",
    "ModuleList": "holds modules, and has no forward",
    "ParameterDict": "holds parameters, and has no forward",
    "ParameterList": "holds parameters, and has no forward",
    "DataParallel": "needs devices",
    "SyncBatchNorm": "needs a process group",
}


def _made() -> dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]]:
    """Modules that the database lacks, each with the arguments of a call."""
    x, image = torch.randn(4, 3), torch.randn(3, 4, 6, 6)
    pooled, places = nn.functional.max_pool2d(image, 2, return_indices=True)
    line, line_places = nn.functional.max_pool1d(image[:, :, 0], 2, return_indices=True)
    cube = torch.randn(3, 2, 4, 4, 4)
    block, block_places = nn.functional.max_pool3d(cube, 2, return_indices=True)
    return {
        "AdaptiveLogSoftmaxWithLoss": lambda: (
            nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8]), (torch.randn(4, 8), torch.tensor([0, 5, 10, 3]))
        ),
        "AlphaDropout": lambda: (nn.AlphaDropout(), (x,)),
        "ChannelShuffle": lambda: (nn.ChannelShuffle(2), (image,)),
        "CosineSimilarity": lambda: (nn.CosineSimilarity(), (x, torch.randn(4, 3))),
        "CrossMapLRN2d": lambda: (nn.CrossMapLRN2d(3), (image,)),
        "Dropout": lambda: (nn.Dropout(), (x,)),
        "Dropout1d": lambda: (nn.Dropout1d(), (image[0],)),
        "Dropout2d": lambda: (nn.Dropout2d(), (image,)),
        "Dropout3d": lambda: (nn.Dropout3d(), (cube,)),
        "EmbeddingBag": lambda: (nn.EmbeddingBag(5, 3), (torch.tensor([[0, 1], [2, 3], [4, 0]]),)),
        "FeatureAlphaDropout": lambda: (nn.FeatureAlphaDropout(), (image,)),
        "Flatten": lambda: (nn.Flatten(), (image,)),
        "Fold": lambda: (nn.Fold((4, 4), 2), (torch.randn(3, 8, 9),)),
        "Hardsigmoid": lambda: (nn.Hardsigmoid(), (x,)),
        "Identity": lambda: (nn.Identity(), (x,)),
        "LazyBatchNorm1d": lambda: (nn.LazyBatchNorm1d(), (x,)),
        "LazyBatchNorm2d": lambda: (nn.LazyBatchNorm2d(), (image,)),
        "LazyBatchNorm3d": lambda: (nn.LazyBatchNorm3d(), (cube,)),
        "LazyInstanceNorm1d": lambda: (nn.LazyInstanceNorm1d(), (image[:, :, 0],)),
        "LazyInstanceNorm2d": lambda: (nn.LazyInstanceNorm2d(), (image,)),
        "LazyInstanceNorm3d": lambda: (nn.LazyInstanceNorm3d(), (cube,)),
        "LazyLinear": lambda: (nn.LazyLinear(2), (x,)),
        "MaxUnpool1d": lambda: (nn.MaxUnpool1d(2), (line, line_places)),
        "MaxUnpool2d": lambda: (nn.MaxUnpool2d(2), (pooled, places)),
        "MaxUnpool3d": lambda: (nn.MaxUnpool3d(2), (block, block_places)),
        "NLLLoss2d": lambda: (nn.NLLLoss(), (torch.randn(4, 3).log_softmax(1), torch.tensor([0, 1, 2, 0]))),
        "PairwiseDistance": lambda: (nn.PairwiseDistance(), (x, torch.randn(4, 3))),
        "PixelShuffle": lambda: (nn.PixelShuffle(2), (image,)),
        "PixelUnshuffle": lambda: (nn.PixelUnshuffle(2), (image,)),
        "RReLU": lambda: (nn.RReLU(), (x,)),
        "Sequential": lambda: (nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (x,)),
        "TransformerDecoder": lambda: (
            nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8, 0.0, batch_first=True), 1),
            (torch.randn(3, 4, 8), torch.randn(3, 5, 8)),
        ),
        "TripletMarginLoss": lambda: (nn.TripletMarginLoss(), (x, torch.randn(4, 3), torch.randn(4, 3))),
        "TripletMarginWithDistanceLoss": lambda: (
            nn.TripletMarginWithDistanceLoss(), (x, torch.randn(4, 3), torch.randn(4, 3))
        ),
        "Unflatten": lambda: (nn.Unflatten(1, (2, 2)), (image,)),
        "Unfold": lambda: (nn.Unfold(2), (image,)),
        "Upsample": lambda: (nn.Upsample(scale_factor=2), (image,)),
        "UpsamplingBilinear2d": lambda: (nn.UpsamplingBilinear2d(scale_factor=2), (image,)),
        "UpsamplingNearest2d": lambda: (nn.UpsamplingNearest2d(scale_factor=2), (image,)),
    }  # fmt: skip


def samples_of_module(name: str, most: int = 6) -> list[Sample]:
    """Calls of ``nn.NAME``, in float32 and in training: at most `most`."""
    start_all_random_numbers()
    made = _made().get(name)
    if made is not None:
        module, args = made()
        return [Sample(_as_called(name, module, lambda: _made()[name]()[0]), args, {}, 0, torch.float32)]
    return _from_database(getattr(nn, name), most)


def _as_called(name: str, module: nn.Module, make: Callable[[], nn.Module]) -> Callable[..., Any]:
    """The module. A lazy module is made anew for each call, because it cannot be copied before its first call."""
    if not name.startswith("Lazy"):
        return module

    def call(*args: Any, **kwargs: Any) -> Any:
        start_all_random_numbers()
        return make()(*args, **kwargs)

    return call


def _from_database(module_class: type[nn.Module], most: int) -> list[Sample]:
    from torch.testing._internal.common_modules import module_db

    found: list[Sample] = []
    for info in module_db:
        if info.module_cls is not module_class:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
            )
            for given in inputs:
                if given.forward_input is None:
                    continue
                make = functools.partial(
                    info.module_cls, *given.constructor_input.args, **given.constructor_input.kwargs
                )
                call = _as_called(module_class.__name__, make(), make)
                args, kwargs = tuple(given.forward_input.args), dict(given.forward_input.kwargs)
                detached = Sample(call, args, kwargs, 0, torch.float32).with_tensors(_detached)
                found.append(Sample(call, *detached, len(found), torch.float32))
    return chosen(found, most)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()
