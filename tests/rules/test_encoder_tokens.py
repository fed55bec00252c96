"""nn.TransformerEncoderLayer in eval: tokens alone, without the padding, padded or packed, whatever the lengths."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from called_operators import Calls
from masked_dispatch import as_masked_tensor, is_masked_tensor, masked_tensor

TIME, WIDTH = 6, 8
LENGTHS = {"uneven": (6, 4, 1), "equal": (4, 4, 4), "one without a token": (3, 0, 6), "one": (5,), "no token": (0, 0)}


def batch_of(lengths, holes=False):
    """Tokens, NaN where there is none, and which are there: the first of each sequence, or with holes between them."""
    generator = torch.Generator().manual_seed(0)
    there = torch.arange(TIME) < torch.tensor(lengths)[:, None]
    if holes:
        there = there & (torch.rand(there.shape, generator=generator) < 0.6)
    tokens = torch.randn(len(lengths), TIME, WIDTH, generator=generator)
    return torch.where(there[..., None], tokens, math.nan), there


def layer(**options):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, **options).eval()


def one_by_one(module, tokens, there):
    """Each sequence by itself, 0 where there is no token."""
    expected = torch.zeros_like(tokens)
    for b, kept in enumerate(there):
        if kept.any():
            expected[b, kept] = module(tokens[b : b + 1, kept])[0]
    return expected


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_each_sequence_is_encoded_as_if_alone(lengths, packed, holes, guard):
    tokens, there = batch_of(lengths, holes)
    with guard():
        x = as_masked_tensor(tokens, there[..., None])
        for options in ({}, {"norm_first": True, "activation": "gelu"}):
            module = layer(**options)
            found = module(x.to_packed() if packed else x)
            assert torch.equal(found.get_mask(), there[..., None].expand_as(tokens))
            torch.testing.assert_close(found.to_tensor(0), one_by_one(module, tokens, there))


@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_of_attention_is_heeded(packed):
    tokens, there = batch_of((6, 4, 1))
    module, future = layer(), torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    with torch.no_grad():
        x = as_masked_tensor(tokens, there[..., None])
        found = module(x.to_packed() if packed else x, src_mask=future).to_tensor(0)
        for b, n in enumerate((6, 4, 1)):
            torch.testing.assert_close(found[b, :n], module(tokens[b : b + 1, :n], src_mask=future[:n, :n])[0])


@pytest.mark.parametrize("packed", [False, True])
def test_invalid_weights_do_not_take_part(packed):
    tokens, there = batch_of((6, 4, 1))
    module, plain = layer(), layer()
    known = torch.rand(16, WIDTH) < 0.7
    with torch.no_grad():
        plain.linear1.weight[~known] = 0
        module.linear1.weight = nn.Parameter(masked_tensor(module.linear1.weight, known))
        x = as_masked_tensor(tokens, there[..., None])
        found = module(x.to_packed() if packed else x)
    torch.testing.assert_close(found.to_tensor(0), one_by_one(plain, tokens, there))


def test_where_the_tokens_are_is_found_once_for_a_mask():
    tokens, there = batch_of((6, 4, 1))
    x = as_masked_tensor(tokens, there[..., None])
    first, second = layer(), layer()
    with torch.no_grad(), Calls() as calls:
        found = second(first(x))
    assert is_masked_tensor(found)
    assert calls.seen.count(torch.ops.aten.nonzero.default) == 1
    with torch.no_grad():
        x[0, 5] = masked_tensor(torch.zeros(WIDTH), torch.zeros(WIDTH, dtype=torch.bool))
        there[0, 5] = False
        torch.testing.assert_close(first(x).to_tensor(0), one_by_one(first, tokens, there))
