"""pad_stack: tensors of different sizes as one batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from masked_dispatch.api.construct import as_masked_tensor
from masked_dispatch.interop.crossing import extent_of, filled, knows_padding, mask_of, tensors_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.torch_internals import collate, default_collate_fn_map


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
