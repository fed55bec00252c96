"""Scans, softmax, sorts and places in a sequence on bare records, against loops over compressed slices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from bare_records import apply, seen
from compressed_slices import EXTREME, assert_close, derivatives, garbage, masks, results, samples
from op_registry import MaskedSemanticsError
from op_registry.authoring import Dense

aten = torch.ops.aten
GARBAGE = (math.nan, -math.inf)


INF = math.inf


# -------------------------------------------------------------------------------------- results of the input's shape


def check_places(op, data, args, f, dim, *, order=2, kwargs=None, first=False, index=False):
    """A scan, softmax or sort along `dim`: at valid positions (or, `first`, at the first n) what compressing gives."""
    kwargs = kwargs or {}
    for mask in masks(tuple(data.shape)):
        full = mask.expand(data.shape)
        reference = data.clone().requires_grad_()
        columns, valid = reference.movedim(dim, -1), full.movedim(dim, -1)
        expected, indices = torch.zeros_like(columns), torch.zeros(columns.shape, dtype=torch.int64)
        wanted = valid.clone()
        for where in itertools.product(*map(range, columns.shape[:-1])):
            positions = valid[where].nonzero().flatten()
            if positions.numel() == 0:
                continue
            result = results(f(columns[where][positions]))
            places = torch.arange(positions.numel()) if first else positions
            expected = expected.index_put((*map(torch.tensor, where), places), result[0])
            if first:
                wanted[where] = torch.arange(wanted.shape[-1]) < positions.numel()
            if index:
                indices[(*where, places)] = positions[result[1]]
        expected = expected.movedim(-1, dim)
        before = None
        for value in GARBAGE:
            x = garbage(data, full, value).requires_grad_()
            actual = results(apply(op, Dense(x, mask.to(torch.int8)), *args, **kwargs))
            shown, values = seen(actual[0])
            assert shown.equal(wanted.movedim(-1, dim)), f"mask of {op} for {mask}"
            assert_close(values, torch.where(shown, expected, 0), f"{op} for {mask}")
            if index:
                own = results(op(data, *args, **kwargs))[1]  # torch's choice among equal elements
                named = own if bool(full.all()) else indices.movedim(-1, dim)
                assert seen(actual[1])[1].equal(named), f"index of {op} for {mask}"
            after = [values, *derivatives([values], x, full, order)]
            if before is None:
                wants = derivatives([torch.where(shown, expected, 0)], reference, full, order)
            for got, want in itertools.zip_longest(after[1:], wants):
                assert_close(got, torch.zeros_like(got) if want is None else want, f"gradient of {op} for {mask}")
            for a, b in zip(after, before or after, strict=True):
                assert torch.equal(a.nan_to_num(12.5), b.nan_to_num(12.5)), f"{op} saw {value}"
            before = after


SCANS = {
    "cumsum": (aten.cumsum.default, lambda t: torch.cumsum(t, 0)),
    "cumprod": (aten.cumprod.default, lambda t: torch.cumprod(t, 0)),
    "cummax": (aten.cummax.default, lambda t: torch.cummax(t, 0)),
    "cummin": (aten.cummin.default, lambda t: torch.cummin(t, 0)),
    "logcumsumexp": (aten.logcumsumexp.default, lambda t: torch.logcumsumexp(t, 0)),
}


@pytest.mark.parametrize("kind", ["ordinary", "tied", "extreme"])
@pytest.mark.parametrize("name", SCANS)
def test_scan(name, kind):
    op, f = SCANS[name]
    data = EXTREME if kind == "extreme" else samples()[kind]
    check_places(op, data, [1], f, 1, order=0 if kind == "extreme" else 2, index=name in {"cummax", "cummin"})
    if kind != "extreme":
        check_places(op, data, [0], f, 0, order=1, index=name in {"cummax", "cummin"})


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "_safe_softmax"])
def test_softmax(name):
    op = getattr(aten, name).default if name[0] == "_" else getattr(aten, name).int
    check_places(op, samples()["ordinary"], [1], lambda t: op(t, 0), 1)
    check_places(op, EXTREME, [1], lambda t: op(t, 0), 1, order=0)
    if name[0] != "_":
        inner = getattr(aten, "_" + name).default
        check_places(inner, samples()["tied"], [0, False], lambda t: inner(t, 0, False), 0)


def test_softmax_of_integers_needs_a_dtype():
    x = Dense(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 0, 1]], dtype=torch.int8))
    result = apply(aten.softmax.int, x, 1, torch.float64)
    assert_close(seen(result)[1], torch.tensor([[1, 0, math.e**2]], dtype=torch.float64) / (1 + math.e**2), "softmax")
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        apply(aten.softmax.int, x, 1)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_nothing_valid_is_finite_inside():
    """Anomaly detection finds no NaN in what autograd computes for slices without a valid element."""
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]], dtype=torch.int8)
    calls = [
        (aten.softmax.int, (1,)),
        (aten.log_softmax.int, (1,)),
        (aten.logsumexp.default, ([1],)),
        (aten.mean.dim, ([1],)),
        (aten.std.correction, ([1],)),
        (aten.amax.default, ([1],)),
        (aten.layer_norm.default, ([3],)),
        (aten.rms_norm.default, ([3],)),
        (aten.linalg_vector_norm.default, (2, [1])),
        (aten.logcumsumexp.default, (1,)),
        (aten.prod.dim_int, (1,)),
    ]
    for op, args in calls:
        x = torch.tensor([[1.0, 3.0, math.nan], [math.nan, math.inf, 1.0]], requires_grad=True)
        with torch.autograd.detect_anomaly(check_nan=True):
            result = apply(op, Dense(x, mask), *args)
            assert seen(result)[1].isfinite().all(), op
            seen(result)[1].sum().backward()
        assert x.grad.isfinite().all(), op


@pytest.mark.parametrize("kind", ["ordinary", "tied", "extreme"])
@pytest.mark.parametrize("descending", [False, True])
def test_sort(kind, descending):
    data = EXTREME if kind == "extreme" else samples()[kind]
    order = 0 if kind == "extreme" else 2

    def f(t):
        return torch.sort(t, stable=True, dim=0, descending=descending)

    check_places(aten.sort.default, data, [1, descending], f, 1, order=order, first=True, index=True)
    stable = {"stable": True, "dim": 0, "descending": descending}
    check_places(aten.sort.stable, data, [], f, 0, order=order, first=True, index=True, kwargs=stable)
    order = 2 if kind == "ordinary" else 0  # torch's choice among equal elements has another gradient
    check_places(aten.topk.default, data, [5, 1, descending], f, 1, order=order, first=True, index=True)


def test_sort_of_extreme_integers():
    info = torch.iinfo(torch.int64)
    x = torch.tensor([info.max, 3, info.min, 7, info.max])
    mask = torch.tensor([1, 0, 1, 1, 1], dtype=torch.int8)
    values, index = apply(aten.sort.default, Dense(x, mask))
    assert values.data[:4].tolist() == [info.min, 7, info.max, info.max]
    assert index.data[:4].tolist() == [2, 3, 0, 4]
    assert values.valid.tolist() == [True, True, True, True, False]
    values, index = apply(aten.topk.default, Dense(x, mask), 2)
    assert values.data.tolist() == [info.max, info.max]
    with pytest.raises(RuntimeError, match="out of range"):
        apply(aten.topk.default, Dense(x, mask), 9)
    with pytest.raises(RuntimeError, match="out of range"):
        apply(aten.kthvalue.default, Dense(x, mask), 9)


def test_places_in_a_sequence():
    values = Dense(torch.tensor([0.5, math.nan, 2.5]), torch.tensor([1, 0, 1], dtype=torch.int8))
    sequence = Dense(torch.tensor([0.0, 1.0, 2.0]), torch.ones(3, dtype=torch.int8))
    for result in (
        apply(aten.bucketize.Tensor, values, sequence, right=True),
        apply(aten.searchsorted.Tensor, sequence, values, side="right"),
    ):
        assert (seen(result)[1].tolist(), result.valid.tolist()) == ([1, 0, 3], [True, False, True])
    with pytest.raises(MaskedSemanticsError, match="an invalid element has no position in an order"):
        apply(aten.bucketize.Tensor, sequence, values)
