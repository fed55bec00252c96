"""4: where the host waits for the device, because Python needs a value or the size of a result; and peak memory.

On CUDA, torch itself says so (torch.cuda.set_sync_debug_mode); the reference device counts the operators.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import masked_dispatch as md
from benchmarks.device.functions import FUNCTIONS, forward_and_backward, operands
from benchmarks.device.part import Row, failure
from op_registry.conformance.reference_device import host_reads

COLUMNS = ("what", "waits", "waits of plain tensors", "peak / data", "plain peak / data", "wrong")
KINDS = ("functions", "calls")
LENGTHS = [6, 4, 3]


@contextlib.contextmanager
def host_waits(device: str) -> Iterator[list[str]]:
    """What the host waits for inside the block, by name; nothing on a CPU."""
    if device != "cuda":
        with host_reads() as reads:
            yield reads
        return
    waits: list[str] = []
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    # (torch also warns of the mode itself, the first time.)
    told = [w for w in caught if "called a synchronizing" in str(w.message)]
    waits += [f"{w.filename.rpartition('/')[2]}:{w.lineno}" for w in told]


def rows(device: str, until: float) -> Iterator[Row]:
    for name in FUNCTIONS:
        if time.monotonic() >= until:
            return
        yield of_function(name, device)
    for name, (masked, plain) in cases(device).items():
        if time.monotonic() >= until:
            return
        found: Row = {"what": name, "kind": "calls"}
        for key, call in (("waits", masked), ("waits of plain tensors", plain)):
            if call is not None:
                found |= counted(key, call, device)
        yield found
    if device == "cuda":
        yield from peaks(device)


def of_function(name: str, device: str) -> Row:
    """A wait of one of the forty is a difference, unless torch's function waits too: linalg.inv does, for its check."""
    found: Row = {"what": name, "kind": "functions"}
    try:
        x, y = operands(device)
        forward_and_backward(FUNCTIONS[name], x, y)  # what is made once for a process is no part of it
        x, y = operands(device)
        found |= counted("waits", lambda: forward_and_backward(FUNCTIONS[name], x, y), device)
    except Exception as error:
        found["wrong"] = failure(error)
    if found.get("waits"):
        plain = [t.get_data().detach().requires_grad_() for t in operands(device)]
        found |= counted("waits of plain tensors", lambda: forward_and_backward(FUNCTIONS[name], *plain), device)
        if found["waits"] > (found["waits of plain tensors"] or 0):
            found["wrong"] = f"the host waits: {', '.join(found['waits at'])}"
    if "wrong" in found:
        found["repeat"] = f"python -m benchmarks.device --device {device} --part waits"
    return found


def counted(key: str, call: Callable[[], object], device: str) -> Row:
    try:
        with host_waits(device) as waits:
            call()
    except Exception as error:
        return {key: None, f"{key} at": [failure(error)]}
    return {key: len(waits), f"{key} at": list(waits)}


def cases(device: str) -> dict[str, tuple[Callable[[], object], Callable[[], object] | None]]:
    """Larger calls, each on new tensors and masks; and the same on plain tensors, where there is such a thing."""
    torch.manual_seed(0)
    data, here = torch.randn(3, 6, 8).to(device), torch.tensor(LENGTHS)
    there = here.to(device)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(device)
    memory = nn.LSTM(8, 8, batch_first=True).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def valid() -> Tensor:
        return torch.arange(6, device=device) < there[:, None]

    def step(batch: Any, **options: Any) -> None:
        optimizer.zero_grad()
        (layer(batch, **options) - 1).square().mean().backward()
        optimizer.step()

    def packed(lengths: Tensor = here) -> Any:
        return md.from_lengths(data, lengths).to_packed()

    kept = packed()

    def plain_packed() -> Any:
        return nn.utils.rnn.pack_padded_sequence(data, here, batch_first=True)

    return {
        "from_lengths, lengths on the CPU": (
            lambda: md.from_lengths(data, here),
            lambda: torch.arange(6, device=device) < here.to(device)[:, None],
        ),
        "from_lengths, lengths on the device": (lambda: md.from_lengths(data, there), valid),
        "to_packed, lengths on the CPU": (packed, plain_packed),
        "to_packed, lengths on the device": (lambda: packed(there), None),
        "to_packed of a mask": (lambda: md.masked_tensor(data, valid()[..., None]).to_packed(), None),
        "padded encoder layer, a training step": (
            lambda: step(md.as_masked_tensor(data, valid()[..., None])),
            lambda: step(data, src_key_padding_mask=~valid()),
        ),
        "packed encoder layer, a pattern seen before": (lambda: step(kept), None),
        "packed encoder layer, made in the step": (lambda: step(packed()), None),
        "packed LSTM, a pattern seen before": (lambda: memory(kept)[0].mean().backward(), None),
        "packed LSTM, made in the step": (
            lambda: memory(packed())[0].mean().backward(),
            lambda: memory(plain_packed())[0].data.mean().backward(),
        ),
        "a new fill value": (lambda: md.masked_tensor(data, valid()[..., None]).to_tensor(3.5), None),
        "to_sparse_csr": (lambda: md.masked_tensor(data[0], data[0] > 0).to_sparse_csr(), None),
    }


def peaks(device: str) -> Iterator[Row]:
    """The most memory that reductions and a layer's step allocate, in sizes of their data."""
    n = 4096
    data = torch.randn(n, n, device=device)
    masked = md.masked_tensor(data, torch.rand(n, n, device=device) < 0.5)
    for name in ("sum", "amax", "logsumexp", "softmax"):
        ours, plain = (peak_of(lambda t=t, name=name: getattr(t, name)(-1)) / data.nbytes for t in (masked, data))
        yield {"what": f"{name}, {n} x {n}", "peak / data": round(ours, 2), "plain peak / data": round(plain, 2)}


def peak_of(call: Callable[[], object]) -> int:
    """Bytes that a second call allocates at most."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def summary(found: Sequence[Row]) -> str:
    forty = [row for row in found if row.get("kind") == "functions"]
    waiting = sum("wrong" in row for row in forty)
    others = [row for row in found if row.get("kind") == "calls"]
    said = ", ".join(f"{row['what']} {'fails' if row['waits'] is None else row['waits']}" for row in others)
    return f"{waiting} of {len(forty)} functions wait" + (f"; {said}" if said else "")
