"""The library's own reductions and scans: `skipna` and `min_count`, against loops over compressed slices."""

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
from compressed_slices import results
from masked_dispatch.api import reductions
from skipped_rows import MASK, NAN, data, masked, same

# Reductions that give numbers, with what they give for nothing (None: no such value), and arguments besides dim.
VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sum": (0.0, {}),
    "nansum": (0.0, {}),
    "prod": (1.0, {}),
    "logsumexp": (-math.inf, {}),
    "mean": (None, {}),
    "nanmean": (None, {}),
    "var": (None, {"correction": 0}),
    "std": (None, {"correction": 0}),
    "amax": (None, {}),
    "amin": (None, {}),
    "quantile": (None, {"q": 0.3}),
    "nanquantile": (None, {"q": 0.3}),
    "vector_norm": (0.0, {"ord": 3}),
}
TRUTHS = {"any": False, "all": True}
# Those that give several results, or positions.
VALUES_AND_INDICES = ("max", "min", "median", "nanmedian", "mode")
SEVERAL: dict[str, dict[str, Any]] = {name: {} for name in (*VALUES_AND_INDICES, "aminmax")}
SEVERAL |= {"var_mean": {"correction": 0}, "std_mean": {"correction": 0}}
POSITIONS = ("argmax", "argmin")
SCANS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")


def with_options(names: Sequence[str]) -> list[tuple[str, bool, int]]:
    """Each function with `skipna` and without, `min_count` by turns; with 0 too if it has a value for nothing."""
    kinds = [(name, name in TRUTHS or VALUES.get(name, (None,))[0] is not None) for name in names]
    skipping, strict = cycle([1, 2, 4]), cycle([2, 4, 1])
    cases = [(name, True, 0 if has_value else next(skipping)) for name, has_value in kinds]
    return cases + [(name, False, next(strict)) for name, _ in kinds]


def by_turns(names: Sequence[str]) -> list[tuple[str, bool, int]]:
    """Every other function with `skipna`, the others without."""
    cases = with_options(names)
    return cases[: len(names) : 2] + cases[len(names) + 1 :: 2]


def torchs(name: str) -> Callable[..., Any]:
    return getattr(torch.linalg if name == "vector_norm" else torch, name)


def is_wanted(row: Tensor, skipna: bool, min_count: int) -> bool:
    """Whether a slice with this mask has a valid result."""
    return int(row.sum()) >= min_count and (skipna or bool(row.all()))


def check_rows(
    name: str, got: Any, expected: Callable[[Tensor], Any], identity: Any, skipna: bool, min_count: int
) -> None:
    """Each result against `expected` of each row's valid elements."""
    for position, result in enumerate(results(got)):
        for i, row in enumerate(MASK):
            wanted = is_wanted(row, skipna, min_count)
            assert bool(result.get_mask()[i]) == wanted, (name, i)
            if wanted:
                value = results(expected(data()[i][row]))[position] if bool(row.any()) else torch.tensor(identity)
                assert_close(result.get_data()[i], value.to(result.dtype), msg=lambda m, i=i: f"row {i}: {m}")


@pytest.mark.parametrize("name", [name for name, (identity, _) in VALUES.items() if identity is None])
def test_what_has_no_value_for_nothing_takes_no_min_count_of_0(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}\(\) of no elements has no value, so min_count=0"):
        getattr(md, name)(masked(), dim=1, min_count=0, **VALUES[name][1])


@pytest.mark.parametrize(
    "name, skipna, min_count", [*with_options([*VALUES]), ("sum", True, 1), ("sum", True, 2), ("sum", False, 0)]
)
def test_reductions_of_numbers(name: str, skipna: bool, min_count: int) -> None:
    identity, options = VALUES[name]
    mine = getattr(md, name)
    for garbage in (NAN, math.inf, -1e300):
        got = mine(masked(garbage), dim=1, skipna=skipna, min_count=min_count, **options)
        check_rows(name, got, lambda row: torchs(name)(row, dim=0, **options), identity, skipna, min_count)


@pytest.mark.parametrize("name, skipna, min_count", [*with_options([*TRUTHS]), ("any", True, 2), ("all", False, 0)])
def test_any_and_all(name: str, skipna: bool, min_count: int) -> None:
    threshold = data().nanmedian()
    x = md.masked_tensor(data() > threshold, MASK)
    got = getattr(md, name)(x, dim=1, skipna=skipna, min_count=min_count)
    check_rows(name, got, lambda row: torchs(name)(row > threshold), TRUTHS[name], skipna, min_count)


