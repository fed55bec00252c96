"""torch.nn.functional.linear_cross_entropy in chunks of the batch, as chosen by its `options`.

Law: the composition of linear and cross_entropy. (Without options torch itself decomposes it so.)

With a mask both run on the whole batch: chunks only save memory, and their operators compute gradients in the forward
pass without a mask. As in the chunks, everything is computed in `acc_dtype`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry.authoring import LOSS, Dense, Equation, all_valid, autocast_off, by_rule, masked_rule, run_plain
from op_registry.ops.losses.rules import MEAN, NONE, SUM

aten = torch.ops.aten


def composed(
    input: Dense,
    linear_weight: Dense,
    target: Dense,
    linear_bias: Dense | None,
    weight: Dense | None,
    reduction: int,
    ignore_index: int,
    acc_dtype: torch.dtype,
) -> Dense:
    """The loss, in the dtype of the input."""

    def wide(x: Dense | None) -> Dense | None:
        return None if x is None else x.like(x.data.to(acc_dtype))

    with autocast_off(input.device):
        logits = by_rule(aten.linear.default, wide(input), wide(linear_weight), wide(linear_bias))
        loss = by_rule(aten.cross_entropy_loss.default, logits, target, wide(weight), reduction, ignore_index)
    return Dense(loss.data.to(input.dtype), loss.validity)


# Not every supported version of torch has it.
if hasattr(torch.nn, "LinearCrossEntropyOptions"):
    # The module that defines the operators; torch imports it at the first call.
    import torch.nn.modules.linear_cross_entropy

    torch_nn = torch.ops.torch_nn

    @masked_rule(
        torch_nn._linear_cross_entropy_batch_chunked.default, category=LOSS, dims=Equation("nk,ck,n,c,c->,AB,CD,E")
    )
    def _linear_cross_entropy_batch_chunked(
        input: Dense,
        linear_weight: Dense,
        target: Dense,
        linear_bias: Dense | None,
        weight: Dense | None,
        reduction: str,
        ignore_index: int,
        label_smoothing: float,
        batch_chunk_size: int,
        acc_policy: str,
        acc_dtype: torch.dtype,
        *gradients: bool,
    ) -> tuple[Any, ...]:
        """The loss and, instead of gradients from the forward pass, the empty tensors of a call without gradients."""
        tensors = (input, linear_weight, target, linear_bias, weight)
        if all_valid(*tensors):
            options = (reduction, ignore_index, label_smoothing, batch_chunk_size, acc_policy, acc_dtype)
            result: tuple[Any, ...] = run_plain(
                torch_nn._linear_cross_entropy_batch_chunked.default, (*tensors, *options, *gradients), {}
            )
            return result
        loss = composed(*tensors, {"mean": MEAN, "sum": SUM}[reduction], ignore_index, acc_dtype)
        no_gradients: list[Tensor] = [input.data.new_empty(size) for size in ((0, 0), (0, 0), (0,))]
        return (loss, *no_gradients)

    @masked_rule(
        torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default,
        category=LOSS,
        dims=Equation("nk,ck,n,c,c->n"),
    )
    def _linear_cross_entropy_batch_chunked_no_reduction(
        input: Dense,
        linear_weight: Dense,
        target: Dense,
        linear_bias: Dense | None,
        weight: Dense | None,
        ignore_index: int,
        batch_chunk_size: int,
        acc_policy: str,
        acc_dtype: torch.dtype,
    ) -> Any:
        """The loss of every row."""
        tensors = (input, linear_weight, target, linear_bias, weight)
        if all_valid(*tensors):
            options = (ignore_index, batch_chunk_size, acc_policy, acc_dtype)
            return run_plain(
                torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default, (*tensors, *options), {}
            )
        return composed(*tensors, NONE, ignore_index, acc_dtype)
