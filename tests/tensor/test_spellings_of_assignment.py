"""``x[i] = v`` assigns, in every spelling: index, value, target, mode (masked_dispatch/assumptions/assignments.py)."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import masked_dispatch as md
from masked_dispatch.assumptions.assignments import INDICES, TARGETS, VALUES, tried


@pytest.mark.parametrize("target", TARGETS)
def test_every_value_is_assigned(target: str) -> None:
    found = tried("eager", target)
    assert (found.calls, found.refused, found.wrong) == (len(VALUES) * len(INDICES), (), ())


def test_a_wrong_assignment_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(md.MaskedTensor, "__setitem__", lambda x, index, value: x.fill_(value))
    found = tried("eager", "strided", ["a float"])
    assert len(found.wrong) > 20
    assert found.wrong[0].startswith("strided, eager: x[integer] = a float: found masked_tensor([[0.5000, ")


@pytest.mark.parametrize("fill", [lambda x, m: x.masked_fill_(m, -1.0), lambda x, m: x.masked_fill(m, -1.0)])
def test_filling_by_name_is_elementwise(fill) -> None:
    x = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    assert fill(x, torch.tensor([True, True, False])).get_mask().tolist() == [True, False, True]
    assert x.index_fill(0, torch.tensor([1]), -1.0).get_mask().tolist() == [True, False, True]
    assert x.index_fill_(0, torch.tensor([1]), -1.0).get_mask().tolist() == [True, False, True]


@pytest.mark.parametrize("stored", [lambda x: x, lambda x: x.to_sparse()])
def test_a_number_that_the_dtype_cannot_hold_is_refused_as_in_torch(stored) -> None:
    x = stored(md.masked_tensor(torch.ones(3, dtype=torch.int8), torch.tensor([True, False, True])))
    with pytest.raises(RuntimeError, match="value cannot be converted to type int8"):
        x[[0]] = 300


def test_a_boolean_that_depends_on_the_batch_is_assigned_to_under_vmap() -> None:
    x = md.masked_tensor(torch.ones(2, 3), torch.tensor([[True, False, True], [False, False, True]]))

    def imputed(row: md.MaskedTensor) -> md.MaskedTensor:
        row = row.clone()
        row[~row.get_mask()] = 0.0
        return row

    assert md.functional.vmap(imputed)(x).tolist() == [[1, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize("index", [torch.tensor([False, True, False]), [1], torch.tensor([1]), 1, slice(1, 2)])
def test_past_the_class_a_number_is_written_by_the_operator_that_torch_chooses(index) -> None:
    """Only the caller's frame tells that call from one of masked_fill_ by name, so it is no assignment either."""
    by_name = []

    class Chosen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            by_name.append(func.overloadpacket in (torch.ops.aten.masked_fill_, torch.ops.aten.index_fill_))
            return func(*args, **(kwargs or {}))

    with Chosen():
        torch.Tensor.__setitem__(torch.ones(3), index, 0.0)
    x = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    torch.Tensor.__setitem__(x, index, 0.0)
    assert x.get_mask().tolist() == [True, not any(by_name), True]
    x[index] = 0.0
    assert x.get_mask().all()
