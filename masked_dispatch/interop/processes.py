"""Masked tensors that are sent to other processes, through torch.multiprocessing's queues and pipes.

As torch does with any tensor: what is sent is moved to shared memory first, and the receiver's tensor lies in the same
memory. Data and validity are both there, so what one process writes, the others see.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import Tensor

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.tensor.mask_sharing import ViewFamily
from masked_dispatch.tensor.masked_tensor import MaskedTensor, family_around
from masked_dispatch.tensor.messages import sent_with_its_graph
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, StoredPieces, stored_around, stored_parts


def send(tensor: MaskedTensor) -> Any:
    """How a masked tensor is pickled for another process."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(sent_with_its_graph(tensor))
    if not tensor._mask_is_a_copy:  # that of another dtype than its base's is sent as a tensor of its own
        tensor.share_memory_()
    return tensor.__reduce_ex__(2)


def send_family(family: ViewFamily) -> Any:
    """How the validity that a tensor shares with its views is pickled for another process."""
    return receive_family, (family.data, family.memory)


@never_compiled
def receive_family(data: Tensor, memory: Tensor) -> ViewFamily:
    """The validity as it lies in shared memory."""
    family = family_around(data, None, memory)
    family.in_place = True
    return family


def send_stored(stored: StoredPieces) -> Any:
    """How what a sparsely stored tensor stores is pickled for another process."""
    return receive_stored, stored_parts(stored)


@never_compiled
def receive_stored(*parts: Any) -> StoredPieces:
    """What is stored, as it lies in shared memory."""
    stored = stored_around(*parts)
    stored.in_place = True
    return stored


def install() -> None:
    """Teach the pickler of the multiprocessing modules: called once, when the package is imported."""
    ForkingPickler.register(MaskedTensor, send)
    ForkingPickler.register(SparseMaskedTensor, send)
    ForkingPickler.register(ViewFamily, send_family)
    ForkingPickler.register(StoredPieces, send_stored)
