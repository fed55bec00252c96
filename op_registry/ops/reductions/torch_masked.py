"""The reductions of torch.masked on masked tensors: sum, mean, var, argmax … with their `mask=`.

Law: the operator that the function is named after, over the elements that are valid and selected by `mask=`. Valid
where there is such an element, and also where `mask=` itself selects nothing: the result is then torch's value. An
invalid element of `mask=` makes the element that it belongs to invalid.

Law of the others (cumsum, cumprod, softmax, log_softmax, softmin, normalize, logaddexp): that of the operators which
they call. Elements that `mask=` excludes take part as the identity, such as 0 for cumsum. They are valid where the
input is, but their own results have no meaning, as torch documents.

The functions of torch.masked are written in Python. Decomposed into operators, the reductions would count by summing
tensors of ones that they create, and find the argmax among the fills. So each is one operator here,
`torch.ops.torch_masked`, whose plain kernel is torch's function.
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
    AnyRecord,
    ByArgument,
    Dense,
    NotLowered,
    Number,
    Permuted,
    Slices,
    Sparse,
    Unknown,
    align_to,
    as_int8,
    call,
    intersect,
    masked_rule,
    shape_alone,
    to_dense,
)
from op_registry.records.arguments import wrap_dims

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
        # Dispatch makes lists of tuples; torch's function wants tuples, and takes an empty one for all dimensions.
        return function(*(tuple(a) if isinstance(a, list) else a for a in args), **kwargs)

    return kernel


def _operator(name: str) -> OpOverload:
    _library.define(name + _SCHEMAS[name])
    _library.impl(name, TORCH_FUNCTIONS[name], "CompositeImplicitAutograd")
    return getattr(torch.ops.torch_masked, name).default


# By name in torch.masked: torch's function, and the operator that represents it.
TORCH_FUNCTIONS = {name: _plain_kernel(name) for name in _SCHEMAS}
OPERATORS = {name: _operator(name) for name in _SCHEMAS}


INDICES = ("argmax", "argmin")


def _where_no_mask(dims: Slices) -> ByArgument:
    return ByArgument("mask", Unknown("a mask beside it says what counts"), dims)


@masked_rule(
    *[operator for name, operator in OPERATORS.items() if name not in INDICES],
    category=REDUCTION,
    takes_op=True,
    dims=_where_no_mask(Slices()),
)
def reductions(op: OpOverload, input: Dense, *args: Any, mask: Dense | None = None, **kwargs: Any) -> Dense:
    """The function's operator over the elements that are selected and valid."""
    name = op._schema.name.partition("::")[2]
    if input.data.numel() == 0 or (input.validity is None and (mask is None or mask.validity is None)):
        return Dense(TORCH_FUNCTIONS[name](input.data, *args, mask=None if mask is None else mask.data, **kwargs))
    selected = None if mask is None else mask.filled(False).to(torch.bool)
    # On zeros: the result's shape and dtype, torch's errors, and its value where `mask=` selects nothing.
    of_zeros = TORCH_FUNCTIONS[name](torch.zeros_like(input.data), *args, mask=selected, **kwargs)
    options = _options(op, args, kwargs)
    dims = wrap_dims(options.pop("dim"), input.ndim)
    for common in ("keepdim", "dtype"):
        options.pop(common)

    empty_slices = None
    if mask is not None and selected is not None:
        input = input.masked_by(intersect(as_int8(selected), mask.validity))
        excluded = Dense(~selected, mask.validity).filled(False).expand(input.shape)
        empty_slices = dims_last(excluded, dims).all(-1).reshape(of_zeros.shape)
    result = OVER_LAST[name](input.map(lambda t: dims_last(t, dims)), of_zeros.dtype, **options)
    values, validity = result.data.reshape(of_zeros.shape).to(of_zeros.dtype), result.full_validity
    assert validity is not None
    validity = validity.reshape(of_zeros.shape)
    if empty_slices is None:
        return Dense(values, validity)
    return Dense(torch.where(empty_slices, of_zeros, values), as_int8(validity) | as_int8(empty_slices))


@masked_rule(
    *[OPERATORS[name] for name in INDICES],
    category=REDUCTION,
    takes_op=True,
    dims=_where_no_mask(Slices(positions=(0,))),
)
def indices(op: OpOverload, input: Dense, *args: Any, **kwargs: Any) -> Dense:
    """Those whose results are indices."""
    return reductions.run(op, input, *args, **kwargs)


