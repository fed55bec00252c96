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

from op_registry import Dense, registry

aten = torch.ops.aten
GARBAGE = (math.nan, math.inf, -math.inf, 1e38, 0.0)


def apply(op, *args, **kwargs):
    return registry.get(op).bind(op)(*args, **kwargs)


def masks(shape: tuple[int, ...]) -> list[Tensor]:
    """Half, one slice empty, none valid, first only, all valid, broadcast."""
    generator = torch.Generator().manual_seed(0)
    half = torch.rand(shape, generator=generator) < 0.5
    empty = half.clone()
    empty[0] = False
    first = torch.zeros(shape, dtype=torch.bool)
    first[..., 0] = True
    row = half[..., :1].clone()
    return [half, empty, torch.zeros_like(half), first, torch.ones_like(half), row]


def garbage(data: Tensor, mask: Tensor, value: float) -> Tensor:
    """`data` with garbage wherever `mask` is False."""
    if not data.dtype.is_floating_point and not data.dtype.is_complex:
        info = torch.iinfo(data.dtype) if data.dtype is not torch.bool else None
        value = bool(value == 0.0) if info is None else info.min if value < 0 else info.max if value > 1 else 0
    return torch.where(mask, data, torch.full_like(data, value))


def results(value) -> list:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def seen(record: Dense) -> tuple[Tensor, Tensor]:
    """A result's mask in full, and its values with zeros under the mask."""
    valid = record.valid
    valid = torch.ones_like(record.data, dtype=torch.bool) if valid is None else valid.expand(record.data.shape)
    return valid, torch.where(valid, record.data, torch.zeros_like(record.data))


def loss_of(outputs: list[Tensor]) -> Tensor | None:
    """Something that weighs every differentiable output differently and is not linear in it."""
    parts = []
    for output in outputs:
        if output.requires_grad:
            weights = torch.linspace(0.5, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
            value = torch.where(output.isfinite(), output, torch.where(output.isnan(), 0, output.sign()))
            value = value.abs().square() if value.is_complex() else value * value + value
            parts.append((weights.abs() * value).sum())
    return sum(parts[1:], parts[0]) if parts else None


def derivatives(outputs: list[Tensor], x: Tensor, mask: Tensor, order: int) -> list[Tensor]:
    """First and second derivative of the loss for the valid elements of x."""
    loss = loss_of(outputs)
    found = []
    for _ in range(order if loss is not None else 0):
        if not loss.requires_grad:
            break
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient = torch.where(mask, gradient, 0)
        found.append(gradient.detach())
        direction = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)
        loss = (gradient * direction).real.sum() if x.is_complex() else (gradient * direction).sum()
    return found


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


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, equal_nan=True, msg=lambda m: f"{what}: {m}")


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


def samples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ordinary = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    tied = torch.tensor([[1.0, 2, 2, 2, 1], [0, 0, 0, 0, 0], [3, 3, 1, 3, 1], [-1, -1, -1, 2, 2]], dtype=torch.float64)
    return {"ordinary": ordinary, "tied": tied}


INF = math.inf
EXTREME = torch.tensor(
    [
        [-INF, -INF, -INF, -INF, -INF],
        [INF, INF, INF, INF, INF],
        [-INF, 1, INF, 2, -INF],
        [math.nan, 1, math.nan, -INF, 5],
    ],
    dtype=torch.float64,
)

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


@pytest.mark.parametrize("kind", ["ordinary", "tied"])
@pytest.mark.parametrize("name", FLOATS)
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
