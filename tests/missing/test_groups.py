"""groupby: pandas is the oracle, for labels of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import masked_dispatch as md
from columns_in_pandas import GROUP_WORDS, LABELS, assert_groups_as_in_pandas, columns, labels_of
from door_samples import same
from masked_dispatch import interop, missing
from words_for_missing_values import F, T, X

NAN = float("nan")
VALUES = md.masked_tensor([1.0, 2.0, 4.0, 8.0, 16.0], [T, T, T, F, T])


@given(st.data(), columns(6), st.sampled_from(GROUP_WORDS), st.sampled_from(list(LABELS)), st.sampled_from([0, 1]))
def test_groups_are_those_of_pandas(data: st.DataObject, x: md.MaskedTensor, word: str, kind: str, dim: int) -> None:
    assert_groups_as_in_pandas(x, data.draw(labels_of(kind, len(x))), word, dim)


STRINGS = ["b", "a", "b", "a", None]
DAYS = np.array(["2021-01-02", "2020-01-01", "2021-01-02", "2020-01-01", "NaT"], dtype="datetime64[D]")
GIVEN: dict[str, tuple[Any, Any]] = {
    "list": ([2001, 1958, 2001, 1958, 2001], torch.tensor([1958, 2001])),
    "tensor": (torch.tensor([9, -3, 9, -3, 9], dtype=torch.int8), torch.tensor([-3, 9], dtype=torch.int8)),
    "wide unsigned": (torch.tensor([9, 3, 9, 3, 9], dtype=torch.uint16), torch.tensor([3, 9], dtype=torch.uint16)),
    "bool": (torch.tensor([T, F, T, F, T]), torch.tensor([F, T])),
    "masked": (md.masked_tensor([9, 2, 9, 2, 7], [T, T, T, T, F]), torch.tensor([2, 9])),
    "array": (np.array([10**7, 0, 10**7, 0, 10**7]), np.array([0, 10**7])),
    "numpy.ma": (np.ma.array([9, 2, 9, 2, 7], mask=[0, 0, 0, 0, 1]), np.array([2, 9])),
    "array with NaN": (np.array([2.5, 1.5, 2.5, 1.5, NAN]), np.array([1.5, 2.5])),
    "list of strings": (STRINGS, pd.Index(["a", "b"])),
    "array of objects": (np.array(STRINGS, dtype=object), np.array(["a", "b"], dtype=object)),
    "array of dates": (DAYS, DAYS[[1, 0]]),
    "Series": (pd.Series(STRINGS), pd.Index(["a", "b"])),
    "Index": (pd.Index(STRINGS), pd.Index(["a", "b"])),
    "integers with NA": (pd.array([9, 2, 9, 2, None], dtype="Int64"), pd.array([2, 9], dtype="Int64")),
    "Categorical": (pd.Categorical(STRINGS, categories=["z", "b", "a"]), ["b", "a"]),
}


TOGETHER = {
    "lists": [[1, 1, 2, 2, 1], ["a", "b", "a", None, "a"]],
    "Series": [pd.Series([1, 1, 2, 2, 1], name="year"), pd.Series(["a", "b", "a", None, "a"], name="team")],
    "tensors": [torch.tensor([1, 1, 2, 2, 1]), md.masked_tensor([3, 4, 3, 3, 3], [T, T, T, F, T])],
    "arrays": [np.array([1, 1, 2, 2, 1]), np.array([3.0, 4.0, 3.0, NAN, 3.0])],
    "frame": pd.DataFrame({"year": [1, 1, 2, 2, 1], "team": ["a", "b", "a", None, "a"]}),
    "categories": [pd.Categorical([1, 1, 2, 2, 1]), pd.Categorical(["a", "b", "a", None, "a"])],
}


@pytest.mark.parametrize("kind", TOGETHER)
def test_several_labels_for_each_index(kind: str) -> None:
    """A missing one belongs to no group, as in pandas."""
    labels = TOGETHER[kind]
    groups = missing.groupby(VALUES, labels)
    columns = [labels[name] for name in labels] if kind == "frame" else labels
    columns = [c.to_tensor(-1) if isinstance(c, md.MaskedTensor) else c for c in columns]
    columns = [c.tolist() if isinstance(c, torch.Tensor) else list(c) for c in columns]
    keys = [pd.Series(c).replace(-1, None) for c in columns]
    values = pd.Series(VALUES.to_tensor(NAN).numpy())
    for word in ("mean", "count", "max"):
        found = interop.to_pandas(getattr(groups, word)(), index=groups.labels)
        expected = getattr(values.groupby(keys), word)()
        assert found.index.tolist() == expected.index.tolist()
        np.testing.assert_allclose(found.to_numpy("float64", na_value=NAN), expected.to_numpy("float64"))
    if kind in ("frame", "Series"):
        assert groups.labels.names == ["year", "team"]


def test_one_of_several_labels() -> None:
    assert missing.groupby(VALUES, [pd.Series(STRINGS)]).labels.tolist() == ["a", "b"]
    with pytest.raises(ValueError, match=r"several labels for each index need one length.*\[\(2,\), \(3,\)\]"):
        missing.groupby(VALUES, [[1, 2], [1, 2, 3]])


@pytest.mark.parametrize("kind", GIVEN)
def test_labels_as_they_come(kind: str) -> None:
    labels, different = GIVEN[kind]
    groups = missing.groupby(VALUES, labels)
    assert list(groups.labels) == list(different)
    assert type(groups.labels) is type(different) or kind == "Categorical"
    assert not isinstance(different, torch.Tensor) or groups.labels.dtype is different.dtype
    whole = kind in ("list", "tensor", "wide unsigned", "bool", "array")  # the last element's label is not missing
    means = [2.0, 7.0 if whole else 2.5]
    same(groups.mean(), md.masked_tensor(means if kind != "Categorical" else means[::-1]))
    assert groups.inverse.get_mask().tolist() == [T, T, T, T, whole]


def test_statistics_go_back_into_a_frame() -> None:
    years = torch.tensor([2001, 1958, 2001])
    frame = interop.to_pandas(missing.groupby(X, years, dim=1).sum().t(), index=years.unique(), columns=["a", "b"])
    assert frame.index.tolist() == [1958, 2001]
    assert frame["b"].tolist() == [5, 4]


def test_statistics_go_back_to_the_rows_they_are_of() -> None:
    groups = missing.groupby(VALUES, md.masked_tensor([7, 9, 7, 9, 9], [T, T, T, T, F]))
    same(groups.max()[groups.inverse], md.masked_tensor([4.0, 2, 4, 2, 0], [T, T, T, T, F]))  # type: ignore[arg-type]
    assert repr(groups) == "<2 groups along dim=0 of a tensor of shape (5,)>"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_sums_choices_and_counts_of_every_dtype(dtype: torch.dtype, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 5, (4, 4), generator=generator).to(dtype)
    x = md.masked_tensor(data, torch.rand(4, 4, generator=generator) > 0.5)
    groups = missing.groupby(x, [2, 0, 2, 0], dim, num_groups=3)
    for number in (0, 2):
        members = x.index_select(dim, (torch.tensor([2, 0, 2, 0]) == number).nonzero()[:, 0])
        assert torch.equal(groups.count().select(dim, number), members.count(dim))
        same(groups.sum().select(dim, number), members.sum(dim))
        if not dtype.is_complex:
            same(groups.max().select(dim, number), members.amax(dim))
            same(groups.min().select(dim, number), members.amin(dim))
    assert groups.first().dtype is groups.last().dtype is dtype
    assert not groups.count().select(dim, 1).any()
    assert not groups.last().select(dim, 1).get_mask().any()


def test_half_precision_adds_up_in_single() -> None:
    many = missing.groupby(torch.ones(70000, dtype=torch.float16), torch.zeros(70000, dtype=torch.uint8))
    assert many.mean().item() == 1
    assert many.var().item() == 0


def test_nothing_cancels_in_a_variance() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64) + 1e9
    assert missing.groupby(x, [1, 1, 1, 2]).var().to_tensor(0).tolist() == [1, pytest.approx(NAN, nan_ok=True)]


def test_nan_is_a_value() -> None:
    x = md.masked_tensor([1.0, NAN, 3.0, NAN, 2.0], [T, T, T, F, T])
    groups = missing.groupby(x, [1, 1, 1, 2, 2])
    for word in ("min", "max", "median", "mean"):
        assert repr(getattr(groups, word)().tolist()) == "[nan, 2.0]"
    assert groups.rank().to_tensor(0).tolist() == [1, 3, 2, 0, 1]


@pytest.mark.parametrize("word", ["sum", "mean", "var", "min", "median", "first", "rank", "count"])
def test_no_rows(word: str) -> None:
    x = md.masked_tensor(torch.ones(0, 2))
    assert getattr(missing.groupby(x, []), word)().shape == (0, 2)
    found = getattr(missing.groupby(x, [], num_groups=3), word)()
    assert found.shape == ((0, 2) if word == "rank" else (3, 2))
    assert word in ("rank", "count") or not found.get_mask().any()


def test_the_median_of_two_is_between_them_and_so_is_its_gradient() -> None:
    x = torch.tensor([4.0, 1.0, 2.0, 9.0, 5.0], requires_grad=True)
    medians = missing.groupby(x, [1, 1, 1, 1, 2]).median()
    assert medians.tolist() == [3, 5]
    medians.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0, 0.5, 0, 1]


@pytest.mark.parametrize("word", ["var", "std", "mean", "max"])
def test_what_is_in_no_group_has_a_gradient_of_0(word: str) -> None:
    x = torch.tensor([1.0, 3.0, 5.0, 3.0], requires_grad=True)
    getattr(missing.groupby(x, ["a", "a", None, "a"]), word)().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad[2] == 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: missing.groupby(X.long(), [1, 2]).mean(), TypeError, r"mean needs .* got torch.int64\. Convert them"),
        (lambda: missing.groupby(X.long(), [1, 2]).median(), TypeError, r"median needs .* got torch.int64"),
        (
            lambda: missing.groupby(X, torch.ones(2)),
            TypeError,
            "labels in a tensor have to be integers or bool; got torch.fl",
        ),
        (lambda: missing.groupby(X, [torch.tensor(1)] * 2), TypeError, r"pass torch\.stack\(labels\)"),
        (lambda: missing.groupby(X, torch.arange(3)), ValueError, r"labels of shape \(3,\) do not fit dim=0 of"),
        (
            lambda: missing.groupby(X, torch.ones(2, 1).long()),
            ValueError,
            r"one dimension, and these have shape \(2, 1",
        ),
        (lambda: missing.groupby(X, "ab"), TypeError, r"not the one str 'ab': .* Pass the labels themselves"),
        (lambda: missing.groupby(pd.DataFrame({"a": [1.0]}), [1]), TypeError, "takes a tensor as x, not a DataFrame"),
        (lambda: missing.groupby(X, [1, 2]).agg("mean"), AttributeError, r"not agg; .* groups\.mean\(\)\[groups\.i"),
        (lambda: missing.groupby(X, [1, 2], dim=2), IndexError, "Dimension out of range"),
        (lambda: missing.groupby(X, [0, 1], num_groups=1), ValueError, "run from 0 to 1, and with num_groups=1 they"),
        (lambda: missing.groupby(X, [0, -1], num_groups=1), ValueError, r"masked_tensor\(labels, labels >= 0\)"),
        (lambda: missing.groupby(X, ["a", "b"], num_groups=2), TypeError, "Leave num_groups out for other labels"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
