"""Sparse storage in compiled code: layouts of one's own, warnings, views, conversions; and sweeps that take long."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md
from broadcasting_operators import broadcasting, faults
from comparison import same as equal
from numbered_layout import NUMBERED
from numbered_layout import some as numbers
from op_registry.sparse.layout import CSR, version_of
from packed_batches import MERGED, D, H, batch, check_random_views, same
from storages import permuted, some


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


# ----------------------------------------------------------------------------------------------------- dense operands


def test_it_is_named_at_the_line_that_calls_the_compiled_function() -> None:
    x = md.masked_tensor(torch.ones(8, 10), torch.eye(8, 10).bool()).to_sparse_csr()
    a, b = torch.ones(8, 3, requires_grad=True), torch.ones(3, 10)

    @torch.compile(backend="eager")
    def loss(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return (a @ b - x).square().mean()

    with md.densify("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss(a, b, x).backward()
    (found,) = caught
    assert (found.category, found.filename) == (md.DensificationWarning, __file__)
    assert str(found.message).startswith("torch.sub reads a dense operand of shape (8, 10)")


# ---------------------------------------------------------------------------------------- every broadcasting operator


@pytest.mark.parametrize("name", broadcasting())
def test_a_hybrid_operand_broadcasts_as_any_other(name):
    found = list(faults(broadcasting()[name]))
    assert len(found) >= 162
    assert not any(found), "\n".join(filter(None, found))


# ---------------------------------------------------------------------------------------------- any sequence of views


@pytest.mark.parametrize("sizes", [(5, 6), (1, 6), (5, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_views(seed: int, sizes: tuple[int, int]) -> None:
    check_random_views(seed, sizes)


# ------------------------------------------------------------------------------------------------------------ dropout


def test_dropout_in_torchs_own_encoder_layer():
    """Torch draws in memory order, which changes within the layer; packed batches have one order (operators.md)."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(D, H, 8, 0.4, batch_first=True).double()
    x = batch("padding", D).to_packed()
    with md.densify("never"):
        draws = [layer(x) for _ in range(400)]
    assert all(torch.equal(draw.get_mask(), x.get_mask()) for draw in draws)
    assert not torch.equal(draws[0].to_tensor(0), draws[1].to_tensor(0))
    assert torch.stack([draw.to_tensor(0) for draw in draws]).isfinite().all()
