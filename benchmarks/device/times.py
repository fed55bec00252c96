"""3: figures R1, R2, R4, R10, R14 and R15 there, beside plain torch and code by hand.

Each is a fraction of what the device can do: of the rate at which it copies memory, or multiplies large matrices. Both
are measured first. Operands are larger than caches.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import chain, packed, reductions, training
from benchmarks.device.part import Row, failure
from benchmarks.graphs import counted
from benchmarks.harness import Call, Clock, event_seconds, measure, thread_seconds
from benchmarks.kernels import ELEMENTWISE_RESULT
from op_registry.conformance.reference_device import device_called

COLUMNS = ("what", "milliseconds", "x plain", "x by hand", "of the limit", "goal")
KINDS = ("rates", "R10", "R14", "R4", "R1", "R2", "R15")
GOAL = 0.8
# Sizes of the rows, products and batches: of a GPU, and of a part of a minute on a CPU.
LARGE = {"rows": 8192, "product": 8192, "batch": 64, "width": 1024, "heads": 16, "dtype": torch.bfloat16}
SMALL = {"rows": 512, "product": 512, "batch": 4, "width": 64, "heads": 4, "dtype": torch.float32}
STOCK = training.Size("stock", 32, 512, 768, 12, 2)


def rows(device: str, until: float) -> Iterator[Row]:
    if device not in ("cuda", "cpu"):
        yield {"what": "nothing", "not asked": f"there is no clock for the device {device}"}
        return
    there, sizes = device_called(device), LARGE if device == "cuda" else SMALL
    torch.set_num_threads(1)
    clock = event_seconds if device == "cuda" else thread_seconds
    # The sizes of these modules are for one core.
    packed.BATCH, packed.WIDTH, packed.HEADS = sizes["batch"], sizes["width"], sizes["heads"]
    if device == "cpu":
        packed.TIME = 64
    rates = measured_rates(there, sizes, clock)
    yield {"what": "copying memory", "kind": "rates", "bytes a second": rates["bytes"]}
    products = f"products of matrices, {sizes['dtype']}"
    yield {"what": products, "kind": "rates", "operations a second": rates["operations"]}
    for what, of_one in figures(device, sizes, rates, clock):
        if time.monotonic() >= until:
            return
        try:
            yield from of_one()
        except Exception as error:
            yield {"what": what, "failed": failure(error)}


def measured_rates(device: torch.device, sizes: Mapping[str, Any], clock: Clock) -> dict[str, float]:
    """Bytes that a copy reads and writes in a second, and operations of a large product."""
    n, dtype = sizes["product"], sizes["dtype"]
    source = torch.ones(sizes["rows"], sizes["rows"], device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    out = torch.empty_like(a)
    seconds = medians({"copy": lambda: target.copy_(source), "product": lambda: torch.mm(a, b, out=out)}, clock)
    return {"bytes": 2 * source.nbytes / seconds["copy"], "operations": 2 * n**3 / seconds["product"]}


def medians(calls: Mapping[str, Call], clock: Clock) -> dict[str, float]:
    rounds = 9 if clock is event_seconds else 3
    return {name: statistics.median(each) for name, each in measure(calls, rounds=rounds, clock=clock).items()}


def row(what: str, seconds: Mapping[str, float], ours: str, plain: str, hand: str, limit: float) -> Row:
    """Ratios to plain torch and to the code by hand, and the fraction of the limit, in seconds."""
    mine = seconds[ours]
    found: Row = {"what": what, "kind": what.split()[0], "milliseconds": round(mine * 1e3, 4)}
    found["of the limit"] = round(limit / mine, 3)
    for key, other in (("x plain", plain), ("x by hand", hand)):
        if other in seconds:
            found[key] = round(mine / seconds[other], 3)
    return {**found, "goal": GOAL, "all": {name: round(s * 1e3, 4) for name, s in seconds.items()}}


def figures(
    device: str, sizes: Mapping[str, Any], rates: Mapping[str, float], clock: Clock
) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """Each figure by name; first those that compile nothing, then one of each that does."""
    n = sizes["rows"]

    def block(backward: bool, compiled: bool = False) -> tuple[str, Callable[[], Iterator[Row]]]:
        ways = {"backward": backward, "compiled": compiled}
        return "R10", lambda: of_block(device, sizes["dtype"], rates["operations"], clock, **ways)

    yield block(False)
    yield block(True)
    for model in training.MODELS:
        yield f"R14 {model}", lambda model=model: of_training(model, device, rates["operations"], clock)
    yield "R4", lambda: of_chain(n, device, rates["bytes"], clock)
    first = ("softmax", "mean", "layer_norm")
    for name in [*first, *(name for name in reductions.MASKED if name not in first)]:
        yield f"R1, R2 {name}", lambda name=name: of_reduction(name, n, device, rates["bytes"], clock)
        if name == first[0]:
            model = next(iter(training.MODELS))
            yield f"R15 {model}", lambda model=model: of_training(model, device, rates["operations"], clock, True)
            yield block(False, compiled=True)
            yield block(True, compiled=True)


def of_chain(n: int, device: str, rate: float, clock: Clock) -> Iterator[Row]:
    with torch.no_grad():
        seconds = medians(chain.candidates((n, n), device), clock)
    limit = 3 * 4 * n * n / rate  # two operands are read, and the result is written
    ways = (("eager", chain.MASKED, chain.PLAIN, chain.WHERE),)
    ways += (("compiled", chain.MASKED_COMPILED, chain.PLAIN_COMPILED, chain.WHERE_COMPILED),)
    for mode, *names in ways:
        yield row(f"R4 chain of six, {n} x {n}, {mode}", seconds, *names, limit)


def of_reduction(name: str, n: int, device: str, rate: float, clock: Clock) -> Iterator[Row]:
    torch.compiler.reset()
    forward, both = reductions.candidates(name, n, device)
    for figure, calls, backward in (("R1", forward, False), ("R2", both, True)):
        limit = bytes_moved(name, n, backward) / rate
        yield row(f"{figure} {name}, {n} x {n}", medians(calls, clock), "masked_dispatch", "unmasked", "by hand", limit)


def bytes_moved(name: str, n: int, backward: bool) -> int:
    """What has to be read and written of float32 rows and their mask of a byte an element."""
    data, mask = 4 * n * n, n * n
    result = data if name in ELEMENTWISE_RESULT else 4 * n
    moved = data + mask + result
    if backward:
        read_again = 0 if name in ("sum", "mean") else data  # the operand, or the result in its place
        moved += mask + read_again + result + data
    return moved


def of_block(
    device: str, dtype: torch.dtype, rate: float, clock: Clock, *, backward: bool, compiled: bool
) -> Iterator[Row]:
    """Compiled, the packed and the padded block alone: rows by hand are cut at lengths, which graphs would contain."""
    calls = packed.candidates(backward, device, dtype, compiled)
    packed.check(calls, 1e-3 if dtype is torch.float32 else 0.1)
    if compiled:
        calls = {name: calls[name] for name in (packed.PACKED, packed.PADDED)}
    seconds = medians(calls, clock)
    limit = operations(packed.lengths(), packed.WIDTH, 1 + 2 * backward) / rate
    direction = "forward and backward" if backward else "forward"
    what = f"R10 packed block, {direction}, {dtype}, {'compiled' if compiled else 'eager'}"
    yield row(what, seconds, packed.PACKED, packed.PADDED, packed.BY_HAND, limit)


def operations(lengths: Sequence[int], width: int, passes: int) -> float:
    """Those of the products of valid tokens in a block of a transformer; backward has two passes."""
    linear, pairs = 12 * width * width * sum(lengths), 2 * width * sum(n * n for n in lengths)
    return 2.0 * (linear + pairs) * passes


def of_training(model: str, device: str, rate: float, clock: Clock, compiled: bool = False) -> Iterator[Row]:
    """R14; compiled, R15. The limit is that of float32 only as far as the products' rate is."""
    figure = "R15" if compiled else "R14"
    if model == "BERT" and importlib.util.find_spec("transformers") is None:
        yield {"what": f"{figure} {model}", "kind": figure, "not asked": "transformers is not installed"}
        return
    size = STOCK if device == "cuda" else replace(training.SMALL, layers=1)
    steps = training.candidates(model, size, True, compiled, device)
    first = {}
    if compiled:
        for name, (_, step) in steps.items():
            started = time.perf_counter()
            graphs = counted(lambda _, step=step: step(), [torch.empty(0)])
            first[name] = {
                "first call, seconds": round(time.perf_counter() - started, 1),
                "breaks": graphs.breaks,
                "kernels": graphs.kernels,
            }
    training.check_steps(steps)
    seconds = medians({name: step for name, (_, step) in steps.items()}, clock)
    limit = size.layers * operations(training.lengths_of(size).tolist(), size.width, 3) / rate
    for name in (training.DENSE, training.PACKED):
        found = row(f"{figure} {model}, {size}, {name}", seconds, name, training.PLAIN, "", limit)
        yield {**found, "compiled": first} if compiled else found


def summary(found: Sequence[Row]) -> str:
    rates = {**{k: v for r in found for k, v in r.items() if k in ("bytes a second", "operations a second")}}
    parts = [f"copy {rates['bytes a second'] / 1e9:.0f} GB/s"] if "bytes a second" in rates else []
    if "operations a second" in rates:
        parts.append(f"products {rates['operations a second'] / 1e12:.2f} TFLOP/s")
    timed = [r for r in found if "of the limit" in r]
    reached = sum(r["of the limit"] >= GOAL for r in timed)
    parts.append(f"{len(timed)} figures, {reached} at {GOAL} of the limit or more")
    parts += [f"{r['what']}: {r[k]}" for r in found for k in ("failed", "not asked") if k in r]
    return "; ".join(parts)
