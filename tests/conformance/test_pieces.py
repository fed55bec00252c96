"""What the full tier divides: each operator by dtypes, and where it has many samples by these."""

from __future__ import annotations

import dataclasses

import pytest

from op_registry.__main__ import TIERS
from op_registry.conformance import find_subject, gaps
from op_registry.conformance.samples import MOST_SAMPLES, database, operator_named, pieces_of
from op_registry.conformance.trials import run_operator, trials_of
from op_registry.rule import Gap

EAGER = "masked_dispatch.conformance_subject:eager"
FULL = dataclasses.replace(TIERS["full"], subject=EAGER, masks=("half",), laws=("P1",))


def tried(name: str, law: str, stored: bool = False) -> list[tuple[str, int]]:
    """The dtype and number of each sample that a law is asked of."""
    trials = trials_of(operator_named(name), law, find_subject(EAGER), FULL, stored)
    return [(str(trial.sample.dtype), trial.sample.number) for _, trial in trials]


def test_every_sample_is_in_one_piece() -> None:
    pieces = pieces_of("linalg_vector_norm")
    assert len(pieces) == len(set(pieces)) == 4 * len(database()["linalg_vector_norm"].dtypes)
    whole = tried("linalg_vector_norm", "P3")
    assert sorted(sample for piece in pieces for sample in tried(piece, "P3")) == sorted(whole)
    assert max(len(tried(piece, "P3")) for piece in pieces) <= MOST_SAMPLES


def test_the_first_piece_has_what_is_asked_on_other_storages_and_once_of_each_operator() -> None:
    first, *others = (f"linalg_vector_norm@float32@{k}/4" for k in range(4))
    assert tried(first, "P4", stored=True) == tried("linalg_vector_norm@float32", "P4", stored=True) != []
    assert operator_named(first).leading
    for other in others:
        assert tried(other, "P4", stored=True) == []
        assert not operator_named(other).leading
    assert not operator_named("linalg_vector_norm@float64@0/4").leading


@pytest.mark.parametrize("piece, closed", [("", True), ("@1/4", False)])
def test_a_part_of_the_samples_does_not_say_that_a_gap_is_closed(
    piece: str, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gaps.TABLE, "linalg_vector_norm", (Gap("P1", "not a gap at all"),))
    report = run_operator(f"linalg_vector_norm@float32{piece}", dataclasses.replace(FULL, masks=("unstored",)))
    assert report.counts["P1"]["pass"] > 0
    assert [outcome.message for outcome in report.failures] == closed * [
        "a named gap no longer fails: gap in P1: not a gap at all; remove it"
    ]
