"""Reductions, scans and sorts: extreme values and ties, dtypes, memory of stride 0, statistics, and how n is counted.

That a slice gives what its valid elements give, with its derivatives, whatever lies under the mask, the laws ask of
every operator (P2, P3, P5). Here are the values that torch's samples do not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

import masked_dispatch as md
from bare_records import apply
from op_registry import MaskedSemanticsError
from op_registry.authoring import Dense
from op_registry.records import validity
from op_registry.records.validity import count_ones

aten = torch.ops.aten
INF, NAN = math.inf, math.nan

# ---------------------------------------------------------------------- what torch's samples do not have: one row each

ROWS = [
    *map(torch.tensor, ([-INF] * 5, [INF] * 5, [-INF, 1, INF, 2, -INF], [NAN, 1, NAN, -INF, 5], [1.0, 2, 2, 2, 1])),
    *(
        torch.tensor([getattr(torch.iinfo(d), end)] * 5, dtype=d)
        for d in (torch.int8, torch.int64)
        for end in ("min", "max")
    ),
    torch.tensor([torch.iinfo(torch.int64).max, 3, torch.iinfo(torch.int64).min, 7, torch.iinfo(torch.int64).max]),
    torch.tensor([0, 255, 0, 255, 255], dtype=torch.uint8),
    torch.tensor([True, False, True, False, False]),
]
HOLES = [torch.tensor(m) > 0 for m in ([0, 0, 1, 1, 1], [1, 0, 1, 1, 0], [0, 1, 0, 1, 0], [1, 1, 1, 1, 1])]
# Whose last result is an index.
NAMING: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
    "argmax": torch.argmax,
    "argmin": lambda x: x.argmin(0),
    "median": lambda x: x.median(0),
    "nanmedian": lambda x: x.nanmedian(0),
    "mode": lambda x: x.nan_to_num(3.0, INF, -INF).mode(0),  # torch's own sorts NaN as it finds them
    "kthvalue": lambda x: x.kthvalue(2, 0),
    "cummax": lambda x: x.cummax(0),
    "cummin": lambda x: x.cummin(0),
    "sort": lambda x: x.sort(stable=True),
    "descending": lambda x: x.sort(descending=True, stable=True),
    "topk": lambda x: x.topk(2),
}
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    **{n: getattr(torch, n) for n in ("sum", "nansum", "prod", "mean", "var", "std", "amax", "amin", "aminmax", "any")},
    "all": torch.all,
    **{f"{n} of all": getattr(torch, n) for n in ("median", "nanmedian")},
    **{f"norm {p}": lambda x, p=p: torch.linalg.vector_norm(x, p) for p in (0, 0.5, 1, 2, INF, -INF, -1, -2.5)},
    **{n: lambda x, n=n: getattr(torch, n)(x, 0) for n in ("logsumexp", "softmax", "log_softmax", "_safe_softmax")},
    **{n: lambda x, n=n: getattr(torch, n)(x, 0) for n in ("cumsum", "cumprod", "logcumsumexp")},
}


def results(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


@pytest.mark.filterwarnings("ignore:(var|std):UserWarning")
@pytest.mark.parametrize(("name", "call"), [*NAMING.items(), *OTHERS.items()])
def test_extreme_values_and_ties_give_what_they_give_alone(name: str, call: Callable[[Tensor], Any]) -> None:
    for row in ROWS:
        for mask in HOLES:
            try:
                wanted = results(call(row[mask]))
            except (RuntimeError, NotImplementedError):
                continue  # torch refuses the dtype
            positions = mask.nonzero()[:, 0]
            for n, (got, want) in enumerate(zip(results(call(md.masked_tensor(row, mask))), wanted, strict=True), 1):
                found = got.compressed()
                if n == len(wanted) and name in NAMING:
                    assert mask[found].all()
                    found, want = row[found], row[positions[want]]  # either index is right for equal values
                torch.testing.assert_close(found, want.reshape(-1), equal_nan=True, msg=lambda m, x=row: f"{x}: {m}")


@pytest.mark.parametrize("op", [aten.amax.default, aten.max.default, aten.min.default, aten.amin.default])
def test_gradient_of_an_extremum_is_shared_by_the_valid_ties(op: OpOverload) -> None:
    extreme = -INF if "max" in op._schema.name else INF
    mask = torch.tensor([True, False, True, True, False])
    for data in ([extreme, 7, extreme, extreme, extreme], [2, 2, 2, extreme, 2.0], [5, NAN, 5, 5, 1.0]):
        x, chosen = (
            md.masked_tensor(torch.tensor(data), mask, requires_grad=True),
            torch.tensor(data)[mask].requires_grad_(),
        )
        op(x).backward()
        op(chosen).backward()
        assert torch.equal(x.grad.compressed(), chosen.grad)


def test_norms_by_their_older_name() -> None:
    """Its four overloads, which no entry of torch's database calls."""
    x = md.masked_tensor([[3.0, NAN, 4.0], [NAN, NAN, NAN]], [[1, 0, 1], [0, 0, 0]])
    assert aten.norm.Scalar(x, 2).item() == 5
    assert aten.norm.ScalarOpt_dtype(x, 1, dtype=torch.float64).dtype is torch.float64
    assert aten.norm.ScalarOpt_dim(x, -INF, [1]).to_tensor(0).tolist() == [3, 0]
    assert aten.norm.ScalarOpt_dim_dtype(x, -1, [1], False, dtype=torch.float32)[0].item() == pytest.approx(12 / 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_counts_and_accumulates_in_float(dtype: torch.dtype) -> None:
    x = md.masked_tensor(torch.ones(4099, dtype=dtype), torch.arange(4099) > 0)
    assert x.mean().dtype is dtype
    assert (x.mean().item(), x.std().item()) == (1, 0)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_nothing_valid_is_finite_inside() -> None:
    """Anomaly detection finds no NaN in what autograd computes for slices without a valid element."""
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]]) > 0
    calls: list[Callable[[Tensor], Tensor]] = [
        *(
            lambda x, n=n: getattr(torch, n)(x, 1)
            for n in ("softmax", "log_softmax", "logsumexp", "logcumsumexp", "prod")
        ),
        *(lambda x, n=n: getattr(torch, n)(x, 1) for n in ("mean", "std", "amax")),
        *(lambda x, n=n: getattr(torch.nn.functional, n)(x, (3,)) for n in ("layer_norm", "rms_norm")),
        lambda x: torch.linalg.vector_norm(x, 2, 1),
    ]
    for call in calls:
        x = md.masked_tensor([[1.0, 3.0, NAN], [INF, 2.0, 1.0], [NAN, INF, 1.0]], mask, requires_grad=True)
        with torch.autograd.detect_anomaly(check_nan=True):
            call(x).sum().backward()
        assert x.grad.compressed().isfinite().all()


