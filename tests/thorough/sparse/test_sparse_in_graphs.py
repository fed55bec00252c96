"""In compiled code: layouts of one's own, warnings of densification, and views and conversions of what is permuted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from merged_views import MERGED
from numbered_layout import NUMBERED
from numbered_layout import same as equal
from numbered_layout import some as numbers
from op_registry.sparse.layout import CSR, version_of
from packed_batches import D, batch, same
from permuted_rows import permuted
from stored_rows import some


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def test_a_graph_knows_it_by_name_and_sources() -> None:
    compiled = torch.compile(lambda t: t.exp() + 1, fullgraph=True, backend="aot_eager")
    result = compiled(numbers((4, 6)).to_layout(NUMBERED))
    assert result.storage_layout == NUMBERED
    equal(result, numbers((4, 6)).exp() + 1)
    made = torch.compile(lambda t: t.to_layout(NUMBERED), fullgraph=True, backend="aot_eager")(numbers((4, 6)))
    equal(made, numbers((4, 6)))
    assert version_of(NUMBERED)
    assert version_of(CSR) == ""  # the registry's own version names its sources


def test_compiled_code_warns_when_it_is_traced(warned: Any) -> None:
    def cumulative(x: Tensor) -> Tensor:
        return x.cumsum(1) + 1

    compiled = torch.compile(cumulative, backend="aot_eager", fullgraph=True)
    with md.densify("warn"):
        for _ in range(2):
            compiled(some())
    found = [w for w in warned if w.category is md.DensificationWarning]
    assert {w.filename for w in found} == {__file__}
    assert len(found) == 1
    assert "torch.cumsum stores" in str(found[0].message)


def test_in_a_graph_it_is_stored_densely_if_the_policy_allows() -> None:
    """How many elements there are is not known while a graph is traced."""
    x = permuted()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Tensor) -> Tensor:
        return x.to_sparse_csr().sum(0)

    assert torch.equal(run(x).to_tensor(0), x.to_dense().sum(0).to_tensor(0))
    torch.compiler.reset()
    with md.densify("never"), pytest.raises(RuntimeError, match="to_layout has no sparse form"):
        run(x)


@pytest.mark.parametrize("name", MERGED)
def test_views_in_compiled_graphs(name: str) -> None:
    x = batch("padding", D).to_packed()

    def inside(t: Tensor) -> Tensor:
        return MERGED[name](t).exp() * 2

    def outside(t: Tensor) -> Tensor:
        return t.exp() * 2

    compiled = torch.compile(inside, backend="aot_eager", fullgraph=True)
    same(compiled(x), inside(x))
    compiled = torch.compile(outside, backend="aot_eager", fullgraph=True)
    same(compiled(MERGED[name](x)), inside(x))
