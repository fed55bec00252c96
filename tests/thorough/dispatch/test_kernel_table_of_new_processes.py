"""Which kernels a new process makes: none at import, and the first ones by whoever calls them."""

from __future__ import annotations

import subprocess
import sys


def in_new_process(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_import_makes_no_kernel_of_an_operator_of_torch() -> None:
    program = """
import masked_dispatch
from masked_dispatch.dispatch.kernel_table import kernel_table
print([str(op) for op in kernel_table.made if op.namespace == "aten"])
"""
    assert in_new_process(program) == "['aten._make_dual.default', 'aten._unpack_dual.default']"


def test_the_engine_is_known_as_the_caller_of_a_kernel_that_it_calls_first() -> None:
    """A sum that it makes of two gradients is `accumulate`: what one of them lacks, the other has."""
    program = """
import torch, masked_dispatch as md
halves = [torch.tensor([True, False]), torch.tensor([False, True])]
class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask):
        ctx.mask = mask
        return x.detach().get_data().clone()
    @staticmethod
    def backward(ctx, grad):
        return md.as_masked_tensor(grad, ctx.mask), None
x = md.masked_tensor(torch.zeros(2), None, requires_grad=True)
(Half.apply(x, halves[0]) + Half.apply(x, halves[1])).sum().backward()
print(x.grad.get_mask().tolist())
"""
    assert in_new_process(program) == "[True, True]"


def test_a_process_may_trace_before_it_imports_the_compiler() -> None:
    program = """
import torch, masked_dispatch as md
from torch.fx.experimental.proxy_tensor import make_fx
f = lambda data, mask: md.masked_tensor(data, mask).sum().to_tensor(0)
ones, all_valid = torch.ones(3), torch.ones(3).bool()
print(make_fx(f, tracing_mode="fake")(ones, all_valid)(ones, torch.eye(3)[0].bool()).item())
"""
    assert in_new_process(program) == "1.0"
