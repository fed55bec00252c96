"""Memory that nobody wrote is never observed: no answer depends on what fresh memory happens to contain.

Every entry of torch's database, and every function, module and distribution that torch writes in Python, is called
twice, with two contents of uninitialised memory (tests/helpers/poisoned_memory.py). Valid values, masks, gradients and
errors agree. In the slow tests so they do in every storage, under every kind of mask, in place and with out=.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from allocating_composites import full_name, table
from op_registry import registry
from op_registry.authoring import ELEMENTWISE, Dense, masked_rule
from op_registry.conformance import find_subject
from op_registry.conformance.masks import PARTIAL, masking
from op_registry.conformance.python_level import names
from op_registry.conformance.python_level.trial import call_with, run
from op_registry.conformance.sample import Operator, Sample
from op_registry.conformance.samples import database, variants
from op_registry.conformance.trials import STORAGES, Settings, describe, storage_of, trials_of
from op_registry.report import python_level
from poisoned_memory import (
    POISONS,
    can_be_poisoned,
    difference,
    difference_of_trials,
    has_content,
    results_differ,
    uninitialised_bytes,
)
from repository import ROOT

pytestmark = [
    pytest.mark.skipif(
        not can_be_poisoned(), reason="uninitialised memory gets a content by mallopt(M_PERTURB), which glibc alone has"
    ),
]

SUBJECT = find_subject("masked_dispatch.conformance_subject:eager")
SHARDS = 8
ALLOCATING = ROOT / "tests/conformance/allocating_composites.expect"


def shards(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[n::SHARDS] for n in range(SHARDS)]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ------------------------------------------------------------------------------------------ torch's operator database


def dependent_trials(
    operator: Operator, settings: Settings, storage: str | None = None, explicit_invalid: bool = False
) -> list[str]:
    """The trials of an operator whose outcome depends on uninitialised memory, and how."""
    found = []
    for description, trial in trials_of(operator, "P3", SUBJECT, settings, storage is not None):
        if trial.plain_error is None:
            why = difference_of_trials(trial, storage, explicit_invalid)
            found += [f"{operator.name} {description} {storage or ''}: {why}"] if why else []
    return found


@pytest.mark.parametrize("shard", range(SHARDS))
def test_operators(shard: int) -> None:
    quick = Settings(most=1, masks=("half",))
    assert [d for name in shards(list(database()))[shard] for d in dependent_trials(database()[name], quick)] == []


THOROUGH = Settings(most=4, masks=PARTIAL)
STORED = Settings(most=4, most_stored=1, masks=("half", "slices"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(database()))
def test_operators_under_every_mask_and_in_every_storage(name: str) -> None:
    operator = database()[name]
    found = dependent_trials(operator, THOROUGH)
    for storage in STORAGES:
        if SUBJECT.can_store(storage_of(storage)[0]):
            found += dependent_trials(operator, STORED, storage, explicit_invalid=storage == "hybrid")
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("name", list(variants()))
def test_operators_in_place_and_with_out(name: str) -> None:
    assert dependent_trials(variants()[name], THOROUGH) == []


# ----------------------------------------------------------------------------------- what torch writes in Python


def dependent_calls(name: str, kinds: Sequence[str], most: int | None = None) -> list[str]:
    """The calls of a function of torch that depend on uninitialised memory, and how."""
    if python_level.reason_not_called(name):
        return []
    runs = (s for s in python_level.samples_of(name) if s.tensors and run(SUBJECT, call_with(s, copied)).error is None)
    found = []
    for sample, kind in itertools.product(itertools.islice(runs, most), kinds):
        why = difference(lambda s=sample, k=kind: run(SUBJECT, masked_call(s, k)), results_differ)
        found += [f"{name} {describe(sample, kind)}: {why}"] if why else []
    return found


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def masked_call(sample: Sample, kind: str) -> Callable[[], object]:
    """The call with its tensors of numbers under masks of that kind, and NaN there; other tensors stay plain."""
    masks = masking(kind, sample.tensors)
    assert masks is not None
    by_id = {id(t): m for t, m in zip(sample.tensors, masks.full(sample.tensors), strict=True)}

    def masked(tensor: Tensor) -> Tensor:
        mask = by_id[id(tensor)]
        if mask is None or not tensor.is_floating_point():
            return copied(tensor)
        return SUBJECT.wrap(torch.where(mask, tensor, torch.nan), mask)

    return call_with(sample, masked)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_python_functions(shard: int) -> None:
    assert [d for name in shards(names.all_names())[shard] for d in dependent_calls(name, ["slices"], 1)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", names.all_names())
def test_python_functions_under_every_mask(name: str) -> None:
    kinds = [kind for kind in PARTIAL if not kind.startswith("half_")]
    assert dependent_calls(name, kinds) == []


# -------------------------------------------------------------------------------------------- what allocates at all


@pytest.mark.slow
def test_the_composites_that_allocate_are_those_that_are_known() -> None:
    """A new one is put to the tests above only if it has a sample: look at it, then write the file again."""
    assert table() == ALLOCATING.read_text(encoding="utf-8")


def test_every_function_that_allocates_is_called() -> None:
    lines = [line.partition(":")[0] for line in ALLOCATING.read_text(encoding="utf-8").splitlines()]
    functions = [name for name in lines if not name.startswith("aten.")]
    assert len(functions) > 100
    assert set(functions) <= set(map(full_name, names.all_names()))


# ------------------------------------------------------------------------------------------- the instrument itself


@pytest.mark.parametrize("make", [
    lambda: torch.empty(3),
    lambda: torch.ones(3).new_empty(2, 2),
    lambda: torch.empty_like(torch.ones(3, dtype=torch.int64)),
    lambda: torch.empty_strided((2, 3), (3, 1)),
    lambda: torch.empty(0).resize_(4),
])  # fmt: skip
def test_every_way_to_allocate_gets_the_content(make: Callable[[], Tensor]) -> None:
    for byte in POISONS:
        with uninitialised_bytes(byte):
            assert has_content(make(), byte)


def test_the_trial_sees_a_rule_that_reads_fresh_memory() -> None:
    with registry.overlay() as mine:
        mine.withdraw(torch.ops.aten.exp.default)

        @masked_rule(torch.ops.aten.exp.default, category=ELEMENTWISE)
        def exp(self: Dense) -> Dense:
            return Dense(torch.empty_like(self.data), self.validity)

        found = dependent_trials(database()["exp"], Settings(most=1, masks=("half",)))
    assert len(found) == 1
    assert "values differ" in found[0]


def test_the_trial_sees_a_function_that_reads_fresh_memory() -> None:
    def into_a_plain_buffer(x: Tensor) -> Tensor:
        buffer = torch.empty(x.shape)
        buffer.copy_(x)
        return buffer

    sample = Sample(into_a_plain_buffer, (torch.ones(4),), {}, 0, torch.float32)
    assert "values differ" in (difference(lambda: run(SUBJECT, masked_call(sample, "half")), results_differ) or "")


def test_a_masked_buffer_that_nobody_wrote_has_nothing_to_observe() -> None:
    def sums() -> tuple[object, ...]:
        x = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
        buffer = x.new_empty(4)
        buffer[1:3] = x[1:]
        return buffer.get_mask().tolist(), buffer.sum().item()

    assert difference(sums, lambda a, b: None if a == b else f"{a} and {b}") is None
