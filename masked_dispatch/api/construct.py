"""Making masked tensors: from data and a mask, from lengths, and from tensors of different sizes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, overload

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence as torch_pad_sequence

from masked_dispatch.dispatch.library import around, new_leaf
from masked_dispatch.interop.crossing import (
    as_padded,
    extent_of,
    filled,
    kind_of,
    knows_padding,
    mask_of,
    takes,
    tensors_of,
    without_extent,
)
from masked_dispatch.interop.protocols import parts_of_masked_array
from masked_dispatch.interop.torch_sparse import from_torch_sparse
from masked_dispatch.tensor.checks import as_plain_tensor, check_mask, checked_dim, least_and_most, values_unknown
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.traced import code_version
from masked_dispatch.torch_internals import collate, default_collate_fn_map, function_modes, plain_eager
from op_registry import MaskedSemanticsError
from op_registry.records.validity import intersect
from op_registry.sparse.convert import remember_lengths
from op_registry.sparse.layout import OF_TORCH


class SupportsArray(Protocol):
    """What NumPy can make an array of: an array, masked or not, a number of NumPy's."""

    def __array__(self, *args: Any, **options: Any) -> Any: ...


# What torch.as_tensor takes.
ArrayLike: TypeAlias = "Tensor | SupportsArray | complex | Sequence[ArrayLike]"


def is_masked_tensor(value: object) -> bool:
    """Whether `value` is a masked tensor."""
    return isinstance(value, MaskedTensor)


def masked_tensor(data: ArrayLike, mask: ArrayLike | None = None, *, requires_grad: bool = False) -> MaskedTensor:
    """A new leaf from copies of data and mask, as torch.tensor makes one.

    data  a plain tensor of any shape and dtype (or anything torch.as_tensor takes). A torch.sparse tensor keeps its
          layout: its specified elements are valid, except where `mask` is False. A masked NumPy array (numpy.ma) is
          invalid where it is masked or `mask` is False
    mask  bool, or integers 0 and 1, True where valid; of data's shape or broadcastable to it; None: all valid

    Raises TypeError (dtype), ValueError (shape, values), RuntimeError (device) for a mask that does not fit, and
    RuntimeError, as torch.tensor does, if data of this dtype cannot require grad. Warns, as torch.tensor does, if data
    requires grad: no gradient of the new leaf reaches it. (Compiled functions do not warn.)
    """
    data, mask = as_data_and_mask(data, mask, caller="masked_tensor")
    # Dynamo can't trace a warning.
    if data.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        warnings.warn(
            f"masked_tensor(data, mask) copies data of shape {tuple(data.shape)}, which requires grad, into a leaf: "
            "no gradient reaches data. as_masked_tensor(data, mask) keeps the graph; to cut it on purpose, write "
            "masked_tensor(data.detach(), mask)",
            stacklevel=2,
        )
    if data.layout is not torch.strided:
        masked = from_torch_sparse(data.detach().clone())
        if mask is not None:
            masked = torch.ops.masked_dispatch.mask_with(masked, mask)
        masked.requires_grad_(_checked(masked, requires_grad))
        return masked
    copy = _made(new_leaf, torch.ops.masked_dispatch.masked_tensor, data.detach(), mask)
    if requires_grad:
        copy.requires_grad_(_checked(copy, requires_grad))
    return copy


def _made(
    function: Callable[[Tensor, Tensor | None], MaskedTensor], operator: Callable[..., Any], data: Tensor, mask: Any
) -> MaskedTensor:
    """What the operator makes of plain data, or the function itself where nothing would see the operator's call."""
    if not torch.compiler.is_dynamo_compiling() and type(data) is Tensor and plain_eager() and not function_modes():
        return function(data, mask)
    return operator(data, mask, code_version())  # type: ignore[no-any-return]


def _checked(tensor: Tensor, requires_grad: bool) -> bool:
    if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise RuntimeError(
            f"Only Tensors of floating point and complex dtype can require gradients; the data is {tensor.dtype}"
        )
    return requires_grad


