"""Operands meet where they are indexed together; what is reduced from nothing has torch's number; shapes of tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from called_operators import Calls
from masked_dispatch import MaskedSemanticsError

LENGTHS = torch.tensor([4, 2])
DATA = torch.tensor([[1.0, 2, 3, 4], [5, 6, 0, 0]])


def only_padded() -> md.MaskedTensor:
    return md.from_lengths(DATA, LENGTHS)


def with_its_own() -> md.MaskedTensor:
    """The same batch, whose extent is another object than its mask."""
    there = only_padded().get_mask()
    return md.padded(md.masked_tensor(DATA, there), there, dim=1)


def padded(side: list[int]) -> md.MaskedTensor:
    there = torch.tensor([[1, 1, 1, 1], side]).bool()
    return md.padded(md.masked_tensor(torch.tensor([[1.0, 2, 3, 4], [5, 5, 6, 6]]), there), dim=1)


BOTH = pytest.mark.parametrize("make", [only_padded, with_its_own])


# ----------------------------------------------------------------------------------------------------- nothing is there

# What each gives of a sample without positions; None: invalid.
OF_NOTHING: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "sum": (lambda x: x.sum(1), 0.0),
    "product": (lambda x: x.prod(1), 1.0),
    "norm": (lambda x: x.norm(dim=1), 0.0),
    "logsumexp": (lambda x: x.logsumexp(1), -torch.inf),
    "mean": (lambda x: x.mean(1), None),
    "maximum": (lambda x: x.amax(1), None),
    "matrix product": (lambda x: (x[:, None] @ x[:, :, None]).flatten(), 0.0),
    "squares by einsum": (lambda x: torch.einsum("bt,bt->b", x, x), 0.0),
    "linear with a bias": (lambda x: torch.addmm(torch.full((2,), 3.0), x, torch.ones(2, 2))[:, 0], 3.0),
}


@BOTH
@pytest.mark.parametrize("name", OF_NOTHING)
def test_what_is_reduced_from_nothing(make: Callable[[], md.MaskedTensor], name: str) -> None:
    call, expected = OF_NOTHING[name]
    found = call(make()[:, 2:])
    assert found[0].item() == pytest.approx(call(DATA[:1, 2:]).item())
    assert found.get_mask().tolist() == [True, expected is not None]
    if expected is not None:
        assert found[1].item() == expected


@BOTH
def test_parts_of_which_some_are_empty_add_up(make: Callable[[], md.MaskedTensor]) -> None:
    x = make().requires_grad_()
    total = x[:, :2].sum(1) + x[:, 2:].sum(1)
    assert total.tolist() == [10, 11]
    total.sum().backward()
    assert x.grad.to_tensor(-1).tolist() == [[1, 1, 1, 1], [1, 1, -1, -1]]


@BOTH
def test_an_empty_memory_leaves_its_queries(make: Callable[[], md.MaskedTensor]) -> None:
    query, memory = make()[..., None], make()[:, 2:, None]
    found = query + F.scaled_dot_product_attention(query, memory, memory)
    assert found.get_mask().equal(query.get_mask())
    assert found[1].flatten()[:2].tolist() == [5, 6]


@BOTH
def test_a_maximum_of_nothing_is_invalid_and_there(make: Callable[[], md.MaskedTensor]) -> None:
    scores = make()[..., None] @ make()[:, None]
    found = scores[..., 2:].amax(-1)
    assert found.extent.tolist() == make().extent.tolist()
    assert found.get_mask().tolist() == [[True] * 4, [False] * 4]


def test_what_is_missing_is_not_nothing() -> None:
    x = md.padded(md.masked_tensor(DATA, torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]).bool()), only_padded().extent)
    assert x.sum(1).get_mask().tolist() == [True, False]
    assert x[:, 2:].sum(1).get_mask().tolist() == [True, True]


# ----------------------------------------------------------------------------------------------------------- places

MEETINGS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a loss": F.mse_loss,
    "a contraction": lambda a, b: torch.bmm(a[:, None], b[:, :, None]),
    "a distance": lambda a, b: torch.cdist(a[:, None], b[:, None]),
    "keys and values": lambda a, b: F.scaled_dot_product_attention(a[..., None], a[..., None], b[..., None]),
    "a boolean that selects": lambda a, b: a[b > 5],
    "a boolean that is written by": lambda a, b: a.clone().index_put_((b > 5,), torch.tensor(0.0)),
    "a dimension of matrices": lambda a, b: a[:, :, None, None] @ b[:, :, None, None],
}


@pytest.mark.parametrize("name", MEETINGS)
def test_samples_at_different_places_never_meet(name: str) -> None:
    meet, front = MEETINGS[name], padded([0, 0, 1, 1])
    with pytest.raises(MaskedSemanticsError, match=r"different places along dimension .*sample 1 are .*align\(x, "):
        meet(padded([1, 1, 0, 0]), front)
    meet(front, front * 2)


def test_the_error_says_where_the_samples_are() -> None:
    with pytest.raises(MaskedSemanticsError) as caught:
        F.l1_loss(padded([1, 1, 0, 0]), padded([0, 0, 1, 1]))
    assert str(caught.value) == (
        "torch.nn.functional.l1_loss: `self` and `target` have samples at different places along dimension 1: those of "
        "sample 1 are [0, 1] of the first and [2, 3] of the second, and do not belong together. Move the samples of "
        "both to the front first, masked_dispatch.align(x, 1); or drop what is known of the padding, "
        "x.without_extent()."
    )


def test_samples_of_other_lengths_meet_where_they_begin_together() -> None:
    shorter, middle, longer = padded([1, 0, 0, 0]), padded([0, 1, 0, 0]), padded([0, 1, 1, 0])
    assert F.l1_loss(padded([1, 1, 0, 0]), shorter + 1).item() == 1
    assert (middle + longer).get_mask()[1].tolist() == [False, True, False, False]
    with pytest.raises(MaskedSemanticsError, match="different places"):
        _ = padded([0, 0, 1, 0]) + longer


def test_operands_of_one_packed_batch_meet_without_a_read_of_where_they_are() -> None:
    """Masks that show one memory alike are one: to compare their values, the host would wait for a GPU."""
    there = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]]).bool()
    x = md.masked_tensor(torch.randn(2, 4, 24), there[..., None]).to_packed()
    query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in x.chunk(3, -1))
    with Calls() as calls:
        F.scaled_dot_product_attention(query, key, value)
    assert torch.ops.aten._local_scalar_dense.default not in calls.seen


def test_elements_gathered_along_features_have_the_very_same_extent() -> None:
    """Their index has the extent of their source: the two are one, however the batch is held."""
    features = DATA[:, None, :].expand(2, 3, 4)
    there = only_padded().get_mask()[:, None, :].expand(2, 3, 4)
    x = md.padded(md.masked_tensor(features, there), there, dim=2)
    (mine,), (other,) = (t._extent.factors for t in (x.gather(1, x.argsort(dim=1)), x))
    assert mine.said is other.said


TAKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, order: x.gather(1, order),
    "take_along_dim": lambda x, order: x.take_along_dim(order, 1),
    "index": lambda x, order: x[torch.arange(2)[:, None], order],
}


@pytest.mark.parametrize("name", TAKEN)
def test_an_order_of_other_samples_counts_from_where_they_begin(name: str) -> None:
    order = md.from_lengths(torch.tensor([[2.0, 1.0], [4.0, 3.0]]), torch.tensor([2, 2])).argsort(dim=1)
    assert TAKEN[name](only_padded(), order).tolist() == [[2, 1], [6, 5]]
    why = (
        r"its index names positions that the tensor does not have: a sample's positions are counted in the batch "
        r"there\. Where samples do not begin at index 0, masked_dispatch\.align moves them there"
    )
    with pytest.raises(MaskedSemanticsError, match=why):
        TAKEN[name](padded([0, 1, 1, 0]), order)
    with pytest.raises(MaskedSemanticsError, match=why):
        TAKEN[name](only_padded(), padded([0, 1, 1, 0]).argsort(dim=1))


def test_a_tensor_meets_itself_in_other_dimensions() -> None:
    blocks = only_padded().reshape(4, 2, 1)
    assert (blocks @ blocks.mT).get_mask().sum((1, 2)).tolist() == [4, 4, 4, 0]
    assert (blocks - blocks.mean(1, keepdim=True)).get_mask().sum((1, 2)).tolist() == [2, 2, 2, 0]


# -------------------------------------------------------------------------------------------------- shapes of tensors


@BOTH
def test_what_is_expanded_as_a_batch_is_there_where_it_is(make: Callable[[], md.MaskedTensor]) -> None:
    x = make()
    means = x.mean(1, keepdim=True)
    assert means.expand_as(x).softmax(1).to_tensor(0).tolist() == [[0.25] * 4, [0.5, 0.5, 0, 0]]
    assert torch.ones(4).expand_as(x).extent.equal(x.extent)
    assert torch.broadcast_tensors(means, x)[0].extent.equal(x.extent)
    assert means.expand(x.shape).extent is None  # sizes know nothing of padding
    assert means.expand_as(DATA).extent is None
