"""Kernels are made when they are first called, and exchanged while others call them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

import masked_dispatch as md
from called_operators import aten_overloads
from masked_dispatch.dispatch.kernel_table import Kernel, KernelTable, kernel_table
from masked_dispatch.dispatch.ladder import WITHOUT_KERNEL
from masked_dispatch.torch_internals import aten_names
from op_registry.rule import in_dispatcher, takes_tensor

NAME = "masked_dispatch_places::f"


@pytest.fixture
def op() -> Iterator[OpOverload]:
    library = Library("masked_dispatch_places", "DEF")
    library.define("f(Tensor x) -> Tensor")
    yield torch.ops.masked_dispatch_places.f.default
    library._destroy()


def adding(number: int) -> Kernel:
    return lambda keyset, x: x + number


def total(op: OpOverload) -> float:
    return op(md.masked_tensor(torch.zeros(1), None)).item()


def test_every_overload_that_takes_a_tensor_is_served() -> None:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if not name.startswith("__")]
    overloads = [getattr(p, name) for p in packets if hasattr(p, "overloads") for name in p.overloads()]
    wanted = {op.name() for op in overloads if takes_tensor(op) and in_dispatcher(op)}
    assert wanted - set(aten_names()) == set()
    assert not any(not takes_tensor(op) for op in aten_overloads())
    assert {op for op in aten_overloads() if op not in kernel_table} == set(WITHOUT_KERNEL)


def test_a_kernel_is_made_once(op: OpOverload) -> None:
    table, made = KernelTable(), []

    def make(op: OpOverload) -> Kernel:
        made.append(op)
        return adding(1)

    table.serve([NAME], make)
    assert op in table
    assert table.made == []
    assert [total(op), total(op)] == [1, 1]
    assert made == table.made == [op]


def test_a_kernel_that_is_put_before_the_first_call_is_called(op: OpOverload) -> None:
    table = KernelTable()
    table.serve([NAME], lambda op: adding(1))
    table.put(op, adding(2))
    assert total(op) == 2


def test_a_kernel_that_is_made_while_somebody_watches_is_watched(op: OpOverload) -> None:
    table, seen = KernelTable(), []

    def watch(op: OpOverload, kernel: Kernel, before_arguments: int) -> Kernel:
        def watched(*args: Any) -> Tensor:
            seen.append((op, before_arguments))
            return kernel(*args)

        return watched

    table.serve([NAME], lambda op: adding(1))
    table.watch(watch)
    assert total(op) == 1
    assert seen == [(op, 1)]
    table.unwatch()
    assert total(op) == 1
    assert len(seen) == 1


def test_who_asks_what_is_made_waits_for_what_is_being_made(op: OpOverload) -> None:
    """Otherwise a rule that changes meanwhile would change no kernel, and the one that is being made go by the old."""
    table, making, changed = KernelTable(), threading.Event(), threading.Event()

    def make(op: OpOverload) -> Kernel:
        making.set()
        assert not changed.wait(0.2), "the rule's listener did not wait"
        return adding(1)

    def change() -> None:
        making.wait()
        if op in table.made:
            table.put(op, adding(2))
        changed.set()

    table.serve([NAME], make)
    with contextlib.ExitStack() as stack:
        thread = threading.Thread(target=change)
        thread.start()
        stack.callback(thread.join)
        assert total(op) == 1
    assert total(op) == 2
