"""Every entry of torch's operator database on the reference device, one sample each, forward and gradients.

``python tests/helpers/reference_device_sweep.py [NAME …]`` prints what came of it as JSON; tests_on_reference_device.py
judges it. Every tensor of a sample is masked at random, half of it; the gradient is that of the sum of squares. An
entry is comparable where plain torch runs on the device, and masked tensors do on the CPU; it is the same where values
(where valid), masks, dtypes, and devices are, the last as plain torch has them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from masked_dispatch import is_masked_tensor, masked_tensor
from op_registry.conformance.compare import difference, mask_difference
from op_registry.conformance.masks import masking
from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.samples import Sample, chosen, database
from op_registry.conformance.trees import tree_leaves
from op_registry.records import dense as records
from reference_device import RefTensor, set_up

DEVICE = "ref"
NOT_COMPARABLE = "not comparable"
REFUSED = "masked on the CPU: MaskedSemanticsError"


@dataclass
class Leaf:
    """One tensor of a result, brought to the CPU."""

    data: Tensor
    mask: Tensor | None
    device: str

    @classmethod
    def of(cls, value: Tensor) -> Leaf:
        masked = is_masked_tensor(value)
        data, mask = (value.get_data(), value.get_mask()) if masked else (value, None)
        return cls(data.detach().cpu(), None if mask is None else mask.cpu(), value.device.type)


class Run:
    """A sample's call with its tensors made by `make(position, tensor)`: results, and gradients on demand."""

    def __init__(self, sample: Sample, make: Callable[[int, Tensor], Tensor]) -> None:
        made: list[Tensor] = []

        def replaced(tensor: Tensor) -> Tensor:
            made.append(make(len(made), tensor.detach().clone()))
            return made[-1]

        args, kwargs = sample.with_tensors(replaced)
        start_random_numbers(0)
        self.made = made
        self.result = sample.fn(*args, **kwargs)
        self.part = sample.differentiable_part(self.result)

    def results(self) -> list[Any]:
        return [Leaf.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(self.result)]

    def gradients(self) -> list[Any]:
        # Each result is used twice, so that gradients meet in the engine.
        squares = [
            (leaf * leaf.conj()).real.sum() if leaf.is_complex() else (leaf * leaf).sum()
            for leaf in tree_leaves(self.part)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        inputs = [t for t in self.made if t.requires_grad]
        if not squares or not inputs:
            return []
        found = torch.autograd.grad(squares, inputs, [torch.ones_like(s) for s in squares], allow_unused=True)
        return [None if g is None else Leaf.of(g) for g in found]


def with_gradient(sample: Sample, position: int, tensor: Tensor) -> bool:
    """Whether to differentiate by a tensor of the sample."""
    known = sample.variables is None or position in sample.variables
    return sample.differentiable and known and (tensor.is_floating_point() or tensor.is_complex())


def run(sample: Sample, device: str, masked: bool) -> Run:
    """The sample's call with tensors on `device`."""
    laid = masking("half", sample.tensors)
    assert laid is not None

    def make(position: int, tensor: Tensor) -> Tensor:
        wanted = with_gradient(sample, position, tensor)
        tensor = tensor.to(device)
        if not masked:
            return tensor.requires_grad_(wanted)
        return masked_tensor(tensor, laid.masks[position].to(device), requires_grad=wanted)

    return Run(sample, make)


def why_unequal(mine: Iterable[Any], theirs: Iterable[Any], plain: Iterable[Any], valueless: bool) -> str | None:
    """Why what came on the device is not what came on the CPU, on the devices that plain torch has; or None."""
    for position, (a, b, p) in enumerate(zip(mine, theirs, plain, strict=True)):
        if not isinstance(a, Leaf) or not isinstance(b, Leaf):
            wrong = None if a == b or (a != a and b != b) else f"{a!r} instead of {b!r}"
        elif isinstance(p, Leaf) and a.device != p.device:
            wrong = f"on {a.device} instead of {p.device}"
        elif (a.mask is None) != (b.mask is None):
            wrong = "masked on one device alone"
        else:
            wrong = mask_difference(a.mask, b.mask) if a.mask is not None and b.mask is not None else None
            if not wrong and not valueless:
                wrong = difference(a.data, b.data, a.mask)
        if wrong:
            return f"{position}: {wrong}"
    return None


def judged(what: str, on_cpu: Run, plain: Run, device: Callable[[], Run], valueless: bool) -> str:
    """Of `what`, results or gradients: "same", "not comparable: …", or what is wrong on the device."""
    try:
        theirs = getattr(on_cpu, what)()
    except Exception as error:
        return f"{NOT_COMPARABLE}: masked on the CPU: {said(error)}"
    try:
        plainly = getattr(plain, what)()
    except Exception as error:
        return f"{NOT_COMPARABLE}: plain on the device: {said(error)}"
    if what == "gradients" and all(g is None for g in theirs):
        return f"{NOT_COMPARABLE}: no gradient"
    try:
        mine = getattr(device(), what)()
    except Exception as error:
        return f"raises {said(error)}"
    return why_unequal(mine, theirs, plainly, valueless) or "same"


def said(error: Exception) -> str:
    """An error in a line, with the last line of the library that it passed."""
    files = [f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
    own = [file for file in files if file.startswith(("masked_dispatch/", "op_registry/", "ops/", "storage/"))]
    where = f" ({own[-1]})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"


# Entries of which torch's own backward of plain tensors aborts the process in the device's thread.
PLAIN_ABORTS = {"fft_hfft"}


def verdicts(name: str) -> dict[str, str]:
    """What came of an entry's results and gradients, of the first of four samples that can be compared."""
    operator = database()[name]
    samples = operator.samples(operator.preferred_dtype) if operator.dtypes else []
    found = {"results": f"{NOT_COMPARABLE}: no sample with a tensor"}
    for position, sample in enumerate(chosen([s for s in samples if any(t.numel() > 1 for t in s.tensors)], 4)):
        tried = verdicts_of(sample, with_gradients=name not in PLAIN_ABORTS)
        comparable = not any(verdict.startswith(NOT_COMPARABLE) for verdict in tried.values())
        if comparable or not position:
            found = tried
        if comparable or REFUSED in tried["results"]:
            break
    return found


def verdicts_of(sample: Sample, with_gradients: bool = True) -> dict[str, str]:
    """The same of one sample."""
    try:
        on_cpu = run(sample, "cpu", masked=True)
    except Exception as error:
        return {"results": f"{NOT_COMPARABLE}: masked on the CPU: {said(error)}"}
    try:
        plain = run(sample, DEVICE, masked=False)
    except Exception as error:
        return {"results": f"{NOT_COMPARABLE}: plain on the device: {said(error)}"}
    device = functools.cache(lambda: run(sample, DEVICE, masked=True))
    found = {"results": judged("results", on_cpu, plain, device, sample.valueless)}
    if with_gradients and sample.differentiable and not found["results"].startswith("raises"):
        found["gradients"] = judged("gradients", on_cpu, plain, device, sample.valueless)
    return found


@contextlib.contextmanager
def values_known() -> Iterator[None]:
    """Let the library take the device for one like CUDA, whose tensors have no type of their own.

    A type of its own is otherwise taken for a graph's under construction, whose values nobody may ask for.
    """

    ordinarily = records.being_traced

    def being_traced(tensor: Tensor) -> bool:
        return type(tensor) is not RefTensor and ordinarily(tensor)

    with contextlib.ExitStack() as patches:
        for module in [m for name, m in sys.modules.items() if name.startswith(("op_registry.", "masked_dispatch."))]:
            if getattr(module, "being_traced", None) is ordinarily:
                patches.enter_context(mock.patch.object(module, "being_traced", being_traced))
        yield


def sweep(names: Iterable[str] = (), as_cuda: bool = True) -> dict[str, dict[str, str]]:
    """The verdicts on some entries, or on all."""
    with warnings.catch_warnings(), values_known() if as_cuda else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        return {name: verdicts(name) for name in names or database()}


if __name__ == "__main__":
    library = set_up()
    print(json.dumps(sweep(sys.argv[1:]), indent=1))
