"""Send masked tensors to other processes, through torch.multiprocessing's queues and pipes.

As with any tensor of torch, the sender first moves data and validity to shared memory, and the receiver's tensor uses
the same memory. So each process sees the writes of the others.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import Tensor

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.tensor.mask_sharing import ViewFamily
from masked_dispatch.tensor.masked_tensor import MaskedTensor, family_around
from masked_dispatch.tensor.saved_extents import parts_of_extent
from masked_dispatch.tensor.shared_storage import StoredPieces
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, stored_around, stored_parts


def send(tensor: MaskedTensor) -> Any:
    """Pickle a masked tensor for another process."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
            f"crossing process boundaries. This one is the result of {type(tensor.grad_fn).__name__}: send x.detach()."
        )
    if not tensor._mask_is_a_copy:  # a view with another dtype than its base is sent as an independent tensor
        tensor.share_memory_()
    return tensor.__reduce_ex__(2)


def send_family(family: ViewFamily) -> Any:
    """Pickle the validity and the extent that a tensor shares with its views."""
    return receive_family, (family.data, family.memory, *parts_of_extent(family.extent))


@never_compiled
def receive_family(data: Tensor, memory: Tensor, *extent: Any) -> ViewFamily:
    """Build the view family around the validity in shared memory."""
    family = family_around(data, None, memory, *extent)
    family.in_place = True
    return family


def send_stored(stored: StoredPieces) -> Any:
    """Pickle the stored pieces of a sparsely stored tensor."""
    return receive_stored, stored_parts(stored)


@never_compiled
def receive_stored(*parts: Any) -> StoredPieces:
    """Build the stored pieces from their parts in shared memory."""
    stored = stored_around(*parts)
    stored.in_place = True
    return stored


def install() -> None:
    """Register with the pickler of the multiprocessing modules; the package calls this once, on import."""
    ForkingPickler.register(MaskedTensor, send)
    ForkingPickler.register(SparseMaskedTensor, send)
    ForkingPickler.register(ViewFamily, send_family)
    ForkingPickler.register(StoredPieces, send_stored)
