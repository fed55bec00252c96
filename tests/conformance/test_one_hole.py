"""One invalid element in each tensor: the mask under which operators of whole slices have valid and invalid results."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_conformance import LAWS

import masked_dispatch  # noqa: F401  (registers what the subject runs)
from op_registry import registry
from op_registry.__main__ import TIERS
from op_registry.conformance import find_subject, mutants
from op_registry.conformance.laws.hidden import non_interference
from op_registry.conformance.masks import ONE_HOLE, masking, refilled
from op_registry.conformance.mutant_ways import WAYS
from op_registry.conformance.samples import operator_named
from op_registry.conformance.trial import Broken, Trial, outcome_with_gradients
from op_registry.conformance.trials import Settings, run_operator, trials_of

EAGER = "masked_dispatch.conformance_subject:eager"
DEFAULT = [TIERS["quick"], TIERS["full"], LAWS]


def holed(name: str, law: str, settings: Settings) -> list[Trial]:
    """The trials of a law with one hole in each tensor."""
    operator = operator_named(name).in_dtype(torch.float32 if law != "P5" else torch.float64)
    found = trials_of(operator, law, find_subject(EAGER), settings)
    return [trial for _, trial in found if trial.masking.kind == ONE_HOLE]


@pytest.mark.parametrize("settings", DEFAULT, ids=["quick", "full", "make test"])
@pytest.mark.parametrize("law", ["P2", "P3", "P5"])
def test_every_tier_has_one_of_whole_slices_with_a_valid_result(law: str, settings: Settings) -> None:
    (trial,) = holed("linalg_inv", law, settings)
    ((_, mask),) = trial.outcome()
    assert mask.any()
    assert not mask.all()


def test_what_has_valid_results_under_other_masks_has_one_trial() -> None:
    assert [len(holed("exp", law, LAWS)) for law in ("P2", "P3", "P5")] == [1, 0, 0]


def test_masks_that_are_asked_for_by_name_are_on_every_sample() -> None:
    asked = Settings(subject=EAGER, most=3, masks=(ONE_HOLE,))
    assert len(holed("linalg_inv", "P3", asked)) == 3


def test_the_tests_see_a_rule_that_takes_a_part_of_a_slice_for_the_whole() -> None:
    rule = registry.get(torch.ops.aten.linalg_inv_ex.default)
    assert rule is not None
    settings = dataclasses.replace(LAWS, laws=("P2",))
    assert not run_operator("linalg_inv_ex", settings).failures
    with mutants.installed(rule, WAYS["a part counts as the whole"], sparse=False):
        assert run_operator("linalg_inv_ex", settings).failures


# --------------------------------------------------------------------------- what has no derivative in plain torch


def eigenvectors_with_one_hole() -> Trial:
    """A call whose result torch refuses to differentiate: complex eigenvectors are defined up to a phase."""
    sample = operator_named("linalg_eig").samples(torch.float32)[4]
    masks = masking(ONE_HOLE, sample.tensors)
    assert masks is not None
    return Trial(find_subject(EAGER), sample, masks)


def test_torchs_own_refusal_to_differentiate_is_no_interference() -> None:
    trial = eigenvectors_with_one_hole()
    assert isinstance(outcome_with_gradients(trial, None), RuntimeError)
    non_interference(trial)


@pytest.mark.parametrize(
    "way, what",
    [
        ("hidden NaN leaks", "result"),
        ("garbage leaks into values", "result"),
        ("garbage leaks into gradients", "gradient"),
    ],
)
def test_results_and_gradients_of_such_a_call_are_compared_all_the_same(way: str, what: str) -> None:
    rule = registry.get(torch.ops.aten.linalg_eig.default)
    assert rule is not None
    with mutants.installed(rule, WAYS[way], sparse=False), pytest.raises(Broken, match=f"under the mask: {what} 0"):
        non_interference(eigenvectors_with_one_hole())


def test_an_error_that_plain_torch_does_not_raise_is_one() -> None:
    """Every fill gives the same error here, and plain torch none."""
    sample = operator_named("linalg_eigvals").samples(torch.float32)[4]
    masks = masking(ONE_HOLE, sample.tensors)
    assert masks is not None
    rule = registry.get(torch.ops.aten.linalg_eigvals.default) or registry.get(torch.ops.aten.linalg_eig.default)
    assert rule is not None
    with (
        mutants.installed(rule, WAYS["raises on what is partly valid"], sparse=False),
        pytest.raises(ZeroDivisionError),
    ):
        non_interference(Trial(find_subject(EAGER), sample, masks))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_one_element_is_refilled(dtype: torch.dtype, shape: Any) -> None:
    data = torch.ones(shape).to(dtype)
    if shape == (3, 2):
        data = data.t()
    mask = torch.ones(data.shape, dtype=torch.bool)
    mask[0, 1] = False
    garbage = refilled(data, mask, "nan")
    assert garbage.stride() == data.stride()
    assert torch.equal(garbage.to(torch.float32)[mask], torch.ones(5))
    assert garbage.to(torch.float32)[0, 1] != 1
