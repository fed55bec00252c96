"""Recurrent networks and packed sequences: long gaps, masked weights unit by unit, dropout, what packing knows.

That each row is run without its invalid steps, by networks, cells and on packed sequences, the laws ask with samples of
their own (op_registry/ops/recurrent/samples.py).
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pad_packed_sequence,
)

from masked_dispatch import masked_tensor
from networks_with_samples import FEATURES, HIDDEN, NETWORKS, TIME, hidden, network, shown, states, steps
from op_registry import MaskedSemanticsError


# In float32 torch warns that oneDNN has no projections.
@pytest.mark.parametrize(
    "name, dtype", [*((name, torch.float64) for name in NETWORKS), ("lstm", torch.float32), ("rnn_relu", torch.float32)]
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


def test_lengths_have_to_be_known():
    lengths = masked_tensor(torch.tensor([2, 1]), torch.tensor([True, False]))
    with pytest.raises(
        MaskedSemanticsError,
        match=r"_pack_padded_sequence has no meaning with invalid lengths \(shape \(2,\)\): it is unknown where a "
        r"sequence ends. Fill them first with x.to_tensor\(value\).",
    ):
        torch.ops.aten._pack_padded_sequence(torch.ones(2, 2, 1), lengths, False)
