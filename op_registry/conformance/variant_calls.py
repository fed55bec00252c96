"""Turn in-place and out= forms into functions of their inputs, so that samples of the functional form serve them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.trees import tree_leaves, tree_map


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on a copy of its first argument.

    It must return that copy, or None as operators defined by torch.library.custom_op do.
    """

    @functools.wraps(function)
    def on_a_copy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = x.clone()
        result = function(copy, *args, **kwargs)
        assert result is copy or result is None, "an in-place operator returns its argument"
        return copy

    return on_a_copy


def into_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with newly allocated out= tensors, which it must return."""

    def into_out(*args: Any, **kwargs: Any) -> Any:
        functional_result = function(*args, **kwargs)
        targets = tree_map(lambda t: torch.empty_like(t) if isinstance(t, Tensor) else t, functional_result)
        result = function(*args, **kwargs, out=targets if isinstance(targets, Tensor) else tuple(targets))
        if result is None:
            return targets
        for returned, target in zip(tree_leaves(result), tree_leaves(targets), strict=True):
            assert returned is target, "an out= form returns the tensors given as out="
        return result

    return into_out
