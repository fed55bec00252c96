"""Operators for which it matters where a position is, or how many there are; each against the loop over samples.

P9 asks those of which torch's database has samples with such dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def test_the_integral_over_rows_that_are_not_there_is_not_there() -> None:
    there = torch.tensor([[[1, 1], [1, 1]], [[1, 0], [0, 0]]]).bool()
    x = md.padded(md.masked_tensor(torch.ones(2, 2, 2), there), dim=(1, 2))
    assert torch.trapezoid(x, dim=2).to_tensor(-1).tolist() == [[1, 1], [0, -1]]
    joined = torch.cat([x[..., 0], torch.ones(2, 1)], 1)  # the second sample has a gap
    with pytest.raises(md.MaskedSemanticsError, match="intervals along dimension 1 would lie between positions"):
        torch.trapezoid(joined, dim=1)


@pytest.mark.parametrize("left", [False, True])
def test_differences_are_each_samples_own(left: bool) -> None:
    x, samples = batch(4, 2, 3, left=left)
    for n in (1, 2):
        same(x.diff(n, dim=1), samples, lambda s, n=n: s.diff(n, dim=0))
    assert (x > 0).diff(dim=1).dtype is torch.bool
    assert x.diff(dim=2).extent.equal(x.extent[..., :1])


READ_THE_BATCH: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "gradient": (lambda x: torch.gradient(x, dim=1), "reads the ends of the batch"),
    "gradient, spacing": (lambda x: torch.gradient(x, spacing=2.0, dim=[1]), "reads the ends of the batch"),
    "fftshift": (lambda x: torch.fft.fftshift(x, 1), "half the size of the batch"),
    "ifftshift": (lambda x: torch.fft.ifftshift(x), "half the size of the batch"),
    "vander": (lambda x: torch.linalg.vander(x[..., 0]), "as many powers as the batch has positions"),
}


@pytest.mark.parametrize("name", READ_THE_BATCH)
def test_decompositions_that_read_the_batch_are_refused(name: str) -> None:
    x, _ = batch(3, 2)
    call, why = READ_THE_BATCH[name]
    with pytest.raises(md.MaskedSemanticsError, match=why):
        call(x)


def test_along_other_dimensions_they_are_served() -> None:
    x, samples = batch(3, 2)
    same(torch.gradient(x, dim=2)[0], samples, lambda s: torch.gradient(s, dim=1)[0])
    same(torch.fft.fftshift(x, 2), samples, lambda s: torch.fft.fftshift(s, 1))
    same(torch.linalg.vander(x, N=2), samples, lambda s: torch.linalg.vander(s, N=2))


@pytest.mark.parametrize("left", [False, True])
def test_lp_pooling_sums_what_is_valid(left: bool) -> None:
    data = torch.tensor([[3.0, 0, 5, 6], [3, 4, 3, 4]])
    there = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1] if left else [1, 1, 0, 0]]).bool()
    x = md.padded(md.masked_tensor(data, there & (data != 0)), there)
    found = F.lp_pool1d(x[:, None], 2, 2)[:, 0]
    assert [row.compressed().square().round().tolist() for row in found] == [[9, 61], [25]]


def in_the_middle(*lengths: int) -> md.MaskedTensor:
    width = max(lengths)
    index = torch.arange(width)
    start, n = (width - torch.tensor(lengths)[:, None]) // 2, torch.tensor(lengths)[:, None]
    there = (index >= start) & (index < start + n)
    return md.padded(md.masked_tensor(torch.arange(1.0, width + 1).expand(len(lengths), -1), there))


def test_groups_of_positions_are_each_samples_own_or_refused() -> None:
    for call in (lambda x: x.view(2, 3, 2), lambda x: x.unflatten(1, (-1, 2)), lambda x: F.channel_shuffle(x, 2)):
        with pytest.raises(md.MaskedSemanticsError, match=r"groups of .*positions are those of the batch"):
            call(in_the_middle(6, 4))
    assert in_the_middle(6, 2).view(2, 3, 2).sum(2).compressed().tolist() == [3, 7, 11, 7]  # it begins at a group
    assert in_the_middle(6, 4)[..., None].view(2, 6, 1).shape == (2, 6, 1)


def test_groups_of_pixels_where_both_dimensions_are_divided() -> None:
    """Height and width into patches of 2 by 2, of an image of 2 by 4 in the lower right corner."""
    there = torch.zeros(1, 4, 6, dtype=torch.bool)
    there[:, 2:, 2:] = True
    images = md.padded(md.masked_tensor(torch.arange(24.0).view(1, 4, 6), there))
    patches = images.reshape(1, 2, 2, 3, 2).sum((2, 4))
    assert patches.get_mask().tolist() == [[[False] * 3, [False, True, True]]]
    assert patches.compressed().tolist() == [14 + 15 + 20 + 21, 16 + 17 + 22 + 23]


def test_a_join_of_one_part_keeps_what_is_known_of_it() -> None:
    """einops.pack joins one part, of samples and positions merged, and unpack splits it."""
    x = md.padded(md.masked_tensor(torch.arange(6.0).view(2, 3), torch.tensor([[1, 1, 1], [0, 1, 1]]).bool()))
    rows = (torch.cat([x.reshape(6)]) * 1).reshape(2, 3)
    assert rows.extent.equal(x.extent)
    assert rows.mean(1).tolist() == [1, 4.5]


def test_an_index_for_each_row_reads_what_the_row_has() -> None:
    there = torch.tensor([[[1, 1], [1, 1]], [[0, 0], [0, 1]]]).bool()  # two dimensions of positions, in front
    x = md.padded(md.masked_tensor(torch.tensor([[[1.0, 2], [4, 3]], [[9, 9], [9, 5]]]), there), dim=(1, 2))
    found = x.gather(2, x.argmax(2, keepdim=True))
    assert found.extent.flatten().tolist() == [True, True, False, True]
    assert found.compressed().tolist() == [2, 4, 5]


def test_parts_of_merged_dimensions_have_sizes() -> None:
    there = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    there[0], there[1, :, :2, :2] = True, True
    found = F.pixel_unshuffle(md.padded(md.masked_tensor(torch.ones(2, 1, 4, 4), there), dim=(2, 3)), 2)
    assert found.extent.expand(found.shape).sum((1, 2, 3)).tolist() == [16, 4]
    x, _ = batch(4, 2, width=5)
    found = F.conv_transpose1d(x, torch.ones(4, 2, 3, dtype=torch.float64))  # its channels are positions
    torch.testing.assert_close(found.get_data()[1], F.conv_transpose1d(x.to_tensor(0), torch.ones(4, 2, 3).double())[1])


def test_a_thousand_views_of_two_factors_are_one() -> None:
    x = (
        md.from_lengths(torch.ones(2, 4), torch.tensor([4, 2]))[:, :, None]
        * md.from_lengths(torch.ones(2, 3), torch.tensor([1, 3]))[:, None]
    )
    y = x
    for _ in range(1200):
        y = y.transpose(1, 2) + 1
    assert y.extent.equal(x.extent)


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
    with pytest.raises(md.MaskedSemanticsError, match="is_causal counts from the start of the batch"):
        F.scaled_dot_product_attention(torch.ones(3, 4, 2, dtype=torch.float64), x, x, is_causal=True)


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


def test_lengths_by_which_samples_have_padding_are_refused() -> None:
    """Lengths of the batch, and those of samples that begin later, count steps that are not there."""
    (x, _), (later, _) = (batch(4, 2, width=3, left=left) for left in (False, True))
    targets, one = torch.tensor([[1, 2], [1, 0]]), torch.tensor([1, 1])
    for y, lengths in ((x, torch.tensor([4, 3])), (later, torch.tensor([4, 2]))):
        with pytest.raises(md.MaskedSemanticsError, match=r"ctc_loss: by input_lengths, .* have steps that are not"):
            F.ctc_loss(y.log_softmax(2).transpose(0, 1), targets, lengths, one)
        with pytest.raises(md.MaskedSemanticsError, match=r"_sequence: by lengths, .* have steps that are not there"):
            nn.utils.rnn.pack_padded_sequence(y, lengths, batch_first=True)


def test_unpooling_is_refused() -> None:
    x, _ = batch(4, 2)
    with pytest.raises(md.MaskedSemanticsError, match="counts in the batch"):
        F.max_unpool1d(*F.max_pool1d(x.mT, 2, return_indices=True), 2)


def test_a_diagonal_of_features() -> None:
    x, samples = batch(3, 1)
    same(torch.diag_embed(x), samples, torch.diag_embed)


def test_channels_may_be_samples() -> None:
    """Pooling treats channels as it treats samples: (C, T) without samples, and (N, C, T) with lengths for each."""
    x, samples = batch(4, 2, width=1)
    one = x.squeeze(-1)
    same(F.max_pool1d(one[None], 2)[0], samples, lambda s: F.max_pool1d(s.T, 2))
    same(F.adaptive_avg_pool1d(one, 2), samples, lambda s: F.adaptive_avg_pool1d(s.T, 2))


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


def test_windows_over_samples_are_samples() -> None:
    """`unfold` only moves them, so each keeps its positions, and the result is a view of the batch."""
    x, samples = batch(4, 2, 1, 3, width=1)
    windows = x[..., 0].unfold(0, 3, 1)
    assert windows.shape == (2, 4, 3)
    for n in range(2):
        same(windows[n].mT, samples[n : n + 3], lambda s: s)
    same(windows.sum((0, 2))[None], [torch.tensor([1.0])], lambda s: windows.sum((0, 2)).get_data())
    windows[0, 0, 1] = 7.0
    assert x[1, 0, 0].item() == 7.0


OVER_SAMPLES: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool": lambda x: F.avg_pool1d(x, 3, 1),
    "max_pool": lambda x: F.max_pool1d(x, 2),
    "lp_pool": lambda x: F.lp_pool1d(x, 2, 3),
    "adaptive": lambda x: F.adaptive_avg_pool1d(x, 2),
    "conv": lambda x: F.conv1d(x, torch.ones(1, 1, 3, dtype=x.dtype)),
    "conv_transpose": lambda x: F.conv_transpose1d(x, torch.ones(1, 1, 3, dtype=x.dtype)),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "pad": lambda x: F.pad(x, (1, 1)),
    "pad by reflection": lambda x: F.pad(x, (1, 1), "reflect"),
    "rfft": lambda x: torch.fft.rfft(x),
    "glu": lambda x: F.glu(x),
}


@pytest.mark.filterwarnings("ignore::masked_dispatch.EmptiedSampleWarning")
@pytest.mark.parametrize("name", OVER_SAMPLES)
def test_another_number_of_samples_is_refused(name: str) -> None:
    x, _ = batch(4, 2, 1, 3, width=1)
    with pytest.raises(
        md.MaskedSemanticsError, match=r"of 4 samples along dimension 2 its result has \d, none of these"
    ):
        OVER_SAMPLES[name](x.permute(1, 2, 0))


def test_samples_of_one_position_are_padded_as_longer_ones_are() -> None:
    """No size tells their one position from the one channel that windows of a batch get."""
    x, samples = batch(0, 1, 1)
    y = F.pad(x, (0, 0, 1, 0), value=5.0)
    assert y.extent is not None
    assert y.extent[..., 0].tolist() == [[True, False], [True, True], [True, True]]
    same(y, samples, lambda s: F.pad(s, (0, 0, 1, 0), value=5.0))


def test_a_position_that_is_broadcast_and_not_there_leaves_room_for_others() -> None:
    """The sample without rows has none after the sum, too, and gets the one that is joined to all."""
    x, samples = batch(2, 3, 0)
    more = torch.full((3, 1, 2), 7.0, dtype=torch.float64)
    same(torch.cat([x + x[:, 1:2], more], 1), samples, lambda s: torch.cat([s + s[1:2], more[0]]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("left", [False, True])
def test_bags_of_tokens(mode: str, left: bool) -> None:
    """A bag for each sample, also for one without tokens; a bag for each position, by rows of its own."""
    there = torch.tensor([4, 0, 2])[:, None] > torch.arange(4)
    there = there.flip(1) if left else there
    tokens = torch.where(there, torch.arange(12).view(3, 4) % 7, 99)
    bags = nn.EmbeddingBag(7, 2, mode=mode)
    texts = bags(md.padded(md.masked_tensor(tokens, there)))
    assert texts.get_mask().all()
    assert texts[1].to_tensor(-1).tolist() == [0, 0]
    for n in (0, 2):
        torch.testing.assert_close(texts[n].to_tensor(0), bags(tokens[n, there[n]][None])[0])

    pairs = md.padded(md.masked_tensor(torch.stack([tokens, tokens], 2), there[..., None]), dim=1)
    rows = pairs.reshape(-1, 2)
    each = bags(rows).view(3, 4, 2)
    assert each.extent is not None
    assert torch.equal(each.extent, there[..., None].expand(each.shape))
    torch.testing.assert_close(each[0].to_tensor(0), bags(torch.stack([tokens[0], tokens[0]], 1)))
    # Which bags of other places are there, is not known; and what is known of rows is not that of another call.
    some = torch.tensor([*range(11), 20])
    assert bags(rows.reshape(-1), some).extent is None
    assert bags(rows).extent is not None


@pytest.mark.parametrize("size", [1, 3])
def test_a_diagonal_of_positions_is_refused(size: int) -> None:
    pairs = md.padded(torch.randn(2, size, size), torch.arange(size) < torch.tensor([1, size])[:, None, None], dim=2)
    with pytest.raises(md.MaskedSemanticsError, match="it shows a part of dimensions on which depends what is there"):
        torch.einsum("bii->b", pairs)
