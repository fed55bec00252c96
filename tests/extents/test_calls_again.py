"""A call that was made before, on other lengths and values: what is known of its results is not found again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.extents import run
from op_registry.extents.remembered import Place, forget_plans
from op_registry.records import extent as of_records

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(1),
    "mean of all": lambda x: x.mean(),
    "largest of all": lambda x: x.amax((1, 2)),
    "mean of features": lambda x: x.mean(-1),
    "heads": lambda x: x.view(3, 5, 2, 2).transpose(1, 2),
    "sum with another": lambda x: x + x.exp().view(3, 5, 2, 2).flatten(2),
    "features": lambda x: torch.nn.functional.linear(x, torch.ones(2, 4, dtype=x.dtype)),
}


def batch(*lengths: int) -> MaskedTensor:
    return md.from_lengths(torch.randn(3, 5, 4, dtype=torch.float64), torch.tensor(lengths))


@pytest.mark.parametrize("storage", ["dense", "packed"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_is_not_followed_again(call: Callable[[Tensor], Tensor], storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(x: Tensor) -> Tensor:
        return x.to_packed() if storage == "packed" else x

    followed: list[object] = []
    usual = run._outcome
    monkeypatch.setattr(run, "_outcome", lambda *args: followed.append(args) or usual(*args))
    other = batch(5, 1, 3)
    with torch.no_grad():
        call(stored(batch(2, 5, 1)))
        followed.clear()
        found = call(stored(other))
        assert not followed
        forget_plans()
        md.testing.assert_close(found, call(stored(other)), rtol=0, atol=0, check_extent=True)


def test_batches_of_which_the_same_is_known_share_it() -> None:
    """Fast paths compare extents by identity."""
    one, other = batch(2, 5, 1), batch(5, 1, 3)
    assert one._extent is other._extent
    assert batch(2, 5, 0)._extent is not other._extent  # a sample without positions is told apart
    assert (one.exp().view(3, 5, 2, 2).flatten(2))._extent is one._extent
    assert one.to_packed()._extent is one._extent


# --------------------------------------------------------------------------- one object, and other positions behind it


def test_a_write_through_a_view_tells_the_base_of_other_positions() -> None:
    base = batch(5, 5, 5)
    base[:, 2:4].copy_(md.from_lengths(torch.ones(3, 2, 4, dtype=torch.float64), torch.tensor([1, 2, 2])))
    assert base.extent is not None
    assert base.extent[:, :, 0].tolist() == [[True, True, True, False, True], [True] * 5, [True] * 5]
    closed = md.align(base, 1)
    assert closed.extent is not None
    assert closed.extent[0, :, 0].tolist() == [True, True, True, True, False]


WRITES: dict[str, Callable[[MaskedTensor, MaskedTensor], object]] = {
    "copy_": lambda x, y: x.copy_(y),
    "assignment": lambda x, y: x.__setitem__(slice(None), y),
    "to a part": lambda x, y: x[:, 1:].copy_(y[:, 1:]),
    "to a list": lambda x, y: torch._foreach_copy_([x], [y]),
    "packed": lambda x, y: x.to_packed().copy_(y.to_packed()),
    "results of one call": lambda x, y: x.mean(-1).copy_(y.mean(-1)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_where_the_target_has_no_position_is_named(
    write: Callable[[MaskedTensor, MaskedTensor], object],
) -> None:
    with md.updates("refuse"), pytest.raises(md.MaskedSemanticsError, match="where it has no positions"):
        write(batch(2, 5, 0), batch(5, 1, 3))


def test_a_write_of_the_same_positions_is_silent() -> None:
    x = batch(2, 5, 0)
    with md.updates("refuse"):
        x.copy_(x.exp())
        x[:, 1:].mul_(2)
        x.to_packed().copy_(x.to_packed())


def test_what_is_numbered_of_batches_of_other_sizes_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_records, "_MOST", 20)
    for size in range(3, 60):
        x = md.from_lengths(torch.ones(2, size, 2), torch.tensor([size, 1]))
        x.flatten(1)[:, :size].sum(1)
        assert len(of_records._numbers) <= 21


@pytest.mark.parametrize("kind", ["mask", "extent"])
def test_a_state_that_a_loop_holds_refers_to_no_earlier_step(kind: str) -> None:
    """After 979 steps, what is there was asked by a recursion through all of them."""
    there = torch.arange(4) < torch.tensor([[4], [2], [3]])
    x = md.masked_tensor(torch.ones(3, 4), there & (torch.arange(4) != 1) if kind == "extent" else there)
    state = md.padded(x, there)
    for _ in range(4):
        state = torch.where(state[:, 1:2].get_mask(), state[:, 1:2], state)
        extent = state._extent
        assert extent is not None
        factors = [*extent.factors, *(s.there for s in extent.states)]
        assert not any(isinstance(factor.said, Place) for factor in factors)
