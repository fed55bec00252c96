"""Keywords and methods of pandas that are written otherwise here: the error says how."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
import torch

import masked_dispatch as md
from masked_dispatch import interop, missing
from masked_dispatch.missing.filling import KEYWORDS

X = md.masked_tensor([1.0, 2.0, 4.0], [True, False, True])
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "bfill": (0,), "dropna": (), "ffill": (0,), "fillna": (0.0,), "groupby": ([1, 1, 2],), "interpolate": (0,),
    "rolling": (2, 0), "shift": (1, 0),
}  # fmt: skip


def keywords() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Each function here, a call of it, and a keyword that pandas' method of this name takes and it doesn't."""
    for name, arguments in ARGUMENTS.items():
        function = getattr(missing, name)
        for keyword in inspect.signature(getattr(pd.DataFrame, name)).parameters.keys() - {"self"}:
            if keyword not in inspect.signature(function).parameters:
                yield name, lambda k, f=function, a=arguments: f(X, *a, **{k: None}), keyword
    for made in (missing.groupby(X, [1, 1, 2]), missing.rolling(X, 2, 0)):
        for word in ("std", "var"):
            yield word, lambda k, of=made, w=word: getattr(of, w)(**{k: 0}), "ddof"


CASES = sorted(keywords(), key=lambda case: (case[0], case[2]))


@pytest.mark.parametrize("case", CASES, ids=[f"{name} {keyword}" for name, _, keyword in CASES])
def test_a_keyword_of_pandas(case: tuple[str, Callable[..., Any], str]) -> None:
    name, call, keyword = case
    with pytest.raises(TypeError, match=rf"^{name} takes no {keyword}=; (here it is \w+=|it has |\w+)") as error:
        call(keyword)
    assert "unexpected keyword" not in str(error.value)


def test_every_function_with_a_name_of_pandas_is_asked() -> None:
    assert sorted(ARGUMENTS) == [name for name in missing.__all__ if hasattr(pd.DataFrame, name)]
    assert {keyword for _, _, keyword in CASES} >= KEYWORDS.keys()


def test_the_way_to_pandas_own_methods() -> None:
    times = pd.to_datetime(["2024-01-01", "2024-01-02", "2024-01-05"])
    found = interop.from_pandas(interop.to_pandas(X, index=times).interpolate(method="time"))
    assert torch.equal(found.to_tensor(0.0), torch.tensor([1.0, 1.75, 4.0]))


@pytest.mark.parametrize("module", [md, missing])
@pytest.mark.parametrize("name", ["pct_change", "describe", "nunique", "clip", "ewm"])
def test_a_method_of_pandas(module: Any, name: str) -> None:
    with pytest.raises(
        AttributeError, match=f"has no attribute {name!r}; (here it is written |torch.clip takes |pandas)"
    ):
        getattr(module, name)


GROUPS = missing.groupby(X, ["a", "b", "a"])


@pytest.mark.parametrize(
    "call, error, said",
    [
        (
            lambda: missing.interpolate(X, 0, "time"),  # type: ignore[call-arg]
            TypeError,
            r"^interpolate takes x, dim, and no further argument; .*interpolate is linear, of evenly spaced elements\. "
            r"pandas has others: from_pandas\(to_pandas\(x, index=times\)\.interpolate\(method=",
        ),
        (
            lambda: missing.rolling(X, "7D", 0),  # type: ignore[arg-type]
            TypeError,
            r"^rolling takes the number of elements of a window, not window='7D'\. pandas has windows of time: "
            r"from_pandas\(to_pandas\(x, index=times\)\.rolling\(window\)\.mean\(\)\)",
        ),
        (lambda: list(GROUPS), TypeError, r"^groups are not iterated over; reduce one .*enumerate\(groups\.labels\)$"),
        (lambda: GROUPS["a"], TypeError, r"^groups\['a'\]: .*; reduce one group at a time, x\[groups\.inverse == num"),
        (lambda: GROUPS.size, AttributeError, r"groupby\(torch\.ones\(len\(x\)\), labels\)\.count\(\) the rows$"),
        (lambda: X.columns, AttributeError, r"here it is written frame\.columns: a tensor has no names, take x\[:, li"),
    ],
)
def test_a_word_of_pandas_elsewhere(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


def test_the_ways_that_the_errors_name() -> None:
    frame = pd.DataFrame({"s": [1.0, 2.0], "t": [3.0, None]})
    x = interop.from_pandas(frame)
    assert x[:, list(frame.columns).index("t")].get_mask().tolist() == [True, False]
    means = {label: X[GROUPS.inverse == number].mean() for number, label in enumerate(GROUPS.labels)}
    assert means["a"].item() == 2.5
    assert missing.groupby(torch.ones(len(X)), ["a", "b", "a"]).count().tolist() == [2, 1]
    found = missing.groupby(X, torch.zeros(3).int()).rank()
    assert torch.equal(found.to_tensor(0.0), torch.tensor([1.0, 0.0, 2.0], dtype=found.dtype))


@pytest.mark.filterwarnings("error")
def test_arrays_that_are_not_writable_are_copied() -> None:
    """As frames of pandas 3 give them; torch would warn that they are not writable."""

    def array(*numbers: Any) -> Any:
        made = pd.Series(numbers).to_numpy().copy()
        made.flags.writeable = False
        return made

    # torch warns once in a process.
    torch.set_warn_always(True)
    try:
        assert md.from_nan(array(1.0, float("nan"))).get_mask().tolist() == [True, False]
        assert md.masked_tensor([1.0, 2.0], array(True, False)).get_mask().tolist() == [True, False]
        assert md.average(torch.ones(2), array(1, 2), 0) == 1
        assert missing.groupby(torch.ones(2), array(1, 2)).count().tolist() == [1, 1]
        assert missing.groupby(torch.ones(2), array(0, 1), num_groups=2).count().tolist() == [1, 1]
        assert missing.groupby(torch.ones(2), array("a", "b")).count().tolist() == [1, 1]
    finally:
        torch.set_warn_always(False)
