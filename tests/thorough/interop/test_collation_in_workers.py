"""torch.utils.data.DataLoader on datasets of masked tensors, in a worker: a process that hands its batches over."""

from __future__ import annotations

import pytest
import torch

from collated_examples import (
    LAYOUTS,
    check_masks_and_storage,
    check_plain_among_masked,
    check_plain_batches,
    check_rows,
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_of_a_worker_keep_masks_and_storage(layout: torch.layout) -> None:
    check_masks_and_storage(layout, workers=1)


def test_a_plain_example_among_masked_ones_of_a_worker_is_valid_everywhere() -> None:
    check_plain_among_masked(workers=1)


def test_plain_batches_of_a_worker_are_torch_s_own() -> None:
    check_plain_batches(workers=1)


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_samples_of_a_batch_are_collated_to_the_batch(context: str) -> None:
    check_rows(context)
