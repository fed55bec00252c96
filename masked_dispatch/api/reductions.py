"""torch's reductions and scans, by torch's names, with `skipna` and (for reductions) `min_count`: other rules for
missing elements, around torch functions that skip invalid elements.

Law: the values are those of torch's function on the masked tensor; only their validity changes.

    skipna=False    valid where no element of the slice is invalid (for a scan: no element up to this one)
    min_count=0     valid everywhere: a slice without valid elements gives the operation's identity
    min_count=n     for n > 0, valid where the slice has at least n valid elements

What is not there of a padded batch is not missing, and no element: a slice of a sample that has nothing there is valid
with skipna=False, and where min_count is not given, it has torch's result for no elements.

For a plain tensor, which is valid everywhere, the result is torch's own; min_count > 1 makes it masked.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast, overload

import torch
from torch import Tensor

from masked_dispatch.api import construct
from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.engine_internals import delegating
from masked_dispatch.interop.crossing import missing_of, placed_like
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.torch_internals import tree_map
from op_registry.records.arguments import Number

# A function that is never run, see below.
Signature = TypeVar("Signature", bound=Callable[..., Any])


def reduction(
    function: Callable[..., Any],
    signature: Signature,
    *,
    identity: Number | None = None,
    no_dims_is_elementwise: bool = False,
) -> Signature:
    """torch's `function(x, dim, keepdim)` with skipna and min_count.

    signature               what it is called with, one of those below
    identity                its value for no elements, if it has one
    no_dims_is_elementwise  whether dim=() means no dimension, as for any and all; elsewhere in torch it means all
    """
    name, options = function.__name__, own_options(signature)
    default = inspect.signature(signature).parameters["dim"].default
    every_dim: Dims = None if default is inspect.Parameter.empty else default

    def reduced(
        x: Tensor,
        dim: Dims = every_dim,
        keepdim: bool = False,
        *,
        skipna: bool = True,
        min_count: int | None = None,
        **keywords: Any,
    ) -> Any:
        check_options(name, keywords, options)
        if dim is not None or keepdim:
            keywords |= {"dim": dim, "keepdim": keepdim}
        elementwise = no_dims_is_elementwise and isinstance(dim, Sequence) and not dim
        return reduce(
            lambda t: function(t, **keywords), name, x, dim, keepdim, skipna, min_count, identity, elementwise
        )

    return with_signature(reduced, name, signature, _REDUCTION)


def scan(function: Callable[..., Any], signature: Signature) -> Signature:
    """torch's `function(x, dim)` with skipna; `signature` is what it is called with, one of those below."""
    name, options = function.__name__, own_options(signature)

    def scanned(x: Tensor, dim: int, *, skipna: bool = True, **keywords: Any) -> Any:
        check_options(name, keywords, options)
        result = function(x, dim, **keywords)
        if skipna or not isinstance(x, MaskedTensor):
            return result
        none_missing = missing_of(x).cumsum(dim) == 0
        return tree_map(lambda values: values.mask_with(none_missing), result)

    return with_signature(scanned, name, signature, _SCAN)


def reduce(
    call: Callable[[Tensor], Any],
    name: str,
    x: Tensor,
    dim: Dims,
    keepdim: bool,
    skipna: bool,
    min_count: int | None,
    identity: Number | None = None,
    elementwise: bool = False,
) -> Any:
    """`call(x)`, a reduction over `dim`, or none if `elementwise`, with the validity of skipna and min_count."""
    if min_count is not None and min_count < 0:
        raise ValueError(f"{name}(): min_count is a number of elements, 0 or more; got {min_count}")
    if min_count == 0 and identity is None:
        raise ValueError(
            f"{name}() of no elements has no value, so min_count=0 is not possible for a slice without valid elements. "
            "Use min_count=1 (the default), and to_tensor(fill) on the result to choose a value"
        )
    if min_count is not None and min_count > 1:
        x = construct.as_masked_tensor(x)
    result = call(x)
    if not isinstance(x, MaskedTensor) or (skipna and min_count is None):
        return result
    dims = tuple(dim) if isinstance(dim, Sequence) else dim
    if dims == () and not elementwise:
        dims = None
    conditions = []
    if min_count:
        conditions.append((x.get_mask().to(torch.int64) if elementwise else x.count(dims, keepdim)) >= min_count)
    if not skipna:
        conditions.append(~torch.any(missing_of(x), dim=dims, keepdim=keepdim))

    def with_new_validity(values: MaskedTensor) -> MaskedTensor:
        if min_count == 0 and identity is not None:
            values = placed_like(construct.as_masked_tensor(values.to_tensor(identity)), values)
        for valid in conditions:
            values = values.mask_with(valid)
        return values

    return tree_map(with_new_validity, result)


def check_options(name: str, keywords: Iterable[str], options: Sequence[str]) -> None:
    """Refuse keyword arguments other than `options`; torch accepts some more (out=, axis=)."""
    for option in keywords:
        if option not in options:
            known = ", ".join(("dim", *options, "skipna"))
            raise TypeError(f"{name}() takes no {option}= here, only {known} and so on; torch.{name} may take it")


