"""attention_mask, key_padding_mask and lengths there and back, and the batches of tokenizers."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import masked_dispatch as md
from door_samples import FLOATS, INTEGERS, batch_of, lengths, masked, plain, same, shapes
from masked_dispatch.interop import (
    from_attention_mask,
    from_batch_encoding,
    from_key_padding_mask,
    to_attention_mask,
    to_batch_encoding,
    to_key_padding_mask,
    to_lengths,
)

DATA = torch.arange(6.0).reshape(2, 3)
ONES = torch.tensor([[1, 1, 0], [1, 0, 0]])


X = md.masked_tensor(DATA, ONES)
WIDE = md.masked_tensor(torch.ones(2, 3, 2), ONES[..., None])
PARTLY = md.masked_tensor(torch.ones(1, 2, 2), [[[True, False], [True, True]]])


@given(masked((torch.bool, *INTEGERS, *FLOATS), shapes(2)), st.sampled_from([torch.bool, torch.int64, torch.uint8]))
def test_masks_there_and_back(x: md.MaskedTensor, dtype: torch.dtype) -> None:
    attended = to_attention_mask(x)
    assert attended.dtype is torch.int64
    same(from_attention_mask(x.get_data(), attended.to(dtype)), x)
    padding = to_key_padding_mask(x)
    assert torch.equal(padding, attended == 0)
    same(from_key_padding_mask(x.get_data(), padding), x)


@settings(max_examples=20)
@given(lengths(), st.integers(0, 2), st.sampled_from([(), (2,), (2, 3), (0,)]))
def test_lengths_there_and_back(sizes: Tensor, more: int, rest: tuple[int, ...]) -> None:
    x = batch_of(sizes, *rest, steps=int(sizes.max()) + more)
    if 0 not in rest:
        assert torch.equal(to_lengths(x), sizes)
        same(md.from_lengths(x.get_data(), to_lengths(x)), x)
        assert torch.equal(to_attention_mask(x).sum(1), sizes)
    last = x.movedim(1, -1)
    if rest and 0 not in rest:
        assert torch.equal(to_lengths(last, dim=-1), sizes)


@given(st.data())
def test_data_that_is_masked_stays_invalid_where_it_was(data: st.DataObject) -> None:
    x = data.draw(masked(FLOATS, shapes(2)))
    mask = data.draw(plain(tuple(x.shape), torch.bool))
    same(from_attention_mask(x, mask), x.mask_with(mask))
    same(from_key_padding_mask(x, mask), x.mask_with(~mask))


@pytest.mark.parametrize(
    "door", [lambda d: from_attention_mask(d, ONES), lambda d: from_key_padding_mask(d, ONES == 0)]
)
def test_gradients_reach_the_data_where_it_is_valid(door: Callable[[Tensor], Tensor]) -> None:
    leaf = DATA.clone().requires_grad_()
    door(leaf * 2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == (2 * ONES).tolist()


def test_trailing_dimensions_storages_and_plain_tensors() -> None:
    same(from_attention_mask(torch.ones(2, 3, 2), ONES), WIDE)
    for stored in (WIDE, WIDE.to_packed(), WIDE.to_sparse()):
        assert torch.equal(to_attention_mask(stored), ONES)
        assert to_lengths(stored).tolist() == [2, 1]
    assert to_attention_mask(DATA).all()


@pytest.mark.parametrize(
    ("convert", "error", "text"),
    [
        (lambda: from_attention_mask(DATA, ONES.float()), TypeError, r"float32; .*attention_mask == 0; .* != 0"),
        (lambda: from_attention_mask(DATA, ONES[:, :2]), ValueError, r"shape \(2, 2\) does not fit data of shape"),
        (
            lambda: from_attention_mask(DATA, ONES[:, None]),
            ValueError,
            r"shape \(2, 1, 3\).*an entry for each position",
        ),
        (lambda: from_attention_mask(DATA, ONES * 2), ValueError, "values between 0 and 2"),
        (lambda: from_attention_mask(DATA[0], ONES[0]), ValueError, r"does not fit data of shape \(3,\)"),
        (lambda: from_attention_mask(DATA, ONES.to("meta")), RuntimeError, "the mask on meta; move one of them"),
        (lambda: from_key_padding_mask(DATA, ONES), TypeError, r"int64; it has to be bool, True for padding.*!= 0;"),
        (lambda: from_key_padding_mask(DATA, ONES[0] == 0), ValueError, "key_padding_mask of shape"),
        (lambda: to_attention_mask(PARTLY), ValueError, r"1 of 2 positions .* \(1, 2, 2\) are partly valid.*_with"),
        (lambda: to_key_padding_mask(PARTLY), ValueError, "but a key_padding_mask only describes whole positions"),
        (lambda: to_attention_mask(X[0]), ValueError, r"shape \(3,\) has no positions that an attention_mask"),
        (lambda: to_lengths(X.flip(1)), ValueError, r"row 0 are not its first 2, .*align\(x\).*to_attention_mask\(x\)"),
        (lambda: to_lengths(PARTLY), ValueError, "partly valid, but a length only describes"),
        (lambda: to_lengths(X, dim=0), ValueError, r"shape \(2, 3\) has no lengths along dim=0"),
        (lambda: to_lengths(X.sum()), ValueError, "has no lengths"),
    ],
)
def test_what_does_not_fit_is_refused(convert: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        convert()


def test_the_way_out_of_positions_that_are_valid_in_part() -> None:
    whole = PARTLY.mask_with(PARTLY.get_mask().flatten(2).all(2)[..., None])
    assert to_attention_mask(whole).tolist() == [[0, 1]]


# ------------------------------------------------------------------------------------------- batches of tokenizers


IDS = torch.tensor([[5, 6, 0], [7, 0, 0]])
BATCH = {"input_ids": IDS, "token_type_ids": ONES * 0, "attention_mask": ONES, "labels": torch.tensor([0, 1]), "n": 2}
PADDING = {"input_ids": 0, "token_type_ids": 0}


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_batch_in_one_call(kind: Callable[..., Any]) -> None:
    batch = from_batch_encoding(kind(BATCH))
    assert list(batch) == list(BATCH)
    assert batch["attention_mask"] is ONES
    same(batch["input_ids"], md.masked_tensor(IDS, ONES))
    same(batch["token_type_ids"], md.masked_tensor(ONES * 0, ONES))
    assert batch["labels"] is BATCH["labels"]
    assert batch["n"] == 2


def test_a_batch_without_its_attention_mask() -> None:
    batch = from_batch_encoding(BATCH, keep_attention_mask=False)
    assert list(batch) == ["input_ids", "token_type_ids", "labels", "n"]
    same(batch["input_ids"], md.masked_tensor(IDS, ONES))


@given(st.data())
def test_batches_there_and_back(data: st.DataObject) -> None:
    shape = data.draw(shapes(2))
    mask = data.draw(plain(shape, torch.bool)).to(torch.int64)
    ids = data.draw(plain(shape, torch.int64)) * mask + 9 * (1 - mask)
    labels = data.draw(plain(shape, torch.int32)) * mask.int() - 100 * (1 - mask.int())
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "text": ["a"]}
    again = to_batch_encoding(from_batch_encoding(batch), {"input_ids": 9, "labels": -100})
    assert set(again) == set(batch)
    assert again["text"] == ["a"]
    for key in ("input_ids", "attention_mask", "labels"):
        assert again[key].dtype is batch[key].dtype
        assert torch.equal(again[key], batch[key])


def test_the_keys_may_be_named() -> None:
    boxes = {**BATCH, "bbox": torch.ones(2, 3, 4)}
    assert not md.is_masked_tensor(from_batch_encoding(boxes)["bbox"])
    batch = from_batch_encoding(boxes, keys=["bbox"])
    assert batch["bbox"].get_mask().sum() == 12
    assert not md.is_masked_tensor(batch["input_ids"])
    assert torch.equal(to_batch_encoding(batch, {"bbox": 0})["attention_mask"], ONES)


def test_an_embedding_of_a_batch_runs() -> None:
    batch = from_batch_encoding(BATCH)
    mean = torch.nn.Embedding(8, 2)(batch["input_ids"]).mean(1)
    assert mean.shape == (2, 2)
    assert mean.get_mask().all()


OTHER = {"a": X, "b": md.masked_tensor(DATA, 1 - ONES)}


@pytest.mark.parametrize(
    ("convert", "error", "text"),
    [
        (lambda: from_batch_encoding({"input_ids": IDS}), KeyError, "no 'attention_mask', only 'input_ids': pass"),
        (lambda: from_batch_encoding(IDS), TypeError, r"not a Tensor: .*from_attention_mask\(data, mask\)"),
        (lambda: from_batch_encoding({"attention_mask": [[1]]}), TypeError, "list, not a tensor.*return_tensors="),
        (lambda: from_batch_encoding(BATCH, keys=["x"]), KeyError, r"the batch has no \['x'\], only 'input_ids'"),
        (lambda: from_batch_encoding(BATCH, keys=["labels"]), ValueError, r"does not fit data of shape \(2,\)"),
        (lambda: to_batch_encoding(BATCH, PADDING), ValueError, "not only plain 'input_ids', "),
        (lambda: to_batch_encoding({"input_ids": X}, {}), KeyError, r"no padding is given for \['input_ids'\]: "),
        (lambda: to_batch_encoding(OTHER, {"a": 0, "b": 0}), ValueError, "'a' and 'b' are valid at different.*like"),
        (lambda: to_batch_encoding({"a": PARTLY}, {"a": 0}), ValueError, "the attention_mask of 'a' only describes"),
    ],
)
def test_batches_that_do_not_fit_are_refused(convert: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        convert()
