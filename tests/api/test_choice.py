"""The choice of representation: by the measured table, overridable, explained in words."""

from __future__ import annotations

import pytest
import torch

import masked_dispatch as md
from masked_dispatch.api import choose as choice
from masked_dispatch.api.crossovers import CROSSOVERS

TABLE = {"arithmetic": {64: 0.0, 1024: 0.5}, "transcendental": {64: 0.8}, "reduction, by row": {64: 0.5}}


def some_tensor(shape: tuple[int, ...] = (64, 64), valid: float = 0.1) -> md.MaskedTensor:
    generator = torch.Generator().manual_seed(0)
    return md.masked_tensor(torch.ones(shape), torch.rand(shape, generator=generator) < valid)


@pytest.mark.parametrize(
    ("op", "family"),
    [
        (torch.exp, "transcendental"),
        ("relu", "arithmetic"),
        (torch.Tensor.mul, "arithmetic"),
        (torch.ops.aten.sum.dim_IntList, "reduction"),
        (torch.cumsum, "slices"),
        ("softmax", "slices"),
        (torch.nn.functional.linear, "product"),
        ("product", "product"),
        ("conv2d", None),
        ("tril", None),
    ],
)
def test_operators_belong_to_families(op, family):
    assert md.storage.family_of(op) == family


def test_every_family_is_measured():
    assert set(CROSSOVERS) == {key for family in choice.FAMILIES for key in (family, f"{family}, by row")}
    assert all(0 <= density <= 1 for sizes in CROSSOVERS.values() for density in sizes.values())


def test_the_nearest_size_and_the_density_decide():
    with md.storage.choosing(TABLE):
        assert md.storage.choose((900, 900), 0.4).layout is torch.sparse_csr
        assert md.storage.choose((900, 900), 0.5).layout is torch.strided
        assert md.storage.choose((70, 70), 0.4).layout is torch.strided
        assert md.storage.choose((70, 70), 0.4, torch.exp).layout is torch.sparse_csr
        assert md.storage.choose((4900,), 0.4, torch.exp).layout is torch.sparse_coo


def test_rows_are_kept_whole():
    with md.storage.choosing(TABLE):
        assert md.storage.choose((8, 8, 64), 0.3, "sum", structure="rows").layout is torch.jagged
        whole = md.masked_tensor(torch.ones(64, 64), (torch.arange(64) % 4 == 0).unsqueeze(1))
        chosen = md.storage.choose(whole, op="sum")
        assert (chosen.layout, chosen.sparse_dim) == (torch.sparse_coo, 1)
        again = chosen.of(whole)
        assert again.storage_layout is torch.sparse_coo
        assert md.storage.choose(again, op="sum") == chosen
        ragged = md.masked_tensor(torch.ones(64, 64), torch.ones(64, 64).tril().bool())
        assert choice.structure_of(ragged) == "elements"


def test_columns_where_columns_are_reduced():
    with md.storage.choosing({"reduction": {64: 1.0}}):
        assert md.storage.choose((64, 64), 0.1, "sum", dim=0).layout is torch.sparse_csc
        assert md.storage.choose((64, 64), 0.1, "sum").layout is torch.sparse_csr


def test_what_is_all_valid_or_not_measured_stays_dense():
    everything = {key: {64: 1.0} for key in CROSSOVERS}
    with md.storage.choosing(everything):
        whole = md.masked_tensor(torch.ones(64, 64), torch.ones(64, 64, dtype=torch.bool)).to_sparse()
        chosen = md.storage.choose(whole)
        assert (chosen.layout, chosen.all_valid) == (torch.strided, True)
        assert chosen.of(whole)._validity is None
        assert torch.equal(chosen.of(whole).to_tensor(0), torch.ones(64, 64))
        assert md.storage.choose(torch.ones(64, 64)).layout is torch.strided
        assert md.storage.choose(some_tensor(), op="tril").why == "no crossover is measured for tril"


def test_it_can_be_overridden():
    x = some_tensor()
    with md.storage.choosing(torch.sparse_coo):
        assert md.storage.choose(x).of(x).storage_layout is torch.sparse_coo
    asked = []

    def mine(*question):
        asked.append(question)
        return torch.sparse_csc

    with md.storage.choosing(mine):
        assert md.storage.choose(x, 0.25, "exp").layout is torch.sparse_csc
    assert asked == [((64, 64), 0.25, "transcendental", "elements")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 4), None), "choose needs the density of a tensor of shape (4, 4): a number between 0 and 1, not None"),
        (((4, 4), 1.5), "a number between 0 and 1, not 1.5"),
        (
            ((4, 4), 0.5, "no_such"),
            "'no_such' is not an operator of torch; pass one of torch's functions, its name, or a",
        ),
    ],
)
def test_questions_that_have_no_answer(arguments, message):
    with pytest.raises(ValueError) as raised:
        md.storage.choose(*arguments)
    assert message in str(raised.value)


def test_it_explains_itself():
    x = some_tensor((4, 8), 0.5)
    with md.storage.choosing({key: {64: 0.0 if "arithmetic" in key else 0.9} for key in CROSSOVERS}):
        dense, sparse = md.storage.explain(x), md.storage.explain(x.to_sparse_csr())
    valid = int(x.count())
    assert dense.splitlines()[:4] == [
        "(4, 8) torch.float32, stored as torch.strided: 160 bytes",
        f"{valid / 32:.2%} valid",
        "  arithmetic     torch.strided: arithmetic at this size is quicker at every density (as it is)   "
        "[x * y under one mask, and whatever is as cheap for an element]",
        "  transcendental torch.sparse_csr: transcendental at this size is quicker below a density of 0.9   "
        "[x.exp(), and whatever costs several times an addition]",
    ]
    assert f"stored as torch.sparse_csr, {valid} stored: " in sparse
    assert "below a density of 0.9 (as it is)" in sparse
