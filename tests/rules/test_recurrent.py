"""Recurrent networks and packed sequences: against plain torch on each row with its invalid steps taken out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
    unpack_sequence,
)

from masked_dispatch import as_masked_tensor, is_masked_tensor, masked_tensor
from op_registry import MaskedSemanticsError
from recurrent_networks import BATCH, FEATURES, HIDDEN, NETWORKS, TIME, hidden, network, shown, states, steps

CELLS = {
    "lstm": (nn.LSTMCell, {}),
    "gru": (nn.GRUCell, {}),
    "rnn_tanh": (nn.RNNCell, {}),
    "rnn_relu": (nn.RNNCell, {"nonlinearity": "relu"}),
}


# Each network, and an LSTM of every form.
@pytest.mark.parametrize(
    "name, layers, bidirectional, bias, batch_first",
    [
        *((name, 3, True, True, False) for name in NETWORKS),
        ("lstm", 1, False, True, True),
        ("lstm", 1, True, False, False),
        ("projected lstm", 1, True, False, True),
        ("gru", 1, True, False, True),
    ],
)
def test_each_row_is_run_without_its_invalid_steps(name, layers, bidirectional, bias, batch_first):
    torch.manual_seed(0)
    model = network(name, layers, bidirectional=bidirectional, bias=bias, batch_first=batch_first)
    data, mask = steps()
    outputs, last = [], []
    plain = data.clone().requires_grad_()
    scalar = torch.zeros((), dtype=torch.float64)
    for b in range(BATCH):
        if not mask[:, b].any():
            outputs.append(None)
            last.append(None)
            continue
        made, state = model(plain[mask[:, b], b])
        outputs.append(made)
        last.append(states(state))
        scalar = scalar + made.square().sum() + sum(s.cos().sum() - s.numel() for s in last[-1])
    wanted = torch.autograd.grad(scalar, [plain, *model.parameters()])
    for garbage in (math.nan, math.inf, -1e300):
        x = hidden(data, mask, garbage)
        made, state = model(x.transpose(0, 1) if batch_first else x)
        made = made.transpose(0, 1) if batch_first else made
        assert made.get_mask().equal(mask[..., None].expand(made.shape))
        for b in range(BATCH):
            if outputs[b] is None:
                assert not any(s.get_mask()[:, b].any() for s in states(state))
                continue
            torch.testing.assert_close(shown(made)[mask[:, b], b], outputs[b])
            for s, want in zip(states(state), last[b], strict=True):
                assert s.get_mask()[:, b].all()
                torch.testing.assert_close(shown(s)[:, b], want)
        scalar = shown(made).square().sum() + sum(shown(s.cos() - 1).sum() for s in states(state))
        of_x, *of_parameters = torch.autograd.grad(scalar, [x, *model.parameters()])
        assert of_x.get_mask().equal(x.get_mask())
        torch.testing.assert_close(shown(of_x), torch.where(mask[..., None], wanted[0], 0))
        for got, want in zip(of_parameters, wanted[1:], strict=True):
            assert not is_masked_tensor(got)
            torch.testing.assert_close(got, want)


# In float32 torch warns that oneDNN has no projections.
@pytest.mark.parametrize(
    "name, dtype", [*((name, torch.float64) for name in NETWORKS), *((name, torch.float32) for name in CELLS)]
)
def test_steps_beyond_the_last_one_leave_no_trace(name, dtype):
    """Weights with which every further step would multiply a relu's state, or fill an lstm's memory."""
    torch.manual_seed(0)
    model = network(name).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
            if name == "rnn_relu":
                parameter.abs_()
    data, mask = torch.randn(800, 2, FEATURES, dtype=dtype), torch.zeros(800, 2, dtype=torch.bool)
    mask[50:54] = True
    got, wanted = model(hidden(data, mask)), model(data[50:54])
    gradients = []
    for made, state in (got, wanted):
        scalar = shown(made).sum() + sum(shown(s).sum() for s in states(state))
        gradients.append(torch.autograd.grad(scalar, list(model.parameters())))
    for mine, theirs in zip(states(got[1]), states(wanted[1]), strict=True):
        torch.testing.assert_close(shown(mine), theirs)
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_with_some_valid_features_sums_over_them(name):
    torch.manual_seed(0)
    model = network(name, 2, bidirectional=True)
    data, _ = steps()
    mask = torch.rand(data.shape) < 0.7
    mask[..., 0] = True
    made, state = model(hidden(data, mask))
    wanted, last = model(torch.where(mask, data, 0))
    assert made.get_mask().all()
    torch.testing.assert_close(shown(made), wanted)
    for mine, theirs in zip(states(state), states(last), strict=True):
        torch.testing.assert_close(shown(mine), theirs)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("masked_input", [False, True])
def test_what_is_invalid_of_an_initial_state_counts_as_zero(name, masked_input):
    torch.manual_seed(0)
    model = network(name, bidirectional=True)
    data, mask = steps()
    x = hidden(data, mask) if masked_input else data
    given = [torch.randn(2, BATCH, s.shape[-1], dtype=torch.float64) for s in states(model(data)[1])]
    known = [torch.rand(s.shape) < 0.5 for s in given]
    invalid, filled = (
        tuple(make(s, k) for s, k in zip(given, known, strict=True))
        for make in (hidden, lambda s, k: torch.where(k, s, 0))
    )
    made, state = model(x, invalid if len(given) > 1 else invalid[0])
    wanted, last = model(x, filled if len(given) > 1 else filled[0])
    for mine, theirs in zip((made, *states(state)), (wanted, *states(last)), strict=True):
        assert not is_masked_tensor(theirs) or mine.get_mask().equal(theirs.get_mask())
        torch.testing.assert_close(shown(mine), shown(theirs))


def test_a_row_without_a_step_has_no_state_to_hand_on():
    model = network("gru")
    data, mask = steps()
    _, state = model(hidden(data, mask), torch.ones(1, BATCH, HIDDEN, dtype=torch.float64))
    assert state.get_mask()[0, :, 0].tolist() == [True, False, True, True]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_sequence_by_itself(name):
    torch.manual_seed(0)
    model = network(name)
    data, mask = steps()
    made, state = model(hidden(data[:, 2], mask[:, 2]))
    wanted, last = model(data[mask[:, 2], 2])
    torch.testing.assert_close(shown(made)[mask[:, 2]], wanted)
    torch.testing.assert_close(shown(states(state)[0]), states(last)[0])


def test_dropout_is_drawn_for_every_position():
    torch.manual_seed(0)
    model = network("gru", 2, dropout=0.5)
    data, mask = steps()
    mask[:, 1] = mask[:, 2]
    made, after = [], []
    for x in (data, masked_tensor(data, torch.ones_like(data, dtype=torch.bool)), hidden(data, mask)):
        torch.manual_seed(1)
        made.append(shown(model(x)[0]))
        after.append(torch.rand(()))
    assert after[0] == after[1] == after[2]
    torch.testing.assert_close(made[0], made[1])
    torch.testing.assert_close(made[0][:, 0], made[2][:, 0])


# ------------------------------------------------------------------------------------------------- masked weights


def test_a_unit_without_a_bias_keeps_its_state():
    torch.manual_seed(0)
    model = network("gru")
    data, mask = steps()
    bias = model.bias_ih_l0.detach()
    known = torch.ones(3, HIDDEN, dtype=torch.bool)
    known[1, 2] = False  # the update gate of unit 2
    parameters = dict(model.named_parameters()) | {"bias_ih_l0": hidden(bias, known.reshape(-1))}
    start = torch.full((1, BATCH, HIDDEN), 0.25, dtype=torch.float64)
    made, state = torch.func.functional_call(model, parameters, (hidden(data, mask), start))
    unit = torch.arange(HIDDEN) == 2
    assert made.get_mask().equal(mask[..., None] & ~unit)
    assert not state.get_mask()[..., 2].any()
    # The others see the state that it keeps.
    cell = nn.GRUCell(FEATURES, HIDDEN, dtype=torch.float64)
    cell.load_state_dict({n.removesuffix("_l0"): p for n, p in model.named_parameters()})
    h = start[0, :1]
    for t in range(TIME):
        h = torch.where(unit, 0.25, cell(data[t, :1], h))
        torch.testing.assert_close(shown(made)[t, :1], torch.where(unit, 0, h))


def test_a_unit_without_a_bias_is_not_projected():
    torch.manual_seed(0)
    model = network("projected lstm")
    data, mask = steps()
    known = torch.ones(4, HIDDEN, dtype=torch.bool)
    known[1, 2] = False  # the forget gate of unit 2
    parameters = dict(model.named_parameters()) | {"bias_ih_l0": hidden(model.bias_ih_l0.detach(), known.reshape(-1))}
    made, (h, c) = torch.func.functional_call(model, parameters, (hidden(data, mask),))
    with torch.no_grad():
        model.weight_hr_l0[:, 2] = 0
    wanted, (wanted_h, _) = model(hidden(data, mask))
    for mine, theirs in ((made, wanted), (h, wanted_h)):
        assert mine.get_mask().equal(theirs.get_mask())
        torch.testing.assert_close(shown(mine), shown(theirs))
    assert c.get_mask().equal(mask.any(0)[None, :, None] & (torch.arange(HIDDEN) != 2))


@pytest.mark.parametrize("name", NETWORKS)
def test_whole_weights_under_a_stored_mask_change_nothing(name):
    """The same answers by the other way of computing them: cell by cell."""
    torch.manual_seed(0)
    model = network(name, 2, bidirectional=True)
    data, mask = steps()
    whole = {n: masked_tensor(p.detach(), torch.ones_like(p, dtype=torch.bool)) for n, p in model.named_parameters()}
    x = hidden(data, mask)
    made, state = torch.func.functional_call(model, whole, (x,))
    wanted, last = model(x)
    for mine, theirs in zip((made, *states(state)), (wanted, *states(last)), strict=True):
        assert mine.get_mask().equal(theirs.get_mask())
        torch.testing.assert_close(shown(mine), shown(theirs))


# --------------------------------------------------------------------------------------------------------- cells


@pytest.mark.parametrize("name", CELLS)
def test_a_loop_over_a_cell_gives_what_the_layer_gives(name):
    torch.manual_seed(0)
    kind, own = CELLS[name]
    cell, layer = kind(FEATURES, HIDDEN, dtype=torch.float64, **own), network(name)
    layer.load_state_dict({f"{n}_l0": p for n, p in cell.named_parameters()})
    data, mask = steps()
    x, state, made = hidden(data, mask), None, []
    for t in range(TIME):
        state = cell(x[t], state)
        made.append(states(state)[0])
    wanted, last = layer(x)
    seen = shown(torch.stack(made).mask_with(mask[..., None]) if is_masked_tensor(made[0]) else torch.stack(made))
    torch.testing.assert_close(torch.where(mask[..., None], seen, 0), shown(wanted))
    for mine, theirs in zip(states(state), states(last), strict=True):
        torch.testing.assert_close(torch.where(theirs.get_mask()[0], shown(mine), 0), shown(theirs)[0])


@pytest.mark.parametrize("name", CELLS)
def test_an_invalid_step_leaves_the_state_as_it_is(name):
    torch.manual_seed(0)
    kind, own = CELLS[name]
    cell = kind(FEATURES, HIDDEN, dtype=torch.float64, **own)
    x = hidden(torch.randn(2, FEATURES, dtype=torch.float64), torch.tensor([True, False]))
    known = torch.rand(2, HIDDEN) < 0.5
    old = [hidden(torch.randn(2, HIDDEN, dtype=torch.float64), known) for _ in range(1 + (name == "lstm"))]
    new = states(cell(x, tuple(old) if len(old) > 1 else old[0]))
    wanted = states(cell(shown(x), tuple(map(shown, old)) if len(old) > 1 else shown(old[0])))
    for before, after, want in zip(old, new, wanted, strict=True):
        assert after.get_mask()[0].all()
        assert after.get_mask()[1].equal(known[1])
        torch.testing.assert_close(shown(after)[0], want[0])
        assert shown(after)[1].equal(shown(before)[1])


# ------------------------------------------------------------------------------------------------ packed sequences


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_sequences_from_end_to_end(name, batch_first):
    torch.manual_seed(0)
    model = network(name, 2, bidirectional=True, batch_first=batch_first)
    data, mask = steps()
    lengths = torch.tensor([3, 6, 5, 4])
    x = hidden(data, mask)
    given = x.transpose(0, 1) if batch_first else x
    packed, state = model(pack_padded_sequence(given, lengths, batch_first, enforce_sorted=False))
    made, sizes = pad_packed_sequence(packed, batch_first)
    made = made.transpose(0, 1) if batch_first else made
    assert sizes.equal(lengths)
    within = torch.arange(TIME)[:, None] < lengths
    assert made.get_mask().equal((mask & within)[..., None].expand(made.shape))
    assert made.extent.equal(within[..., None].expand(made.shape))
    cut = hidden(data, mask & within)
    wanted, last = model(cut.transpose(0, 1) if batch_first else cut)
    wanted = wanted.transpose(0, 1) if batch_first else wanted
    here = (mask & within)[..., None]
    torch.testing.assert_close(torch.where(here, shown(made), 0), shown(wanted))
    for mine, theirs in zip(states(state), states(last), strict=True):
        assert mine.get_mask().equal(theirs.get_mask())
        torch.testing.assert_close(shown(mine), shown(theirs))
    got = torch.autograd.grad(torch.where(here, shown(made), 0).square().sum(), [x, *model.parameters()])
    want = torch.autograd.grad(shown(wanted).square().sum(), [cut, *model.parameters()])
    assert got[0].get_mask().equal(x.get_mask())
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(shown(mine), shown(theirs))


def test_packed_steps_and_masked_weights():
    torch.manual_seed(0)
    model = network("lstm")
    weights = {
        n: masked_tensor(p.detach(), torch.rand(p.shape) < 0.8) if "weight" in n else p.detach()
        for n, p in model.named_parameters()
    }
    data, mask = steps()
    lengths = torch.tensor([6, 5, 4, 3])
    within = torch.arange(TIME)[:, None] < lengths
    for x in (data, hidden(data, mask)):
        packed, _ = torch.func.functional_call(model, weights, (pack_padded_sequence(x, lengths),))
        cut = hidden(data, within & mask if is_masked_tensor(x) else within)
        wanted, _ = torch.func.functional_call(model, weights, (cut,))
        made, _ = pad_packed_sequence(packed)
        assert made.get_mask()[within].equal(wanted.get_mask()[within])
        torch.testing.assert_close(shown(made)[within], shown(wanted)[within])


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_sequences_are_packed_and_unpacked_with_their_masks(enforce_sorted):
    lengths = (4, 2, 1) if enforce_sorted else (2, 4, 1)
    sequences = [hidden(torch.randn(n, 2), torch.rand(n, 2) < 0.5) for n in lengths]
    packed = pack_sequence(sequences, enforce_sorted)
    assert packed.data.get_mask().sum() == sum(s.get_mask().sum() for s in sequences)
    for before, after in zip(sequences, unpack_sequence(packed), strict=True):
        assert after.get_mask().equal(before.get_mask())
        torch.testing.assert_close(shown(after), shown(before))


def test_padding_beside_a_plain_sequence_keeps_the_mask():
    known = torch.tensor([True, False])
    made = pad_sequence([torch.ones(3), hidden(torch.ones(2), known)], batch_first=True)
    assert made.get_mask().tolist() == [[True, True, True], [True, False, True]]


def test_lengths_have_to_be_known():
    lengths = masked_tensor(torch.tensor([2, 1]), torch.tensor([True, False]))
    with pytest.raises(
        MaskedSemanticsError,
        match=r"_pack_padded_sequence has no meaning with invalid lengths \(shape \(2,\)\): it is unknown where a "
        r"sequence ends. Fill them first with x.to_tensor\(value\).",
    ):
        torch.ops.aten._pack_padded_sequence(torch.ones(2, 2, 1), lengths, False)


# -------------------------------------------------------------------------------------------- derivatives and modes


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
def test_derivatives_of_every_order(name):
    torch.manual_seed(0)
    model = network(name, bidirectional=True)
    mask = torch.tensor([[True, False], [False, False], [True, True]])[..., None]
    names = [n for n, _ in model.named_parameters()]

    def f(x, *parameters):
        x = as_masked_tensor(x, mask.expand(x.shape))
        made, state = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))
        return shown(made), shown(states(state)[-1])

    inputs = (torch.randn(3, 2, FEATURES, dtype=torch.float64, requires_grad=True), *model.parameters())
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)