@pytest.mark.parametrize("name, skipna, min_count", by_turns([*SEVERAL]))
def test_reductions_with_several_results(name: str, skipna: bool, min_count: int) -> None:
    options = SEVERAL[name]
    got = getattr(md, name)(masked(), dim=1, skipna=skipna, min_count=min_count, **options)
    assert type(got) is type(torchs(name)(data(), dim=1, **options))
    values = got[0] if name in VALUES_AND_INDICES else got
    check_rows(name, values, lambda row: torchs(name)(row, dim=0, **options), None, skipna, min_count)
    if name in VALUES_AND_INDICES:
        index = got[1].to_tensor(0)
        assert torch.equal(got[1].get_mask(), got[0].get_mask())
        picked = data().gather(1, index[:, None])[:, 0]
        assert torch.equal(picked[got[0].get_mask()], got[0].get_data()[got[0].get_mask()])


@pytest.mark.parametrize("skipna", [True, False])
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_those_of_the_whole_row(name: str, skipna: bool) -> None:
    got = getattr(md, name)(masked(), dim=1, skipna=skipna, min_count=2)
    for i, row in enumerate(MASK):
        assert bool(got.get_mask()[i]) == is_wanted(row, skipna, 2)
        if got.get_mask()[i]:
            assert int(got.get_data()[i]) == int(row.nonzero()[torchs(name)(data()[i][row])])


def test_kthvalue_needs_k_elements_and_min_count() -> None:
    values, index = md.kthvalue(masked(), 2, min_count=3)
    assert values.get_mask().tolist() == index.get_mask().tolist() == [True, True, False, False, False]
    assert md.kthvalue(masked(), 2)[0].get_mask().tolist() == [True, True, True, False, False]
    assert md.kthvalue(masked(), 2, skipna=False)[0].get_mask().tolist() == [True] + [False] * 4
    assert float(values[1]) == float(data()[1][MASK[1]].kthvalue(2).values)


@pytest.mark.parametrize("name", SCANS)
def test_scans_stop_at_the_first_invalid_element(name: str) -> None:
    got = getattr(md, name)(masked(), 1, skipna=False)
    skipping = getattr(md, name)(masked(), 1)
    assert isinstance(got, type(torchs(name)(data(), 1)))
    for stopped, whole in zip(results(got), results(skipping), strict=True):
        assert torch.equal(whole.get_mask(), MASK)
        for i, row in enumerate(MASK):
            first = int((~row).nonzero()[0]) if not bool(row.all()) else len(row)
            assert stopped.get_mask()[i].tolist() == [place < first for place in range(len(row))]
        kept = stopped.get_mask()
        assert torch.equal(stopped.get_data()[kept], whole.get_data()[kept])


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
    got = getattr(md, name)(md.masked_tensor(values, mask), dim, keepdim, skipna=skipna, min_count=min_count)
    plain = torchs(name)(values, dim=dim, keepdim=keepdim)
    assert got.shape == plain.shape
    assert got.dtype == plain.dtype
    # Of each result, the elements that it is made of: by the same reduction of one-hot positions.
    ndim = values.ndim
    nothing = dim == () and name in ("any", "all")
    dims = tuple(range(ndim)) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    dims = () if nothing else tuple(d % ndim for d in dims) if ndim else ()
    rest = [d for d in range(ndim) if d not in dims]
    size = math.prod(values.shape[d] for d in dims)
    count = math.prod(values.shape[d] for d in rest)
    rows, valid = (t.permute([*rest, *dims]).reshape(count, size) for t in (values, mask))
    for row, present, value, is_valid in zip(
        rows, valid, got.get_data().reshape(-1), got.get_mask().reshape(-1), strict=True
    ):
        n = int(present.sum())
        enough = n >= min_count or (min_count == 1 and size == 0)  # with nothing there to begin with: torch's own value
        assert bool(is_valid) == (enough and (skipna or n == size))
        if is_valid:
            assert_close(value, torchs(name)(row[present]), equal_nan=True)


