"""Masked tensors print as torch prints their data, with -- where invalid, in every storage and under every option."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline as expect
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import masked_dispatch as md
from storages import LAYOUTS

INDENT = len("masked_tensor(")
STORAGES = [torch.strided, *LAYOUTS, torch.jagged]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"precision": 2},
    {"precision": 7, "linewidth": 60},
    {"sci_mode": True},
    {"sci_mode": False},
    {"linewidth": 40},
    {"linewidth": 10},
    {"profile": "short"},
    {"profile": "full"},
    {"threshold": 4, "edgeitems": 1},
    {"threshold": 4, "edgeitems": 2, "linewidth": 50},
    {"threshold": 4, "edgeitems": 0},
]
NUMBERS: dict[str, Tensor] = {
    "floats": torch.linspace(-3, 3, 90).reshape(3, 30),
    "whole floats": torch.arange(24.0).reshape(2, 3, 4),
    "of many sizes": torch.tensor([1e-3, 1.0, 12345.678, float("inf"), float("nan")]),
    "integers": torch.arange(-7, 65).reshape(8, 9),
    "bools": torch.arange(60).reshape(2, 30) % 3 == 0,
    "unsigned": torch.tensor([0, 2**64 - 1], dtype=torch.uint64),
    "complex": torch.complex(torch.linspace(-3, 3, 60), torch.linspace(20, -1, 60)).reshape(2, 30),
    "whole complex": torch.tensor([1 - 2j, 3 + 10j, complex(1, float("inf"))]),
    "half": torch.linspace(-300, 300, 30).half(),
    "bfloat16": torch.linspace(-300, 300, 30).bfloat16(),
    "one number": torch.tensor(2.5),
    "nothing": torch.empty(0, 3),
    "conjugate": torch.tensor([1.5 - 2j, 3 + 10j]).conj(),
    "negative zero": torch.tensor([complex(1, -0.0), complex(-1, 0)]),
    "negative infinity": torch.tensor([complex(1, float("-inf")), 1j], dtype=torch.complex128),
    "negative of an imaginary part": torch.tensor([1.5 - 2j, 3 + 10j]).conj().imag,
    "five dimensions": torch.arange(72).reshape(2, 3, 1, 3, 4),
}
NUMBERS |= {
    str(dtype): torch.tensor([0.0, 0.5, -448, 3]).to(dtype)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
}
NUMBERS["float4"] = torch.tensor([192, 29, 63], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


def body_of(printed: str) -> str:
    return printed[INDENT : printed.rindex("]") + 1] if "[" in printed else printed[INDENT:].partition(",")[0]


@pytest.mark.parametrize("numbers", NUMBERS)
def test_all_valid_tensors_print_as_in_torch(numbers: str) -> None:
    data = NUMBERS[numbers]
    assert body_of(repr(md.as_masked_tensor(data))) == torch._tensor_str._tensor_str(data, INDENT)


@pytest.mark.parametrize(
    "options, numbers",
    zip(OPTIONS, cycle(["floats", "complex", "of many sizes", "integers", "half"]), strict=False),
    ids=str,
)
def test_all_valid_tensors_print_as_in_torch_under_its_options(numbers: str, options: dict[str, Any]) -> None:
    data = NUMBERS[numbers]
    with torch._tensor_str.printoptions(**options):
        assert body_of(repr(md.as_masked_tensor(data))) == torch._tensor_str._tensor_str(data, INDENT)


def stored(x: md.MaskedTensor, layout: torch.layout) -> md.MaskedTensor:
    return x.to_layout(layout, blocksize=(2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None)


def holey(hidden: float, rows: int = 4, columns: int = 6) -> md.MaskedTensor:
    data = torch.arange(float(rows * columns)).reshape(rows, columns) / 4
    mask = data.to(torch.int64) % 3 != 0
    return md.masked_tensor(torch.where(mask, data, hidden), mask)


@pytest.mark.parametrize("options, layout", zip(OPTIONS, cycle(STORAGES), strict=False), ids=str)
def test_every_storage_prints_the_same_and_nothing_under_the_mask(
    layout: torch.layout, options: dict[str, Any]
) -> None:
    with torch._tensor_str.printoptions(**options):
        texts = {body_of(repr(stored(holey(hidden), layout))) for hidden in (0.0, float("nan"), 1e38, -0.125, 123456.5)}
        dense = holey(7.0) if layout is not torch.jagged else stored(holey(7.0), layout).to_dense()
        assert texts == {body_of(repr(dense))}


def of_rows(layout: torch.layout, whole: bool) -> md.MaskedTensor:
    """(2, 3, 4), of which rows are stored, one element of them invalid if they are not `whole`."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)[..., None].repeat(1, 1, 4)
    mask[0, 0, 2] = whole
    x = md.masked_tensor(torch.arange(24.0).reshape(2, 3, 4), mask)
    if layout is torch.strided:
        return x
    return x.to_packed() if layout is torch.jagged else x.to_layout(layout, sparse_dim=2)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "as stored": lambda x: x,
    "heads first": lambda x: x.unflatten(2, (2, 2)).transpose(1, 2),
    "time first": lambda x: x.transpose(0, 1),
    "merged": lambda x: x.unflatten(2, (2, 2)).transpose(0, 1).flatten(1, 2),
}
SHORT = {"threshold": 4, "edgeitems": 1}


