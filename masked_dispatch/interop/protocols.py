"""The methods that other libraries call on their array arguments: NumPy's functions, DLPack, Arrow, matplotlib.

`np.mean(x)`, `pyarrow.array(x)` and `plt.plot(x)` treat `x` like a masked NumPy array. A function that would lose the
mask raises an error if an element is invalid, and the error names an alternative.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.engine_internals import frames_to_caller
from masked_dispatch.interop import door
from masked_dispatch.interop.crossing import leaving
from masked_dispatch.replacements import replace
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry import InvalidValueError

# numpy.ma has these NumPy functions under the same name, and respects the mask of every argument.
OF_NUMPY_MA = frozenset(
    (
        *("all", "any", "argmax", "argmin", "average", "count_nonzero", "cumprod", "cumsum", "max", "mean", "median"),
        *("amax", "amin", "min", "prod", "ptp", "std", "sum", "var"),
    )
)
# These NumPy functions write files without a mask.
OF_FILES = frozenset(("save", "savetxt", "savez", "savez_compressed"))
# These NumPy functions only read the shape.
OF_SHAPES = frozenset(("ndim", "shape", "size"))


def converted(value: Any, convert: Callable[[MaskedTensor], Any]) -> Any:
    """Convert the masked tensors in a function's arguments, including lists and tuples."""
    if isinstance(value, MaskedTensor):
        return convert(value)
    if type(value) in (list, tuple):
        return type(value)(converted(item, convert) for item in value)
    return value


@never_compiled
def call_numpy(
    self: MaskedTensor, function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call NumPy's `function` with masked arguments: numpy.ma's version, or the plain one if all elements are valid."""
    numpy: Any = sys.modules["numpy"]
    name = function.__name__
    if name in OF_SHAPES:
        return function(*converted(args, lambda x: numpy.broadcast_to(0, x.shape)), **kwargs)
    if name in OF_NUMPY_MA and hasattr(numpy.ma, name):
        function = getattr(numpy.ma, name)
        args = converted(args, lambda x: masked_array_of(x, numpy.ma))
        return function(*args, **kwargs)
    try:
        arrays = {key: converted(value, numpy.asarray) for key, value in kwargs.items()}
        values = converted(args, numpy.asarray)
    except InvalidValueError as error:
        if name in OF_FILES:
            raise InvalidValueError(f"numpy.{name}: {error} torch.save(x, path) keeps the mask in a file.") from error
        raise
    return function(*values, **arrays)


@never_compiled
def to_numpy(self: MaskedTensor) -> Any:
    """Convert to a NumPy masked array, masked where invalid; matplotlib draws gaps there.

    matplotlib, which calls this itself, gets floats with NaN for integers and bools: `hist` and `violinplot` ignore the
    mask, and would count zeros.
    """
    array = door("to_numpy_masked")(self)
    if array.dtype.kind in "iub" and array.mask.any() and _is_called_by("matplotlib"):
        array = array.astype("float64")
        array.data[array.mask] = float("nan")
    return array


def _is_called_by(package: str) -> bool:
    """Whether the function that calls this one is called by code of a package."""
    *_, (_, frame) = frames_to_caller()
    return frame is not None and frame.f_globals["__name__"].partition(".")[0] == package


@never_compiled
def arrow_array(self: MaskedTensor, type: Any = None) -> Any:
    """Implement ``pyarrow.array(x)``, with null where invalid."""
    array = door("to_arrow")(self)
    return array if type is None else array.cast(type)


@never_compiled
def dlpack(self: MaskedTensor, **options: Any) -> Any:
    """Export the values without a copy if every element is valid; raise :class:`InvalidValueError` otherwise."""
    return self._all_valid_data("DLPack").__dlpack__(**options)


def to_dlpack(original: Callable[[Any], Any], tensor: MaskedTensor) -> Any:
    """Call torch's function of this name on the values, if every element is valid."""
    return original(tensor._all_valid_data("to_dlpack()"))


def install() -> None:
    """The package calls this once, on import."""
    owners: Any = (torch, torch.utils.dlpack)  # both export the function
    for owner in owners:
        replace(owner, "to_dlpack", to_dlpack, lambda tensor: isinstance(tensor, MaskedTensor))
    added: dict[str, Any] = {
        "__array_function__": call_numpy,
        "__arrow_array__": arrow_array,
        "__dlpack__": dlpack,
        "to_numpy": to_numpy,
    }
    for name, method in added.items():
        setattr(MaskedTensor, name, method)


# ------------------------------------------- numpy.ma, without importing NumPy: a program without it has no such arrays


def parts_of_masked_array(data: object) -> tuple[object, Tensor | None]:
    """Return the array and the mask (True where valid) of a masked NumPy array; return other values without a mask.

    The returned array shares memory with the masked array.
    """
    numpy_ma: Any = sys.modules.get("numpy.ma")
    if numpy_ma is None or not isinstance(data, numpy_ma.MaskedArray):
        return data, None
    mask = numpy_ma.getmask(data)
    return numpy_ma.getdata(data), None if mask is numpy_ma.nomask else torch.as_tensor(~mask)


def masked_array_of(tensor: Tensor, numpy_ma: Any, fill_value: object = None) -> Any:
    """Build a masked array from copies of the values and the mask, with NaN (or 0) under the mask."""
    values, valid = leaving(tensor, "NumPy")
    if values.is_floating_point() or values.is_complex():
        values = torch.where(valid, values, torch.nan)
    return numpy_ma.MaskedArray(values.numpy(), mask=~valid.numpy(), fill_value=fill_value, copy=True)
