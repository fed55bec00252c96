"""Writes of several threads to views of one masked tensor: no write of values or validity is lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import masked_dispatch as md
from writing_threads import COLUMNS, STARTS, THREADS, F, all_at_once, invalid, mask, row, write_and_look


@pytest.mark.parametrize("start", STARTS)
def test_no_write_to_a_view_of_ones_own_is_lost(start: str) -> None:
    write_and_look(start, rounds=3, writes=30)


@pytest.mark.parametrize("start", STARTS)
def test_the_first_write_makes_one_family(start: str) -> None:
    """Every thread makes the first view, and the first write, of a tensor that has neither."""
    for _ in range(40):
        x = STARTS[start]()
        all_at_once(lambda n, x=x: x[n].fill_(1.0))  # type: ignore[misc]
        assert x.get_mask().all()
        x = STARTS[start]()
        all_at_once(lambda n, x=x: x[n, n % COLUMNS].copy_(invalid()))  # type: ignore[misc]
        assert not x.get_mask()[range(THREADS), [n % COLUMNS for n in range(THREADS)]].any()


@pytest.mark.parametrize("start", STARTS)
def test_overlapping_views(start: str) -> None:
    """Columns and rows, all written with the same: whoever is last, everything is valid."""
    for _ in range(20):
        x = STARTS[start]()
        all_at_once(lambda n, x=x: (x[n] if n % 2 else x[:, n % COLUMNS :]).fill_(1.0))  # type: ignore[misc]
        assert x.get_mask().all()
        assert (x == 1).to_tensor(F).all()


def test_copies_in_threads_are_of_one_family() -> None:
    for _ in range(40):
        x = STARTS["own mask"]()
        all_at_once(lambda n, x=x: copy.copy(x)[n].fill_(1.0))  # type: ignore[misc]
        assert x.get_mask().all()


# ------------------------------------------------------------------------------------------- in-place operations


def value(n: int) -> md.MaskedTensor:
    """What thread n writes, of which every other element is invalid."""
    return md.masked_tensor(torch.full((1, COLUMNS), n + 1.0), (torch.arange(COLUMNS) % 2 == n % 2)[None])


ROW_WRITES: dict[str, Callable[[torch.Tensor, int], object]] = {
    "x[n] =": lambda x, n: x.__setitem__(n, value(n)[0]),
    "x[n:n+1] =": lambda x, n: x.__setitem__(slice(n, n + 1), value(n)),
    "x[tensor] =": lambda x, n: x.__setitem__(torch.tensor([n]), value(n)),
    "x[mask] =": lambda x, n: x.__setitem__(row(n), value(n)[0]),
    "view": lambda x, n: x[n : n + 1].add_(value(n)),
    "index_copy_": lambda x, n: x.index_copy_(0, torch.tensor([n]), value(n)),
    "index_add_": lambda x, n: x.index_add_(0, torch.tensor([n]), value(n)),
    # (A masked number, because torch's own write of a plain one to a plain tensor takes no lock.)
    "index_fill_": lambda x, n: x.index_fill_(0, torch.tensor([n]), value(n)[0, n % 2]),
    "scatter_": lambda x, n: x.scatter_(0, torch.full((1, COLUMNS), n), value(n)),
    "scatter_add_": lambda x, n: x.scatter_add_(0, torch.full((1, COLUMNS), n), value(n)),
    "masked_scatter_": lambda x, n: x.masked_scatter_(row(n), value(n)),
    "masked_fill_": lambda x, n: x.masked_fill_(row(n), value(n)[0, n % 2]),
    "put_": lambda x, n: x.put_(torch.arange(COLUMNS) + n * COLUMNS, value(n)[0]),
}
TARGETS: dict[str, Callable[[], torch.Tensor]] = {**STARTS, "plain": lambda: torch.zeros(THREADS, COLUMNS)}


def some_write(n: int) -> Callable[[torch.Tensor, int], object]:
    return list(ROW_WRITES.values())[n % len(ROW_WRITES)]


@pytest.mark.parametrize("write", [*ROW_WRITES, "all kinds"])
@pytest.mark.parametrize("target", TARGETS)
def test_rows_written_in_place_by_many_threads(target: str, write: str) -> None:
    for _ in range(8):
        x, expected = TARGETS[target](), TARGETS[target]()

        def work(n: int, x: torch.Tensor = x) -> None:
            with md.updates("silent"):
                (ROW_WRITES.get(write) or some_write(n))(x, n)

        for n in range(THREADS):
            work(n, expected)
        all_at_once(work)
        assert torch.equal(x, expected)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.jagged], ids=str)
def test_rows_of_sparse_storage_written_by_many_threads(layout: torch.layout) -> None:
    for _ in range(8):
        x, expected = (STARTS["own mask"]().to_layout(layout) for _ in range(2))
        for n in range(THREADS):
            expected[n] = value(n)[0]
        all_at_once(lambda n, x=x: x.__setitem__(n, value(n)[0]))  # type: ignore[misc]
        assert torch.equal(x, expected)


def test_two_tensors_that_add_each_other() -> None:
    """Each is read while the other is written: nobody waits for somebody who waits for them."""
    for _ in range(20):
        x, y = STARTS["own mask"](), STARTS["own mask"]()
        all_at_once(lambda n, x=x, y=y: x.add_(y) if n % 2 else y.add_(x))  # type: ignore[misc]
        assert torch.equal(x.get_mask(), mask())


READS: dict[str, Callable[[Any], object]] = {
    "exp": lambda x: x.exp(),
    "x * 2": lambda x: x * 2,
    "x + x": lambda x: x + x,
    "sum": lambda x: x.sum(1),
    "to_dense": lambda x: x.to_dense(),
    "repr": repr,
    "linear": lambda x: x @ torch.ones(COLUMNS, 2),
    "with a derivative": lambda x: (x.detach().requires_grad_() * 2).sum(),
    "pickle": lambda x: pickle.dumps(x),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.jagged], ids=str)
def test_a_reader_of_sparse_storage_sees_what_one_write_stored(layout: torch.layout, read: str) -> None:
    """Writes that store other numbers of elements, one after the other; parts of two would not fit each other."""
    few, x = STARTS["own mask"]().to_layout(layout), STARTS["own mask"]().to_layout(layout)

    def work(n: int) -> None:
        for _ in range(20):
            if n == 0:
                x.fill_(1.0)
                x.copy_(few)
            else:
                READS[read](x)

    all_at_once(work)
