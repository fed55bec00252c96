"""Random programs that are compiled, and such as take the process down that runs them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuzz_settings import EAGER, P3, choices
from op_registry.fuzz.command import Settings, in_this_process, in_workers
from op_registry.fuzz.generating import program_from


@pytest.mark.parametrize("seed", range(6))
def test_a_compiled_program_holds(seed: int) -> None:
    settings = Settings("P7", EAGER, most_steps=5)
    assert [str(a.finding) for a in in_this_process([seed], settings) if a.finding is not None] == []


def dtypes_of(seed: int) -> set[str]:
    return {source.dtype for source in program_from(seed, choices()).sources if source.mask != "plain"}


def test_a_process_that_dies_or_hangs_loses_one_program() -> None:
    dies = next(seed for seed in range(1000) if "int64" in dtypes_of(seed) and "bool" not in dtypes_of(seed))
    hangs = next(seed for seed in range(1000) if "bool" in dtypes_of(seed) and "int64" not in dtypes_of(seed))
    holds = [seed for seed in range(100) if not dtypes_of(seed) & {"int64", "bool"}][:2]
    settings = replace(P3, subject="misbehaving_subjects:dies_of_integers")
    answers = in_workers([holds[0], dies, hangs, holds[1]], settings, 1, 15.0)
    complaints = {answer.seed: answer.finding and answer.finding.complaint for answer in answers}
    assert complaints == {
        holds[0]: None,
        dies: "the process died with exit code 139",
        hangs: "not finished after 15 s",
        holds[1]: None,
    }
