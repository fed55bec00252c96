"""Writes of several threads to views of one masked tensor: no write of values or validity is lost."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch

import masked_dispatch as md

T, F = True, False
THREADS, COLUMNS = 8, 6


def mask() -> torch.Tensor:
    return torch.arange(THREADS * COLUMNS).reshape(THREADS, COLUMNS) % 3 > 0


STARTS: dict[str, Callable[[], md.MaskedTensor]] = {
    "own mask": lambda: md.masked_tensor(torch.zeros(THREADS, COLUMNS), mask()),
    "the caller's mask": lambda: md.as_masked_tensor(torch.zeros(THREADS, COLUMNS), mask()),
    "no mask": lambda: md.masked_tensor(torch.zeros(THREADS, COLUMNS)),
    "broadcast mask": lambda: md.masked_tensor(torch.zeros(THREADS, COLUMNS), mask()[:1]),
    "lengths": lambda: md.from_lengths(torch.zeros(THREADS, COLUMNS), torch.arange(THREADS) % COLUMNS),
    "shared memory": lambda: md.masked_tensor(torch.zeros(THREADS, COLUMNS), mask()).share_memory_(),
}


def all_at_once(work: Callable[[int], None]) -> None:
    """`work` of 0 … 7 in eight threads that start together; what one raises is raised here."""
    start, errors = threading.Barrier(THREADS), list[BaseException]()

    def run(n: int) -> None:
        start.wait()
        try:
            work(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def invalid() -> md.MaskedTensor:
    return md.masked_tensor(torch.tensor(float("nan")), torch.tensor(F))


def write_and_look(start: str, rounds: int, writes: int) -> None:
    """Each thread writes to its row, while results of the whole make the next write copy the validity."""
    for _ in range(rounds):
        x = STARTS[start]()
        results = list[tuple[torch.Tensor, list[object]]]()

        def work(n: int, x: md.MaskedTensor = x, results: list = results) -> None:  # type: ignore[type-arg]
            nothing, column = invalid(), n % COLUMNS
            for i in range(writes):
                row = x[n]
                row[column] = nothing if i % 2 else float(i)
                assert bool(row.get_mask()[column]) == (i % 2 == 0), (n, i)
                if n == 0 and i % 3 == 0:
                    y = x + 1
                    results.append((y, y.get_mask().tolist()))
            x[n].fill_(float(n))

        all_at_once(work)
        assert x.get_mask().all()
        assert torch.equal(x.to_tensor(-1), torch.arange(float(THREADS))[:, None].expand(THREADS, COLUMNS))
        last, kept = results[-1]
        assert isinstance(last, md.MaskedTensor)
        assert last.get_mask().tolist() == kept


@pytest.mark.parametrize("start", STARTS)
def test_no_write_to_a_view_of_ones_own_is_lost(start: str) -> None:
    write_and_look(start, rounds=3, writes=30)


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_no_write_of_a_hundred_thousand_is_lost(start: str) -> None:
    write_and_look(start, rounds=1, writes=100_000)


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
