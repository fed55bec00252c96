"""What the operators give, by hand."""

import third_party  # noqa: F401  (registers the operators and their rules)
import torch
from torch.testing import assert_close

import masked_dispatch as md

ops = torch.ops.third_party
nan = float("nan")


def x() -> md.MaskedTensor:
    return md.from_nan(torch.tensor([[0.5, nan, 0.25], [nan, nan, nan], [0.0, 1.0, 0.5]]))


def test_elementwise() -> None:
    assert_close(ops.soft_sign(x()).to_tensor(-1), torch.tensor([[1 / 3, -1, 0.2], [-1, -1, -1], [0, 0.5, 1 / 3]]))


def test_a_reduction_by_its_identity() -> None:
    assert_close(ops.noisy_or(x(), 1).to_tensor(-1), torch.tensor([0.625, -1.0, 1.0]))


def test_an_irregular_one() -> None:
    weight = md.masked_tensor(torch.tensor([[1.0, 1.0, 3.0]] * 3), torch.tensor([True, True, False]))
    assert_close(ops.weighted_mean(x(), weight, 1).to_tensor(-1), torch.tensor([0.5, -1.0, 0.5]))


def test_one_with_a_sparse_lowering_is_never_stored_densely() -> None:
    stored = x().to_sparse_csr()
    with md.densify("never"):
        result = ops.row_dot(stored, torch.tensor([2.0, 1.0, 4.0]))
    assert_close(result.to_tensor(-1), torch.tensor([2.0, -1.0, 3.0]))


def test_gradients() -> None:
    leaf = x().requires_grad_()
    vector = torch.tensor([2.0, 1.0, 4.0], requires_grad=True)
    ops.row_dot(leaf, vector).sum().backward()
    assert_close(leaf.grad.to_tensor(0), torch.tensor([[2.0, 0, 4], [0, 0, 0], [2, 1, 4]]))
    assert_close(vector.grad, torch.tensor([0.5, 1.0, 0.75]))
