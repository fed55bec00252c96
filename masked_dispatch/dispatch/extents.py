"""Writes and extents: which positions of a target are there."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.messages import written_through_view
from op_registry import MaskedSemanticsError


def receive_extent(target: MaskedTensor, source: Tensor) -> None:
    """Before a write: the extent of what is written is the target's from now on, if nobody shares its memory.

    The functional form that computed `source` intersected it with the target's own.
    """
    if not isinstance(source, MaskedTensor) or source._extent is None or source._extent is target._extent:
        return
    received = source._extent
    own = target._extent
    if own is not None and own.known == received.known and target._family is not None:
        if not torch.equal(target.extent, source.extent):  # type: ignore[arg-type]
            raise MaskedSemanticsError(written_through_view(target))
    elif target._family is not None and target._base is not None:
        raise MaskedSemanticsError(written_through_view(target))
    target._extent = received