def as_masked_tensor(data: ArrayLike, mask: ArrayLike | None = None) -> MaskedTensor:
    """A masked tensor that shares memory with `data`; differentiable with respect to it.

    The mask is copied: later writes to it do not show, and writes to the result do not reach it. Data that is already
    masked gives a copy under both masks, as `mask_with` does. A torch.sparse tensor keeps its layout: its specified
    elements are valid, zeros and NaN too, and duplicates are summed; a mask can only make some of them invalid. Its
    gradient is sparse.

    Raises as :func:`masked_tensor` does, and ValueError for a sparse tensor with malformed indices.
    """
    data, mask = as_data_and_mask(data, mask, caller="as_masked_tensor")
    if data.layout is not torch.strided:
        data = from_torch_sparse(data)
    if isinstance(data, MaskedTensor):
        return data if mask is None else torch.ops.masked_dispatch.mask_with(data, mask)
    return _made(around, torch.ops.masked_dispatch.as_masked_tensor, data, mask)


@takes(tensor=Tensor, other=Tensor)
def mask_like(tensor: Tensor, other: MaskedTensor) -> MaskedTensor:
    """The values of `tensor`, valid where both it and `other` are; differentiable.

    tensor  plain (valid everywhere) or masked, of any dtype
    other   masked, of a shape that broadcasts to `tensor`'s

    Stored like `other` if that is stored sparsely and has the same shape; then nothing of the tensor's size is
    allocated. Like that of `mask_with`, the result is a copy.

    Raises TypeError if `other` is not masked, ValueError for shapes that do not broadcast.
    """
    return torch.ops.masked_dispatch.mask_like(tensor, other)


def from_nan(data: Tensor) -> MaskedTensor:
    """`data` (floating point or complex), invalid where it is NaN; differentiable, and shares memory with `data`."""
    data, mask = as_data_and_mask(data, sparse=False, caller="from_nan")
    if isinstance(data, MaskedTensor):
        raise TypeError(
            f"from_nan masks a plain tensor, and this one of shape {tuple(data.shape)} is masked already. To make "
            "its NaN invalid too, write from_nan(x.to_tensor(float('nan')))"
        )
    if not (data.is_floating_point() or data.is_complex()):
        raise TypeError(f"from_nan needs floating point or complex data, which can hold NaN; got {data.dtype}")
    return as_masked_tensor(data, intersect(~torch.isnan(data), mask))


def from_lengths(data: Tensor, lengths: Tensor, dim: int = 1) -> MaskedTensor:
    """A padded batch: row i has the first `lengths[i]` positions of `dim`, and the others are not there.

    data     shape (B, …, T, …) with T at `dim`; plain, or masked: then positions of the batch may be missing
    lengths  integers, shape (B,), each between 0 and T

    Each sample then gives what it gives without padding; `x.without_extent()` treats padding as missing values instead.
    """
    data, mask = as_data_and_mask(data, sparse=False, caller="from_lengths")
    lengths = lengths if isinstance(lengths, Tensor) else _tensor_of(lengths, "from_lengths")
    if isinstance(lengths, MaskedTensor):
        raise TypeError(
            f"lengths is a masked tensor of shape {tuple(lengths.shape)}, and an invalid length has no meaning: "
            "choose what it counts as, from_lengths(data, lengths.to_tensor(0))"
        )
    if data.ndim < 2:
        raise ValueError(f"from_lengths takes a padded batch, (B, ..., T, ...), not data of shape {tuple(data.shape)}")
    dim = checked_dim("from_lengths", data, dim)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype is torch.bool:
        raise TypeError(f"lengths have to be integers, one for each row; got {lengths.dtype}")
    if dim == 0 or lengths.shape != data.shape[:1]:
        raise ValueError(
            f"from_lengths takes one length for each row: lengths of shape {tuple(lengths.shape)} do not fit data of "
            f"shape {tuple(data.shape)}, one length for each index of dimension 0, counted along dim={dim}"
        )
    known = "p"
    if not values_unknown(lengths) and lengths.numel():  # read where they are: on the CPU, nothing waits for a device
        least, most = least_and_most(lengths)
        known = "P" if least > 0 else "p"
        if least < 0 or most > data.shape[dim]:
            raise ValueError(f"lengths run from {least} to {most}, but dimension {dim} has {data.shape[dim]} positions")
    on_host = None if values_unknown(lengths) or lengths.device == data.device else lengths
    # (torch compares the wider unsigned integers with their own kind only.)
    lengths = lengths.to(data.device, torch.int64, non_blocking=True)
    positions = torch.arange(data.shape[dim], device=data.device).view(-1, *[1] * (data.ndim - dim - 1))
    letters = ["s" if d == 0 else known if d == dim else "-" for d in range(data.ndim)]
    in_extent = positions < lengths.view(-1, *[1] * (data.ndim - 1))
    batch = as_padded(data if mask is None else as_masked_tensor(data, mask), in_extent, "".join(letters))
    padded_rows = mask is None and dim == 1
    if padded_rows and on_host is not None and on_host.device.type == "cpu" and batch._validity is not None:
        remember_lengths(batch._validity, on_host.tolist())
    return batch


