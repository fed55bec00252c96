"""Constructors, and doors whose source speaks of padding, say which positions are there, and how samples lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import masked_dispatch as md
from masked_dispatch import interop
from op_registry.records.extent import LETTERS, Extent

LENGTHS = torch.tensor([3, 1, 2])
THERE = torch.arange(3) < LENGTHS[:, None]
SAMPLES = [torch.arange(2.0 * n).view(n, 2) for n in LENGTHS.tolist()]
DATA = nn.utils.rnn.pad_sequence(SAMPLES, batch_first=True)
IN_FRONT = nn.utils.rnn.pad_sequence(SAMPLES, batch_first=True, padding_side="left")
GAPS = torch.tensor([[True, False, True], [True, False, False], [False, True, True]])

# What each makes, what is there, and a letter for what is known of each dimension.
MADE: dict[str, tuple[Callable[[], Any], Tensor, str]] = {
    "from_lengths": (lambda: md.from_lengths(DATA, LENGTHS), THERE, "sp-"),
    "from_lengths along the last": (lambda: md.from_lengths(DATA.mT, LENGTHS, -1).mT, THERE, "sp-"),
    "pad_sequence": (lambda: md.pad_sequence(SAMPLES, batch_first=True), THERE, "sp-"),
    "pad_sequence, time first": (lambda: md.pad_sequence(SAMPLES).transpose(0, 1), THERE, "sp-"),
    "pad_sequence, in front": (lambda: md.pad_sequence(SAMPLES, True, "left"), THERE.flip(1), "sc-"),
    "pad_sequence of rows": (lambda: md.pad_sequence(list(md.from_lengths(DATA, LENGTHS)), True), THERE, "sp-"),
    "pad_stack": (lambda: md.pad_stack(SAMPLES), THERE, "sp-"),
    "pad_stack behind": (lambda: md.pad_stack(SAMPLES, -1).movedim(-1, 0), THERE, "sp-"),
    "pad_stack of rows": (lambda: md.pad_stack(list(md.from_lengths(DATA, LENGTHS))), THERE, "sp-"),
    "pad_stack of a dataset": (lambda: md.pad_stack([(s, 0) for s in SAMPLES])[0], THERE, "sp-"),
    "pad_stack of equal sizes": (lambda: md.pad_stack([DATA[0], DATA[0]]), torch.ones(2, 3).bool(), "sp-"),
    "attention_mask": (lambda: interop.from_attention_mask(DATA, THERE.long()), THERE, "sp-"),
    "attention_mask, in front": (lambda: interop.from_attention_mask(IN_FRONT, THERE.flip(1)), THERE.flip(1), "sc-"),
    "attention_mask with gaps": (lambda: interop.from_attention_mask(DATA, GAPS), GAPS, "sg-"),
    "key_padding_mask": (lambda: interop.from_key_padding_mask(DATA, ~THERE), THERE, "sp-"),
    "PackedSequence": (
        lambda: interop.from_packed_sequence(pack_sequence(SAMPLES, enforce_sorted=False), batch_first=True),
        THERE,
        "sp-",
    ),
    "nested": (
        lambda: interop.from_nested_tensor(torch.nested.nested_tensor(SAMPLES, layout=torch.jagged)),
        THERE,
        "sp-",
    ),
    "packing": (lambda: md.masked_tensor(DATA, THERE[..., None]).to_packed(), THERE, "sp-"),
    "packing with gaps": (lambda: md.masked_tensor(DATA, GAPS[..., None]).to_packed(), GAPS, "sg-"),
}


def check_known(x: Any, *letters: str) -> None:
    """Of each factor what the letters say, and that every sample has a position."""
    extent: Extent = x._extent
    assert extent.places == tuple(tuple(LETTERS[letter] for letter in word) for word in letters)
    assert all(factor.along[d].nonempty for factor in extent.factors for d in factor.positions)


@pytest.mark.parametrize("name", MADE)
def test_what_is_there_is_known(name: str) -> None:
    make, there, letters = MADE[name]
    x = make()
    assert x.extent.tolist() == there[..., None].expand(x.shape).tolist()
    check_known(x, letters)
    assert x.to_dense().get_mask().tolist() == x.extent.tolist()


def test_a_batch_of_a_tokenizer_knows_it() -> None:
    found = interop.from_batch_encoding({"input_ids": DATA[..., 0].long(), "attention_mask": THERE.long()})
    assert found["input_ids"].extent.tolist() == THERE.tolist()


def test_sizes_that_differ_in_two_dimensions_are_two_factors() -> None:
    x = md.pad_stack([torch.ones(3, 2, 4), torch.ones(2, 5, 4)])
    check_known(x, "sp--", "s-p-")
    assert x._extent.is_mask
    assert x.extent.sum((1, 2, 3)).tolist() == [24, 40]


def test_numbers_without_dimensions_have_no_positions() -> None:
    assert md.pad_stack([torch.tensor(1.0), torch.tensor(2.0)]).extent is None


@pytest.mark.parametrize(
    "make",
    [
        lambda data: md.from_lengths(data, LENGTHS),
        lambda data: interop.from_attention_mask(data, THERE),
        lambda data: md.pad_sequence([data[0], data[1, :1], data[2, :2]], batch_first=True),
        lambda data: md.pad_stack([data[0], data[1, :1], data[2, :2]]),
    ],
)
def test_what_was_invalid_is_missing_where_it_is_there(make: Callable[[Any], Any]) -> None:
    hole = torch.ones(3, 3, 2, dtype=torch.bool)
    hole[0, 1] = False
    x = make(md.masked_tensor(DATA, hole))
    assert x.extent[..., 0].tolist() == THERE.tolist()
    assert x.get_mask()[..., 0].tolist() == (THERE & hole[..., 0]).tolist()


def test_two_lengths_are_two_factors() -> None:
    x = md.from_lengths(md.from_lengths(torch.ones(2, 3, 4), torch.tensor([3, 1])), torch.tensor([2, 4]), 2)
    assert x.extent.sum((1, 2)).tolist() == [6, 4]
    assert x._extent.is_mask


def test_a_mask_that_a_caller_gives_is_read_at_the_call() -> None:
    for make in (
        lambda there: interop.from_attention_mask(DATA, there),
        lambda there: md.padded(DATA, there[..., None]),
        lambda there: md.padded(md.masked_tensor(DATA, there[..., None]), there[..., None]),
    ):
        given = THERE.clone()
        x = make(given)
        given[:] = False
        assert x.extent[..., 0].tolist() == THERE.tolist()
        assert x.get_mask()[..., 0].tolist() == THERE.tolist()
