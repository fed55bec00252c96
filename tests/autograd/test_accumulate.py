"""accumulate: the sum of what is there; and the autograd engine's own sums, which are the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import masked_dispatch as md
from few_elements import EITHER, FIRST, INF, NAN, SECOND, F, T, shown
from few_elements import vector as masked


def test_what_one_lacks_the_other_has() -> None:
    a, b = masked([1.0, 2, 3, 4], FIRST), masked([10.0, 20, 30, 40], SECOND, INF)
    assert shown(md.accumulate(a, b)) == [11, 2, 30, None]
    assert shown(a + b) == [11, None, None, None]
    assert shown(md.accumulate(a, b, a)) == [12, 4, 30, None]


def test_plain_tensors_are_all_there() -> None:
    a = masked([1.0, 2, 3, 4], FIRST)
    total = md.accumulate(a, torch.full((4,), 0.5, dtype=torch.float64))
    assert shown(total) == [1.5, 2.5, 0.5, 0.5]
    assert md.is_masked_tensor(total)
    plain = md.accumulate(torch.ones(2), torch.ones(2), torch.ones(2))
    assert type(plain) is Tensor
    assert plain.tolist() == [3, 3]


def test_one_tensor_is_copied() -> None:
    for x in (torch.ones(2), md.masked_tensor(torch.ones(2), torch.tensor([T, F]))):
        total = md.accumulate(x)
        total.zero_()
        assert x.to_tensor(1.0).tolist() == [1, 1] if md.is_masked_tensor(x) else x.tolist() == [1, 1]


def test_broadcast_as_in_add() -> None:
    column = md.masked_tensor(torch.tensor([[1.0], [2.0], [NAN]]), torch.tensor([[T], [T], [F]]))
    row = md.masked_tensor(torch.tensor([10.0, NAN]), torch.tensor([T, F]))
    total = md.accumulate(column, row)
    assert total.get_mask().tolist() == [[T, T], [T, T], [T, F]]
    assert total.to_tensor(0.0).tolist() == [[11, 1], [12, 2], [10, 0]]
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        md.accumulate(torch.ones(2), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    small = torch.finfo(dtype).eps / 2  # one of them added to 1 is lost, four are not
    pieces = [md.masked_tensor(torch.tensor([value], dtype=dtype), torch.tensor([T])) for value in (1.0, *[small] * 4)]
    total = md.accumulate(*pieces)
    assert total.dtype is dtype
    assert total.item() == 1 + 4 * small
    assert sum(piece.item() for piece in pieces[1:]) == 4 * small
    folded = pieces[0]
    for piece in pieces[1:]:
        folded = folded + piece
    assert folded.item() == 1.0


DTYPES = [torch.bool, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.complex64]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from([(), (1,), (2, 1), (3,)])), min_size=1, max_size=4),
    st.integers(0, 1000),
)
def test_shape_and_dtype_are_those_of_a_sum(kinds: list[tuple[torch.dtype, tuple[int, ...]]], seed: int) -> None:
    """Values, too: against a loop over positions, in float64, garbage under the masks."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(0, 5, shape, generator=generator).to(dtype) for dtype, shape in kinds]
    masks = [torch.rand(t.shape, generator=generator) < 0.5 for t in tensors]
    garbage = [torch.where(m, t, t.logical_not().to(t.dtype)) for t, m in zip(tensors, masks, strict=True)]
    total = md.accumulate(*[md.masked_tensor(t, m) for t, m in zip(garbage, masks, strict=True)])
    folded = tensors[0]
    for tensor in tensors[1:]:
        folded = folded + tensor
    assert (total.shape, total.dtype) == (folded.shape, folded.dtype)
    exact = torch.zeros(folded.shape, dtype=torch.complex128 if folded.is_complex() else torch.float64)
    somewhere = torch.zeros(folded.shape, dtype=torch.bool)
    for tensor, mask in zip(tensors, masks, strict=True):
        exact = exact + torch.where(mask, tensor, 0)
        somewhere = somewhere | mask
    assert torch.equal(total.get_mask(), somewhere)
    assert_close(total.to_tensor(0), exact.to(folded.dtype))


# --------------------------------------------------------------------------------------------- derivatives and modes


