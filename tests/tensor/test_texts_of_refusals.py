"""Errors that once blamed something else, in their final words: what was asked for, and what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import masked_dispatch as md
from masked_dispatch.distributed.agreement import Description, agree, agree_that_all_are_alike

T, F = True, False
X = md.masked_tensor([1.0, 2.0, 3.0], [T, F, T])
VALID = md.masked_tensor([1.0, 2.0, 3.0])
ARRAY = np.ones(3)
WITH_HOLES = "a masked tensor of shape (3,) with 1 invalid elements, which have no values. "
WAYS = (
    "Choose their value with x.to_tensor(fill), or keep the mask: x.to_numpy(), a masked array of NumPy, which "
    "matplotlib draws with gaps; or masked_dispatch.interop.to_numpy_masked(x, fill_value), to_pandas(x) or "
    "to_arrow(x)."
)
ARRAYS = " An operator with an array, x + array, asks for it too: write x + torch.as_tensor(array)."
COMPARED = (
    "the value of a masked tensor of shape () and dtype torch.bool was asked for as a Python value, and it is invalid. "
    "Replace an invalid element first, x.to_tensor(False), or check x.get_mask(). Python's max(), min() and sorted() "
    "ask so for each comparison: x.amax(), x.amin() and x.sort(), of a list torch.stack(list).amax(), leave out what "
    "is invalid."
)

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "to_dlpack": (lambda: torch.utils.dlpack.to_dlpack(X), f"to_dlpack() of {WITH_HOLES}{WAYS}"),
    "torch.to_dlpack": (lambda: torch.to_dlpack(X), f"to_dlpack() of {WITH_HOLES}{WAYS}"),
    "x + array": (lambda: X + ARRAY, f"np.asarray() of {WITH_HOLES}{WAYS}{ARRAYS}"),
    "x @ array": (lambda: X @ ARRAY, f"np.asarray() of {WITH_HOLES}{WAYS}{ARRAYS}"),
    "np.add(array, x)": (lambda: np.add(ARRAY, X), f"np.asarray() of {WITH_HOLES}{WAYS}{ARRAYS}"),
    "max(list)": (lambda: max(list(X)), COMPARED),
    "sorted(list)": (lambda: sorted(list(X)), COMPARED),  # noqa: C414 - the elements, as tensors
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_said_of_invalid_elements(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(md.InvalidValueError, match=f"^{re.escape(text)}$"):
        call()


def test_the_ways_out_of_a_comparison_work() -> None:
    assert torch.stack(list(X)).amax().item() == 3
    assert torch.stack(list(X)).sort().values.compressed().tolist() == [1, 3]


def test_dlpack_of_what_is_all_valid() -> None:
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(VALID)).tolist() == [1, 2, 3]
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(torch.ones(2))).tolist() == [1, 1]


# ---------------------------------------------------------------------------------------------------- arrays of NumPy


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "pow", "matmul", "eq"])
def test_an_operator_with_an_array_never_loses_the_type(name: str) -> None:
    """torch's plain tensors go by NumPy's promotion, and so do masked ones; a mask is lost nowhere."""
    method = f"__{name}__"
    operator = getattr(__import__("operator"), method)
    found = operator(VALID, ARRAY)
    expected = operator(torch.tensor([1.0, 2.0, 3.0]), ARRAY)
    assert type(found) is md.MaskedTensor
    assert found.dtype is expected.dtype
    assert torch.equal(found.to_tensor(0), expected)


def test_an_array_on_the_left_is_refused_as_by_a_plain_tensor() -> None:
    for x in (X, VALID, torch.ones(3)):
        with pytest.raises(TypeError):
            ARRAY + x
        with pytest.raises(TypeError):
            ARRAY * x


def test_a_ufunc_of_what_is_all_valid_is_masked() -> None:
    assert type(np.negative(VALID)) is md.MaskedTensor
    assert np.greater(VALID, 1).tolist() == [F, T, T]
    assert np.greater(VALID, 1).dtype is torch.bool
    assert (md.masked_tensor(2.0) + np.ones(())).tolist() == 3


# ------------------------------------------------------------------------------------------------------------- memory


def test_the_storage_of_a_wrapper_is_printed() -> None:
    text = (
        "[torch.storage.UntypedStorage(device=cpu) of size 12, without memory of its own: the values of a masked "
        "tensor lie in x.get_data().untyped_storage()]"
    )
    assert repr(X.untyped_storage()) == text
    assert repr(torch.ones(1, dtype=torch.int8).untyped_storage()).startswith(" 1\n[torch.storage.UntypedStorage")


# --------------------------------------------------------------------------------------------------------- selections


MASK = md.masked_tensor([T] * 6, [T, T, F, T, T, T])
Y = torch.arange(6.0)
SELECTED = (
    r" \(\d\) at non-singleton dimension 0\. The operand of shape \(5,\) was selected by a mask of shape \(6,\) in "
    r"which 1 entries are invalid, and these select nothing: select the other operand by the same mask, or say what "
    r"they stand for, x\[mask\.to_tensor\(True\)\]$"
)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Y[MASK] + Y,
        lambda: Y + Y[MASK],
        lambda: md.masked_tensor(Y, Y > 0)[MASK] * md.masked_tensor(Y, Y > 2),
        lambda: torch.where(Y > 1, Y, Y[MASK]),
        lambda: Y.clone().requires_grad_()[MASK] + Y,
        lambda: torch.masked_select(Y, MASK) - Y,
    ],
)
def test_an_error_about_sizes_names_the_mask_whose_holes_selected_nothing(call: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=SELECTED):
        call()


def test_the_ways_out_of_it_work() -> None:
    assert (Y[MASK] + Y[MASK]).count() == 5
    assert (md.masked_tensor(Y)[MASK.to_tensor(True)] + Y).count() == 6


def test_other_errors_about_sizes_are_torch_s_own() -> None:
    with pytest.raises(RuntimeError, match=r"non-singleton dimension 0$"):
        md.masked_tensor(Y)[Y > 0] + Y
    with pytest.raises(RuntimeError, match=r"non-singleton dimension 0$"):
        Y[md.masked_tensor(Y > 0)] + Y


# ------------------------------------------------------------------------------------------------------ sparse storage


@pytest.mark.parametrize("function", [torch.corrcoef, torch.cov])
def test_no_form_for_sparse_storage(function: Callable[[Any], Any]) -> None:
    x = md.masked_tensor([[1.0, 2.0], [3.0, 4.0]], [[T, F], [T, T]]).to_sparse_csr()
    text = f"torch.{function.__name__} has no sparse form for this call: no form of it for sparse storage is written. "
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match=f"^{re.escape(text)}"):
        function(x)


def large() -> md.MaskedTensor:
    rows, columns = 100_000, 50_000
    starts = torch.zeros(rows + 1, dtype=torch.int64)
    nothing = torch.zeros(0, dtype=torch.int64)
    return md.as_masked_tensor(
        torch.sparse_compressed_tensor(
            starts, nothing, torch.zeros(0), (rows, columns), layout=torch.sparse_csr, check_invariants=False
        )
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("name", ["get_mask", "get_data"])
def test_what_needs_25_gigabytes_is_not_advised(name: str) -> None:
    text = (
        f"{name} has no sparse form for this call: it gives a plain tensor of every element, stored or not. Its "
        "operands are stored sparsely (shape (100000, 50000) as torch.sparse_csr with 0 stored) and would take "
        "25,000,000,000 bytes densely, which the current policy does not allow (densify('auto', limit=1,073,741,824)). "
        "Of what is stored, x.to_sparse().indices() are the positions, x.values() the values, x.count() the number of "
        "what is valid. A part of the tensor, x[...], needs less memory. If you have the memory, allow it inside `with "
        "masked_dispatch.densify('always'):`."
    )
    x = large()
    with pytest.raises(md.MaskedSemanticsError, match=f"^{re.escape(text)}$"):
        getattr(x, name)()
    assert x.to_sparse().indices().shape == (2, 0)
    assert x.values().shape == (0,)
    assert x.count() == 0
    assert x[:2, :3].get_mask().shape == (2, 3)


# ---------------------------------------------------------------------------------------------------------------- meta


class TwoRanks:
    """A group of which only the size is asked."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("ask", [agree, agree_that_all_are_alike])
def test_ranks_are_not_blamed_for_the_device_meta(ask: Callable[..., Any]) -> None:
    text = (
        "all_reduce of a masked tensor (float32 of shape (3,)) on the device meta, where a tensor has no values, so "
        "the ranks cannot describe their arguments to each other: move it to a device, "
        "torch.empty_like(x, device='cpu'), or leave out the call if you only need shapes"
    )
    with pytest.raises(md.MaskedSemanticsError, match=f"^{re.escape(text)}$"):
        ask(TwoRanks(), Description("all_reduce", ("float32 of shape (3,)",)), torch.device("meta"))
