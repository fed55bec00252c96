"""Saved masked tensors with one byte changed: each is refused, or is a tensor that can be worked with.

``python tests/helpers/corrupted_files.py SEED COUNT KIND...`` is run in a process of its own by `change_bytes`, because
what is to be found out is whether the process survives. Each change is printed before it is tried, and after the last
one of a kind what came of all.
"""

from __future__ import annotations

import io
import random
import resource
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import masked_dispatch as md

LENGTHS = torch.tensor([6, 4, 1, 6])
MEMORY = 16 << 30  # where a changed size asks for more, that is an error and not the machine's end


KINDS: dict[str, Callable[[Any], Any]] = {
    "dense": lambda x: x,
    "coo": lambda x: x.to_sparse(),
    "hybrid": lambda x: x.to_sparse(1),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x[..., 0].to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
    "packed": lambda x: x.to_packed(),
    "padded": lambda x: md.padded(x, there()),
}


def there() -> torch.Tensor:
    return LENGTHS[:, None, None] > torch.arange(6)[:, None]


def tensor(kind: str) -> Any:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 6, 2, generator=generator) < 0.4
    if kind == "padded":
        mask &= there()
    return KINDS[kind](md.masked_tensor(torch.randn(4, 6, 2, generator=generator), mask))


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


def try_changes(kind: str, seed: int, count: int) -> None:
    whole = saved(tensor(kind))
    assert outcome(whole) == "loaded"
    found: Counter[str] = Counter()
    draw = random.Random(seed)
    for number in range(count):
        position, change = draw.randrange(len(whole)), draw.randrange(1, 256)
        print(f"{kind} seed {seed} change {number}: byte {position} of {len(whole)} ^ {change:#x}", flush=True)
        found[outcome(whole[:position] + bytes([whole[position] ^ change]) + whole[position + 1 :])] += 1
    print(f"all changes of {kind}: {dict(found)}", flush=True)


def change_bytes(seed: int, count: int, *kinds: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, __file__, str(seed), str(count), *kinds]
    return subprocess.run(command, capture_output=True, text=True, timeout=3600)


def check_changes(kind: str, done: subprocess.CompletedProcess[str]) -> None:
    """The process got as far as the last change of this kind, and ended well."""
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-2000:]
    (found,) = [line for line in done.stdout.splitlines() if line.startswith(f"all changes of {kind}: ")]
    assert "'refused': " in found


def main(seed: int, count: int, *kinds: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    for kind in kinds:
        try_changes(kind, seed, count)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
