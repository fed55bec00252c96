"""Attention of packed batches, dense dimensions in front of sparse ones, and whole modules (P4)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md
from packed_batches import CLASSES, KINDS, B, Block, D, H, T, alike, batch, heads, plain, same

# --------------------------------------------------------------------------------------------------------- attention


ATTENTION: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "bool mask": {"attn_mask": plain(T, T) > -0.3},
    "mask without keys": {"attn_mask": torch.ones(T, T, dtype=torch.bool).tril(-2)},
    "mask by batch": {"attn_mask": plain(B, 1, T, T) > -0.3},
    "bias by head": {"attn_mask": plain(1, H, T, T)},
    "masked bias": {"attn_mask": md.masked_tensor(plain(T, T), plain(T, T, seed=9) > -0.5)},
    "dropout": {"dropout_p": 0.3},
    "dropout, causal": {"dropout_p": 0.3, "is_causal": True},
    "dropout, mask": {"dropout_p": 0.3, "attn_mask": plain(T, T) > -0.3},
}


@pytest.mark.parametrize(
    ("name", "kind"), [*zip(ATTENTION, itertools.cycle(KINDS[:3]), strict=False), ("causal", "none valid")]
)
def test_attention_of_one_sequence_to_itself(name, kind):
    def attend(x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in x.chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, **ATTENTION[name]).transpose(1, 2).flatten(2)

    found = alike(attend, [batch(kind, 3 * D)])
    assert found[0].storage_layout is torch.jagged


PAIRS = [("padding", "holes"), ("all valid", "none valid"), ("holes", "padding")]


@pytest.mark.parametrize(("name", "kinds"), zip(ATTENTION, itertools.cycle(PAIRS), strict=False))
def test_attention_to_other_sequences(name, kinds):
    def attend(x: Tensor, y: Tensor) -> Tensor:
        k, v = (heads(part) for part in y.chunk(2, -1))
        return F.scaled_dot_product_attention(heads(x), k, v, **ATTENTION[name]).transpose(1, 2).flatten(2)

    # (causality counts queries and keys from 0, and rows with holes do not begin there)
    alike(attend, [batch(kinds[0], D).without_extent(), batch(kinds[1], 2 * D, seed=3).without_extent()])


def test_attention_to_sequences_of_another_length():
    def attend(x: Tensor, y: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, y, y)

    other = md.masked_tensor(plain(B, 3, D), torch.arange(3)[:, None] < torch.tensor([3, 1, 2, 0, 1])[:, None, None])
    alike(attend, [batch("padding", D), other])


def test_attention_of_rows_that_are_partly_valid():
    x = batch("padding", 3 * D).mask_with(torch.arange(B * T * 3 * D).reshape(B, T, 3 * D) % 5 > 1)

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(heads(part) for part in x.chunk(3, -1)), is_causal=True)

    alike(attend, [x])


def test_attention_to_joined_keys_and_values():
    """As a cache of keys does: keys and values are joined in time separately, and then list the same rows."""

    def attend(x: Tensor, y: Tensor) -> Tensor:
        k, v = (torch.cat([heads(part) for part in (y, extra)], 2) for extra in (x, x.exp()))
        return F.scaled_dot_product_attention(heads(x), k, v).transpose(1, 2).flatten(2)

    found = alike(attend, [batch("holes", D), batch("padding", D, seed=3)])
    assert found[0].storage_layout is torch.jagged


def test_attention_of_grouped_queries():
    def attend(x: Tensor, y: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in y.chunk(2, -1))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    alike(attend, [batch("padding", 8), batch("padding", 8, seed=2)], policy="auto")
    both = batch("padding", 16)
    alike(lambda z: attend(*z.split([8, 8], -1)), [both])


# ---------------------------------------------------------------------------------- dense dimensions before sparse ones


TURNED: dict[str, Callable[[Tensor], Any]] = {
    "there and back": lambda x: heads(x).exp().transpose(1, 2),
    "stays": lambda x: heads(x).exp() * heads(x) + plain(H, 1, 2),
    "three at once": lambda x: x.view(B, T, 2, H, 1).permute(2, 0, 3, 1, 4).unbind(0),
    "one of three": lambda x: x.view(B, T, 2, H, 1).permute(2, 0, 3, 1, 4)[1],
    "norms of heads": lambda x: F.rms_norm(heads(x), (2,), plain(2)),
    "linear of heads": lambda x: F.linear(heads(x), plain(3, 2)),
    "softmax of heads": lambda x: heads(x).softmax(-1),
    "rotated": lambda x: torch.cat([-heads(x)[..., 1:], heads(x)[..., :1]], -1) * plain(T, 2),
    "unsqueezed": lambda x: heads(x).unsqueeze(1),
    "heads repeated": lambda x: heads(x)[:, :, None].expand(B, H, 3, T, 2).reshape(B, 3 * H, T, 2),
    "heads divided": lambda x: heads(x).reshape(B, 1, H, T, 1, 2),
    "turned by position": lambda x: heads(x) * plain(B, T, 2).unsqueeze(1),
    "dropout": lambda x: F.dropout(heads(x), 0.3),
}


@pytest.mark.parametrize(
    ("name", "kind"), [*zip(TURNED, itertools.cycle(KINDS[:3]), strict=False), ("rotated", "none valid")]
)
def test_dense_dimensions_before_sparse_ones(name, kind):
    alike(TURNED[name], [batch(kind, D)])


def test_what_has_no_form_with_dense_dimensions_in_front_is_stored_densely_or_refused():
    x = heads(batch("padding", D).to_packed())
    dense = heads(batch("padding", D))
    same(x.sum(2), dense.sum(2))
    same(x @ x.mT, dense @ dense.mT)
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match="has no sparse form for this call"):
        x @ x.mT


# --------------------------------------------------------------------------------------------------- whole modules


@pytest.mark.parametrize(
    ("kind", "causal"), [("padding", True), ("holes", False), ("all valid", False), ("none valid", True)]
)
def test_a_transformer_block_never_leaves_the_rows(kind, causal):
    torch.manual_seed(3)
    block = Block(D, H, causal).double()
    parameters = list(block.parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        names = [name for name, _ in block.named_parameters()]
        return torch.func.functional_call(block, dict(zip(names, values, strict=True)), (x,))

    found = alike(run, [batch(kind, D)], parameters)
    assert found[0].storage_layout is torch.jagged


def test_torchs_own_multihead_attention():
    torch.manual_seed(3)
    module = nn.MultiheadAttention(D, H, batch_first=True).double()
    x = batch("padding", D)
    for found, expected in zip(module(*[x.to_packed()] * 3), module(x, x, x), strict=True):
        same(found, expected)


def test_a_model_learns_from_packed_batches_what_it_learns_from_padded_ones():
    torch.manual_seed(3)
    models = [nn.Sequential(Block(D, H), nn.Linear(D, D)).double()]
    models.append(copy.deepcopy(models[0]))
    x = batch("padding", D)
    for model, given in zip(models, (x, x.to_packed()), strict=True):
        torch.manual_seed(4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(given).view(-1, D), CLASSES.view(-1)).backward()
            optimizer.step()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b)
