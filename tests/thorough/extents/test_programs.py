"""Random programs on padded batches: the law holds, and notices what is wrong."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from op_registry.conformance.subject import find_subject
from op_registry.extents import follow, joins, remembered, samples, states
from op_registry.extents.follow import Outcome
from op_registry.fuzz import padded_programs, padding
from op_registry.fuzz.command import Settings, check_seed, snippet
from op_registry.fuzz.padded_programs import can_be_drawn, program_of_samples
from op_registry.fuzz.padding import Tally
from op_registry.fuzz.programs import Source, Step
from op_registry.records.dense import Dense
from op_registry.records.extent import PREFIX, Factor

STEPS = 8


def broken(seeds: range, tally: Tally | None = None) -> list[str]:
    subject = find_subject(None)
    complaints = [padding.batch_is_its_samples(program_of_samples(seed, STEPS), subject, tally=tally) for seed in seeds]
    return [f"seed {seed}: {complaint}" for seed, complaint in zip(seeds, complaints, strict=True) if complaint]


def test_batches_are_their_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    tally, gradients = Tally(), 0
    compare = padding._gradient_differs

    def differentiated(*arguments: object) -> object:
        nonlocal gradients
        gradients += 1
        return compare(*arguments)

    monkeypatch.setattr(padding, "_gradient_differs", differentiated)
    assert broken(range(400), tally) == []
    outcomes = Counter({what: sum(n for (_, of), n in tally.items() if of == what) for what in ("compared", "refused")})
    assert outcomes["refused"] < 0.06 * outcomes["compared"]
    assert gradients > 120


def test_every_line_is_drawn() -> None:
    drawn = {step.kind for seed in range(2500) for step in program_of_samples(seed, 12).steps}
    lines = {line for groups in padded_programs.GROUPS.values() for group in groups for line in group.lines}
    assert drawn == lines


def test_what_is_drawn_can_be_drawn() -> None:
    assert all(can_be_drawn(program_of_samples(seed, STEPS)) for seed in range(50))


def test_what_is_cut_to_as_many_positions_as_longer_samples_keep_too_is_no_feature() -> None:
    state = padded_programs._State(0)
    state.add_source(Source("x", (3, 3, 3), "float64", 1, "plain", axes=("B", 3, "T")))
    state.sources.append(Source("w", (2, 3, 2), "float64", 3, "plain"))
    steps = (
        Step("cut", "{0}[:, :, 1:]", ("x",)),
        Step("windows", "F.conv1d(F.pad({0}, (1, 0)), {1})", ("cut", "w")),
        Step("two", "{0}[:, :, :2]", ("windows",)),
    )
    assert all(map(state.add_step, steps))
    assert state._kinds(["x", "cut", "windows", "two"]) == ["fr"] * 4


@pytest.mark.parametrize("seed", (3, 10))
def test_a_program_in_a_graph_is_the_same(seed: int) -> None:
    assert check_seed(seed, Settings("P9", most_steps=4, compiled=True)) is None


def test_a_snippet_shows_the_batch_and_its_samples(capsys: pytest.CaptureFixture[str]) -> None:
    program = program_of_samples(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(snippet(program, None, None, own=True), "<snippet>", "exec"), {})
    shown = capsys.readouterr().out
    assert "there:\n" in shown
    assert "sample 0 {'v0':" in shown


def mask_of_the_rule(result: object) -> object:
    if not isinstance(result, Outcome):
        return result
    return Dense(result.data, result.validity, result.extent)


index_by_index = joins._index_by_index


def those_of_all(
    parts: Sequence[joins.Part], each: Sequence[Sequence[Factor]], dim: int, kind: Sequence[int]
) -> Factor:
    right = index_by_index(parts, each, dim, kind)
    return Factor(right.along, right.there.amin(dim, keepdim=True).expand_as(right.there))


WRONG: dict[str, tuple[object, str, Callable[..., object]]] = {
    "what is there is not asked for masks": (remembered, "finished", mask_of_the_rule),
    "samples are turned with the batch": (samples, "_within", lambda record, dim, source: record),
    "a join has no parts": (joins, "_positions", lambda *_: PREFIX),
    "windows do not take samples to the front": (samples, "_croppable", lambda call, record, dim, strided: record),
    "samples that are joined again have the positions of all": (joins, "_index_by_index", those_of_all),
    "stacked states are there at every step": (states, "stacked", lambda parts, dim, is_new, name: ([], ())),
    "what is made of nothing is invalid": (follow, "used_up", lambda *_: ()),
    "operands that are reduced need not meet": (follow, "check_meetings", lambda *_: None),
}


@pytest.mark.parametrize("way", WRONG)
def test_what_is_wrong_is_noticed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[way])
    remembered.forget_plans()
    try:
        assert any(broken(range(first, first + 20)) for first in range(0, 600, 20))
    finally:
        remembered.forget_plans()