@pytest.mark.parametrize(
    "name, layout, options, whole",
    [
        ("as stored", torch.sparse_coo, {}, True),
        ("as stored", torch.jagged, SHORT, False),
        ("heads first", torch.sparse_coo, SHORT, False),
        ("heads first", torch.jagged, {}, True),
        ("time first", torch.sparse_coo, SHORT, True),
        ("time first", torch.jagged, {}, False),
        ("merged", torch.sparse_coo, {}, False),
        ("merged", torch.jagged, SHORT, True),
    ],
    ids=str,
)
def test_stored_rows_and_permuted_views_print_as_dense_ones(
    name: str, layout: torch.layout, options: dict[str, Any], whole: bool
) -> None:
    view = VIEWS[name]
    with torch._tensor_str.printoptions(**options):
        stored_rows = view(of_rows(layout, whole))
        dense = view(of_rows(torch.strided, whole)) if layout is not torch.jagged else stored_rows.to_dense()
        assert body_of(repr(stored_rows)) == body_of(repr(dense))


def test_an_invalid_complex_number_is_as_wide_as_the_others() -> None:
    x = md.masked_tensor(torch.tensor([[1 - 2j, 3j], [3j, 1 - 2j]]), torch.tensor([[1, 0], [0, 1]]))
    assert repr(x).startswith("masked_tensor([[1.-2.j,     --],\n               [    --, 1.-2.j]]")
    assert repr(x.conj()).startswith("masked_tensor([[1.+2.j,     --],\n")


@pytest.mark.parametrize(
    "dtype, layout", zip(cycle([torch.float8_e5m2, torch.bfloat16]), [*LAYOUTS, torch.jagged], strict=False), ids=str
)
def test_narrow_floats_print(dtype: torch.dtype, layout: torch.layout) -> None:
    data = torch.tensor([[1.0, 2.5], [4.0, 0.0]]).to(dtype)
    hole = "  " if layout is torch.jagged else "--"  # (a packed batch stores what is there)
    x = stored(md.masked_tensor(data, torch.tensor([[1, 1], [0, 1]])), layout)
    assert body_of(repr(x)) == f"[[1.0000, 2.5000],\n               [    {hole}, 0.0000]]"


def test_columns_are_as_wide_as_two_dashes() -> None:
    expect(
        repr(md.masked_tensor(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 0], [1, 1]]))),
        """\
masked_tensor([[ 1, --],
               [ 3,  4]], valid=3/4, True=valid)""",
    )


def test_facts_come_in_torchs_order_and_break_at_the_width_of_a_line() -> None:
    x = md.masked_tensor(torch.tensor([[1.5, 2.0], [3.0, 4.0]]).double(), torch.tensor([[1, 0], [1, 1]]))
    expect(
        repr(x.requires_grad_()),
        """\
masked_tensor([[1.5000,     --],
               [3.0000, 4.0000]], valid=3/4, True=valid, dtype=torch.float64,
              requires_grad=True)""",
    )
    expect(
        repr((x * 2).to_sparse_csr()),
        """\
masked_tensor([[3., --],
               [6., 8.]], valid=3/4, True=valid, dtype=torch.float64,
              stored as torch.sparse_csr, nnz=3, grad_fn=<SparseWrapBackward>)""",
    )
    expect(
        repr(md.as_masked_tensor(torch.empty(2, 3, device="meta", dtype=torch.float16))),
        "masked_tensor(..., size=(2, 3), mask=None, device='meta', dtype=torch.float16)",
    )
    expect(
        repr(md.masked_tensor(torch.zeros(0, 3, dtype=torch.int32))),
        "masked_tensor([], size=(0, 3), valid=0/0, True=valid, dtype=torch.int32)",
    )


