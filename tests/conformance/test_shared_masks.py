"""Operands that have one mask object, or are one tensor: a wrong shortcut by identity shows under these masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry.conformance import find_subject
from op_registry.conformance.masks import ITSELF, SHARED, masking
from op_registry.conformance.sample import Sample
from op_registry.conformance.trial import Trial
from op_registry.conformance.trials import Settings, run_operator
from op_registry.conformance.variations import call_under
from op_registry.ops.attention import rules as attention
from op_registry.records.validity import is_same_memory

EAGER = "masked_dispatch.conformance_subject:eager"


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
