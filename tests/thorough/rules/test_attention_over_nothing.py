"""Attention without heads, queries or keys never reaches a kernel of torch that ends the process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
import masked_dispatch as md

forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
for heads, queries, keys in ((0, 4, 5), (3, 0, 5), (3, 4, 0), (3, 0, 0)):
    parts = [torch.randn(2, heads, n, 8) for n in (queries, keys, keys)]
    masked = [md.masked_tensor(x, torch.rand(x.shape) > 0.3, requires_grad=True) for x in parts]
    for q, k, v in (masked, [masked[0], *parts[1:]], [parts[0], *masked[1:]]):
        output, logsumexp = forward(q, k, v)
        assert output.shape == q.shape, output.shape
        assert md.as_masked_tensor(output).to_tensor(1).eq(0).all()
        assert md.as_masked_tensor(logsumexp).to_tensor(-torch.inf).eq(-torch.inf).all()
        output.to_tensor(0).sum().backward()
        assert torch.nn.functional.scaled_dot_product_attention(q, k, v).shape == q.shape
print("done")
"""


def test_attention_over_nothing() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
