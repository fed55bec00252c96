"""The end of a padded batch, taken where a sample's may be meant, warns at the caller's line, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.machinery import BuiltinImporter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import masked_dispatch as md

SIDES = {"right": [1, 0, 0], "left": [0, 0, 1], "centre": [0, 1, 0]}


def batch(side: str) -> md.MaskedTensor:
    return md.padded(md.masked_tensor(torch.ones(2, 3), torch.tensor([[1, 1, 1], SIDES[side]]).bool()))


# A line each, whose number is that of the call, with the side of the padding and what the warning names.
ENDS: dict[str, tuple[Callable[[Any], object], str, str, str]] = {
    "index": (lambda x: x[:, -1], "right", "x[:, -1]", "last(x, 1)"),
    "slice": (lambda x: x[:, -2:], "right", "x[:, -k:]", "last(x, 1, k)"),
    "slice with a stop": (lambda x: x[:, -2:-1], "right", "x[:, -k:]", "last(x, 1, k)"),
    "select": (lambda x: x.select(1, -1), "right", "x[:, -1]", "last(x, 1)"),
    "another dimension": (lambda x: x[:, None].transpose(1, 2)[:, -1], "right", "x[:, -1]", "last(x, 1)"),
    "front": (lambda x: x[:, 0], "left", "x[:, 0]", "first(x, 1)"),
    "before the last": (lambda x: x[:, -2], "right", "x[:, -k]", "last(x, 1, k)"),
    "in the middle": (lambda x: x[:, -1], "centre", "x[:, -1]", "last(x, 1)"),
    "slice in the middle": (lambda x: x[:, -2:], "centre", "x[:, -k:]", "last(x, 1, k)"),
    "front in the middle": (lambda x: x[:, 0], "centre", "x[:, 0]", "first(x, 1)"),
    "packed": (lambda x: x.to_packed()[:, -1], "right", "x[:, -1]", "last(x, 1)"),
    "written": (lambda x: x.__setitem__((slice(None), -1), 0.0), "right", "x[:, -1]", "last(x, 1)"),
    "packed, written": (lambda x: x.to_packed().__setitem__((..., -1), 0.0), "right", "x[:, -1]", "last(x, 1)"),
    "COO, written": (
        lambda x: x.to_sparse().__setitem__((slice(None), slice(-2, None)), 0.0), "right", "x[:, -k:]", "last(x, 1, k)",
    ),
    "scattered to": (lambda x: torch.select_scatter(x, torch.zeros(2), 1, -1), "right", "x[:, -1]", "last(x, 1)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_an_end_of_the_batch_warns(name: str, warned: list[warnings.WarningMessage]) -> None:
    call, side, said, instead = ENDS[name]
    call(batch(side))
    (found,) = warned
    assert found.category is md.BatchEndWarning
    assert (found.filename, found.lineno) == (__file__, call.__code__.co_firstlineno)
    assert str(found.message) == (
        f"{said} is an end of the batch, where shorter samples have padding. masked_dispatch.{instead} takes each "
        "sample's own; x.without_extent() says that the batch's is meant."
    )


QUIET: dict[str, tuple[Callable[[Any], object], str]] = {
    "steps": (lambda x: [x[:, t] for t in range(3)], "right"),
    "steps from the end": (lambda x: [x[:, t] for t in (2, 1, 0)], "right"),
    "unbind": (lambda x: x.unbind(1), "left"),
    "front": (lambda x: (x[:, 0], x[:, :1]), "right"),
    "end": (lambda x: (x[:, -1], x[:, -2:]), "left"),
    "joined to a position that all have": (lambda x: torch.cat([x, torch.ones(2, 1)], 1)[:, -1], "right"),
    "trimmed": (lambda x: (x[:, 1:-1], x[:, :-1]), "right"),
    "last sample": (lambda x: (x[-1], x[-1:]), "right"),
    "feature": (lambda x: x[:, :, None].expand(2, 3, 4)[..., -1], "right"),
    "one position": (lambda x: x[:, :1][:, -1], "right"),
    "without": (lambda x: x.without_extent()[:, -1], "right"),
    "of this library": (lambda x: (md.last(x), md.first(x), md.align(x), repr(x), x._repr_html_()), "right"),
    "of this library, in front": (lambda x: (md.last(x), md.first(x), md.align(x)), "left"),
    "of torch": (lambda x: torch.broadcast_tensors(*nn.LSTM(1, 2, batch_first=True)(x[..., None])[:1]), "right"),
    "stacked": (lambda x: torch.stack([x, x], 1).unbind(1)[-1], "right"),
}


@pytest.mark.parametrize("name", QUIET)
def test_nothing_else_does(name: str, warned: list[warnings.WarningMessage]) -> None:
    call, side = QUIET[name]
    call(batch(side))
    assert warned == []


def test_a_line_warns_once() -> None:
    x = batch("right")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for k in (1, 2, 2):
            x[:, -k:]
        x[:, -1]
    assert len(found) == 2


def test_filters_apply() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", md.BatchEndWarning)
        with pytest.raises(md.BatchEndWarning, match=r"x\[:, -1\] is an end of the batch"):
            batch("right")[:, -1]


def test_a_program_that_python_reads_from_its_standard_input_is_warned(warned: list[warnings.WarningMessage]) -> None:
    piped = {"__name__": "__main__", "__spec__": None, "__loader__": BuiltinImporter, "x": batch("right"), "md": md}
    exec(compile("x[:, -1]\nx.unfold(1, 3, 1)", "<stdin>", "exec"), piped)
    assert [(w.category, w.filename, w.lineno) for w in warned] == [
        (md.BatchEndWarning, "<stdin>", 1),
        (md.EmptiedSampleWarning, "<stdin>", 2),
    ]


class Calls(TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_modes_and_modules_do_not_hide_the_line(warned: list[warnings.WarningMessage]) -> None:
    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, -1]

    with Calls(), torch.device("cpu"):
        Last()(batch("right"))
    ours = [w for w in warned if w.category is md.BatchEndWarning]
    assert [(w.filename, w.lineno) for w in ours] in (
        [(__file__, Last.forward.__code__.co_firstlineno + 1)],
        [(__file__, Calls.__torch_function__.__code__.co_firstlineno + 1)],
    )


def test_torchs_own_code_does_not_warn(warned: list[warnings.WarningMessage]) -> None:
    code = compile("def take(x):\n    return x[:, -1]\n", "functional.py", "exec")
    module: dict[str, Any] = {"__name__": "torch.nn.functional"}
    exec(code, module)
    module["take"](batch("right"))
    assert warned == []
    module["__name__"] = "of_a_caller"
    module["take"](batch("right"))
    assert [w.category for w in warned] == [md.BatchEndWarning]


# ------------------------------------------------------------------------------------ windows longer than a sample


def line(*lengths: int, width: int = 4) -> md.MaskedTensor:
    """Samples 1 2 3 … of one channel, (B, 1, T)."""
    samples = torch.arange(1.0, width + 1).expand(len(lengths), width).clone()
    return md.from_lengths(samples, torch.tensor(lengths))[:, None]


LONGER: dict[str, tuple[Callable[[Any], object], str]] = {
    "pooling over the size": (lambda x: F.max_pool1d(x, x.shape[2]), "a window of 4 along dimension -1 is longer than"),
    "average": (lambda x: F.avg_pool1d(x, 3), "a window of 3"),
    "with indices": (lambda x: F.max_pool1d(x, 3, return_indices=True), "a window of 3"),
    "convolution": (lambda x: F.conv1d(x, torch.ones(1, 1, 3)), "a window of 3"),
    "dilated": (lambda x: F.conv1d(x, torch.ones(1, 1, 2), dilation=2), "a window of 3"),
    "a module's": (lambda x: nn.Sequential(nn.Conv1d(1, 1, 3))(x), "a window of 3"),
    "in two dimensions": (lambda x: F.max_pool2d(x[:, None], (1, 3)), "a window of 3"),
    "the second of two": (lambda x: F.max_pool1d(F.max_pool1d(x, 2), 2), "a window of 2"),
    "unfold": (lambda x: x.unfold(2, 3, 1), "a window of 3 along dimension 2 is longer than"),
    "columns": (lambda x: F.unfold(x[..., None], (3, 1)), "a window of 3 along dimension -2"),
    "packed": (lambda x: x[:, 0].to_packed().to_dense().unfold(1, 3, 1), "a window of 3"),
}


@pytest.mark.parametrize("name", LONGER)
def test_a_window_longer_than_a_sample_warns(name: str, warned: list[warnings.WarningMessage]) -> None:
    call, said = LONGER[name]
    call(line(4, 2))
    (found,) = warned
    assert found.category is md.EmptiedSampleWarning
    assert (found.filename, found.lineno) == (__file__, call.__code__.co_firstlineno)
    assert str(found.message).startswith(said)
    call(line(4, 0, 4))  # a sample that had none loses none
    assert len(warned) == 1


def test_other_windows_do_not(warned: list[warnings.WarningMessage]) -> None:
    x = line(4, 2)
    F.max_pool1d(x, 2), F.avg_pool1d(x, 3, ceil_mode=True), F.conv1d(x, torch.ones(1, 1, 3), padding=1)
    F.conv_transpose1d(x, torch.ones(1, 1, 3)), F.adaptive_max_pool1d(x, 1), F.lp_pool1d(x, 2, 2)
    F.max_pool1d(x.without_extent(), 4), F.conv1d(line(4, 3), torch.ones(1, 1, 3))
    assert warned == []


def test_lengths_are_read_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, read = line(20, 15, width=20), list[Tensor]()
    monkeypatch.setattr(torch.Tensor, "min", lambda t: read.append(t) or t.amin())
    for _ in range(3):
        x = torch.relu(F.conv1d(x, torch.ones(1, 1, 3)))
    F.max_pool1d(x, 2)
    assert len(read) == 1


def test_what_a_window_empties_has_no_position() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", md.EmptiedSampleWarning)
        total = F.conv1d(line(4, 2), torch.ones(1, 1, 3)).sum(2)
    assert total.flatten().to_tensor(-1).tolist() == [15, 0]  # of nothing, as torch sums
    assert F.conv1d(line(4, 3), torch.ones(1, 1, 3)).sum(2).flatten().tolist() == [15, 6]
