"""Memory that code allocates from a masked tensor: `new_zeros`, `new_empty`, `new_tensor`, `new` …

What is uninitialised is invalid until it is written, so functions that fill such memory by slices keep the mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch import MaskedSemanticsError, MaskedTensor
from storages import STORAGES

MASK = torch.tensor([[True, False, True, True], [True, False, False, True], [False, False, True, True]])


def eager(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(f, backend="aot_eager", fullgraph=True)


MODES = {"eager": eager, "compiled": compiled}


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()


def matrix() -> MaskedTensor:
    return md.masked_tensor(torch.where(MASK, torch.arange(1.0, 13.0).reshape(3, 4), torch.nan), MASK)


@pytest.fixture(params=STORAGES)
def x(request: pytest.FixtureRequest) -> MaskedTensor:
    return STORAGES[request.param](matrix())


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return MODES[request.param]


def shown(t: Tensor) -> list[Any]:
    """Values in a flat list, "--" where invalid."""
    assert isinstance(t, MaskedTensor)
    dense = t.to_dense()
    pairs = zip(dense.get_data().flatten().tolist(), dense.get_mask().flatten().tolist(), strict=True)
    return [value if valid else "--" for value, valid in pairs]


WRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "new_zeros": (lambda x: x.new_zeros(2), [0, 0]),
    "new_ones": (lambda x: x.new_ones(2, dtype=torch.int64), [1, 1]),
    "new_full": (lambda x: x.new_full((2,), 3.0), [3, 3]),
    "new_tensor of a list": (lambda x: x.new_tensor([1, 2]), [1, 2]),
    "new_tensor of a number": (lambda x: x.new_tensor(2.5, dtype=torch.int64), [2]),
    "new_tensor of a tensor": (lambda x: x.new_tensor(torch.tensor([1, 2])), [1, 2]),
    "new of a list": (lambda x: x.new([1, 2]), [1, 2]),
    "new of a tuple": (lambda x: x.new((1, 2)), [1, 2]),
    "new of a plain tensor": (lambda x: x.new(torch.tensor([5.0])), [5]),
}
UNINITIALISED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "empty_like": (torch.empty_like, (-1, -1)),
    "new_empty": (lambda x: x.new_empty(2, 3), (2, 3)),
    "new_empty_strided": (lambda x: x.new_empty_strided((2, 3), (1, 2)), (2, 3)),
    "new()": (lambda x: x.new(), (0,)),
    "new of sizes": (lambda x: x.new(2, 3), (2, 3)),
    "new of a size": (lambda x: x.new(torch.Size((2, 1))), (2, 1)),
    "new of its own size": (lambda x: x.new(x.shape), (-1, -1)),
}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # torch's own, of the plain tensor
def test_what_torch_writes_is_valid(x: MaskedTensor, mode: Callable[..., Any]) -> None:
    results = mode(lambda x: [make(x) for make, _ in WRITTEN.values()])(x)
    for result, (name, (make, values)) in zip(results, WRITTEN.items(), strict=True):
        assert shown(result) == values, name
        assert result.dtype == make(torch.ones(3, 4)).dtype, name


def test_what_is_uninitialised_is_invalid(x: MaskedTensor, mode: Callable[..., Any]) -> None:
    results = mode(lambda x: [make(x) for make, _ in UNINITIALISED.values()])(x)
    for result, (name, (_, shape)) in zip(results, UNINITIALISED.items(), strict=True):
        assert isinstance(result, MaskedTensor), name
        assert result.shape == (x.shape if -1 in shape else shape), name
        assert int(result.count()) == 0, name


def test_new_tensor_and_new_of_a_masked_tensor_are_as_valid_as_it(x: MaskedTensor, mode: Callable[..., Any]) -> None:
    for result in mode(lambda x: (x.new_tensor(x), x.new(x)))(x):
        assert shown(result) == shown(x)
    assert x.new_tensor(x, dtype=torch.float64).dtype is torch.float64
    assert not x.new_tensor(x).requires_grad
    assert x.new_tensor(x, requires_grad=True).is_leaf


def test_new_of_a_tensor_shares_its_memory_and_new_tensor_does_not(x: MaskedTensor) -> None:
    x = x.clone()  # writing to a view of a sparse tensor is refused
    copy = x.new_tensor(x)
    x.new(x).fill_(7.0)
    assert shown(x) == [7.0] * 12
    assert shown(copy) != [7.0] * 12
    plain = torch.zeros(2)
    x.new(plain).fill_(7.0)
    assert plain.tolist() == [7, 7]


def test_new_of_a_tensor_is_differentiable() -> None:
    x = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]), requires_grad=True)
    (x.new(x) * 2).sum().backward()
    assert shown(x.grad) == [2, "--", 2]


def test_new_takes_arrays_and_refuses_what_it_cannot_mask() -> None:
    x = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    assert shown(x.new(np.array([1, 2]))) == [1, 2]
    assert shown(x.new_tensor(np.array([[1.0, 2.0]]))) == [1, 2]
    assert x.new(np.int64(2)).shape == (2,)
    with pytest.raises(MaskedSemanticsError, match=r"x\.new\(storage\).*8 bytes.*as_masked_tensor\(data, mask\)"):
        x.new(torch.ones(2).untyped_storage())
    with pytest.raises(TypeError, match=r"torch\.float32 on cpu, like x; it is torch\.int64 on cpu.*x\.new_tensor"):
        x.new(torch.ones(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"sizes, a tensor, or data in one sequence; got 2 arguments"):
        x.new([1], [2])
    with pytest.raises(md.InvalidValueError, match="invalid"):
        x.new_tensor([x[0], x[1]])


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.new_zeros(3, layout=torch.sparse_coo),
        lambda x: x.new_tensor([1.0], layout=torch.sparse_coo),
        lambda x: torch.zeros_like(x, layout=torch.sparse_coo),
        lambda x: torch.empty_like(x, layout=torch.sparse_coo),
    ],
)
def test_a_torch_sparse_buffer_is_refused(make: Callable[[Tensor], Tensor]) -> None:
    x = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    with pytest.raises(MaskedSemanticsError, match=re.escape("no place for a mask. Leave the layout out")):
        make(x)


def filled_by_slices(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What code does with memory that it allocates: writes by slices, by index, and by assignment of a number."""
    empty, zeros, like = x.new_empty(3, 3), x.new_zeros(4), torch.empty_like(x)
    empty[:, 0] = x[:, 1]
    empty[:2, 1].copy_(x[:2, 0])
    empty.index_copy_(1, torch.tensor([2]), torch.ones(3, 1))
    zeros[1:3] = x[2, :2] + x[2, 2:]
    like[0], like[1, 1:] = x[0], 4.0
    return empty, zeros, like


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_buffer_filled_by_slices_keeps_the_mask(backend: str) -> None:
    x = matrix()
    run = filled_by_slices if backend == "eager" else torch.compile(filled_by_slices, backend=backend, fullgraph=True)
    empty, zeros, like = run(x)
    assert shown(empty) == ["--", 1, 1, "--", 5, 1, "--", "--", 1]
    assert shown(zeros) == [0, "--", "--", 0]
    assert shown(like) == [1, "--", 3, 4, "--", 4, 4, 4, "--", "--", "--", "--"]


