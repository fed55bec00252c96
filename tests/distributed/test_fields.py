"""Validity on the wire: packed, summed as ranks would, and read again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from masked_dispatch.distributed.agreement import Description, decoded, encoded, length_of
from masked_dispatch.distributed.messages import pack, packed_size, present, unpack, width_for
from masked_dispatch.distributed.records import Masks, reduced
from op_registry.records.dense import Dense


# As many ranks as fields of 2, 4, 8 and 32 bits count at least and at most; elements that fill whole bytes, and others.
@pytest.mark.parametrize(
    "ranks, elements",
    [
        (1, 0),
        (1, 9),
        (2, 1),
        (3, 3),
        (3, 4),
        (3, 129),
        (4, 64),
        (4, 1),
        (15, 7),
        (15, 8),
        (16, 9),
        (255, 129),
        (256, 3),
    ],
)
def test_sums_count_without_carry(elements: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    masks = torch.randint(0, 2, (ranks, elements), generator=generator, dtype=torch.int8)
    if elements:
        masks[:, 0] = 1
    width = width_for(ranks)
    total = pack(masks[0], width)
    assert len(total) == packed_size(elements, width)
    for mask in masks[1:]:
        total = total + pack(mask, width)
    assert unpack(total, width, elements).tolist() == masks.long().sum(0).tolist()
    assert present(total, width, elements).tolist() == masks.any(0).tolist()


@pytest.mark.parametrize("elements", [0, 1, 7, 8, 9, 64, 129])
def test_one_bit_moves_a_mask(elements: int) -> None:
    mask = torch.randint(0, 2, (elements,), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    fields = pack(mask, 1)
    assert len(fields) == packed_size(elements, 1) == -(-elements // 8)
    assert unpack(fields, 1, elements).tolist() == mask.tolist()


@pytest.mark.parametrize(
    "ranks, op, narrow",
    [
        (2, "sum", True),
        (2, "avg", False),
        (2, "max", True),
        (255, "avg", True),
        (255, "max", False),
        (256, "avg", True),
        (256, "avg", False),
        (256, "sum", False),
        (600, "max", True),
        (600, "avg", True),
    ],
)
def test_reductions_over_many_ranks(ranks: int, op: str, narrow: bool) -> None:
    """As all ranks of a group would compute it, with everything valid on all ranks, on one, and on none."""
    data = torch.arange(3 * ranks, dtype=torch.float64).view(ranks, 3)
    valid = torch.ones(ranks, 3, dtype=torch.bool)
    valid[1:, 1] = valid[:, 2] = False
    messages: list[list[Tensor]] = []

    def send(message: Tensor, how: str) -> Callable[[], Tensor]:
        """Rank after rank sends its data and then its masks."""
        messages[-1].append(message)

        def total() -> Tensor:
            number = next(i for i, mine in enumerate(messages[-1]) if mine is message)
            whole = torch.stack([of_rank[number] for of_rank in messages])
            return whole.sum(0, dtype=message.dtype) if how == "sum" else whole.amax(0)

        return total

    for rank in range(ranks):
        messages.append([])
        finish = reduced([Dense(data[rank], valid[rank].to(torch.int8))], op, ranks, Masks.ANY, send, narrow)
    found = finish()
    expected = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax}[op](data[:, 0], 0)
    assert found.full_validity is not None
    assert found.full_validity.tolist() == [1, 1, 0]
    assert found.data[:2].tolist() == [expected.item(), 1.0]
    assert messages[-1][1].element_size() == (4 if ranks > 255 and op == "avg" else 1)


def test_widths_are_as_narrow_as_counts_allow() -> None:
    assert [width_for(ranks) for ranks in (1, 3, 4, 15, 16, 255, 256)] == [2, 2, 4, 4, 8, 8, 32]


def test_descriptions_are_read_as_they_were_written() -> None:
    for names in (("float32 of shape (2,)",), tuple(f"float32 of shape ({n},)" for n in range(100))):
        description = Description("all_to_all", names, True, None, names)
        message = encoded(description)
        assert decoded(encoded(description, length_of(message))) == description
