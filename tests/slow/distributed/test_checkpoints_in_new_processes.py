"""Checkpoints of masked tensors read in new processes, whichever of the two libraries is imported first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import checkpoint

import masked_dispatch as md
from checkpoints_of_ranks import DATA, MASK
from repository import ROOT

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*FutureWarning"),
]


def dense() -> Any:
    return md.masked_tensor(DATA, MASK)


IMPORTS = {
    "checkpoint first": "import torch.distributed.checkpoint, masked_dispatch as md",
    "masked_dispatch first": "import masked_dispatch as md, sys; assert 'torch.distributed.checkpoint' not in "
    "sys.modules; import torch.distributed.checkpoint",
    "masked_dispatch not at all": "import torch, torch.distributed.checkpoint as checkpoint",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_in_a_new_process(name: str, tmp_path: Path) -> None:
    checkpoint.save({"x": dense()}, checkpoint_id=tmp_path)
    program = f"""
{IMPORTS[name]}
import torch
try:
    torch.distributed.checkpoint.load({{"x": torch.zeros(4, 6)}}, checkpoint_id={str(tmp_path)!r})
except torch.distributed.checkpoint.CheckpointException as error:
    assert "A plain tensor has no place for the mask" in str(error), error
else:
    raise AssertionError("the mask was lost")
"""
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, env=here, cwd=tmp_path)
