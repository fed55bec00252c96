"""The laws on every entry of torch's operator database: one sample each and six masks by default, in about a minute.

``CONFORMANCE_SLICE=3/8`` takes the entries 3, 11, 19 … of the database, ``CONFORMANCE_MOST=6`` more samples of each.
CI rotates through the full tier.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from op_registry import MaskedSemanticsError, check, registry
from op_registry.__main__ import TIERS, main
from op_registry.authoring import elementwise
from op_registry.conformance import find_subject, gaps, samples, trials
from op_registry.conformance.laws.modes import guards_not_timed
from op_registry.conformance.masks import FILLS, KINDS, ONE_HOLE, PLAIN, masking, refilled
from op_registry.conformance.plain_torch import calls_of
from op_registry.conformance.samples import MOST_SAMPLES, database, operator_named, pieces_of
from op_registry.conformance.trials import STORAGES, Settings, run_operator, trials_of
from op_registry.conformance.variations import FOLDED, storable
from op_registry.report import conformance
from op_registry.rule import Gap
from parts_of_the_database import asked_for, entries, failures

EAGER = "masked_dispatch.conformance_subject:eager"
MOST = int(os.environ.get("CONFORMANCE_MOST", "1"))
LAWS = Settings(
    subject=EAGER,
    laws=("P1", "P2", "P3", "P5", "P6", "P8", "P9", "dims", "later"),
    most=MOST,
    masks=("unstored", "half", "slices", "shared", "itself", ONE_HOLE) if MOST == 1 else KINDS,
)


@pytest.mark.parametrize("entry", asked_for(entries(), "CONFORMANCE_SLICE", "0/1"))
def test_laws(entry: str) -> None:
    report = run_operator(entry, LAWS)
    assert not report.failures, failures(report)


def test_the_entries_that_are_kept_are_those_of_the_database() -> None:
    assert entries() == list(database()), "remove build/entries-*.txt"


# ----------------------------------------------------------------------------------------------- the pieces


def test_the_interpreter_sees_operators_whole() -> None:
    """The assumption of an Interpreter: torch lets a mode see calls before composite operators are taken apart."""
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    assert calls_of(lambda: F.layer_norm(F.linear(x, weight), (5,)).sum(1)) == [
        torch.ops.aten.linear.default,
        torch.ops.aten.layer_norm.default,
        torch.ops.aten.sum.dim_IntList,
    ]


def test_masks_say_what_they_do() -> None:
    tensors = [torch.randn(3, 4), torch.randn(4)]
    half, first, others = (masking(kind, tensors) for kind in ("half", "half_first", "half_others"))
    assert half is not None
    assert first is not None
    assert others is not None
    assert not torch.equal(half.masks[0][0], half.masks[1])
    assert first.masks[1] == PLAIN
    assert others.masks[0] == PLAIN
    slices = masking("slices", tensors)
    assert slices is not None
    assert slices.masks[0].tolist() == [[False] * 4, [False, True, True, True], [False, True, True, True]]
    again = masking("half", tensors)
    assert again is not None
    assert torch.equal(again.masks[0], half.masks[0])
    assert masking("half_first", tensors[:1]) is None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
def test_refilling_touches_hidden_elements_only(dtype: torch.dtype) -> None:
    data = torch.ones(4, dtype=dtype)
    mask = torch.tensor([True, False, True, False])
    garbage = {str(refilled(data, mask, fill)[1].item()) for fill in FILLS}
    assert len(garbage) >= (2 if dtype is torch.bool else 4 if dtype in (torch.int64,) else 3)
    assert all(torch.equal(refilled(data, mask, fill)[mask], data[mask]) for fill in FILLS)


def test_a_sample_is_found_again_by_its_number() -> None:
    one, two = (operator_named("mean").samples(torch.float32)[3] for _ in range(2))
    assert torch.equal(one.args[0], two.args[0])
    assert one.kwargs == two.kwargs


def test_samples_of_one_dimension_are_folded_for_storages() -> None:
    folded = storable([s for s in operator_named("exp").samples(torch.float32) if s.tensors])
    assert [tuple(s.tensors[0].shape) for s in folded] == [(2, 10), (2, 2, 5)]
    assert [s.number for s in folded] == [FOLDED + 1, FOLDED + 2]
    whole = operator_named("sum").samples(torch.float32)
    assert storable(whole) == [s for s in whole if s.tensors[0].ndim >= 2]
    assert storable(operator_named("dot").samples(torch.float32)) != []


def test_an_overload_is_found_without_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch's database takes seconds, which a line that repeats a failure need not wait for."""
    assert operator_named("special.zeta").name == "special_zeta"
    monkeypatch.setattr(samples, "database", None)
    assert operator_named("aten.lstm.input").name == "aten.lstm.input"
    assert operator_named("conformance_tests::gelu_fast").name == "conformance_tests.gelu_fast.default"


def test_a_trial_remembers_what_storages_are_compared_with() -> None:
    settings = Settings(subject=EAGER, laws=("P4",), masks=("half",), most=1)
    made: dict[Any, Any] = {}
    (first, again) = (
        next(trials_of(operator_named("mul"), "P4", find_subject(EAGER), settings, stored=True, made=made))[1]
        for _ in range(2)
    )
    assert first is again
    computed: list[object] = []
    for trial in (first, again, dataclasses.replace(first)):
        trial.once("its number", computed.append)
    assert len(computed) == 2
    assert computed[0] is first
    assert computed[1] is not first


