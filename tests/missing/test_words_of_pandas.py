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
