"""The library's own reductions and scans: `skipna` and `min_count`, beside torch's function on the masked tensor."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import masked_dispatch as md
from comparison import same
from few_elements import NAN, results
from few_elements import ROWS as MASK
from few_elements import data_of_rows as data
from few_elements import masked_rows as masked
from masked_dispatch.api import reductions

# What reductions give for nothing; the others have no such value.
IDENTITIES = {
    "sum": 0.0,
    "nansum": 0.0,
    "prod": 1.0,
    "logsumexp": -math.inf,
    "vector_norm": 0.0,
    "any": 0.0,
    "all": 1.0,
}
OTHERS = (
    "mean", "nanmean", "var", "std", "var_mean", "std_mean", "amax", "amin", "aminmax", "max", "min", "argmax",
    "argmin", "median", "nanmedian", "mode", "quantile", "nanquantile", "kthvalue",
)  # fmt: skip
REDUCTIONS = (*IDENTITIES, *OTHERS)
SCANS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
# Arguments besides dim.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "quantile": {"q": 0.3}, "nanquantile": {"q": 0.3}, "vector_norm": {"ord": 3}, "kthvalue": {"k": 2}
}  # fmt: skip


def with_options(names: Sequence[str]) -> list[tuple[str, bool, int]]:
    """Each function with `skipna` and without, `min_count` by turns; with 0 too if it has a value for nothing."""
    skipping, strict = cycle([1, 2, 4]), cycle([2, 4, 1])
    cases = [(name, True, 0 if name in IDENTITIES else next(skipping)) for name in names]
    return cases + [(name, False, next(strict)) for name in names]


def torchs(name: str) -> Callable[..., Any]:
    return getattr(torch.linalg if name == "vector_norm" else torch, name)


def operand(name: str, garbage: float = NAN, requires_grad: bool = False) -> md.MaskedTensor:
    x = masked(garbage, requires_grad)
    return x > 0.9 if name in ("any", "all") else x


def is_wanted(skipna: bool, min_count: int) -> Tensor:
    """Which rows have a valid result."""
    return (MASK.sum(1) >= min_count) & (MASK.all(1) | skipna)


@pytest.mark.parametrize(
    "name, skipna, min_count", [*with_options(REDUCTIONS), ("sum", True, 1), ("any", True, 2), ("all", False, 0)]
)
def test_only_the_validity_of_a_reduction_is_another_than_torchs(name: str, skipna: bool, min_count: int) -> None:
    options, identity = ARGUMENTS.get(name, {}), IDENTITIES.get(name, 0.0)
    for garbage in (NAN, math.inf, -1e300):
        x = operand(name, garbage)
        got = getattr(md, name)(x, dim=1, skipna=skipna, min_count=min_count, **options)
        expected = torchs(name)(x, dim=1, **options)
        assert type(got) is type(expected)
        for mine, theirs in zip(results(got), results(expected), strict=True):
            valid = is_wanted(skipna, min_count) & (theirs.get_mask() | (min_count == 0))
            assert torch.equal(mine.get_mask(), valid)
            assert_close(mine.get_data()[valid], theirs.to_tensor(identity)[valid], equal_nan=True)


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_value_for_nothing_takes_no_min_count_of_0(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}\(\) of no elements has no value, so min_count=0"):
        getattr(md, name)(masked(), dim=1, min_count=0, **ARGUMENTS.get(name, {}))


@pytest.mark.parametrize("name", SCANS)
def test_scans_stop_at_the_first_invalid_element(name: str) -> None:
    got, expected = getattr(md, name)(masked(), 1, skipna=False), torchs(name)(masked(), 1)
    assert type(got) is type(expected)
    same(getattr(md, name)(masked(), 1), expected)
    for stopped, whole in zip(results(got), results(expected), strict=True):
        assert torch.equal(stopped.get_mask(), MASK.cumprod(1).bool())
        assert torch.equal(stopped.to_tensor(0), whole.mask_with(stopped.get_mask()).to_tensor(0))


# ------------------------------------------------------------------------------------------- dimensions and shapes


@st.composite
def tensors_and_dims(draw: st.DrawFn) -> tuple[Tensor, Tensor, tuple[int, ...] | int | None, bool]:
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randint(-4, 5, shape, generator=generator).double()
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    several = st.lists(st.integers(0, max(len(shape) - 1, 0)), unique=True, max_size=len(shape)).map(tuple)
    dim = draw(st.one_of(st.none(), several, st.integers(-len(shape), len(shape) - 1) if shape else st.none()))
    return values, mask, dim, draw(st.booleans())


@given(tensors_and_dims(), st.sampled_from(["sum", "nansum", "mean", "any", "all"]), st.booleans(), st.integers(0, 3))
def test_any_dims(drawn: Any, name: str, skipna: bool, min_count: int) -> None:
    values, mask, dim, keepdim = drawn
    if name == "mean" and min_count == 0:
        return
    x = md.masked_tensor(values, mask)
    got = getattr(md, name)(x, dim, keepdim, skipna=skipna, min_count=min_count)
    expected = md.as_masked_tensor(torchs(name)(x, dim=dim, keepdim=keepdim))
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)

    def counted(elements: Tensor) -> Tensor:
        return elements.long() if dim == () and name in ("any", "all") else elements.sum(dim, keepdim)

    n, size = counted(mask), counted(torch.ones_like(mask))
    valid = (n >= min_count) & ((n == size) | skipna)
    assert torch.equal(got.get_mask(), valid)
    fill = torch.tensor(IDENTITIES.get(name, 0.0)).to(got.dtype)
    assert_close(got.to_tensor(fill)[valid], expected.to_tensor(fill)[valid], equal_nan=True)


@pytest.mark.parametrize("name", sorted({*REDUCTIONS, *SCANS} - {"kthvalue"}))
def test_plain_tensors_give_what_torch_gives(name: str) -> None:
    x = data(0.0).nan_to_num()
    options = ARGUMENTS.get(name, {})
    for skipna in (True, False):
        mine = results(getattr(md, name)(x, dim=1, skipna=skipna, **options))
        for got, want in zip(mine, results(torchs(name)(x, dim=1, **options)), strict=True):
            assert type(got) is Tensor
            assert torch.equal(got, want)
    if name in SCANS:
        return
    several = results(getattr(md, name)(x, dim=1, min_count=2, **options))
    assert all(md.is_masked_tensor(result) and bool(result.get_mask().all()) for result in several)
    too_few = results(getattr(md, name)(x, dim=1, min_count=5, **options))
    assert not any(bool(result.get_mask().any()) for result in too_few)


def test_dtype_is_handed_on() -> None:
    x = md.masked_tensor(torch.tensor([1, 2, 3]), torch.tensor([True, False, True]))
    assert md.sum(x, min_count=0).dtype is torch.int64
    assert md.sum(x, dtype=torch.float32, min_count=0).dtype is torch.float32
    assert md.mean(x, dtype=torch.float64, min_count=2).item() == 2.0
    assert md.cumsum(x, 0, dtype=torch.int8, skipna=False).dtype is torch.int8
    assert md.vector_norm(x.float(), 1, dtype=torch.float64, min_count=0).item() == 4.0


def test_several_quantiles_at_once() -> None:
    got = md.quantile(masked(), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), dim=1, min_count=3)
    assert got.shape == (3, 5)
    assert got.get_mask().tolist() == [[True, True, False, False, False]] * 3


def test_infinity_and_nan_are_values() -> None:
    x = md.masked_tensor(torch.tensor([[math.inf, NAN], [NAN, 1.0]]), torch.tensor([[True, True], [False, True]]))
    assert md.sum(x, 1, skipna=False).get_mask().tolist() == [True, False]
    assert md.sum(x, 1, min_count=2).get_mask().tolist() == [True, False]
    assert math.isnan(md.sum(x, 1, min_count=2)[0].item())
    assert md.nansum(x, 1, min_count=2).get_mask().tolist() == [True, False]  # what nansum skips is valid, and counts


# ----------------------------------------------------------------------------------------------- gradients and modes


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "name, skipna, min_count",
    with_options(["sum", "prod", "logsumexp", "vector_norm", "mean", "var", "amax", "quantile"]),
)
def test_gradients_are_torchs_where_the_result_is_valid(name: str, skipna: bool, min_count: int) -> None:
    options = ARGUMENTS.get(name, {}) | ({"correction": 0} if name == "var" else {})
    x, y = masked(requires_grad=True), masked(requires_grad=True)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    with torch.autograd.detect_anomaly(check_nan=True):
        got = getattr(md, name)(x, dim=1, skipna=skipna, min_count=min_count, **options)
        (got.to_tensor(0.0) * weights).nan_to_num(neginf=0.0).sum().backward()
    expected = torchs(name)(y, dim=1, **options).mask_with(is_wanted(skipna, min_count))
    (expected.to_tensor(0.0) * weights).sum().backward()
    same(x.grad, y.grad)


@pytest.mark.parametrize("name", SCANS)
def test_gradients_of_scans(name: str) -> None:
    x, y = masked(requires_grad=True), masked(requires_grad=True)
    results(getattr(md, name)(x, 1, skipna=False))[0].sum().backward()
    results(torchs(name)(y, 1))[0].mask_with(MASK.cumprod(1).bool()).sum().backward()
    same(x.grad, y.grad)


@pytest.mark.parametrize("name", ["sum", "mean", "logsumexp", "any", "amin"])
def test_mapped(name: str) -> None:
    x = md.masked_tensor(data() > 0.9, MASK) if name == "any" else masked()
    mine = getattr(md, name)
    got = md.functional.vmap(lambda row: mine(row, 0, skipna=False, min_count=1))(x)
    same(got, mine(x, 1, skipna=False))
    got = md.functional.vmap(lambda row: mine(row, 0, min_count=2))(x)
    same(got, mine(x, 1, min_count=2))


def test_under_torch_func() -> None:
    def loss(x: Any) -> Any:
        return md.sum(md.mean(x, 1, min_count=2) * 3, min_count=0)

    x = masked(requires_grad=True)
    loss(x).backward()
    same(md.functional.grad(loss)(masked()), x.grad)
    each = md.functional.vmap(md.functional.grad(lambda row: md.sum(row * row, 0, min_count=2)))(masked())
    same(each, masked() * 2 * (MASK.sum(1, keepdim=True) >= 2))


# ------------------------------------------------------------------------------------------------------- what is said


def test_errors_are_torchs_own_or_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"sum\(\): min_count is a number of elements, 0 or more; got -1"):
        md.sum(masked(), min_count=-1)
    with pytest.raises(ValueError, match=r"amax\(\) of no elements has no value.*to_tensor\(fill\)"):
        md.amax(masked(), 1, min_count=0)
    with pytest.raises(ValueError, match=r"vector_norm\(\) of no elements has no value"):
        md.vector_norm(masked(), math.inf, 1, min_count=0)
    with pytest.raises(TypeError, match=r"sum\(\) takes no axis= here, only dim, dtype, skipna"):
        md.sum(masked(), axis=1)
    with pytest.raises(TypeError, match=r"cumsum\(\) takes no out= here"):
        md.cumsum(masked(), 1, out=torch.zeros(()))
    with pytest.raises(IndexError, match="Dimension out of range"):
        md.sum(masked(), 7, min_count=2)


FUNCTIONS = [n for n, f in vars(reductions).items() if n in md.__all__ and inspect.isfunction(f)]


def test_each_function_is_tested() -> None:
    assert sorted(FUNCTIONS) == sorted((*REDUCTIONS, *SCANS))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_says_what_it_takes(name: str) -> None:
    function = getattr(md, name)
    assert function.__name__ == name
    parameters = inspect.signature(function).parameters
    assert "skipna" in parameters
    assert ("min_count" in parameters) == (name not in SCANS)
    assert all(p.annotation is not p.empty and p.default is not ... for p in parameters.values())
    assert f"torch.{name}" in function.__doc__ or "torch.linalg" in function.__doc__


@pytest.mark.parametrize("name", [*REDUCTIONS, *SCANS])
def test_the_defaults_that_it_shows_are_torchs(name: str) -> None:
    function = getattr(md, name)
    x = operand(name)
    needed = {key: value for key, value in ARGUMENTS.get(name, {}).items() if key != "ord"}
    parameters = inspect.signature(function).parameters
    defaults = {key: p.default for key, p in parameters.items() if p.default is not p.empty and key != "dim"}
    same(function(x, dim=1, **needed, **defaults), function(x, dim=1, **needed))
    if parameters["dim"].default is not inspect.Parameter.empty:
        same(function(x, **needed, dim=parameters["dim"].default), function(x, **needed))
