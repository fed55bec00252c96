"""any and all in torch's own Python code, which branches on the answer.

Law: if nothing is valid, the answer is torch's for an empty tensor: `any` is False, `all` is True. In a loop that only
ends with True, both are True. In users' code the result is invalid instead, and converting it to a Python value raises.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch._ops import OpOverload
from torch.distributions import von_mises

from op_registry.authoring import REDUCTION, Dense, Sparse, call, inside, to_dense
from op_registry.rule import Run

aten = torch.ops.aten

# Functions of torch that check their arguments or their progress with any or all.
ASKING: tuple[Run | ModuleType, ...] = (
    torch.nn.functional.gaussian_nll_loss,
    torch.nn.modules.adaptive,
    torch.distributions,
)
OF_NOTHING = {aten.any.default: False, aten.all.default: True, aten._is_all_true.default: True}


def answered(function: Run | ModuleType, op: OpOverload, of_nothing: bool) -> None:
    """Register that `op` inside `function` is valid, and `of_nothing` where nothing is."""

    @inside(function, op, category=REDUCTION)
    def answer(self: Dense) -> Dense:
        """Where nothing is valid, torch's answer for an empty tensor."""
        return Dense(op(self.filled(of_nothing)))

    @answer.lowering(Sparse)
    def answer_stored_sparsely(op: OpOverload, self: Sparse) -> Dense:
        return Dense(to_dense(call(op, self)).filled(of_nothing))


for _function in ASKING:
    for _op, _of_nothing in OF_NOTHING.items():
        answered(_function, _op, _of_nothing)

# This function draws until every sample is accepted, and keeps a draw only if any is accepted: it would never end.
answered(von_mises._rejection_sample, aten.any.default, of_nothing=True)
