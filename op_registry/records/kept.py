"""What has been computed from a mask, kept with the mask object until the mask is written to."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def kept_with(validity: Tensor) -> dict[Any, Any]:
    """What is kept with this mask: empty when the mask has changed since it was last asked.

    A key begins with the name of what is kept, so that no two callers use one key. Nothing may be kept while tracing,
    and nothing that was computed in inference mode, since autograd cannot save such tensors; a mask made in inference
    mode has no version, and can keep nothing.
    """
    version: int = validity._version
    kept: tuple[int, dict[Any, Any]] | None = getattr(validity, "_masked_dispatch_kept", None)
    if kept is None or kept[0] != version:
        kept = (version, {})
        validity._masked_dispatch_kept = kept  # type: ignore[attr-defined]
    return kept[1]
