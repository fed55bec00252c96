"""Writes that random programs found lost, accepted or refused otherwise than by torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from logical_writes import LOGICAL, check_write_to_leaf, masked, plain
from masked_dispatch.torch_internals import tracks_writes
from op_registry import registry, resolve
from op_registry.laws.categories import ELEMENTWISE
from op_registry.schema import is_inplace

Write = Callable[[Tensor], object]
OVERLAP = "some elements of the input tensor and the written-to tensor refer to a single memory location"


# ------------------------------------------------------------------- writes of operators that torch composes of others

COMPOSED: dict[str, Write] = {
    "selu_": torch.selu_,
    "rrelu_": lambda x: torch.rrelu_(x, 0.2, 0.2),
    "clip_": lambda x: x.clip_(-0.5, 0.5),
    "multiply_": lambda x: x.multiply_(3),
    "relu6": lambda x: F.relu6(x, inplace=True),
    "fill_diagonal_": lambda x: x.fill_diagonal_(2.0),
    "arctan_": lambda x: x.arctan_(),
    "float_power_": lambda x: x.double().float_power_(2),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x[:, ::2],
    "transposed": lambda x: x.mT,
    "rows of a scan": lambda x: x.cumsum(0)[1:],
    "flat": lambda x: x.view(-1),
}


def gradient_through(write: Write, view: Callable[[Tensor], Tensor], made: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = made(torch.linspace(-1.0, 1.0, 12).reshape(3, 4)).requires_grad_()
    seen = view(leaf.clone())
    write(seen)
    total = (seen * torch.arange(seen.numel()).reshape(seen.shape)).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return gradient


# Each write through two views; fill_diagonal_ takes two dimensions or more.
THROUGH = [
    (write, view)
    for n, write in enumerate(COMPOSED)
    for view in ([*VIEWS][n % 4], [*VIEWS][(n + 1) % 4])
    if (write, view) != ("fill_diagonal_", "flat")
]


@pytest.mark.parametrize(("write", "view"), THROUGH)
def test_a_composed_write_through_a_view_is_recorded(write: str, view: str) -> None:
    wanted = gradient_through(COMPOSED[write], VIEWS[view], plain)
    gradient = gradient_through(COMPOSED[write], VIEWS[view], masked)
    assert isinstance(gradient, md.MaskedTensor)
    torch.testing.assert_close(gradient.to_tensor(0), wanted)


def test_every_in_place_operator_raises_the_version() -> None:
    """Also one that has no kernel of its own for it, of which there are some."""
    composed = []
    for base in registry:
        name = base._schema.name.partition("::")[2]
        op = getattr(getattr(torch.ops.aten, f"{name}_", None), base._schema.overload_name or "default", None)
        tensors = [a for a in base._schema.arguments if str(a.type) == "Tensor"]
        one = len(tensors) == 1 and not any(a.default_value is None for a in base._schema.arguments[1:])
        if op is None or not is_inplace(op) or not one or resolve(op).rule is None:
            continue
        if resolve(op).rule.category is not ELEMENTWISE:
            continue
        x = masked(torch.full((2, 2), 0.5) if "bitwise" not in name else torch.ones(2, 2, dtype=torch.int64))
        before = x._version
        op(x)
        assert x._version == before + 1, op
        composed += [] if tracks_writes(op) else [op]
    assert torch.ops.aten.selu_.default in composed


# ------------------------------------------------------------------------------------------------- overlapping operands

REFUSED: dict[str, Write] = {
    "copy_": lambda x: x[1:].copy_(x[:-1]),
    "add_": lambda x: x[1:].add_(x[:-1]),
    "assignment": lambda x: x.__setitem__(slice(1, None), x[:-1]),
    "addcmul_": lambda x: x.mT.addcmul_(x, x),
    "out of order": lambda x: x.mT.copy_(x),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0]), x[:1]),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([0]), x[1:2]),
    "index_put_": lambda x: x.index_put_((torch.tensor([0]),), x[1:2]),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, 3, dtype=torch.int64), x[1:2]),
    "scatter_add_": lambda x: x.scatter_add_(0, torch.zeros(1, 3, dtype=torch.int64), x[1:2]),
    "scatter_reduce_": lambda x: x.scatter_reduce_(0, torch.zeros(1, 3, dtype=torch.int64), x[1:2], "amax"),
}
ALLOWED: dict[str, Write] = {
    "itself": lambda x: x.mul_(x),
    "another view of itself": lambda x: x.mul_(x[:]),
    "a number of it": lambda x: x.masked_fill_(x > 3, x[0, 1]),
    "a fill with a number of it": lambda x: x.fill_(x[0, 1]),
    "its copy": lambda x: x[1:].copy_(x[:-1].clone()),
    "other rows": lambda x: x[1:].copy_(x[:1].expand(2, 3)),
}


def of_nine(made: Callable[[Tensor], Tensor]) -> Tensor:
    return made(torch.arange(9.0).reshape(3, 3))


@pytest.mark.parametrize(("write", "made"), [*((write, masked) for write in REFUSED), ("copy_", plain)])
def test_an_operand_in_the_memory_that_is_written_is_refused(write: str, made: Callable[[Tensor], Tensor]) -> None:
    x = of_nine(made)
    with pytest.raises(RuntimeError, match=OVERLAP):
        REFUSED[write](x)
    assert torch.equal(torch.as_tensor(x.to_tensor(0) if made is masked else x), of_nine(plain))  # type: ignore[attr-defined]


@pytest.mark.parametrize("write", ALLOWED)
def test_what_torch_can_write_is_written(write: str) -> None:
    x, wanted = of_nine(masked), of_nine(plain)
    ALLOWED[write](x)
    ALLOWED[write](wanted)
    assert isinstance(x, md.MaskedTensor)
    assert torch.equal(x.to_tensor(-1), wanted)


def test_a_plain_tensor_is_not_updated_from_its_own_memory() -> None:
    data = torch.arange(4.0)
    with pytest.raises(RuntimeError, match=OVERLAP):
        data[1:].add_(md.as_masked_tensor(data[:-1]))


def test_a_copy_of_an_expanded_tensor_to_itself_changes_nothing() -> None:
    row = md.masked_tensor(torch.arange(3.0), torch.tensor([True, False, True]))
    rows = row.expand(2, 3)
    rows.copy_(rows)
    assert row.get_mask().tolist() == [True, False, True]
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        rows.copy_(rows.clone())


def test_two_outputs_in_one_memory_are_refused() -> None:
    memory = torch.zeros(6)
    x = masked(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"aminmax\(\): out= tensors must not overlap"):
        torch.aminmax(x, dim=0, out=(memory[:4], memory[2:]))
    both = torch.zeros(8)
    torch.aminmax(x, dim=0, out=(both[:4], both[4:]))


# ------------------------------------------------------------------------------------------- what torch does not record


@pytest.mark.parametrize("made", [plain, masked])
@pytest.mark.parametrize("name", LOGICAL)
def test_a_logical_write_to_a_leaf_is_not_recorded(name: str, made: Callable[[Tensor], Tensor]) -> None:
    check_write_to_leaf(name, made, lambda write: write)


FACTORIES: list[Callable[..., Tensor]] = [torch.zeros_like, torch.rand_like, torch.empty_like, torch.full_like]


@pytest.mark.parametrize(("view", "factory"), zip(VIEWS, FACTORIES, strict=True))
def test_a_factory_takes_a_view_whose_base_was_written_to(view: str, factory: Callable[..., Tensor]) -> None:
    base = masked(torch.ones(3, 4)).requires_grad_().clone()
    seen = VIEWS[view](base)
    base.add_(1)
    made = factory(seen, 1.0) if factory is torch.full_like else factory(seen)
    assert made.shape == seen.shape
    assert not made.requires_grad
