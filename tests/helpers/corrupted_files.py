"""Saved masked tensors with one byte changed: each is refused, or is a tensor that can be worked with.

``python tests/helpers/corrupted_files.py SEED COUNT KIND...``, in a process of its own (changed_bytes.py), because what
is to be found out is whether the process survives. Each change is printed before it is tried, and after the last one of
a kind what came of all.
"""

from __future__ import annotations

import io
import random
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import masked_dispatch as md

LENGTHS = torch.tensor([6, 4, 1, 6])
MEMORY = 16 << 30  # where a changed size asks for more, that is an error and not the machine's end


def tensor(kind: str) -> Any:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 6, 2, generator=generator) < 0.4
    if kind == "padded":
        mask &= LENGTHS[:, None, None] > torch.arange(6)[:, None]
    x = md.masked_tensor(torch.randn(4, 6, 2, generator=generator), mask)
    return {
        "dense": lambda: x,
        "coo": lambda: x.to_sparse(),
        "hybrid": lambda: x.to_sparse(1),
        "csr": lambda: x.to_sparse_csr(),
        "csc": lambda: x[..., 0].to_sparse_csc(),
        "bsr": lambda: x.to_sparse_bsr((2, 2)),
        "bsc": lambda: x.to_sparse_bsc((2, 2)),
        "packed": lambda: x.to_packed(),
        "padded": lambda: md.padded(x, LENGTHS[:, None, None] > torch.arange(6)[:, None]),
    }[kind]()


def saved(x: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    return buffer.getvalue()


WORK = (
    repr,
    lambda x: x.sum(),
    lambda x: x.sum(-1),
    lambda x: x.amax(0),
    lambda x: x.to_dense(),
    lambda x: x + x,
)


def outcome(content: bytes) -> str:
    """What came of a file; the errors of what is done with a tensor that was loaded are torch's, and nobody's crash."""
    try:
        x = torch.load(io.BytesIO(content), weights_only=True)["x"]
    except Exception as error:
        return (
            "refused" if isinstance(error, ValueError) and "not a saved masked tensor" in str(error) else "unreadable"
        )
    return "loaded" if sum(runs(work, x) for work in WORK) == len(WORK) else "loaded, and an operator raised"


def runs(work: Callable[[Any], Any], x: Any) -> bool:
    try:
        work(x)
    except Exception:
        return False
    return True


def change_bytes(kind: str, seed: int, count: int) -> None:
    whole = saved(tensor(kind))
    assert outcome(whole) == "loaded"
    found: Counter[str] = Counter()
    draw = random.Random(seed)
    for number in range(count):
        position, change = draw.randrange(len(whole)), draw.randrange(1, 256)
        print(f"{kind} seed {seed} change {number}: byte {position} of {len(whole)} ^ {change:#x}", flush=True)
        found[outcome(whole[:position] + bytes([whole[position] ^ change]) + whole[position + 1 :])] += 1
    print(f"all changes of {kind}: {dict(found)}", flush=True)


def main(seed: int, count: int, *kinds: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    for kind in kinds:
        change_bytes(kind, seed, count)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