def test_a_large_tensor_says_its_size_its_storage_and_the_share_that_is_valid() -> None:
    x = holey(float("nan"), 1000, 1000)
    expect(
        repr(x),
        """\
masked_tensor([[         --,          --,          --,  ...,          --,
                         --,          --],
               [   250.0000,    250.2500,    250.5000,  ...,    499.2500,
                   499.5000,    499.7500],
               [   500.0000,    500.2500,    500.5000,  ...,    749.2500,
                   749.5000,    749.7500],
               ...,
               [249250.0000, 249250.2500, 249250.5000,  ..., 249499.2500,
                249499.5000, 249499.7500],
               [249500.0000, 249500.2500, 249500.5000,  ..., 249749.2500,
                249749.5000, 249749.7500],
               [         --,          --,          --,  ...,          --,
                         --,          --]], size=(1000, 1000),
              valid=666664/1000000 (66.7%), True=valid, stored as torch.strided)""",
    )
    with torch._tensor_str.printoptions(profile="short", sci_mode=True):
        expect(
            repr(x.to_sparse_csc()),
            """\
masked_tensor([[      --,       --,  ...,       --,       --],
               [2.50e+02, 2.50e+02,  ..., 5.00e+02, 5.00e+02],
               ...,
               [2.50e+05, 2.50e+05,  ..., 2.50e+05, 2.50e+05],
               [      --,       --,  ...,       --,       --]],
              size=(1000, 1000), valid=666664/1000000 (66.7%), True=valid,
              stored as torch.sparse_csc, nnz=666664)""",
        )


def test_shares_are_not_rounded_to_all_or_nothing() -> None:
    mask = torch.ones(2001, dtype=torch.bool)
    mask[0] = False
    assert "valid=2000/2001 (>99.9%)" in repr(md.masked_tensor(torch.zeros(2001), mask))
    assert "valid=1/2001 (<0.1%)" in repr(md.masked_tensor(torch.zeros(2001), ~mask))
    assert "valid=0/2001 (0%)" in repr(md.masked_tensor(torch.zeros(2001), mask & ~mask))
    assert "valid=2001/2001 (100%)" in repr(md.masked_tensor(torch.zeros(2001)))


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, dtype=torch.bool)], ids=["no mask", "one for all"])
def test_only_the_shown_elements_of_the_data_are_read(mask: Tensor | None) -> None:
    """What no machine could copy prints."""
    assert "valid=1000000000000/1000000000000 (100%)" in repr(
        md.as_masked_tensor(torch.zeros(()).expand(10**6, 10**6), mask)
    )


def ratings(hidden: float = 0.0) -> md.MaskedTensor:
    """1 % of (200, 300), none of it in a corner."""
    mask = torch.arange(60_000).reshape(200, 300) % 97 == 50
    return md.masked_tensor(torch.where(mask, torch.arange(60_000).reshape(200, 300) % 5 + 0.5, hidden), mask)


@pytest.mark.parametrize("hidden", [0.0, float("nan"), 1e38])
@pytest.mark.parametrize("layout", STORAGES[:-1], ids=str)
def test_a_mostly_invalid_tensor_lists_its_first_and_last_values(layout: torch.layout, hidden: float) -> None:
    x = stored(ratings(hidden), layout)
    assert repr(x).startswith(
        """\
masked_tensor({(  0,  50): 0.5000,
               (  0, 147): 2.5000,
               (  0, 244): 4.5000,
               ...,
               (199, 102): 2.5000,
               (199, 199): 4.5000,
               (199, 296): 1.5000}, size=(200, 300), valid=619/60000 (1.0%),
              True=valid, stored as """
        + str(layout)
    )
    assert repr(x[:, :200].t()).startswith("masked_tensor({(  0,  81): 0.5000,\n               (  0, 178): 0.5000,\n")
    with torch._tensor_str.printoptions(edgeitems=1, sci_mode=True, precision=1):
        assert repr(x).startswith("masked_tensor({(  0,  50): 5.0e-01,\n               ...,\n")


