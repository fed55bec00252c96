"""In-place and out= forms as functions of their inputs, so that samples of the functional form serve them too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.trees import tree_leaves, tree_map


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on a copy of its first argument. What it returns has to be that copy, or None: operators defined by
    torch.library.custom_op return nothing."""

    @functools.wraps(function)
    def on_a_copy(x: Any, *args: Any, **kwargs: Any) -> Any:
        copy = x.clone()
        result = function(copy, *args, **kwargs)
        assert result is copy or result is None, "an in-place operator returns its argument"
        return copy

    return on_a_copy


def into_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` into tensors made for its results, which have to come back."""

    def into_out(*args: Any, **kwargs: Any) -> Any:
        plainly = function(*args, **kwargs)
        targets = tree_map(lambda t: torch.empty_like(t) if isinstance(t, Tensor) else t, plainly)
        result = function(*args, **kwargs, out=targets if isinstance(targets, Tensor) else tuple(targets))
        if result is None:
            return targets
        for back, target in zip(tree_leaves(result), tree_leaves(targets), strict=True):
            assert back is target, "an out= form returns the tensors given as out="
        return result

    return into_out
