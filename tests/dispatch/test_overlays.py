"""An overlay holds for the thread or task that opened it, and for the backward of what ran in it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from constant_rules import constant, in_thread
from op_registry import registry
from op_registry.authoring import Dense, Rule, elementwise, reduction
from op_registry.laws.categories import REDUCTION
from op_registry.sparse.lowering import first_of, never
from op_registry.sparse.record import Sparse

aten = torch.ops.aten


def ones(*shape: int, requires_grad: bool = False) -> Tensor:
    return md.masked_tensor(torch.ones(shape), requires_grad=requires_grad)


def exp_of_one() -> float:
    return round(ones().exp().item(), 3)


def test_another_thread_has_its_own_meanings() -> None:
    with registry.overlay() as mine:
        mine.replace(aten.exp.default, constant(42))
        assert exp_of_one() == 42
        assert in_thread(exp_of_one) == 2.718
    assert exp_of_one() == 2.718


def test_overlays_of_two_threads_at_once() -> None:
    barrier = threading.Barrier(2)
    found: dict[float, list[float]] = {1.0: [], 2.0: []}

    def run(value: float) -> None:
        with registry.overlay() as mine:
            mine.replace(aten.exp.default, constant(value))
            for _ in range(20):
                barrier.wait()
                found[value].append(exp_of_one())

    threads = [threading.Thread(target=run, args=(value,)) for value in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1.0: [1.0] * 20, 2.0: [2.0] * 20}


def test_overlays_of_two_tasks_at_once() -> None:
    async def task(value: float) -> list[float]:
        found = []
        with registry.overlay() as mine:
            mine.replace(aten.exp.default, constant(value))
            for _ in range(3):
                await asyncio.sleep(0)
                found.append(exp_of_one())
        return [*found, exp_of_one()]

    async def both() -> list[list[float]]:
        return await asyncio.gather(task(1.0), task(2.0))

    assert asyncio.run(both()) == [[1.0, 1.0, 1.0, 2.718], [2.0, 2.0, 2.0, 2.718]]


def test_overlays_that_end_in_the_order_in_which_they_began() -> None:
    version = registry.version
    first, second = registry.overlay(), registry.overlay()
    first.__enter__().replace(aten.exp.default, constant(1))
    second.__enter__().replace(aten.exp.default, constant(2))
    assert exp_of_one() == 2
    first.__exit__(None, None, None)
    assert exp_of_one() == 2
    second.__exit__(None, None, None)
    assert (exp_of_one(), registry.version) == (2.718, version)


def test_an_inner_overlay_goes_first_and_leaves_the_outer_one() -> None:
    with registry.overlay() as outer:
        outer.replace(aten.exp.default, constant(1))
        outer.replace(aten.cos.default, constant(5))
        with registry.overlay() as inner:
            inner.replace(aten.exp.default, constant(2))
            assert (exp_of_one(), ones().cos().item()) == (2, 5)
            outer.replace(aten.exp.default, constant(3))  # shadowed until the inner one ends
            assert exp_of_one() == 2
        assert exp_of_one() == 3


def test_an_operator_may_lose_its_rule_inside() -> None:
    with registry.overlay() as mine:
        mine.withdraw(aten.exp.default)
        assert aten.exp.default not in registry
        with pytest.raises(md.MaskedSemanticsError, match=r"torch\.exp has no masked meaning"):
            ones().exp()
    assert exp_of_one() == 2.718


# --------------------------------------------------------------------------------------------------------- backward


def ten_times(x: Dense, **options: Any) -> Dense:
    return x.like(10 * x.data)


def written(row: Tensor) -> Tensor:
    """A table into which `row` was written; the backward of the write clones the row's part of a masked gradient."""
    table = ones(4, 3, requires_grad=True) * 2
    table[0] = row
    return table * 1


def test_the_backward_of_what_ran_inside_has_its_meanings_wherever_it_runs() -> None:
    row = ones(3, requires_grad=True)
    with registry.overlay() as mine:
        mine.replace(aten.clone.default, ten_times)
        inside = written(row)
        inside.backward(torch.ones(4, 3), retain_graph=True)
        assert row.grad.tolist() == [10.0, 10.0, 10.0]
    row.grad = None
    inside.backward(torch.ones(4, 3), retain_graph=True)
    assert row.grad.tolist() == [10.0, 10.0, 10.0]
    row.grad = None
    in_thread(lambda: inside.backward(torch.ones(4, 3)))
    assert row.grad.tolist() == [10.0, 10.0, 10.0]


def test_the_backward_of_what_ran_outside_has_the_meanings_from_there() -> None:
    row = ones(3, requires_grad=True)
    outside = written(row)
    with registry.overlay() as mine:
        mine.replace(aten.clone.default, ten_times)
        outside.backward(torch.ones(4, 3))
        assert row.grad.tolist() == [1.0, 1.0, 1.0]
        assert ones(3).clone().tolist() == [10.0, 10.0, 10.0]


