"""An error names the public function that the caller called, not only the operator that this reached."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import masked_dispatch as md


def with_holes(x: torch.Tensor) -> md.MaskedTensor:
    return md.masked_tensor(x, (torch.arange(x.numel()) % 3 != 1).reshape(x.shape))


def padded(x: torch.Tensor) -> md.MaskedTensor:
    if x.ndim < 2:
        return md.padded(md.masked_tensor(x, torch.arange(x.numel()).reshape(x.shape) < max(1, x.numel() - 1)))
    return md.from_lengths(x, x.shape[1] - torch.arange(x.shape[0]) % (x.shape[1] + 1))


MAKERS: dict[str, Callable[[torch.Tensor], md.MaskedTensor]] = {
    "holes": with_holes,
    "padded": padded,
    "sparse": lambda x: with_holes(x).to_sparse(),
}
ALIASES = {"torch.spmm": "mm"}  # one operator, by two names
KINDS = ("torch", "torch.fft", "torch.linalg", "torch.nn.functional")


def samples(info: Any) -> Iterator[Any]:
    """A few calls of an operator of torch's database."""
    for dtype in sorted(info.dtypes, key=lambda d: d is not torch.float32)[:1]:  # none for operators of other devices
        yield from itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), 4)


def texts(function: Callable[..., Any], sample: Any) -> Iterator[str]:
    """What is said of refused calls with a masked first operand."""
    for kind, make in MAKERS.items():
        if kind != "sparse" or sample.input.ndim:
            try:
                with md.densify("never" if kind == "sparse" else "auto"):
                    function(make(sample.input), *sample.args, **sample.kwargs)
            except md.InvalidValueError:
                pass  # says which value was asked for
            except md.MaskedSemanticsError as error:
                yield str(error)
            except (RuntimeError, TypeError, ValueError, IndexError):
                pass  # torch's own


@pytest.mark.filterwarnings("ignore")
def test_every_public_function_that_is_refused_is_named() -> None:
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds, in any process that collects

    seen: dict[str, int] = {}
    for info in op_db:
        path = torch.overrides.resolve_name(info.op) or ""
        module, _, name = path.rpartition(".")
        if module not in KINDS or name.startswith("_"):
            continue
        for sample in samples(info):
            if not isinstance(sample.input, torch.Tensor):
                continue
            for text in texts(info.op, sample):
                assert re.search(rf"\b{ALIASES.get(path, name)}\b", text.partition(".default")[0]), (path, text)
                seen[module] = seen.get(module, 0) + 1
    assert {module: count > 30 for module, count in seen.items()} == dict.fromkeys(KINDS, True), seen


X = md.from_lengths(torch.randn(3, 8, 4), torch.tensor([8, 5, 3]))
BEYOND = "its windows may read beyond the end of a sample (`self` of shape "
SAID: dict[str, tuple[Callable[[], Any], str]] = {
    "a function of Python": (
        lambda: F.pad(X.mT, (1, 1), mode="reflect"), f"torch.nn.functional.pad (reflection_pad1d): {BEYOND}(3, 4, 8)"
    ),
    "one in C++": (lambda: torch.fft.rfft(X, dim=1), "torch.fft.rfft (_fft_r2c): a slice that lies in padding"),
    "one that calls another": (
        lambda: torch.stft(X[..., 0], 4, return_complex=True), f"torch.stft (reflection_pad1d): {BEYOND}(1, 3, 8)"
    ),
    "a method": (lambda: X.unfold(1, 2, 1).renorm(2, 1, 1.0), "torch.renorm: "),
    "a module": (lambda: torch.nn.ReflectionPad1d(1)(X.mT), f"torch.nn.functional.pad (reflection_pad1d): {BEYOND}"),
    "the operator itself": (lambda: torch.ops.aten.geqrf(with_holes(torch.ones(2, 2))), "torch.geqrf has no meaning"),
    "this library's": (lambda: md.last(X.to_sparse(), 1), "masked_dispatch.last (aten.flip.default) has no sparse"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAID)
def test_what_is_said(kind: str) -> None:
    call, text = SAID[kind]
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match=f"^{re.escape(text)}"):
        call()


def test_a_message_is_named_once() -> None:
    with pytest.raises(md.MaskedSemanticsError) as caught:
        torch.fft.rfft(X, dim=1)
    again = md.MaskedSemanticsError(*caught.value.args)
    assert str(again) == str(caught.value)
