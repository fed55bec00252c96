"""What is made sparse: blocks, tensors of one dimension or none."""

from __future__ import annotations

import pytest
import torch

import masked_dispatch as md
from sixteen_elements import F, T, sample, state
from storages import STORAGES


@pytest.mark.parametrize("layout", STORAGES)
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


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_one_flag_for_each_stored_element_is_no_mask_and_the_error_says_what_to_do_with_them(
    layout: torch.layout,
) -> None:
    x = md.masked_tensor(torch.arange(12.0).reshape(2, 6), torch.arange(12).reshape(2, 6) % 5 == 1).to_layout(layout)
    flags = torch.tensor([True, False, True])
    with pytest.raises(ValueError, match=r"does not broadcast .*\(2, 6\)\. It has one flag for each stored") as caught:
        x.mask_with(flags)
    advice = str(caught.value).partition("coo = x.to_sparse(), ")[2]
    coo = x.to_sparse()
    with torch.sparse.check_sparse_tensor_invariants():
        chosen = eval(advice, {"torch": torch, "as_masked_tensor": md.as_masked_tensor, **locals()})
    assert torch.equal(chosen.indices(), coo.indices()[:, flags])
    assert torch.equal(chosen.values(), coo.values()[flags])
