"""Threads that start together and write to views of one masked tensor, in every way that it stores its mask."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
    "lengths": lambda: md.from_lengths(torch.zeros(THREADS, COLUMNS), torch.arange(THREADS) % COLUMNS).without_extent(),
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


def row(n: int) -> torch.Tensor:
    return torch.arange(THREADS)[:, None].expand(THREADS, COLUMNS) == n
