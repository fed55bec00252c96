"""torch.nn.functional.linear_cross_entropy in chunks of the batch, as chosen by its `options`.

Law: the composition of linear and cross_entropy. (Without options torch itself decomposes it so.)

With a mask both run on the whole batch: chunks only save memory, and their operators compute gradients in the forward
pass without a mask. As in the chunks, everything is computed in `acc_dtype`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry.authoring import LOSS, Bound, Dense, Equation, autocast_off, by_rule, masked_rule
from op_registry.ops.losses.rules import MEAN, NONE, SUM

aten = torch.ops.aten


def composed(c: Bound, reduction: int) -> Dense:
    """The loss, in the dtype of the input."""

    def wide(x: Dense | None) -> Dense | None:
        return None if x is None else x.like(x.data.to(c.acc_dtype))

    with autocast_off(c.input.device):
        logits = by_rule(aten.linear.default, wide(c.input), wide(c.linear_weight), wide(c.linear_bias))
        options = (wide(c.weight), reduction, c.ignore_index)
        loss = by_rule(aten.cross_entropy_loss.default, logits, c.target, *options)
    return Dense(loss.data.to(c.input.dtype), loss.validity)


# Not every supported version of torch has it.
if hasattr(torch.nn, "LinearCrossEntropyOptions"):
    # The module that defines the operators; torch imports it at the first call.
    import torch.nn.modules.linear_cross_entropy

    torch_nn = torch.ops.torch_nn

    @masked_rule(
        torch_nn._linear_cross_entropy_batch_chunked.default,
        category=LOSS,
        takes_call=True,
        torch_if_valid=True,
        dims=Equation("nk,ck,n,c,c->,AB,CD,E"),
    )
    def _linear_cross_entropy_batch_chunked(c: Bound) -> tuple[Any, ...]:
        """The loss and, instead of gradients from the forward pass, the empty tensors of a call without gradients."""
        no_gradients: list[Tensor] = [c.input.data.new_empty(size) for size in ((0, 0), (0, 0), (0,))]
        return (composed(c, {"mean": MEAN, "sum": SUM}[c.reduction]), *no_gradients)

    @masked_rule(
        torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default,
        category=LOSS,
        takes_call=True,
        torch_if_valid=True,
        dims=Equation("nk,ck,n,c,c->n"),
    )
    def _linear_cross_entropy_batch_chunked_no_reduction(c: Bound) -> Any:
        """The loss of every row."""
        return composed(c, NONE)
