"""Norms over the dense dimensions of hybrid storage: the rule runs on the stored rows as they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._ops import OpOverload

from op_registry.authoring import Dense, NotLowered, Permuted, Rule, map_tensors, on_last_dims, rows_of
from op_registry.ops.normalization import norms, softmax


def _normalized(rule: Rule) -> Callable[..., Any]:
    """A norm over the last dimensions, if these are dense: a lowering of sparse records."""

    def run(op: OpOverload, x: Any, normalized_shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        given = rows_of(x, *args, *kwargs.values())
        if not 0 < len(normalized_shape) <= len(given.dense_sizes):
            raise NotLowered("it works along sparse dimensions")
        result = rule.run(op, given.values, normalized_shape, *args, **kwargs)
        return map_tensors(given.like, result, Dense)

    rule.lowering(Permuted)(on_last_dims(run, lambda x, shape, *args, **kwargs: len(shape)))
    return run


layer_norm = _normalized(norms.layer_norm)


rms_norm = _normalized(norms.rms_norm)


@softmax.softmax.lowering(Permuted)
def softmax_of_permuted(op: OpOverload, x: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
    at = dim + x.ndim if dim < 0 else dim
    if not 0 <= at < x.ndim or x.order[at] < x.base.pattern.ndim:
        raise NotLowered("it works along a sparse dimension that stands behind a dense one")
    base = x.base
    inside = x.order[at] - base.pattern.ndim + base.pattern.lead
    return x.like(base.like(softmax.softmax.bind(op)(base.values, inside, *args, **kwargs)))
