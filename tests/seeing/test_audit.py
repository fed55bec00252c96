"""What `audit` names, and how it observes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import masked_dispatch as md
from audited_calls import IN_EXTENT, LABELS, LENGTHS, advice_of, batch, findings_in
from masked_dispatch import policies
from op_registry.extents import slices

# ----------------------------------------------------------------------------------------------- what it names, and how


def gae(rewards: Tensor) -> Tensor:
    last, advantages = torch.zeros(3), []
    for t in reversed(range(5)):
        last = rewards[:, t] + 0.9 * last
        advantages.append(last)
    return torch.stack(advantages[::-1], 1)


def carried_gae(rewards: md.MaskedTensor) -> Tensor:
    last, mask = torch.zeros(3), rewards.get_mask()
    for t in reversed(range(5)):
        last = torch.where(mask[:, t], rewards[:, t] + 0.9 * last, last)
    return last


def test_a_state_that_one_invalid_step_makes_invalid() -> None:
    with md.audit() as report:
        gae(batch())
    (finding,) = report.findings
    assert (finding.code, finding.file) == ("last = rewards[:, t] + 0.9 * last", __file__)
    assert finding.line == gae.__code__.co_firstlineno + 3
    assert str(report) == (
        f"audit: 1 finding\n"
        f"test_audit.py:{finding.line}: last = rewards[:, t] + 0.9 * last\n"
        "    rows became wholly invalid, though something in them was valid: 9 rows in 4 calls\n"
        "    -> carry the old state where a step is invalid: torch.where(step.get_mask(), new, old); or give what is "
        "invalid a value, to_tensor(fill)"
    )
    assert str(finding) == (
        f"test_audit.py:{finding.line}: rows became wholly invalid, though something in them was valid (9 rows in 4 "
        "calls): carry the old state where a step is invalid: torch.where(step.get_mask(), new, old); or give what is "
        "invalid a value, to_tensor(fill)"
    )
    assert findings_in(lambda: carried_gae(batch())) == []


@pytest.mark.parametrize("in_place", [False, True])
def test_a_moving_average_in_the_order_of_time(in_place: bool) -> None:
    def average() -> None:
        x = batch()
        state = x[:, 0].clone()
        for t in range(1, 5):
            state = state.mul_(0.9).add_(0.1 * x[:, t]) if in_place else 0.9 * state + 0.1 * x[:, t]

    def carried() -> None:
        x = batch()
        state = x[:, 0]
        for t in range(1, 5):
            state = torch.where(IN_EXTENT[:, t], 0.9 * state + 0.1 * x[:, t], state)

    assert findings_in(average) == [("lost rows", 3)]
    assert findings_in(carried) == []


def test_a_recurrent_cell_by_hand() -> None:
    inputs, states = nn.Linear(2, 12), nn.Linear(3, 12)

    def run(carry: bool) -> None:
        x, h, c = batch(2), torch.zeros(3, 3), torch.zeros(3, 3)
        for t in range(5):
            i, f, g, o = (inputs(x[:, t]) + states(h)).chunk(4, 1)
            new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            new_h = o.sigmoid() * new_c.tanh()
            is_step = IN_EXTENT[:, t, None]
            h, c = (torch.where(is_step, new_h, h), torch.where(is_step, new_c, c)) if carry else (new_h, new_c)

    assert {kind for kind, _ in findings_in(lambda: run(carry=False))} == {"lost rows"}
    assert findings_in(lambda: run(carry=True)) == []


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a linear map of both": lambda x, h: F.linear(torch.cat([x, h], -1), torch.ones(2, 4)).tanh(),
    "addmm": lambda x, h: torch.addmm(x, h, torch.ones(2, 2)),
    "baddbmm": lambda x, h: torch.baddbmm(x[:, None], h[:, None], torch.ones(3, 2, 2))[:, 0],
    "einsum": lambda x, h: torch.einsum("bi,ij->bj", h, torch.ones(2, 2)) + x,
    "a filter": lambda x, h: 0.5 * h + x,
    "lerp": lambda x, h: torch.lerp(h, x, 0.5),
    "a maximum": torch.maximum,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_state_that_an_operator_loses_where_a_sample_has_ended(name: str) -> None:
    def run(x: Tensor, steps: int, hold: bool) -> Tensor:
        h = torch.zeros(3, 2)
        for t in range(steps):
            new = STEPS[name](x[:, t], h)
            h = torch.where(IN_EXTENT[:, t, None], new, h) if hold else new
        return h

    # The second sample has ended at the third step, which is the last one here; then the third, and the first.
    assert findings_in(lambda: run(batch(2), 3, hold=False)) == [("lost rows", 1)]
    assert findings_in(lambda: run(batch(2), 5, hold=False)) == [("lost rows", 3)]
    assert findings_in(lambda: run(batch(2), 5, hold=True)) == []


def test_states_that_are_not_lost() -> None:
    x, cell, logits = batch(2), nn.GRUCell(2, 2), nn.Linear(4, 2)

    def decode() -> None:
        h, loss = torch.zeros(3, 2), torch.zeros(())
        for t in range(4):
            h = cell(x[:, t], h)
            step = logits(torch.cat([h, x[:, t]], -1))  # of the steps that are there
            loss = loss + F.cross_entropy(step, LABELS)

    def fed() -> None:
        h = torch.zeros(3, 2)
        for t in range(5):
            h = cell(logits(torch.cat([x[:, t], h], -1)), h)  # the cell holds

    def stacked(uses_last: bool) -> None:
        h, states = torch.zeros(3, 2), []
        for t in range(5):
            h = logits(torch.cat([x[:, t], h], -1)).tanh()
            states.append(h)
        torch.stack(states, 1).mean(1)  # of the steps that are there
        if uses_last:
            h.sum(1)

    assert findings_in(lambda: stacked(uses_last=False)) == []
    assert findings_in(lambda: stacked(uses_last=True)) == [("lost rows", 3)]
    assert findings_in(decode) == []
    assert findings_in(fed) == []
    assert findings_in(lambda: torch.stack([x[:, t] - x[:, t - 1] for t in range(1, 5)], 1).abs().mean()) == []


def test_a_state_that_is_stacked_with_a_step_past_the_end() -> None:
    def run(hold: bool) -> None:
        x = batch(2)
        h = x[:, 0] * 1
        for t in range(1, 3):
            new = torch.stack([x[:, t], h]).sum(0)
            h = torch.where(IN_EXTENT[:, t, None], new, h) if hold else new

    assert advice_of(lambda: run(hold=False)) == [
        "    a state was stacked with steps that are not there, and goes on past the end of its sample: 1 row",
        "    -> carry the old state where a step is invalid: torch.where(step.get_mask(), new, old)",
    ]
    assert findings_in(lambda: run(hold=True)) == []
    x = batch(2)
    assert findings_in(lambda: [torch.stack([x[:, t], x[:, t - 1]]).sum(0) for t in range(1, 5)]) == []


def test_means_that_count_numbers_of_nothing() -> None:
    x = md.from_lengths(torch.ones(3, 6, 2), torch.tensor([6, 2, 3]))  # three parts of two positions, one, and two
    assert advice_of(lambda: torch.stack([part.sum(1) for part in x.split(2, 1)], 1).mean(1)) == [
        "    a mean counts numbers that come from no position of their sample: 6 elements",
        "    -> leave them out: masked_dispatch.sum(part, dim, min_count=1) is invalid where a sample has nothing",
    ]
    linear = nn.Linear(2, 4)
    for wrong in (
        lambda: torch.stack([linear(part.sum(1)).relu() for part in x.chunk(3, 1)]).mean(0),
        lambda: linear(torch.cat([part.sum(1, keepdim=True) for part in x.chunk(3, 1)], 1)).std(1),
    ):
        assert findings_in(wrong) == [("numbers of nothing", 12)]
    for right in (
        lambda: torch.stack([md.sum(part, 1, min_count=1) for part in x.split(2, 1)], 1).mean(1),
        lambda: torch.stack([part.mean(1) for part in x.split(2, 1)], 1).mean(1),
        lambda: torch.stack([part.sum(1) for part in x.split(2, 1)], 1).sum(1),
        lambda: (x[:, :2].sum(1) + x[:, 2:].sum(1)).mean(0),
        lambda: torch.cat([x[:, :2].sum(1), x[:, 2:].sum(1)], -1).mean(0),
    ):
        assert findings_in(right) == []


@pytest.mark.filterwarnings("ignore::masked_dispatch.EmptiedSampleWarning")
def test_windows_that_are_longer_than_a_sample() -> None:
    x = batch(2).mT
    assert advice_of(lambda: F.max_pool1d(x, 3).mean(2)) == [
        "    a window is longer than samples, and leaves them no position: 1 row",
        "    -> pad the samples to the window, F.pad(x, (0, k)); or pool over all of a sample, x.amax(dim)",
    ]
    assert findings_in(lambda: F.conv1d(x, torch.ones(2, 2, 4)).amax(2)) == [("window too long", 2)]
    assert findings_in(lambda: nn.Sequential(nn.Conv1d(2, 2, 3), nn.ReLU())(x)) == [("window too long", 1)]
    assert findings_in(lambda: md.windows("padding", nn.Conv1d(2, 2, 3))(x)) == [("window too long", 1)]
    assert findings_in(lambda: (F.max_pool1d(x, 2), F.conv1d(x, torch.ones(2, 2, 3), padding=1), x.amax(2))) == []


def test_a_total_to_which_an_invalid_loss_is_added() -> None:
    def add() -> None:
        total: Any = 0
        for valid in (True, False, True):
            total = total + md.masked_tensor(torch.tensor(1.0), torch.tensor(valid))

    assert findings_in(add) == [("lost rows", 2)]


def test_an_invalid_weight_of_a_row() -> None:
    weights = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    assert findings_in(lambda: batch(2) * weights[:, None, None]) == [("lost rows", 1)]
    tokens = md.from_lengths(torch.ones(3, 5), LENGTHS)
    tokens = md.padded(tokens.mask_with(torch.arange(5) != 1), tokens.get_mask())  # the second one is missing
    assert findings_in(lambda: batch(2) * tokens[..., None]) == [("lost rows", 3)]
    partly = md.masked_tensor(torch.ones(3, 2), torch.tensor([[True, False]] * 3))
    assert findings_in(lambda: torch.ones(3, 2).sub(partly)) == []
    targets = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    predictions = md.masked_tensor(torch.ones(3), torch.tensor([True, True, True]))
    assert findings_in(lambda: [predictions - targets for _ in range(2)]) == []


def test_padding_that_becomes_valid() -> None:
    def joined(x: Tensor) -> Tensor:
        return F.linear(torch.cat([x, torch.ones(3, 5, 1)], -1), torch.ones(2, 3))

    with md.audit() as report:
        joined(batch(2).without_extent())
    assert "\n".join(str(report).split("\n")[2:]) == (
        "    padding became valid: 6 elements\n"
        "    -> keep the extent: leave out without_extent(), or say it again, masked_dispatch.padded(x, extent); "
        "reduce before to_tensor(fill); add to a masked buffer, x.new_zeros(shape)"
    )
    assert findings_in(lambda: joined(batch(2))) == []
    assert findings_in(lambda: F.dropout(batch(2).without_extent().transpose(1, 2) * 2, 0.5).sum(1)) == []


def test_asking_again_writes_nothing() -> None:
    """Statistics are those of one step, though the call is made a second time, with the extent."""
    mean, expected = torch.zeros(2), torch.zeros(2)
    with md.audit():
        x = batch(2).without_extent().transpose(1, 2)
        torch.batch_norm(x, None, None, mean, torch.ones(2), True, 0.1, 1e-5, False)
    torch.batch_norm(x, None, None, expected, torch.ones(2), True, 0.1, 1e-5, False)
    assert torch.equal(mean, expected)


def test_a_window_over_padding_that_counts_as_missing() -> None:
    weight = torch.ones(1, 1, 3)
    with md.windows("missing"):
        x = batch()[:, None]
        assert findings_in(lambda: F.conv1d(x.without_extent(), weight, padding=1)) == [("valid padding", 3)]
        assert findings_in(lambda: F.conv1d(x, weight, padding=1)) == []


def test_padding_in_a_plain_buffer() -> None:
    assert findings_in(lambda: torch.zeros(3, 5, 2).add_(batch(2))) == [("valid padding", 12)]
    assert findings_in(lambda: batch(2).new_zeros(3, 5, 2).add_(batch(2))) == []


def test_padding_that_is_filled_and_reduced() -> None:
    x, linear, recurrent = batch(2), nn.Linear(2, 4), nn.LSTM(2, 3, batch_first=True)
    with md.audit() as report:
        filled = x.to_tensor(0)
        linear(filled).relu().mean(1)
    (finding,) = report.findings
    assert (finding.kind, finding.count, finding.code) == ("valid padding", 12, "filled = x.to_tensor(0)")
    assert findings_in(lambda: recurrent(x.to_tensor(0))[1]) == [("valid padding", 12)]
    labels = torch.zeros(3, 5, dtype=torch.long).masked_fill(~IN_EXTENT, -100)
    for right in (
        lambda: x.to_tensor(0).sum(1),
        lambda: x.to_tensor(-torch.inf).amax(1),
        lambda: (x.to_tensor(0) * IN_EXTENT[..., None]).sum(1) / IN_EXTENT.sum(1)[:, None],
        lambda: F.cross_entropy(linear(x.to_tensor(0)).view(-1, 4), labels.view(-1)),
        lambda: F.scaled_dot_product_attention(f := x.to_tensor(0), f, f, IN_EXTENT[:, None])[:, 0],
        lambda: recurrent(nn.utils.rnn.pack_padded_sequence(x.to_tensor(0), LENGTHS, True, False))[1],
        lambda: x.mean(1).to_tensor(0).mean(),
    ):
        assert findings_in(right) == []


def test_an_assignment_that_drops_a_mask() -> None:
    x, plain = batch(2).without_extent(), torch.zeros(3, 5, 2)
    with md.audit() as report, pytest.warns(md.MaskDroppedWarning):
        plain[:] = x
    assert str(report).split("\n")[1:] == [
        f"test_audit.py:{report.findings[0].line}: plain[:] = x",
        "    an assignment to a plain tensor skipped what is invalid: 12 elements",
        "    -> assign to a masked buffer, x.new_empty(shape), or fill first, x.to_tensor(fill)",
    ]
    with md.updates("silent"):
        assert findings_in(lambda: plain.copy_(x)) == []
    assert findings_in(lambda: plain.copy_(x.to_tensor(0))) == []
    with pytest.warns(md.MaskDroppedWarning):
        assert findings_in(lambda: plain.copy_(batch(2))) == [("mask dropped", 12)]


@pytest.mark.filterwarnings("ignore::masked_dispatch.BatchEndWarning")
def test_the_end_of_a_batch() -> None:
    x = batch(2)
    with md.audit() as report:
        head = x[:, -1]
    assert not head.get_mask().any()
    (finding,) = report.findings
    assert (finding.kind, finding.count, finding.code) == ("batch end", 6, "head = x[:, -1]")
    assert finding.what == "x[:, -1] is an end of the batch, where shorter samples have padding"
    assert finding.todo == (
        "masked_dispatch.last(x, 1) takes each sample's own; x.without_extent() says that the batch's is meant."
    )
    assert str(report).split("\n")[2] == f"    {finding.what}: 6 elements"
    assert findings_in(lambda: x[:, -2:]) == [("batch end", 10)]
    whole = md.padded(x[:, :2].without_extent(), torch.ones(3, 2, 1, dtype=torch.bool), dim=1)
    assert findings_in(lambda: (md.last(x), x[:, 0], x[:, 1:-1], whole[:, -1])) == []


def test_a_mean_that_leaves_out_rows() -> None:
    losses = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    assert advice_of(lambda: losses.mean()) == [
        "    a mean left out rows that are there, and wholly invalid: 1 row",
        "    -> right if they are missing in what was measured; else, masked_dispatch.trace() shows where they became "
        "invalid",
    ]
    logits = md.masked_tensor(torch.randn(3, 2), torch.tensor([[True], [True], [False]]).expand(3, 2))
    assert findings_in(lambda: F.cross_entropy(logits, LABELS)) == [("rows left out", 1)]
    assert findings_in(lambda: nn.MSELoss()(losses, torch.ones(3))) == [("rows left out", 1)]
    assert findings_in(lambda: nn.MSELoss(reduction="sum")(losses, torch.ones(3))) == []
    assert findings_in(lambda: F.mse_loss(torch.ones(3), losses)) == []  # the target is missing
    assert findings_in(lambda: F.cross_entropy(torch.randn(3, 2), md.masked_tensor(LABELS, losses.get_mask()))) == []
    assert findings_in(lambda: F.mse_loss(losses, md.masked_tensor(torch.ones(3), torch.arange(3) > 0))) == [
        ("rows left out", 1)
    ]
    assert findings_in(lambda: md.mean(batch(2), 0)) == []
    assert findings_in(lambda: batch(2).mean(1)) == []


def test_a_mean_that_leaves_out_sums_of_nothing() -> None:
    hit = md.masked_tensor(torch.ones(3, 2), torch.tensor([[True, False], [False, False], [True, True]]))
    with md.audit() as report:
        (hit.sum(1) / 2).mean()
    assert [(finding.kind, finding.count) for finding in report.findings if finding.kind != "divided by size"] == [
        ("sums of nothing", 1)
    ]
    assert "    a mean left out rows whose sum had nothing valid to add: 1 row\n" in str(report)
    assert "-> if they count as 0, masked_dispatch.sum(x, dim, min_count=0), or count what is valid" in str(report)
    assert findings_in(lambda: (md.sum(hit, 1, min_count=0) / 3).mean()) == []
    assert findings_in(lambda: (hit.count(1) / 3).mean()) == []
    assert findings_in(lambda: hit.mean(1).mean()) == [("rows left out", 1)]


def test_factors_that_are_valid_in_different_elements() -> None:
    p = md.masked_tensor(torch.ones(2, 3), torch.tensor([[True, True, False], [True, True, True]]))
    t = md.masked_tensor(torch.ones(2, 3), torch.tensor([[True, True, True], [False, True, True]]))
    assert advice_of(lambda: 2 * (p * t).sum() / (p.sum() + t.sum())) == [
        "    only one of two factors is valid: 2 elements",
        "    -> a statistic of each has other elements than the product: p.mask_like(t) and t.mask_like(p) before all "
        "of them",
    ]
    assert findings_in(lambda: p.mT @ t) == [("factors differ", 2)]
    assert findings_in(lambda: (p.mask_like(t) * t.mask_like(p), p * p.sum(0), batch(2) * batch(2))) == []


def dice(p: Tensor, t: Tensor) -> Tensor:
    return 2 * (p * t).sum() / (p.sum() + t.sum())


def test_dice_with_one_void_pixel() -> None:
    t = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    p = md.masked_tensor(t, torch.tensor([[True, False], [True, True]]))
    with md.audit() as report:
        assert dice(p, t).item() != pytest.approx(1)
    assert report.findings[0].line == dice.__code__.co_firstlineno + 1
    assert str(report).split("\n")[2:] == [
        "    a plain factor is reduced by itself, with what the product leaves out: 1 element",
        "    -> masked_dispatch.mask_like(t, p) before both, for a plain t and a masked p",
    ]
    assert findings_in(lambda: dice(t.view(-1), p.view(-1))) == [("plain factor", 1)]
    assert findings_in(lambda: (t.sum(), (p * t).sum())) == [("plain factor", 1)]
    assert findings_in(lambda: (p.mT @ (t - 0.5), (t - t.mean(0)))) == [("plain factor", 1)]
    assert findings_in(lambda: (torch.einsum("ij,ij->i", p, t), t.norm())) == [("plain factor", 1)]
    assert findings_in(lambda: ((p * t).sum(), (t * t).sum())) == [("plain factor", 1)]
    assert findings_in(lambda: dice(p, md.mask_like(t, p))) == []
    assert findings_in(lambda: dice(p, t * torch.tensor([[1.0, 0.0], [1.0, 1.0]]))) == []  # nothing counted is left out
    assert findings_in(lambda: (p * t).sum()) == []


def test_a_mean_over_tokens_that_a_plain_mask_weighs_is_right() -> None:
    def mean() -> Tensor:
        x, weights = batch(2), IN_EXTENT[..., None].expand(3, 5, 2).float()
        return (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)

    assert findings_in(mean) == []


# ------------------------------------------------------------------------------------------------------ how it observes


def test_lines_of_torch_are_not_reported() -> None:
    losses = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    assert findings_in(lambda: F.gaussian_nll_loss(losses, torch.ones(3), torch.ones(3))) == []
    assert findings_in(lambda: F.cosine_similarity(losses, torch.ones(3), 0)) == []


def test_the_line_is_that_of_the_callers_module() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(1) / x.shape[1]

    with md.audit() as report:
        nn.Sequential(nn.Linear(8, 8), Wrong())(batch(8))
    assert [f.code for f in report.findings] == ["return x.sum(1) / x.shape[1]"]


def test_backward_is_not_looked_at() -> None:
    p = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]), requires_grad=True)
    product = p * p.detach().mask_with(torch.tensor([True, True, False]))
    assert findings_in(lambda: product.sum().backward()) == []


def test_it_keeps_no_tensor_and_leaves_nothing_behind() -> None:
    before = len(policies.listeners), len(slices.listeners)
    gc.collect()
    gc.disable()  # no cycle is made
    try:
        with md.audit() as report:
            x = batch(8)
            kept = [weakref.ref(t._data) for t in (x, x.sum(1) / 5, x.without_extent() * 1)]
            del x
            assert [ref() for ref in kept] == [None] * 3
            gae(batch())
    finally:
        gc.enable()
    assert [f.kind for f in report.findings] == ["divided by size", "lost rows"]
    assert (len(policies.listeners), len(slices.listeners)) == before
    x = batch(2)
    x.sum(1) / 5
    assert len(report.findings) == 2


def test_a_trace_inside_and_outside() -> None:
    with md.trace() as outer, md.audit() as report, md.trace() as inner:
        batch(2).sum(1) / 5
    assert len(inner.calls) == len(outer.calls)
    assert [f.kind for f in report.findings] == ["divided by size"]


def test_sparse_storage_is_left_out() -> None:
    x = md.masked_tensor(torch.ones(2, 3), torch.tensor([[True, False, True], [True, True, True]])).to_sparse()
    assert findings_in(lambda: x.sum(1) / 3) == []


def test_what_nobody_has_counted() -> None:
    with md.audit() as report:
        for listener in policies.listeners:
            listener(None)  # as for an assignment on a device that would have to be waited for
    (finding,) = report.findings
    assert (finding.count, finding.how_many) == (None, "elements not counted")


def test_a_compiled_function_runs_uncompiled() -> None:
    compiled = torch.compile(lambda x: x.sum(1) / x.shape[1], backend="eager")
    x = batch(2).without_extent()
    assert findings_in(lambda: compiled(x)) == [("divided by size", 12)]


def test_another_thread_is_not_looked_at() -> None:
    x = batch(2)

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: x.sum(1) / 5)
        thread.start()
        thread.join()

    assert findings_in(elsewhere) == []
