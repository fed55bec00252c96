"""The table in docs/distributed.md: which checks of table_of_collectives.py call each public function of torch.

``PYTHONPATH=tests/helpers python -m shown_collectives`` prints it.
"""

from __future__ import annotations

from collections.abc import Iterable

from table_of_collectives import CASES, CHECKS

STORAGES = {"dense": "dense", "coo": "COO", "csr": "CSR", "packed": "packed"}
WAYS = {"eager": "waited for", "async": "asynchronous", "functional": "functional"}
# Checks that are not named like the function, each in its column.
ELSEWHERE = {
    "send": {"eager": "send and recv, {}, eager"},
    "recv": {"eager": "send and recv, {}, eager"},
    "isend": {"async": "send and recv, {}, async"},
    "irecv": {"async": "send and recv, {}, async"},
    "batch_isend_irecv": {"async": "send and recv, {}, batch"},
}


def checks_of(function: str) -> dict[str, str]:
    """For each way of calling it the name of a check, in which the storage is left open."""
    if function in CASES:
        return {way: f"{function}, {{}}, {way}" for way in WAYS}
    return ELSEWHERE.get(function, {"eager": "objects, {}"})


def row(function: str) -> str:
    checks = checks_of(function)
    cells = [
        ", ".join(shown for storage, shown in STORAGES.items() if checks.get(way, "").format(storage) in CHECKS)
        for way in WAYS
    ]
    return f"| `{function}` | {' | '.join(cell or '—' for cell in cells)} |"


def table(functions: Iterable[str]) -> list[str]:
    """Lines of Markdown."""
    return [f"| | {' | '.join(WAYS.values())} |", "|---" * (1 + len(WAYS)) + "|", *map(row, functions)]


if __name__ == "__main__":
    from public_collectives import TESTED

    print("\n".join(table(TESTED)))
