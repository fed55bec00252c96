"""Views, movement, padding and joins on bare records, small enough to be checked by eye.

Elements are numbered from 1, so that a result tells by itself where each of its elements came from: what is numbered k
must be as valid as element k of the input, and a 0 is a zero that the operator wrote, valid.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor

from bare_records import apply, masked, plain, shows, valid_of
from op_registry import MaskedSemanticsError
from op_registry.authoring import Dense

aten = torch.ops.aten
nan, inf = math.nan, math.inf
T, F = True, False


def test_a_mask_over_tokens_stays_small_on_its_way_through_attention():
    tokens = torch.tensor([[T, T, F], [T, F, F]]).unsqueeze(-1).to(torch.int8)
    x = Dense(torch.randn(2, 3, 8), tokens)
    heads = apply(aten.view.default, x, (2, 3, 2, 4))
    assert heads.validity.shape == (2, 3, 1, 1)
    swapped = apply(aten.transpose.int, heads, 1, 2)
    assert swapped.validity.shape == (2, 1, 3, 1)
    rows = apply(aten.view.default, apply(aten.expand.default, x, (2, 3, 8)), (6, 8))
    assert rows.validity.shape == (6, 1)
    q, k = apply(aten.split.Tensor, x, 4, -1)
    assert q.validity is k.validity
    assert apply(aten.cat.default, [q, k], -1).validity.shape == (2, 3, 1)
    assert apply(aten.cat.default, [q, k], 1).validity.shape == (2, 6, 1)
    assert apply(aten.stack.default, [q, k], 0).validity.shape == (1, 2, 3, 1)
    assert apply(aten.index_select.default, x, -1, plain([0, 5])).validity.shape == (2, 3, 1)
    assert apply(aten.index.Tensor, x, [plain([1, 0])]).validity.shape == (2, 3, 1)
    assert apply(aten.constant_pad_nd.default, x, (0, 0, 1, 1)).validity.shape == (2, 5, 1)
    assert apply(aten.repeat.default, x, (2, 1, 3)).validity.shape == (4, 3, 1)


def test_view_of_a_validity_with_other_strides_than_the_datas():
    data, mask = torch.arange(6).reshape(2, 3), torch.tensor([[T, F], [T, T], [F, T]]).to(torch.int8).t()
    shows(apply(aten.view.default, Dense(data, mask), (6,)), [0, 1, None, None, 4, 5])


def test_parts_of_elements():
    both = apply(aten.view_as_complex.default, masked(torch.ones(3, 2), [[T, T], [T, F], [F, F]]))
    shows(both, [1 + 1j, None, None])
    quarters = apply(aten.view.dtype, masked(torch.zeros(2, dtype=torch.int32), [T, F]), torch.int8)
    assert valid_of(quarters).tolist() == [T] * 4 + [F] * 4
    assert valid_of(apply(aten.view.dtype, quarters, torch.int32)).tolist() == [T, F]
    pairs = Dense(torch.zeros(4, dtype=torch.int16), tensor([T, T, T, F]))
    assert valid_of(apply(aten.view.dtype, pairs, torch.float32)).tolist() == [T, F]
    same = apply(aten.view.dtype, masked([1.0, 2.0], [T, F]), torch.int32)
    assert valid_of(same).tolist() == [T, F]


GAPPED = {
    "columns": lambda t: t[:, :2],
    "every other row": lambda t: t[::2],
    "turned": lambda t: t[:, 1:3].t(),
    "a column": lambda t: t[:, 1:2],
    "one dimension": lambda t: t[1, ::2],
}


@pytest.mark.parametrize("view", GAPPED.values(), ids=GAPPED)
def test_as_strided_of_a_view_with_gaps_shows_what_the_view_shows(view):
    base, known = torch.arange(24).reshape(4, 6), torch.arange(24).reshape(4, 6) % 3 != 0
    data, mask = view(base), view(known)
    part, own = Dense(data, mask.to(torch.int8)), (tuple(data.shape), data.stride())
    for size, stride in (
        own,
        tuple(zip(*reversed(list(zip(*own, strict=True))), strict=True)),
        (own[0][:-1], own[1][:-1]),
        ((1, *own[0]), (7, *own[1])),
        ([n - (n > 1) for n in own[0]], own[1]),
        ((0, 3), (1, 1)),
    ):
        found = apply(aten.as_strided.default, part, size, stride)
        assert torch.equal(found.data, base.as_strided(size, stride, data.storage_offset()))
        assert torch.equal(valid_of(found), known.as_strided(size, stride, data.storage_offset()))
        written = Dense(torch.full(tuple(size), -1), torch.zeros(tuple(size), dtype=torch.int8))
        scattered = apply(aten.as_strided_scatter.default, part, written, size, stride)
        assert torch.equal(valid_of(scattered), mask & (scattered.data != -1))


@pytest.mark.parametrize(
    ("size", "stride", "offset"), [((3, 3), (4, 1), None), ((2, 2), (1, 1), None), ((2,), (4,), 1)]
)
def test_as_strided_outside_of_what_is_known_is_refused(size, stride, offset):
    part = Dense(torch.arange(12).reshape(3, 4)[:, :2], torch.ones(3, 1, dtype=torch.int8))
    with pytest.raises(MaskedSemanticsError, match="may reach elements"):
        apply(aten.as_strided.default, part, size, stride, offset)


def test_errors_are_torchs_own():
    x = masked(torch.ones(2, 3), [[T], [F]])
    for op, args, error in [
        (aten.select.int, (2, 0), IndexError),
        (aten.view.default, ((5,),), RuntimeError),
        (aten.flip.default, ((2,),), IndexError),
        (aten.index_select.default, (5, plain([0])), IndexError),
        (aten.gather.default, (0, plain([[2]])), (IndexError, RuntimeError)),
        (aten.split_with_sizes.default, ([1, 2], 0), RuntimeError),
    ]:
        with pytest.raises(error):
            apply(op, x, *args)
    with pytest.raises(RuntimeError, match="at least 2"):
        apply(aten.tril.default, masked(torch.ones(2), [T, F]))


# ------------------------------------------------------------------------------------------------------ what is written


def test_zeros_and_padding_are_valid():
    x = masked([[1, 2], [3, 4]], [[F, F], [T, F]])
    shows(apply(aten.tril.default, x), [[None, 0], [3, None]])
    shows(apply(aten.constant_pad_nd.default, x, (1, 0), 7), [[7, None, None], [7, 3, None]])


def test_an_invalid_repeat_leaves_its_element_out():
    assert apply(aten.repeat_interleave.Tensor, masked([2, -5, 1], [T, F, T])).tolist() == [0, 0, 2]
    with pytest.raises(MaskedSemanticsError, match="was given output_size=4"):
        apply(aten.repeat_interleave.Tensor, masked([2, 1], [T, F]), output_size=4)


def test_conjugate_views_are_filled():
    z = apply(aten._conj.default, masked(torch.tensor([1 + 2j, 3 + 4j]), [T, F]))
    assert z.data.is_conj()
    assert z.filled(0).tolist() == [1 - 2j, 0]
    imaginary = z.like(z.data.imag)
    assert imaginary.data.is_neg()
    assert imaginary.filled(0).tolist() == [-2, 0]
