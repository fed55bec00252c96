"""Random programs that raised when they were compiled, and run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from storages import storages_but

MASKS = {
    "full": torch.tensor([[True, False, True, True], [False, True, True, False], [True, True, False, True]]),
    "rows": torch.tensor([[True], [False], [True]]),
    "columns": torch.tensor([[True, False, True, True]]),
    "none": None,
}


def assert_compiled_as_eager(function: Callable[..., Any], make: Callable[[], tuple[Tensor, ...]]) -> None:
    """The result, and what became of the arguments."""
    torch._dynamo.reset()
    eager, compiled = make(), make()
    wanted = function(*eager)
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*compiled)
    for mine, theirs in zip((got, *compiled), (wanted, *eager), strict=True):
        md.testing.assert_close(mine, theirs)


def of(mask: str) -> md.MaskedTensor:
    return md.masked_tensor(torch.linspace(-2.0, 2.0, 12).reshape(3, 4), MASKS[mask])


WRITES: dict[str, Callable[[Tensor], object]] = {
    "out= that is both operands": lambda x: torch.mul(x, x, out=x),
    "out= that is one operand": lambda x: torch.add(x, 1.0, out=x),
    "a number": lambda x: x.mul_(0.5),
    "itself": lambda x: x.lerp_(x, 0.5),
    "twice": lambda x: x.mul_(0.5).exp_(),
    "a row": lambda x: x[1].mul_(2.0),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("write", WRITES)
def test_writes_that_leave_the_mask_as_it_is(write: str, mask: str) -> None:
    if write == "a row" and mask in ("rows", "columns"):
        pytest.skip("a graph gives views of a broadcast mask one of their own (the refusal is tested elsewhere)")
    assert_compiled_as_eager(lambda x: (WRITES[write](x), x.exp())[1], lambda: (of(mask),))


def test_out_is_one_of_the_arguments_and_the_operand_another() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.add(y.expand_as(x), 0.0, out=x)

    assert_compiled_as_eager(function, lambda: (of("none"), torch.ones(4)))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "index",
    [torch.tensor([True, False, True]), torch.tensor([False, True, False]), torch.tensor([False, False, False])],
)
def test_a_plain_boolean_index(index: Tensor, mask: str) -> None:
    assert_compiled_as_eager(lambda x, i: x[i] * 2, lambda: (of(mask), index))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT,
    "permuted": lambda x: x.permute(1, 0),
    "columns": lambda x: x[:, :1],
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_as_many_rows_as_the_data_say(view: str, mask: str) -> None:
    index = torch.tensor([True, False, True])
    assert_compiled_as_eager(lambda x, i: VIEWS[view](x[i]), lambda: (of(mask), index))


STORAGES = storages_but("permuted")


@pytest.mark.parametrize("storage", STORAGES)
def test_an_empty_index(storage: str) -> None:
    index = torch.zeros(0, dtype=torch.int64)
    assert_compiled_as_eager(lambda x, i: x[i], lambda: (STORAGES[storage](of("full")), index))


@pytest.mark.parametrize("storage", [s for s in STORAGES if s != "dense"])
def test_a_write_to_a_copy_of_a_sparse_argument(storage: str) -> None:
    assert_compiled_as_eager(lambda x: x.clone().nan_to_num_(), lambda: (STORAGES[storage](of("full")),))


REFUSED_WRITES: dict[str, Callable[[Tensor], object]] = {
    "nan_to_num_": lambda x: x.nan_to_num_(),
    "clamp_": lambda x: x.clamp_(0),
    "relu, inplace": lambda x: F.relu(x, inplace=True),
    "fill_": lambda x: x.fill_(2.0),
    "copy_": lambda x: x.copy_(torch.ones(x.shape)),
    "by an index": lambda x: x.__setitem__((0, 0), 5.0),
    "out": lambda x: torch.exp(torch.ones(x.shape), out=x),
    "of a list": lambda x: torch._foreach_mul_([x], 2.0),
}


@pytest.mark.parametrize("write", REFUSED_WRITES)
@pytest.mark.parametrize("storage", [s for s in STORAGES if s != "dense"])
def test_a_write_to_a_sparse_argument_is_refused(storage: str, write: str) -> None:
    """Outside a graph it replaces what is stored, which nothing in a graph can do to an argument."""
    x = STORAGES[storage](of("full"))
    before, mask = x.to_tensor(0), x.get_mask()
    compiled = torch.compile(REFUSED_WRITES[write], fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"an argument of a compiled function: .* work on x\.clone\(\)"):
        compiled(x)
    assert torch.equal(x.to_tensor(0), before)
    assert torch.equal(x.get_mask(), mask)


def test_a_rule_over_as_many_elements_as_the_data_say() -> None:
    def function(x: Tensor) -> Tensor:
        part = x.to_sparse(1).narrow(0, 1, 1)
        return F.rms_norm(part, part.shape[-1:])

    mask = torch.tensor([True, True, False, True])
    assert_compiled_as_eager(function, lambda: (md.masked_tensor(torch.arange(1.0, 5.0), mask),))


GROWING_WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "an index": lambda x, i: x.__setitem__(i, 3.0),
    "a row": lambda x, i: x.__setitem__(1, 3.0),
    "a list": lambda x, i: torch._foreach_mul_([x], [x[:1].expand_as(x)]),
}


@pytest.mark.parametrize("write", GROWING_WRITES)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_write_that_changes_how_many_are_stored_has_a_derivative(layout: torch.layout, write: str) -> None:
    """The size of the gradient is the result's, which only the write has given it (P7, seed 9000022)."""
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, True]])
    places = torch.tensor([[1, 2, 2], [0, 0, 1], [1, 1, 0]])
    which = md.masked_tensor(torch.tensor([1, 0, 1]), torch.tensor([True, False, True])).to_sparse()

    def function(table: Tensor, index: Tensor, which: Tensor) -> Tensor:
        chosen = table[index]
        GROWING_WRITES[write](chosen, which)
        return chosen

    torch._dynamo.reset()
    gradients = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        table = torch.linspace(1.0, 2.0, 3).requires_grad_()
        result = run(table, md.masked_tensor(places, mask).to_sparse(layout=layout), which)
        (result * result).sum().backward()
        gradients.append((result.detach(), table.grad))
    md.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_strides_of_a_part_are_taken_in_a_graph(dynamic: bool) -> None:
    def own_strides(x: Tensor) -> Tensor:
        part = x.split(1, 2)[-1]
        return part.as_strided(part.shape, part.stride())

    x = md.masked_tensor(
        torch.randn(2, 2, 2), torch.tensor([[[True, True], [False, False]], [[True, False], [True, True]]])
    )
    torch._dynamo.reset()
    found = torch.compile(own_strides, backend="aot_eager", fullgraph=True, dynamic=dynamic)(x)
    md.testing.assert_close(found, own_strides(x), rtol=0, atol=0)
