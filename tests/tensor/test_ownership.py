"""Who owns a mask (docs/architecture.md): views alias data and mask, results keep the mask they were given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from few_elements import NAN, F, T, mask_of, ragged
from masked_dispatch.distributed.calls import problem_of_outputs


def invalid(*shape: int) -> md.MaskedTensor:
    return md.masked_tensor(torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool))


# ------------------------------------------------------------------------------------- views and their bases


# P6 asks each view by itself: writes through it, and to its base.


def test_writes_through_a_view_of_a_view_show_in_its_base() -> None:
    x = md.masked_tensor(torch.zeros(2, 3), torch.tensor([[T], [F]]))
    view = x.t()[1:]
    view.copy_(invalid(2, 2))
    assert mask_of(x) == [[T, F, F], [F, F, F]]
    x.fill_(7.0)
    assert mask_of(view) == [[T, T], [T, T]]
    assert view.tolist() == [[7, 7], [7, 7]]


def test_a_view_is_a_view_to_autograd() -> None:
    x = ragged()
    view = x[0]
    assert view._base is x
    version = x._version
    view.add_(1)
    assert x._version == version + 1


def test_sibling_views_show_each_others_writes() -> None:
    x = ragged()
    row, column = x[0], x[:, 0]
    row[0] = invalid()
    assert mask_of(column) == [F, T]
    column.fill_(3.0)
    assert mask_of(row) == [T, T, F]
    assert row[0].item() == 3.0


def test_a_view_outlives_its_base() -> None:
    x = ragged()
    row = x[0]
    sibling = x[:, 0]
    del x
    row.zero_()
    assert mask_of(sibling) == [T, T]
    assert sibling[0].item() == 0.0


# ------------------------------------------------------------------------- results keep the mask they were given


def test_a_result_does_not_follow_later_writes() -> None:
    x = ragged()
    y = x.exp()
    x.fill_(0.0)
    assert mask_of(y) == [[T, T, F], [T, F, T]]
    z = x.exp()
    x[0, 0] = invalid()
    assert mask_of(z) == [[T, T, T], [T, T, T]]
    assert mask_of(x) == [[F, T, T], [T, T, T]]


def test_a_result_of_a_view_does_not_follow_later_writes() -> None:
    x = ragged()
    row = x[0]
    row.zero_()  # the family now has memory of its own
    y = row + 1
    x.copy_(invalid(2, 3))
    assert mask_of(y) == [T, T, T]
    assert mask_of(row) == [F, F, F]


def test_results_share_one_mask_object_until_a_write() -> None:
    x = ragged()
    y, z = x.exp(), x * 2
    assert y._validity is z._validity is x._validity
    assert (y + z)._validity is x._validity


def test_masked_tensor_copies_the_data_and_as_masked_tensor_shares_it() -> None:
    data, mask = torch.zeros(3), torch.tensor([T, F, T])
    copied, shared = md.masked_tensor(data, mask), md.as_masked_tensor(data, mask)
    data[0] = 5.0
    assert copied.to_tensor(-1).tolist() == [0, -1, 0]
    assert shared.to_tensor(-1).tolist() == [5, -1, 0]


def test_get_mask_is_a_copy() -> None:
    x = md.masked_tensor(torch.zeros(2, 2), torch.tensor([T, F]))
    x.get_mask().fill_(True)
    assert mask_of(x) == [[T, F], [T, F]]


# ------------------------------------------------------------------------------------------- under autograd


def test_inplace_changes_values_and_mask_under_autograd() -> None:
    x = ragged(requires_grad=True)
    other = md.masked_tensor(torch.full((2, 3), 3.0), torch.tensor([[T, F, T], [T, T, T]]))
    y = x * 1
    y.mul_(other)
    assert mask_of(y) == [[T, F, F], [T, F, T]]
    y.sum().backward()
    assert mask_of(x.grad) == [[T, T, F], [T, F, T]]
    assert x.grad.to_tensor(-1).tolist() == [[3, 0, -1], [3, -1, 3]]


def test_inplace_on_a_view_under_autograd() -> None:
    x = ragged(requires_grad=True)
    y = x * 2
    y[0].mul_(5)
    y[1, 0] = invalid()
    assert mask_of(y) == [[T, T, F], [F, F, T]]
    y.sum().backward()
    assert mask_of(x.grad) == [[T, T, F], [T, F, T]]
    assert x.grad.to_tensor(-1).tolist() == [[10, 10, -1], [0, -1, 2]]


def test_assigned_values_get_gradients_where_they_landed() -> None:
    x = ragged()
    values = torch.ones(3, requires_grad=True)
    y = x * 1
    y[1] = values
    assert mask_of(y) == [[T, T, F], [T, T, T]]
    (y * torch.arange(6.0).view(2, 3)).sum().backward()
    assert type(values.grad) is Tensor
    assert values.grad.tolist() == [3, 4, 5]


def test_inplace_with_a_broadcast_mask_under_autograd() -> None:
    x = md.masked_tensor(torch.ones(2, 3), torch.tensor([[T], [F]]), requires_grad=True)
    y = x * 3
    y[:, 0].copy_(torch.tensor([5.0, 6.0]))
    assert mask_of(y) == [[T, T, T], [T, F, F]]
    y.sum().backward()
    assert mask_of(x.grad) == [[T, T, T], [F, F, F]]
    assert x.grad.to_tensor(-1).tolist() == [[0, 3, 3], [-1, -1, -1]]


def test_a_leaf_that_requires_grad_refuses_inplace() -> None:
    x = ragged(requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        x.mul_(2)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad is being used in an in-place"):
        x[0].mul_(2)
    assert x[0, 1].item() == 2.0


def test_what_backward_needs_must_not_be_overwritten() -> None:
    x = ragged(requires_grad=True)
    y = x * 1
    z = y.exp().exp()
    y_again = y * 1
    w = y_again * y_again
    y_again.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        w.sum().backward()
    z.sum().backward()


def test_overwriting_through_the_base_is_noticed_too() -> None:
    x = ragged(requires_grad=True)
    base = x * 1
    view = base[0]
    out = (view * view).sum()
    base.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_overwriting_through_the_shared_data_is_noticed_too() -> None:
    data = torch.tensor([1.0, 2.0])
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    out = (md.as_masked_tensor(data) * weight).sum()
    data.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_overwriting_the_wrapper_bumps_the_shared_data() -> None:
    data = torch.tensor([1.0, 2.0])
    x = md.as_masked_tensor(data)
    version = data._version
    x.mul_(2)
    assert data.tolist() == [2.0, 4.0]
    assert data._version > version


def test_gradients_accumulate_under_the_leafs_mask() -> None:
    x = ragged(requires_grad=True)
    for _ in range(2):
        (x * x).sum().backward()
    assert mask_of(x.grad) == mask_of(x)
    assert x.grad.to_tensor(0).tolist() == [[4, 8, 0], [16, 0, 24]]


def test_gradient_through_views_of_a_leaf_has_the_leafs_mask() -> None:
    x = ragged(requires_grad=True)
    (x[0].sum() + x[:, 2].sum() + x.t()[0].sum()).backward()
    assert mask_of(x.grad) == mask_of(x)
    assert x.grad.to_tensor(-1).tolist() == [[2, 1, -1], [1, -1, 1]]


def test_zero_grad_to_zero_gives_valid_zeros_until_the_next_backward() -> None:
    x = torch.nn.Parameter(ragged())
    (x * 2).sum().backward()
    torch.optim.SGD([x], lr=0.1).zero_grad(set_to_none=False)
    assert mask_of(x.grad) == [[T, T, T], [T, T, T]]
    (x * 2).sum().backward()
    assert mask_of(x.grad) == mask_of(x)
    assert x.grad.to_tensor(-1).tolist() == [[2, 2, -1], [2, -1, 2]]


# -------------------------------------------------------------------------------------------- plain targets


def test_inplace_on_a_plain_tensor_is_an_update() -> None:
    plain = torch.zeros(2, 3)
    plain.add_(ragged())
    assert plain.tolist() == [[1, 2, 0], [4, 0, 6]]
    assert type(plain) is Tensor
    with md.updates("silent"):
        plain.copy_(ragged() * 10)
        assert plain.tolist() == [[10, 20, 0], [40, 0, 60]]
        plain[1] = ragged()[0]
        assert plain.tolist() == [[10, 20, 0], [1, 2, 60]]
        torch.mul(ragged(), 2, out=plain)
    assert plain.tolist() == [[2, 4, 0], [8, 2, 12]]


def test_an_inplace_result_of_another_shape_or_dtype_is_refused_unchanged() -> None:
    x = ragged()
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        x.add_(torch.zeros(4, 2, 3))
    counts = md.masked_tensor(torch.tensor([1, 2]), torch.tensor([T, F]))
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
        counts.mul_(0.5)
    assert counts.to_tensor(-1).tolist() == [1, -1]


# -------------------------------------------------------------------------------- views of another dtype


@pytest.mark.parametrize(
    "view", [torch.view_as_real, lambda x: x.view(torch.float32), lambda x: x.view(torch.float32)[0]]
)
def test_a_view_of_another_dtype_is_not_written_through(view) -> None:
    x = md.masked_tensor(torch.zeros(2, 2, dtype=torch.complex64), torch.tensor([[T, F], [T, T]]))
    parts = view(x)
    with pytest.raises(md.MaskedSemanticsError, match="would write through a view of another dtype"):
        parts.fill_(1.0)
    assert mask_of(x) == [[T, F], [T, T]]
    assert x.to_tensor(0).abs().sum() == 0


BATCH = md.from_lengths(torch.zeros(2, 4, dtype=torch.complex64), torch.tensor([4, 3]))
COPIED: dict[str, tuple[Callable[[], Any], str]] = {
    "parts of numbers": (lambda: torch.view_as_real(md.masked_tensor(torch.zeros(2, dtype=torch.complex64))), "dtype"),
    "parts of a batch": (lambda: torch.view_as_real(BATCH), "dtype"),
    "a part of each sample": (lambda: BATCH[:, 1:-1], "positions"),
    "its first element": (lambda: BATCH[:, 1:-1][0, 0], "positions"),
    "parts of a part": (lambda: torch.view_as_real(BATCH[:, 1:-1]), "dtype"),
}
WRITERS: dict[str, Callable[[Any], Any]] = {
    "fill_": lambda x: x.fill_(1.0),
    "copy_": lambda x: x.copy_(x.clone()),
    "share_memory_": lambda x: x.share_memory_(),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("view", COPIED)
def test_a_view_whose_mask_is_a_copy_is_refused_for_what_it_is(view: str, writer: str) -> None:
    make, kind = COPIED[view]
    reason = {"dtype": "a view of another dtype", "positions": r"a view \(shape .*\) that leaves out positions"}[kind]
    with pytest.raises(md.MaskedSemanticsError, match=f"{reason}.*, whose mask is a copy"):
        WRITERS[writer](make())
    # What collectives say of an output, before they send anything; they write into the parts of whole numbers.
    problem = problem_of_outputs([make()])
    assert problem is None if view.startswith("parts of") else re.search(reason, str(problem))


def test_a_view_of_another_dtype_is_not_written_through_where_nothing_is_masked_either() -> None:
    x = md.masked_tensor(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(md.MaskedSemanticsError, match="would write through a view of another dtype"):
        torch.view_as_real(x).fill_(1.0)
    torch.view_as_real(x).clone().fill_(1.0)
    assert x.tolist() == [0, 0]


def test_a_mask_that_a_view_reads_below_autograd_knows_of_later_writes() -> None:
    """What is remembered of a mask holds for its version, and threads write while others make views."""
    x: Any = md.masked_tensor(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool))
    x[0] = md.masked_tensor(torch.ones(2), torch.tensor([True, False]))  # the family gets memory of its own
    x._part_of_memory = None
    assert x[1].get_mask().all()
    memory, part = x._part_of_memory
    before = part._version
    memory.fill_(0)
    assert part._version == before + 1