@pytest.mark.parametrize("name", sorted({*VALUES, *TRUTHS, *SEVERAL, *POSITIONS}))
def test_plain_tensors_give_what_torch_gives(name: str) -> None:
    x = data(0.0).nan_to_num()
    options = VALUES[name][1] if name in VALUES else {}
    for skipna in (True, False):
        mine = results(getattr(md, name)(x, dim=1, skipna=skipna, **options))
        for got, want in zip(mine, results(torchs(name)(x, dim=1, **options)), strict=True):
            assert type(got) is Tensor
            assert torch.equal(got, want)
    several = results(getattr(md, name)(x, dim=1, min_count=2, **options))
    assert all(md.is_masked_tensor(result) and bool(result.get_mask().all()) for result in several)
    too_few = results(getattr(md, name)(x, dim=1, min_count=5, **options))
    assert not any(bool(result.get_mask().any()) for result in too_few)


@pytest.mark.parametrize("name", SCANS)
def test_plain_tensors_scan_as_torch_does(name: str) -> None:
    x = data(0.0).nan_to_num()
    for got, want in zip(results(getattr(md, name)(x, 1, skipna=False)), results(torchs(name)(x, 1)), strict=True):
        assert type(got) is Tensor
        assert torch.equal(got, want)


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
    by_turns(["sum", "prod", "logsumexp", "vector_norm", "mean", "var", "amax", "quantile"]),
)
def test_gradients(name: str, skipna: bool, min_count: int) -> None:
    _, options = VALUES[name]
    x = masked(requires_grad=True)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    with torch.autograd.detect_anomaly(check_nan=True):
        got = getattr(md, name)(x, dim=1, skipna=skipna, min_count=min_count, **options)
        (got.to_tensor(0.0) * weights).nan_to_num(neginf=0.0).sum().backward()
    expected = torch.zeros(MASK.shape, dtype=torch.float64)
    for i, row in enumerate(MASK):
        if is_wanted(row, skipna, min_count) and bool(row.any()):
            kept = data()[i][row].requires_grad_()
            (gradient,) = torch.autograd.grad(torchs(name)(kept, dim=0, **options) * weights[i], kept)
            expected[i, row] = gradient
    assert torch.equal(x.grad.get_mask(), MASK)
    assert_close(x.grad.to_tensor(0.0), expected)


@pytest.mark.parametrize("name", SCANS)
def test_gradients_of_scans(name: str) -> None:
    x = masked(requires_grad=True)
    got = results(getattr(md, name)(x, 1, skipna=False))[0]
    got.sum().backward()
    expected = torch.zeros(MASK.shape, dtype=torch.float64)
    for i, row in enumerate(MASK):
        kept = data()[i][: int(row.long().cumprod(0).sum())].requires_grad_()
        if kept.numel():
            (gradient,) = torch.autograd.grad(results(torchs(name)(kept, 0))[0].sum(), kept)
            expected[i, : len(kept)] = gradient
    assert torch.equal(x.grad.get_mask(), MASK)
    assert_close(x.grad.to_tensor(0.0), expected)


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


@pytest.mark.parametrize("name", [n for n in dir(reductions) if n in md.__all__ and n != "MaskedTensor"])
def test_each_says_what_it_takes(name: str) -> None:
    function = getattr(md, name)
    assert function.__name__ == name
    parameters = inspect.signature(function).parameters
    assert "skipna" in parameters
    assert ("min_count" in parameters) == (name not in SCANS)
    assert all(p.annotation is not p.empty and p.default is not ... for p in parameters.values())
    assert f"torch.{name}" in function.__doc__ or "torch.linalg" in function.__doc__


@pytest.mark.parametrize("name", [*VALUES, *TRUTHS, *SEVERAL, *POSITIONS, *SCANS])
def test_the_defaults_that_it_shows_are_torchs(name: str) -> None:
    function = getattr(md, name)
    x = masked() > 0 if name in TRUTHS else masked()
    needed = {key: value for key, value in VALUES.get(name, (None, {}))[1].items() if key == "q"}
    parameters = inspect.signature(function).parameters
    defaults = {key: p.default for key, p in parameters.items() if p.default is not p.empty and key != "dim"}
    same(function(x, dim=1, **needed, **defaults), function(x, dim=1, **needed))
    if parameters["dim"].default is not inspect.Parameter.empty:
        same(function(x, **needed, dim=parameters["dim"].default), function(x, **needed))
