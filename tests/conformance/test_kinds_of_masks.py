"""Masks that few operators need: one invalid element in each tensor; operands that have one mask, or are one tensor."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_conformance import LAWS
from torch import Tensor

from op_registry import registry
from op_registry.__main__ import TIERS
from op_registry.conformance import find_subject, mutants
from op_registry.conformance.law import Broken, Trial, outcome_with_gradients
from op_registry.conformance.laws.hidden import non_interference
from op_registry.conformance.masks import ITSELF, ONE_HOLE, SHARED, masking, refilled
from op_registry.conformance.mutant_ways import WAYS
from op_registry.conformance.sample import Sample
from op_registry.conformance.samples import operator_named
from op_registry.conformance.trials import Settings, run_operator, trials_of
from op_registry.conformance.variations import call_under
from op_registry.ops.attention import rules as attention
from op_registry.records.validity import is_same_memory

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


# ----------------------------------------------------------------------------------------------------------------------
# Operands that have one mask object, or are one tensor: a wrong shortcut by identity shows under these masks.


def complaints(subject: str, kind: str) -> list[str]:
    """What P2 says of attention under these masks."""
    settings = Settings(subject=subject, laws=("P2",), masks=(kind,), most=2)
    report = run_operator("nn_functional_scaled_dot_product_attention", settings)
    assert report.asked("P2")
    return [outcome.message for outcome in report.failures]


@pytest.mark.parametrize("kind", [SHARED, ITSELF])
@pytest.mark.parametrize("subject", ["records", EAGER])
def test_a_shortcut_that_forgets_features_is_noticed(subject: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of a tensor to itself once took a value with one valid feature for valid in all of them."""
    assert complaints(subject, kind) == []
    right = attention.plan

    def forgetful(query: Any, key: Any, value: Any, attn_mask: Any, *options: Any) -> attention.Plan:
        plan = right(query, key, value, attn_mask, *options)
        own = is_same_memory(query.validity, key.validity) and is_same_memory(key.validity, value.validity)
        return dataclasses.replace(plan, output=plan.rows) if own and attn_mask is None else plan

    assert complaints(subject, "half") == []
    monkeypatch.setattr(attention, "plan", forgetful)
    assert complaints(subject, "half") == []
    assert any(message.startswith("result 0: mask ") for message in complaints(subject, kind))


def call(*tensors: Tensor, fn: Any = torch.add) -> Sample:
    return Sample(fn, tensors, {}, 0, torch.float32)


def test_operands_become_alike_where_torch_accepts_it() -> None:
    x, row, wide = torch.randn(2, 3), torch.randn(1, 3), torch.randn(3, 4)
    one = call_under(ITSELF, call(x, row))
    assert one is not None
    assert one.args[0] is one.args[1] is x
    shared = call_under(SHARED, call(x, row))
    assert shared is not None
    assert [t.shape for t in shared.tensors] == [x.shape, x.shape]
    square = call_under(SHARED, call(x, wide, fn=torch.mm))
    assert square is not None
    assert [t.shape for t in square.tensors] == [(2, 2), (2, 2)]
    vector = call(x, torch.randn(3), fn=torch.mv)
    assert call_under(SHARED, call(x, row), any_shape=False) is None  # of a user's operator: what its author means
    assert call_under(SHARED, vector) is None
    assert call_under(ITSELF, vector) is None
    assert call_under(ITSELF, call(torch.randn(()), torch.randn(()))) is None
    assert call_under(ITSELF, call(x, row, fn=torch.Tensor.add_)) is None
    assert call_under("half", vector) is vector


@pytest.mark.parametrize("storage", [None, "csr", "bsr", "time_first_packed"])
def test_masks_of_one_shape_are_one_object(storage: str | None) -> None:
    sample = call(torch.randn(2, 3), torch.randn(2, 3), torch.randn(3), fn=torch.addcmul)
    masks = masking(SHARED, sample.tensors)
    assert masks is not None
    x, y, other = Trial(find_subject(EAGER), sample, masks).wrapped(storage=storage)[2]
    if storage is None:
        assert x._validity is y._validity
    else:
        assert x._pattern.same_as(y._pattern)
    assert x.get_mask().equal(y.get_mask())
    assert other.get_mask().shape == (3,)
