"""Convert from and to torch.masked.MaskedTensor, PyTorch's prototype."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.masked import MaskedTensor as PrototypeTensor
from torch.masked import as_masked_tensor as as_prototype

from masked_dispatch.interop.crossing import as_masked, filled, mask_of, takes
from masked_dispatch.interop.torch_sparse import from_torch_sparse
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.records.fill import OwnFunction


class WithPlainGradient(OwnFunction):
    """The identity on the values, whose backward converts the gradient from torch.masked to a plain tensor."""

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.to_tensor(0) if isinstance(grad, PrototypeTensor) else grad


@takes(tensor=PrototypeTensor, instead="pass torch.masked.masked_tensor(data, mask), or use masked_tensor(data, mask)")
def from_torch_masked(tensor: PrototypeTensor) -> MaskedTensor:
    """Convert a strided, COO or CSR tensor of torch.masked, with its mask and in its layout; differentiable."""
    data, mask = tensor.get_data(), tensor.get_mask()
    if data.layout is torch.strided:
        return as_masked(data, mask)
    return as_masked(from_torch_sparse(data), mask.to_dense())


@takes(x=Tensor)
def to_torch_masked(x: Tensor) -> Tensor:
    """Convert to a strided torch.masked.MaskedTensor, with values 0 where invalid; differentiable.

    Raises TypeError for a dtype that it lacks (torch.bfloat16, complex).
    """
    if isinstance(x, MaskedTensor):
        x._check_no_extent("torch.masked")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of MaskedTensors is in prototype stage")
        values: Tensor = WithPlainGradient.apply(filled(x))
        return as_prototype(values, mask_of(x))
