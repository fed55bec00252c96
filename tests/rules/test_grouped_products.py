"""F.grouped_mm (mixtures of experts): each group is a product of its own, and what belongs to no group is invalid."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from masked_dispatch import MaskedSemanticsError
from uninitialised_memory import can_be_poisoned, difference

ENDS = (3, 3, 6)  # the second group is empty, and the last two rows belong to none


def masked(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> md.MaskedTensor:
    generator = torch.Generator().manual_seed(seed)
    data, mask = torch.randn(shape, generator=generator).to(dtype), torch.rand(shape, generator=generator) < 0.3
    return md.masked_tensor(torch.where(mask, data, torch.nan), mask)


def offsets(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def groups() -> list[tuple[int, int]]:
    return list(zip((0, *ENDS), ENDS))  # noqa: B905  the last begins none


def rows_by_loop(x: md.MaskedTensor, w: md.MaskedTensor) -> list[Tensor]:
    return [x[start:end] @ w[n] for n, (start, end) in enumerate(groups())]


def columns_by_loop(x: md.MaskedTensor, w: md.MaskedTensor) -> list[Tensor]:
    return [x[n] @ w[:, start:end] for n, (start, end) in enumerate(groups())]


def sums_by_loop(x: md.MaskedTensor, w: md.MaskedTensor) -> list[Tensor]:
    return [x[:, start:end] @ w[start:end] for start, end in groups()]


# The shapes of the operands, the loop, and how to cut the result into the groups.
KINDS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[..., list[Tensor]], Callable[[Tensor], list[Tensor]]]]
KINDS = {
    "rows": ((8, 16), (3, 16, 8), rows_by_loop, lambda r: [r[start:end] for start, end in groups()]),
    "columns": ((3, 8, 16), (16, 8), columns_by_loop, lambda r: [r[:, start:end] for start, end in groups()]),
    "sums": ((8, 8), (8, 8), sums_by_loop, lambda r: list(r)),
}


def assert_same(mine: Tensor, theirs: Tensor) -> None:
    assert isinstance(mine, md.MaskedTensor)
    assert isinstance(theirs, md.MaskedTensor)
    assert torch.equal(mine.get_mask(), theirs.get_mask())
    torch.testing.assert_close(mine.to_tensor(0), theirs.to_tensor(0))


def test_an_operand_may_be_plain() -> None:
    x, w = masked(8, 16, seed=1), torch.randn(3, 16, 8)
    assert_same(F.grouped_mm(x, w, offs=offsets(*ENDS))[:3], x[:3] @ w[0])
    y = F.grouped_mm(torch.ones(8, 16), masked(3, 16, 8, seed=3), offs=offsets(*ENDS))
    assert_same(y[3:6], torch.ones(3, 16) @ masked(3, 16, 8, seed=3)[2])


def test_of_batches_is_bmm() -> None:
    x, w = masked(2, 8, 16, seed=1), masked(2, 16, 8, seed=2)
    assert_same(F.grouped_mm(x, w), torch.bmm(x, w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision(dtype: torch.dtype) -> None:
    x, w = masked(8, 16, seed=1, dtype=dtype), masked(3, 16, 8, seed=2, dtype=dtype)
    result = F.grouped_mm(x, w, offs=offsets(*ENDS))
    assert result.dtype is dtype
    wide = F.grouped_mm(x.float(), w.float(), offs=offsets(*ENDS))
    assert torch.equal(result.get_mask(), wide.get_mask())
    torch.testing.assert_close(result.to_tensor(0).float(), wide.to_tensor(0), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", ["rows", "columns"])
@pytest.mark.parametrize("stored", [False, True])
def test_what_belongs_to_no_group_is_invalid(kind: str, stored: bool) -> None:
    """torch leaves it uninitialised."""
    x_shape, w_shape, _, _ = KINDS[kind]
    mask = torch.ones(x_shape, dtype=torch.bool) if stored else None
    result = F.grouped_mm(md.masked_tensor(torch.ones(x_shape), mask), torch.ones(w_shape), offs=offsets(*ENDS))
    counts = result.get_mask().sum(1 if kind == "rows" else 0).tolist()
    assert counts[6:] == [0, 0]
    assert min(counts[:6]) > 0


def results(kind: str, by_loop: bool) -> list[Tensor]:
    """The products, and the gradients of both operands."""
    x_shape, w_shape, loop, cut = KINDS[kind]
    x, w = masked(*x_shape, seed=1).requires_grad_(), masked(*w_shape, seed=2).requires_grad_()
    parts = loop(x, w) if by_loop else cut(F.grouped_mm(x, w, offs=offsets(*ENDS)))
    weights = [torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) for p in parts]
    total = sum((w * p.to_tensor(0)).sum() for w, p in zip(weights, parts, strict=True))
    assert isinstance(total, Tensor)
    return [*(part.detach() for part in parts), *torch.autograd.grad(total, [x, w])]


@pytest.mark.parametrize("kind", KINDS)
def test_is_the_loop_over_the_groups(kind: str) -> None:
    for mine, theirs in zip(results(kind, False), results(kind, True), strict=True):
        assert_same(mine, theirs)


@pytest.mark.skipif(not can_be_poisoned(), reason="uninitialised memory gets a content by glibc's mallopt alone")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_read_no_uninitialised_memory(kind: str) -> None:
    def equal(a: list[Tensor], b: list[Tensor]) -> str | None:
        pairs = [(m.to_tensor(0), t.to_tensor(0)) for m, t in zip(a, b, strict=True)]
        return None if all(torch.equal(m, t) for m, t in pairs) else str(pairs)

    assert difference(lambda: results(kind, False)[-2:], equal) is None


def test_offsets_have_to_be_valid() -> None:
    x, w = masked(8, 16, seed=1), torch.randn(2, 16, 8)
    ends = offsets(3, 8)
    assert_same(F.grouped_mm(x, w, offs=md.masked_tensor(ends)), F.grouped_mm(x, w, offs=ends))
    with pytest.raises(MaskedSemanticsError, match=r"grouped_mm.*where a group ends.*offs\.to_tensor"):
        F.grouped_mm(x, w, offs=md.masked_tensor(ends, torch.tensor([True, False])))


def test_torch_refuses_what_it_refuses() -> None:
    with pytest.raises(RuntimeError, match="Offsets have to be int32"):
        F.grouped_mm(masked(8, 16, seed=1), torch.ones(2, 16, 8), offs=torch.tensor([3, 8]))
    with pytest.raises(RuntimeError, match="Have to provide offsets"):
        F.grouped_mm(masked(8, 16, seed=1), torch.ones(2, 16, 8))


# ------------------------------------------------------------------------------------------------- padded tokens

TOKENS = {"right": [4, 2, 0, 3], "left": [4, 2, 0, 3]}


def padded_tokens(side: str) -> md.MaskedTensor:
    """A batch of 4 samples (4, 4, 16), NaN where none of its tokens is."""
    there = torch.arange(4) < torch.tensor(TOKENS[side])[:, None]
    there = there.flip(1) if side == "left" else there
    data = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(4))
    data = torch.where(there[..., None], data, torch.nan)
    return md.padded(md.masked_tensor(data, there[..., None].expand(4, 4, 16)))


def experts(x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """Each token (R, 16) times the matrix that is chosen for it, as mixtures of experts compute it."""
    ordered, order = torch.sort(chosen)
    counts = torch.histc(ordered.float(), bins=len(w), min=0, max=len(w) - 1)
    y = F.grouped_mm(x[order], w, offs=counts.cumsum(0, dtype=torch.int32))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return y[back]


@pytest.mark.parametrize("side", TOKENS)
def test_padded_tokens_are_the_loop_over_tokens(side: str) -> None:
    x = padded_tokens(side).requires_grad_()
    w = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()
    chosen = torch.randint(3, (16,), generator=torch.Generator().manual_seed(6))
    there = x.extent[..., 0]
    masked_choice = md.padded(md.masked_tensor(chosen.view(4, 4), there)).reshape(-1)
    y = experts(x.reshape(16, 16), w, masked_choice).reshape(4, 4, 8)
    assert torch.equal(y.extent, there[..., None].expand(4, 4, 8))
    assert torch.equal(y.get_mask(), y.extent)
    tokens = x.detach().compressed().view(-1, 16).requires_grad_()
    alone = torch.stack([token @ w[n] for token, n in zip(tokens, chosen[there.flatten()], strict=True)])
    torch.testing.assert_close(y.compressed().view(-1, 8), alone)
    weight = torch.randn(alone.shape, generator=torch.Generator().manual_seed(7))
    mine = torch.autograd.grad((y.compressed().view(-1, 8) * weight).sum(), [x, w])
    theirs = torch.autograd.grad((alone * weight).sum(), [tokens, w])
    torch.testing.assert_close(mine[0].compressed(), theirs[0].flatten())
    torch.testing.assert_close(mine[1], theirs[1])


@pytest.mark.parametrize("side", TOKENS)
def test_rows_of_the_batch_do_not_mix(side: str) -> None:
    x, w = padded_tokens(side).reshape(16, 16), torch.randn(3, 16, 8)
    y = F.grouped_mm(x, w, offs=offsets(5, 5, 16))
    holes = x.without_extent()
    by_loop = torch.cat([holes[:5] @ w[0], holes[5:] @ w[2]])
    assert torch.equal(y.extent, x.extent[:, :8])
    assert_same(y, by_loop)
    columns = F.grouped_mm(w.mT, x.mT, offs=offsets(5, 5, 16))
    assert_same(columns.mT, by_loop)
    assert torch.equal(columns.extent.mT, y.extent)


def test_sums_over_padded_tokens_are_refused() -> None:
    """A group that has only padding would sum nothing, and be 0."""
    x = padded_tokens("right").reshape(16, 16)
    with pytest.raises(MaskedSemanticsError, match=r"grouped_mm: of its dimensions.*knows which of its positions"):
        F.grouped_mm(x.mT, torch.ones(16, 8), offs=offsets(3, 16))
