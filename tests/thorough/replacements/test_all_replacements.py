"""Everything that may be replaced in torch is, once each occasion has come, and nothing that is not listed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import masked_dispatch as md
from repository import ROOT

OCCASIONS = r"""
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests/helpers"]
import torch, masked_dispatch as md
from masked_dispatch.replacements import TABLE
from replaced_in_torch import found

import torch.distributed.checkpoint, torch.distributed.tensor.parallel
with md.windows("padding"):
    pass
x = md.masked_tensor(torch.ones(2, 2), torch.tensor([[True, False], [True, True]]))
torch.compile(lambda x: x * 2, backend="eager")(x)
torch.compile(lambda x: x * 2, backend="aot_eager")(x)

names = {name for row in TABLE for name in row.whole_names}
replaced = {name for name in found() if not name.startswith("torch.optim.optimizer._global_optimizer_pre_hooks")}
# What this torch does not have, it need not have replaced.
def release(name):
    return tuple(int(part) for part in name.split(".")[:2])


here = release(torch.__version__)
rows = [row for row in TABLE if release(row.since) <= here < release(row.until or "99")]
due = {name for row in rows for name in row.whole_names}
print("not listed:", sorted(replaced - names))
print("not replaced:", sorted(due - replaced))
"""


def test_all_that_is_listed_is_replaced_and_nothing_else() -> None:
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "TORCH_LOGS": "-all"}
    done = subprocess.run(
        [sys.executable, "-c", OCCASIONS, str(ROOT)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "not listed: []\nnot replaced: []\n"


def test_a_graph_follows_the_switch() -> None:
    x = md.masked_tensor(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))
    mean = torch.compile(lambda x: torch.masked.mean(x), backend="eager")
    assert mean(x).item() == 1.5
    with md.patches(False), pytest.raises(md.MaskedSemanticsError, match=r"torch\.masked\.mean of masked"):
        mean(x)
    assert mean(x).item() == 1.5
