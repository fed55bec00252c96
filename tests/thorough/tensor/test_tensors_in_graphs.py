"""Tensors in compiled code: their contents, who owns their memory, results of unknown size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from few_elements import F, T, X, mask_of, ragged
from few_elements import table as masked
from storages import MASK, sample


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


# ---------------------------------------------------------------------------------------------------------- ownership


def compiled(f):
    return torch.compile(f, fullgraph=True, backend="aot_eager")


def test_a_compiled_region_writes_into_the_mask_of_its_input() -> None:
    @compiled
    def first_row_becomes_valid(x: Tensor) -> Tensor:
        x[0] = 1.0
        return x.sum()

    x = ragged()
    assert first_row_becomes_valid(x).item() == 13.0
    assert mask_of(x) == [[T, T, T], [T, F, T]]


def test_a_compiled_region_cannot_change_the_kind_of_validity() -> None:
    @compiled
    def invalidate(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(y)
        return x.sum()

    x = md.masked_tensor(torch.zeros(2, 3))
    with pytest.raises(Exception, match="would change how the mask of a tensor of shape"):
        invalidate(x, ragged())


def test_a_compiled_region_may_write_after_it_has_read() -> None:
    @compiled
    def read_then_write(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        x[0] = 1.0
        return y, x * 1

    x = ragged()
    mask = mask_of(x)
    y, z = read_then_write(x)
    assert mask_of(y) == mask
    assert mask_of(x) == mask_of(z) == [[T, T, T], [T, F, T]]


# -------------------------------------------------------------------------------------------- results of unknown size


@pytest.mark.parametrize(
    "positions",
    [torch.argwhere, torch.nonzero, lambda x: torch.repeat_interleave(x.isnan().logical_not().long().reshape(-1))],
    ids=["argwhere", "nonzero", "repeat_interleave"],
)
def test_plain_results_whose_size_only_the_graph_knows_compile(positions):
    x = masked(X)
    compiled = torch.compile(positions, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.equal(compiled(x), positions(x))
