"""Turn in-place and out= forms into functions of their inputs, so that samples of the functional form serve them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.trees import tree_leaves, tree_map
from op_registry.schema import is_out, written_arguments


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


def written_by(form: OpOverload, functional: OpOverload, named: Mapping[str, Any]) -> Any:
    """What an in-place form leaves in a copy of its first argument, or an out= form in new tensors.

    named  the arguments of the functional form
    """
    given = {a.name: named[a.name] for a in form._schema.arguments if a.name in named}
    written = written_arguments(form)
    if not is_out(form):
        copy = given[written[0]].clone()
        form(**given | {written[0]: copy})
        return copy
    made = tree_leaves(functional(**named))
    targets = [t.new_empty(t.shape) for t in made]
    lists = any(a.name in written and isinstance(a.type, torch.ListType) for a in form._schema.arguments)
    form(**given, **({written[0]: targets} if lists else dict(zip(written, targets, strict=True))))
    return targets