def test_a_mostly_invalid_vector_lists_its_values_side_by_side() -> None:
    mask = torch.arange(2000) % 400 == 399
    x = md.masked_tensor(torch.arange(2000), mask)
    expect(
        repr(x),
        """\
masked_tensor({ 399:  399,  799:  799, 1199: 1199, 1599: 1599, 1999: 1999},
              size=(2000,), valid=5/2000 (0.2%), True=valid,
              stored as torch.strided)""",
    )


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.jagged], ids=str)
def test_a_view_lists_what_it_shows(layout: torch.layout) -> None:
    """Stored rows, the second of whose four heads is valid in one feature; dimensions in another order, and merged."""
    mask = torch.zeros(9, 20, 8, dtype=torch.bool)
    mask[4, :2, 3] = True
    rows = md.masked_tensor(torch.arange(9.0 * 20 * 8).reshape(9, 20, 8), mask)
    x: Any = (
        rows if layout is torch.strided else rows.to_layout(layout, sparse_dim=None if layout is torch.jagged else 2)
    )
    expect(
        repr(x.unflatten(2, (4, 2)).transpose(1, 2)).partition(" size")[0],
        """\
masked_tensor({(4, 1, 0, 1): 643.,
               (4, 1, 1, 1): 651.},""",
    )
    assert repr(x.transpose(0, 1)).startswith("masked_tensor({(0, 4, 3): 643.,\n")


def test_one_validity_for_many_elements_is_listed_without_reading_them() -> None:
    mask = torch.zeros(10**6, 1, dtype=torch.bool)
    mask[70] = True
    text = repr(md.as_masked_tensor(torch.full((), 2.5).expand(10**6, 10**6), mask))
    assert text.startswith("masked_tensor({(70,      0): 2.5000,\n               (70,      1): 2.5000,\n")
    assert "(70, 999999): 2.5000}, size=(1000000, 1000000)" in text


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_huge_shapes_print_what_is_stored(layout: torch.layout) -> None:
    indices = torch.tensor([[0, 2**20 - 1], [1, 2**30 - 1]])
    stored_by_torch = torch.sparse_coo_tensor(
        indices, torch.tensor([1.0, 2.0]), (2**20, 2**30), is_coalesced=True, check_invariants=True
    )
    x = md.as_masked_tensor(stored_by_torch).to_layout(layout)
    text = repr(x)
    assert text.startswith("masked_tensor([[--, 1., --,  ..., --, --, --]")
    assert "[--, --, --,  ..., --, --, 2.]]" in text
    assert "valid=2/1125899906842624 (<0.1%)" in text


@pytest.mark.parametrize("nothing", [(0, 4), (4, 4)], ids=["no rows", "none valid"])
@pytest.mark.parametrize("layout", STORAGES, ids=str)
def test_where_nothing_is_valid(layout: torch.layout, nothing: tuple[int, int]) -> None:
    x = stored(md.masked_tensor(torch.ones(nothing), torch.zeros(nothing, dtype=torch.bool)), layout)
    row = "[[ ,  ,  ,  ],\n" if layout is torch.jagged else "[[--, --, --, --],\n"  # (no row is there, or missing)
    assert repr(x).startswith(f"masked_tensor({row}" if nothing[0] else "masked_tensor([], size=(0, 4)")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_dtypes_with_few_kernels_print_their_numbers() -> None:
    complex32 = torch.tensor([1.5 - 2j, 3 + 10j]).to(torch.complex32)
    assert body_of(repr(md.as_masked_tensor(complex32))) == torch._tensor_str._tensor_str(complex32, INDENT)
    powers = torch.tensor([0.5, 8.0, 2.0]).to(torch.float8_e8m0fnu)
    assert body_of(repr(md.as_masked_tensor(powers, torch.tensor([1, 0, 1])))) == "[0.5000,     --, 2.0000]"


def test_dtypes_without_any_kernels_print_their_bytes() -> None:
    data = torch.tensor([200, 29, 3], dtype=torch.uint8)
    for dtype in (torch.bits8, torch.uint4, torch.int3):
        x = md.as_masked_tensor(data.view(dtype), torch.tensor([1, 0, 1]))
        assert repr(x).startswith("masked_tensor([200,  --,   3], valid=2/3, True=valid, dtype=torch.")


def test_autograds_facts_are_torchs() -> None:
    leaf = md.masked_tensor(torch.ones(1), requires_grad=True)
    assert repr(leaf).endswith("True=valid, requires_grad=True)")
    assert repr(leaf.to_sparse().detach().requires_grad_()).endswith("nnz=1,\n              requires_grad=True)")
    assert repr(leaf[:1]).endswith("grad_fn=<SliceBackward0>)")
    assert repr(torch.nn.Parameter(leaf.detach())).startswith("Parameter(masked_tensor([1.], ")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf.detach(), leaf.detach() * 2)
        assert "tangent=masked_tensor([2.]" in repr(dual)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", STORAGES, ids=str)
def test_no_mode_sees_that_a_tensor_is_printed(layout: torch.layout) -> None:
    x = stored(holey(0.0), layout)
    text = repr(x)
    with Counting() as counting, torch.device("meta"):
        assert repr(x) == text
    assert counting.calls == 0
