"""Memory that nobody wrote is never observed: in every storage, under every kind of mask, in place and with out=."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from allocating_composites import table
from op_registry.conformance import python_level as names
from op_registry.conformance.masks import ITSELF, PARTIAL, SHARED
from op_registry.conformance.samples import database, variants
from op_registry.conformance.trials import STORAGES, Settings, storage_of
from uninitialised_memory import ALLOCATING, SUBJECT, can_be_poisoned, dependent_calls, dependent_trials

pytestmark = [
    pytest.mark.skipif(
        not can_be_poisoned(), reason="uninitialised memory gets a content by mallopt(M_PERTURB), which glibc alone has"
    ),
]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


THOROUGH = Settings(most=4, masks=PARTIAL)
STORED = Settings(most=4, most_stored=1, masks=("half", "slices"))


@pytest.mark.parametrize("name", list(database()))
def test_operators_under_every_mask_and_in_every_storage(name: str) -> None:
    operator = database()[name]
    found = dependent_trials(operator, THOROUGH)
    for storage in STORAGES:
        if SUBJECT.can_store(storage_of(storage)[0]):
            found += dependent_trials(operator, STORED, storage, explicit_invalid=storage == "hybrid")
    assert found == []


@pytest.mark.parametrize("name", list(variants()))
def test_operators_in_place_and_with_out(name: str) -> None:
    assert dependent_trials(variants()[name], THOROUGH) == []


@pytest.mark.parametrize("name", names.all_names())
def test_python_functions_under_every_mask(name: str) -> None:
    kinds = [kind for kind in PARTIAL if not kind.startswith("half_") and kind not in (SHARED, ITSELF)]
    assert dependent_calls(name, kinds) == []


def test_the_composites_that_allocate_are_those_that_are_known() -> None:
    """A new one is put to the tests above only if it has a sample: look at it, then write the file again."""
    assert table() == ALLOCATING.read_text(encoding="utf-8")
