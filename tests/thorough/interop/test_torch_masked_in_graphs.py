"""torch.masked on masked tensors, compiled and under vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import masked_dispatch as md
from torch_masked_operands import LET_IN, x


@pytest.mark.parametrize("name", ["mean", "argmin", "var"])
def test_compiled_and_mapped(name: str) -> None:
    torch.compiler.reset()
    function: Callable[..., Any] = getattr(torch.masked, name)
    want = function(x(), dim=1, mask=LET_IN)
    compiled = torch.compile(lambda t, m: function(t, dim=1, mask=m), backend="aot_eager", fullgraph=True)
    mapped = md.functional.vmap(lambda t: function(t, dim=0, mask=LET_IN))
    for got in (compiled(x(), LET_IN), mapped(x())):
        assert torch.equal(got.get_mask(), want.get_mask())
        assert_close(got.to_tensor(0), want.to_tensor(0), equal_nan=True)
