"""In compiled code: methods of torch, names that are no attributes, and the library's own reductions and scans."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import masked_dispatch as md
from compressed_slices import results
from sixteen_elements import F, T, sample
from skipped_rows import masked, same

X = md.masked_tensor([1.0, 2.0], [True, False])


@pytest.mark.parametrize("option, layout", [({"skipna": False}, "dense"), ({"min_count": 0}, "csr")])
def test_options_of_this_library_s_functions_are_found(option: dict[str, Any], layout: str) -> None:
    (name, value) = next(iter(option.items()))
    for method in ("sum", "mean", "std", "amax", "nansum"):
        instead = rf"use masked_dispatch.{method}\(x, \.\.\., {name}={value}\)"
        message = rf"^x.{method}\(\) is torch's method and has no {name}; {instead}"
        with pytest.raises(TypeError, match=message):
            getattr(sample(layout), method)(1, **option)
    with pytest.raises(TypeError, match=r"^x.cumsum\(\) is torch's method and has no skipna"):
        sample(layout).cumsum(1, skipna=False)
    assert sample(layout).sum(1, keepdim=True).shape == (4, 1)
    rows = torch.compile(lambda x: x.sum(1), backend="aot_eager", fullgraph=True)(sample())
    assert rows.get_mask().tolist() == [T, T, F, T]


def test_copies_and_graphs_are_not_disturbed_by_known_words() -> None:
    for again in (copy.deepcopy(X), copy.copy(X), pickle.loads(pickle.dumps(X))):
        assert torch.equal(again.get_mask(), X.get_mask())
    y = torch.compile(lambda x: x * 2 if not hasattr(x, "nix") else x, backend="aot_eager", fullgraph=True)(X)
    torch.compiler.reset()
    assert y.get_mask().tolist() == [True, False]


CALLS: dict[str, Callable[[Any], Any]] = {
    "sum, min_count=0": lambda x: md.sum(x, 1, min_count=0),
    "logsumexp, min_count=0": lambda x: md.logsumexp(x, 1, min_count=0),
    "mean, min_count=3": lambda x: md.mean(x, 1, keepdim=True, min_count=3),
    "std, all of it": lambda x: md.std(x, skipna=False),
    "amax, strict": lambda x: md.amax(x, 1, skipna=False, min_count=2),
    "max, strict": lambda x: md.max(x, 1, skipna=False),
    "quantile": lambda x: md.quantile(x, 0.4, 1, min_count=2),
    "vector_norm": lambda x: md.vector_norm(x, 1, 1, min_count=0),
    "cumsum, strict": lambda x: md.cumsum(x, 1, skipna=False),
    "cummax, strict": lambda x: md.cummax(x, 1, skipna=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_skipna_and_min_count(name: str) -> None:
    torch.compiler.reset()
    call = CALLS[name]
    compiled = torch.compile(lambda x: call(x), backend="aot_eager", fullgraph=True)
    x, y = masked(requires_grad=True), masked(requires_grad=True)
    mine, theirs = results(compiled(x)), results(call(y))
    same([r.detach() for r in mine], [r.detach() for r in theirs])
    for result in (mine[0], theirs[0]):
        result.to_tensor(0.0).nan_to_num(neginf=0.0).sum().backward()
    same(x.grad, y.grad)
