"""In-place writes in compiled regions: to intermediates, to inputs, to views and to masks that others share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import masked_dispatch as md
from compiled_regions import check, compiled, masked, same, x_and_weight
from logical_writes import LOGICAL, check_write_to_leaf, plain
from logical_writes import masked as masked_vector

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# -------------------------------------------------------------------------------------------------------- writes inside


def scaled_in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    y.mul_(w[0])
    y[0].add_(1)
    return y.sum(-1)


def assigned(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x.clone()
    before = y.exp()
    y[0] = 5.0
    y[:, 1] = w[0, :4]
    return y.sum(-1), y, before


def shared_with_an_input(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x * 1
    y[0] = 5.0
    return y.sum(-1), x * 2


@pytest.mark.parametrize("region", [scaled_in_place, assigned, shared_with_an_input])
def test_writes_to_intermediates(region: Callable[..., Any]) -> None:
    check(region, x_and_weight)


def scale_input(x: Tensor) -> Any:
    x.mul_(2)
    return x.sum(-1)


def assign_to_input(x: Tensor) -> Any:
    before = x.exp()
    x[0] = 1.0
    return x.sum(-1), before, x * 2


def write_to_input(x: Tensor) -> Any:
    x.copy_(torch.ones(4, 6))
    x[1:, 2].neg_()
    return x.sum(0)


@pytest.mark.parametrize(
    ("region", "backend"),
    [
        (scale_input, "aot_eager"),
        (assign_to_input, "aot_eager"),
        (write_to_input, "aot_eager"),
        (assign_to_input, "inductor"),
    ],
)
def test_writes_to_inputs(region: Callable[..., Any], backend: str) -> None:
    run = torch.compile(region, backend=backend, fullgraph=True)
    for _ in range(3):
        x = masked()
        y, shares, expected_shares = x.clone(), x.exp(), x.exp().clone()
        row = x[0]
        same(run(x), region(y))
        same((x, row), (y, y[0]))
        same(shares, expected_shares)  # it held the mask that x had
        x[1] = 3.0  # and still x is an ordinary tensor
        assert x[1].sum().item() == 18.0
        same(shares, expected_shares)


def test_that_a_graph_writes_to_a_mask_is_known_from_dynamo_alone() -> None:
    """What AOTAutograd finds in its cache, it does not trace again."""
    x, y = masked(), masked()
    torch.compile(lambda x, y: (x[0].fill_(1.0), y.sum())[1], backend="eager", fullgraph=True)(x, y)
    assert x._graph_writes is not None
    assert x._graph_writes.seen
    assert not (y._graph_writes and y._graph_writes.seen)


def test_writes_to_inputs_that_share_a_mask() -> None:
    def region(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x[0] = 5.0
        return x.sum(), y.sum()

    run, _ = compiled(region)
    for _ in range(2):
        x = masked()
        y, a, b = x * 3, x.clone(), x * 3
        same(run(x, y), region(a, b))
        same((x, y), (a, b))


def owned_by_nobody() -> tuple[Tensor, Callable[[Tensor], None]]:
    x = masked()
    return x, lambda x: x.__setitem__(0, md.masked_tensor(torch.ones(6), torch.zeros(6, dtype=torch.bool)))


def owned_by_its_family() -> tuple[Tensor, Callable[[Tensor], None]]:
    x, write = owned_by_nobody()
    write(x[:, 1:2].expand(4, 6).clone())
    x[1, 2] = 4.0  # the family has memory of its own from now on
    return x, write


def shared_with_processes() -> tuple[Tensor, Callable[[Tensor], None]]:
    x, write = owned_by_nobody()
    return x.share_memory_(), write


@pytest.mark.parametrize("make", [owned_by_nobody, owned_by_its_family, shared_with_processes])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_results_share_the_mask_of_an_input_and_keep_it_when_that_changes(
    make: Callable[[], tuple[Tensor, Callable[[Tensor], None]]], backend: str
) -> None:
    run = torch.compile(lambda x: x.exp(), backend=backend, fullgraph=True)
    for _ in range(2):
        x, write = make()
        mask = x.get_mask()
        shares = run(x)
        copied = make is shared_with_processes
        assert (shares._validity.data_ptr() == x._validity.data_ptr()) != copied
        write(x)
        assert not torch.equal(x.get_mask(), mask)
        assert torch.equal(shares.get_mask(), mask)


BEFORE: dict[str, Callable[[Tensor], object]] = {
    "read": lambda x: None,
    "written": lambda x: x.mul_(2),
    "assigned": lambda x: x.__setitem__(0, 5.0),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[1:], lambda t: t[:, 2:].t()], ids=["t", "rows", "block"])
def test_a_view_of_an_argument_that_is_a_view_itself(view: Callable[[Tensor], Tensor], before: str) -> None:
    """It is the view that eager mode returns. (Torch 2.14 counts offsets twice for tensors that wrap others.)"""

    def region(x: Tensor) -> Tensor:
        BEFORE[before](x)
        return view(x)

    run, _ = compiled(region)
    x = masked(4, 6)
    y = x.clone()
    a, b = run(x[1:3]), region(y[1:3])
    same((a, x), (b, y))
    a.mul_(3)
    b.mul_(3)
    same(x, y)


def test_the_gradient_of_a_view_of_an_argument_with_an_offset() -> None:
    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[1:].t(), x.detach()[1:].t()

    run, _ = compiled(region)
    x = masked(4, 6)[1:].detach().requires_grad_()
    view, detached = run(x)
    assert view.requires_grad
    assert not detached.requires_grad
    same((view, detached), region(x))
    (view * 3).sum().to_tensor(0).backward()
    wanted = x.detach().clone().requires_grad_()
    (wanted[1:] * 3).sum().to_tensor(0).backward()
    same(x.grad, wanted.grad)


def test_a_view_and_its_base_as_inputs_of_a_region_that_writes_are_refused() -> None:
    def region(x: Tensor, view: Tensor) -> Tensor:
        view[0] = 5.0
        return x.sum()

    run, _ = compiled(region)
    x = masked()
    with pytest.raises(Exception, match="aliased inputs that are mutated"):
        run(x, x[0])


def test_in_place_on_plain_tensors_is_an_update() -> None:
    def region(state: Tensor, g: Tensor) -> Tensor:
        state.addcmul_(g, g, value=0.5)
        return state.sqrt()

    run, _ = compiled(region)
    g, state = masked(), torch.ones(4, 6)
    expected = torch.where(g.get_mask(), 1 + 0.5 * g.to_tensor(0.0) ** 2, torch.ones(4, 6))
    run(state, g)
    assert_close(state, expected)


# ----------------------------------------------------------------------------------------------------- logical writes


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("made", [plain, masked_vector])
@pytest.mark.parametrize("name", LOGICAL)
def test_a_compiled_logical_write_to_a_leaf_is_not_recorded(
    name: str, made: Callable[[Tensor], Tensor], backend: str
) -> None:
    check_write_to_leaf(name, made, lambda write: torch.compile(write, backend=backend, fullgraph=True))
