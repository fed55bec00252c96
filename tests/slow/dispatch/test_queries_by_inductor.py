"""Queries of which values there are, compiled by inductor."""

from __future__ import annotations

import pytest
import torch

from compiled_regions import masked, same

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_queries_are_compiled_by_inductor() -> None:
    run = torch.compile(lambda x: x.round().unique(return_counts=True), fullgraph=True)
    for _ in range(2):
        x = masked()
        same(run(x), x.round().unique(return_counts=True))
