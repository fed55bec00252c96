"""Dtypes and values that torch handles apart: unsigned integers wider than a byte, conjugated views, whole averages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from storages import STORAGES, storages_but

DATA = torch.tensor([[5.0, 1.0, 7.0, 3.0], [2.0, 9.0, 4.0, 6.0]])
MASK = torch.tensor([[True, False, True, True], [False, True, True, False]])


def dense(x: Tensor) -> md.MaskedTensor:
    assert isinstance(x, md.MaskedTensor)
    return x.to_dense()


UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]


MOVING: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda x: x.sort(1).values,
    "sort, descending": lambda x: x.sort(1, descending=True).values,
    "argsort": lambda x: x.argsort(1),
    "msort": torch.msort,
    "compressed": lambda x: x.compressed(),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.flatten().unique_consecutive(),
    "inverse": lambda x: x.unique(return_inverse=True)[1],
    "where": lambda x: torch.where(DATA > 3, x, x.flip(0)),
    "select_scatter": lambda x: x.select_scatter(x[0], 0, 1),
    "cat": lambda x: torch.cat([x, x]),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", MOVING)
def test_moved_unsigned_integers(name: str, storage: str) -> None:
    """torch has kernels for few operators of these: what moves elements must not need others than the call itself."""
    for dtype in UNSIGNED:
        found = MOVING[name](STORAGES[storage](md.masked_tensor(DATA.to(dtype), MASK)))
        expected = MOVING[name](md.masked_tensor(DATA.long(), MASK))
        assert md.is_masked_tensor(found) == md.is_masked_tensor(expected)
        if md.is_masked_tensor(found):
            assert found.get_mask().tolist() == expected.get_mask().tolist()
            assert dense(found).compressed().tolist() == dense(expected).compressed().tolist()
        else:
            assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", UNSIGNED)
@pytest.mark.parametrize("storage", STORAGES)
def test_the_greatest_unsigned_integer_is_sorted_before_what_is_invalid(dtype: torch.dtype, storage: str) -> None:
    greatest = torch.iinfo(dtype).max
    data = DATA.to(dtype)
    data[0] = torch.tensor([greatest, 0, greatest, 3], dtype=dtype)
    x = STORAGES[storage](md.masked_tensor(data, MASK)).sort(1).values
    assert dense(x).compressed().tolist() == [3, greatest, greatest, 4, 9]


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "conj": lambda z: z.conj(),
    "conj, real": lambda z: z.conj().real,
    "conj, imag": lambda z: z.conj().imag,
    "adjoint": lambda z: z.mH,
    "adjoint, imag": lambda z: z.mH.imag,
    "conj twice, imag": lambda z: z.conj().conj().imag,
    "conj, parts": lambda z: torch.view_as_real(z.conj().resolve_conj()),
    "imag of a negated view": lambda z: torch._neg_view(z).imag,
    "product": lambda z: (z.conj() * z).imag + z.conj().real,
}


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        *((name, "dense") for name in PARTS),
        *zip(PARTS, storages_but("dense"), strict=False),
        ("conj, imag", "csr"),
        ("conj, imag", "packed"),
    ],
)
def test_parts_of_conjugated_tensors(name: str, storage: str) -> None:
    """A masked tensor shows no conjugate bit, which its data may have: `real` and `imag` go by view_as_real."""
    part, data = PARTS[name], torch.complex(DATA, -DATA.flip(0))
    x = STORAGES[storage](md.masked_tensor(torch.where(MASK, data, torch.nan), MASK))
    result, expected = dense(part(x)), part(data)
    mask = part(torch.where(MASK, data, complex(torch.nan, torch.nan))).isnan().logical_not()
    assert torch.equal(result.get_mask(), mask)
    torch.testing.assert_close(result.to_tensor(0), torch.where(mask, expected, 0))


@pytest.mark.parametrize("name", ["conj", "adjoint"])
def test_conjugates_stay_sparse(name: str) -> None:
    x = md.masked_tensor(torch.complex(DATA, -DATA), MASK)
    for storage in ("coo", "csr", "bsr", "packed", "permuted"):
        with md.densify("never"):
            assert PARTS[name](STORAGES[storage](x)).storage_layout is not torch.strided  # type: ignore[attr-defined]


@pytest.mark.parametrize("storage", ["dense", "coo", "csr"])
def test_gradients_of_conjugated_parts(storage: str) -> None:
    data = torch.complex(DATA, -DATA)
    plain = data.clone().requires_grad_()
    (plain.conj().imag[MASK] * DATA[MASK]).sum().backward()
    x = STORAGES[storage](md.masked_tensor(data, MASK)).detach().requires_grad_()
    (x.conj().imag * DATA).sum().backward()
    torch.testing.assert_close(dense(x.grad).to_tensor(0), plain.grad)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------- averages of integers


@pytest.mark.parametrize(
    "pool",
    [lambda x: F.avg_pool1d(x, 2), lambda x: F.adaptive_avg_pool1d(x, 2), lambda x: F.avg_pool2d(x[None], (1, 2))[0]],
)
@pytest.mark.parametrize("value", [3, 3_000_000, 2**24 + 2, 2**48 + 1])
def test_the_average_of_equal_integers_is_that_integer(pool: Callable[[Tensor], Tensor], value: int) -> None:
    x = md.masked_tensor(torch.full((1, 1, 4), value), torch.tensor([[[True, True, True, False]]]))
    assert pool(x).flatten().tolist() == [value, value]


def test_what_is_no_whole_number_is_truncated_as_in_torch() -> None:
    data = torch.tensor([[[2, 3, 2_000_000, 2_000_001]]])
    x = md.masked_tensor(data, torch.ones_like(data, dtype=torch.bool))
    assert torch.equal(F.avg_pool1d(x, 2).to_tensor(0), F.avg_pool1d(data, 2))
