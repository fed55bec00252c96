"""Packed storage: a padded batch kept as its rows; views of it, without moving a row (P4)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from packed_batches import (
    BH,
    CLASSES,
    KINDS,
    MERGED,
    B,
    Block,
    D,
    H,
    T,
    alike,
    batch,
    check_random_views,
    heads,
    plain,
    rows,
    same,
)

# ------------------------------------------------------------------------------------------------------- the storage


@pytest.mark.parametrize(
    ("kind", "sizes"), [("padding", (D,)), ("holes", ()), ("all valid", (H, D)), ("none valid", (D,))]
)
def test_there_and_back(kind, sizes):
    x = batch(kind, *sizes)
    packed = x.to_packed()
    assert packed.storage_layout is torch.jagged
    assert packed.nnz == int(rows(kind).sum())
    same(packed.to_dense(), x)
    same(packed, x)
    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo):
        other = packed.to_layout(layout, sparse_dim=2)
        assert other.storage_layout is layout
        same(other.to_packed(), x)


@pytest.mark.parametrize("shape", [(0, T, D), (B, 0, D), (0, 0, D), (B, T, 0)])
def test_batches_of_nothing(shape):
    x = md.masked_tensor(torch.ones(shape), torch.ones((*shape[:2], 1), dtype=torch.bool))
    packed = x.to_packed()
    assert packed.nnz == 0
    for function in (torch.exp, lambda t: t + 1, lambda t: F.linear(t, torch.ones(3, shape[-1])), torch.clone):
        same(function(packed), function(x))


def test_rows_that_are_partly_valid_are_kept_with_what_is_valid_in_them():
    x = batch("padding", D)
    x = x.mask_with(torch.arange(B * T * D).reshape(B, T, D) % 3 > 0)
    packed = x.to_packed()
    same(packed, x)
    alike(lambda t: F.linear(t, torch.ones(2, D).double()).softmax(-1), [x])
    alike(lambda t: F.layer_norm(t, (D,)), [x])


def test_lengths_say_what_is_stored():
    x = md.from_lengths(torch.randn(3, 4, 2), torch.tensor([4, 0, 2]))
    packed = x.to_packed()
    assert packed._pattern.lengths() == [4, 0, 2]
    assert packed._kept_validity is None


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((4,), {}, "packed storage is for a batch (B, T, ...) whose first 2 dimensions are sparse: shape (4,)"),
        ((2, 3, 4), {"sparse_dim": 3}, "shape (2, 3, 4) cannot be stored so with sparse_dim=3"),
        ((2, 4), {"blocksize": (2, 2)}, "torch.jagged has no blocks"),
    ],
)
def test_what_cannot_be_packed(shape, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        md.masked_tensor(torch.ones(shape)).to_layout(torch.jagged, **arguments)


def test_the_gradient_of_a_packed_leaf_is_packed():
    leaf = batch("holes", D).to_packed().detach().requires_grad_()
    F.linear(leaf, WEIGHT).square().sum().backward()
    assert leaf.grad.storage_layout is torch.jagged
    assert leaf.grad._pattern is leaf._pattern


def test_second_derivatives():
    gradients = []
    for packed in (False, True):
        x, w = batch("holes", D).requires_grad_(), WEIGHT.clone().requires_grad_()
        given = x.to_packed() if packed else x
        hidden = heads(F.layer_norm(F.gelu(F.linear(given, w.mT @ w)), (D,))).softmax(-1)
        loss = (hidden.transpose(1, 2).flatten(2) * given).sin().sum()
        first = torch.autograd.grad(loss, (x, w), create_graph=True)
        gradients.append(torch.autograd.grad(first[0].sin().sum().to_tensor(0) + first[1].sin().sum(), (x, w)))
    for a, b in zip(*gradients, strict=True):
        same(a, b)


def test_in_place_on_rows():
    packed, padded = batch("padding", D).to_packed().clone(), batch("padding", D)
    for x in (packed, padded):
        x.mul_(2).add_(batch("holes", D).without_extent()).relu_()
    same(packed, padded)
    assert packed.storage_layout is torch.jagged
    hidden = F.linear(packed, WEIGHT)
    hidden += 1
    same(hidden, F.linear(padded, WEIGHT) + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    x = batch("padding", D).float()
    block = Block(D, H).eval()
    with torch.autocast("cpu", dtype):
        same(block(x.to_packed()), block(x))
    block, x = block.to(dtype), x.to(dtype)
    same(block(x.to_packed()), block(x))


# ------------------------------------------------------------------------------------------------ operators on rows

WEIGHT, BIAS = plain(3, D), plain(3, seed=2)

# Each with the rows that are valid. P4 asks the operators of torch's database: these are chains of them, and calls that
# its samples lack.
ON_ROWS: dict[str, tuple[str, Callable[..., Any]]] = {
    "matrix times vector": ("all valid", lambda x, w, b: x @ w[0] + b.sum()),
    "silu, gated": ("holes", lambda x, w, b: F.silu(F.linear(x, w, b)) * F.linear(x, w)),
    "dropout": ("padding", lambda x, w, b: F.dropout(x * w[0], 0.4) + b.sum()),
    "feature dropout": ("holes", lambda x, w, b: F.dropout1d(x * w[0], 0.4) + b.sum()),
    "dropout of everything": ("none valid", lambda x, w, b: F.dropout(x * w[0], 1.0) + b.sum()),
    "pooled mean": ("padding", lambda x, w, b: (x * w[0]).mean(1) + b.sum()),
    "heads": ("holes", lambda x, w, b: (x * w[0]).view(B, T, H, -1).exp().reshape(B, T, D) + b.sum()),
    "glu": ("padding", lambda x, w, b: F.glu(x * w[0], -1) * b.sum()),
    "flip and roll": ("holes", lambda x, w, b: (x * w[0]).flip(-1).roll(1, -1) + b.sum()),
    "cat": ("all valid", lambda x, w, b: torch.cat([x * w[0], F.linear(x, w, b)], -1)),
    "getitem": ("holes", lambda x, w, b: [(x * w[0])[..., :2] * b.sum(), (x * w[0])[:, :, 1:3], x[..., 0]]),
    "whole blocks": (
        "none valid",
        lambda x, w, b: F.linear(F.dropout(F.gelu(F.linear(F.layer_norm(x, (D,)), w, b)), 0.2), w.mT) + x,
    ),
}


@pytest.mark.parametrize("name", ON_ROWS)
def test_operators_on_rows(name):
    kind, function = ON_ROWS[name]
    results = alike(function, [batch(kind, D)], [WEIGHT, BIAS])
    if "pooled" not in name:
        assert {r.storage_layout for r in results} == {torch.jagged}


def test_what_moves_dense_dimensions_keeps_the_pattern():
    x = batch("padding", D).to_packed()
    moved = x.view(B, T, H, 2).transpose(1, 2).transpose(1, 2).flatten(2)
    assert moved._pattern is x._pattern
    assert torch.cat([x, x], -1)._pattern is x._pattern
    assert F.layer_norm(x, (D,))._pattern is x._pattern


@pytest.mark.parametrize("kind", ["holes", "none valid"])
def test_embedding_of_packed_indices(kind):
    indices = md.masked_tensor(torch.arange(B * T).reshape(B, T) % 7, rows(kind))
    found = alike(lambda i, w: F.embedding(i, w, padding_idx=2), [indices], [plain(7, D)])
    assert found[0].storage_layout is torch.jagged


LOSSES: dict[str, tuple[str, Callable[..., Any]]] = {
    "cross_entropy": ("padding", lambda x: F.cross_entropy(x.transpose(1, 2), CLASSES)),
    "cross_entropy, masked": (
        "holes",
        lambda x: F.cross_entropy(x.view(-1, D), md.masked_tensor(CLASSES).mask_like(x[..., 0]).view(-1)),
    ),
    "cross_entropy, smoothed": (
        "none valid",
        lambda x: F.cross_entropy(x.view(-1, D), CLASSES.view(-1), label_smoothing=0.1),
    ),
    "cross_entropy, ignored": (
        "padding",
        lambda x: F.cross_entropy(x.view(-1, D), CLASSES.view(-1), ignore_index=1, weight=plain(D).abs()),
    ),
    "cross_entropy, all ignored": ("holes", lambda x: F.cross_entropy(x.view(-1, D), torch.full((B * T,), -100))),
    "cross_entropy, unreduced": ("all valid", lambda x: F.cross_entropy(x.transpose(1, 2), CLASSES, reduction="none")),
    "cross_entropy, shares": (
        "holes",
        lambda x: F.cross_entropy(x.transpose(1, 2), plain(B, T, D).softmax(-1).transpose(1, 2)),
    ),
}


@pytest.mark.parametrize(("kind", "function"), LOSSES.values(), ids=LOSSES)
def test_losses_of_rows(kind, function):
    alike(function, [batch(kind, D)])


def test_a_loss_over_no_batch_at_all_is_torchs():
    x = md.masked_tensor(torch.ones(0, T, D))
    same(F.mse_loss(x.to_packed(), torch.ones(0, T, D)), F.mse_loss(x, torch.ones(0, T, D)))


# -------------------------------------------------------------------------------------------------------------- views


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
    "products of rows": lambda x: x.view(-1, D) @ plain(D, 3) + torch.addmm(BIAS, x.view(-1, D), plain(D, 3), beta=2),
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
    "a product and a matrix": lambda x: torch.addmm(plain(B * T, 3), x.view(-1, D), plain(D, 3)),
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


# Cases of the sweep over random views that reach what the views above don't: sparse dimensions of size 1.
@pytest.mark.parametrize(("seed", "sizes"), [(0, (5, 6)), (0, (1, 1)), (4, (1, 1)), (10, (1, 1)), (10, (1, 6))])
def test_a_sequence_of_views(seed: int, sizes: tuple[int, int]) -> None:
    check_random_views(seed, sizes)


@pytest.mark.parametrize("view", [*MERGED.values(), heads], ids=[*MERGED, "heads"])
def test_questions_to_views(view: Callable[[Tensor], Tensor]) -> None:
    padded, packed = view(batch("holes", D)), view(batch("holes", D).to_packed())
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