def combined(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    total: Any = md.accumulate(md.as_masked_tensor(a, FIRST) ** 2, md.as_masked_tensor(b, SECOND).exp(), w)
    return (total.sin() * torch.arange(1.0, 5.0, dtype=torch.float64)).to_tensor(0.0)


@pytest.mark.filterwarnings("ignore:Input #")
def test_derivatives_of_every_kind() -> None:
    operands = [torch.rand(4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert gradcheck(combined, operands, check_forward_ad=True)
    assert gradgradcheck(combined, operands)


def test_gradients_are_masked_like_what_was_accumulated() -> None:
    a, b = masked([1.0, 2, 3, 4], FIRST, requires_grad=True), masked([1.0, 2, 3, 4], SECOND, requires_grad=True)
    w = torch.ones(4, dtype=torch.float64, requires_grad=True)
    (md.accumulate(a, b).mask_with(SECOND) * w).sum().backward()
    assert shown(a.grad) == [1, 0, None, None]
    assert shown(b.grad) == [1, None, 1, None]
    assert type(w.grad) is Tensor
    assert w.grad.tolist() == [2, 0, 3, 0]


def test_errors() -> None:
    with pytest.raises(TypeError, match="at least one tensor"):
        md.accumulate()
    with pytest.raises(TypeError, match=r"argument 1 is 2\.0, a float"):
        md.accumulate(torch.ones(2), 2.0)
    with pytest.raises(TypeError, match=r"argument 0 is \[.*Unpack a list"):
        md.accumulate([torch.ones(2)])


# ------------------------------------------------------------------------------------- the sums of the autograd engine


class Times(torch.autograd.Function):
    """The identity, whose gradient comes back multiplied by a masked tensor: absent where that is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def by_roots(x: Tensor, a: Tensor, b: Tensor, create_graph: bool) -> Tensor:
    y = x * 2
    return torch.autograd.grad([y, y], x, [a, b], create_graph=create_graph)[0]


def by_functions(x: Tensor, a: Tensor, b: Tensor, create_graph: bool) -> Tensor:
    y = x * 2
    loss = Times.apply(y, a).sum() + Times.apply(y, b).sum()
    return torch.autograd.grad(loss, x, create_graph=create_graph)[0]


@pytest.mark.parametrize("flow", [by_roots, by_functions])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_that_meet_are_accumulated(flow: Callable[..., Tensor], create_graph: bool) -> None:
    """Of a tensor that is used twice. The gradient has its mask, whatever the masks of what met in between."""
    a, b = masked([1.0, 2, 3, 4], FIRST), masked([10.0, 20, 30, 40], SECOND)
    x = masked([1.0, 1, 1, 1], torch.tensor([T, T, T, T]), requires_grad=True)
    assert shown(flow(x, a, b, create_graph)) == [22, 4, 60, 0]
    partial = masked([1.0, 1, 1, 1], torch.tensor([F, T, T, F]), requires_grad=True)
    assert shown(flow(partial, a, b, create_graph)) == [None, 4, 60, None]


def test_a_plain_gradient_that_meets_a_masked_one_stays_plain() -> None:
    w = torch.ones(4, dtype=torch.float64, requires_grad=True)
    (Times.apply(w, masked([1.0, 2, 3, 4], FIRST)).sum() + (w * 5).sum()).backward()
    assert type(w.grad) is Tensor
    assert w.grad.tolist() == [6, 7, 5, 5]


def test_a_sum_in_a_hook_or_a_backward_is_elementwise() -> None:
    a, b = masked([1.0, 2, 3, 4], FIRST), masked([10.0, 20, 30, 40], SECOND)
    seen = []

    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(a + b)
            return gradient

    x = masked([1.0, 1, 1, 1], EITHER, requires_grad=True)
    y = Adds.apply(x)
    y.register_hook(lambda gradient: seen.append(a + b))
    y.sum().backward()
    assert [shown(s) for s in seen] == [[11, None, None, None]] * 2


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged, torch.sparse_coo])
def test_batches_of_which_one_has_a_sample_without_positions(layout: torch.layout) -> None:
    """What is known of a batch depends on its lengths, and a sum of two does not."""
    for first, second in itertools.permutations([[3, 1], [0, 2], [2, 0]], 2):
        batches = [md.from_lengths(torch.ones(2, 3), torch.tensor(lengths)) for lengths in (first, second)]
        total = md.accumulate(*(x.to_layout(layout) for x in batches))
        expected = (batches[0].extent | batches[1].extent).tolist()
        assert total.to_dense().extent.tolist() == total.get_mask().tolist() == expected
