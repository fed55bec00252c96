"""Functions and methods of this library in compiled code."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from comparison import same
from few_elements import masked_rows as masked
from few_elements import padded_by_hand as by_hand
from few_elements import random_numbers as data
from few_elements import results, rows_of, stored
from storages import F, T, sample

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


# -------------------------------------------------------------------------------------------- data that requires grad


def test_a_compiled_function_is_one_graph_and_cuts_the_gradient() -> None:
    mask = torch.tensor([True, False, True])

    def function(w: Tensor) -> Tensor:
        return md.masked_tensor(w * 2, mask) * w

    w = torch.arange(3.0, requires_grad=True)
    torch.compile(function, backend="eager", fullgraph=True)(w).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [0, 0, 4]


# ------------------------------------------------------------------------------------------------------- pad_sequence


@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_compiled(kind: str) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def padded(*rows: Tensor) -> Tensor:
        return md.pad_sequence(rows, batch_first=True, padding_side="left") * 2

    rows = [row.requires_grad_() for row in rows_of(kind)[:3]]
    x = padded(*rows)
    data, mask = by_hand(rows, True, "left")
    assert isinstance(x, md.MaskedTensor)
    assert torch.equal(x.get_mask(), mask)
    assert torch.equal(x.detach().to_tensor(0), 2 * data)
    x.sum().backward()
    assert all(
        row.grad is not None and float(row.grad.sum()) == 2 * float(row.detach().mul(0).add(1).sum()) for row in rows
    )


# ---------------------------------------------------------------------------------------------------------- producers


@pytest.mark.parametrize(
    "produce",
    [md.sparse_relu, lambda x: md.sparse_threshold(x, 0.5), lambda x: md.sparse_topk(x, 2)],
    ids=["relu", "threshold", "topk"],
)
def test_in_a_compiled_region(produce):
    def total(x: Tensor) -> Tensor:
        return (produce(x) * 2).sum(1).to_tensor(0)

    x = data().requires_grad_()
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, total(x))
    (gradient,) = torch.autograd.grad(compiled.sum(), x)
    (expected,) = torch.autograd.grad(total(x).sum(), x)
    assert torch.equal(gradient, expected)


# ------------------------------------------------------------------------------------------------------------ explain


aten = torch.ops.aten


scan, softmax = torch.compile(torch.cumsum), torch.compile(torch.nn.Softmax(1))
COMPILED: dict[str, Any] = {
    "function": lambda x: md.explain(scan, x, 1),
    "module": lambda x: md.explain(softmax, x),
    "inside a function": lambda x: md.explain(lambda t: scan(t, 1), x),
}


@pytest.mark.parametrize("explained", COMPILED.values(), ids=COMPILED)
def test_a_compiled_function_is_explained_uncompiled_and_says_so(explained: Any) -> None:
    explanation = explained(stored("sparse_csr"))
    assert explanation.steps[0].op in (aten.cumsum.default, aten.softmax.int, aten._softmax.default)
    assert "(explained as it runs uncompiled; what a compiled graph stores densely is in the log of" in str(explanation)


def test_a_graph_with_symbolic_sizes_logs_without_a_guard(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(
        lambda t, w: torch.nn.functional.conv1d(t, w), backend="aot_eager", fullgraph=True, dynamic=True
    )
    with caplog.at_level(logging.INFO, logger="masked_dispatch.densification"):
        for rows in (4, 6):  # every size another number, or torch takes two for one
            data = torch.arange(11.0 * rows).reshape(rows, 11)
            given = md.masked_tensor(data, data % 3 == 0).to_sparse_csr()
            with torch.compiler.set_stance("fail_on_recompile" if rows == 6 else "default"):
                compiled(given, torch.randn(13, rows, 2))
    assert any("aten.conv1d.default stores shape" in r.getMessage() for r in caplog.records)
