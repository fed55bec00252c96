"""Masked parameters under FSDP2, which are refused.

Its extension points shard a subclass inside of a DTensor, which knows no masks, and have none for gradients: those are
summed in plain buffers. tests/helpers/fully_sharded_subclass.py shows both on a subclass that has no mask.
"""

from __future__ import annotations

from typing import Any, NoReturn

from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry import MaskedSemanticsError


# The methods that fully_shard asks of a parameter, with its arguments.
def fsdp_pre_all_gather(
    self: MaskedTensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> NoReturn:
    raise MaskedSemanticsError(
        f"fully_shard of {type(module).__name__}, which has a masked parameter of shape {tuple(outer_size)}: FSDP2 "
        "keeps parameters and gradients in plain buffers, where the mask would be lost. Use DistributedDataParallel, "
        "which takes masked parameters; or shard a plain parameter, and apply the mask in forward: "
        "masked_dispatch.as_masked_tensor(self.weight, self.mask)."
    )


def fsdp_post_all_gather(self: MaskedTensor, *args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("nothing was gathered")


def install() -> None:
    """Called once, when the package is imported."""
    methods: Any = MaskedTensor
    methods.fsdp_pre_all_gather, methods.fsdp_post_all_gather = fsdp_pre_all_gather, fsdp_post_all_gather
