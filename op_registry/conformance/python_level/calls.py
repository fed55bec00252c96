"""Sample calls of torch's Python functions: torch's operator database, and by hand what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from op_registry.conformance.sample import Sample, chosen, start_all_random_numbers
from op_registry.conformance.samples import database


def _clipped(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(parameters, …)` of a parameter whose gradient is the argument; the gradients after it."""

    def clip(*gradients: Tensor) -> Any:
        parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        call(parameters)
        return [p.grad for p in parameters]

    return clip


def _by_hand() -> dict[str, list[tuple[Any, ...]]]:
    """Calls (function, *arguments) by name, of what the database lacks."""
    x, line = torch.randn(4, 3), torch.randn(4, 2, 6)
    image, cube = torch.randn(3, 2, 6, 6), torch.randn(3, 2, 4, 4, 4)
    utils = nn.utils
    return {
        "nn.functional.adaptive_max_pool1d_with_indices": [(F.adaptive_max_pool1d_with_indices, line, 2)],
        "nn.functional.adaptive_max_pool2d_with_indices": [(F.adaptive_max_pool2d_with_indices, image, 2)],
        "nn.functional.adaptive_max_pool3d_with_indices": [(F.adaptive_max_pool3d_with_indices, cube, 2)],
        "nn.functional.affine_grid": [(F.affine_grid, torch.randn(3, 2, 3), (3, 2, 4, 4))],
        "nn.functional.dropout1d": [(F.dropout1d, line)],
        "nn.functional.fold": [(F.fold, torch.randn(3, 8, 9), (4, 4), 2)],
        "nn.functional.fractional_max_pool2d_with_indices": [
            (lambda t: F.fractional_max_pool2d_with_indices(t, 2, output_size=2), image)
        ],
        "nn.functional.fractional_max_pool3d_with_indices": [
            (lambda t: F.fractional_max_pool3d_with_indices(t, 2, output_size=2), cube)
        ],
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


NOT_CALLED = {
    "nn.functional.grouped_mm": "runs on a GPU",
    "nn.functional.scaled_grouped_mm": "runs on a GPU",
    "nn.functional.scaled_mm": "runs on a GPU",
    "nn.utils.vector_to_parameters": "writes to .data, which torch gives no hook for",
    "nn.utils.fuse_conv_bn_eval": "makes a module of two",
    "nn.utils.fuse_conv_bn_weights": "makes parameters of two modules'",
    "nn.utils.fuse_linear_bn_eval": "makes a module of two",
    "nn.utils.fuse_linear_bn_weights": "makes parameters of two modules'",
}


def samples_of_function(name: str, most: int = 6) -> list[Sample]:
    """Calls of a function, in float32 where it takes that: at most `most` of each of its entries in the database."""
    start_all_random_numbers()
    by_hand = _by_hand().get(name)
    if by_hand is not None:
        calls = enumerate(by_hand)
        return [Sample(fn, tuple(args), {}, number, torch.float32) for number, (fn, *args) in calls]
    found: list[Sample] = []
    for operator in database().values():
        if operator.info.name in (name, name.removeprefix("functional.")) and operator.dtypes:
            found += chosen([s for s in operator.samples(operator.preferred_dtype) if s.tensors], most)
    return found
