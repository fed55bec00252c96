"""5: what was read in the sources about devices, and not seen there: each line with what this device shows of it.

true      as it was read: there is something to mend
mended    no longer so
not so    it never was
not seen  this device, or this run, does not show it
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
import torch.distributed as dist

import masked_dispatch as md
from benchmarks.device.part import Row, failure
from benchmarks.device.waits import cases, counted, host_waits
from benchmarks.graphs import counted as graphs_of
from benchmarks.harness import event_seconds, measure, thread_seconds
from op_registry.ops.attention import by_bounds
from op_registry.records.fill import fill_where_invalid
from op_registry.records.validity import count_ones

COLUMNS = ("what", "state", "seen")
KINDS = ("claims",)
Found = tuple[str, str]


def rows(device: str, until: float) -> Iterator[Row]:
    for what, check in CLAIMS.items():
        if time.monotonic() >= until:
            return
        try:
            state, seen = check(device)
        except Exception as error:
            state, seen = "not seen", failure(error)
        yield {"what": what, "kind": "claims", "state": state, "seen": seen}


def waits_of(*names: str) -> Callable[[str], Found]:
    """A claim that calls wait: mended, where none does."""

    def check(device: str) -> Found:
        if device == "cpu":
            return "not seen", "a CPU is not waited for"
        made = cases(device)
        found = {name: counted("waits", made[name][0], device) for name in names}
        failed = [f"{name}: {each['waits at'][0]}" for name, each in found.items() if each["waits"] is None]
        seen = ", ".join(f"{name}: {each['waits']} ({', '.join(each['waits at'])})" for name, each in found.items())
        return (
            ("not seen", "; ".join(failed))
            if failed
            else ("true" if any(f["waits"] for f in found.values()) else "mended", seen)
        )

    return check


def collectives_wait(device: str) -> Found:
    """Two all_reduce of a masked tensor in a group of one process: the second has nothing new to agree on."""
    if device == "reference":
        return "not seen", "no backend of torch.distributed has this device"
    backend = "nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            x = md.masked_tensor(torch.ones(8, device=device), torch.arange(8, device=device) > 2)
            dist.all_reduce(x.clone())
            y = x.clone()
            with host_waits(device) as waits:
                dist.all_reduce(y)
        finally:
            dist.destroy_process_group()
    if device == "cpu":
        return "not seen", "runs on gloo; a CPU is not waited for"
    return ("true" if waits else "mended"), f"{backend}, the second all_reduce: {len(waits)} waits {waits}"


def fast_enough(ours: Callable[[], object], plain: Callable[[], object], device: str, bound: float) -> Found:
    """A claim that a branch is slow: not so, if it takes less than `bound` times as long as plain torch's call."""
    if device == "reference":
        return "not seen", "there is no clock for this device"
    clock = event_seconds if device == "cuda" else thread_seconds
    seconds = {
        name: sorted(each) for name, each in measure({"ours": ours, "plain": plain}, rounds=5, clock=clock).items()
    }
    ratio = seconds["ours"][2] / seconds["plain"][2]
    seen = f"{ratio:.2f} times as long as plain torch's call"
    if device == "cpu":
        return "not seen", f"{seen}; a CPU has a branch of its own"
    return ("true" if ratio > bound else "not so"), seen


def size_of(device: str) -> int:
    """So large on a GPU that kernels take longer than it takes to launch them."""
    return 16384 if device == "cuda" else 256


def counting(device: str) -> Found:
    n = size_of(device)
    mask = torch.rand(n, n, device=device) < 0.5
    validity, data = mask.to(torch.int8), torch.randn(n, n, device=device)
    return fast_enough(lambda: count_ones(validity, (1,), False), lambda: data.sum(-1), device, 1.2)


def filling(device: str) -> Found:
    n = size_of(device)
    mask, data = torch.rand(n, n, device=device) < 0.5, torch.randn(n, n, device=device)
    validity = mask.to(torch.int8)
    return fast_enough(
        lambda: fill_where_invalid(data, validity, 0.0), lambda: torch.where(mask, data, 0.0), device, 1.2
    )


