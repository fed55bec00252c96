"""Work on sparse storage, 8192² and one thread (R7): beside plain kernels over what is stored, torch.sparse,
scipy and, where it is installed, numba.

The limit of elementwise work is the operator on the values; of a reduction and a product, a plain kernel
(kernels.cpp) that passes once over what is stored. torch.sparse is given the same elements as its own CSR.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks.harness import Call, Goal, duration, measure, print_table, progress, timing
from benchmarks.kernels import csr_matmul, rows_of_csr

SIZE, WIDTH = 8192, 128
DENSITIES = (0.1, 0.01, 0.001)
LIMIT = "limit"


def some_csr(density: float, size: int = SIZE) -> md.MaskedTensor:
    """A matrix in CSR of which a share is stored, at random."""
    torch.manual_seed(0)
    stored = torch.rand(size, size) < density
    return md.masked_tensor(torch.randn(size, size), stored).to_sparse_csr()


def pieces(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Ends, columns and values of CSR storage."""
    ends, columns = x.record.pattern.pieces
    return ends, columns, x.record.values.data


def candidates(x: md.MaskedTensor) -> dict[str, dict[str, Call]]:
    """For each kind of work the calls to compare, of which the first is the limit."""
    ends, columns, values = pieces(x)
    size = x.shape[0]
    y = x * 2
    doubled = pieces(y)[2]
    other = torch.randn(size, WIDTH)
    product, out = torch.empty(size, WIDTH), torch.empty(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchs = torch.sparse_csr_tensor(ends, columns, values, (size, size))
        torchs_too = torch.sparse_csr_tensor(ends, columns, doubled, (size, size))
    work: dict[str, dict[str, Call]] = {
        "x * y": {
            LIMIT: lambda: values * doubled,
            "masked_dispatch": lambda: x * y,
            "torch.sparse": lambda: torchs * torchs_too,
        },
        "exp": {LIMIT: lambda: values.exp(), "masked_dispatch": lambda: x.exp()},
        "sum of rows": {
            LIMIT: lambda: rows_of_csr("csr_sum", ends, values, out),
            "masked_dispatch": lambda: x.sum(1),
            "torch.sparse": lambda: torchs.sum(1, keepdim=True),
        },
        "amax of rows": {
            LIMIT: lambda: rows_of_csr("csr_amax", ends, values, out),
            "masked_dispatch": lambda: x.amax(1),
        },
        "x @ dense": {
            LIMIT: lambda: csr_matmul(ends, columns, values, other, product),
            "masked_dispatch": lambda: x @ other,
            "torch.sparse": lambda: torchs @ other,
        },
    }
    for who, theirs in (("scipy", scipys(x, other)), ("numba", numbas(x, other))):
        for name, call in theirs.items():
            work[name][who] = call
    return work


def scipys(x: md.MaskedTensor, other: Tensor) -> dict[str, Call]:
    """The same by scipy; nothing where it is not installed."""
    try:
        from scipy import sparse
    except ImportError:
        return {}
    ends, columns, values = (piece.numpy() for piece in pieces(x))
    matrix = sparse.csr_array((values, columns, ends), shape=tuple(x.shape))
    array = other.numpy()
    return {
        "x * y": lambda: matrix.multiply(matrix),
        "exp": lambda: matrix.expm1(),
        "sum of rows": lambda: matrix.sum(axis=1),
        "amax of rows": lambda: matrix.max(axis=1),
        "x @ dense": lambda: matrix @ array,
    }


def numbas(x: md.MaskedTensor, other: Tensor) -> dict[str, Call]:
    """The loops of the kernels as numba compiles them; nothing where it is not installed."""
    try:
        import numba
    except ImportError:
        return {}
    jit = numba.njit(fastmath=True)

    @jit
    def sums(ends: Any, values: Any, out: Any) -> None:
        for row in range(out.shape[0]):
            total = values.dtype.type(0)
            for i in range(ends[row], ends[row + 1]):
                total += values[i]
            out[row] = total

    @jit
    def greatest(ends: Any, values: Any, out: Any) -> None:
        for row in range(out.shape[0]):
            peak = -numba.float32(3e38)
            for i in range(ends[row], ends[row + 1]):
                peak = max(peak, values[i])
            out[row] = peak

    @jit
    def products(ends: Any, columns: Any, values: Any, dense: Any, out: Any) -> None:
        for row in range(out.shape[0]):
            out[row] = 0
            for i in range(ends[row], ends[row + 1]):
                for j in range(out.shape[1]):
                    out[row, j] += values[i] * dense[columns[i], j]

    ends, columns, values = (piece.numpy() for piece in pieces(x))
    dense = other.numpy()
    product, out = torch.empty(other.shape).numpy(), torch.empty(x.shape[0]).numpy()
    return {
        "sum of rows": lambda: sums(ends, values, out),
        "amax of rows": lambda: greatest(ends, values, out),
        "x @ dense": lambda: products(ends, columns, values, dense, product),
    }


def check(x: md.MaskedTensor) -> None:
    """The kernels, and we, compute the same."""
    ends, columns, values = pieces(x)
    other, product = torch.randn(x.shape[0], WIDTH), torch.empty(x.shape[0], WIDTH)
    csr_matmul(ends, columns, values, other, product)
    torch.testing.assert_close((x @ other).to_tensor(0), product, rtol=1e-3, atol=1e-3)
    for name, mine in (("csr_sum", x.sum(1)), ("csr_amax", x.amax(1))):
        out = torch.empty(x.shape[0])
        rows_of_csr(name, ends, values, out)
        valid = mine.get_mask()
        torch.testing.assert_close(mine.to_tensor(0)[valid], out[valid], rtol=1e-3, atol=1e-3)


BOUNDS = {"x * y": 1.1, "exp": 1.1, "sum of rows": 2.0, "amax of rows": 2.0, "x @ dense": 2.4}
OTHERS = ("masked_dispatch", "torch.sparse", "scipy", "numba")


def run(rounds: int = 15) -> list[Goal]:
    rows, goals = [], []
    for density in progress(DENSITIES, "sparse"):
        x = some_csr(density)
        check(x)
        for name, calls in candidates(x).items():
            measured = measure(calls, rounds=rounds, warm_up=1)
            ratios = {who: timing(seconds, measured[LIMIT]) for who, seconds in measured.items()}
            label = f"{name}, {density:g} stored"
            cells = [str(ratios[who]) if who in ratios else "–" for who in OTHERS]
            rows.append([label, duration(ratios[LIMIT].seconds), *cells])
            goals.append(Goal(f"{label}: × the limit", ratios["masked_dispatch"].ratio, BOUNDS[name]))
            if name == "x @ dense":
                against = timing(measured["masked_dispatch"], measured["torch.sparse"]).ratio
                goals.append(Goal(f"{label}: × torch's CSR", against, 1.0))
    print_table(f"on sparse storage, {SIZE}², float32, × the limit", ("", LIMIT, *OTHERS), rows)
    return goals
