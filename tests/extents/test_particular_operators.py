"""Operators for which it matters where a position is, or how many there are; each against the loop over samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md

NAN = float("nan")


def batch(*lengths: int, width: int = 2, left: bool = False) -> tuple[Tensor, list[Tensor]]:
    """A padded batch (B, T, width) with NaN in the padding, and its samples."""
    torch.manual_seed(0)
    samples = [torch.randn(n, width, dtype=torch.float64) for n in lengths]
    longest = max(lengths)
    data = torch.full((len(lengths), longest, width), NAN, dtype=torch.float64)
    mask = torch.zeros(len(lengths), longest, dtype=torch.bool)
    for n, sample in enumerate(samples):
        where = slice(longest - len(sample), longest) if left else slice(0, len(sample))
        data[n, where], mask[n, where] = sample, True
    return md.padded(md.masked_tensor(data, mask[..., None].expand(data.shape)), dim=1), samples


def same(result: Tensor, samples: list[Tensor], f: Callable[[Tensor], Tensor]) -> None:
    """Where the result is there, it is that of each sample."""
    there = result.extent
    for n, sample in enumerate(samples):
        mine = result.get_data()[n] if there is None else result.get_data()[n][there[n]]
        valid = result.get_mask()[n] if there is None else result.get_mask()[n][there[n]]
        assert bool(valid.all())
        torch.testing.assert_close(mine.reshape(-1), f(sample).reshape(-1))


@pytest.mark.parametrize("op", [torch.tril, torch.triu])
def test_triangles_of_samples(op: Callable[[Tensor], Tensor]) -> None:
    x, samples = batch(3, 1, 2)
    same(op(x), samples, op)


@pytest.mark.parametrize("op", [torch.tril, torch.triu])
def test_triangles_behind_padding_are_refused(op: Callable[[Tensor], Tensor]) -> None:
    x, _ = batch(3, 1, 2, left=True)
    with pytest.raises(md.MaskedSemanticsError, match="counts rows and columns from 0, where samples do not begin"):
        op(x)


def test_the_integral_over_one_position_is_0() -> None:
    x, samples = batch(3, 1, 2)
    same(torch.trapezoid(x, dim=1), samples, lambda s: torch.trapezoid(s, dim=0))


@pytest.mark.parametrize("left", [False, True])
def test_causal_attention_of_steps_to_themselves(left: bool) -> None:
    x, samples = batch(4, 1, 3, left=left)
    same(
        F.scaled_dot_product_attention(x, x, x, is_causal=True),
        samples,
        lambda s: F.scaled_dot_product_attention(s, s, s, is_causal=True),
    )


def test_causal_attention_to_what_lies_elsewhere_is_refused() -> None:
    x, _ = batch(4, 1, 3, left=True)
    with pytest.raises(md.MaskedSemanticsError, match="is_causal counts queries and keys from 0"):
        F.scaled_dot_product_attention(torch.ones(3, 4, 2, dtype=torch.float64), x, x, is_causal=True)


def test_a_list_of_classes_ends_with_the_sample() -> None:
    scores, samples = batch(3, 2, width=1)
    labels = torch.tensor([[2, 0, -1], [1, 0, 9]])
    there = torch.tensor([[True, True, True], [True, True, False]])
    target = md.padded(md.masked_tensor(labels, there), dim=1)
    result = F.multilabel_margin_loss(scores.squeeze(-1), target, reduction="none")
    want = [F.multilabel_margin_loss(s[:, 0], labels[n, : len(s)]) for n, s in enumerate(samples)]
    torch.testing.assert_close(result.to_tensor(0), torch.stack(want))


def test_bags_hold_what_is_there() -> None:
    weight = torch.randn(5, 2, dtype=torch.float64)
    indices = torch.tensor([[3, 1, 4], [2, 99, 99]])
    bags = md.padded(md.masked_tensor(indices, indices < 99), dim=1)
    for mode in ("sum", "mean", "max"):
        result = F.embedding_bag(bags, weight, mode=mode)
        want = [F.embedding_bag(bag[None], weight, mode=mode)[0] for bag in (indices[0], indices[1, :1])]
        torch.testing.assert_close(result.to_tensor(0), torch.stack(want))


def test_ctc_of_samples() -> None:
    x, samples = batch(5, 3, width=4)
    targets, lengths = torch.tensor([[1, 2], [3, 0]]), (2, 1)
    result = F.ctc_loss(x.transpose(0, 1).log_softmax(-1), targets, (5, 3), lengths, reduction="none")
    want = [
        F.ctc_loss(
            s[:, None].log_softmax(-1), targets[n : n + 1, : lengths[n]], (len(s),), (lengths[n],), reduction="none"
        )
        for n, s in enumerate(samples)
    ]
    torch.testing.assert_close(result.to_tensor(0), torch.cat(want))


def test_a_diagonal_of_features() -> None:
    x, samples = batch(3, 1)
    same(torch.diag_embed(x), samples, torch.diag_embed)


def test_channels_may_be_samples() -> None:
    """Pooling treats channels as it treats samples: (C, T) without samples, and (N, C, T) with lengths for each."""
    x, samples = batch(4, 2, width=1)
    one = x.squeeze(-1)
    same(F.max_pool1d(one[None], 2)[0], samples, lambda s: F.max_pool1d(s.T, 2))
    same(F.adaptive_avg_pool1d(one, 2), samples, lambda s: F.adaptive_avg_pool1d(s.T, 2))


def test_group_norm_of_samples() -> None:
    x, samples = batch(4, 1, 3, width=4)
    weight = torch.arange(1.0, 5, dtype=torch.float64)
    same(
        F.group_norm(x.transpose(1, 2), 2, weight).transpose(1, 2),
        samples,
        lambda s: F.group_norm(s.T[None], 2, weight)[0].T,
    )


@pytest.mark.parametrize("add", [False, True])
def test_sources_write_what_they_have(add: bool) -> None:
    source, samples = batch(3, 1, 2, width=1)
    index = torch.tensor([[2, 0, 1], [1, 4, 4], [0, 3, 4]])
    into = torch.zeros(3, 5, dtype=torch.float64)
    result = (torch.scatter_add if add else torch.scatter)(md.masked_tensor(into), 1, index, source.squeeze(-1))
    assert result.extent is None
    for n, sample in enumerate(samples):
        want = torch.scatter(into[n], 0, index[n, : len(sample)], sample[:, 0])
        torch.testing.assert_close(result.get_data()[n], want)
        assert bool(result.get_mask()[n].all())
