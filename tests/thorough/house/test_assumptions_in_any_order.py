"""The checks of what is assumed of torch run twice, in any order, and leave nothing behind."""

from __future__ import annotations

import torch
from torch import distributed as torch_distributed

from masked_dispatch.assumptions.checks import ASSUMPTIONS, NAMESPACE


def test_checks_run_again_in_any_order_and_leave_nothing_behind() -> None:
    for check in [*reversed(ASSUMPTIONS), *ASSUMPTIONS]:
        check.run()
    assert [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)] == []
    assert not torch_distributed.is_initialized()
    assert not torch.autograd.forward_ad._current_level >= 0
    assert torch._C._functorch.maybe_current_level() is None
    assert torch._C._len_torch_dispatch_stack() == 0
