"""Norms over the dense dimensions of hybrid storage: the rule itself runs on the stored rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._ops import OpOverload

from op_registry.authoring import Dense, NotLowered, Permuted, Rule, Sparse, map_tensors, on_last_dims, rows_of
from op_registry.ops.normalization import norms


def _lower_row_by_row(rule: Rule) -> Callable[..., Any]:
    """The sparse lowering of a norm over the last dimensions, for dense ones; also registered for permuted records."""

    def on_rows(op: OpOverload, x: Dense | Sparse, normalized_shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        rows = rows_of(x, *args, *kwargs.values())
        if not 0 < len(normalized_shape) <= len(rows.dense_sizes):
            raise NotLowered("it works along sparse dimensions")
        result = rule.run(op, rows.values, normalized_shape, *args, **kwargs)
        return map_tensors(rows.like, result, Dense)

    rule.lowering(Permuted)(on_last_dims(on_rows, lambda x, shape, *args, **kwargs: len(shape)))
    return on_rows


layer_norm = _lower_row_by_row(norms.layer_norm)
rms_norm = _lower_row_by_row(norms.rms_norm)
