"""Batches that a DataLoader makes of masked examples, in this process or in workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import masked_dispatch as md
from kinds_of_extents import FORMS, LENGTHS, STORED
from kinds_of_extents import same as same_extents

LAYOUTS = [torch.strided, torch.sparse_coo, torch.sparse_csr]


def example(i: int) -> md.MaskedTensor:
    """2 × 3 with NaN under the mask, which is another one for odd numbers."""
    mask = torch.tensor([[True, False, True], [i % 2 == 0, True, True]])
    return md.masked_tensor(torch.where(mask, torch.arange(6.0).reshape(2, 3) + i, float("nan")), mask)


class Examples(Dataset[Any]):
    """Six examples, each made by `make` of its number."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


def loaded(make: Callable[[int], Any], workers: int) -> list[Any]:
    return list(DataLoader(Examples(make), batch_size=3, num_workers=workers))


def same(found: Tensor, first: int) -> None:
    """Three examples one above the other, with the masks that they had."""
    assert isinstance(found, md.MaskedTensor)
    expected = torch.stack([example(i) for i in range(first, first + 3)])
    assert torch.equal(found.get_mask(), expected.get_mask())
    assert torch.equal(found.to_tensor(0), expected.to_tensor(0))


def check_masks_and_storage(layout: torch.layout, workers: int) -> None:
    def make(i: int) -> dict[str, Any]:
        return {"x": example(i).to_layout(layout), "label": i}

    for first, batch in zip((0, 3), loaded(make, workers), strict=True):
        same(batch["x"], first)
        assert batch["x"].storage_layout is layout
        assert batch["label"].tolist() == [first, first + 1, first + 2]


def check_plain_among_masked(workers: int) -> None:
    for batch in loaded(lambda i: torch.full((2, 3), 7.0) if i % 3 == 0 else example(i), workers):
        assert isinstance(batch, md.MaskedTensor)
        assert batch.get_mask()[0].all()
        assert batch.get_mask()[1:].sum() == 9
        assert (batch[0] == 7).to_tensor(False).all()


def check_plain_batches(workers: int) -> None:
    for batch in loaded(lambda i: torch.full((2, 3), float(i)), workers):
        assert type(batch) is Tensor
        assert batch.is_shared() == bool(workers)


def check_rows(context: str | None) -> None:
    """Samples that were taken from a batch are the batch again: in this process, or in a worker started so."""
    batches = {
        f"{form}, {storage}": stored(make(LENGTHS))
        for form, make in FORMS.items()
        for storage, stored in STORED.items()
    }
    rows = [{name: x[i] for name, x in batches.items()} for i in range(len(LENGTHS))]
    workers = int(context is not None)
    loader: Any = DataLoader(rows, batch_size=len(rows), num_workers=workers, multiprocessing_context=context)  # type: ignore[arg-type]
    (batch,) = loader
    for name, x in batches.items():
        same_extents(batch[name].to_dense(), x.to_dense())
