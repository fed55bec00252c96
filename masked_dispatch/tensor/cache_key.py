"""The key of a masked tensor in torch's on-disk caches of compiled graphs."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from op_registry.digests import source_digest

# Identifies this package's sources, as the registry's version identifies the rules'.
CODE_VERSION = source_digest(str(Path(__file__).parents[1]))


def geometry(tensor: Tensor) -> tuple[str, ...]:
    """Everything about a tensor except its values, as text that does not depend on the process."""
    facts = (
        *(tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()),
        *(tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
    )
    return tuple(str(fact) for fact in facts)
