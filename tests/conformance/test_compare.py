"""What the laws compare with: the same answer on every processor, also where one gives NaN and another a number."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry import registry
from op_registry.authoring import Dense
from op_registry.conformance.compare import bit_difference, difference
from op_registry.conformance.trials import Settings, run_operator

EAGER = "masked_dispatch.conformance_subject:eager"

# Every dtype that has a NaN: float4_e2m1fn_x2, two numbers in a byte, has none, and torch computes nothing in it.
FLOATING = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point} - {torch.float4_e2m1fn_x2},
    key=str,
)
FLOAT8 = [dtype for dtype in FLOATING if dtype.itemsize == 1]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
COMPARISONS = [difference, bit_difference]


def nans(dtype: torch.dtype) -> Tensor:
    """NaN in each way in which a byte can say it; in wider dtypes, in two."""
    if dtype.itemsize == 1:
        every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
        return every[every.float().isnan()]
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    found = torch.tensor([-1, torch.iinfo(integers).max], dtype=integers).view(dtype)
    assert found.isnan().all()
    return found


def test_torch_has_float8() -> None:
    assert len(FLOAT8) >= 5


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_every_nan_is_one_value(compare: Any, dtype: torch.dtype) -> None:
    found = nans(dtype)
    for one in found:
        assert compare(one.expand(len(found)).clone(), found) is None


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_nan_is_no_number(compare: Any, dtype: torch.dtype) -> None:
    nan = nans(dtype)[:1].expand(3).clone()
    number = torch.tensor([2.0, torch.nan, 2.0]).to(dtype)
    assert compare(nan, number) == "2 of 3 values differ, the first nan instead of 2.0"
    assert compare(number, nan) == "2 of 3 values differ, the first 2.0 instead of nan"
    assert compare(nan, number, torch.tensor([False, True, False])) is None


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_one_float8_number_is_no_other(compare: Any, dtype: torch.dtype) -> None:
    mine, theirs = (torch.tensor([torch.nan, 1.0, value]).to(dtype) for value in (2.0, 4.0))
    assert compare(mine, theirs) == "1 of 3 values differ, the first 2.0 instead of 4.0"


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_nan(compare: Any, dtype: torch.dtype) -> None:
    nan = torch.tensor([complex(torch.nan, 1), complex(torch.nan, torch.nan)], dtype=dtype)
    assert compare(nan, nan.clone()) is None
    assert compare(nan.conj(), nan.conj().clone()) is None
    assert compare(nan, torch.ones(2, dtype=dtype)) is not None


def test_zeros_differ_in_a_bit_and_not_in_value() -> None:
    zeros = torch.tensor([0.0]), torch.tensor([-0.0])
    assert difference(*zeros) is None
    assert bit_difference(*zeros) == "1 of 1 values differ, the first 0.0 instead of -0.0"


@pytest.mark.parametrize("compare", COMPARISONS)
def test_nothing_to_compare(compare: Any) -> None:
    assert compare(torch.empty(0, 3), torch.empty(0, 3)) is None
    assert compare(torch.ones(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool)) is None


@pytest.fixture
def scaled_products_of_nan() -> Iterator[list[torch.dtype]]:
    """A processor on which plain torch's products of float8 are NaN: those with AMX, at the time of writing."""
    library = torch.library.Library("aten", "IMPL")
    made: list[torch.dtype] = []

    def scaled_mm(a: Tensor, b: Tensor, *_: Any, out_dtype: torch.dtype | None = None, **__: Any) -> Tensor:
        made.append(out_dtype or a.dtype)
        return torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=made[-1])

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl("_scaled_mm", scaled_mm, "CPU", allow_override=True)
        try:
            yield made
        finally:
            library._destroy()


def test_the_laws_hold_where_plain_torch_gives_nan(scaled_products_of_nan: list[torch.dtype]) -> None:
    """P1 asks for what plain torch gives, and on some processors that is NaN."""
    report = run_operator(
        "torch__scaled_mm",
        Settings(subject=EAGER, laws=("P1", "P2", "P3"), most=2, dtypes="all"),
    )
    assert report.failures == []
    assert report.counts["P1"]["pass"] > 0
    assert any(dtype in FLOAT8 for dtype in scaled_products_of_nan)


def test_a_number_where_plain_torch_gives_nan_is_broken(scaled_products_of_nan: list[torch.dtype]) -> None:
    def ones(
        self: Dense, mat2: Dense, scale_a: Dense, scale_b: Dense, *_: Any, out_dtype: Any = None, **__: Any
    ) -> Dense:
        return Dense(torch.ones(self.shape[0], mat2.shape[1]).to(out_dtype or self.dtype))

    with registry.overlay() as mine:
        mine.replace(torch.ops.aten._scaled_mm.default, ones)
        report = run_operator("torch__scaled_mm", Settings(subject=EAGER, laws=("P1",), most=2, dtypes="all"))
    assert len(report.failures) == sum(report.counts["P1"].values()) > 0
    assert "the first 1.0 instead of nan" in report.failures[0].message


def test_bits_that_plain_torch_does_not_repeat_are_no_interference() -> None:
    """lstsq's gelsy starts from pivots that torch has not initialised: its last bit differs from call to call."""
    settings = Settings(subject=EAGER, laws=("P3",), sample=3, masks=("half_others",), dtypes="float64")
    report = run_operator("linalg_lstsq", settings)
    assert report.failures == []
    assert report.counts["P3"]["pass"] > 0
