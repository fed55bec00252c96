"""Conversions between storages (op_registry/sparse/convert.py) beside torch.sparse and, where it is installed, scipy.

float32, valid at random. torch and scipy are given zeros where nothing is valid, and lose valid zeros; what is compared
is time. Peak memory is that of a fresh process for each conversion, beyond the input and the result, as a part of the
data's bytes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks.harness import Call, Goal, duration, measure, print_table, progress, timing
from benchmarks.peak import peak_of_call, peak_of_process

SIZES = (4096, 8192)
SHARES = {"half": 0.5, "1 %": 0.01}
BLOCK = (16, 16)
LAYOUTS = ("coo", "csr", "csc", "bsr", "bsc")
REFERENCE = "torch coo"
BOUNDS = {"half": 0.65, "1 %": 1.05}


def some_tensor(size: int, share: float, whose: str = "masked_dispatch") -> Tensor:
    """A square matrix of which a share is valid: a masked tensor, or zeros elsewhere."""
    torch.manual_seed(0)
    mask = torch.rand(size, size) < share
    data = torch.randn(size, size).mul_(mask)
    return md.masked_tensor(data, mask) if whose == "masked_dispatch" else data


def converted(x: Tensor, layout: str) -> Tensor:
    """The tensor in a sparse layout; the same words serve both kinds."""
    block = {"blocksize": BLOCK} if layout in ("bsr", "bsc") else {}
    return x.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **block)


def pieces(tensor: Any) -> list[Tensor]:
    """The tensors that a sparse tensor is made of."""
    if isinstance(tensor, md.MaskedTensor):
        record = tensor.record  # type: ignore[attr-defined]
        validity = record.values.validity
        return [*record.pattern.pieces, record.values.data, *([] if validity is None else [validity])]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]


def scipys() -> dict[str, Callable[[Any], object]]:
    """scipy's conversions of a NumPy array; none where it is not installed."""
    try:
        from scipy import sparse
    except ImportError:
        return {}
    return {"scipy csr": sparse.csr_array, "scipy csc": sparse.csc_array}


def candidates(size: int, share: float) -> dict[str, Call]:
    """Every conversion of one matrix; ours are checked against the matrix."""
    x, zeros = some_tensor(size, share), some_tensor(size, share, "torch")
    calls: dict[str, Call] = {}
    for layout in LAYOUTS:
        assert torch.equal(converted(x, layout).to_tensor(0), zeros), layout  # type: ignore[attr-defined]
        calls[layout] = lambda layout=layout: converted(x, layout)  # type: ignore[misc]
        if layout != "bsc":
            calls[f"torch {layout}"] = lambda layout=layout: converted(zeros, layout)  # type: ignore[misc]
    calls |= {name: lambda call=call: call(zeros.numpy()) for name, call in scipys().items()}  # type: ignore[misc]
    return calls


def extra_memory(whose: str, layout: str, size: int, share: float) -> float:
    """What a conversion takes at most beyond input and result, as a part of the data's bytes, in a fresh process."""
    if not os.path.exists("/proc/self/clear_refs"):
        return float("nan")
    # The allocator as users have it: one that keeps what is freed would hide part of the peak.
    extra = peak_of_process(__name__, whose, layout, str(size), str(share), allocator="")
    return extra * 2**20 / (size * size * 4)


def extra_of_one(whose: str, layout: str, size: int, share: float) -> float:
    """MiB that a conversion in this process takes at most beyond input and result."""
    torch.set_num_threads(1)
    converted(some_tensor(320, share, whose), layout)  # what is loaded on first use
    x, results = some_tensor(size, share, whose), []
    peak = peak_of_call(lambda: results.append(converted(x, layout)))
    return peak - sum(piece.nbytes for piece in pieces(results[0])) / 2**20


def from_dense(rounds: int) -> list[Goal]:
    rows, goals = [], []
    for size in SIZES:
        for name, share in SHARES.items():
            measured = measure(candidates(size, share), rounds=rounds, warm_up=1)
            ratios = {c: timing(seconds, measured[REFERENCE]) for c, seconds in measured.items()}
            label = f"{size}², {name} valid"
            others = [str(ratios[c]) if c in ratios else "–" for c in ("scipy csr", "scipy csc")]
            torchs = [str(ratios[f"torch {layout}"]) for layout in LAYOUTS[1:4]]
            rows.append(
                [label, duration(ratios[REFERENCE].seconds), *[str(ratios[y]) for y in LAYOUTS], *torchs, *others]
            )
            goals += [
                Goal(f"dense → {layout}, {label}: × torch's COO", ratios[layout].ratio, BOUNDS[name])
                for layout in ("csr", "bsr")
            ]
            goals.append(Goal(f"dense → csc, {label}: × csr", timing(measured["csc"], measured["csr"]).ratio, 1.3))
    columns = ["", "torch COO", *LAYOUTS, *[f"torch {layout}" for layout in LAYOUTS[1:4]], "scipy csr", "scipy csc"]
    print_table("dense → sparse, float32, × torch's COO conversion", columns, rows, f"blocks of {BLOCK}")
    return goals


def small(rounds: int) -> None:
    measured = measure(candidates(64, 0.5), rounds=4 * rounds)
    rows = [
        [layout, duration(timing(s, s).seconds), str(timing(s, measured[f"torch {layout}"]))]
        for layout, s in measured.items()
        if f"torch {layout}" in measured
    ]
    print_table("dense → sparse, 64², half valid", ("", "masked_dispatch", "× torch's own"), rows)


def between(rounds: int) -> None:
    rows = []
    for name, share in SHARES.items():
        x, zeros = some_tensor(SIZES[0], share), some_tensor(SIZES[0], share, "torch")
        mine, torchs = converted(x, "csr"), converted(zeros, "csr")
        measured = measure(
            {
                "csr → csc": lambda: converted(mine, "csc"),  # noqa: B023
                "torch csr → csc": lambda: converted(torchs, "csc"),  # noqa: B023
                "csr → dense": mine.to_dense,
                "torch csr → dense": torchs.to_dense,
            },
            rounds=rounds,
            warm_up=1,
        )
        for way in ("csr → csc", "csr → dense"):
            seconds = timing(measured[way], measured[f"torch {way}"])
            rows.append([f"{way}, {SIZES[0]}², {name}", duration(seconds.seconds), str(seconds)])
    print_table("between storages", ("", "masked_dispatch", "× torch's own"), rows)


def memory() -> list[Goal]:
    size, rows, goals = SIZES[0], [], []
    for layout in progress(LAYOUTS, "memory"):
        row = [layout]
        for name, share in SHARES.items():
            own = extra_memory("masked_dispatch", layout, size, share)
            row += [f"{own:.2f}", f"{extra_memory('torch', layout, size, share):.2f}"]
            goals.append(Goal(f"dense → {layout}, {size}², {name} valid: extra peak ÷ input", own, 0.15))
        rows.append(row)
    columns = ["", *(f"{whose}, {name}" for name in SHARES for whose in ("masked_dispatch", "torch"))]
    print_table(f"peak memory beyond input and result, ÷ input, {size}²", columns, rows)
    return goals


def run(rounds: int = 5) -> list[Goal]:
    small(rounds)
    between(rounds)
    return [*from_dense(rounds), *memory()]


if __name__ == "__main__":
    print(extra_of_one(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
