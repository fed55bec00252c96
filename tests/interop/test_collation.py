"""torch.utils.data.DataLoader on datasets of masked tensors, in this process (workers: test_collation_in_workers.py)"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import default_collate

from collated_examples import LAYOUTS, check_masks_and_storage, check_plain_among_masked, check_plain_batches, example


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_keep_masks_and_storage(layout: torch.layout) -> None:
    check_masks_and_storage(layout, workers=0)


def test_a_plain_example_among_masked_ones_is_valid_everywhere() -> None:
    check_plain_among_masked(workers=0)


def test_plain_batches_are_torch_s_own() -> None:
    check_plain_batches(workers=0)


def test_examples_of_different_shapes_are_torch_s_own_error() -> None:
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        default_collate([example(0), example(1)[:1]])