def test_no_overlay_changes_the_backward_of_a_view() -> None:
    """Its formula, a sum for expand, runs on plain gradients, as that of every rule does."""
    x = ones(1, 3, requires_grad=True)
    with registry.overlay() as mine:
        mine.replace(aten.sum.dim_IntList, constant(100))
        inside = x.expand(4, 3) * 2
        inside.backward(torch.ones(4, 3))
    assert x.grad.tolist() == [[8.0, 8.0, 8.0]]


def test_gradients_that_the_engine_adds_are_accumulated_whatever_add_means() -> None:
    with registry.overlay() as mine:
        mine.replace(aten.add.Tensor, lambda x, y, alpha=1: constant(100)(x))
        x = md.masked_tensor(torch.ones(3), torch.tensor([True, True, False]), requires_grad=True)
        (x * x).sum().backward()
        assert (x + x).to_tensor(0).tolist() == [100, 100, 0]
    assert x.grad.to_tensor(-1).tolist() == [2, 2, -1]


# --------------------------------------------------------------------------------------------------------- compiled


def test_versions_are_of_what_rules_do() -> None:
    def version_with(rule: Any) -> str:
        with registry.overlay() as mine:
            mine.replace(aten.exp.default, rule)
            return registry.version

    assert version_with(constant(1)) == version_with(constant(1))
    assert version_with(constant(1)) != version_with(constant(2))
    tensor = torch.ones(2)  # of which nothing tells what it is
    assert version_with(lambda x: x.like(x.data * tensor)) != version_with(lambda x: x.like(x.data * tensor))


# ------------------------------------------------------------------------------------------------- lowerings of rules


@contextlib.contextmanager
def operator(name: str, function: Callable[..., Any]) -> Any:
    """An operator of a stranger's library, and an overlay to register it in."""
    with torch.library._scoped_library("overlays", "FRAGMENT") as library, registry.overlay():
        library.define(name)
        bare = name.partition("(")[0]
        library.impl(bare, function, "CompositeExplicitAutograd")
        yield getattr(torch.ops.overlays, bare)


def test_a_strangers_operator_is_not_taken_for_torchs_of_that_name() -> None:
    with operator("mean(Tensor x, int dim) -> Tensor", lambda x, dim: x.prod(dim)) as mean:
        reduction(mean, identity=1)
        x = md.masked_tensor(
            [[2.0, 3.0, 5.0], [7.0, 11.0, 0.0]], torch.tensor([[True, True, True], [True, True, False]])
        )
        for stored in (x, x.to_sparse(), x.to_sparse_csr(), x.to_sparse_bsr((1, 3)), x.to_packed()):
            assert mean(stored, 1).tolist() == [30.0, 77.0]


def test_a_strangers_lowering_is_seen_by_the_short_way_too() -> None:
    with operator("shifted(Tensor x) -> Tensor", lambda x: x + 1) as shifted:
        rule = elementwise(shifted)
        x = ones(2, 3).to_sparse_csr()
        assert shifted(x).to_tensor(0).tolist() == [[2, 2, 2], [2, 2, 2]]
        version = registry.version

        @rule.lowering(Sparse)
        def shifted_sparsely(op: Any, x: Sparse) -> Sparse:
            return x.like(x.values.like(x.values.data + 100))

        assert registry.version != version
        assert shifted(x).to_tensor(0).tolist() == [[101, 101, 101], [101, 101, 101]]


def test_a_rule_that_is_replaced_takes_its_lowerings_along() -> None:
    x = md.masked_tensor(torch.eye(2), torch.eye(2) > 0).to_sparse_csr()
    with registry.overlay() as mine:
        rule = mine.replace(aten.mm.default, lambda x, y: Dense(torch.full((2, 2), 9.0)))
        assert Sparse not in rule.lowerings
        assert x.mm(torch.ones(2, 2)).tolist() == [[9, 9], [9, 9]]
    assert x.mm(torch.ones(2, 2)).tolist() == [[1, 1], [1, 1]]


def test_alternatives_are_written_in_one_place() -> None:
    rule = Rule((aten.exp.default,), REDUCTION, constant(0), takes_op=False, where="here")
    rule.lowering(Sparse)(first_of(never("a"), never("b")))
    with pytest.raises(ValueError, match=r"exp already has a lowering to Sparse\. List alternatives in one place"):
        rule.lowering(Sparse)(never("c"))


def test_what_a_rule_is_composed_of_is_the_books() -> None:
    """trace of sparse storage is written with sum; another meaning of sum changes it no more than on dense storage."""
    x = md.masked_tensor(torch.eye(3))
    with registry.overlay() as mine:
        mine.replace(aten.sum.default, lambda x, **options: Dense(torch.tensor(42.0)))
        assert x.to_sparse().sum().item() == x.sum().item() == 42
        assert x.to_sparse().trace().item() == x.trace().item() == 3
