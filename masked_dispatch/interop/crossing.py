"""What every door shares: a masked tensor made of values and a mask, and both as another library is given them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from masked_dispatch.tensor.code_version import code_version
from masked_dispatch.tensor.masked_tensor import MaskedTensor

# The dtypes that NumPy has, and with it the libraries that store their columns as it does.
OF_NUMPY = frozenset(
    (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)


class Parts(NamedTuple):
    """What leaves: plain values on the CPU, 0 or False where invalid, and the mask, True where valid."""

    values: Tensor
    valid: Tensor


def as_masked(data: Tensor, mask: Tensor | None = None) -> MaskedTensor:
    """A masked tensor that shares memory with `data` and copies the mask, both of which fit; differentiable.

    Masked data gives a copy under both masks.
    """
    masked: MaskedTensor
    if isinstance(data, MaskedTensor):
        masked = data if mask is None else torch.ops.masked_dispatch.mask_with(data, mask)
        return masked
    masked = torch.ops.masked_dispatch.as_masked_tensor(data, mask, code_version())
    return masked


def zero_of(tensor: Tensor) -> int | bool:
    """The number that stands where nothing is valid."""
    return False if tensor.dtype is torch.bool else 0


def filled(tensor: Tensor) -> Tensor:
    """The values of a masked or plain tensor, 0 or False where invalid; differentiable."""
    return tensor.to_tensor(zero_of(tensor)) if isinstance(tensor, MaskedTensor) else tensor


def mask_of(tensor: Tensor) -> Tensor:
    """The mask of a masked tensor; that of a plain one is True everywhere."""
    if isinstance(tensor, MaskedTensor):
        return tensor.to_dense().get_mask()
    return torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)


def check_leaving(tensor: Tensor, library: str, dtypes: frozenset[torch.dtype] = OF_NUMPY) -> None:
    """Refuse a tensor that a library without gradients, on the CPU, of these dtypes, cannot hold."""
    described = f"a tensor of shape {tuple(tensor.shape)}"
    if tensor.requires_grad:
        raise RuntimeError(f"{described} requires grad, and {library} has no gradients: pass x.detach()")
    if tensor.device.type != "cpu":
        raise TypeError(f"{described} is on {tensor.device}, and {library} computes on the CPU: pass x.cpu()")
    if tensor.dtype not in dtypes:
        other = "x.real and x.imag" if tensor.is_complex() else "x.float()"
        raise TypeError(f"{library} has no dtype for {described} and {tensor.dtype}: pass {other}")


def leaving(tensor: Tensor, library: str, dtypes: frozenset[torch.dtype] = OF_NUMPY) -> Parts:
    """The parts of a tensor for a library, which has to be able to hold them."""
    check_leaving(tensor, library, dtypes)
    return Parts(filled(tensor).detach().resolve_conj().resolve_neg(), mask_of(tensor))