def pad_sequence(
    sequences: Iterable[Tensor], batch_first: bool = False, padding_side: Literal["left", "right"] = "right"
) -> MaskedTensor:
    """Sequences of different lengths as one batch, which knows what is padding; differentiable.

    sequences     tensors of shape (T_i, …), plain or masked, that differ in T_i only; masked ones keep their masks
    batch_first   whether the result has shape (B, T, …), T the greatest T_i, or (T, B, …)
    padding_side  "right" pads after a sequence, "left" before it

    The result is stored densely; with `batch_first` `.to_packed()` stores it without the padding. (The padding of
    torch.nn.utils.rnn.pad_sequence is a number of the caller's choice, and valid.)

    Raises torch's own errors for sequences that do not fit together.
    """
    sequences = tensors_of("pad_sequence", "sequences", sequences)
    padded = torch_pad_sequence([without_extent(s) for s in sequences], batch_first, padding_side=padding_side)
    if any(map(knows_padding, sequences)):
        in_extent = torch_pad_sequence([extent_of(s) for s in sequences], batch_first, padding_side=padding_side)
        return torch.ops.masked_dispatch.padded(padded, in_extent, None, 0 if batch_first else 1)
    steps = [torch.ones(sequence.shape[0], dtype=torch.bool, device=sequence.device) for sequence in sequences]
    is_step = torch_pad_sequence(steps, batch_first, padding_side=padding_side)
    order, rest = "p" if padding_side == "right" else "c", padded.ndim - 2
    letters = f"s{order}" if batch_first else f"{order}s"
    return as_padded(padded, is_step.view(*is_step.shape, *[1] * rest), letters + "-" * rest)


def as_data_and_mask(
    data: object, mask: object = None, sparse: bool = True, *, caller: str
) -> tuple[Tensor, Tensor | None]:
    """Data that can be masked, and its checked mask: the one given, and that of a masked array of NumPy."""
    data, of_array = parts_of_masked_array(data)
    data = as_data(data, sparse, caller)
    of_array = None if of_array is None else of_array.to(data.device)
    given = None if mask is None else check_mask(data, mask)
    return data, intersect(given, of_array)


def as_data(data: object, sparse: bool, caller: str) -> Tensor:
    """`data` as a tensor that can be masked: a strided one, or a torch.sparse one if `sparse`."""
    if not isinstance(data, Tensor):
        data = _tensor_of(data, caller)
    if data.layout in OF_TORCH and not sparse:
        raise MaskedSemanticsError(
            f"data of layout {data.layout} and shape {tuple(data.shape)} is accepted by masked_tensor and "
            "as_masked_tensor only, for which its specified elements are the valid ones; elsewhere pass "
            "data.to_dense()"
        )
    if data.is_nested:
        raise MaskedSemanticsError(
            f"a nested tensor of layout {data.layout} cannot be masked: pass its padded form with the lengths of its "
            "sequences, from_lengths(data.to_padded_tensor(0), lengths), and .to_packed() to store it without padding"
        )
    if data.layout is not torch.strided and data.layout not in OF_TORCH:
        raise MaskedSemanticsError(
            f"data of layout {data.layout} and shape {tuple(data.shape)} cannot be masked; pass data.to_dense()"
        )
    if data.is_quantized:
        raise MaskedSemanticsError(
            f"quantized data ({data.dtype}, shape {tuple(data.shape)}) cannot be masked; pass data.dequantize()"
        )
    return data


# Libraries whose objects torch.as_tensor cannot read where something is missing, and the functions that read them.
DOORS_OF_LIBRARIES = {
    "pandas": "from_pandas(data)",
    "polars": "from_polars(data)",
    "pyarrow": "from_arrow(data)",
    "scipy": "from_scipy_sparse(data)",
    "tensordict": "from_tensordict(data)",
    "transformers": "from_batch_encoding(batch)",
    "xarray": "from_xarray(data)",
}


def _tensor_of(data: object, caller: str) -> Tensor:
    try:
        return as_plain_tensor(data)
    except MaskedSemanticsError:  # of a masked tensor in a list: it says what to do
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{caller} takes data that torch.as_tensor converts, not {kind_of(data)} ({error}). {_way_in(data)}"
        ) from error


