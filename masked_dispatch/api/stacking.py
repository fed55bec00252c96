"""pad_stack: tensors of different sizes as one batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from masked_dispatch.api.construct import as_masked_tensor
from masked_dispatch.interop.crossing import filled, mask_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor


def pad_stack(tensors: Iterable[Tensor], dim: int = 0) -> MaskedTensor:
    """Tensors that may differ in every size, stacked along a new dimension; what fills them up is invalid.

    tensors  plain or masked, at least one, of the same number of dimensions; masked ones keep their masks

    The sizes are the greatest, and each tensor lies at the beginning of every dimension. Differentiable, stored
    densely. `pad_sequence` is the one for sequences, which differ in their first size only.

    Raises ValueError for no tensors, or for different numbers of dimensions.
    """
    tensors = list(tensors)
    if not tensors:
        raise ValueError("pad_stack takes at least one tensor: the shape of an empty stack is not known")
    if len({tensor.ndim for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:5])
        raise ValueError(f"pad_stack takes tensors of the same number of dimensions, not of shapes {shapes}")
    sizes = [max(lengths) for lengths in zip(*(tensor.shape for tensor in tensors), strict=True)]
    data, masks = [], []
    for tensor in tensors:
        missing = [n for length, size in zip(tensor.shape, sizes, strict=True) for n in (size - length, 0)]
        data.append(pad(filled(tensor), missing[::-1]))
        masks.append(pad(mask_of(tensor), missing[::-1]))
    return as_masked_tensor(torch.stack(data, dim), torch.stack(masks, dim))
