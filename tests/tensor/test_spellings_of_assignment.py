"""Writes: spellings of assignment, expanded memory, tensors on meta."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import masked_dispatch as md
import op_registry
from masked_dispatch.assumptions.assignments import INDICES, TARGETS, VALUES, tried
from storages import sample, state


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


# ---------------------------------------------------------------------------------------------------- expanded memory


ROW = torch.tensor([True, False, True])
WHOLE_WRITES: dict[str, Callable[[Tensor], object]] = {
    "fill_": lambda x: x.fill_(7.0),
    "zero_": lambda x: x.zero_(),
    "of a list": lambda x: torch._foreach_zero_([x]),
}
PART_WRITES: dict[str, Callable[[Tensor], object]] = {
    "a row": lambda x: x.__setitem__(1, 7.0),
    "a row of a tensor": lambda x: x.__setitem__(1, torch.tensor([7.0, 8.0, 9.0])),
    "an element": lambda x: x.__setitem__((1, 2), 7.0),
    "a column": lambda x: x[:, 1].fill_(7.0),
    "the diagonal": lambda x: x.fill_diagonal_(7.0),
    "a row, in place": lambda x: x[0].mul_(2.0),
}
# What torch refuses, or has deprecated ("Please clone() the tensor before performing this operation").
REFUSED_BY_TORCH: dict[str, Callable[[Tensor], object]] = {
    "fill_ with a tensor": lambda x: x.fill_(torch.tensor(7.0)),
    "a slice of rows": lambda x: x.__setitem__(slice(1, 3), 7.0),
    "copy_": lambda x: x.copy_(torch.ones(4, 3)),
    "mul_": lambda x: x.mul_(2.0),
    "uniform_": lambda x: x.uniform_(),
    "index_put_": lambda x: x.index_put_((torch.tensor([1, 2]),), torch.tensor(7.0)),
    "masked_fill_": lambda x: x.masked_fill_(x.get_mask() if md.is_masked_tensor(x) else ROW, 7.0),
}


@pytest.mark.parametrize("write", WHOLE_WRITES)
@pytest.mark.parametrize("mask", [None, ROW, ROW.repeat(4, 1), torch.eye(4, 3) > 0], ids=["none", "row", "rows", "own"])
def test_all_of_an_expanded_tensor_is_written(write: str, mask: Tensor | None) -> None:
    memory, plain = torch.arange(3.0), torch.arange(3.0).expand(4, 3)
    x = md.as_masked_tensor(memory.expand(4, 3), mask)
    row = x[2]
    WHOLE_WRITES[write](x)
    WHOLE_WRITES[write](plain)
    for written, wanted in ((x, plain), (row, plain[0])):
        assert written.get_mask().all()
        assert torch.equal(written.get_data(), wanted)
    assert torch.equal(memory, plain[0])


@pytest.mark.parametrize("write", PART_WRITES)
@pytest.mark.parametrize("mask", [None, ROW, ROW.repeat(4, 1)], ids=["none", "row", "rows"])
def test_a_part_of_an_expanded_tensor_is_written(write: str, mask: Tensor | None) -> None:
    """Elements in one place of memory have one value and one validity."""
    plain = torch.arange(1.0, 4.0).expand(4, 3)
    x = md.as_masked_tensor(plain.clone()[:1].expand(4, 3), mask)
    before = x.get_mask()
    PART_WRITES[write](x)
    PART_WRITES[write](plain := torch.arange(1.0, 4.0)[None].expand(4, 3))
    written = plain[0] != torch.arange(1.0, 4.0) if "in place" not in write else torch.zeros(3, dtype=torch.bool)
    assert torch.equal(x.get_mask(), before | written)
    assert torch.equal(x.to_tensor(0), torch.where(before | written, plain, 0))


@pytest.mark.parametrize("write", PART_WRITES)
def test_a_part_of_an_expanded_tensor_with_a_mask_for_each_element_is_refused(write: str) -> None:
    memory, mask = torch.arange(1.0, 4.0), torch.eye(4, 3) > 0
    x = md.as_masked_tensor(memory.expand(4, 3), mask)
    with pytest.raises(
        op_registry.MaskedSemanticsError, match=r"shape \(4, 3\) and strides \(0, 1\).* Write to x.clone\(\)"
    ):
        PART_WRITES[write](x)
    assert torch.equal(memory, torch.arange(1.0, 4.0))
    assert torch.equal(x.get_mask(), mask)


@pytest.mark.parametrize("write", REFUSED_BY_TORCH)
@pytest.mark.parametrize("mask", [None, ROW, torch.eye(4, 3) > 0], ids=["none", "row", "own"])
def test_other_writes_to_expanded_memory_raise_as_in_torch(write: str, mask: Tensor | None) -> None:
    x = md.as_masked_tensor(torch.arange(3.0).expand(4, 3), mask)
    before = x.get_mask()
    with pytest.raises(RuntimeError, match=r"more than one element of the written-to tensor .* Please clone\(\)"):
        REFUSED_BY_TORCH[write](x)
    assert torch.equal(x.get_mask(), before)
    assert torch.equal(x.get_data()[0], torch.arange(3.0))


def test_overlapping_windows_are_written_where_their_masks_agree() -> None:
    data = torch.arange(4.0)
    windows = data.unfold(0, 2, 1)
    x = md.as_masked_tensor(windows, torch.tensor([[True, False], [False, True], [True, True]]))
    x[0, 1] = 9.0
    assert data.tolist() == [0, 9, 2, 3]
    assert x.get_mask().all()
    disagreeing = md.as_masked_tensor(windows, torch.tensor([[True, False], [True, True], [True, True]]))
    with pytest.raises(op_registry.MaskedSemanticsError, match="different masks"):
        disagreeing[0, 0] = 1.0


# ---------------------------------------------------------------------------------------------------------- from meta


META: dict[str, Callable[[Tensor, Tensor], object]] = {
    "x[i] = v": lambda x, i: x.__setitem__(i, 5.0),
    "x[i] = t": lambda x, i: x.__setitem__(i, torch.zeros(1, 4)),
    "x[i, j] = v": lambda x, i: x.__setitem__((i, i), 5.0),
    "index_put_": lambda x, i: x.index_put_((i,), torch.tensor(5.0)),
    "index_fill_": lambda x, i: x.index_fill_(0, i, 5.0),
    "index_copy_": lambda x, i: x.index_copy_(0, i, torch.zeros(1, 4)),
    "index_add_": lambda x, i: x.index_add_(0, i, torch.zeros(1, 4)),
    "scatter_": lambda x, i: x.scatter_(0, i[None], 5.0),
    "masked_fill_": lambda x, i: x.masked_fill_(i > 0, 5.0),
    "copy_": lambda x, i: x.copy_(i),
    "add_": lambda x, i: x.add_(i),
}


# Each write and each storage once; the storage is one in which nothing but this check refuses the write, if any is.
@pytest.mark.parametrize(
    "write, layout",
    zip(
        META, ["dense", "permuted", "coo", "dense", "csr", "hybrid", "csc", "packed", "bsr", "bsc", "coo"], strict=True
    ),
)
def test_what_lies_on_meta_is_not_written(write: str, layout: str) -> None:
    x = sample(layout)
    before = state(x)
    with pytest.raises(RuntimeError, match=r"meta"):
        META[write](x, torch.tensor([1], device="meta"))
    assert state(x) == before
