"""FlexAttention's BlockMask there and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import masked_dispatch as md
from door_samples import batch_of, masked, same
from masked_dispatch import interop

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@given(masked((torch.float32,), st.tuples(*[st.integers(1, 3)] * 4)), st.sampled_from([1, 2, 128]))
def test_there_and_back(x: md.MaskedTensor, size: int) -> None:
    block_mask = interop.to_block_mask(x, block_size=size)
    assert tuple(block_mask.shape) == tuple(x.shape)
    same(interop.from_block_mask(x.get_data(), block_mask), x)


def test_blocks_that_are_full_or_absent_count() -> None:
    """Four queries and keys in blocks of two: one block by its mask_mod, one full, two in no list."""
    counts, indices = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    full_counts, full = (
        torch.tensor([[[0, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32),
    )
    block_mask = BlockMask.from_kv_blocks(
        counts, indices, full_counts, full, BLOCK_SIZE=2, mask_mod=lambda b, h, q, k: q >= k, seq_lengths=(4, 4)
    )
    x = interop.from_block_mask(torch.zeros(1, 1, 4, 4), block_mask)
    assert x.get_mask()[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_one_block_mask_for_all_heads_and_gradients() -> None:
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 3, 3, device="cpu")
    scores = torch.zeros(2, 2, 3, 3, requires_grad=True)
    x = interop.from_block_mask(scores, causal)
    assert torch.equal(x.get_mask(), torch.ones(2, 2, 3, 3).tril().bool())
    x.sum().backward()
    assert torch.equal(scores.grad, torch.ones(2, 2, 3, 3).tril())


def test_attention_leaves_out_the_padding() -> None:
    torch.manual_seed(0)
    x = batch_of(torch.tensor([2, 3]), 4).to(torch.float32)
    query = torch.randn(2, 1, 3, 4)
    keys = x.to_tensor(1e3)[:, None]
    found = flex_attention(query, keys, keys, block_mask=interop.to_key_block_mask(x))
    expected = torch.nn.functional.scaled_dot_product_attention(query, x[:, None], x[:, None])
    torch.testing.assert_close(found, expected.to_tensor(0))
    assert interop.to_key_block_mask(x, queries=5).shape == (2, 1, 5, 3)


@pytest.mark.parametrize(
    ("convert", "text"),
    [
        (lambda: interop.to_block_mask(torch.ones(2, 3, 4)), r"\(B, H, Q, K\), not \(2, 3, 4\); .* to_key_block_mask"),
        (lambda: interop.to_key_block_mask(torch.ones(2)), r"shape \(2,\) has no positions that a BlockMask describes"),
        (
            lambda: interop.from_block_mask(torch.ones(1, 1, 2, 3), interop.to_block_mask(torch.ones(1, 1, 3, 3))),
            r"a block mask of shape \(1, 1, 3, 3\) does not fit scores of shape \(1, 1, 2, 3\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(convert: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        convert()
