"""Refuse masked parameters under FSDP2.

FSDP2's extension points put the subclass inside a DTensor, which ignores masks, and do not cover gradients, which FSDP2
sums in plain buffers. tests/helpers/fully_sharded_subclass.py shows both on a subclass without masks.
"""

from __future__ import annotations

from typing import Any, NoReturn

from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry import MaskedSemanticsError


# fully_shard calls these methods of a parameter with these arguments.
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
    """The package calls this once, on import."""
    methods: Any = MaskedTensor
    methods.fsdp_pre_all_gather, methods.fsdp_post_all_gather = fsdp_pre_all_gather, fsdp_post_all_gather
