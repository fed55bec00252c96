"""torch.utils.data.DataLoader on datasets of masked tensors, in this process (workers: test_collation_in_workers.py)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.data import default_collate

import masked_dispatch as md
from collated_examples import LAYOUTS, check_masks_and_storage, check_plain_among_masked, check_plain_batches, example
from comparison import same_extents as same


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_keep_masks_and_storage(layout: torch.layout) -> None:
    check_masks_and_storage(layout, workers=0)


def test_a_plain_example_among_masked_ones_is_valid_everywhere() -> None:
    check_plain_among_masked(workers=0)


STORED: dict[str, Callable[[md.MaskedTensor], md.MaskedTensor]] = {
    "dense": lambda x: x,
    "packed": lambda x: x.to_packed(),
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_layout(torch.sparse_csr, sparse_dim=2),
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("places", [[[1, 1, 1, 1], [1, 1, 0, 0]], [[0, 0, 1, 1], [0, 1, 1, 1]], [[1, 1, 1, 1]]])
def test_examples_that_were_taken_from_a_batch_are_the_batch_again(
    places: list[list[int]], holes: bool, stored: str
) -> None:
    there = torch.tensor(places).bool()[..., None]
    data = torch.arange(there.numel() * 2.0).view(-1, 4, 2)
    batch = md.padded(md.masked_tensor(data, there & (data != 6) if holes else there), there, dim=1)
    x = STORED[stored](batch)
    collated = default_collate([{"x": x[b], "label": b} for b in range(len(x))])
    same(collated["x"].to_dense(), batch)
    same(collated["x"].mean(1), batch.mean(1))
    with_plain = default_collate([x[0], data[0]])
    assert with_plain.to_dense().extent[:, :, 0].tolist() == [there[0, :, 0].tolist(), [True] * 4]


def test_plain_batches_are_torch_s_own() -> None:
    check_plain_batches(workers=0)


def test_examples_of_different_shapes_are_torch_s_own_error() -> None:
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        default_collate([example(0), example(1)[:1]])