def test_zero_dimensions_and_no_elements() -> None:
    one, none = (md.masked_tensor(torch.tensor(3.0), torch.tensor(valid)) for valid in (True, False))
    for call in (torch.sum, torch.mean, torch.amax, torch.median, torch.argmax):
        assert call(one).item() == call(torch.tensor(3.0)).item()
        assert not call(none).get_mask()
    assert one.max(0).values.item() == one.sort().values.item() == 3
    empty = md.masked_tensor(torch.empty(2, 0), torch.empty(2, 0, dtype=torch.bool))
    assert empty.sum(1).get_mask().all()
    assert empty.mean(1).to_tensor(0).isnan().all()
    with pytest.raises(IndexError, match="non-zero size"):
        empty.amax(1)
    with pytest.raises(IndexError, match="Dimension out of range"):
        empty.mean(3)


def test_an_empty_list_of_dimensions_reduces_nothing_of_any_and_all() -> None:
    x = md.masked_tensor([1.0, 0.0], [True, False])
    kept = aten.any.dims(x, [])
    assert kept.dtype is torch.bool
    assert kept.get_mask().tolist() == [True, False]


def test_of_too_many_torch_says_so() -> None:
    x = md.masked_tensor([1.0, 2.0, 3.0], [True, False, True])
    for call in (lambda: x.topk(9), lambda: x.kthvalue(9)):
        with pytest.raises(RuntimeError, match="out of range"):
            call()
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        x.long().softmax(0)
    assert x.long().softmax(0, torch.float64).dtype is torch.float64


def test_places_in_a_sequence() -> None:
    values, sequence = md.masked_tensor([0.5, NAN, 2.5], [True, False, True]), torch.tensor([0.0, 1.0, 2.0])
    for found in (torch.bucketize(values, sequence, right=True), torch.searchsorted(sequence, values, side="right")):
        assert found.to_tensor(-1).tolist() == [1, -1, 3]
    with pytest.raises(MaskedSemanticsError, match="an invalid element has no position in an order"):
        torch.bucketize(sequence, values)


def test_a_short_kernel_does_not_pass_a_rule_by() -> None:
    """bucketize is elementwise in its values, but boundaries with a gap are refused, of whatever shape."""
    mask = torch.tensor([True, False])
    gap = md.masked_tensor(torch.tensor([1.0, 2.0]), mask)
    with pytest.raises(MaskedSemanticsError, match="an invalid element has no position in an order"):
        torch.bucketize(md.masked_tensor(torch.tensor([0.5, 1.5]), mask), gap)


