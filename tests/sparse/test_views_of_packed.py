"""Views of packed batches: dimensions in another order, merged and split, without moving a row (P4)."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from merged_views import BH, MERGED
from packed_batches import CLASSES, KINDS, B, D, H, T, alike, batch, heads, plain, same
from random_views import check_random_views

# Views of (B, T, D) that torch.nn and models of transformers make; each stays packed.
VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "time first": lambda x: x.transpose(0, 1),
    "time first and back": lambda x: x.transpose(0, 1).exp().transpose(0, 1),
    "rows": lambda x: x.view(B * T, D),
    "rows and back": lambda x: x.view(-1, D).exp().view(B, T, D),
    "rows, time first": lambda x: x.transpose(0, 1).reshape(T * B, D),
    "rows and back, time first": lambda x: x.transpose(0, 1).reshape(T * B, D).exp().view(T, B, D).transpose(0, 1),
    "rows in heads": lambda x: x.reshape(B * T, D).view(B, T, H, 2).transpose(1, 2),
    "batch times heads": lambda x: x.transpose(0, 1).reshape(T, BH, 2).transpose(0, 1),
    "batch times heads, split": lambda x: x.transpose(0, 1).reshape(T, BH, 2).transpose(0, 1).view(B, H, T, 2),
    "batch times heads from heads": lambda x: heads(x).reshape(BH, T, 2),
    "heads times batch": lambda x: heads(x).transpose(0, 1).reshape(H * B, T, 2),
    "heads joined": lambda x: heads(x).permute(2, 0, 1, 3).contiguous().view(T * B, D),
    "projection": lambda x: x.unflatten(-1, (2, 2)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()[1],
    "unsqueezed in front": lambda x: x.unsqueeze(0),
    "unsqueezed in the middle": lambda x: x.unsqueeze(1).unsqueeze(3),
    "unsqueezed and expanded": lambda x: x.unsqueeze(2).expand(B, T, 3, D),
    "squeezed": lambda x: x.unsqueeze(0).transpose(0, 3).squeeze(3),
    "squeezed anywhere": lambda x: x.view(B, 1, T, 1, D).squeeze(),
    "squeezed in several": lambda x: x.view(B, 1, T, 1, D).squeeze((1, 3)),
    "everything in one": lambda x: x.flatten(),
    "features by time": lambda x: x.flatten(1),
    "last time": lambda x: x.transpose(0, 1)[-1],
    "first of heads": lambda x: heads(x)[:, :, 0],
    "some times": lambda x: heads(x)[:, :, 1:4],
    "one sequence": lambda x: heads(x)[1],
    "times unbound": lambda x: x.transpose(0, 1).unbind(),
    "stacked in front": lambda x: torch.stack([x, x.exp()]),
    "stacked heads": lambda x: torch.stack([heads(x), heads(x).exp()], 2),
    "joined in time": lambda x: torch.cat([heads(x), heads(x).exp()], 2),
    "joined with nothing": lambda x: torch.cat([torch.tensor([]).double(), heads(x)], -2),
    "rows joined with nothing": lambda x: torch.cat([x, torch.tensor([]).double()], 1),
    "split unsafely": lambda x: [*x.unsafe_chunk(2, -1), *heads(x).unsafe_split_with_sizes([1, 1], 1)],
    "matrix of time and features": lambda x: x[..., 0].t().exp(),
    "token of indices": lambda x: x[..., 0].unsqueeze(-1) * x,
    "time first, with a plain one": lambda x: x.transpose(0, 1) + plain(T, 1, D),
    "rows, with a plain one": lambda x: x.view(-1, D) * plain(B * T, D) + plain(D),
    "batch times heads, with a plain one": lambda x: heads(x).reshape(BH, T, 2) + plain(BH, 1, 1) + plain(T, 2),
    "products of rows": lambda x: x.view(-1, D) @ plain(D, 3) + torch.addmm(plain(3), x.view(-1, D), plain(D, 3)),
    "linear of rows, time first": lambda x: F.linear(x.transpose(0, 1).reshape(T * B, D), plain(3, D)).view(T, B, 3),
    "norm, time first": lambda x: F.layer_norm(x.transpose(0, 1), (D,)),
    "softmax of rows": lambda x: x.view(-1, D).softmax(-1),
}  # fmt: skip

# What has no form on a view runs with the sparse dimensions first. P4 asks reductions, scans and sorts of batches with
# time in front ("time_first_packed").
AFTER_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "several at once": lambda x: heads(x).sum((1, 2)),
    "norms of heads, kept": lambda x: heads(x).norm(dim=-1, keepdim=True) * heads(x),
    "features of rows": lambda x: x.transpose(0, 1).reshape(T * B, D).amax(-1),
    "heads in front, over time": lambda x: heads(x).transpose(0, 1).sum(2),
    "largest of heads": lambda x: heads(x).max(2).values,
    "batch times heads over time": lambda x: x.transpose(0, 1).reshape(T, BH, 2).var(0),
    "stacked with other rows": lambda x: torch.stack([x[..., 0], x[..., 1].flip(1)], 1),
    "stacked in depth with other rows": lambda x: torch.dstack([x[..., 0], x[..., 1].flip(1)]),
    "turned": lambda x: [x.without_extent()[..., 0].rot90(k) for k in range(4)],
    "scan of heads": lambda x: heads(x).cumsum(2),
    "loss, time first": lambda x: F.cross_entropy(x.transpose(0, 1).reshape(-1, D), CLASSES.t().reshape(-1)),
    "rows chosen": lambda x: x.view(-1, D)[torch.tensor([0, 7, 7])],
    "another split": lambda x: x.view(-1, D).view(T, B, D),
}


@pytest.mark.parametrize(
    ("name", "kind"), [*zip(VIEWS, itertools.cycle(KINDS[:3]), strict=False), ("rows in heads", "none valid")]
)
@pytest.mark.filterwarnings("ignore::masked_dispatch.BatchEndWarning")
def test_a_view_moves_no_row(name: str, kind: str) -> None:
    found = alike(VIEWS[name], [batch(kind, D)])
    if name not in ("last time", "first of heads", "one sequence", "times unbound"):  # of them, time or batch is left
        assert {r.storage_layout for r in found} == {torch.jagged}


@pytest.mark.parametrize(
    ("name", "kind"), [*zip(AFTER_VIEWS, itertools.cycle(KINDS[:3]), strict=False), ("turned", "none valid")]
)
def test_after_a_view(name: str, kind: str) -> None:
    alike(AFTER_VIEWS[name], [batch(kind, D)])


# Cases of test_random_views_of_packed.py that reach what the views above don't: sparse dimensions of size 1.
@pytest.mark.parametrize(("seed", "sizes"), [(0, (5, 6)), (0, (1, 1)), (4, (1, 1)), (10, (1, 1)), (10, (1, 6))])
def test_a_sequence_of_views(seed: int, sizes: tuple[int, int]) -> None:
    check_random_views(seed, sizes)


@pytest.mark.parametrize("name", MERGED)
def test_copies_and_files_of_views(name: str) -> None:
    x = MERGED[name](batch("holes", D).to_packed()).clone()
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    for again in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.load(buffer, weights_only=True)):
        assert again.storage_layout is torch.jagged
        same(again, x)
        same(again.exp() + x, x.exp() + x)


@pytest.mark.parametrize("name", MERGED)
def test_questions_to_views(name: str) -> None:
    padded = MERGED[name](batch("holes", D))
    packed = MERGED[name](batch("holes", D).to_packed())
    mask = plain(*packed.shape) > 0
    same(packed.mask_with(mask), padded.mask_with(mask))
    assert torch.equal(packed.compressed(), padded.compressed())
    for dims in [None, *range(packed.ndim), tuple(range(packed.ndim))]:
        for keepdim in (False, True):
            assert torch.equal(packed.count(dims, keepdim), padded.count(dims, keepdim))
    for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr):
        same(packed.to_layout(layout), padded)
    same(md.accumulate(packed, packed.exp()), md.accumulate(padded, padded.exp()))
    for other in (packed.clone(), packed.to_dense()):
        one, two = packed.clone(), padded.clone()
        same(one.mul_(2).add_(other), two.mul_(2).add_(padded))
    same(torch.zeros(packed.shape).double().add_(packed), torch.zeros(packed.shape).double().add_(padded))


@pytest.mark.parametrize("name", MERGED)
def test_views_under_transforms(name: str) -> None:
    x = MERGED[name](batch("padding", D).to_packed())
    weight = plain(*x.shape)

    def loss(t: Tensor) -> Tensor:
        return (t.sin() * weight).sum().to_tensor(0)

    same(md.functional.grad(loss)(x), md.functional.grad(loss)(x.to_dense()))


def test_a_sum_of_gradients_of_views_stays_packed() -> None:
    x = batch("holes", D).to_packed().requires_grad_()
    with md.densify("never"):
        parts = heads(x).reshape(BH, T, 2), heads(x).reshape(BH, T, 2).exp(), x.view(-1, D)
        sum(part.square().sum() for part in parts).backward()
    assert x.grad.storage_layout is torch.jagged
    assert x.grad._pattern is x._pattern
