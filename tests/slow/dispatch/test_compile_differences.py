"""Compiled operators whose steps have sizes that depend on data and that the result does not have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from storages import storages_but

T, F = True, False
STORAGES = storages_but("dense")
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "diff": torch.diff,
    "trapezoid": torch.trapezoid,
    "cumulative_trapezoid": torch.cumulative_trapezoid,
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_differences_of_sparse_storages(function: str, storage: str) -> None:
    torch._dynamo.reset()
    mask = torch.tensor([[T, T, F, T], [F, T, T, T]])
    dense = md.masked_tensor(torch.arange(8.0).view(2, 4) ** 2, mask)
    x, call = STORAGES[storage](dense), FUNCTIONS[function]
    result = torch.compile(lambda v: call(v) * 2, fullgraph=True, backend="aot_eager")(x)
    wanted = call(dense) * 2
    assert isinstance(result, md.MaskedTensor)
    assert isinstance(wanted, md.MaskedTensor)
    assert torch.equal(result.get_mask(), wanted.get_mask())
    torch.testing.assert_close(result.to_tensor(0), wanted.to_tensor(0))
    if function == "diff":  # scans are stored densely in a graph
        assert result.storage_layout == call(x).storage_layout  # type: ignore[attr-defined]
