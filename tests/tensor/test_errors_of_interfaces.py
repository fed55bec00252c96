"""Errors of torch's memory-level interfaces and of arguments of the wrong kind: what, why, and what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md

T, F = True, False
STORAGES = [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged]


def example(layout: torch.layout = torch.strided) -> md.MaskedTensor:
    data = torch.arange(6.0).view(2, 3)
    return md.masked_tensor(data, torch.tensor([[T, T, F], [T, F, F]])).to_layout(layout)


# ------------------------------------------------------------------------------------------------------------- memory


def pointer_as_safetensors_reads_it(tensor: Tensor) -> int:
    """safetensors.torch.save_file looks for shared memory like this, before it writes anything."""
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:
        try:
            return tensor.storage().data_ptr()
        except NotImplementedError:
            return 0


@pytest.mark.parametrize("layout", STORAGES, ids=str)
def test_safetensors_is_told_what_to_save(layout: torch.layout) -> None:
    message = (
        r"masked tensor of shape \(2, 3\) has no memory.* safetensors, takes x.to_tensor\(fill\) and x.get_mask\(\)"
    )
    with pytest.raises(md.MaskedSemanticsError, match=message):
        pointer_as_safetensors_reads_it(example(layout))


@pytest.mark.parametrize("layout", STORAGES, ids=str)
def test_storage(layout: torch.layout) -> None:
    with pytest.raises(md.MaskedSemanticsError, match=r"has no memory of its own: it is data and a mask"):
        example(layout).storage()


@pytest.mark.parametrize("layout", STORAGES, ids=str)
@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("apply_", lambda x: x.apply_(lambda v: v + 1)),
        ("map_", lambda x: x.map_(x, lambda v, w: v + w)),
        ("map2_", lambda x: x.map2_(x, x, lambda u, v, w: u)),
    ],
)
def test_python_functions_of_every_element(layout: torch.layout, method: str, call: Callable[[Any], Any]) -> None:
    x = example(layout)
    before = x.to_tensor(0)
    write = re.escape(f"as_masked_tensor(x.to_tensor(fill).{method}(...), x.get_mask())")
    with pytest.raises(md.MaskedSemanticsError, match=rf"x.{method}\(\) calls a Python function .*\(2, 3\).*{write}"):
        call(x)
    assert torch.equal(x.to_tensor(0), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo], ids=str)
@pytest.mark.parametrize(
    "function",
    [lambda x: x * 2, lambda x: x.sum(), lambda x: x.relu(), lambda x: x.to_tensor(0), lambda x: x @ torch.ones(3)],
    ids=["mul", "sum", "relu", "to_tensor", "matmul"],
)
def test_jit_trace(layout: torch.layout, function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        md.MaskedSemanticsError, match=r"torch.jit.trace records.* Use torch.compile\(f\), or torch.exp"
    ):
        torch.jit.trace(function, (example(layout),))


MASK_OF_ROWS = torch.tensor([[True], [False]])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["linear", "exp", "add", "sum"])
def test_jit_trace_of_what_is_masked_inside(name: str) -> None:
    layer = torch.nn.Linear(3, 2)
    call = {"linear": layer, "exp": torch.exp, "add": lambda x: x + x, "sum": torch.sum}[name]

    def function(data: Tensor) -> Tensor:
        return call(md.as_masked_tensor(data, MASK_OF_ROWS)).get_data()

    with torch.no_grad(), pytest.raises(md.MaskedSemanticsError, match=r"torch.jit.trace records"):
        torch.jit.trace(function, (torch.ones(2, 3),))


# ---------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("layout", STORAGES, ids=str)
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: x.to_sparse_bsr((2.0, 3.0)), "a blocksize is two integers (rows, columns), not (2.0, 3.0)"),
        (lambda x: x.to_sparse_bsc(["1", 1]), "a blocksize is two integers (rows, columns), not ['1', 1]"),
        (lambda x: x.to_sparse(1.5), "an integer from 1 to 2 for shape (2, 3); got 1.5"),
        (lambda x: x.to_sparse("a"), "got 'a'. To choose a layout pass it by name: x.to_sparse(layout=torch.sparse_c"),
        (lambda x: x.to_sparse_csr(0.5), "an integer from 0 to 1 for shape (2, 3); got 0.5"),
        (lambda x: x.to_sparse(dense_dim="1"), "an integer from 0 to 1 for shape (2, 3); got '1'"),
        (lambda x: x.to_layout(torch.sparse_coo, sparse_dim=2.0), "an integer from 1 to 2 for shape (2, 3); got 2.0"),
    ],
    ids=["bsr", "bsc", "float", "string", "csr", "dense_dim", "to_layout"],
)
def test_sizes_that_are_no_integers(layout: torch.layout, call: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        call(example(layout))


@pytest.mark.parametrize("layout", STORAGES, ids=str)
@pytest.mark.parametrize("plain", [False, True], ids=["mask_with", "as_masked_tensor"])
def test_a_masked_mask(layout: torch.layout, plain: bool) -> None:
    x = example(layout)
    with pytest.raises(TypeError, match=r"the mask is itself a masked tensor of shape \(2, 3\)") as caught:
        md.as_masked_tensor(torch.zeros(2, 3), x < 2) if plain else x.mask_with(x < 2)
    assert "x.mask_with((x < 2).to_tensor(False))" in str(caught.value)
    assert x.mask_with((x < 2).to_tensor(False)).get_mask().tolist() == [[T, T, F], [F, F, F]]


@pytest.mark.parametrize("layout", STORAGES, ids=str)
def test_from_nan_of_what_is_masked(layout: torch.layout) -> None:
    x = example(layout)
    with pytest.raises(
        TypeError, match=r"of shape \(2, 3\) is masked .* write from_nan\(x.to_tensor\(float\('nan'\)\)\)"
    ):
        md.from_nan(x)
    assert torch.equal(md.from_nan(x.to_tensor(float("nan"))).get_mask(), x.get_mask())


def test_masked_lengths() -> None:
    lengths = md.masked_tensor(torch.tensor([2, 9]), torch.tensor([T, F]))
    with pytest.raises(TypeError, match=r"lengths is a masked tensor of shape \(2,\).*lengths.to_tensor\(0\)"):
        md.from_lengths(torch.zeros(2, 3), lengths)


# -------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("sizes", [(2**62,), (2**40, 2**22)], ids=str)
@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_results_with_more_elements_than_int64(sizes: tuple[int, ...], join: Callable[[list[Tensor]], Tensor]) -> None:
    indices = torch.ones(len(sizes), 1, dtype=torch.int64)
    x = md.as_masked_tensor(torch.sparse_coo_tensor(indices, torch.ones(1), sizes, check_invariants=True))
    with pytest.raises(ValueError, match="9,223,372,036,854,775,808 elements, more than int64 can number"):
        join([x, x])
