"""Every public function of torch.distributed that takes a tensor is in the table of collectives, as the docs show."""

from __future__ import annotations

import inspect

import pytest
from torch import distributed

from repository import ROOT
from table_of_collectives import CASES, CHECKS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# In the newer of the versions that are supported.
NEW = {"all_gather_single", "gather_into_tensor", "gather_single", "reduce_scatter_single"}
# Parameters by which a function is known to take tensors, or what may contain some.
OF_TENSORS = ("tensor", "input", "output", "object", "obj", "p2p_op")
STORAGES = {"dense": "dense", "coo": "COO", "csr": "CSR", "packed": "packed"}
WAYS = ("eager", "async", "functional")  # the columns of the table
# For each function and each way of calling it the name of a check, in which the storage is left open.
ASKED = {
    **{name: {way: f"{name}, {{}}, {way}" for way in WAYS} for name in CASES if " " not in name},
    **{name: {"eager": "send and recv, {}, eager"} for name in ("send", "recv")},
    **{name: {"async": "send and recv, {}, async"} for name in ("isend", "irecv")},
    "batch_isend_irecv": {"async": "send and recv, {}, batch"},
    **{name: {"eager": "objects, {}"} for name in ("all_gather_object", "gather_object", "broadcast_object_list")},
    **{name: {"eager": "objects, {}"} for name in ("scatter_object_list", "send_object_list", "recv_object_list")},
}


def takes_tensors(name: str) -> bool:
    function = getattr(distributed, name)
    if not inspect.isfunction(function) or not function.__module__.startswith("torch.distributed"):
        return False
    return any(
        parameter.removeprefix("scatter_").startswith(OF_TENSORS)
        for parameter in inspect.signature(function).parameters
    )


def public() -> set[str]:
    """Those of the torch that is installed."""
    return {name for name in dir(distributed) if not name.startswith("_") and takes_tensors(name)}


def row(function: str) -> str:
    """A line of Markdown."""
    checks = [ASKED[function].get(way, "") for way in WAYS]
    cells = [[shown for storage, shown in STORAGES.items() if check.format(storage) in CHECKS] for check in checks]
    return f"| `{function}` | {' | '.join(', '.join(cell) or '—' for cell in cells)} |"


def test_every_function_is_asked() -> None:
    functions = public()
    assert functions - ASKED.keys() == set()
    assert ASKED.keys() - functions <= NEW
    assert [name for name in functions if "dense" not in row(name)] == []


def test_the_table_in_the_docs_is_that_of_the_checks() -> None:
    text = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    shown = text.partition("| | waited for |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line.split("`")[1] for line in shown] == sorted(ASKED)
    assert [row(name) for name in sorted(public()) if row(name) not in shown] == []