def own_options(signature: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the keyword arguments that are torch's own: those beside skipna and min_count."""
    keywords = [p.name for p in inspect.signature(signature).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return tuple(name for name in keywords if name not in ("skipna", "min_count"))


def with_signature(function: Callable[..., Any], name: str, signature: Signature, text: str) -> Signature:
    """`function` with its public name, signature and docstring."""
    function.__name__ = function.__qualname__ = name
    function.__signature__ = inspect.signature(signature)  # type: ignore[attr-defined]
    function.__doc__ = text.format(name=name)
    return cast("Signature", function)


_REDUCTION = """torch.{name} over the valid elements of each slice.

x          a tensor of any shape, masked or plain, of a dtype that torch.{name} takes
skipna     False: one invalid element makes the slice's result invalid
min_count  the number of valid elements that a result needs; 0: a slice without any gives the operation's identity.
           None: 1, except where padding leaves nothing of a slice, which gives what torch gives for no elements

Other arguments as for torch.{name}. Returns the same shapes and dtypes, masked if x is or min_count > 1.

Raises ValueError for a negative min_count, and for min_count=0 if there is no identity; otherwise as torch.{name}.
"""

_SCAN = """torch.{name} over the valid elements along `dim`; valid where x is.

x       a tensor of any shape, masked or plain, of a dtype that torch.{name} takes
skipna  False: everything from the first invalid element on is invalid

Other arguments as for torch.{name}. Returns the same shapes and dtypes, masked if x is.
"""


# ------------------------- What torch's reductions and scans are called with here, each as a function that is never run

# `reduction` and `scan` give what they make the signature of one of these: a type checker sees it as that
# function, and at run time it is where the names of the other keyword arguments, and the default of `dim`, are read.

Dims = int | Sequence[int] | None


class ValuesAndIndices(Protocol):
    """Two tensors by name and in order: one of torch.return_types."""

    @property
    def values(self) -> Tensor: ...

    @property
    def indices(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor: ...

    def __iter__(self) -> Iterator[Tensor]: ...


# ---------------------------------------------------------------------------------------------------------- reductions


def over_dims(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> Tensor:
    """Any number of dimensions, all of them if none is given."""
    raise NotImplementedError


def over_dims_given(
    x: Tensor, dim: int | Sequence[int], keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> Tensor:
    """Any number of dimensions, which torch wants to be given."""
    raise NotImplementedError


def over_dims_in_dtype(
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    skipna: bool = True,
    min_count: int | None = None,
) -> Tensor:
    """Any number of dimensions, and the dtype to convert to before."""
    raise NotImplementedError


def over_one_dim_in_dtype(
    x: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    skipna: bool = True,
    min_count: int | None = None,
) -> Tensor:
    """One dimension or all, and the dtype to convert to before."""
    raise NotImplementedError


def over_dims_corrected(
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    correction: Number | None = 1,
    skipna: bool = True,
    min_count: int | None = None,
) -> Tensor:
    """Any number of dimensions, and what the divisor is less than the number of elements."""
    raise NotImplementedError


def two_over_dims_corrected(
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    correction: Number | None = 1,
    skipna: bool = True,
    min_count: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same with two results."""
    raise NotImplementedError


def index_over_one_dim(
    x: Tensor, dim: int | None = None, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> Tensor:
    """One dimension, or all as if flattened."""
    raise NotImplementedError


def least_and_greatest(
    x: Tensor, dim: int | None = None, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> torch.return_types.aminmax:
    """One dimension or all; the two results by name."""
    raise NotImplementedError


@overload
def chosen(x: Tensor, dim: None = None, *, skipna: bool = True, min_count: int | None = None) -> Tensor: ...


@overload
def chosen(
    x: Tensor, dim: int, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> ValuesAndIndices: ...


def chosen(
    x: Tensor, dim: int | None = None, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> Tensor | ValuesAndIndices:
    """An element of each slice and where it was; of the whole tensor, the element alone."""
    raise NotImplementedError


def chosen_over_one_dim(
    x: Tensor, dim: int = -1, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> ValuesAndIndices:
    """An element of each slice and where it was, along the last dimension if none is given."""
    raise NotImplementedError


# --------------------------------------------------------------------------------------------------------------- scans


def along_dim(x: Tensor, dim: int, *, skipna: bool = True) -> Tensor:
    """One dimension."""
    raise NotImplementedError


def along_dim_in_dtype(x: Tensor, dim: int, *, dtype: torch.dtype | None = None, skipna: bool = True) -> Tensor:
    """One dimension, and the dtype to convert to before."""
    raise NotImplementedError


def chosen_along_dim(x: Tensor, dim: int, *, skipna: bool = True) -> ValuesAndIndices:
    """One dimension: the elements, and where they were."""
    raise NotImplementedError


# ---------------------------------------------------------------------------------------------------- torch's functions

# Each line names torch's function, what it is called with, and its identity: its value for no elements. Operations
# without an identity (a mean, a maximum) do not accept min_count=0.

sum = reduction(torch.sum, over_dims_in_dtype, identity=0)
nansum = reduction(torch.nansum, over_dims_in_dtype, identity=0)
prod = reduction(torch.prod, over_one_dim_in_dtype, identity=1)
any = reduction(torch.any, over_dims, identity=False, no_dims_is_elementwise=True)
all = reduction(torch.all, over_dims, identity=True, no_dims_is_elementwise=True)
logsumexp = reduction(torch.logsumexp, over_dims_given, identity=-math.inf)

mean = reduction(torch.mean, over_dims_in_dtype)
nanmean = reduction(torch.nanmean, over_dims_in_dtype)
var = reduction(torch.var, over_dims_corrected)
std = reduction(torch.std, over_dims_corrected)
var_mean = reduction(torch.var_mean, two_over_dims_corrected)
std_mean = reduction(torch.std_mean, two_over_dims_corrected)
amax = reduction(torch.amax, over_dims)
amin = reduction(torch.amin, over_dims)
aminmax = reduction(torch.aminmax, least_and_greatest)
max = reduction(torch.max, chosen)
min = reduction(torch.min, chosen)
argmax = reduction(torch.argmax, index_over_one_dim)
argmin = reduction(torch.argmin, index_over_one_dim)
median = reduction(torch.median, chosen)
nanmedian = reduction(torch.nanmedian, chosen)
mode = reduction(torch.mode, chosen_over_one_dim)

cumsum = scan(torch.cumsum, along_dim_in_dtype)
cumprod = scan(torch.cumprod, along_dim_in_dtype)
cummax = scan(torch.cummax, chosen_along_dim)
cummin = scan(torch.cummin, chosen_along_dim)
logcumsumexp = scan(torch.logcumsumexp, along_dim)


# ------------------------------------------------------------- functions with an argument before the dimension


def quantile(
    x: Tensor,
    q: float | Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    skipna: bool = True,
    min_count: int | None = None,
) -> Tensor:
    """torch.quantile over the valid elements of each slice; skipna and min_count as for `mean`."""

    def call(t: Tensor) -> Tensor:
        return torch.quantile(t, q, dim, keepdim, interpolation=interpolation)

    return reduce(call, "quantile", x, dim, keepdim, skipna, min_count)


def nanquantile(
    x: Tensor,
    q: float | Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    skipna: bool = True,
    min_count: int | None = None,
) -> Tensor:
    """torch.nanquantile over the valid elements of each slice; skipna and min_count as for `mean`."""

    def call(t: Tensor) -> Tensor:
        return torch.nanquantile(t, q, dim, keepdim, interpolation=interpolation)

    return reduce(call, "nanquantile", x, dim, keepdim, skipna, min_count)


def kthvalue(
    x: Tensor, k: int, dim: int = -1, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> ValuesAndIndices:
    """torch.kthvalue over the valid elements of each slice, invalid if there are fewer than k.

    skipna and min_count as for `mean`.
    """
    return reduce(lambda t: torch.kthvalue(t, k, dim, keepdim), "kthvalue", x, dim, keepdim, skipna, min_count)


def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    skipna: bool = True,
    min_count: int | None = None,
) -> Tensor:
    """torch.linalg.vector_norm over the valid elements of each slice; skipna and min_count as for `sum`.

    The norm of no elements is 0 for a finite order ≥ 0; other orders do not accept min_count=0.
    """

    def call(t: Tensor) -> Tensor:
        return torch.linalg.vector_norm(t, ord, dim, keepdim, dtype=dtype)

    identity = 0 if 0 <= ord < math.inf else None
    return reduce(call, "vector_norm", x, dim, keepdim, skipna, min_count, identity)


# ------------------------------------------------ methods of masked tensors that say where `skipna` and `min_count` are


def naming_the_function(name: str, options: tuple[str, ...]) -> Callable[..., Any]:
    """torch's method, which names the library's function if it is given one of its options."""
    method: Callable[..., Any] = getattr(torch.Tensor, name)

    @delegating  # so that rules inside a Python function see who called the method
    @functools.wraps(method)
    @never_compiled
    def reduced(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            for option in options:
                if option in kwargs:
                    raise TypeError(
                        f"x.{name}() is torch's method and has no {option}; use masked_dispatch.{name}(x, ..., "
                        f"{option}={kwargs[option]!r})"
                    )
        return method(self, *args, **kwargs)

    return reduced


def install() -> None:
    """Called once, when the package is imported."""
    for name, function in list(globals().items()):
        if hasattr(torch.Tensor, name) and inspect.isfunction(function):
            options = tuple(o for o in ("skipna", "min_count") if o in inspect.signature(function).parameters)
            if options:
                setattr(MaskedTensor, name, naming_the_function(name, options))
