"""Rules that work slice by slice, on bare records, against loops over compressed slices.

Each check compares values, masks, gradients and second derivatives with what plain torch gives on every slice with its
invalid elements removed, and repeats the call with other garbage under the mask: nothing may change, bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bare_records import apply, seen
from compressed_slices import EXTREME, assert_close, derivatives, garbage, masks, results, samples
from op_registry.authoring import Dense

aten = torch.ops.aten
GARBAGE = (math.nan, -math.inf)


def compressed(f: Callable, x: Tensor, mask: Tensor, dim: int | None, need: int = 1):
    """`f` on every compressed slice along `dim`: nested results, None where fewer than `need` elements are valid."""
    if dim is None:
        chosen = x[mask]
        return [(results(f(chosen)) if chosen.numel() >= need else None, mask.flatten().nonzero().flatten())], ()
    slices, valid = x.movedim(dim, -1), mask.movedim(dim, -1)
    found = []
    for where in itertools.product(*map(range, slices.shape[:-1])):
        chosen = slices[where][valid[where]]
        found.append((results(f(chosen)) if chosen.numel() >= need else None, valid[where].nonzero().flatten()))
    return found, slices.shape[:-1]


def check_reduction(op, data, args, f, dim, *, order=2, need=1, kwargs=None, tied=False):
    """A reduction along `dim` to a value (and an index): against compressed slices, and against other garbage."""
    kwargs = kwargs or {}
    differentiable = data.dtype.is_floating_point or data.dtype.is_complex
    for mask in masks(tuple(data.shape)):
        full = mask.expand(data.shape)
        reference = data.clone().requires_grad_(differentiable)
        slices, outer = compressed(f, reference, full, dim, need)
        before = None
        for value in GARBAGE:
            x = garbage(data, full, value).requires_grad_(differentiable)
            actual = results(apply(op, Dense(x, mask.to(torch.int8)), *args, **kwargs))
            observed = [seen(record) for record in actual]
            for k, (valid, values) in enumerate(observed):
                wanted = torch.tensor([s is not None for s, _ in slices]).reshape(outer)
                assert_close(valid.reshape(outer), wanted, f"mask of {op} for {mask}")
                parts = []
                for (s, positions), got in zip(slices, values.reshape(-1), strict=True):
                    if s is None:
                        parts.append(torch.zeros_like(got))
                    elif s[k].dtype is torch.int64 and k == len(observed) - 1 and not differentiable_result(op):
                        at = positions[s[k]]
                        parts.append(got if tied and equal_at(data, dim, len(parts), got, at) else at)
                    else:
                        parts.append(s[k])
                assert_close(values.reshape(outer), torch.stack(parts).reshape(outer), f"{op} for {mask}")
            outputs = [values for _, values in observed]
            after = [*outputs, *derivatives(outputs, x, full, order)]
            if before is None:
                expected = derivatives(expected_outputs(slices, outer, len(observed)), reference, full, order)
            for got, want in itertools.zip_longest(after[len(outputs) :], expected):
                want = torch.zeros_like(got) if want is None else want
                assert_close(got, want, f"gradient of {op} for {mask}")
            if before is not None:
                for a, b in zip(after, before, strict=True):
                    assert a.detach().equal(b.detach()) or torch.equal(a.isnan(), b.isnan()), f"{op} saw {value}"
            before = after


def expected_outputs(slices, outer, count):
    """The compressed results as whole tensors, zeros where a slice has none."""
    outputs = []
    for k in range(count):
        like = next((s[k] for s, _ in slices if s is not None), None)
        if like is None:
            continue
        outputs.append(torch.stack([torch.zeros_like(like) if s is None else s[k] for s, _ in slices]).reshape(outer))
    return outputs


def differentiable_result(op) -> bool:
    """Whether an int64 last result is a value, not an index."""
    return op._schema.name.split("::")[1] in {"sum", "nansum", "prod", "amax", "amin", "aminmax", "any", "all"}


def equal_at(data, dim, which, a, b) -> bool:
    """Whether two positions of a slice hold the same value: either is a right answer to a tie."""
    line = data.flatten() if dim is None else data.movedim(dim, -1).reshape(-1, data.shape[dim])[which]
    return bool((line[a] == line[b]) | (line[a].isnan() & line[b].isnan()))


INF = math.inf

FLOATS = {
    "sum": (aten.sum.dim_IntList, torch.sum, [[1]]),
    "nansum": (aten.nansum.default, torch.nansum, [[1]]),
    "prod": (aten.prod.dim_int, lambda t: torch.prod(t, 0), [1]),
    "mean": (aten.mean.dim, torch.mean, [[1]]),
    "var": (aten.var.correction, lambda t: torch.var(t, correction=0), [[1]], {"correction": 0}),
    "std": (aten.std.correction, lambda t: torch.std(t, correction=0), [[1]], {"correction": 0}),
    "var_mean": (aten.var_mean.correction, lambda t: torch.var_mean(t, correction=0), [[1]], {"correction": 0}),
    "std_mean": (aten.std_mean.correction, lambda t: torch.std_mean(t, correction=0), [[1]], {"correction": 0}),
    "amax": (aten.amax.default, torch.amax, [[1]]),
    "amin": (aten.amin.default, torch.amin, [[1]]),
    "aminmax": (aten.aminmax.default, torch.aminmax, [], {"dim": 1}),
    "max": (aten.max.dim, lambda t: torch.max(t, 0), [1]),
    "min": (aten.min.dim, lambda t: torch.min(t, 0), [1]),
    "argmax": (aten.argmax.default, lambda t: torch.argmax(t, 0), [1]),
    "argmin": (aten.argmin.default, lambda t: torch.argmin(t, 0), [1]),
    "any": (aten.any.dim, torch.any, [1]),
    "all": (aten.all.dim, torch.all, [1]),
    "logsumexp": (aten.logsumexp.default, lambda t: torch.logsumexp(t, 0), [[1]]),
}


PICKING = ("amax", "amin", "aminmax", "max", "min", "argmax", "argmin")


@pytest.mark.parametrize(("name", "kind"), [(n, "tied" if n in PICKING else "ordinary") for n in FLOATS])
def test_reduction_is_the_compressed_one(name, kind):
    op, f, args, *kwargs = FLOATS[name]
    check_reduction(op, samples()[kind], args, f, 1, kwargs=kwargs[0] if kwargs else {})


@pytest.mark.parametrize("name", [name for name in FLOATS if "_mean" not in name])
def test_reduction_of_infinities_and_nan(name):
    op, f, args, *kwargs = FLOATS[name]
    order = 1 if name in {"max", "min", "sum", "mean"} else 0
    check_reduction(op, EXTREME, args, f, 1, order=order, kwargs=kwargs[0] if kwargs else {})


@pytest.mark.parametrize("op", [aten.amax.default, aten.max.default, aten.min.default, aten.amin.default])
def test_gradient_of_an_extremum_is_shared_by_the_valid_ties(op):
    extreme = -INF if "max" in op._schema.name else INF
    mask = torch.tensor([1, 0, 1, 1, 0], dtype=torch.int8)
    for data in (
        [extreme, 7.0, extreme, extreme, extreme],
        [2.0, 2.0, 2.0, extreme, 2.0],
        [5.0, math.nan, 5.0, 5.0, 1.0],
    ):
        x = torch.tensor(data, requires_grad=True)
        result = apply(op, Dense(x, mask)).data
        chosen = torch.tensor(data)[mask.bool()].requires_grad_()
        expected = op(chosen)
        assert_close(result, expected, str(op))
        result.backward()
        expected.backward()
        wanted = torch.zeros(5).masked_scatter(mask.bool(), chosen.grad)
        assert_close(x.grad, wanted, str(op))


# ---------------------------------------------------------------------------------------- norms, other forms, dtypes


ORDERS = [0, 0.5, 1, 1.5, 2, 3, INF, -INF, -1, -2.5]


@pytest.mark.parametrize(
    ("p", "kind"), [*((p, "ordinary") for p in ORDERS), *((p, "tied") for p in (0.5, INF, -INF, -1))]
)
def test_vector_norm(p, kind):
    data = samples()[kind]
    order = 2 if kind == "ordinary" else 1
    check_reduction(
        aten.linalg_vector_norm.default, data, [p, [1]], lambda t: torch.linalg.vector_norm(t, p), 1, order=order
    )
    check_reduction(aten.norm.ScalarOpt_dim, data, [p, [1]], lambda t: torch.linalg.vector_norm(t, p), 1, order=order)
    check_reduction(aten.norm.Scalar, data, [p], lambda t: torch.linalg.vector_norm(t, p), None, order=order)


def test_norm_of_complex_and_of_infinities():
    data = samples()["ordinary"] + 1j * samples()["ordinary"].flip(0)
    for p in (1, 2, INF, -INF, -1):
        check_reduction(
            aten.linalg_vector_norm.default, data, [p, [1]], lambda t, p=p: torch.linalg.vector_norm(t, p), 1
        )
        check_reduction(
            aten.linalg_vector_norm.default,
            EXTREME,
            [p, [1]],
            lambda t, p=p: torch.linalg.vector_norm(t, p),
            1,
            order=0,
        )


WHOLE = {
    "sum": (aten.sum.default, torch.sum),
    "prod": (aten.prod.default, torch.prod),
    "mean": (aten.mean.default, torch.mean),
    "amax": (aten.amax.default, torch.amax),
    "max": (aten.max.default, torch.max),
    "min": (aten.min.default, torch.min),
    "any": (aten.any.default, torch.any),
    "all": (aten.all.default, torch.all),
    "std": (aten.std.correction, lambda t: torch.std(t, correction=0), {"correction": 0}),
    "median": (aten.median.default, torch.median),
    "nanmedian": (aten.nanmedian.default, torch.nanmedian),
    "argmax": (aten.argmax.default, torch.argmax),
    "argmin": (aten.argmin.default, torch.argmin),
    "aminmax": (aten.aminmax.default, torch.aminmax),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "extreme") for name in WHOLE), ("std", "ordinary"), ("amax", "tied"), ("median", "tied")],
)
def test_reduction_of_everything(name, kind):
    op, f, *kwargs = WHOLE[name]
    data = EXTREME if kind == "extreme" else samples()[kind]
    order = 0 if kind == "extreme" else 2
    check_reduction(op, data, [], f, None, order=order, kwargs=kwargs[0] if kwargs else {})


COMPLEX = ["sum", "prod", "mean", "var", "std", "any", "all", "logsumexp"]


@pytest.mark.parametrize("name", COMPLEX)
def test_reduction_of_complex(name):
    op, f, args, *kwargs = FLOATS[name]
    data = samples()["ordinary"] + 1j * samples()["tied"]
    order = 1 if name in {"sum", "mean", "var", "std"} else 0
    check_reduction(op, data, args, f, 1, order=order, kwargs=kwargs[0] if kwargs else {})


INTEGERS = [
    "sum",
    "nansum",
    "prod",
    "amax",
    "amin",
    "aminmax",
    "max",
    "min",
    "argmax",
    "argmin",
    "any",
    "all",
    "logsumexp",
]


# Each reduction in one dtype, and the sum in each.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *zip(INTEGERS, itertools.cycle([torch.int64, torch.int8, torch.uint8]), strict=False),
        ("sum", torch.int8),
        ("sum", torch.uint8),
    ],
)
def test_reduction_of_integers(name, dtype):
    op, f, args, *kwargs = FLOATS[name]
    info = torch.iinfo(dtype)
    data = torch.tensor([[1, 2, 0, 1, 2], [info.min] * 5, [info.max] * 5, [info.min, 1, info.min, 1, 0]], dtype=dtype)
    if name == "logsumexp":
        data = data.clamp(0, 3)
    check_reduction(op, data, args, f, 1, kwargs=kwargs[0] if kwargs else {})


@pytest.mark.parametrize("name", ["sum", "prod", "amax", "amin", "aminmax", "max", "min", "any", "all"])
def test_reduction_of_bools(name):
    op, f, args, *kwargs = FLOATS[name]
    check_reduction(op, samples()["tied"] > 1, args, f, 1, kwargs=kwargs[0] if kwargs else {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_counts_and_accumulates_in_float(dtype):
    x = torch.ones(1, 4099, dtype=dtype)
    mask = torch.ones(1, 4099, dtype=torch.int8)
    mask[:, 0] = 0
    x[:, 0] = math.nan
    assert apply(aten.mean.dim, Dense(x, mask), [1]).data.item() == 1
    assert apply(aten.mean.dim, Dense(x, mask), [1]).data.dtype is dtype
    assert apply(aten.std.correction, Dense(x, mask), [1]).data.item() == 0


def test_shapes_with_several_dimensions_and_keepdim():
    x = torch.randn(2, 3, 4)
    mask = (torch.rand(2, 3, 4) < 0.6).to(torch.int8)
    for keepdim in (False, True):
        for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.logsumexp.default, aten.any.dims):
            result = apply(op, Dense(x, mask), [0, -1], keepdim)
            assert result.data.shape == op(x, [0, -1], keepdim).shape == result.validity.shape
        result = apply(aten.var.correction, Dense(x, mask), [0, -1], correction=1, keepdim=keepdim)
        assert result.data.shape == x.var((0, -1), keepdim=keepdim).shape == result.validity.shape
        result = apply(aten.argmax.default, Dense(x, mask), None, keepdim)
        assert result.data.shape == aten.argmax(x, None, keepdim).shape
    kept = apply(aten.any.dims, Dense(x, mask), [])
    assert kept.data.dtype is torch.bool
    assert kept.validity is mask


def test_zero_dimensions_and_no_elements():
    one = Dense(torch.tensor(3.0), torch.tensor(1, dtype=torch.int8))
    none = Dense(torch.tensor(math.nan), torch.tensor(0, dtype=torch.int8))
    for op in (aten.sum.default, aten.mean.default, aten.amax.default, aten.median.default, aten.argmax.default):
        assert apply(op, one).data == op(one.data)
        assert apply(op, none).valid.item() is False
    assert apply(aten.max.dim, one, 0)[0].data == 3
    assert apply(aten.sort.default, one)[0].data == 3
    empty = Dense(torch.empty(2, 0), torch.empty(2, 0, dtype=torch.int8))
    assert apply(aten.sum.dim_IntList, empty, [1]).valid.all()
    assert apply(aten.mean.dim, empty, [1]).data.isnan().all()
    with pytest.raises(IndexError, match="non-zero size"):
        apply(aten.amax.default, empty, [1])
    with pytest.raises(IndexError, match="Dimension out of range"):
        apply(aten.mean.dim, Dense(torch.ones(2), torch.ones(2, dtype=torch.int8)), [3])


@pytest.mark.parametrize("p", [1, 2, INF, -INF, -1])
def test_dist_is_over_what_is_valid_in_both(p):
    a, b = samples()["ordinary"], samples()["ordinary"].flip(0)
    left, right = masks((4, 5))[0], masks((4, 5))[3] | masks((4, 5))[1]
    x, y = garbage(a, left, math.nan).requires_grad_(), garbage(b, right, -INF).requires_grad_()
    result = apply(aten.dist.default, Dense(x, left.to(torch.int8)), Dense(y, right.to(torch.int8)), p)
    both = left & right
    u, v = a[both].requires_grad_(), b[both].requires_grad_()
    expected = torch.dist(u, v, p)
    assert_close(result.data, expected, "dist")
    gradients = torch.autograd.grad(result.data, [x, y])
    wanted = torch.autograd.grad(expected, [u, v])
    for got, want in zip(gradients, wanted, strict=True):
        assert_close(got, torch.zeros_like(got).masked_scatter(both, want), "gradient of dist")


# ----------------------------------------------------------------------------------------------- the order of a slice

PICKED = {
    "median": (aten.median.dim, lambda t: torch.median(t, 0), [1], 1),
    "nanmedian": (aten.nanmedian.dim, lambda t: torch.nanmedian(t, 0), [1], 1),
    "mode": (aten.mode.default, lambda t: torch.mode(t, 0), [1], 1),
    "kthvalue": (aten.kthvalue.default, lambda t: torch.kthvalue(t, 2, 0), [2, 1], 2),
}


@pytest.mark.parametrize("kind", ["ordinary", "tied", "extreme"])
@pytest.mark.parametrize("name", PICKED)
def test_picked_from_the_order(name, kind):
    op, f, args, need = PICKED[name]
    data = EXTREME if kind == "extreme" else samples()[kind]
    if name == "mode":  # torch's own sorts NaN as it finds them
        data = data.nan_to_num(3.0, posinf=INF, neginf=-INF)
    order = 1 if kind == "ordinary" else 0
    check_reduction(op, data, args, f, 1, need=need, order=order, tied=True)
