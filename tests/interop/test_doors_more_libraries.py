"""polars, xarray, scipy.sparse and tensordict there and back; a library that is absent is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

import masked_dispatch as md
from door_samples import FLOATS, INTEGERS, UNSIGNED, masked, same, shapes
from masked_dispatch import interop
from masked_dispatch.interop import MODULES
from repository import ROOT

# torch says so once a process.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
COLUMNS = (torch.bool, *INTEGERS, *UNSIGNED, *FLOATS)
X = md.masked_tensor([[1.0, float("nan")], [3.0, 4.0]], [[True, False], [True, True]])


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


# ------------------------------------------------------------------------------------------------------------- polars


@given(masked(COLUMNS, shapes(1)), st.text(max_size=2))
def test_series_of_polars_there_and_back(x: md.MaskedTensor, name: str) -> None:
    library("polars")
    series = interop.to_polars(x, name)
    assert series.name == name
    assert series.is_null().to_list() == (~x.get_mask()).tolist()
    same(interop.from_polars(series), x)


@given(masked(COLUMNS, st.tuples(st.integers(0, 4), st.integers(1, 3))))
def test_frames_of_polars_there_and_back(x: md.MaskedTensor) -> None:
    library("polars")
    names = ["a", "b", "c"][: x.shape[1]]
    frame = interop.to_polars(x, names)
    assert frame.columns == names
    same(interop.from_polars(frame), x)
    assert interop.to_polars(interop.from_polars(frame), frame.columns).equals(frame)


def test_what_polars_makes_of_null_and_nan() -> None:
    pl = library("polars")
    x = interop.from_polars(pl.Series([1.0, None, float("nan")]))
    assert x.get_mask().tolist() == [True, False, True]
    assert interop.from_polars(pl.Series([1, None]), dtype=torch.float32).dtype is torch.float32


def test_what_polars_cannot_hold_is_refused() -> None:
    pl = library("polars")
    with pytest.raises(TypeError, match=r"column 't' of dtype String has no equivalent .*series.cast\(pl.Float64\)"):
        interop.from_polars(pl.Series("t", ["a"]))
    with pytest.raises(
        TypeError, match=r"several: 'a' torch.int64, 'b' torch.float64\. Choose one, from_polars\(frame"
    ):
        interop.from_polars(pl.DataFrame({"a": [1], "b": [0.5]}))
    for x, names in ((X, None), (X, ["a"]), (X[0], ["a"]), (X.sum(), None), (X, "a")):
        with pytest.raises(
            ValueError, match="a Series has one dimension and one name, a DataFrame has two dimensions and a name"
        ):
            interop.to_polars(x, names)
    with pytest.raises(TypeError, match=r"polars has no dtype for .*float16, .*: pass x.float\(\)"):
        interop.to_polars(X[0].half())
    with pytest.raises(md.InvalidValueError, match=r"masked_dispatch\.interop"):
        pl.Series(X[0])


# ------------------------------------------------------------------------------------------------------------- xarray


@given(masked((torch.float16, *FLOATS, torch.complex64), shapes(2)))
def test_arrays_of_xarray_there_and_back(x: md.MaskedTensor) -> None:
    library("xarray")
    x = md.missing.nan_to_invalid(x)
    array = interop.to_xarray(x, ["t", "y"], {"t": range(x.shape[0])}, name="n", attrs={"unit": "K"})
    assert array.isnull().to_numpy().tolist() == (~x.get_mask()).tolist()
    same(interop.from_xarray(array), x)
    again = interop.to_xarray(interop.from_xarray(array), array.dims, array.coords, array.name, array.attrs)
    assert again.identical(array)


def test_what_nan_cannot_say_is_refused() -> None:
    xarray = library("xarray")
    same(interop.from_xarray(interop.to_xarray(torch.arange(3))), md.masked_tensor(torch.arange(3)))
    with pytest.raises(ValueError, match=r"torch.int64 does not have, and 1 elements .*\(2, 2\).*x.double\(\)"):
        interop.to_xarray(X.mask_with(X.get_mask()).nan_to_num(0).long())
    with pytest.raises(ValueError, match=r"1 valid elements .* shape \(2,\) are NaN: .*missing.nan_to_invalid\(x\)"):
        interop.to_xarray(torch.tensor([1.0, float("nan")]))
    with pytest.raises(TypeError, match=r"takes a DataArray .*, not a Dataset: .*for name, array in dataset.items"):
        interop.from_xarray(xarray.Dataset())
    with pytest.raises(TypeError, match="has no equivalent in torch"):
        interop.from_xarray(xarray.DataArray(["a"]))


def test_an_array_that_was_not_decoded_is_invalid_where_its_attributes_say_so() -> None:
    xarray = library("xarray")
    raw = np.array([[1, -999, 3], [-1, 5, -999]], dtype=np.int16)
    found = interop.from_xarray(xarray.DataArray(raw, attrs={"_FillValue": np.int16(-999), "missing_value": [-1, -2]}))
    same(found, md.masked_tensor(torch.from_numpy(raw), torch.tensor([[True, False, True], [False, True, False]])))

    stored = np.array([1.0, 9.96921e36], dtype=np.float32)  # the attribute has other digits
    array = xarray.DataArray(stored, attrs={"_FillValue": 9.96921e36})
    assert interop.from_xarray(array).get_mask().tolist() == [True, False]
    assert interop.from_xarray(xarray.DataArray([1.0, np.nan], attrs={"_FillValue": 1.0})).count() == 0


def test_an_attribute_that_names_no_number_is_refused() -> None:
    array = library("xarray").DataArray([1, 2], attrs={"missing_value": "none"})
    with pytest.raises(TypeError, match=r"numbers as the attribute 'missing_value', .* not 'none': .*drop_attrs\(\)$"):
        interop.from_xarray(array)


# ------------------------------------------------------------------------------------------------------- scipy.sparse


SPARSE = (torch.bool, *INTEGERS, *FLOATS, torch.complex64)


@given(masked(SPARSE, shapes(2)), st.sampled_from(["coo", "csr", "csc"]))
def test_sparse_arrays_of_scipy_there_and_back(x: md.MaskedTensor, layout: str) -> None:
    library("scipy")
    stored = x.to_layout(getattr(torch, f"sparse_{layout}"))
    array = interop.to_scipy_sparse(stored)
    assert array.format == layout
    assert array.nnz == int(x.count())
    again = interop.from_scipy_sparse(array)
    assert again.storage_layout is stored.storage_layout
    same(again, x)


@given(masked((torch.float64,), st.sampled_from([(4,), (2, 3, 2)])))
def test_sparse_arrays_of_other_dimensions(x: md.MaskedTensor) -> None:
    library("scipy")
    same(interop.from_scipy_sparse(interop.to_scipy_sparse(x)), x)


def test_blocks_of_scipy() -> None:
    library("scipy")
    x = md.masked_tensor(torch.arange(8.0).reshape(2, 4), torch.tensor([[True, True, False, False]] * 2))
    array = interop.to_scipy_sparse(x.to_sparse_bsr((2, 2)))
    assert array.format == "bsr"
    assert array.toarray().tolist() == x.to_tensor(0).tolist()
    again = interop.from_scipy_sparse(array)
    assert again.storage_layout is torch.sparse_bsr
    same(again, x)
    with pytest.raises(ValueError, match="1 invalid elements lie among the valid ones"):
        interop.to_scipy_sparse(X.to_sparse_bsr((2, 2)))


def test_zeros_and_duplicates_of_scipy() -> None:
    library("scipy")
    import scipy.sparse

    zero = scipy.sparse.csr_array((np.array([0.0, 2.0]), np.array([0, 1]), np.array([0, 2])), shape=(1, 3))
    same(interop.from_scipy_sparse(zero), md.masked_tensor([[0.0, 2.0, 0.0]], [[True, True, False]]).double())
    for kind in (scipy.sparse.csr_array, scipy.sparse.csc_array):
        shape = (1, 3) if kind is scipy.sparse.csr_array else (3, 1)
        twice = kind((np.ones(3), np.array([1, 0, 1]), np.array([0, 3])), shape=shape)
        x = interop.from_scipy_sparse(twice)
        assert x.to_tensor(-1).flatten().tolist() == [1, 2, -1]
        assert twice.nnz == 3
    pairs = scipy.sparse.coo_array((np.ones(2), ([0, 0], [1, 1])), shape=(1, 2))
    assert interop.from_scipy_sparse(pairs).to_tensor(-1).tolist() == [[-1, 2]]


def test_what_scipy_cannot_hold_is_refused() -> None:
    library("scipy")
    import scipy.sparse

    with pytest.raises(TypeError, match=r"coo, csr, csc and bsr, not dok: pass matrix.tocsr\(\)"):
        interop.from_scipy_sparse(scipy.sparse.dok_array((2, 2)))
    with pytest.raises(
        TypeError, match=r"takes a sparse array of SciPy, not an? ndarray: pass scipy\.sparse\.coo_array"
    ):
        interop.from_scipy_sparse(np.ones(2))
    with pytest.raises(TypeError, match=r"scipy.sparse has no dtype for .*float16, .*: pass x.float\(\)"):
        interop.to_scipy_sparse(X.half())
    with pytest.raises(ValueError, match=r"shape \(\) cannot become a sparse array"):
        interop.to_scipy_sparse(X.sum())
    with pytest.raises(RuntimeError, match=r"scipy.sparse has no gradients: pass x.detach\(\)"):
        interop.to_scipy_sparse(X.clone().requires_grad_())


# --------------------------------------------------------------------------------------------------------- tensordict


@given(masked((torch.bool, *INTEGERS, *FLOATS, torch.bfloat16), shapes(2)))
def test_tensordicts_there_and_back(x: md.MaskedTensor) -> None:
    library("tensordict")
    plain = torch.ones(len(x))
    batch = interop.to_tensordict({"x": x, "plain": plain, "more": {"y": x}}, batch_size=[len(x)])
    assert batch["x", "mask"].tolist() == x.get_mask().tolist()
    for taken in (batch, batch.clone()):
        again = interop.from_tensordict(taken)
        same(again["x"], x)
        same(again["more"]["y"], x)
        assert again["plain"].tolist() == plain.tolist()


def test_gradients_and_refusals_of_tensordicts() -> None:
    tensordict = library("tensordict")
    x = md.masked_tensor([1.0, 2.0], [True, False], requires_grad=True)
    (interop.from_tensordict(interop.to_tensordict({"x": x}))["x"] * 3).sum().backward()
    same(x.grad, md.masked_tensor([3.0, 0.0], [True, False]))
    for mask in (torch.ones(2), torch.ones(1, dtype=torch.bool)):
        with pytest.raises(
            TypeError, match=r"the mask of 'x' is torch.* it has to be bool, True where valid, and to have the shape"
        ):
            interop.from_tensordict(tensordict.TensorDict({"x": {"data": torch.ones(2), "mask": mask}}))


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("module", [module for module, (name, _) in MODULES.items() if name != "torch"])
def test_an_absent_library_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, (door, *_) = MODULES[module]
    monkeypatch.delitem(sys.modules, f"masked_dispatch.interop.{module}", raising=False)
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Without(name), *sys.meta_path])
    text = rf"interop\.{door} needs {name}, which is not installed: pip install {name}, or .*masked-dispatch\[interop\]"
    with pytest.raises(ImportError, match=text):
        getattr(interop, door)


def test_a_library_that_lacks_one_of_its_own_is_not_called_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "masked_dispatch.interop.xarray_arrays", raising=False)
    monkeypatch.delitem(sys.modules, "masked_dispatch.interop.crossing")
    monkeypatch.setattr(sys, "meta_path", [Without("masked_dispatch.interop.crossing"), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'masked_dispatch.interop.crossing'$"):
        getattr(interop, "from_xarray")  # noqa: B009


@pytest.mark.parametrize(
    "name, table, door",
    [
        ("pandas", "DataFrame", "from_pandas"),
        ("polars", "DataFrame", "from_polars"),
        ("pyarrow", "table", "from_arrow"),
    ],
)
def test_a_dtype_of_another_library_is_refused(name: str, table: str, door: str) -> None:
    columns = getattr(library(name), table)({"a": [1, 2], "b": [1.0, 2.0]})
    text = "^dtype='float64' is not a dtype of torch: pass one, such as torch.float64$"
    with pytest.raises(TypeError, match=text):
        getattr(interop, door)(columns, dtype="float64")


class Without:
    """A finder that has every module but one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if f"{name}.".startswith(f"{self.name}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_every_door_is_offered() -> None:
    doors = {door for _, names in MODULES.values() for door in names}
    assert set(interop.__all__) == doors  # which tests/api/test_public_interface.py asks for their texts
    with pytest.raises(AttributeError, match=r"has no attribute 'from_excel'; it has from_arrow, from_attention_mask"):
        interop.from_excel  # noqa: B018


def test_the_document_has_every_door() -> None:
    text = (ROOT / "docs" / "other_libraries.md").read_text(encoding="utf-8")
    assert [door for door in interop.__all__ if f"`{door}(" not in text] == []


@pytest.mark.parametrize("door", ["to_numpy_masked", "to_pandas", "to_arrow"])
def test_plain_tensors_leave_as_valid_everywhere(door: str) -> None:
    convert: Callable[[Tensor], Any] = getattr(interop, door)
    back = getattr(interop, door.replace("to_", "from_"))
    same(back(convert(torch.arange(3))), md.masked_tensor(torch.arange(3)))
