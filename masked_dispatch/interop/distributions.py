"""torch.distributions of vectors and matrices: a parameter or value counts whole, slice by slice, or not at all.

A draw of a multivariate normal distribution, its covariance and its entropy depend on the whole matrix. Line by line,
torch's Python would sum over what is left of one: a covariance without one of its terms is another covariance, and a
product of random numbers and the rest of a matrix a draw of another distribution. So the methods below take arguments
of which each slice (the row of a mean, a matrix) is valid or invalid as a whole. They are methods, often called with
nothing but plain tensors besides, so no operator that they call could tell; and torch.compile traces what stands here
like any Python. Plain arguments are passed on as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributions as D
from torch import Tensor

from masked_dispatch.replacements.replacing import replace
from masked_dispatch.tensor.code_version import code_version
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.records.tracing import may_be_read

Dims = tuple[int, ...]
ROW: Dims = (-1,)
MATRIX: Dims = (-2, -1)
OF_NORMALS = {"covariance_matrix": MATRIX, "precision_matrix": MATRIX, "scale_tril": MATRIX}

# From each class to its methods, and the dimensions of a slice of each of their arguments.
METHODS: dict[type, dict[str, dict[str, Dims]]] = {
    D.MultivariateNormal: {"__init__": {"loc": ROW, **OF_NORMALS}},
    D.LowRankMultivariateNormal: {
        "__init__": {"loc": ROW, "cov_factor": MATRIX, "cov_diag": ROW},
        "log_prob": {"value": ROW},
    },
    D.Wishart: {"__init__": OF_NORMALS},
    D.LKJCholesky: {"log_prob": {"value": MATRIX}},
    D.CorrCholeskyTransform: {
        "_call": {"x": ROW},
        "_inverse": {"y": MATRIX},
        "log_abs_det_jacobian": {"x": ROW, "y": MATRIX},
    },
    D.StickBreakingTransform: {
        "_call": {"x": ROW},
        "_inverse": {"y": ROW},
        "log_abs_det_jacobian": {"x": ROW, "y": ROW},
    },
}


def whole(value: object, dims: Dims) -> object:
    """A masked tensor without the slices over `dims` that have an invalid element; anything else as it is.

    One that has no such slices is itself returned, so that a distribution shares its parameters' memory as in torch.
    """
    if not isinstance(value, MaskedTensor) or value.dim() < len(dims):
        return value
    mask = value.get_mask()
    slices = mask.all(dims, keepdim=True)
    if not torch.compiler.is_compiling() and may_be_read(mask) and bool((mask == slices).all()):
        return value
    return value.mask_with(slices)


def valid_with(matrices: Tensor | None, degrees: object) -> Tensor | None:
    """Matrices that are valid where their degrees of freedom are, too: without these there is nothing to draw."""
    if matrices is None or not isinstance(degrees, MaskedTensor):
        return matrices
    mask = degrees.get_mask()[..., None, None]
    batch = torch.broadcast_shapes(matrices.shape, mask.shape)
    masked: Tensor = torch.ops.masked_dispatch.as_masked_tensor(matrices.expand(batch), mask, code_version())
    return masked


def is_given_masked(*args: Any, **kwargs: Any) -> bool:
    """Whether an argument is masked."""
    return any(isinstance(argument, MaskedTensor) for argument in (*args, *kwargs.values()))


def taking_whole(function: Callable[..., Any], slices: Mapping[str, Dims]) -> Callable[..., Any]:
    """What to call for the method, with masked arguments made whole; `slices` names them, with their slices' dims."""
    places = tuple(slices.get(name) for name in inspect.signature(function).parameters)

    def method(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = [a if dims is None else whole(a, dims) for a, dims in zip(args, places, strict=False)]
        named = {name: whole(a, slices[name]) if name in slices else a for name, a in kwargs.items()}
        return original(*given, *args[len(places) :], **named)

    return method


def with_degrees(
    init: Callable[..., None],
    self: D.Wishart,
    df: Tensor | float,
    covariance_matrix: Tensor | None = None,
    precision_matrix: Tensor | None = None,
    scale_tril: Tensor | None = None,
    validate_args: bool | None = None,
) -> None:
    """Wishart's `__init__`, with the matrices invalid where the degrees of freedom are."""
    matrices = [valid_with(m, df) for m in (covariance_matrix, precision_matrix, scale_tril)]
    init(self, df, *matrices, validate_args)


def of_whole_matrices(call: Callable[..., Tensor], self: D.PositiveDefiniteTransform, x: MaskedTensor) -> Tensor:
    """PositiveDefiniteTransform's `_call`, which writes zeros into a triangle: its products are not all of holes."""
    result: Any = call(self, x)
    return result.mask_with(x.get_mask().all(MATRIX, keepdim=True))


# Methods with something of their own to call.
OTHERS: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (D.Wishart, "__init__", with_degrees),
    (D.PositiveDefiniteTransform, "_call", of_whole_matrices),
)


def install() -> None:
    """Replace the methods: called once, when the package is imported."""
    for owner, methods in METHODS.items():
        for name, slices in methods.items():
            replace(owner, name, taking_whole(getattr(owner, name), slices), is_given_masked)
    for owner, name, serving in OTHERS:
        replace(owner, name, serving, is_given_masked)
