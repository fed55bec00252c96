"""Numbers that callers take from the sizes of a padded batch: `audit` follows them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import masked_dispatch as md
from audited_calls import LENGTHS, advice_of, findings_in
from masked_dispatch.seeing.sizes import Followed

# Samples of 4, 2 and 3 positions.
X = md.from_lengths(torch.arange(1.0, 16).view(3, 5), LENGTHS)
Y = md.from_lengths(torch.arange(1.0, 121).view(3, 5, 8), LENGTHS)
CAUSAL = torch.ones(8, 8, 3)


def causal(x: Tensor) -> Tensor:
    """Of each sample two positions more, at its end."""
    return F.conv1d(x.mT, CAUSAL, padding=2)


# ----------------------------------------------------------------------------------------------------------- numbers


def test_a_size_knows_what_each_sample_alone_has() -> None:
    with md.audit():
        b, t, d = Y.shape
        assert (type(b), t, type(d)) == (int, 5, int)
        assert isinstance(t, Followed)
        assert t.alone == (4, 2, 3)
        assert t.padding == 48
        for number, value, alone in (
            (Y.size(1) - 1, 4, (3, 1, 2)),
            (1 + 2 * Y.size()[-2], 11, (9, 5, 7)),
            (-(t // 2), -2, (-2, -1, -1)),
            (t % 3, 2, (1, 2, 0)),
            (1 / t, 0.2, (1 / 4, 1 / 2, 1 / 3)),
            (t**0.5, 5**0.5, (2, 2**0.5, 3**0.5)),
            (2**t, 32, (16, 4, 8)),
            (max(t, 3), 5, (4, 2, 3)),
            (math.ceil(t / 2), 3, (2, 1, 2)),
            (Y.numel(), 120, (96, 48, 72)),
            (Y[..., 0].size(dim=1), 5, (4, 2, 3)),
        ):
            assert isinstance(number, Followed)
            assert (number, number.alone) == (value, alone)


def test_what_is_the_same_for_all_samples_is_a_plain_number() -> None:
    with md.audit():
        t = Y.shape[1]
        for number in (causal(Y).shape[2] - t, t - t, t * 0, Y.shape[0], Y.shape[2], X[:, :2].shape[1], t > 2, int(t)):
            assert type(number) in (int, bool)
        assert type(copy.copy(t)) is type(pickle.loads(pickle.dumps(t))) is int
    assert type(Y.shape[1]) is int


# ---------------------------------------------------------------------------------------------------------- division

DIVIDED: dict[str, Callable[[], Any]] = {
    "a sign between": lambda: -Y.sum() / Y.numel(),
    "a factor between": lambda: 2 * Y.sum(1) / Y.shape[1],
    "times its inverse": lambda: Y.sum(1) * (1 / Y.size(1)),
    "its inverse times": lambda: (1 / Y.size(1)) * Y.sum(1),
    "torch.div": lambda: torch.div(-Y.sum(1), Y.size()[1]),
    "in place": lambda: Y.sum(1).neg().div_(Y.shape[1]),
    "of the tensor itself": lambda: (Y / Y.shape[1]).sum(1),
    "by one less": lambda: Y.sum(1) / (Y.shape[1] - 1),
    "by samples and positions": lambda: (Y - 1).sum() / (Y.shape[0] * Y.shape[1]),
    "by a root": lambda: Y.sum(1) / Y.shape[1] ** 0.5,
    "guarded": lambda: Y.square().sum(1).sqrt() / max(Y.shape[1], 1),
    "of a loss": lambda: F.mse_loss(Y, torch.zeros(3, 5, 8), reduction="sum") / Y.shape[1],
}


@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_divided_by_a_size(name: str) -> None:
    assert findings_in(DIVIDED[name]) == [("divided by size", 48)]


def test_the_line_that_divides_is_named() -> None:
    with md.audit() as report:
        steps = Y.shape[1]
        loss = -Y.sum() / steps
    assert loss is not None
    (finding,) = report.findings
    assert finding.code == "loss = -Y.sum() / steps"
    assert str(report).split("\n")[2:] == [
        "    a sum was divided by the size of its dimension, and has left something out: 48 elements",
        "    -> use mean, or divide by x.count(dim)",
    ]


def test_division_that_counts_no_padding() -> None:
    for right in (
        lambda: Y.sum(1) / Y.count(1),
        lambda: Y.sum(2) / Y.shape[2],
        lambda: Y.sum() / Y.shape[0],
        lambda: Y @ Y.mT / Y.shape[-1] ** 0.5,
        lambda: Y[:, :2].sum(1) / Y[:, :2].shape[1],
        lambda: Y.count(1) / Y.shape[1],  # the share that is there
        lambda: Y.sum(1) / (causal(Y).shape[2] - Y.shape[1]),
        lambda: Y.sum(1) * Y.shape[1],
    ):
        assert findings_in(right) == []


# --------------------------------------------------------------------------------------------------------------- cuts

CUT: dict[str, Callable[[], Any]] = {
    "a slice": lambda: causal(Y)[..., : Y.shape[1]].mean(2),
    "narrow": lambda: causal(Y).narrow(2, 0, Y.shape[1]).mean(2),
    "split": lambda: causal(Y).split(Y.shape[1], 2)[0].mean(2),
    "index_select": lambda: causal(Y).index_select(2, torch.arange(Y.shape[1])).mean(2),
    "calls between": lambda: (causal(Y)[..., : Y.shape[1]].relu() + 1).transpose(1, 2).softmax(1),
    "dropout between": lambda: F.dropout(causal(Y)[..., : Y.shape[1]]).mean(2),
    "a transposed convolution": lambda: F.conv_transpose1d(Y.mT, CAUSAL)[..., : Y.shape[1]].sum(2),
}


@pytest.mark.parametrize("name", CUT)
def test_positions_that_stay_at_a_cut_and_reach_a_result(name: str) -> None:
    ((kind, count),) = findings_in(CUT[name])
    assert (kind, count) == ("cut at size", 8 * (1 + 2 + 2))


def test_the_line_that_cuts_is_named() -> None:
    with md.audit() as report:
        h = causal(Y)
        h = h[..., : Y.shape[1]]
        h.mean(2)
    (finding,) = report.findings
    assert finding.code == "h = h[..., : Y.shape[1]]"
    assert str(report).split("\n")[2:] == [
        "    cut at a size that counts padding: positions stay that shorter samples alone would not have, and reach a "
        "result: 40 elements",
        "    -> leave out the last k of each sample, x[..., :-k]; or x.mask_like(y)",
    ]


@pytest.mark.parametrize("halves", [lambda x: x.chunk(2, 1), lambda x: x.tensor_split(2, 1)])
def test_parts_by_their_number_are_cut_at_the_batch_s_size(halves: Callable[[Any], Any]) -> None:
    x = md.from_lengths(torch.ones(2, 6), torch.tensor([6, 3]))
    assert findings_in(lambda: halves(x)[0].sum(1)) == [("cut short at size", 1), ("cut at size", 1)]
    assert findings_in(lambda: halves(x)[1].sum(1)) == [("cut short at size", 1)]
    assert findings_in(lambda: x.split(2, 1)[0].sum(1)) == []
    assert findings_in(lambda: halves(x[:, :, None].expand(2, 6, 4).mT)[0].sum(2)) == []


def test_groups_by_their_number_are_cut_at_the_batch_s_size() -> None:
    x = md.from_lengths(torch.ones(2, 4, 6), torch.tensor([4, 2]))
    for groups in (lambda: x.reshape(2, 2, -1, 6), lambda: x.unflatten(1, (2, -1))):
        assert [kind for kind, _ in findings_in(lambda groups=groups: groups().sum(2))] == [
            "cut short at size",
            "cut at size",
        ]
    for right in (
        lambda: x.reshape(2, -1, 2, 6).sum(2),
        lambda: x.view(2, x.shape[1], 2, -1).sum(1),
        lambda: x.view(-1, x.shape[1], 6).sum(1),
        lambda: x.mT.reshape(2, 6, -1).sum(2),
        lambda: x.reshape(2, -1).sum(1),
    ):
        assert findings_in(right) == []


def test_positions_that_shorter_samples_lack_at_a_cut() -> None:
    assert advice_of(lambda: Y[:, Y.shape[1] // 2 :].mean(1)) == [
        "    a size that counts padding leaves shorter samples fewer positions than they would have alone: 16 elements",
        "    -> cut and pad by numbers that are the same for each sample, x[..., k:] and F.pad(x, (0, k))",
    ]
    even = Y[:, :4].mT

    def up_and_down() -> Tensor:
        up = F.interpolate(F.max_pool1d(even, 2), scale_factor=2)
        return torch.cat([even, F.pad(up, (0, even.shape[2] - up.shape[2]))], 1)

    assert findings_in(up_and_down) == [("cut short at size", 8)]


@pytest.mark.filterwarnings("ignore:x.* is an end of the batch:masked_dispatch.BatchEndWarning")
def test_numbers_that_place_something_elsewhere() -> None:
    """Coordinates, padding in front, as "same" padding has it, and indices."""

    def same_padding() -> Tensor:
        n = Y.shape[1]
        total = max((math.ceil(n / 2) - 1) * 2 + 3 - n, 0)
        return F.conv1d(F.pad(Y.mT, (total // 2, total - total // 2)), CAUSAL, stride=2)

    def softmax_of_coordinates() -> Tensor:
        return (X.softmax(1) * torch.linspace(-1, 1, X.shape[1])).sum(1)

    def write_to_the_first() -> None:
        Y.clone()[:, -Y.shape[1]] = 0.0

    for call, count in (
        (softmax_of_coordinates, 5),
        (lambda: torch.full((Y.shape[1],), 1 / Y.shape[1]), 5),
        (lambda: torch.linspace(0, 1, Y.shape[1]), 5),  # (the third sample's are among the first's)
        (lambda: torch.arange(Y.shape[1]) >= Y.shape[1] // 2, 5),
        (lambda: torch.arange(Y.shape[1]) / (Y.shape[1] - 1), 5),
        (same_padding, 168),
        (lambda: Y[:, Y.shape[1] // 2], 24),
        (lambda: Y.select(1, Y.shape[1] - 1), 24),
        (lambda: F.interpolate(F.adaptive_avg_pool1d(Y.mT, 2), Y.shape[1]), 120),
        (write_to_the_first, 120),
    ):
        assert ("placed by size", count) in findings_in(call)


def test_numbers_that_place_nothing_elsewhere() -> None:
    for right in (
        lambda: torch.arange(1 - Y.shape[1], Y.shape[1]),  # distances
        lambda: torch.arange(1.0 - Y.shape[1], Y.shape[1]),
        lambda: torch.arange(1.0 - Y.shape[1], 1),  # as a bias of scores
        lambda: torch.ones(Y.shape[1], Y.shape[1]).tril(),
        lambda: torch.full((3,), Y.shape[1]),
        lambda: torch.rand(Y.shape[1]),
        lambda: F.pad(Y.mT, (2, Y.shape[1])),
        lambda: torch.linspace(-1, 1, Y.shape[2]),
        lambda: torch.ones(9, 9)[Y.shape[1]],
        lambda: F.interpolate(Y.mT.mean(2, keepdim=True), Y.shape[1]),
    ):
        assert findings_in(right) == []


def test_cuts_that_keep_what_the_samples_have() -> None:
    for right in (
        lambda: causal(Y)[..., :-2].mean(2),
        lambda: (causal(Y)[..., : Y.shape[1]] + Y.mT).mean(2),  # the sum is there where both are
        lambda: causal(Y)[..., : Y.shape[1]].mask_like(Y.mT).mean(2),
        lambda: causal(Y)[..., : Y.shape[1] + 2].mean(2),
        lambda: Y[:, : Y.shape[1]].mean(1),
        lambda: (Y[:, 1:] - Y[:, : Y.shape[1] - 1]).mean(1),
        lambda: Y.view(3, Y.shape[1], 2, 4).mean(1),
        lambda: Y.reshape(3 * Y.shape[1], 8).relu().view(3, Y.shape[1], 8).mean(1),
        lambda: torch.stack([Y[:, t] for t in range(Y.shape[1])], 1).mean(1),
        lambda: torch.cat([Y, Y], 1)[:, : Y.shape[1]].mean(1),
    ):
        assert findings_in(right) == []


# ------------------------------------------------------------------------------------------- tensors of a batch's size

SHAPED: dict[str, tuple[Callable[[], Any], int]] = {
    "ones": (lambda: torch.ones(3, Y.shape[1]).sum(1), 6),
    "ones as the batch": (lambda: Y.new_ones(Y.shape).norm(dim=1), 48),
    "full": (lambda: torch.full((3, Y.shape[1]), 2.0).prod(1), 6),
    "zeros and one": (lambda: (torch.zeros(3, Y.shape[1]) + 1).sum(1), 6),
    "arange": (lambda: torch.arange(Y.shape[1]).sum(), 3),
    "arange, seen as floats": (lambda: (torch.arange(1, Y.shape[1] + 1).float() * 2).mean(), 3),
    "a mean expanded": (lambda: Y.mean(1, keepdim=True).expand(-1, Y.shape[1], -1).softmax(1), 48),
    "a square table": (lambda: (torch.eye(Y.shape[1]) @ Y).mean(1), 21),
    "an outer product": (lambda: torch.ones(3, Y.shape[1], 1).mul(torch.ones(8)).norm(dim=1), 6),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPED)
def test_a_tensor_of_a_batchs_size_is_reduced(name: str) -> None:
    f, count = SHAPED[name]
    assert findings_in(f) == [("shaped by size", count)]


def test_the_line_that_makes_it_is_named() -> None:
    with md.audit() as report:
        ones = torch.ones(3, Y.shape[1])
        ones.sum(1)
    (finding,) = report.findings
    assert finding.code == "ones = torch.ones(3, Y.shape[1])"
    assert str(report).split("\n")[2:] == [
        "    a tensor of a size that counts padding is reduced, with elements that shorter samples alone would not "
        "have: 6 elements",
        "    -> count what is there, x.count(dim); or masked_dispatch.mask_like(t, x), for a tensor t of this size",
    ]


def test_tensors_of_a_batchs_size_that_are_right() -> None:
    table, lengths = torch.randn(9, 8), torch.tensor([4, 2, 3])
    for right in (
        lambda: (Y + table[: Y.shape[1]]).mean(1),  # a table is cut
        lambda: (Y + F.embedding(torch.arange(Y.shape[1]).expand(3, Y.shape[1]), table)).mean(1),
        lambda: (Y * torch.ones(3, Y.shape[1], 1)).mean(1),  # the product is there where the batch is
        lambda: torch.einsum("btd,t->bd", Y, torch.ones(Y.shape[1])),
        lambda: (torch.arange(Y.shape[1]) < lengths[:, None]).float().sum(1),  # 0 at padding
        lambda: (Y @ Y.mT).masked_fill(torch.ones(Y.shape[1], Y.shape[1]).triu(1) == 1, -math.inf).softmax(-1) @ Y,
        lambda: F.scaled_dot_product_attention(Y, Y, Y, torch.ones(Y.shape[1], Y.shape[1]).tril() == 1).mean(1),
        lambda: ((torch.ones(Y.shape[1], Y.shape[1]).tril() @ Y) * Y).mean(1),
        lambda: torch.zeros(3, Y.shape[1]).sum(1),
        lambda: torch.ones(3, Y.shape[1]).all(),
        lambda: torch.ones(3, Y.shape[1]).cumsum(1) * X,
    ):
        assert findings_in(right) == []


def test_what_it_makes_again_leaves_no_trace() -> None:
    norm = torch.nn.BatchNorm1d(8)
    again, seen = torch.nn.BatchNorm1d(8), []
    h = causal(Y)
    again(h[..., :5])
    torch.manual_seed(0)
    wanted = torch.rand(2)
    torch.manual_seed(0)
    with md.trace() as outer, md.audit():
        seen.append(norm(causal(Y)[..., : Y.shape[1]]))
        drawn = torch.rand(2)
    assert torch.equal(drawn, wanted)
    torch.testing.assert_close(norm.running_mean, again.running_mean)
    assert sum("batch_norm" in call.name for call in outer.calls if call.kind == "operator") == 1


# ------------------------------------------------------------------------------------------------- tables of positions


def put(*places: list[int], features: int = 0) -> md.MaskedTensor:
    mask = torch.tensor(places).bool()
    if features:
        mask = mask[..., None].expand(*mask.shape, features)
    return md.padded(md.masked_tensor(torch.ones(mask.shape), mask), dim=1)


FRONT, MIDDLE = put([1, 1, 1, 1], [0, 0, 1, 1]), put([1, 1, 1, 1], [0, 1, 1, 0])
TOKENS, BEHIND = put([1, 1, 1, 1], [0, 0, 1, 1], features=3), put([1, 1, 1, 1], [1, 1, 0, 0], features=3)
TABLE = torch.randn(9, 3)

ON_THE_GRID: dict[str, tuple[Callable[[], Any], int]] = {
    "arange": (lambda: FRONT + torch.arange(4.0), 2),
    "samples in the middle": (lambda: MIDDLE * torch.arange(4.0), 2),
    "an embedding of arange": (lambda: TOKENS + F.embedding(torch.arange(4), TABLE), 6),
    "a table with a dimension for samples": (lambda: TOKENS - TABLE[:4][None], 6),
    "a rotation": (lambda: TOKENS * TABLE[:4].cos(), 6),
    "weights of positions": (lambda: torch.randn(2, 4) @ TOKENS, 6),
    "weights in an einsum": (lambda: torch.einsum("btd,t->bd", TOKENS, torch.ones(4)), 6),
    "keys behind, queries in front": (lambda: (TOKENS[:, :, None] * BEHIND[:, None]).sum(-1) + torch.randn(4, 4), 4),
    "written out for each sample": (lambda: TOKENS + TABLE[torch.arange(4)[None].expand(2, -1)], 6),
    "after a join": (lambda: torch.cat([BEHIND, BEHIND], 1) + torch.arange(8.0)[:, None], 6),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_THE_GRID)
def test_a_plain_table_beside_samples_that_begin_elsewhere(name: str) -> None:
    f, count = ON_THE_GRID[name]
    findings = findings_in(f)
    assert {kind for kind, _ in findings} == {"table on the grid"}
    assert findings[0][1] == count


def test_the_report_on_a_table() -> None:
    assert advice_of(lambda: FRONT + torch.arange(4.0)) == [
        "    a plain operand has one value for an index of the batch, and samples begin at other indices: 2 elements",
        "    -> look it up at masked_dispatch.positions(x, dim), which counts in each sample; or move the samples to "
        "the front first, masked_dispatch.align(x, dim)",
    ]


def test_tables_that_are_right() -> None:
    for right in (
        lambda: BEHIND + TABLE[:4],
        lambda: TOKENS + TABLE[0],
        lambda: TOKENS + torch.randn(2, 4, 3),
        lambda: TOKENS * torch.ones(2, 4, 1),
        lambda: TOKENS + F.embedding(md.positions(TOKENS, 1), TABLE),
        lambda: TOKENS @ TOKENS.mT - (torch.arange(4)[:, None] - torch.arange(4)).abs(),  # of differences
        lambda: (TOKENS @ TOKENS.mT)[:, None] + torch.randn(2, 4, 4),
        lambda: F.scaled_dot_product_attention(TOKENS, TOKENS, TOKENS, torch.ones(4, 4).tril() == 1),
        lambda: torch.stack([BEHIND[:, t] for t in range(4)], 1) + TABLE[:4],
        lambda: F.linear(TOKENS, torch.ones(2, 3)),
    ):
        assert findings_in(right) == []


def test_a_sum_that_is_divided_by_its_size() -> None:
    x = Y[..., :2]
    assert advice_of(lambda: x.sum(1) / x.shape[1]) == [
        "    a sum was divided by the size of its dimension, and has left something out: 12 elements",
        "    -> use mean, or divide by x.count(dim)",
    ]
    for divided in (
        lambda: x.sum(1) / torch.ones(5).sum(),
        lambda: x.sum(1, keepdim=True) / x.new_ones(3, 5, 2).sum(1, keepdim=True),
        lambda: x.sum(1).unsqueeze(0).double() * (1 / 5),
        lambda: x.sum() / x.numel(),
        lambda: md.sum(x, 1).div_(5),
    ):
        assert findings_in(divided) == [("divided by size", 12)]
    losses = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    assert findings_in(lambda: losses.sum() / losses.shape[0]) == [("divided by size", 1)]
    assert findings_in(lambda: losses[:, None].expand(3, 2).sum() / len(losses)) == [("divided by size", 1)]
    for right in (
        lambda: x.sum(1) / x.count(1),
        lambda: x.sum(1) / LENGTHS[:, None],
        lambda: x.sum() / len(x),  # for each sample
        lambda: x.sum(2) / x.shape[2],  # each row is valid as a whole
        lambda: x.sum(1) / 3,
        lambda: x[:0].sum() / x.shape[1],
        lambda: x[..., :0].mean(0) * x[..., :0],
    ):
        assert findings_in(right) == []


@pytest.mark.parametrize("buffer", ["plain", "masked"])
@pytest.mark.parametrize("function", ["index_add_", "scatter_add_"])
def test_sums_of_groups_that_are_divided_by_counted_ones(buffer: str, function: str) -> None:
    x = md.masked_tensor(torch.ones(4), torch.tensor([True, False, True, True]))
    index = torch.tensor([0, 0, 1, 1])

    def mean(counted: Tensor) -> Tensor:
        into = torch.zeros(2) if buffer == "plain" else x.new_zeros(2)
        total = getattr(into, function)(0, index, x)
        return total / getattr(torch.zeros(2), function)(0, index, counted).clamp(min=1)

    assert findings_in(lambda: mean(torch.ones(4))) == [("divided by size", 1)]
    assert findings_in(lambda: mean(x.get_mask().float())) == []