def sparse_matrices(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A masked tensor of which a tenth is stored, and a plain matrix of the same values."""
    n = size_of(device) // 2
    dense = torch.where(torch.rand(n, n, device=device) < 0.1, torch.randn(n, n, device=device), 0.0)
    return md.masked_tensor(dense, dense != 0).to_sparse_csr(), dense.to_sparse_csr()


def sparse_rows(device: str) -> Found:
    masked, plain = sparse_matrices(device)
    ones = torch.ones(plain.shape[-1], 1, device=device)
    return fast_enough(lambda: masked.sum(-1), lambda: plain @ ones, device, 2.0)


def sparse_products(device: str) -> Found:
    masked, plain = sparse_matrices(device)
    factor = torch.randn(plain.shape[-1], 64, device=device)
    return fast_enough(lambda: masked @ factor, lambda: plain @ factor, device, 2.0)


def distances(device: str) -> Found:
    n = size_of(device) // 4
    x = torch.randn(n, 64, device=device)
    masked = md.masked_tensor(x, torch.rand(n, 64, device=device) < 0.5)
    return fast_enough(lambda: torch.cdist(masked, masked), lambda: torch.cdist(x, x), device, 6.0)


def kernels_of_sequences(device: str) -> Found:
    """Attention of a packed batch by a kernel for sequences, and by one call for each: results and gradients."""
    if device not in by_bounds.DEVICES:
        return "not seen", "torch has these kernels for CUDA"
    worst: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        data = torch.randn(3, 600, 64, device=device, dtype=dtype)
        found = []
        for devices in ([device], []):
            with mock.patch.object(by_bounds, "DEVICES", devices):
                x = md.from_lengths(data, torch.tensor([500, 1, 130])).to_packed().detach().requires_grad_()
                heads = x.unflatten(-1, (2, 32)).transpose(1, 2)
                result = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
                (gradient,) = torch.autograd.grad(result.float().square().sum(), x)
                found.append([t.to_dense().to_tensor(0).float() for t in (result.transpose(1, 2), gradient)])
        worst[str(dtype)] = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True))
    right = worst["torch.float32"] < 1e-4 and worst["torch.bfloat16"] < 0.05
    return ("not so" if right else "true"), f"largest differences, of the largest value: {worst}"


def bool_in_triton(device: str) -> Found:
    """A mask in a compiled sum: one kernel, as without a mask, and no slower than reading one byte more an element."""
    if device != "cuda":
        return "not seen", "Triton is for GPUs"
    n = size_of(device)
    data = torch.randn(n, n, device=device)
    masked = md.masked_tensor(data, torch.rand(n, n, device=device) < 0.5)
    compiled, plain = (torch.compile(lambda x: x.sum(-1)) for _ in range(2))
    kernels = graphs_of(compiled, [masked]).kernels
    state, seen = fast_enough(lambda: compiled(masked), lambda: plain(data), device, 1.35)
    return ("true" if kernels > 1 else state), f"{kernels} kernels; {seen}"


def captured(device: str) -> Found:
    """A write whose operands lie in the memory of a CUDA graph, replayed with other values."""
    if device != "cuda":
        return "not seen", "CUDA graphs are for CUDA"
    x = md.masked_tensor(torch.ones(4, device=device), torch.tensor([True, False, True, True], device=device))
    out = torch.zeros(4, device=device)

    def call() -> torch.Tensor:
        y = x * 2
        y.add_(x)
        return out.copy_(y.to_tensor(0))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    x.get_data().fill_(2.0)
    graph.replay()
    right = out.tolist() == [6.0, 0.0, 6.0, 6.0]
    return ("mended" if right else "true"), f"3 x replayed with x = 2: {out.tolist()}"


CLAIMS: dict[str, Callable[[str], Found]] = {
    "each collective first agrees, and waits for it": collectives_wait,
    "counting masks: the branch of other devices is slow": counting,
    "filling: the branch of other devices is slow": filling,
    "sums of sparse rows: the branch of other devices is slow": sparse_rows,
    "sparse products: the branch of other devices is slow": sparse_products,
    "distances: the branch of other devices is slow": distances,
    "packed attention waits at each new pattern": waits_of("packed encoder layer, made in the step"),
    "a packed LSTM waits": waits_of("packed LSTM, a pattern seen before", "packed LSTM, made in the step"),
    "a new mask waits where it is packed or made sparse": waits_of("to_packed of a mask", "to_sparse_csr"),
    "a new fill value waits": waits_of("a new fill value"),
    "bool masks cost a kernel or time in Triton": bool_in_triton,
    "writes in the memory of a CUDA graph go wrong": captured,
    "kernels for sequences go wrong with a bound that exceeds every length": kernels_of_sequences,
}


def summary(found: Sequence[Row]) -> str:
    states = [row["state"] for row in found if "state" in row]
    return ", ".join(f"{states.count(state)} {state}" for state in ("true", "mended", "not so", "not seen"))
