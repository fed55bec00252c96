"""compressed() and to_tensor(fill) in compiled code."""

from __future__ import annotations

import pytest
import torch

from sixteen_elements import MASK, sample


def test_compressed_in_a_compiled_region() -> None:
    run = torch.compile(lambda x: x.compressed() * 2, backend="aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert run(sample()).tolist() == (torch.arange(16.0).reshape(4, 4)[MASK] * 2).tolist()


def test_a_tensor_that_broadcasts_fills_in_a_compiled_region_too() -> None:
    x, row = sample(), torch.arange(4.0)
    expected = torch.where(MASK, torch.arange(16.0).reshape(4, 4), row)
    assert torch.equal(x.to_tensor(row), expected)
    filled = torch.compile(lambda x, row: (x.to_tensor(row), x.to_tensor(-1)), backend="aot_eager", fullgraph=True)
    assert torch.equal(filled(x, row)[0], expected)
    with pytest.raises(Exception, match="is not an integer"):
        torch.compile(lambda x: x.to_tensor(1.5), backend="aot_eager", fullgraph=True)(sample(dtype=torch.int64))
