"""A rule or lowering that returns a plain tensor is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import masked_dispatch as md
import op_registry
from op_registry.authoring import ELEMENTWISE, masked_rule
from storages import sample


@pytest.fixture
def twice() -> Any:
    with torch.library._scoped_library("plain_results", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        yield torch.ops.plain_results.twice.default


@pytest.mark.parametrize("layout, result", [("dense", "data"), ("csr", "several"), ("bsr", "data")])
def test_a_rule_that_returns_a_plain_tensor_is_refused_by_name(twice: Any, layout: str, result: str) -> None:
    with op_registry.registry.overlay():
        masked_rule(twice, category=ELEMENTWISE)(lambda x: x.data if result == "data" else (x, x.data))
        with pytest.raises(
            TypeError, match=r"^the rule of plain_results::twice \[.*test_plain_results_of_rules.py:\d+\] returned a"
        ):
            twice(sample(layout))


def test_a_lowering_that_returns_a_plain_tensor_is_refused_by_name(twice: Any) -> None:
    from op_registry.sparse.record import Sparse

    with op_registry.registry.overlay():
        rule = masked_rule(twice, category=ELEMENTWISE)(lambda x: x.like(x.data * 2))
        rule.lowering(Sparse)(lambda op, x: x.values.data)
        assert isinstance(twice(sample()), md.MaskedTensor)
        with pytest.raises(TypeError, match=r"returned a plain tensor of shape .*; a rule returns Dense"):
            twice(sample("csr"))
