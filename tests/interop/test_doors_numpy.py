"""numpy.ma there and back; what NumPy's own functions do with masked tensors; DLPack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

import masked_dispatch as md
from door_samples import FLOATS, INTEGERS, UNSIGNED, masked, same, shapes
from masked_dispatch import interop

DTYPES = (torch.bool, *INTEGERS, *UNSIGNED, torch.float16, *FLOATS, torch.complex64, torch.complex128)
X = md.masked_tensor([1.0, float("nan"), 3.0], [True, False, True])
WHOLE = md.masked_tensor([1.0, 2.0, 3.0])
A = np.ma.masked_array([1.0, np.nan, 3.0], mask=[False, True, False], dtype=np.float32)


@given(masked(DTYPES, shapes(2)))
def test_there_and_back(x: md.MaskedTensor) -> None:
    array = interop.to_numpy_masked(x)
    assert array.mask.tolist() == (~x.get_mask()).tolist()
    same(interop.from_numpy_masked(array), x)


def test_a_fill_value_is_passed_and_what_is_under_the_mask_is_seen() -> None:
    array = interop.to_numpy_masked(X, fill_value=-1)
    assert array.filled().tolist() == [1, -1, 3]
    assert np.isnan(array.data[1])
    assert interop.to_numpy_masked(md.masked_tensor([5, 6], [True, False])).data.tolist() == [5, 0]
    array[0] = 9
    assert X[0].item() == 1


def test_values_are_shared_where_torch_can_share_them() -> None:
    array = np.ma.masked_array(np.arange(4.0), mask=[0, 1, 0, 0])
    x = interop.from_numpy_masked(array)
    array.data[0] = 7
    assert x[0].item() == 7
    array.mask[0] = True
    assert x.get_mask().tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[::-1],
        lambda a: a.astype(">f4"),
        lambda a: read_only(a),
        lambda a: a[1:2].reshape(()).copy(),
        lambda a: a[:0],
    ],
    ids=["reversed", "big endian", "read-only", "0-d", "empty"],
)
def test_any_memory_is_read(change: Callable[[Any], Any]) -> None:
    array = change(A.copy())
    x = interop.from_numpy_masked(array)
    assert torch.equal(x.get_mask(), torch.as_tensor(~np.ma.getmaskarray(array)))
    assert x.compressed().tolist() == np.ma.compressed(array).tolist()
    assert x.dtype is torch.float32


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def test_the_constant_masked_and_a_plain_array() -> None:
    assert not interop.from_numpy_masked(np.ma.masked).get_mask()
    assert interop.from_numpy_masked(np.ones(2)).get_mask().all()


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.array(["2020"], dtype="M8[Y]")])
def test_arrays_without_numbers_are_refused(array: Any) -> None:
    with pytest.raises(TypeError, match=r"dtype \S+ and shape \(1,\) has no equivalent in torch; convert it"):
        interop.from_numpy_masked(array)


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (X.clone().requires_grad_(), RuntimeError, r"shape \(3,\) requires grad, and NumPy has no gradients.*x.detach"),
        (X.to("meta"), TypeError, r"shape \(3,\) is on meta, and NumPy computes on the CPU: pass x.cpu\(\)"),
        (X.bfloat16(), TypeError, r"NumPy has no dtype for torch.bfloat16, the dtype of a tensor .*: pass x.float\(\)"),
    ],
)
def test_what_numpy_does_not_have_is_refused(x: md.MaskedTensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        interop.to_numpy_masked(x)


@pytest.mark.parametrize("name", ["mean", "sum", "prod", "min", "max", "std", "var", "median", "any", "all", "ptp"])
@pytest.mark.parametrize("x", [X, X.to_sparse(), WHOLE], ids=["dense", "sparse", "whole"])
def test_numpy_s_reductions_are_those_of_numpy_ma(name: str, x: md.MaskedTensor) -> None:
    found = getattr(np, name)(x)
    assert found == getattr(np.ma, name)(interop.to_numpy_masked(x))
    assert found == pytest.approx(getattr(np, name)(x.compressed().numpy()))


def test_numpy_s_reductions_of_nothing_and_along_a_dimension() -> None:
    assert np.mean(X[1:2]) is np.ma.masked
    rows = np.sum(torch.stack([X, X[[1, 1, 1]]]), axis=1)
    assert rows.tolist() == [4.0, None]


WAY_OUT = (
    r"of a masked tensor of shape \(3,\) with 1 invalid elements, which have no values\. Choose their value with "
    r"x\.to_tensor\(fill\), or keep the mask: x\.to_numpy\(\), a masked array of NumPy, which matplotlib draws with "
    r"gaps; or masked_dispatch\.interop\.to_numpy_masked\(x, fill_value\), to_pandas\(x\) or to_arrow\(x\)\."
)


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        np.array,
        np.ma.asarray,
        np.exp,
        lambda x: np.add(x, 1),
        lambda x: np.concatenate([x, x]),
        lambda x: np.where([True, False, True], x, 0),
        np.sort,
        np.histogram,
        torch.from_dlpack,
        np.from_dlpack,
    ],
)
def test_what_would_lose_the_mask_is_refused_with_the_way_out(use: Callable[[Any], Any]) -> None:
    with pytest.raises(md.InvalidValueError, match=WAY_OUT):
        use(X)


def test_what_is_valid_everywhere_is_an_array() -> None:
    assert np.asarray(WHOLE).tolist() == [1, 2, 3]
    assert np.asarray(WHOLE, dtype=np.int32).dtype == np.int32
    assert np.concatenate([WHOLE, WHOLE]).tolist() == [1, 2, 3] * 2
    assert np.shape(X) == (3,)
    assert np.ndim(X) == 1
    copy = np.array(WHOLE, copy=True)
    copy[0] = 9
    assert WHOLE[0].item() == 1


@pytest.mark.parametrize("x", [WHOLE, WHOLE.to_sparse()], ids=["dense", "sparse"])
def test_dlpack_of_what_is_valid_everywhere(x: md.MaskedTensor) -> None:
    assert torch.from_dlpack(x).tolist() == [1, 2, 3]
    assert np.from_dlpack(x).tolist() == [1, 2, 3]


def test_dlpack_shares_memory() -> None:
    x = WHOLE.clone()
    x[0] = 5
    shared = torch.from_dlpack(x)
    shared[1] = 6
    assert x.tolist() == [5, 6, 3]


@pytest.mark.parametrize("name", ["save", "savetxt", "savez", "savez_compressed"])
def test_files_of_numpy_have_no_mask(name: str, tmp_path: Path) -> None:
    said = rf"^numpy\.{name}: np\.asarray.* torch\.save\(x, path\) keeps the mask in a file\.$"
    with pytest.raises(md.InvalidValueError, match=said):
        getattr(np, name)(tmp_path / "x", X)
    if name.startswith("savez"):
        with pytest.raises(md.InvalidValueError, match=said):
            getattr(np, name)(tmp_path / "x", x=X)
    getattr(np, name)(tmp_path / "x", md.masked_tensor([1.0, 2.0]))


def test_a_plot_has_gaps_where_it_is_invalid() -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    (line,) = axes.plot(X)
    drawn = line.get_ydata()
    assert np.ma.getmaskarray(drawn).tolist() == [False, True, False]
    assert np.isnan(line.get_xydata()[1, 1])
    with pytest.raises(md.InvalidValueError, match="to_numpy_masked"):
        axes.scatter(X, X)
    axes.scatter(range(3), interop.to_numpy_masked(X))
    figure.canvas.draw()
    pyplot.close(figure)
