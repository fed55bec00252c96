"""Masks that several elements, views or results share, in compiled regions that write. Found by random programs."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md

pytestmark = pytest.mark.usefixtures("fresh_compiler")

MASK = torch.tensor([[False, True], [True, False]])
ROWS = torch.tensor([[False], [True]])
# Intermediates of which several elements have one validity, or each has its own.
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "a copy": lambda x: x.clone(),
    "a result": lambda x: x * 2,
    "a stack": lambda x: torch.stack([x, x], 1),
    "an expanded one": lambda x: x[None].expand(2, 2, 2) * 2,
    "repeated": lambda x: x.unsqueeze(0).repeat(2, 1, 1),
}
WRITTEN: dict[str, Callable[[Tensor], Any]] = {
    "assigned": lambda v: v.__setitem__((slice(None), 1), 0.5),
    "filled": lambda v: v.select(-2, 1).fill_(3.0),
    "copied": lambda v: v.select(0, 1).copy_(torch.ones(2)),
    "added": lambda v: v.select(-1, 0).add_(1.0),
}


@pytest.mark.parametrize("mask", [MASK, ROWS], ids=["elements", "rows"])
@pytest.mark.parametrize("write", WRITTEN)
@pytest.mark.parametrize("make", MADE)
def test_a_write_through_a_view_validates_what_it_writes(make: str, write: str, mask: Tensor) -> None:
    """Seed 9000500: where one validity stood for several elements, all of them became valid."""

    def region(x: Tensor) -> Tensor:
        made = MADE[make](x)
        WRITTEN[write](made)
        return made

    x = md.masked_tensor(torch.randn(2, 2), mask)
    md.testing.assert_close(torch.compile(region, backend="aot_eager")(x), region(x))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal": lambda v: v.diagonal(0, 1, 2),
    "transposed": lambda v: v.transpose(0, 2),
    "narrow": lambda v: v.narrow(2, 1, 2),
    "in another shape": lambda v: v.view(6, 4)[1:3],
    "flat": lambda v: v.flatten()[3:7],
    "unbound": lambda v: v.unbind(1)[1],
    "split": lambda v: v.split(2, 2)[0],
    "permuted": lambda v: v.permute(2, 0, 1)[1],
    "every second": lambda v: v[:, :, ::2],
    "squeezed": lambda v: v[:1].squeeze(0),
    "unfolded": lambda v: v.unfold(2, 2, 2)[..., 0],
}
STORED = {
    "rows": torch.tensor([[[False], [True], [True]], [[True], [False], [False]]]),
    "columns": torch.tensor([[[False, True, True, False]]]),
    "batches": torch.tensor([[[False]], [[True]]]),
    "elements": torch.arange(24).reshape(2, 3, 4) % 3 > 0,
    "all valid": None,
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_any_view_of_any_mask_is_as_eager(name: str, stored: str) -> None:
    def region(x: Tensor, value: Tensor) -> Tensor:
        made = x * 2
        VIEWS[name](made).copy_(value)
        return made

    x = md.masked_tensor(torch.randn(2, 3, 4), STORED[stored])
    for value in (torch.ones(()), md.masked_tensor(torch.ones(()), torch.tensor(False))):
        md.testing.assert_close(torch.compile(region, backend="aot_eager")(x, value), region(x, value))


def test_such_a_write_is_refused_where_the_whole_function_has_to_be_one_graph() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def region(x: Tensor) -> Tensor:
        made = x * 2
        made.select(1, 0).fill_(3.0)
        return made

    with pytest.raises(Exception, match=r"is stored \(broadcast from \(2, 1\) to one value per element\)"):
        region(md.masked_tensor(torch.randn(2, 2), ROWS))


RETURNED: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "whole first": lambda v: (v, v.select(1, 0)),
    "view first": lambda v: (v.select(1, 0), v),
    "views alone": lambda v: (v[0], v[1:], v[:, 1]),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("mask", [MASK, ROWS, None], ids=["elements", "rows", "all valid"])
@pytest.mark.parametrize("which", RETURNED)
def test_views_that_a_region_returns_share_validity(which: str, mask: Tensor | None, backend: str) -> None:
    def region(x: Tensor) -> tuple[Tensor, ...]:
        return RETURNED[which](x * 2)

    x = md.masked_tensor(torch.randn(2, 2), mask)
    given = torch.compile(region, backend=backend, fullgraph=True)
    for values in (torch.ones(2, 2), md.masked_tensor(torch.ones(2, 2), MASK)):
        for n in range(len(region(x))):
            eager, compiled = region(x), given(x)
            for results in (eager, compiled):
                results[n].copy_(values.reshape(-1)[: results[n].numel()].reshape(results[n].shape))
            for wanted, found in zip(eager, compiled, strict=True):
                md.testing.assert_close(found, wanted)


def test_what_a_region_returned_is_copied_and_saved_with_its_views() -> None:
    x = md.masked_tensor(torch.randn(2, 2), ROWS)
    whole, view = torch.compile(lambda x: RETURNED["whole first"](x * 2), backend="aot_eager")(x)
    file = io.BytesIO()
    torch.save((whole, view), file)
    file.seek(0)
    for other, part in (copy.deepcopy((whole, view)), torch.load(file)):
        md.testing.assert_close(other, whole)
        part.fill_(3.0)
        assert other.get_mask().tolist() == [[True, False], [True, True]]
    assert whole.get_mask().tolist() == [[False, False], [True, True]]


def test_results_of_one_memory_with_masks_of_their_own_keep_them() -> None:
    def region(data: Tensor) -> tuple[Tensor, Tensor]:
        return md.as_masked_tensor(data, MASK), md.as_masked_tensor(data, ~MASK)

    one, other = torch.compile(region, backend="aot_eager")(torch.zeros(2, 2) + 1)
    one[0, 0] = 5.0
    assert one.get_mask().tolist() == [[True, True], [True, False]]
    assert other.get_mask().tolist() == (~MASK).tolist()


def test_views_returned_again_and_again_are_not_collected() -> None:
    x = md.masked_tensor(torch.randn(4, 4), torch.rand(4, 4) > 0.5)
    whole, *_ = torch.compile(lambda x: (x * 2, x), backend="aot_eager")(x)
    row = torch.compile(lambda x: x[1:], backend="aot_eager")
    for _ in range(5):
        row(whole)
    assert whole._family is None or len(whole._family.parts) < 2


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.sub_(x.mean()),
        lambda x: x.fill_(1.0),
        lambda x: x.__setitem__(slice(1, None), 1.0),
        lambda x: x.narrow(0, 1, 1).copy_(torch.zeros(1, x.shape[1])),
    ],
    ids=["sub_", "fill_", "assigned", "copied"],
)
@pytest.mark.parametrize("size", [1, 3])
def test_a_region_writes_to_a_tensor_with_a_mask_in_another_order(write: Callable[[Tensor], Any], size: int) -> None:
    """Seeds 9000577 and 9000763: guards on the strides of the mask failed on the frame that they were made for."""

    def region(x: Tensor) -> Tensor:
        write(x)
        return x * 1

    compiled = torch.compile(region, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            mask = torch.rand(size, 3, generator=torch.Generator().manual_seed(seed)).t() > 0.4
            mine, theirs = (md.masked_tensor(torch.ones(3, size), mask) for _ in range(2))
            md.testing.assert_close(compiled(mine), region(theirs))
            md.testing.assert_close(mine, theirs)


# What a sum of two tensors may take for one mask, in a graph that was traced where both had one.
ONE_MASK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as they are": lambda x, y: x + y,
    "transposed": lambda x, y: x.t() + y.t(),
    "views of results": lambda x, y: (x * 2).view(-1) + (y * 2).view(-1),
    "back and forth": lambda x, y: (x * 2).t().t() + y,
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("which", ONE_MASK)
def test_arguments_that_share_a_mask_when_traced_need_not_share_one_later(which: str, dynamic: bool) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        total = ONE_MASK[which](x, y)
        return (total * total).sum()

    mask = torch.tensor([[True, False, True], [False, True, True]])
    other = md.masked_tensor(torch.randn(2, 3), ~mask | torch.tensor([True, False, False]))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)

    def run(function: Callable[..., Tensor], x: Tensor, shares: bool) -> list[Any]:
        """The loss, and the gradients of what it took."""
        x = x.detach().requires_grad_()
        y = ((x if shares else other).detach() * 3).requires_grad_()
        found = function(x, y)
        found.backward()
        return [found, x.grad, y.grad]

    x = md.masked_tensor(torch.randn(2, 3), mask)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shares in (True, False):
            for found, wanted in zip(run(compiled, x, shares), run(loss, x, shares), strict=True):
                md.testing.assert_close(found, wanted)


def test_a_mask_is_not_what_it_was_before_a_write() -> None:
    """Results have the mask of their time: a mask that a view or a result took is no longer that of its source."""

    def region(x: Tensor, hole: Tensor) -> tuple[Tensor, ...]:
        made = x * 2
        view, before = made.t(), made + 1
        view_before = view * 1
        made.copy_(hole)
        return before + made, view_before + view, (made + before).t() + view_before, made * view.t()

    mask = torch.tensor([[True, True], [True, False]])
    x, hole = md.masked_tensor(torch.randn(2, 2), mask), md.masked_tensor(torch.randn(2, 2), mask.flip(0))
    compiled = torch.compile(region, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(compiled(x, hole), region(x, hole), strict=True):
        md.testing.assert_close(found, wanted)
