"""Operators of another library on padded batches: what their rules state of their dimensions is all that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from loops_over_samples import batch, check_loop
from masked_dispatch import MaskedSemanticsError
from op_registry.authoring import MOVEMENT, Along, Dense, Equation, masked_rule
from op_registry.dimensions.movements import Moved
from op_registry.dimensions.views import Cut
from op_registry.registry import registry

ops = torch.ops.padded_strangers


def defined(function: Callable[..., Tensor]) -> None:
    """A custom operator that computes `function` and has its derivative."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            x = torch.zeros(ctx.shape, dtype=grad.dtype, requires_grad=True)
            (found,) = torch.autograd.grad(function(x, *ctx.rest), [x], grad)
        return found, *[None] * len(ctx.rest)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.shape, ctx.rest = inputs[0].shape, inputs[1:]

    operator = torch.library.custom_op(f"padded_strangers::{function.__name__}", function, mutates_args=())
    operator.register_fake(lambda *args: torch.empty_like(function(*args)))
    operator.register_autograd(backward, setup_context=save)


@defined
def backwards(x: Tensor, axis: int) -> Tensor:
    return x.flip(axis)


@defined
def turned(x: Tensor, by: int, axis: int) -> Tensor:
    return x.roll(by, axis)


@defined
def piece(x: Tensor, axis: int, first: int, count: int) -> Tensor:
    return x.narrow(axis, first, count).clone()


@defined
def trimmed(x: Tensor, axis: int, first: int, end: int) -> Tensor:
    return torch.ops.aten.slice(x, axis, first, end).clone()


@defined
def position(x: Tensor, axis: int, number: int) -> Tensor:
    return x.select(axis, number).clone()


@defined
def smoothed(x: Tensor, axis: int, width: int, stride: int) -> Tensor:
    return x.unfold(axis, width, stride).sum(-1)


@defined
def with_clock(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]


def on_elements(op: Any, x: Dense, *arguments: Any) -> Dense:
    v = x.full_validity
    moved = None if v is None else (op(1 - v.to(torch.int64), *arguments) == 0).to(torch.int8)
    return Dense(op(x.filled(0), *arguments), moved)


def on_data(op: Any, x: Dense, *arguments: Any) -> Dense:
    return Dense(op(x.filled(0), *arguments), x.validity)


@pytest.fixture(autouse=True)
def _overlay() -> Iterator[None]:
    with registry.overlay():
        for op, dims in {
            ops.backwards: Moved("axis"),
            ops.turned: Moved("axis", by="by"),
            ops.piece: Cut(dim="axis", start="first", length="count"),
            ops.trimmed: Cut(dim="axis", start="first", stop="end"),
            ops.position: Cut(dim="axis", index="number"),
            ops.smoothed: Along("window", "axis", size="width", step="stride"),
        }.items():
            masked_rule(op.default, category=MOVEMENT, takes_op=True, dims=dims)(on_elements)
        clock = Equation("*td->*td", counted="t")
        masked_rule(ops.with_clock.default, category=MOVEMENT, takes_op=True, dims=clock)(on_data)
        yield


# Each with its twin among torch's operators; the sides of padding where it is served.
PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "a flip": (lambda x: ops.backwards(x, 1), ("right", "left")),
    "a flip of features": (lambda x: ops.backwards(x, -1), ("right", "left")),
    "a roll": (lambda x: ops.turned(x, 1, 1), ("right", "left")),
    "a part": (lambda x: ops.piece(x, 1, 0, min(2, x.shape[1])), ("right",)),
    "a part at both ends": (lambda x: ops.trimmed(x, 1, 1, -1), ("right", "left")),
    "a part of features": (lambda x: ops.piece(x, 2, 1, 1), ("right", "left")),
    "windows": (lambda x: ops.smoothed(x, 1, 2, 1), ("right", "left")),
    "windows with a stride": (lambda x: ops.smoothed(x, 1, 2, 2), ("right", "left")),
    "several": (
        lambda x: ops.trimmed(ops.smoothed(ops.backwards(x.cumsum(1), 1), 1, 2, 1), 1, 0, -1),
        ("right", "left"),
    ),
    "a clock": (lambda x: ops.with_clock(x).cumsum(1), ("right",)),
}
CASES = [(name, side) for name, (_, sides) in PROGRAMS.items() for side in sides]


@pytest.mark.parametrize(("name", "side"), CASES)
def test_a_batch_is_its_samples(name: str, side: str) -> None:
    x, samples = batch(2, side=side, lengths=[4, 2, 3])
    check_loop(PROGRAMS[name][0], x, samples)


@pytest.mark.parametrize("name", PROGRAMS)
def test_packed_is_as_dense(name: str) -> None:
    program = PROGRAMS[name][0]
    x = md.from_lengths(torch.randn(3, 4, 2, dtype=torch.float64), torch.tensor([4, 2, 3]))
    md.testing.assert_close(program(x.to_packed()).to_dense(), program(x), check_extent=True)


def test_an_index_is_the_batchs_and_warns_at_its_end() -> None:
    x, _ = batch(2)
    assert ops.position(x, 1, 0).extent.tolist() == ops.position(x, 1, 0).get_mask().tolist()
    with pytest.warns(UserWarning, match=r"x\[:, -1\] is an end of the batch"):
        ops.position(x, 1, -1)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (lambda x: ops.piece(x, 1, 0, 2), "counts from the start of the batch"),
        (ops.with_clock, "counts from the start of the batch, where samples do not begin"),
        (lambda x: ops.smoothed(x, 0, 2, 1), "its windows along dimension 0 would not be the sample.s own"),
    ],
)
def test_what_is_not_the_samples_own_is_refused(program: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(MaskedSemanticsError, match=said):
        program(batch(2, side="left")[0])


def test_in_a_graph() -> None:
    def program(x: Tensor) -> Tensor:
        return ops.smoothed(ops.trimmed(ops.turned(ops.backwards(x, 1), 1, 1), 1, 1, -1), 1, 2, 1) * 2

    x = md.from_lengths(torch.randn(3, 6, 2, dtype=torch.float64), torch.tensor([6, 4, 5]))
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    md.testing.assert_close(compiled(x), program(x), check_extent=True)
