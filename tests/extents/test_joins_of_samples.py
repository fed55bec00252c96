"""Rows that were taken apart are the batch again, steps and states of loops are there where samples have the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md
from masked_dispatch import MaskedSemanticsError

# x[:, 0] of samples in the middle is an end of the batch: loops over all steps read it.
pytestmark = pytest.mark.filterwarnings("ignore:x.*is an end of the batch")
ROWS = [torch.tensor([1.0, 2, 3, 4]), torch.tensor([5.0, 6]), torch.tensor([7.0])]


def batch(side: str = "right", rows: list[Tensor] = ROWS) -> Any:
    """1 2 3 4; 5 6; 7, as a batch."""
    width = max(map(len, rows))
    data, there = torch.full((len(rows), width), float("nan")), torch.zeros(len(rows), width, dtype=torch.bool)
    for b, row in enumerate(rows):
        first = {"right": 0, "left": width - len(row), "centre": (width - len(row)) // 2}[side]
        data[b, first : first + len(row)], there[b, first : first + len(row)] = row, True
    return md.padded(md.masked_tensor(data, there), dim=1)


def what_is_there(x: Any, number: int = 3) -> list[list[float]]:
    """The elements of each sample; NaN where they are missing."""
    x = x if x.layout is torch.strided and type(x) is md.MaskedTensor else x.to_dense()
    there = torch.ones(x.shape, dtype=torch.bool) if x.extent is None else x.extent
    data = x.detach().to_tensor(float("nan"))
    return [[round(v, 4) for v in data[b][there[b]].tolist()] for b in range(number)]


DOUBLED = [[2.0, 4, 6, 8], [10.0, 12], [14.0]]
# (The programs of P9 draw others, op_registry/fuzz/padded_programs.py, and loops over steps by recurrent cells.)
SPELLINGS: dict[str, Callable[[Any], Any]] = {
    "stack of x[b]": lambda x: torch.stack([x[b] * 2 for b in range(len(x))]),
    "vstack": lambda x: torch.vstack([r * 2 for r in x]),
    "cat of x[b][None]": lambda x: torch.cat([r[None] * 2 for r in x]),
    "cat of r.unsqueeze(0), worked on": lambda x: torch.cat([(r * 2).unsqueeze(0) + 0 for r in x]),
    "cat of views of one row": lambda x: torch.cat([(r * 2).view(1, -1) for r in x]),
    "stack of squeezed parts": lambda x: torch.stack([r.squeeze(0) * 2 for r in x.split(1)]),
    "a stack behind": lambda x: torch.stack([r * 2 for r in x], -1).mT,
    "column_stack": lambda x: torch.column_stack([r * 2 for r in x]).mT,
    "samples, then steps": lambda x: torch.stack([torch.stack([x[b][t] * 2 for t in range(4)]) for b in range(len(x))]),
    "steps that a view made": lambda x: torch.cat([(x[:, t] * 2).view(-1, 1) for t in range(x.shape[1])], 1),
    "unsqueezed steps": lambda x: torch.cat([(s * 2)[:, None] for s in x.unbind(1)], 1),
    "steps first": lambda x: torch.stack([s * 2 for s in x.unbind(1)]).mT,
}


@pytest.mark.parametrize("side", ["right", "left", "centre"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_what_was_taken_apart_is_the_batch_again(name: str, side: str) -> None:
    x = batch(side).requires_grad_()
    y = SPELLINGS[name](x)
    assert what_is_there(y) == DOUBLED
    assert y.extent.equal(x.extent)
    y.sum().backward()
    assert x.grad.to_tensor(0.0).equal(x.extent * 2.0)


@pytest.mark.parametrize("storage", ["to_packed", "to_sparse", "to_sparse_csr"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_in_every_storage(name: str, storage: str) -> None:
    assert what_is_there(SPELLINGS[name](getattr(batch(), storage)())) == DOUBLED


@pytest.mark.parametrize("lengths", [[3], [2, 2], [0, 2]])
def test_one_sample_equal_lengths_and_an_empty_one(lengths: list[int]) -> None:
    x = batch(rows=[torch.arange(1.0, n + 1) for n in lengths])
    for name in ("stack of x[b]", "vstack", "cat of x[b][None]"):
        y = SPELLINGS[name](x)
        assert y.extent.equal(x.extent)
        # Two such batches, joined, keep their rows.
        longer = torch.cat([y, SPELLINGS[name](batch(rows=[torch.arange(1.0, x.shape[1] + 1)]))])
        assert longer.extent.sum(1).tolist() == [*lengths, x.shape[1]]


def test_a_mean_over_time_of_rows() -> None:
    assert torch.stack([r.exp().log() for r in batch()]).mean(1).to_tensor(0.0).tolist() == pytest.approx([2.5, 5.5, 7])


def test_a_plain_row_has_the_positions_of_the_longest() -> None:
    x = batch()
    assert what_is_there(torch.stack([x[1], torch.zeros(4), x[2]])) == [[5, 6], [0, 0], [7]]


# ---------------------------------------------------------------------------------------------------- sums over samples


def test_a_sum_over_samples_that_were_joined() -> None:
    x = batch()
    assert torch.stack(x.unbind(0)).sum(0).to_tensor(0.0).tolist() == [13, 8, 3, 4]
    assert torch.einsum("bt,b->t", torch.stack(x.unbind(0)), torch.ones(3)).to_tensor(0.0).tolist() == [13, 8, 3, 4]


@pytest.mark.parametrize("reduced", [lambda y: y.sum(0), lambda y: y.amax(0), lambda y: torch.ones(3) @ y])
def test_a_sum_over_samples_at_different_places_is_refused(reduced: Callable[[Any], Any]) -> None:
    rows = batch("left").unbind(0)
    with pytest.raises(MaskedSemanticsError, match=r"lie at different places along dimension 1: .*align\(x, 1\)"):
        reduced(torch.stack(rows))
    aligned = md.align(torch.stack(rows), 1)
    assert what_is_there(torch.stack(aligned.unbind(0)).sum(0)[None], 1) == [[13, 8, 3, 4]]
    # Rows at one place are summed.
    assert torch.stack([rows[0], rows[0]]).sum(0).to_tensor(0.0).tolist() == [2, 4, 6, 8]


# ------------------------------------------------------------------------------------------------------------- features


def test_parts_that_are_joined_along_features_intersect() -> None:
    x = batch()[..., None]
    both = torch.cat([x, x[:, 1:].cumsum(1).sum(1, keepdim=True).expand(3, 4, 1)], -1)
    assert both.extent[..., 0].equal(x.extent[..., 0])
    step = x[:, 1]
    assert torch.cat([step, torch.ones(3, 1)], -1).extent.tolist() == [[True, True], [True, True], [False, False]]


def test_a_step_of_one_feature_beside_a_state_is_a_feature() -> None:
    x, weight = batch(), torch.ones(1, 2)
    state, states = torch.zeros(3, 1), []
    for t in range(4):
        state = nn.functional.linear(torch.cat([x[:, t, None], state], -1), weight)
        states.append(state)
    assert what_is_there(torch.stack(states, 1)) == [[1, 3, 6, 10], [5, 11], [7]]


def test_the_time_beside_a_step_is_a_feature() -> None:
    x = batch()
    steps = [torch.cat([x[:, t, None], torch.full((3, 1), float(t))], -1).sum(-1) for t in range(4)]
    assert what_is_there(torch.stack(steps, 1)) == [[1, 3, 5, 7], [5, 7], [7]]


def test_parts_joined_twice_are_remembered_apart() -> None:
    x, y = batch(), batch(rows=[torch.ones(2), torch.ones(4), torch.ones(1)])
    for other in (x * 2, y, x * 2):
        joined = torch.cat([x[..., None], other[..., None]], -1)
        both = torch.cat([x[..., None] + 0, other[..., None] + 0], -1)
        assert both.extent.all(-1).equal(x.extent & other.extent)
        assert joined.extent.equal(joined.get_mask())


def test_signals_that_were_stacked_are_channels() -> None:
    x, kernel = batch(), torch.ones(1, 2, 3)
    y = nn.functional.conv1d(torch.stack([x, x.flip(1)], 1), kernel, padding=1)[:, 0]
    rows = [nn.functional.conv1d(torch.stack([r, r.flip(0)])[None], kernel, padding=1)[0, 0].tolist() for r in ROWS]
    assert what_is_there(y) == rows
    with pytest.raises(MaskedSemanticsError, match="differ from channel to channel"):
        nn.functional.conv1d(torch.stack([x, x[[1, 2, 0]]], 1), kernel, padding=1)


# ----------------------------------------------------------------------------------------------------- steps and states


def test_a_plain_first_step() -> None:
    x = batch()
    y = torch.stack([torch.zeros(3), *x.unbind(1)], 1)
    assert what_is_there(y) == [[0, 1, 2, 3, 4], [0, 5, 6], [0, 7]]


def test_a_stack_of_steps_goes_on_as_the_batch() -> None:
    x = batch()
    y = torch.stack([x[:, t] * 2 for t in range(4)], 1)
    assert what_is_there(y[:, 1:]) == [[4, 6, 8], [12], []]
    assert what_is_there(y + x) == [[3, 6, 9, 12], [15, 18], [21]]
    assert what_is_there(y.flip(1)) == [[8, 6, 4, 2], [12, 10], [14]]
    # The sample is there where any step is.
    assert torch.stack([x[:, 1], x[:, 2]], 1).sum(1).get_mask().tolist() == [True, True, False]


def test_a_position_past_the_end_is_not_there() -> None:
    x = batch()
    assert not x[1][3].extent
    assert not x[:, 3][1].extent
    assert x[1][1].extent
    assert what_is_there(torch.stack([x[1][t] for t in range(4)])[None], 1) == [[5, 6]]
    # Of one step, samples are joined again; of one sample, steps.
    step = torch.stack([x[:, 1][b] for b in range(3)])
    assert step.extent.tolist() == [True, True, False]
    assert what_is_there(torch.stack([step, x[:, 0]], 1)) == [[2, 1], [6, 5], [7]]


def test_states_that_where_holds() -> None:
    x = batch()
    total, totals = torch.zeros(3), []
    for t in range(4):
        total = torch.where(x[:, t].get_mask(), total + x[:, t], total)
        totals.append(total)
    assert total.to_tensor(0.0).tolist() == [10, 11, 7]
    assert what_is_there(torch.stack(totals, 1)) == [[1, 3, 6, 10], [5, 11], [7]]


def states(x: Any) -> list[Any]:
    """The states of a recurrent cell after each step."""
    torch.manual_seed(0)
    cell, state, found = nn.GRUCell(1, 2), None, []
    for t in range(x.shape[1]):
        state = cell(x[:, t, None], state)
        found.append(state)
    return found


@pytest.mark.parametrize("storage", ["to_packed", "to_sparse", "to_sparse_csr"])
def test_states_of_stored_batches(storage: str) -> None:
    found = torch.stack(states(getattr(batch(), storage)()), 1)
    md.testing.assert_close(found.to_dense(), torch.stack(states(batch()), 1), check_extent=True)


def test_windows_of_states_and_sorted_states_are_no_states() -> None:
    x = md.from_lengths(torch.randn(2, 3, 2), torch.tensor([3, 2]))
    cell, state, states = nn.GRUCell(2, 2), torch.zeros(2, 2), []
    for step in x.unbind(1):
        state = cell(step, state)
        states.append(state)
    windows = torch.stack(states, 1).unfold(1, 2, 1)
    joined = torch.cat([windows, torch.ones(2, 1, 2, 2)], 1)
    assert joined.extent[:, :, 0, 0].tolist() == [[True, True, True], [True, False, True]]
    largest = torch.cat([torch.stack(states, 1).topk(2, 1)[0], torch.ones(2, 1, 2)], 1)
    assert largest.extent[:, :, 0].all()


def test_states_written_to_a_plain_buffer_warn() -> None:
    plain = torch.zeros(3, 4, 2)
    found = [state.detach() for state in states(batch())]
    plain[:, 0] = found[0]  # every sample has a first step
    with pytest.warns(md.MaskDroppedWarning, match="states that samples carry past their end"):
        plain[:, 1] = found[1]
    with md.updates("refuse"), pytest.raises(MaskedSemanticsError, match="states of samples past their end"):
        plain[:, 2] = found[2]


def test_a_mean_of_states_beside_the_last() -> None:
    found = states(batch())
    assert torch.stack([torch.stack(found, 1).mean(1), found[-1]], 1).get_mask().all()


def test_rows_of_stacked_steps_written_to_a_buffer_are_samples() -> None:
    x = batch("left")
    stacked = torch.stack([step * 2 for step in x.unbind(1)], 1)
    buffer = x.new_zeros(3, 4)
    for b in range(3):
        buffer[b] = stacked[b]
    assert what_is_there(buffer) == DOUBLED
    assert not buffer._extent.numbers(0)


def test_what_an_index_of_joined_samples_reads_is_there_where_the_index_is() -> None:
    two = torch.tensor([2])
    x = torch.cat(
        [md.from_lengths(torch.tensor([[1.0, 4, 0]]), two), md.from_lengths(torch.tensor([[3.0, 2, 0]]), two)], 1
    )
    own = md.padded(x.without_extent(), x.extent)
    for batch in (x, own):
        both = torch.stack([batch, batch * 2 - 3], 1)
        largest = both.gather(1, both.argmax(1, keepdim=True))
        assert largest.extent.tolist() == [[[True, True, False, True, True, False]]]
        assert largest.compressed().tolist() == [1, 5, 3, 2]


def test_an_index_reads_from_a_batch_without_positions() -> None:
    x = md.from_lengths(torch.ones(2, 3, 2), torch.tensor([3, 1]))[:, 3:]
    assert x.gather(2, x.argmax(2, keepdim=True)).shape == (2, 0, 1)


@pytest.mark.parametrize(
    "join", [lambda parts: torch.cat(parts), lambda parts: torch.stack([r for p in parts for r in p])]
)
@pytest.mark.parametrize("second", [[[0, 0, 1], [0, 1, 1]], [[1, 0, 0], [1, 1, 0]], [[1, 0, 1], [0, 1, 0]]])
def test_samples_that_lie_at_different_places_are_taken_apart_again(second: list[list[int]], join: Any) -> None:
    parts = [
        md.padded(md.masked_tensor(torch.ones(2, 3), torch.tensor(m).bool()), dim=1)
        for m in ([[0, 1, 1], [0, 0, 1]], second)
    ]
    x, rows = join(parts), [row for part in parts for row in part]
    for taken in (
        [x[b] for b in range(4)],
        x.unbind(),
        [x.select(0, b) for b in range(4)],
        [x[b : b + 1].squeeze(0) for b in range(4)],
    ):
        for found, row in zip(taken, rows, strict=True):
            md.testing.assert_close(found, row, check_extent=True)


def test_stacked_batches_in_another_order_number_no_positions() -> None:
    """Sums of a sample without positions are 0, also where its two channels, parts of two batches, were sorted."""
    lengths = torch.tensor([2, 0])
    a, b = (md.from_lengths(torch.full((2, 2), value), lengths) for value in (3.0, 1.0))
    in_order = torch.stack([a, b], 1).sort(1)[0]
    assert in_order.to_tensor(0).tolist() == [[[1, 1], [3, 3]], [[0, 0], [0, 0]]]
    means = in_order.mean(2, keepdim=True).expand_as(in_order)
    assert means.sum(2).to_tensor(-1).tolist() == [[2, 6], [0, 0]]
