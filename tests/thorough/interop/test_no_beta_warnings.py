"""torch warns once in a process that a sparse layout is in beta; a line of this library never makes it do so.

Each case is a child of one process in which nothing has warned before.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

# Prints, of each case in its arguments, the error that its child ended with.
SCRIPT = """
import os, sys, traceback, warnings
import scipy.sparse
import torch
import masked_dispatch as md
from masked_dispatch import interop

def run(code, name):
    warnings.simplefilter("error", UserWarning)
    x = md.masked_tensor([[1.0, 2.0], [3.0, 4.0]], [[True, False], [True, True]])
    layout = getattr(torch, "sparse_" + name)
    blocks = {"blocksize": (1, 1)} if name in ("bsr", "bsc") else {}
    stored = x.to_layout(layout, **blocks)
    exec(code, {**globals(), **locals()})

for case in sys.argv[1:]:
    code, name = case.split("|")
    if os.fork() == 0:
        try:
            run(code, name)
        except BaseException:
            print(case, traceback.format_exc(), flush=True)
        os._exit(0)
    os.wait()
"""
WAYS = {
    "to torch": "stored.to_torch_sparse()",
    "to torch, in its layout": "x.to_torch_sparse(0.0, layout=layout)",
    "to scipy": "interop.to_scipy_sparse(stored)",
    "from scipy": "interop.from_scipy_sparse(getattr(scipy.sparse, name + '_array')([[1.0, 2.0]]))",
    "backward": "leaf = stored.clone().requires_grad_(); leaf.sum().backward(); leaf.grad.to_torch_sparse()",
    "to nested": "interop.to_nested_tensor(md.from_lengths(torch.ones(2, 3), torch.tensor([1, 2])))",
}
LAYOUTS = ["coo", "csr", "csc", "bsr", "bsc"]
# SciPy has no bsc, `to_torch_sparse(layout=…)` takes no size of blocks, and nested tensors have one layout.
CASES = {
    (way, layout): f"{WAYS[way]}|{layout}"
    for way in WAYS
    for layout in LAYOUTS
    if not (way == "from scipy" and layout == "bsc")
    and not (way == "to torch, in its layout" and layout in ("bsr", "bsc"))
    and (way != "to nested" or layout == "coo")
}
BY_THE_CALLER = "torch.eye(2).to_sparse_csr()|coo"


@pytest.fixture(scope="module")
def printed() -> str:
    pytest.importorskip("scipy", reason="scipy is not installed")
    command = [sys.executable, "-c", SCRIPT, *CASES.values(), BY_THE_CALLER]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("way, layout", CASES)
def test_no_line_of_the_library_warns_that_a_layout_is_in_beta(printed: str, way: str, layout: str) -> None:
    assert CASES[way, layout] not in printed, printed


def test_a_line_of_the_caller_s_still_warns(printed: str) -> None:
    _, _, error = printed.partition(BY_THE_CALLER)
    assert "Sparse CSR tensor support is in beta state" in error
