"""Memory that nobody wrote is never observed: no answer depends on what fresh memory happens to contain.

Every entry of torch's database, and every function, module and distribution that torch writes in Python, is called
twice, with two contents of uninitialised memory (tests/helpers/uninitialised_memory.py). Valid values, masks, gradients
and errors agree. In the slow tests so they do in every storage, under every kind of mask, in place and with out=.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from allocating_composites import full_name
from op_registry import registry
from op_registry.authoring import ELEMENTWISE, Dense, masked_rule
from op_registry.conformance import python_level as names
from op_registry.conformance.python_level import run
from op_registry.conformance.sample import Sample
from op_registry.conformance.samples import database
from op_registry.conformance.trials import Settings
from uninitialised_memory import (
    ALLOCATING,
    POISONS,
    SUBJECT,
    can_be_poisoned,
    dependent_calls,
    dependent_trials,
    difference,
    has_content,
    masked_call,
    results_differ,
    uninitialised_bytes,
)

pytestmark = [
    pytest.mark.skipif(
        not can_be_poisoned(), reason="uninitialised memory gets a content by mallopt(M_PERTURB), which glibc alone has"
    ),
]
SHARDS = 8


def shards(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[n::SHARDS] for n in range(SHARDS)]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ------------------------------------------------------------------------------------------ torch's operator database


@pytest.mark.parametrize("shard", range(SHARDS))
def test_operators(shard: int) -> None:
    quick = Settings(most=1, masks=("half",))
    assert [d for name in shards(list(database()))[shard] for d in dependent_trials(database()[name], quick)] == []


# ----------------------------------------------------------------------------------- what torch writes in Python


@pytest.mark.parametrize("shard", range(SHARDS))
def test_python_functions(shard: int) -> None:
    assert [d for name in shards(names.all_names())[shard] for d in dependent_calls(name, ["slices"], 1)] == []


# -------------------------------------------------------------------------------------------- what allocates at all


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