def _options(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments other than `input` and `mask`, by name, with their defaults."""
    arguments = [a for a in op._schema.arguments if a.name not in ("input", "mask")]
    by_name = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return {a.name: by_name.get(a.name, a.default_value) for a in arguments}


def dims_last(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """`tensor` with `dims` merged into one last dimension."""
    rest = [d for d in range(tensor.ndim) if d not in dims]
    return tensor.permute([*rest, *dims]).reshape([tensor.shape[d] for d in rest] + [-1])


# ----------------------------------------------------------------- over the last dimension, roughly in the result dtype


def first_result(op: OpOverload, x: AnyRecord, *args: Any, **kwargs: Any) -> Any:
    """An operator by its rule or its sparse lowering; the first of several results."""
    result = call(op, x, *args, **kwargs)
    return result[0] if isinstance(result, tuple) else result


def inexact(x: AnyRecord, dtype: torch.dtype) -> AnyRecord:
    """`x` in `dtype`, or in float32 if `dtype` cannot hold a fraction; complex numbers stay complex."""
    if not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.float32
    dtype = dtype.to_complex() if x.dtype.is_complex else dtype
    return x if x.dtype is dtype else call(aten._to_copy.default, x, dtype=dtype)


def var_or_std(
    op: OpOverload, x: AnyRecord, dtype: torch.dtype, unbiased: bool | None, correction: Number | None
) -> Any:
    """`correction` takes precedence over `unbiased`; the default is 1."""
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
    "var": lambda x, dtype, **options: var_or_std(aten.var.correction, x, dtype, **options),
    "std": lambda x, dtype, **options: var_or_std(aten.std.correction, x, dtype, **options),
    "median": lambda x, dtype: first_result(aten.nanmedian.dim, inexact(x, x.dtype), -1),
    "norm": lambda x, dtype, ord: first_result(aten.linalg_vector_norm.default, inexact(x, dtype), ord, [-1]),
}


# ---------------------------------------------------------------------------------------------------- on sparse storage


def _empty_slices(mask: Dense | Sparse, shape: Sequence[int], dims: tuple[int, ...]) -> Tensor:
    """In which slices a mask selects nothing: it is valid and False throughout."""
    if isinstance(mask, Dense):
        excluded = Dense(~mask.filled(False).to(torch.bool), mask.validity).filled(False)
        return dims_last(excluded.expand(tuple(shape)), dims).all(-1)
    if tuple(mask.shape) != tuple(shape):
        raise NotLowered("its mask is sparse and would be broadcast")
    excluding = mask.like(mask.values.masked_by(as_int8(~mask.values.data.to(torch.bool))))
    return excluding.count(dims) == math.prod(shape[d] for d in dims)


def _select(x: Sparse, mask: Dense | Sparse) -> Sparse:
    """The record with only the elements valid that `mask` selects."""
    selected = as_int8(align_to(mask, x).filled(False).to(torch.bool))
    return x.like(x.values.masked_by(selected.reshape(selected.shape + (1,) * (x.values.ndim - selected.ndim))))


def _value_of_empty(name: str, input: Sparse, dtype: torch.dtype | None, options: dict[str, Any]) -> Tensor:
    """torch's value for a slice in which the mask selects nothing: one number, in the dtype of the result."""
    element = torch.zeros(1, dtype=input.dtype, device=input.device)
    dim = {} if name == "median" else {"dim": 0}
    return TORCH_FUNCTIONS[name](
        element, **dim, **options, dtype=dtype, mask=torch.zeros_like(element, dtype=torch.bool)
    )


@indices.lowering(Sparse)
@reductions.lowering(Sparse)
def reductions_of_sparse(
    op: OpOverload, input: AnyRecord, *args: Any, mask: AnyRecord | None = None, **kwargs: Any
) -> Dense:
    """The same over the last dimension of a sparse matrix whose rows are the slices."""
    name = op._schema.name.partition("::")[2]
    if not isinstance(input, Sparse) or 0 in input.shape or isinstance(mask, Permuted) or input.dense_sizes:
        raise NotLowered("its input is stored densely, has dense dimensions or is empty")
    options = _options(op, args, kwargs)
    dim, keepdim, dtype = options.pop("dim"), bool(options.pop("keepdim")), options.pop("dtype")
    for d in dim if isinstance(dim, (list, tuple)) else [] if dim is None else [dim]:
        shape_alone(input.shape).squeeze(d)  # raises torch's error
    dims = wrap_dims(dim, input.ndim)
    of_empty = _value_of_empty(name, input, dtype, options)
    selected = input if mask is None else _select(input, mask)
    empty_slices = None if mask is None else _empty_slices(mask, input.shape, dims)
    rest = [d for d in range(input.ndim) if d not in dims]
    slices_last = call(aten.permute.default, selected, [*rest, *dims])
    matrix = call(aten.view.default, slices_last, [*([input.shape[d] for d in rest] or [1]), -1])
    result = to_dense(OVER_LAST[name](matrix, of_empty.dtype, **options))
    shape = [1 if d in dims else n for d, n in enumerate(input.shape) if keepdim or d not in dims]
    values, validity = result.data.reshape(shape).to(of_empty.dtype), result.full_validity
    if empty_slices is None or validity is None:
        return Dense(values, None if validity is None else validity.reshape(shape))
    empty_slices = empty_slices.reshape(shape)
    return Dense(torch.where(empty_slices, of_empty, values), as_int8(validity.reshape(shape)) | as_int8(empty_slices))