def _way_in(data: object) -> str:
    """What to write for data that torch.as_tensor does not take."""
    library = type(data).__module__.partition(".")[0]
    if library in DOORS_OF_LIBRARIES:
        return f"Use masked_dispatch.interop.{DOORS_OF_LIBRARIES[library]}, which makes missing elements invalid"
    if isinstance(data, Mapping):
        return "Mask each of its values; for a tokenizer's batch use masked_dispatch.interop.from_batch_encoding(batch)"
    if isinstance(data, (list, tuple)) and any(isinstance(item, Tensor) for item in data):
        return "Use masked_dispatch.pad_sequence(tensors, batch_first=True), or pad_stack(tensors)"
    if isinstance(data, (list, tuple)):
        return "For missing numbers write float('nan') and use masked_dispatch.from_nan(data)"
    return "Pass a tensor, a number, nested lists of numbers, or an array of NumPy"


# ------------------------------------------------------------------- pad_stack: tensors of different sizes as one batch


@overload
def pad_stack(tensors: Iterable[Tensor], dim: int = 0) -> MaskedTensor: ...


@overload
def pad_stack(tensors: Iterable[tuple[Any, ...] | list[Any] | Mapping[Any, Any]], dim: int = 0) -> Any: ...


def pad_stack(tensors: Iterable[Any], dim: int = 0) -> Any:
    """Stack tensors that may differ in every size along a new dimension; what fills them up is padding, and not there.

    tensors  plain or masked, at least one, of the same number of dimensions; masked ones keep their masks. Or samples
             of a dataset (tuples, lists and mappings of such tensors, NumPy arrays and numbers), which are collated as
             by `torch.utils.data.default_collate`, except that tensors may differ in size

    The result has the greatest sizes, and each tensor lies at the beginning of every dimension. Dimensions in which
    tensors differ number positions (the first one, if they don't differ). The result is differentiable and stored
    densely. For sequences, which only differ in their first size, use `pad_sequence`.

    Raises ValueError for no tensors, or for different numbers of dimensions; TypeError for other samples.
    """
    samples = list(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, (str, Mapping)) else tensors
    if isinstance(samples, list) and samples and all(isinstance(sample, (tuple, list, Mapping)) for sample in samples):
        kinds: dict[Any, Any] = {**default_collate_fn_map, Tensor: functools.partial(_collated, dim=dim)}
        try:
            return collate(samples, collate_fn_map=kinds)
        except (RuntimeError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(
                f"pad_stack takes samples of one structure, made of tensors, arrays and numbers: {error}"
            ) from error
    return _padded(tensors_of("pad_stack", "tensors", samples), dim)


def _collated(tensors: list[Tensor], *, dim: int, collate_fn_map: object) -> MaskedTensor:
    return _padded(tensors_of("pad_stack", "the parts of samples", tensors), dim)


def _padded(tensors: list[Tensor], dim: int) -> MaskedTensor:
    if not tensors:
        raise ValueError("pad_stack takes at least one tensor: the shape of an empty stack is not known")
    if len({tensor.ndim for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:5])
        raise ValueError(f"pad_stack takes tensors of the same number of dimensions, not of shapes {shapes}")
    lengths = list(zip(*(tensor.shape for tensor in tensors), strict=True))
    sizes = [max(of_dim) for of_dim in lengths]
    lacking = [[n for size, length in zip(sizes, t.shape, strict=True) for n in (size - length, 0)] for t in tensors]

    def stacked(parts: list[Tensor]) -> Tensor:
        return torch.stack([pad(part, n[::-1]) for part, n in zip(parts, lacking, strict=True)], dim)

    batch: Tensor = stacked([filled(tensor) for tensor in tensors])
    if any(isinstance(tensor, MaskedTensor) for tensor in tensors):
        batch = as_masked_tensor(batch, stacked([mask_of(tensor) for tensor in tensors]))
    samples = dim % batch.ndim
    # Sizes that happen to agree say nothing: of a batch that needs no padding, the first dimension numbers positions.
    differ = [d for d, of_dim in enumerate(lengths) if len(set(of_dim)) > 1] or list(range(len(sizes)))[:1]
    dims = None if any(map(knows_padding, tensors)) else [d + (d >= samples) for d in differ]
    if dims == []:
        return as_masked_tensor(batch)
    extent = stacked([extent_of(tensor) for tensor in tensors])
    return torch.ops.masked_dispatch.padded(batch, extent, dims, samples)
