"""Sample calls of torch.nn's modules: from torch's module database, and written by hand where it has none."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from op_registry.conformance.sample import Sample, chosen, start_all_random_numbers

NOT_CALLED = {
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
