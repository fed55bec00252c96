"""A test for each bug found at the rim: fills, arrays of NumPy, comparisons, indices, plain results, pieces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import masked_dispatch as md
import op_registry
from op_registry.authoring import ELEMENTWISE, masked_rule
from storages import STORAGES

NAN, INF = float("nan"), float("inf")
T, F = True, False
MASK = torch.tensor([[T, T, F, T], [T, F, T, T], [F, F, F, F], [T, T, T, T]])

layouts = pytest.mark.parametrize("layout", STORAGES)


def sample(layout: str = "dense", dtype: torch.dtype = torch.float32) -> md.MaskedTensor:
    """0 … 15 as 4 × 4, stored so."""
    return STORAGES[layout](md.masked_tensor(torch.arange(16).reshape(4, 4).to(dtype), MASK))


def state(x: Tensor) -> tuple[list[object], list[object]]:
    assert isinstance(x, md.MaskedTensor)
    return x.get_mask().tolist(), x.to_tensor(1).tolist()


# -------------------------------------------------------------------------------- pieces that are no views

PIECES: dict[str, Callable[[Tensor], Any]] = {
    "unsafe_chunk": lambda x: x.unsafe_chunk(2),
    "unsafe_split": lambda x: x.unsafe_split(2),
    "unsafe_split_with_sizes": lambda x: x.unsafe_split_with_sizes([1, 3]),
    "unsafe_chunk of columns": lambda x: x.unsafe_chunk(2, 1),
    "_unsafe_view": lambda x: [torch.ops.aten._unsafe_view(x, (2, 8))],
}


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("mask", [MASK, MASK[:1], None])
def test_pieces_share_all_or_nothing(pieces: str, mask: Tensor | None) -> None:
    x = md.masked_tensor(torch.arange(16.0).reshape(4, 4), mask)
    before = state(x)
    for piece in PIECES[pieces](x):
        piece.fill_(50.0)
    assert state(x) == before
    found = PIECES[pieces](x)
    kept = [state(piece) for piece in found]
    x.fill_(60.0)
    assert [state(piece) for piece in found] == kept


@pytest.mark.parametrize("pieces", PIECES)
def test_gradients_pass_through_pieces(pieces: str) -> None:
    x = sample().requires_grad_()
    sum((piece * 2).sum() for piece in PIECES[pieces](x)).backward()
    assert torch.equal(x.grad.get_mask(), MASK)
    assert (x.grad == 2).to_tensor(T).all()


# --------------------------------------------------------------------------------------------------------------- fills

TOO_MUCH: list[tuple[torch.dtype, Any, str]] = [
    (torch.int64, NAN, "is no integer"),
    (torch.int64, 1.5, "is no integer"),
    (torch.int64, INF, "is no integer"),
    (torch.int64, 2**63, "lies outside -9223372036854775808 to 9223372036854775807"),
    (torch.int32, 1e30, "lies outside -2147483648 to 2147483647, the range of torch.int32"),
    (torch.uint8, -1, "lies outside 0 to 255, the range of torch.uint8"),
    (torch.uint8, 256, "lies outside 0 to 255"),
    (torch.int8, 2j, "is complex"),
    (torch.float32, 2j, "is complex, which cannot be a value of torch.float32"),
    (torch.float32, 1e40, "is beyond the greatest value of torch.float32"),
    (torch.float16, 1e5, "is beyond the greatest value of torch.float16"),
    (torch.complex64, 1e40j, "is beyond the greatest value of torch.complex64"),
    (torch.bool, 2, "is neither True nor False"),
    (torch.bool, NAN, "is neither True nor False"),
]


@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize("dtype, fill, problem", TOO_MUCH)
def test_a_fill_that_the_dtype_has_no_room_for_is_refused(
    dtype: torch.dtype, fill: Any, problem: str, layout: str
) -> None:
    with pytest.raises(ValueError, match=rf"^the fill \S+ {problem}"):
        sample(layout, dtype).to_tensor(fill)


FITS: list[tuple[torch.dtype, Any, Any]] = [
    (torch.int64, 3.0, 3),
    (torch.int64, True, 1),
    (torch.int64, np.int64(3), 3),
    (torch.float32, np.float32(0.5), 0.5),
    (torch.uint8, 255, 255),
    (torch.float32, 0.1, torch.tensor(0.1).item()),
    (torch.float32, -INF, -INF),
    (torch.float16, 2, 2.0),
    (torch.float32, 2 + 0j, 2.0),
    (torch.complex64, 2j, 2j),
    (torch.bool, 1, True),
    (torch.bool, False, False),
]


@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize("dtype, fill, expected", FITS)
def test_a_fill_that_fits_is_put_in_place(dtype: torch.dtype, fill: Any, expected: Any, layout: str) -> None:
    filled = sample(layout, dtype).to_tensor(fill)
    assert filled.dtype is dtype
    assert type(filled) is Tensor
    assert filled[2].tolist() == [expected] * 4


def test_other_fills_are_refused_with_what_to_do() -> None:
    x = sample()
    for fill in ("mean", None, [0.0]):
        with pytest.raises(
            TypeError, match=r"^the fill is .*; it has to be a number or a plain tensor that broadcasts"
        ):
            x.to_tensor(fill)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \(2, 4, 4\), which does not broadcast to the tensor's shape \(4, 4\)"):
        x.to_tensor(torch.ones(2, 4, 4))
    with pytest.raises(ValueError, match=r"shape \(3,\), which does not broadcast"):
        x.to_tensor(torch.ones(3))
    with pytest.raises(TypeError, match="the fill is itself a masked tensor"):
        x.to_tensor(sample())
    with pytest.raises(ValueError, match=r"the fill has dtype torch.float32, whose values torch.int64 cannot hold"):
        sample(dtype=torch.int64).to_tensor(torch.ones(4))
    with pytest.raises(ValueError, match="is no integer"):
        sample("bsr", torch.int64).to_torch_sparse(NAN)


def test_a_tensor_that_broadcasts_fills_in_a_compiled_region_too() -> None:
    x, row = sample(), torch.arange(4.0)
    expected = torch.where(MASK, torch.arange(16.0).reshape(4, 4), row)
    assert torch.equal(x.to_tensor(row), expected)
    filled = torch.compile(lambda x, row: (x.to_tensor(row), x.to_tensor(-1)), backend="aot_eager", fullgraph=True)
    assert torch.equal(filled(x, row)[0], expected)
    with pytest.raises(Exception, match="is no integer"):
        torch.compile(lambda x: x.to_tensor(1.5), backend="aot_eager", fullgraph=True)(sample(dtype=torch.int64))


# ------------------------------------------------------------------------------------------------------ arrays of NumPy


@pytest.mark.parametrize("make", [md.masked_tensor, md.as_masked_tensor, md.from_nan])
def test_a_masked_array_keeps_its_mask(make: Callable[..., md.MaskedTensor]) -> None:
    array = np.ma.array([[1.0, -999.0, 3.0], [4.0, 5.0, -999.0]], mask=[[0, 1, 0], [0, 0, 1]])
    x = make(array)
    assert x.get_mask().tolist() == (~array.mask).tolist()
    assert x.mean().item() == array.mean()
    assert x.dtype is torch.float64


def test_a_masked_array_and_a_mask_intersect() -> None:
    array = np.ma.array([1.0, 2.0, 3.0], mask=[T, F, F])
    assert md.masked_tensor(array, torch.tensor([T, T, F])).get_mask().tolist() == [F, T, F]
    assert md.as_masked_tensor(array, [1, 1, 0]).get_mask().tolist() == [F, T, F]
    assert md.from_lengths(np.ma.array([[1.0, 2.0]], mask=[[T, F]]), torch.tensor([2])).get_mask().tolist() == [[F, T]]
    array = np.ma.array([1.0, NAN, 3.0], mask=[T, F, F])
    assert md.from_nan(array).get_mask().tolist() == [F, F, T]  # type: ignore[arg-type]


def test_a_masked_array_without_a_mask_is_valid_everywhere_and_shares_memory() -> None:
    array = np.ma.array([1.0, 2.0])
    x = md.as_masked_tensor(array)
    assert x.get_mask().all()
    array[0] = 7.0
    assert x[0].item() == 7.0


def test_a_masked_array_as_mask_is_refused() -> None:
    with pytest.raises(TypeError, match="the mask is itself a masked array of NumPy"):
        md.masked_tensor(torch.zeros(2), np.ma.array([T, F], mask=[F, T]))


def test_numpy_is_not_imported_for_it() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; import torch, masked_dispatch as md; "
        "assert md.masked_tensor([1., 2.], [True, False]).sum().item() == 1"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# -------------------------------------------------------------------------------------------------------- plain results


@pytest.fixture
def twice() -> Any:
    with torch.library._scoped_library("rimzoo", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        yield torch.ops.rimzoo.twice.default


@pytest.mark.parametrize("layout", ["dense", "csr", "bsr"])
@pytest.mark.parametrize("result", ["data", "several"])
def test_a_rule_that_returns_a_plain_tensor_is_refused_by_name(twice: Any, layout: str, result: str) -> None:
    with op_registry.registry.overlay():
        masked_rule(twice, category=ELEMENTWISE)(lambda x: x.data if result == "data" else (x, x.data))
        with pytest.raises(TypeError, match=r"^the rule of rimzoo::twice \[.*test_rim_zoo_memory.py:\d+\] returned a"):
            twice(sample(layout))


def test_a_lowering_that_returns_a_plain_tensor_is_refused_by_name(twice: Any) -> None:
    from op_registry.sparse.record import Sparse

    with op_registry.registry.overlay():
        rule = masked_rule(twice, category=ELEMENTWISE)(lambda x: x.like(x.data * 2))
        rule.lowering(Sparse)(lambda op, x: x.values.data)
        assert isinstance(twice(sample()), md.MaskedTensor)
        with pytest.raises(TypeError, match=r"returned a plain tensor of shape .*; a rule returns Dense"):
            twice(sample("csr"))


# --------------------------------------------------------------------------------------------------------- assert_close


@pytest.mark.parametrize("assert_close", [torch.testing.assert_close, md.testing.assert_close])
@layouts
def test_assert_close_compares_masks(assert_close: Callable[..., None], layout: str) -> None:
    x = sample(layout)
    assert_close(x, sample(layout))
    assert_close(x, sample())
    assert_close([x, {"a": x}], [sample(), {"a": sample()}])
    fewer = x.mask_with(torch.tensor([T, F, T, T]))
    with pytest.raises(
        AssertionError, match=r"Masks are not equal!\n\nMismatched elements: 2 / 16 \(12.5%\)\n"
    ) as error:
        assert_close(x, fewer)
    assert "First at index (0, 1): valid in actual, invalid in expected" in str(error.value)
    assert "Valid elements: 10 in actual, 8 in expected" in str(error.value)
    with pytest.raises(AssertionError, match="Masks are not equal"):
        assert_close(x, x.to_tensor(0))
    with pytest.raises(AssertionError, match="Masks are not equal"):
        assert_close(x.to_tensor(0), x)
    with pytest.raises(AssertionError, match="Tensor-likes are not close!"):
        assert_close(x, x + 1)
    assert_close(x, x + 1, atol=1, rtol=0)
    with pytest.raises(AssertionError, match="The values for attribute 'shape' do not match"):
        assert_close(x, x[:2])
    with pytest.raises(AssertionError, match="The values for attribute 'dtype' do not match"):
        assert_close(x, x.double())


def test_assert_close_sees_nothing_under_a_mask() -> None:
    a = md.masked_tensor([1.0, NAN], [T, F])
    b = md.masked_tensor([1.0, INF], [T, F])
    md.testing.assert_close(a, b)
    md.testing.assert_close(md.masked_tensor([NAN, 1.0], [T, F]), md.masked_tensor([NAN, 2.0], [T, F]), equal_nan=True)
    with pytest.raises(AssertionError, match="Masks are not equal"):
        md.testing.assert_close(md.masked_tensor([1.0, 2.0], [T, F]), md.masked_tensor([5.0, 6.0], [F, T]))
    md.testing.assert_close(md.masked_tensor(torch.zeros(2)), torch.zeros(2))
    torch.testing.assert_close(torch.ones(2), torch.ones(2))
    with pytest.raises(AssertionError, match="Tensor-likes are not equal"):
        torch.testing.assert_close(torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))


# ----------------------------------------------------------------------------------------------------------- compressed


@layouts
def test_compressed_gives_the_valid_elements_in_order(layout: str) -> None:
    x = sample(layout).requires_grad_()
    found = x.compressed()
    assert type(found) is Tensor
    assert found.tolist() == torch.arange(16.0).reshape(4, 4)[MASK].tolist()
    (found * torch.arange(10.0)).sum().backward()
    assert isinstance(x.grad, md.MaskedTensor)
    assert torch.equal(x.grad.get_mask(), MASK)
    assert x.grad.to_tensor(0)[MASK].tolist() == list(range(10))


@pytest.mark.parametrize("mask", [None, torch.tensor([T, F, T, T]), torch.zeros(4, 4, dtype=torch.bool)])
def test_compressed_is_a_copy(mask: Tensor | None) -> None:
    data = torch.arange(16.0).reshape(4, 4).t()
    x = md.as_masked_tensor(data, mask)
    found = x.compressed()
    assert found.tolist() == data[torch.ones(4, 4, dtype=torch.bool) if mask is None else mask.expand(4, 4)].tolist()
    found.fill_(-1.0)
    assert data.min() >= 0
    assert md.masked_tensor(5.0).compressed().tolist() == [5.0]


def test_compressed_in_a_compiled_region() -> None:
    run = torch.compile(lambda x: x.compressed() * 2, backend="aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert run(sample()).tolist() == (torch.arange(16.0).reshape(4, 4)[MASK] * 2).tolist()


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize("option", [{"skipna": False}, {"min_count": 0}])
def test_options_of_this_library_s_functions_are_found(option: dict[str, Any], layout: str) -> None:
    (name, value) = next(iter(option.items()))
    for method in ("sum", "mean", "std", "amax", "nansum"):
        instead = rf"use masked_dispatch.{method}\(x, …, {name}={value}\)"
        message = rf"^x.{method}\(\) is torch's method and has no {name}; {instead}"
        with pytest.raises(TypeError, match=message):
            getattr(sample(layout), method)(1, **option)
    with pytest.raises(TypeError, match=r"^x.cumsum\(\) is torch's method and has no skipna"):
        sample(layout).cumsum(1, skipna=False)
    assert sample(layout).sum(1, keepdim=True).shape == (4, 1)
    rows = torch.compile(lambda x: x.sum(1), backend="aot_eager", fullgraph=True)(sample())
    assert rows.get_mask().tolist() == [T, T, F, T]


def test_exchanged_data_and_mask_are_suspected() -> None:
    for make in (md.masked_tensor, md.as_masked_tensor):
        for data in (torch.arange(16.0).reshape(4, 4), torch.arange(16).reshape(4, 4)):
            with pytest.raises(
                (TypeError, ValueError), match=r"Are the two arguments exchanged\? The data comes first"
            ):
                make(MASK, data)
    with pytest.raises(TypeError, match=r"Compare it: mask > 0.5\.$"):
        md.masked_tensor(torch.zeros(2), torch.zeros(2))


# -------------------------------------------------------------------------------- indices and layouts

PLACES: dict[str, Any] = {
    "np.int64": np.int64(1),
    "np.int64, number": (np.int64(1), 2),
    "np.int32, slice": (np.int32(2), slice(1, 3)),
    "None": None,
    "None, number": (None, 1),
    "number, None": (1, None),
    "None, slice": (None, slice(1, 3), 2),
    "..., None": (..., None),
    "index, number": (torch.tensor([0, 2]), 1),
    "number, index": (1, torch.tensor([0, 3])),
    "masked index, number": (md.masked_tensor(torch.tensor([0, 2]), torch.tensor([T, F])), 1),
}


@pytest.mark.parametrize("layout", [name for name in STORAGES if name != "permuted"])
@pytest.mark.parametrize("place", PLACES)
def test_assignment_by_index_is_that_of_dense_storage(place: str, layout: str) -> None:
    x, expected = sample(layout), sample()
    for value in (5.0, torch.tensor(6.0), md.masked_tensor(7.0), md.masked_tensor(8.0, F)):
        x[PLACES[place]] = value
        expected[PLACES[place]] = value
        assert state(x) == state(expected)


@pytest.mark.parametrize("place", [None, (None, 1), (1, None), (slice(0, 2), None)])
def test_assigned_values_broadcast_to_new_dimensions(place: Any) -> None:
    x, expected = sample("csr"), sample()
    values = torch.arange(100.0, 100 + expected[place].numel()).reshape(expected[place].shape)
    x[place] = values
    expected[place] = values
    assert state(x) == state(expected)


@layouts
def test_a_number_of_another_kind_is_not_assigned(layout: str) -> None:
    x = sample(layout)
    before = state(x)
    with pytest.raises(RuntimeError, match="value cannot be converted to type float without overflow"):
        x[1] = 1j  # type: ignore[call-overload]
    assert state(x) == before


@layouts
def test_blocks_do_not_depend_on_the_storage_they_are_made_from(layout: str) -> None:
    data, mask = torch.arange(40.0).reshape(2, 5, 4), torch.arange(40).reshape(2, 5, 4) % 3 > 0
    x = md.masked_tensor(data, mask)
    if layout == "permuted":
        stored = x.transpose(0, 1).to_sparse(1).transpose(0, 1) * 1  # type: ignore[attr-defined]
    elif layout in ("bsr", "bsc"):
        stored = x.to_layout(getattr(torch, f"sparse_{layout}"), sparse_dim=2, blocksize=(1, 5))
    else:
        stored = STORAGES[layout](x)
    blocks, expected = (t.to_layout(torch.sparse_bsr, blocksize=(1, 2)) for t in (stored, x))
    assert state(blocks) == state(expected) == state(x)
    assert blocks._kept_values.shape == expected._kept_values.shape
    assert blocks._pattern.block == (1, 2)
    with pytest.raises(ValueError, match=r"blocks of \(2, 2\) do not divide a matrix of \(5, 4\)"):
        stored.to_layout(torch.sparse_bsr, blocksize=(2, 2))


@pytest.mark.parametrize("mask", [T, F])
def test_a_tensor_without_dimensions_stays_dense(mask: bool) -> None:
    x = md.masked_tensor(torch.tensor(1.0), torch.tensor(mask))
    for stored in (x.to_sparse(), x.to_layout(torch.sparse_coo), x.to_sparse(0)):
        assert stored.storage_layout is torch.strided
        assert state(stored) == state(x)
    assert state(x.to_sparse().to_dense()) == state(x)
    with pytest.raises(ValueError, match="a tensor without dimensions cannot be stored sparsely"):
        x.to_layout(torch.sparse_csr)


def test_the_largest_elements_of_a_vector() -> None:
    x = md.masked_tensor([3.0, 9.0, 1.0, 5.0], [T, F, T, T])
    top = md.sparse_topk(x, 2)
    assert top.storage_layout is torch.sparse_coo
    assert state(top) == ([T, F, F, T], [3.0, 1.0, 1.0, 5.0])
    assert md.sparse_relu(torch.tensor([-1.0, 2.0])).compressed().tolist() == [2.0]
    assert md.sparse_topk(sample(), 2).storage_layout is torch.sparse_csr


META: dict[str, Callable[[Tensor, Tensor], object]] = {
    "x[i] = v": lambda x, i: x.__setitem__(i, 5.0),
    "x[i] = t": lambda x, i: x.__setitem__(i, torch.zeros(1, 4)),
    "x[i, j] = v": lambda x, i: x.__setitem__((i, i), 5.0),
    "index_put_": lambda x, i: x.index_put_((i,), torch.tensor(5.0)),
    "index_fill_": lambda x, i: x.index_fill_(0, i, 5.0),
    "index_copy_": lambda x, i: x.index_copy_(0, i, torch.zeros(1, 4)),
    "index_add_": lambda x, i: x.index_add_(0, i, torch.zeros(1, 4)),
    "scatter_": lambda x, i: x.scatter_(0, i[None], 5.0),
    "masked_fill_": lambda x, i: x.masked_fill_(i > 0, 5.0),
    "copy_": lambda x, i: x.copy_(i),
    "add_": lambda x, i: x.add_(i),
}


@layouts
@pytest.mark.parametrize("write", META)
def test_what_lies_on_meta_is_not_written(write: str, layout: str) -> None:
    x = sample(layout)
    before = state(x)
    with pytest.raises(RuntimeError, match=r"meta"):
        META[write](x, torch.tensor([1], device="meta"))
    assert state(x) == before
