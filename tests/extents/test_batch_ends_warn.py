"""The end of a padded batch, taken where a sample's may be meant, warns at the caller's line, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import masked_dispatch as md

SIDES = {"right": [1, 0, 0], "left": [0, 0, 1], "centre": [0, 1, 0]}


def batch(side: str) -> md.MaskedTensor:
    return md.padded(md.masked_tensor(torch.ones(2, 3), torch.tensor([[1, 1, 1], SIDES[side]]).bool()))


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


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


def computed(x: Tensor) -> Tensor:
    y = x * 2
    return y[:, -1] + md.last(y)


def test_a_graph_warns_when_it_is_traced_at_the_line_of_its_code(warned: list[warnings.WarningMessage]) -> None:
    run = torch.compile(computed, fullgraph=True, backend="aot_eager")
    run(batch("right"))
    (found,) = [w for w in warned if w.category is md.BatchEndWarning]
    assert (found.filename, found.lineno) == (__file__, computed.__code__.co_firstlineno + 2)
    run(batch("right"))
    assert len([w for w in warned if w.category is md.BatchEndWarning]) == 1
