"""Masked tensors whose data and mask are distributed tensors (DTensor): functions that place, move and split them.

Each function treats data and mask alike (`alike`). It moves the mask even if all elements are valid, because all ranks
that hold parts of one tensor must make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from masked_dispatch.api.construct import as_masked_tensor
from masked_dispatch.autograd.dense import unwrap
from masked_dispatch.distributed_internals import waited_for
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry import MaskedSemanticsError
from op_registry.records.divided import is_divided

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def distribute(
    tensor: MaskedTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> MaskedTensor:
    """Place a masked tensor as `torch.distributed.tensor.distribute_tensor` places a plain one.

    The ranks receive parts of rank 0's tensor. The result is a leaf of autograd, which requires grad if `tensor` does.
    """
    from torch.distributed.tensor import distribute_tensor

    check("distribute", tensor)
    check_placements("distribute", tensor, placements)
    detached: Any = tensor.detach()
    placed: Any = alike(lambda part: distribute_tensor(part, device_mesh, placements), detached)
    placed.requires_grad_(tensor.requires_grad)
    return placed  # type: ignore[no-any-return]


def from_local(
    tensor: MaskedTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> MaskedTensor:
    """Build one masked tensor from the parts of the ranks, like `DTensor.from_local`; differentiable."""
    from torch.distributed.tensor import DTensor

    check("from_local", tensor)
    check_placements("from_local", tensor, placements)
    return alike(lambda part: DTensor.from_local(part, device_mesh, placements), tensor)


def to_local(tensor: MaskedTensor) -> MaskedTensor:
    """Return this rank's part of a masked tensor of distributed tensors, like `DTensor.to_local`; differentiable."""
    check_distributed("to_local", tensor)
    return alike(lambda part: part.to_local(), tensor)


def redistribute(
    tensor: MaskedTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> MaskedTensor:
    """Change the placements of a masked tensor of distributed tensors, like `DTensor.redistribute`; differentiable."""
    check_distributed("redistribute", tensor)
    check_placements("redistribute", tensor, placements)
    return alike(lambda part: part.redistribute(device_mesh, placements), tensor)


def full_tensor(tensor: MaskedTensor) -> MaskedTensor:
    """Gather a masked tensor of distributed tensors on every rank, like `DTensor.full_tensor`; differentiable."""
    check_distributed("full_tensor", tensor)
    return alike(lambda part: part.full_tensor(), tensor)


def alike(function: Callable[[Any], Tensor], tensor: MaskedTensor) -> MaskedTensor:
    """Apply a function that places or moves a tensor to both data and mask."""
    return together(function(data_of(tensor)), function(mask_of(tensor)))


def together(data: Tensor, mask: Tensor) -> MaskedTensor:
    return as_masked_tensor(waited_for(data), waited_for(mask))


def data_of(tensor: Tensor) -> Tensor:
    """Return the data of a masked tensor; differentiable."""
    return unwrap(tensor).data if isinstance(tensor, MaskedTensor) else tensor


def mask_of(tensor: Tensor) -> Tensor:
    return tensor.get_mask() if isinstance(tensor, MaskedTensor) else tensor


def is_distributed(tensor: MaskedTensor) -> bool:
    """Return whether data and mask are distributed tensors."""
    return is_divided(tensor._data)


def check(call: str, tensor: Tensor) -> None:
    """Raise unless the tensor is a dense masked tensor."""
    if not isinstance(tensor, MaskedTensor):
        raise TypeError(
            f"masked_dispatch.distributed.{call} takes a masked tensor, got {type(tensor).__name__} of shape "
            f"{tuple(tensor.shape)}: for a plain tensor use the function of torch.distributed.tensor."
        )
    if isinstance(tensor, SparseMaskedTensor):
        raise MaskedSemanticsError(
            f"masked_dispatch.distributed.{call} of a tensor of shape {tuple(tensor.shape)} that is stored as "
            f"{tensor.storage_layout}: distributed tensors are stored densely. Pass x.to_dense()."
        )


def check_placements(call: str, tensor: Tensor, placements: Sequence[Placement] | None) -> None:
    """Raise for a placement that stands for a sum over ranks (Partial), because masks have no sum."""
    for dim, placement in enumerate(placements or ()):
        if placement.is_partial():
            raise MaskedSemanticsError(
                f"masked_dispatch.distributed.{call} of a tensor of shape {tuple(tensor.shape)} with {placement!r} "
                f"along dimension {dim} of the mesh: a mask has no partial sums. First combine the tensors of the "
                "ranks by torch.distributed.all_reduce(x), which makes an element valid if it is valid on one rank, "
                "and place the result with Replicate()."
            )


def check_distributed(call: str, tensor: MaskedTensor) -> None:
    check(call, tensor)
    if not is_distributed(tensor):
        raise TypeError(
            f"masked_dispatch.distributed.{call} takes a masked tensor whose data is a distributed tensor, but the "
            f"data of this one of shape {tuple(tensor.shape)} is a {type(tensor._data).__name__}. See `distribute` "
            "and `from_local`."
        )
