"""Every public function of torch.distributed that takes a tensor: where its meaning for masked ones is tested."""

from __future__ import annotations

import pytest

from public_collectives import TESTED, public_functions
from repository import ROOT
from shown_collectives import table

# In the newer of the versions that are supported.
NEW = {"all_gather_single", "gather_into_tensor", "gather_single", "reduce_scatter_single"}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_function_is_tested() -> None:
    found = public_functions()
    assert found - set(TESTED) == set()
    assert set(TESTED) - found <= NEW


@pytest.mark.parametrize("name", TESTED)
def test_its_checks_exist(name: str) -> None:
    from all_collectives import CHECKS  # loads all of torch.distributed

    assert TESTED[name]
    assert set(TESTED[name]) <= set(CHECKS)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_table_in_the_docs_is_that_of_the_checks() -> None:
    text = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    shown = text.partition("| | waited for |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line.split("`")[1] for line in shown] == list(TESTED)
    assert [row for row in table(TESTED)[2:] if row not in shown and row.split("`")[1] in public_functions()] == []
