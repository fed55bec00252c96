"""Random programs on padded batches: the law holds, and notices what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from op_registry.conformance.subjects import find_subject
from op_registry.extents import factors, joins, remembered, samples
from op_registry.extents.follow import Outcome
from op_registry.fuzz import padding
from op_registry.records.dense import Dense


def broken(seeds: range) -> list[str]:
    subject = find_subject(None)
    complaints = [padding.batch_is_its_samples(padding.program_of_samples(seed, 12), subject) for seed in seeds]
    return [complaint for complaint in complaints if complaint is not None]


def test_batches_are_their_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: Counter[str] = Counter()
    execute, compare = padding.execute, padding._gradients_differ

    def counted(*arguments: object) -> object:
        error = execute(*arguments)
        steps["refused" if isinstance(error, padding.MaskedSemanticsError) else "run"] += 1
        return error

    def differentiated(*arguments: object) -> object:
        steps["gradients"] += 1
        return compare(*arguments)

    monkeypatch.setattr(padding, "execute", counted)
    monkeypatch.setattr(padding, "_gradients_differ", differentiated)
    assert broken(range(200)) == []
    assert steps["refused"] < 0.03 * steps["run"]
    assert steps["gradients"] > 60


def mask_of_the_rule(result: object) -> object:
    if not isinstance(result, Outcome):
        return result
    return Dense(result.data, result.validity, result.extent)


WRONG: dict[str, tuple[object, str, Callable[..., object]]] = {
    "what is there is not asked for masks": (remembered, "finished", mask_of_the_rule),
    "samples are turned with the batch": (samples, "_within", lambda record, dim, source: record),
    "a join has no parts": (joins, "_positions", lambda *_: factors.PREFIX),
    "windows do not take samples to the front": (samples, "_croppable", lambda call, record, dim: record),
}


@pytest.mark.parametrize("way", WRONG)
def test_what_is_wrong_is_noticed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[way])
    remembered.forget_plans()
    try:
        assert broken(range(200))
    finally:
        remembered.forget_plans()
