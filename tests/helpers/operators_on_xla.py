"""Operators compiled by XLA, compared with the CPU in a process of its own, in an environment with torchax."""

from __future__ import annotations

import re

from xla_environment import run_with_torchax

# What raises where plain torchax does not: the gradient of a single row, whose shape torchax changes in nll_loss; and
# broadcasting of three dimensions, in `mode`.
DIFFERENT = {("nn_functional_linear_cross_entropy", "gradients"), ("mode", "results")}


def compared_with_the_cpu(*part: str) -> tuple[int, int, str]:
    """How many results and gradients are equal, and what the command says."""
    done = run_with_torchax("-W", "ignore", "-m", "op_registry", "check", "--device", "xla", *part)
    different = set(re.findall(r"^(\w+), (results|gradients): ", done.stdout, re.MULTILINE))
    assert different <= DIFFERENT, done.stdout[-6000:] + done.stderr[-2000:]
    found = re.findall(r"^(results|gradients) on xla: (\d+) equal", done.stdout, re.MULTILINE)
    assert [what for what, _ in found] == ["results", "gradients"], done.stdout[-6000:] + done.stderr[-2000:]
    results, gradients = (int(equal) for _, equal in found)
    return results, gradients, done.stdout
