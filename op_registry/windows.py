"""The meaning of masks to windows: a mask marks missing values, or padding around each sample."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Literal

from op_registry.ops.windows.padding import RULES
from op_registry.registry import Overlay, refuse_while_exporting, registry

Meaning = Literal["missing", "padding"]


@functools.cache
def overlay_for_padding() -> Overlay:
    """The rules of windows="padding"; made when first asked for, because kernels then choose at each call."""
    overlay = Overlay(registry)
    for rule in RULES:
        for op in rule.ops:
            # Where operands know what is there, windows are those of the samples in any scope, as the dimensions say.
            scoped = registry.written(op)
            assert scoped is not None
            overlay.replace(replace(rule, ops=(op,), traits=replace(rule.traits, dims=scoped.dims)))
    return overlay


def windows_mean(meaning: Meaning) -> contextlib.AbstractContextManager[object]:
    """Give windows this meaning inside the block, and in the backward of calls made there."""
    if meaning == "padding":
        return registry.overlay(overlay_for_padding())
    if meaning == "missing":
        if not overlay_for_padding.cache_info().currsize:
            return contextlib.nullcontext()
        padding = overlay_for_padding()
        if padding in registry.scope:
            refuse_while_exporting("windows('missing')")
        return registry.within(tuple(overlay for overlay in registry.scope if overlay is not padding))
    raise ValueError(f"windows takes 'missing' or 'padding', not {meaning!r}")


def windows_mean_now() -> Meaning:
    """The meaning that is in force for the caller."""
    if overlay_for_padding.cache_info().currsize and overlay_for_padding() in registry.scope:
        return "padding"
    return "missing"
