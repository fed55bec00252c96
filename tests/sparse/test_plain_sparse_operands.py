"""A plain torch.sparse operand beside masked ones has the law of its `.to_dense()`.

All operators: tests/thorough/sparse.
"""

from __future__ import annotations

import re

import pytest
import torch

import masked_dispatch as md
from plain_sparse_operands import IN_TRANSFORMS, PLAIN, STORED, checked, checked_in_transform

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")

X = torch.arange(1.0, 17).view(4, 4)
Y = torch.arange(16.0).view(4, 4).flip(0) / 4
CALLS = {
    "mul": lambda x, s: x * s,
    "rsub": lambda x, s: s - x,
    "where": lambda x, s: torch.where(x > 3, x, s),
    "condition": lambda x, s: torch.where(s != 0 if s.layout is torch.strided else s.bool(), x, 1.0),
    "addcmul": lambda x, s: torch.addcmul(x, s, x),
    "cat": lambda x, s: torch.cat([s, x]),
    "mm": lambda x, s: s @ x,
    "addmm": lambda x, s: torch.addmm(s, x, x),
    "einsum": lambda x, s: torch.einsum("ij,kj->ik", x, s),
    "foreach": lambda x, s: torch._foreach_mul([x, x], [s, x]),
    "in place": lambda x, s: x.clone().mul_(s),
}
IN_EVERY_STORAGE = ("rsub", "where", "cat", "mm")


@pytest.mark.parametrize("plain", PLAIN)
def test_a_plain_sparse_operand_means_its_dense_form(plain):
    for name, call in CALLS.items():
        for stored in STORED if name in IN_EVERY_STORAGE else ("strided",):
            assert checked(call, (X, Y), 1, plain, stored) is None, (name, stored)
        if plain in IN_TRANSFORMS:
            assert checked_in_transform(call, (X, Y), 1, plain) is None, name


def test_transforms_of_torch_take_no_compressed_operand():
    x, s = md.masked_tensor(X, X > 2), Y.to_sparse_csr()
    message = (
        "inside a torch.func transform, which only takes COO: torch has no strides for other layouts there. Convert it"
    )
    for call in (lambda x: (x * s).sum(), lambda x: (s @ x).sum()):
        with pytest.raises(md.MaskedSemanticsError, match=re.escape(message)):
            md.functional.grad(call)(x)


def test_a_product_with_a_large_sparse_matrix_is_torchs_sparse_product():
    n = 100_000  # 40 GB densely
    adjacency = torch.sparse_coo_tensor(torch.arange(n).repeat(2, 1), torch.full((n,), 2.0), (n, n))
    x = md.masked_tensor(torch.arange(float(n)).unsqueeze(1), (torch.arange(n) % 2 == 0).unsqueeze(1))
    x.requires_grad_()
    for product in (adjacency @ x, torch.sparse.mm(adjacency, x)):
        (gradient,) = torch.autograd.grad(product.sum(), x)
        assert product[2].item() == 4
        assert repr(gradient[:3].squeeze(1)) == "masked_tensor([2., --, 2.], valid=2/3, True=valid)"


def test_a_sparse_operand_too_large_to_be_stored_densely_is_refused():
    n = 100_000
    x = md.masked_tensor(torch.ones(n, 1), torch.arange(n).unsqueeze(1) > 3)
    with pytest.raises(
        md.MaskedSemanticsError, match=r"it is a torch\.sparse tensor, valid everywhere.*50,000,000,000 bytes"
    ):
        x * torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (n, n))


def test_nothing_is_written_to_a_plain_sparse_tensor():
    x, s = md.masked_tensor(X, X > 2), Y.to_sparse()
    message = "cannot be written to a plain tensor stored as torch.sparse_coo, which has no place for elements that it"
    with pytest.raises(md.MaskedSemanticsError, match=re.escape(message)):
        s.mul_(x)
    assert torch.equal(s.to_dense(), Y)