def test_guards_are_timed_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*arguments: object) -> float:
        return 1.0

    here = torch._C._dynamo.guards
    monkeypatch.setattr(here, "profile_guard_manager", timed)
    with guards_not_timed():
        assert here.profile_guard_manager() == 0.0
        # Dynamo is imported inside, and keeps what it finds.
        dynamo = SimpleNamespace(profile_guard_manager=here.profile_guard_manager)
        monkeypatch.setitem(sys.modules, "torch._dynamo.guards", dynamo)
    assert here.profile_guard_manager is dynamo.profile_guard_manager is timed


def test_only_the_first_of_several_is_stored_otherwise() -> None:
    settings = Settings(subject=EAGER, laws=("P4",), masks=("half",), most=None, sample=4)
    subject = find_subject(EAGER)
    ((_, trial),) = trials_of(operator_named("mul"), "P4", subject, settings, stored=True)
    kinds = [[type(v).__name__ for v in trial.wrapped(storage=s)[2]] for s in ("csr", "csr_first")]
    assert kinds == [["SparseMaskedTensor"] * 2, ["SparseMaskedTensor", "MaskedTensor"]]


def test_storage_may_hold_explicit_invalid_elements() -> None:
    subject = find_subject(EAGER)
    x = subject.wrap(torch.ones(4, 6), torch.arange(24).reshape(4, 6) < 1)
    for storage in STORAGES:
        if storage.endswith("_first"):  # one operand alone is stored so
            continue
        tight, padded = (subject.stored(x, storage, False, explicit_invalid=e) for e in (False, True))
        assert padded.nnz > tight.nnz, storage
        assert torch.equal(padded.get_mask(), x.get_mask())


# ------------------------------------------------------------------------------------------------ the runner


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(subject="records", laws=("P2",), most=1, masks=("half",))
    monkeypatch.setattr(trials, "fingerprint", lambda settings: "these sources")
    results = tmp_path / "results.jsonl"
    in_this_process = [run_operator(name, settings) for name in ("cos", "exp")]
    monkeypatch.setattr(trials, "_in_workers", lambda *rest: in_this_process)
    first = trials.run(["cos", "exp"], settings, results=results)
    asked: list[str] = []
    monkeypatch.setattr(trials, "_in_workers", lambda names, *rest: asked.extend(names) or [])
    again = trials.run(["cos", "exp"], settings, results=results)
    assert asked == []
    assert [r.as_dict() for r in again] == [r.as_dict() for r in first]
    assert trials.kept_reports(results, "of other sources") == {}


def test_the_summary_counts_what_no_oracle_speaks_for() -> None:
    report = run_operator("multinomial", Settings(subject=EAGER, laws=("P2",), most=1, masks=("half",)))
    text = conformance.summary([report])
    assert "P2 had no oracle in 1 trials, for 1 reasons:\n        1  aten.multinomial.default" in text
    assert "undecided: P2 of 1 operators" in text


def test_subjects_are_found_by_name() -> None:
    assert find_subject("records").name == "records"
    assert find_subject(EAGER).name == "eager"
    with pytest.raises(LookupError, match="no subject is called 'nobody'; use one of "):
        find_subject("nobody")


# --------------------------------------------------------------------------------------- a user's own operator


@torch.library.custom_op("conformance_tests::gelu_fast", mutates_args=())
def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


OWN = torch.ops.conformance_tests.gelu_fast


def test_a_wrong_rule_of_an_own_operator_gets_a_repro() -> None:
    with registry.overlay() as mine:
        rule = elementwise(OWN)
        mine.replace(rule.ops[0], lambda x: x.like(OWN(x.data - x.data.mean())))
        verdict = check(OWN, subject=EAGER, laws=("P2", "P3"))
    assert not verdict
    assert verdict.of("P2") == "broken"
    assert "--op conformance_tests.gelu_fast.default --law P3 --sample 1 --mask half" in str(verdict)


def test_an_own_operator_brings_its_own_samples_and_oracle() -> None:
    with registry.overlay():
        rule = elementwise(OWN)

        @rule.samples
        def gelu_fast_samples(make: Any) -> Any:
            return [(make((2, 5)),), (make((7,)),)]

        @rule.oracle
        def twice(x: Any) -> Any:
            return type(x)(x.data * 2, x.mask)

        verdict = check(OWN, subject="records", laws=("P2",))
    assert verdict.of("P2") == "broken"
    assert {o.description.split()[2] for r in verdict.reports for o in r.outcomes} == {"0", "1"}


def test_an_operator_without_a_rule() -> None:
    with pytest.raises(LookupError, match="conformance_tests::gelu_fast has no rule, and torch's operator"):
        check(OWN)


def test_what_is_refused_is_said_to_be() -> None:
    verdict = check("geqrf", subject=EAGER, laws=("P1", "P2"), most=1)
    assert verdict.of("P2") == "holds"
    x = find_subject(EAGER).wrap(torch.eye(2), torch.tensor([[True, False], [True, True]]))
    with pytest.raises(MaskedSemanticsError):
        torch.geqrf(x)


# ------------------------------------------------------------------------------------------------ the commands


@pytest.mark.parametrize("name", ["conformance_tests.gelu_fast", "torch.ops.conformance_tests.gelu_fast"])
def test_the_command_names_an_operator_without_a_rule(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--op", name]) == 2
    assert "conformance_tests.gelu_fast.default has no rule: register one, and name its" in capsys.readouterr().err


def test_the_command_that_repeats_one_trial(capsys: pytest.CaptureFixture[str]) -> None:
    trial = "check --op sum --law P3 --sample 4 --mask half --dtype float32 --seed 0"
    assert main([*trial.split(), "--subject", "records"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["P3", "holds", "1", "trials"]


# ------------------------- What the full tier divides: each operator by dtypes, and where it has many samples by these.

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
