"""Rules made wrong on purpose: a part of the table that `python -m op_registry mutants` prints whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_registry import registry
from op_registry.__main__ import main
from op_registry.conformance import mutant_operators, mutant_table, mutants
from op_registry.conformance.mutant_calls import Call, Way
from op_registry.conformance.mutant_ways import WAYS
from op_registry.conformance.mutants import EQUIVALENT, Fate, Mutant, strangers_fates
from op_registry.records.dense import Dense
from op_registry.sparse.compressed import CSR
from op_registry.sparse.lowering import run_sparsely
from op_registry.sparse.record import Sparse, from_dense

# Each way once: a kind of operator that it fits, and the first law that sees it ("≡": no law may).
SEEN = [
    ("movement", "states a wrong axis", "dims"),
    ("contraction", "states a contracted dimension as batch", "dims"),
    ("whole slices", "states a batch dimension as contracted", "dims"),
    ("choice", "leaves an operand out of its dimensions", "dims"),
    ("normalization", "exchanges each and reduced", "dims"),
    ("movement", "mask lost", "P2"),
    ("elementwise", "mask too large", "P2"),
    ("join", "mask too small", "P2"),
    ("movement", "a plain result", "P2"),
    ("reduction", "NaN, valid, for nothing valid", "P2"),
    ("contraction", "forgets the other operands' masks", "P2"),
    ("query", "forgets the first operand's mask", "P2"),
    ("query", "values off by one", "P1"),
    ("opaque", "values of scalars off by one", "P1"),
    ("scan", "values off by one in part of the calls", "P2"),
    ("reduction, by hand", "another dtype", "P1"),
    ("choice", "another shape", "P1"),
    ("reduction", "sevens for holes", "P2"),
    ("normalization", "zeros for holes", "P2"),
    ("whole slices", "a part counts as the whole", "P2"),
    ("random", "remembers the first call", "P1"),
    ("whole slices", "another value when compiled", "P7"),
    ("reduction", "reads the mask in Python", "P7"),
    ("normalization", "garbage leaks into values", "P2"),
    ("assignment", "hidden NaN leaks", "P3"),
    ("scan", "garbage leaks into the mask", "P3"),
    ("elementwise", "garbage leaks into gradients", "P3"),
    ("refused", "raises on hidden NaN", "P3"),
    ("reduction", "NaN under the result's mask", "≡"),
    ("choice", "writes to its operand", "P1"),
    ("query", "writes under its operand's mask", "P2"),
    ("movement", "revives its operand", "P2"),
    ("elementwise", "refuses what is partly valid", "P3"),
    ("random", "raises on what is partly valid", "P2"),
    ("opaque", "gradient cut", "P5"),
    ("join", "gradient doubled", "P5"),
    ("scan", "gradient wrong where something is invalid", "P5"),
    ("elementwise", "second derivative cut", "P5"),
    ("elementwise, of two", "no gradient for the first operand", "P5"),
]


def test_every_way_and_every_kind_comes_up() -> None:
    assert [way for _, way, _ in SEEN] == list(WAYS)
    assert {kind for kind, _, _ in SEEN} == set(mutant_operators.RULES)
    assert {way for _, way, law in SEEN if law == "≡"} == set(EQUIVALENT)


@pytest.mark.parametrize("kind, way, law", SEEN, ids=lambda value: str(value).replace(" ", "_"))
def test_the_law_that_sees_it(kind: str, way: str, law: str) -> None:
    (fate,) = strangers_fates(kind, [way], sparse=False)
    assert (fate.state, fate.law) == (("equivalent", "") if law == "≡" else ("killed", law)), fate.message
    assert not fate.alarming


def test_a_way_that_fits_no_rule_changes_nothing() -> None:
    """That is found by running it: a wrong identity of an elementwise operator never shows."""
    (fate,) = strangers_fates("elementwise", ["sevens for holes"], sparse=False)
    assert fate.state == "same"
    assert fate.calls > 10


def test_a_wrong_run_on_sparse_records_is_seen_there_alone() -> None:
    dense, sparse = strangers_fates("reduction", ["values off by one"])
    assert (dense.mutant.sparse, dense.law) == (False, "P1")
    assert (sparse.mutant.sparse, sparse.law) == (True, "P4")
    assert sparse.message.startswith("stored as csr")


# Of built-in rules, each for a part of the laws or samples without which nobody saw it.
SEEN_BUILT_IN = [
    ("aten.glu", "nn_functional_glu", "another value when compiled", False, "P7"),
    ("aten.repeat", "repeat", "another value when compiled", False, "P7"),
    ("aten.linalg_inv_ex.default", "linalg_inv_ex", "another value when compiled", False, "P7"),
    ("aten.linalg_inv_ex.default", "linalg_inv_ex", "a part counts as the whole", False, "P2"),
    ("aten.fill.Scalar", "fill", "remembers the first call", False, "P1"),
    (
        "aten.linalg_matrix_rank.atol_rtol_tensor",
        "linalg_matrix_rank_hermitian",
        "remembers the first call",
        False,
        "P1",
    ),
    ("aten.bucketize.Tensor", "bucketize", "refuses what is partly valid", False, "P3"),
    ("aten.embedding_bag.padding_idx", "nn_functional_embedding_bag", "refuses what is partly valid", False, "P2"),
    ("aten.hardtanh", "nn_functional_hardtanh", "gradient cut", True, "P3"),
    ("aten.hardtanh", "nn_functional_hardtanh", "gradient doubled", True, "P5"),
    ("aten.hardtanh", "nn_functional_hardtanh", "gradient wrong where something is invalid", True, "P5"),
    (
        "aten._native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit",
        "gradient wrong where something is invalid",
        False,
        "P5",
    ),
    ("aten.kl_div", "nn_functional_kl_div", "forgets the first operand's mask", True, "P4"),
]


@pytest.mark.parametrize("rule, entry, way, sparse, law", SEEN_BUILT_IN)
def test_the_law_that_sees_a_mutant_of_a_built_in_rule(rule: str, entry: str, way: str, sparse: bool, law: str) -> None:
    (fate,) = [f for f in mutants.built_in_fates(rule, [entry], [way]) if f.mutant.sparse is sparse]
    assert (fate.state, fate.law) == ("killed", law), fate.message


def test_a_cut_of_a_second_derivative_that_is_zero_changes_nothing() -> None:
    """Sparse records lower quantiles of a fixed rank alone, which are linear; of a rank with a derivative none are."""
    dense, sparse = mutants.built_in_fates("aten.quantile", ["quantile"], ["second derivative cut"])
    assert (dense.state, dense.law) == ("killed", "P5")
    assert sparse.state == "same"


def test_results_in_sparse_storage_are_compared_by_what_they_hold() -> None:
    """Where both operands are invalid in one place, the other mask says so: the same elements, another record."""
    rule = registry.get(torch.ops.aten.mul.Tensor)
    assert rule is not None
    stored = from_dense(Dense(torch.ones(2, 2)), CSR)
    holey, other = (
        Sparse(Dense(stored.values.data, torch.tensor(mask, dtype=torch.int8)), stored.pattern)
        for mask in ([0, 1, 1, 1], [1, 0, 1, 1])
    )
    for partner, changed in ((holey, 0), (other, 1)):
        with mutants.installed(rule, WAYS["forgets the first operand's mask"], sparse=True) as seen:
            wrong = registry.get(torch.ops.aten.mul.Tensor)
            assert wrong is not None
            run_sparsely(torch.ops.aten.mul.Tensor, wrong, (holey, partner), {})
        assert (seen.calls, seen.changed) == (1, changed)


# ------------------------------------------------------------------------------------------------- the table itself


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> str:
    """A way that no law sees: it says that it changed something, and did not."""

    def pretends(call: Call) -> Any:
        call.changed = True
        return call.result()

    monkeypatch.setitem(WAYS, "pretends", Way("pretends", pretends))
    return "pretends"


def test_a_survivor_is_an_alarm(unseen: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(mutant_table, "strangers", lambda: [mutant_table.Job("query", "query")])
    assert main(["mutants", "--only", "strangers", "--way", unseen, "--workers", "0"]) == 1
    said = capsys.readouterr().out
    assert "pretends                                     !!" in said
    assert said.endswith("!! not accounted for:\nquery: pretends survived\n")


def test_an_equivalence_that_is_none_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mutants.EQUIVALENT, "mask lost", "nobody looks at masks")
    (fate,) = strangers_fates("movement", ["mask lost"], sparse=False)
    assert fate.state == "killed"
    assert fate.alarming
    assert not Fate(Mutant("movement", "mask too large"), "killed", "P2").alarming


def test_a_mutant_holds_inside_its_block_only() -> None:
    rule = registry.get(torch.ops.aten.exp.default)
    assert rule is not None
    with mutants.installed(rule, WAYS["values off by one"], sparse=False) as seen:
        wrong = registry.get(torch.ops.aten.exp.default)
        assert wrong is not None
        assert wrong.bind(torch.ops.aten.exp.default)(Dense(torch.zeros(2))).data.tolist() == [3.0, 3.0]
    assert (seen.calls, seen.changed) == (1, 1)
    assert registry.get(torch.ops.aten.exp.default) is rule


@pytest.mark.parametrize("rule, entry", [("aten.mean.dim", "mean"), ("aten.cumsum.default", "cumsum")])
def test_mutants_of_a_built_in_rule(rule: str, entry: str) -> None:
    fates = mutants.built_in_fates(
        rule, [entry], ["values off by one", "mask lost", "hidden NaN leaks", "gradient cut"]
    )
    assert {str(f.mutant) for f in fates if f.state != "killed"} == set()
    assert [f.mutant.sparse for f in fates] == [False] * 4 + [True] * 4