# --------------------------------------------------------------------------- under a mask that excludes nothing: torch

# Of two dimensions, along the last one.
ALONG: dict[str, Callable[[Tensor], Any]] = {
    "topk unsorted": lambda x: x.topk(3, 1, sorted=False),
    "smallest": lambda x: x.topk(x.shape[1] // 2, 1, largest=False),
    "kthvalue": lambda x: x.kthvalue(x.shape[1] // 2, 1),
    "sort": lambda x: x.sort(1),
    "argsort": lambda x: (x, x.argsort(1)),
    "argmax": lambda x: (x, x.argmax(1)),
    **{n: lambda x, n=n: getattr(x, n)(1) for n in ("median", "nanmedian", "mode", "max", "min", "cummax", "cummin")},
}
WHOLE: dict[str, Callable[[Tensor], Any]] = {
    **{
        n: lambda x, n=n: getattr(x, n)(1) for n in ("amax", "sum", "prod", "mean", "var", "any", "logsumexp", "nansum")
    },
    **{n: lambda x, n=n: getattr(x, n)(1) for n in ("nanmean", "softmax", "cumsum", "cumprod", "logcumsumexp")},
    **{n: getattr(torch, n) for n in ("median", "nanmedian", "argmin", "cov", "corrcoef", "unique", "trapezoid")},
    "aminmax": lambda x: x.aminmax(dim=1),
    "norm": lambda x: x.norm(dim=1),
    "quantile": lambda x: x.quantile(0.5, 1),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "histc": lambda x: x.histc(3),
}
DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64)


def raised(call: Callable[[Tensor], Any], x: Tensor) -> type | None:
    try:
        call(x)
    except Exception as error:  # of any type: compared
        return type(error)
    return None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_that_torch_refuses_is_refused_under_a_mask(dtype: torch.dtype) -> None:
    data = torch.tensor([[1, 0, 1, 2, 0, 1], [1, 1, 0, 3, 1, 1]]).to(dtype)
    whole, holey = torch.ones(2, 6, dtype=torch.bool), torch.tensor([[True] * 6, [True, False] * 3])
    for name, call in [*ALONG.items(), *WHOLE.items()]:
        expected = raised(call, data)
        assert (raised(call, md.masked_tensor(data, whole)) is None) is (expected is None), name
        assert expected is None or raised(call, md.masked_tensor(data, holey)) is not None, name


@pytest.mark.parametrize("name", ALONG)
def test_of_equal_elements_torchs_choice_is_named_where_all_are_valid(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (6, 7, 20, 100):
        for dtype in (torch.float32, torch.int64):
            data = torch.randint(0, 3, (4, size), generator=generator).to(dtype)
            index = ALONG[name](md.masked_tensor(data, torch.ones(4, size, dtype=torch.bool)))[1]
            assert torch.equal(index.to_tensor(-1), ALONG[name](data)[1]), (size, dtype)


# ---------------------------------------------------------------------------------------------- each with its bug


@pytest.mark.parametrize("name", ["median", "nanmedian"])
@pytest.mark.parametrize("valid", ["no mask", "all", "rows", "some"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_median_of_an_expanded_dimension(name: str, valid: str, dim: int) -> None:
    """Torch's kernel reads beyond its copy of the slice."""
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).unsqueeze(dim)
    rows = torch.tensor([True, False, True, True])[:, None].expand(4, 6).unsqueeze(dim)
    some = torch.rand(data.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    mask = {"no mask": None, "all": torch.ones_like(rows), "rows": rows, "some": some}[valid]
    x = md.masked_tensor(data, mask) if mask is not None else md.as_masked_tensor(data)
    sizes = [-1] * 3
    sizes[dim] = 5
    assert x.expand(sizes).stride(dim) == 0
    found, index = getattr(x.expand(sizes), name)(dim)
    torch.testing.assert_close(found.to_tensor(0), x.squeeze(dim).to_tensor(0), rtol=0, atol=0)
    assert ((index.to_tensor(0) >= 0) & (index.to_tensor(0) < 5)).all()


@pytest.mark.parametrize("op", [aten.median.dim, aten.nanmedian.dim])
def test_torch_still_misreads_an_expanded_dimension(op: OpOverload) -> None:
    """Once this fails, `own_memory` of the median's rule and `misread` of the fuzzer can go."""
    x = torch.arange(12.0).reshape(3, 4).expand(5, 3, 4)
    assert not torch.equal(op(x, 0)[0], x[0])


@pytest.mark.parametrize("rows", [True, False])
def test_a_hidden_zero_does_not_choose_the_derivative_of_a_product(rows: bool) -> None:
    """torch's derivative of prod has one formula for tensors without a zero, and another, rounded otherwise."""
    data = torch.rand(5, 7, dtype=torch.float64) + 0.5
    mask = torch.tensor([[True], [False], [True], [True], [False]])
    gradients = []
    for hidden in (1.0, 0.0):
        x = md.masked_tensor(torch.where(mask, data, hidden), mask if rows else mask.expand(5, 7), requires_grad=True)
        x.prod(1).to_tensor(1).sum().backward()
        gradients.append(x.grad.to_tensor(0))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["median", "var", "norm"])
def test_torch_masked_over_the_first_dimension_of_a_packed_batch(name: str, dim: int) -> None:
    """It is over the last one of a view of the batch, which stays packed."""
    dense = md.from_lengths(torch.arange(20.0).reshape(4, 5), torch.tensor([5, 3, 0, 4]))
    reduced = getattr(torch.masked, name)
    options = {"norm": {"ord": 2, "dim": dim}, "var": {"dim": dim, "unbiased": True}}.get(name, {"dim": dim})
    md.testing.assert_close(reduced(dense.to_packed(), **options), reduced(dense, **options), equal_nan=True)


@pytest.mark.parametrize("interpolation", ["linear", "lower", "higher", "nearest", "midpoint"])
@pytest.mark.parametrize("hidden", [NAN, INF, -INF, 0.0])
def test_hidden_rows_do_not_reach_the_gradient_of_levels(hidden: float, interpolation: str) -> None:
    """Rows that are invalid as a whole were not filled, and inf - inf is NaN in the derivative by the levels."""
    data, q = torch.tensor([[1.0, 2.0, 4.0], [hidden] * 3]), torch.tensor([0.25, 0.9], requires_grad=True)
    record = Dense(data.requires_grad_(), torch.tensor([[1], [0]], dtype=torch.int8))
    apply(aten.quantile.default, record, Dense(q), 1, interpolation=interpolation).data.sum().backward()
    alone = q.detach().requires_grad_()
    torch.tensor([1.0, 2.0, 4.0]).requires_grad_().quantile(alone, interpolation=interpolation).sum().backward()
    assert torch.equal(*((t.grad if t.grad is not None else torch.zeros(2)) for t in (q, alone)))


def test_statistics_of_nan_of_integers_and_of_one_variable() -> None:
    x = md.masked_tensor([1.0, 7.0, NAN, 5.0], [True, False, True, True])
    assert x.quantile(0.5).isnan().item()
    assert x.nanquantile(0.5).item() == 3
    with pytest.raises(RuntimeError, match=r"in the range \[0, 1\]"):
        x.quantile(1.5)
    with pytest.raises(RuntimeError, match="interpolation must be one of"):
        x.quantile(0.5, interpolation="cubic")
    numbers = md.masked_tensor([1, 7, 3, 5], [True, False, True, True])
    with pytest.raises(RuntimeError, match="either float or double"):
        numbers.quantile(0.5)
    assert (numbers.cov().item(), numbers.cov().dtype, numbers.corrcoef().item()) == (4.0, torch.float32, 1.0)
    constant = md.masked_tensor(torch.full((2, 5), 0.1), torch.tensor([[1, 1, 0, 1, 1]]) > 0)
    assert (constant.cov().get_data().diagonal() >= 0).all()


# ------------------------------------------------------------------------------------- counting, eight bytes at a time

SHAPES = [(4096, 24), (24, 4096), (3, 300, 128), (70_000,), (2041 * 8,), (8, 8, 8, 256), (1, 65_536), (257, 8), (8, 7)]


@given(st.sampled_from(SHAPES), st.data(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0, 3, 8]))
def test_counts_are_exact(
    shape: tuple[int, ...], data: st.DataObject, keepdim: bool, share: float, offset: int
) -> None:
    """Also in lanes that are full: 255 ones fit into one, 256 would not."""
    dims = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    ones = (torch.rand(math.prod(shape) + offset, generator=generator) < share).to(torch.int8)[offset:].view(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validity, "_WORTH_IT", {"cpu": 1})
        count = count_ones(ones, dims, keepdim)
    assert torch.equal(count.to(torch.int64), ones.sum(dims, keepdim=keepdim)), (dims, offset)


class Sums(TorchDispatchMode):
    """The dtype and the number of elements of what is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.sum:
            self.seen.append((args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_a_large_mask_is_not_summed_byte_by_byte(dims: tuple[int, ...]) -> None:
    ones = torch.ones(1 << 10, 1 << 10, dtype=torch.int8)
    with Sums() as sums:
        count_ones(ones, dims, False)
    assert max(n for dtype, n in sums.seen if dtype is torch.int64) <= 1 << 17
    assert max(n for dtype, n in sums.seen if dtype is not torch.int64) <= 1 << 13
