"""Rules made wrong on purpose: a part of what `python -m op_registry mutants` runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_registry import registry
from op_registry.__main__ import main
from op_registry.conformance import mutants
from op_registry.conformance.mutant_ways import WAYS, Call, Way
from op_registry.conformance.mutants import EQUIVALENT, Fate, Job, Mutant
from op_registry.records.dense import Dense
from op_registry.sparse.convert import from_dense
from op_registry.sparse.layout import CSR
from op_registry.sparse.lowering import run_sparsely
from op_registry.sparse.record import Sparse

# Each way once, on the dense run of a rule that it fits, and the first law that sees it ("≡": no law may).
EACH_WAY = [
    ("aten.cumsum.default", "cumsum", "states a wrong axis", "dims"),
    ("aten.mm.default", "mm", "states a contracted dimension as batch", "dims"),
    ("aten.linalg_inv_ex.default", "linalg_inv_ex", "states a batch dimension as contracted", "dims"),
    ("aten.where.self", "where", "leaves an operand out of its dimensions", "dims"),
    ("aten.sum.dim_IntList", "sum", "exchanges each and reduced", "dims"),
    ("aten.flip.default", "flip", "mask lost", "P2"),
    ("aten.exp.default", "exp", "mask too large", "P2"),
    ("aten.cat.default", "cat", "mask too small", "P2"),
    ("aten.flip.default", "flip", "a plain result", "P2"),
    ("aten.sum.dim_IntList", "sum", "NaN, valid, for nothing valid", "P2"),
    ("aten.mm.default", "mm", "forgets the other operands' masks", "P2"),
    ("aten.exp.default", "exp", "forgets the first operand's mask", "P2"),
    ("aten.exp.default", "exp", "values off by one", "P1"),
    ("aten.exp.default", "exp", "values of scalars off by one", "P1"),
    ("aten.cumsum.default", "cumsum", "values off by one in part of the calls", "P2"),
    ("aten.exp.default", "exp", "another dtype", "P1"),
    ("aten.where.self", "where", "another shape", "P1"),
    ("aten.sum.dim_IntList", "sum", "sevens for holes", "P2"),
    ("aten.mean.dim", "mean", "zeros for holes", "P2"),
    ("aten.linalg_inv_ex.default", "linalg_inv_ex", "a part counts as the whole", "P2"),
    ("aten.fill.Scalar", "fill", "remembers the first call", "P1"),
    ("aten.exp.default", "exp", "another value when compiled", "P7"),
    ("aten.cumsum.default", "cumsum", "reads the mask in Python", "P7"),
    ("aten.exp.default", "exp", "garbage leaks into values", "P2"),
    ("aten.flip.default", "flip", "hidden NaN leaks", "P3"),
    ("aten.cumsum.default", "cumsum", "garbage leaks into the mask", "P3"),
    ("aten.exp.default", "exp", "garbage leaks into gradients", "P3"),
    ("aten.exp.default", "exp", "raises on hidden NaN", "P3"),
    ("aten.exp.default", "exp", "NaN under the result's mask", "≡"),
    ("aten.where.self", "where", "writes to its operand", "P1"),
    ("aten.exp.default", "exp", "writes under its operand's mask", "P2"),
    ("aten.flip.default", "flip", "revives its operand", "P2"),
    ("aten.bucketize.Tensor", "bucketize", "refuses what is partly valid", "P3"),
    ("aten.exp.default", "exp", "raises on what is partly valid", "P2"),
    ("aten.exp.default", "exp", "gradient cut", "P5"),
    ("aten.cat.default", "cat", "gradient doubled", "P5"),
    ("aten.cumsum.default", "cumsum", "gradient wrong where something is invalid", "P5"),
    ("aten.exp.default", "exp", "second derivative cut", "P5"),
    ("aten.mul.Tensor", "mul", "no gradient for the first operand", "P5"),
]
# Each for a part of the laws or samples without which nobody saw it; with whether the run is the sparse one.
NO_STATS = "aten._native_batch_norm_legit.no_stats"
RANK, IN_BAGS = "aten.linalg_matrix_rank.atol_rtol_tensor", "aten.embedding_bag.padding_idx"
OF_PARTS = "gradient wrong where something is invalid"
OTHERS = [
    ("aten.glu", "nn_functional_glu", "another value when compiled", False, "P7"),
    ("aten.repeat", "repeat", "another value when compiled", False, "P7"),
    ("aten.linalg_inv_ex.default", "linalg_inv_ex", "another value when compiled", False, "P7"),
    (RANK, "linalg_matrix_rank_hermitian", "remembers the first call", False, "P1"),
    (IN_BAGS, "nn_functional_embedding_bag", "refuses what is partly valid", False, "P2"),
    ("aten.hardtanh", "nn_functional_hardtanh", "gradient cut", True, "P3"),
    ("aten.hardtanh", "nn_functional_hardtanh", "gradient doubled", True, "P5"),
    ("aten.hardtanh", "nn_functional_hardtanh", OF_PARTS, True, "P5"),
    (NO_STATS, "_native_batch_norm_legit", OF_PARTS, False, "P5"),
    ("aten.kl_div", "nn_functional_kl_div", "forgets the first operand's mask", True, "P4"),
]
SEEN = [*((rule, entry, way, False, law) for rule, entry, way, law in EACH_WAY), *OTHERS]


def test_every_way_comes_up() -> None:
    assert {way for _, _, way, _ in EACH_WAY} == set(WAYS)
    assert {way for _, _, way, law in EACH_WAY if law == "≡"} == set(EQUIVALENT)


@pytest.mark.parametrize("rule, entry, way, sparse, law", SEEN, ids=lambda value: str(value).replace(" ", "_"))
def test_the_law_that_sees_it(rule: str, entry: str, way: str, sparse: bool, law: str) -> None:
    (fate,) = [f for f in Job(rule, (entry,)).fates([way]) if f.mutant.sparse is sparse]
    assert (fate.state, fate.law) == (("equivalent", "") if law == "≡" else ("killed", law)), fate.message
    assert not fate.alarming


def test_a_way_that_fits_no_rule_changes_nothing() -> None:
    """That is found by running it: a wrong identity of an elementwise operator never shows."""
    fate = Job("aten.exp.default", ("exp",)).fates(["sevens for holes"])[0]
    assert fate.state == "same"
    assert fate.calls > 10


def test_a_wrong_run_on_sparse_records_is_seen_there_alone() -> None:
    dense, sparse = Job("aten.exp.default", ("exp",)).fates(["values off by one"])
    assert (dense.mutant.sparse, dense.law) == (False, "P1")
    assert (sparse.mutant.sparse, sparse.law) == (True, "P4")
    assert sparse.message.startswith("stored as csr")


def test_a_cut_of_a_second_derivative_that_is_zero_changes_nothing() -> None:
    """Sparse records lower quantiles of a fixed rank alone, which are linear; of a rank with a derivative none are."""
    dense, sparse = Job("aten.quantile", ("quantile",)).fates(["second derivative cut"])
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


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> str:
    """A way that no law sees: it says that it changed something, and did not."""

    def pretends(call: Call) -> Any:
        call.changed = True
        return call.result()

    monkeypatch.setitem(WAYS, "pretends", Way("pretends", pretends))
    return "pretends"


def test_a_survivor_is_an_alarm(unseen: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutants", "--op", "isnan", "--way", unseen, "--workers", "0"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("2 mutants of 1 rules: 0 killed, 0 change nothing observable, 0 equivalent, 2 survived\n")
    assert "\nnot accounted for:\naten.isnan.default: pretends survived\n" in printed


def test_an_equivalence_that_is_none_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mutants.EQUIVALENT, "mask lost", "nobody looks at masks")
    fate = Job("aten.flip.default", ("flip",)).fates(["mask lost"])[0]
    assert fate.state == "killed"
    assert fate.alarming
    assert not Fate(Mutant("aten.flip.default", "mask too large"), "killed", "P2").alarming


def test_a_mutant_holds_inside_its_block_only() -> None:
    rule = registry.get(torch.ops.aten.exp.default)
    assert rule is not None
    with mutants.installed(rule, WAYS["values off by one"], sparse=False) as seen:
        wrong = registry.get(torch.ops.aten.exp.default)
        assert wrong is not None
        assert wrong.bind(torch.ops.aten.exp.default)(Dense(torch.zeros(2))).data.tolist() == [3.0, 3.0]
    assert (seen.calls, seen.changed) == (1, 1)
    assert registry.get(torch.ops.aten.exp.default) is rule
