"""The reductions of torch.masked, given masked tensors: sum, mean, var, argmax … with their `mask=`.

Law: the elements that count are valid and let in by `mask=`; over them, the operator that torch.masked's function is
named after. Valid where there is such an element, or where `mask=` lets nothing in to begin with: that is torch's own
value. An invalid element of `mask=` makes its element invalid.

torch.masked's are Python functions. Taken apart into operators they would count with tensors of ones that they make
themselves, and find the argmax among the fills; so each is one operator here, `torch.ops.torch_masked`, whose plain
kernel is torch's function. The others (cumsum, cumprod, softmax, log_softmax, softmin, normalize, logaddexp) are right
as the operators that they are made of: what `mask=` leaves out takes part as the identity, and is valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

from op_registry.authoring import (
    REDUCTION,
    Dense,
    NotLowered,
    Permuted,
    Sparse,
    align_to,
    as_int8,
    call,
    intersect,
    masked_rule,
    to_dense,
    wrap_dims,
)

aten = torch.ops.aten

_OPTIONS = "bool? keepdim=False, ScalarType? dtype=None, Tensor? mask=None) -> Tensor"
_OVER_DIMS = f"(Tensor input, int[1]? dim=None, *, {_OPTIONS}"
_SPREAD = f"(Tensor input, int[1]? dim=None, bool? unbiased=None, *, Scalar? correction=None, {_OPTIONS}"
_SCHEMAS = {
    **dict.fromkeys(("sum", "prod", "mean", "amax", "amin", "logsumexp"), _OVER_DIMS),
    **dict.fromkeys(("argmax", "argmin"), f"(Tensor input, int? dim=None, *, {_OPTIONS}"),
    **dict.fromkeys(("var", "std"), _SPREAD),
    "median": f"(Tensor input, int dim=-1, *, {_OPTIONS}",
    "norm": f"(Tensor input, Scalar? ord=2.0, int[1]? dim=None, *, {_OPTIONS}",
}
_library = Library("torch_masked", "DEF")


def _plain_kernel(name: str) -> Callable[..., Tensor]:
    function = getattr(torch.masked, name)

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        # What dispatch has made a list is a tuple for torch's function, which takes an empty one for all dimensions.
        return function(*(tuple(a) if isinstance(a, list) else a for a in args), **kwargs)

    return kernel


def _operator(name: str) -> OpOverload:
    _library.define(name + _SCHEMAS[name])
    _library.impl(name, TORCHS[name], "CompositeImplicitAutograd")
    op: OpOverload = getattr(torch.ops.torch_masked, name).default
    return op


# By the name in torch.masked: torch's function, and the operator that stands for it.
TORCHS = {name: _plain_kernel(name) for name in _SCHEMAS}
OPERATORS = {name: _operator(name) for name in _SCHEMAS}


@masked_rule(*OPERATORS.values(), category=REDUCTION, takes_op=True)
def reductions(op: OpOverload, input: Dense, *args: Any, mask: Dense | None = None, **kwargs: Any) -> Dense:
    """The function's operator over what is let in and valid."""
    name = op._schema.name.partition("::")[2]
    if input.data.numel() == 0 or (input.validity is None and (mask is None or mask.validity is None)):
        return Dense(TORCHS[name](input.data, *args, mask=None if mask is None else mask.data, **kwargs))
    let_in = None if mask is None else mask.filled(False).to(torch.bool)
    # Its shape and dtype, torch's errors, and the value of nothing: whatever the data.
    own = TORCHS[name](torch.zeros_like(input.data), *args, mask=let_in, **kwargs)

    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names[1:], args, strict=False)) | kwargs
    given = {a.name: given.get(a.name, a.default_value) for a in op._schema.arguments if a.name not in _COMMON}
    dims = wrap_dims(given.pop("dim"), input.ndim)

    outside = None
    if mask is not None and let_in is not None:
        input = input.masked_by(intersect(as_int8(let_in), mask.validity))
        left_out = Dense(~let_in, mask.validity).filled(False).expand(input.shape)
        outside = dims_last(left_out, dims).all(-1).reshape(own.shape)
    result = OVER_LAST[name](input.map(lambda t: dims_last(t, dims)), own.dtype, **given)
    values, validity = result.data.reshape(own.shape).to(own.dtype), result.full_validity
    assert validity is not None
    validity = validity.reshape(own.shape)
    if outside is None:
        return Dense(values, validity)
    return Dense(torch.where(outside, own, values), as_int8(validity) | as_int8(outside))


_COMMON = ("input", "keepdim", "dtype", "mask")


