"""A call that was made before, on other lengths and values: what is known of its results is not found again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.extents import run
from op_registry.extents.remembered import forget_plans

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
        call(stored(batch(2, 5, 0)))
        followed.clear()
        found = call(stored(other))
        assert not followed
        forget_plans()
        md.testing.assert_close(found, call(stored(other)), rtol=0, atol=0, check_extent=True)


def test_batches_of_which_the_same_is_known_share_it() -> None:
    """Fast paths compare extents by identity."""
    one, other = batch(2, 5, 0), batch(5, 1, 3)
    assert one._extent is other._extent
    assert (one.exp().view(3, 5, 2, 2).flatten(2))._extent is one._extent
    assert one.to_packed()._extent is one._extent
