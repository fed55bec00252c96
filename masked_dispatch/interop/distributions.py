"""torch.distributions of vectors and matrices: each slice of a parameter or value is valid as a whole, or not at all.

A draw of a multivariate normal distribution, its covariance and its entropy depend on the whole matrix. The individual
operators of torch's Python code would sum over the valid elements of a matrix: the result would be another covariance,
or a draw from another distribution. The replaced methods below therefore invalidate a whole slice (the row of a mean, a
matrix) if one of its elements is invalid. The inner operators could not apply this rule, as nothing in their operands
shows that a distribution calls them. torch.compile traces the replacements like any Python. Plain arguments stay
unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributions as D
from torch import Tensor

from masked_dispatch.interop.crossing import as_masked
from masked_dispatch.replacements.replacing import replace
from masked_dispatch.tensor.checks import is_given_masked
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.records.tracing import may_be_read

Dims = tuple[int, ...]
ROW: Dims = (-1,)
MATRIX: Dims = (-2, -1)
OF_NORMALS = {"covariance_matrix": MATRIX, "precision_matrix": MATRIX, "scale_tril": MATRIX}

# Maps each class to its methods, and each method's arguments to the dimensions of a slice.
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
    """Invalidate the slices over `dims` of a masked tensor that have an invalid element; return other values unchanged.

    A tensor without such slices is returned itself, so a distribution shares its parameters' memory as in torch.
    """
    if not isinstance(value, MaskedTensor) or value.dim() < len(dims):
        return value
    mask = value.get_mask()
    slices = mask.all(dims, keepdim=True)
    if not torch.compiler.is_compiling() and may_be_read(mask) and bool((mask == slices).all()):
        return value
    return value.mask_with(slices)


def valid_with(matrices: Tensor | None, degrees: object) -> Tensor | None:
    """Invalidate matrices whose degrees of freedom are invalid, because they have no distribution to draw from."""
    if matrices is None or not isinstance(degrees, MaskedTensor):
        return matrices
    mask = degrees.get_mask()[..., None, None]
    batch = torch.broadcast_shapes(matrices.shape, mask.shape)
    return as_masked(matrices.expand(batch), mask)


def taking_whole(function: Callable[..., Any], slices: Mapping[str, Dims]) -> Callable[..., Any]:
    """Return a replacement that calls `whole` on masked arguments; `slices` maps their names to slice dims."""
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
    """Call Wishart's `__init__` with matrices that are invalid where the degrees of freedom are."""
    matrices = [valid_with(m, df) for m in (covariance_matrix, precision_matrix, scale_tril)]
    init(self, df, *matrices, validate_args)


def of_whole_matrices(call: Callable[..., Tensor], self: D.PositiveDefiniteTransform, x: MaskedTensor) -> Tensor:
    """Call PositiveDefiniteTransform's `_call`, and invalidate matrices with an invalid element.

    The method writes valid zeros into a triangle, so its own products would be partly valid.
    """
    result: Any = call(self, x)
    return result.mask_with(x.get_mask().all(MATRIX, keepdim=True))


# These methods have special replacements.
OTHERS: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (D.Wishart, "__init__", with_degrees),
    (D.PositiveDefiniteTransform, "_call", of_whole_matrices),
)


def install() -> None:
    """Replace the methods; the package calls this once, on import."""
    for owner, methods in METHODS.items():
        for name, slices in methods.items():
            replace(owner, name, taking_whole(getattr(owner, name), slices), is_given_masked)
    for owner, name, serving in OTHERS:
        replace(owner, name, serving, is_given_masked)