def dims_last(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """`tensor` with `dims` as one dimension, the last."""
    rest = [d for d in range(tensor.ndim) if d not in dims]
    return tensor.permute([*rest, *dims]).reshape([tensor.shape[d] for d in rest] + [-1])


# --------------------------------------------------------- over the last dimension, in the dtype that is wanted or near


def first_result(op: OpOverload, x: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator by its rule or its sparse run; of several results the first."""
    result = call(op, x, *args, **kwargs)
    return result[0] if isinstance(result, tuple) else result


def inexact(x: Any, dtype: torch.dtype) -> Any:
    """`x` in `dtype`, or in float32 where that cannot hold a fraction; complex numbers stay such."""
    if isinstance(x, Sparse):
        return x.like(inexact(x.values, dtype))
    if not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.float32
    return x.like(x.data.to(dtype.to_complex() if x.dtype.is_complex else dtype))


def spread(op: OpOverload, x: Any, dtype: torch.dtype, unbiased: bool | None, correction: Any) -> Any:
    """var or std; `correction` has precedence over `unbiased`, and is 1 without either."""
    if correction is None:
        correction = float(unbiased is None or unbiased)
    return first_result(op, inexact(x, dtype), [-1], correction=correction)


OVER_LAST: dict[str, Callable[..., Any]] = {
    "sum": lambda x, dtype: first_result(aten.sum.dim_IntList, x, [-1], dtype=dtype),
    "prod": lambda x, dtype: first_result(aten.prod.dim_int, x, -1, dtype=dtype),
    "mean": lambda x, dtype: first_result(aten.mean.dim, x, [-1], dtype=dtype),
    "amax": lambda x, dtype: first_result(aten.amax.default, x, [-1]),
    "amin": lambda x, dtype: first_result(aten.amin.default, x, [-1]),
    "logsumexp": lambda x, dtype: first_result(aten.logsumexp.default, x, [-1]),
    "argmax": lambda x, dtype: first_result(aten.argmax.default, x, -1),
    "argmin": lambda x, dtype: first_result(aten.argmin.default, x, -1),
    "var": lambda x, dtype, **options: spread(aten.var.correction, x, dtype, **options),
    "std": lambda x, dtype, **options: spread(aten.std.correction, x, dtype, **options),
    "median": lambda x, dtype: first_result(aten.nanmedian.dim, inexact(x, x.dtype), -1),
    "norm": lambda x, dtype, ord: first_result(aten.linalg_vector_norm.default, inexact(x, dtype), ord, [-1]),
}


# ------------------------------------------------------------------------------------------------ on sparse storage


def _left_out(mask: Any, shape: Sequence[int], dims: tuple[int, ...]) -> Tensor:
    """Of which slices a mask lets nothing in: throughout it is valid, and False."""
    if isinstance(mask, Dense):
        left_out = Dense(~mask.filled(False).to(torch.bool), mask.validity).filled(False)
        return dims_last(left_out.expand(tuple(shape)), dims).all(-1)
    if tuple(mask.shape) != tuple(shape):
        raise NotLowered("its mask is sparse, and broadcast")
    refused = mask.like(mask.values.masked_by(as_int8(~mask.values.data.to(torch.bool))))
    each: Tensor = refused.count(dims) == math.prod(shape[d] for d in dims)
    return each


@reductions.lowering(Sparse)
def reductions_of_sparse(op: OpOverload, input: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
    """The same over the last dimension of a sparse matrix, of which every slice is a row."""
    name = op._schema.name.partition("::")[2]
    if not isinstance(input, Sparse) or 0 in input.shape or isinstance(mask, Permuted) or input.dense_sizes:
        raise NotLowered("its input is stored densely, or has dense dimensions, or there is nothing in it")
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names[1:], args, strict=False)) | kwargs
    given = {
        a.name: given.get(a.name, a.default_value) for a in op._schema.arguments if a.name not in ("input", "mask")
    }
    dim, keepdim, dtype = given.pop("dim"), bool(given.pop("keepdim")), given.pop("dtype")
    for d in dim if isinstance(dim, (list, tuple)) else [] if dim is None else [dim]:
        torch.empty(input.shape, device="meta").squeeze(d)  # raises torch's error
    dims = wrap_dims(dim, input.ndim)
    # What torch makes of a slice that its mask leaves nothing of: one number for all, in the dtype of the result.
    line = torch.zeros(1, dtype=input.dtype, device=input.device)
    along = {} if name in ("median",) else {"dim": 0}
    nothing = torch.zeros(1, dtype=torch.bool, device=input.device)
    own = TORCHS[name](line, **along, **given, dtype=dtype, mask=nothing)

    kept = input
    outside = None
    if mask is not None:
        there = align_to(mask, input)
        let_in = as_int8(there.filled(False).to(torch.bool))
        kept = input.like(
            input.values.masked_by(let_in.reshape(let_in.shape + (1,) * (input.values.ndim - let_in.ndim)))
        )
        outside = _left_out(mask, input.shape, dims)
    rest = [d for d in range(input.ndim) if d not in dims]
    lined = call(aten.permute.default, kept, [*rest, *dims])
    rows = [input.shape[d] for d in rest] or [1]
    lined = call(aten.view.default, lined, [*rows, -1])
    result = to_dense(OVER_LAST[name](lined, own.dtype, **given))
    shape = [1 if d in dims else n for d, n in enumerate(input.shape) if keepdim or d not in dims]
    values, validity = result.data.reshape(shape).to(own.dtype), result.full_validity
    if outside is None or validity is None:
        return Dense(values, None if validity is None else validity.reshape(shape))
    outside = outside.reshape(shape)
    return Dense(torch.where(outside, own, values), as_int8(validity.reshape(shape)) | as_int8(outside))
