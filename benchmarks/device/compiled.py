"""2: forty functions and the stock models, compiled by inductor for the device: results, graph breaks, kernels."""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks.device.functions import FUNCTIONS, forward_and_backward, operands
from benchmarks.device.part import Row, die_with_the_device, failure, spread
from benchmarks.graphs import Graphs, counted
from benchmarks.training import DENSE, LARGE, MODELS, PACKED, PLAIN, SMALL, candidates, check_steps
from op_registry.workers import Lost

COLUMNS = ("what", "breaks", "kernels", "kernels of plain tensors", "wrong")
KINDS = ("functions", "models")
# What inductor has no code for.
NO_CODE = ("reference", "meta")


def rows(device: str, until: float) -> Iterator[Row]:
    if device in NO_CODE:
        yield {"what": "nothing", "not asked": f"inductor has no code for the device {device}"}
        return
    # Work is spread over processes: the compiler, which would start some for each, compiles where it is called.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    models = [(model, storage) for storage in (DENSE, PACKED) for model in MODELS]
    first, *functions = FUNCTIONS
    # On a CPU, where a model takes as long as many functions, one of each comes first.
    items = [first, models[0], *functions, *models[1:]] if device == "cpu" else [*models, *FUNCTIONS]
    for answer in spread(functools.partial(asked, device), items, device, until):
        if isinstance(answer, Lost):
            yield {"what": str(answer.item), "wrong": answer.why, "repeat": repeat(device)}
        else:
            yield answer


def repeat(device: str) -> str:
    return f"python -m benchmarks.device --device {device} --part compiled"


def asked(device: str, item: str | tuple[str, str], say: Callable[[str], None]) -> Row:
    """A function, or a model with its storage; what is raised is a finding."""
    name = item if isinstance(item, str) else ", ".join(item)
    say(name)
    started = time.monotonic()
    try:
        row = of_function(item, device) if isinstance(item, str) else of_model(*item, device)
    except Exception as error:
        row = {"wrong": failure(error), "repeat": repeat(device)}
    die_with_the_device(device)
    kind = "functions" if isinstance(item, str) else "models"
    return {"what": name, "kind": kind, "seconds": round(time.monotonic() - started, 1), **row}


def first_call(call: Callable[[], Any]) -> tuple[Any, Graphs]:
    """What a call gives, and what the compiler makes of it."""
    results: list[Any] = []
    torch.compiler.reset()
    with torch._inductor.config.patch(fallback_random=True):
        graphs = counted(lambda _: results.append(call()), [torch.empty(0)])
    return results[0], graphs


def of_function(name: str, device: str) -> Row:
    function, (x, y) = FUNCTIONS[name], operands(device)
    expected = forward_and_backward(function, x, y)
    found, graphs = first_call(lambda: forward_and_backward(torch.compile(function), x, y))
    row: Row = {"breaks": graphs.breaks, "kernels": graphs.kernels}
    try:
        plain = [t.get_data().detach().requires_grad_() for t in (x, y)]
        row["kernels of plain tensors"] = first_call(lambda: forward_and_backward(torch.compile(function), *plain))[
            1
        ].kernels
    except Exception:  # a method of masked tensors alone
        row["kernels of plain tensors"] = None
    wrong = difference(found, expected)
    return row if wrong is None else {**row, "wrong": wrong, "repeat": repeat(device)}


def difference(found: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """How masks or valid values differ, of the result and the gradients; None if they don't."""
    for what, mine, theirs in zip(("result", "gradient of x", "gradient of y"), found, expected, strict=False):
        if (mine is None) != (theirs is None):
            return f"{what}: there in one of them"
        if mine is None or theirs is None:
            continue
        if md.is_masked_tensor(mine) != md.is_masked_tensor(theirs):
            return f"{what}: masked in one of them"
        pairs: list[tuple[Tensor, Tensor]] = [(mine, theirs)]
        if md.is_masked_tensor(mine):
            pairs = [(mine.get_mask(), theirs.get_mask()), (mine.to_tensor(0), theirs.to_tensor(0))]
        try:
            for a, b in pairs:
                torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-4, atol=1e-5, equal_nan=True)
        except AssertionError as error:
            return f"{what}: {failure(error)}"
    return None


def of_model(model: str, storage: str, device: str) -> Row:
    """The losses and gradients of a training step are those of the plain model, which is compiled too."""
    if model == "BERT" and importlib.util.find_spec("transformers") is None:
        return {"not asked": "transformers is not installed"}
    size = LARGE if device == "cuda" else replace(SMALL, layers=1)
    steps = candidates(model, size, backward=True, compiled=True, device=device)
    pair = {name: steps[name] for name in (PLAIN, storage)}
    graphs = {name: first_call(step)[1] for name, (_, step) in pair.items()}
    row = {"breaks": graphs[storage].breaks, "kernels": graphs[storage].kernels}
    row["kernels of plain tensors"] = graphs[PLAIN].kernels
    check_steps(pair)
    return row


def summary(found: Sequence[Row]) -> str:
    asked = [row for row in found if "kernels" in row or "wrong" in row]
    wrong = sum("wrong" in row for row in asked)
    both = [row for row in asked if row.get("kernels of plain tensors") and row.get("kernels")]
    ours, plain = (sum(row[key] for row in both) for key in ("kernels", "kernels of plain tensors"))
    kernels = f"{ours} kernels, {plain} of plain tensors" if both else "no kernels counted"
    breaks = sum(row.get("breaks", 0) for row in asked)
    silent = "".join(f"; {row['not asked']}" for row in found if "not asked" in row)
    of = f"{len(asked)} of {len(FUNCTIONS)} functions and {2 * len(MODELS)} models"
    return f"{of}, {wrong} different, {breaks} graph breaks; {kernels}{silent}"
