"""Encoder layers in eval mode on the valid tokens alone, without the padding.

Law: the laws of the layer's operators. All of them except attention process each token independently, so torch's own
operators can run on the tokens of all sequences as one long sequence (1, n, D). Only attention needs to know where each
sequence ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import Bound, Dense, Sparse, all_valid, autocast_on, being_traced
from op_registry.ops.attention.packed import attend_rows, attend_sequences
from op_registry.records.slices import has_whole_slices, put_rows, take_rows, valid_rows
from op_registry.records.tracing import may_be_read
from op_registry.sparse.permuted import RECORDS

aten = torch.ops.aten

# A layer, as the operators that `run` runs on the operands of a call.
Layer = Callable[[Callable[..., Any], Bound], Any]


def on_packed(layer: Layer, c: Bound) -> Sparse | None:
    """The layer on a packed batch (B, T, D) whose stored values are all valid; None for other calls."""
    x = c.src
    if not isinstance(x, Sparse) or not _are_plain(c):
        return None
    rows = x.values
    if rows.validity is not None or rows.ndim != 2 or being_traced(rows.data) or rows.shape[0] == 0:
        return None
    attend = functools.partial(attend_sequences, queries=x, keys=x)
    return x.like(Dense(_on_tokens(layer, rows.data, attend, c)))


def on_padded(layer: Layer, c: Bound) -> Dense | None:
    """The layer on a padded batch (B, T, D) with one validity per token; None for other calls or off the CPU.

    Like torch's own layer with a padding mask, it leaves padding out of every product.
    """
    x: Dense = c.src
    if x.ndim != 3 or not has_whole_slices(x, (2,)) or not may_be_read(x.data) or not _are_plain(c):
        return None
    positions, lengths = valid_rows(x)
    if positions.shape[0] == 0:
        return None
    attend = functools.partial(attend_rows, queries=lengths, keys=lengths)
    return put_rows(_on_tokens(layer, take_rows(x, positions), attend, c), positions, x)


def _are_plain(c: Bound) -> bool:
    """Whether all weights of an encoder layer are valid and stored densely, and attention is given no mask."""
    weights = [r for r in c.named.values() if isinstance(r, RECORDS) and r is not c.src]
    dense = all(isinstance(r, Dense) and not being_traced(r.data) for r in weights)
    return c.mask is None and dense and all_valid(*weights) and not autocast_on(c.src.device)


def _on_tokens(layer: Layer, rows: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor], c: Bound) -> Tensor:
    def run(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        if op is not aten.scaled_dot_product_attention.default:
            return op(*args, **kwargs)
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in args[:3])  # (1, H, n, d) as rows (n, H, d)
        return attend(query, key, value).transpose(0, 1).unsqueeze(0)

    def plain(record: Dense | Sparse) -> Tensor:
        return rows.unsqueeze(0) if record is c.src else record.data  # type: ignore[union-attr]  # (weights are dense)

    result: Tensor = layer(run, c.map(plain, (Dense, Sparse)))
    return result.squeeze(0)