def test_a_buffer_in_vmap() -> None:
    x = matrix()

    def one(row: Tensor) -> Tensor:
        made = row.new_empty(3)
        made[0], made[1:] = row[0], row.new_tensor([8.0, 9.0])
        return made

    assert shown(md.functional.vmap(one)(x)) == [1, 8, 9, 5, 8, 9, "--", 8, 9]


def test_gradients_through_a_buffer() -> None:
    x = matrix().requires_grad_()
    made = x.new_empty(2, 4)
    made[0] = x[0] * 2
    made.sum().backward()
    assert shown(x.grad) == [2, "--", 2, 2, 0, "--", "--", 0, "--", "--", 0, 0]


def test_the_engine_allocates_gradients_as_before() -> None:
    """`.grad` of a permuted leaf, and of a leaf of which a view was written to, are allocated by new_empty_strided."""
    mask = MASK.t()
    x = md.masked_tensor(torch.ones(4, 3), mask).t().detach().requires_grad_()
    base = x * 1
    base[:, 1:].mul_(2)
    base.sum().backward()
    assert x.grad.get_mask().equal(mask.t())
    assert x.grad.stride() == x.stride()
    assert set(shown(x.grad)) == {1.0, 2.0, "--"}


def test_memory_of_a_tensor_without_elements() -> None:
    x = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    for resize in (lambda t: t.resize_(2, 2), lambda t: t.resize_as_(torch.ones(2, 2))):
        made = x.new()
        assert resize(made) is made
        assert shown(made) == ["--"] * 4
        made[0].fill_(1.0)
        assert shown(made) == [1, 1, "--", "--"]
    out = x.new()
    torch.add(x, x, out=out)
    assert shown(out[1:]) == ["--", 2]
    with pytest.raises(RuntimeError, match="cannot resize variables that require grad"):
        x.new().requires_grad_().resize_(2)
    with pytest.raises(MaskedSemanticsError, match="resize_ is refused"):
        x.resize_(4)
