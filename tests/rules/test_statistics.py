"""quantile, cov and corrcoef on bare records: against compressed slices and pairwise complete observations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bare_records import apply
from op_registry.authoring import Dense

aten = torch.ops.aten


def data_and_mask() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 9, generator=generator) < 0.6
    mask[3] = False
    return data, mask


INTERPOLATIONS = ["linear", "lower", "higher", "nearest", "midpoint"]


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("name", ["quantile", "nanquantile"])
def test_quantile_of_compressed_slices(name, interpolation):
    data, mask = data_and_mask()
    data[1, mask[1].nonzero()[0]] = math.nan
    f = getattr(torch, name)
    packet = getattr(aten, name)
    q = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64)
    before = None
    for garbage in (math.nan, -math.inf, 1e300):
        x = torch.where(mask, data, garbage).requires_grad_()
        record = Dense(x, mask.to(torch.int8))
        result = apply(packet.default, record, Dense(q), 1, interpolation=interpolation)
        reference = data.clone().requires_grad_()
        expected = [f(reference[row][mask[row]], q, interpolation=interpolation) for row in range(3)]
        assert result.valid.tolist() == [[True, True, True, False]] * 4
        torch.testing.assert_close(result.data[:, :3], torch.stack(expected, 1), equal_nan=True)
        (got,) = torch.autograd.grad(result.data[:, [0, 2]].square().sum(), x, retain_graph=True)
        (want,) = torch.autograd.grad(sum(expected[row].square().sum() for row in (0, 2)), reference)
        torch.testing.assert_close(got, want)
        assert before is None or before.equal(got)
        before = got
        one = apply(packet.scalar, record, 0.3, 1, True, interpolation=interpolation)
        assert one.data.shape == one.valid.shape == (4, 1)
        torch.testing.assert_close(one.data[:3, 0], result.data[1, :3], equal_nan=True)
        whole = apply(packet.default, record, Dense(q), None, True, interpolation=interpolation)
        torch.testing.assert_close(
            whole.data, f(data[mask], q, interpolation=interpolation).reshape(4, 1, 1), equal_nan=True
        )
        assert whole.valid.all()


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf, 0.0])
def test_hidden_rows_do_not_reach_the_gradient_of_levels(hidden, interpolation):
    """Rows that are invalid as a whole were not filled, and inf - inf is NaN in the derivative by the levels."""
    data, q = torch.tensor([[1.0, 2.0, 4.0], [hidden] * 3]), torch.tensor([0.25, 0.9], requires_grad=True)
    record = Dense(data.requires_grad_(), torch.tensor([[1], [0]], dtype=torch.int8))
    apply(aten.quantile.default, record, Dense(q), 1, interpolation=interpolation).data.sum().backward()
    alone = q.detach().requires_grad_()
    torch.tensor([1.0, 2.0, 4.0]).requires_grad_().quantile(alone, interpolation=interpolation).sum().backward()
    assert torch.equal(*((t.grad if t.grad is not None else torch.zeros(2)) for t in (q, alone)))


def test_quantile_raises_what_torch_raises():
    x = Dense(torch.randn(3), torch.tensor([1, 0, 1], dtype=torch.int8))
    with pytest.raises(RuntimeError, match=r"in the range \[0, 1\]"):
        apply(aten.quantile.scalar, x, 1.5)
    with pytest.raises(RuntimeError, match="interpolation must be one of"):
        apply(aten.quantile.scalar, x, 0.5, interpolation="cubic")
    with pytest.raises(RuntimeError, match="either float or double"):
        apply(aten.quantile.scalar, Dense(torch.tensor([1, 2]), torch.tensor([1, 0], dtype=torch.int8)), 0.5)


def pairwise(f, x: Tensor, mask: Tensor) -> Tensor:
    """`f` of each pair of rows, over the columns in which both are valid."""
    rows = []
    for i in range(x.shape[0]):
        for j in range(x.shape[0]):
            both = mask[i] & mask[j]
            entry = f(torch.stack([x[i][both], x[j][both]]), both)[0, 1] if both.any() else x.new_zeros(())
            rows.append(entry)
    return torch.stack(rows).reshape(x.shape[0], x.shape[0])


@pytest.mark.filterwarnings("ignore:cov")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("weights", ["none", "f", "a", "both"])
def test_cov_of_pairwise_complete_observations(weights, dtype):
    data, mask = data_and_mask()
    data = data.to(dtype) + (1j * data.flip(1) if dtype.is_complex else 0)
    f = torch.arange(1, 10) if weights in ("f", "both") else None
    a = torch.linspace(0.5, 2, 9, dtype=torch.float64) if weights in ("a", "both") else None

    def compressed(pair, both):
        chosen = {"fweights": None if f is None else f[both], "aweights": None if a is None else a[both]}
        return torch.cov(pair, **chosen)

    shown = (mask[:, None] & mask[None]).any(-1)
    reference = data.clone().requires_grad_()
    expected = torch.where(shown, pairwise(compressed, reference, mask), 0)
    x = torch.where(mask, data, math.nan).requires_grad_()
    given = {k: Dense(v) for k, v in (("fweights", f), ("aweights", a)) if v is not None}
    result = apply(aten.cov.default, Dense(x, mask.to(torch.int8)), **given)
    assert result.valid.equal(shown)
    actual = torch.where(shown, result.data, 0)
    torch.testing.assert_close(actual, expected)
    weigh = torch.arange(16, dtype=torch.float64).reshape(4, 4)
    (got,) = torch.autograd.grad((actual.abs().square() * weigh).sum(), x)
    (want,) = torch.autograd.grad((expected.abs().square() * weigh).sum(), reference)
    torch.testing.assert_close(got, want)


def test_corrcoef_of_pairwise_complete_observations():
    data, mask = data_and_mask()
    shown = (mask[:, None] & mask[None]).any(-1)
    expected = torch.where(shown, pairwise(lambda pair, both: torch.corrcoef(pair), data, mask), 0)
    for garbage in (math.nan, math.inf):
        x = Dense(torch.where(mask, data, garbage), mask.to(torch.int8))
        result = apply(aten.corrcoef.default, x)
        assert result.valid.equal(shown)
        torch.testing.assert_close(torch.where(shown, result.data, 0), expected)


def test_cov_of_one_variable_and_of_integers():
    x = Dense(torch.tensor([1, 7, 3, 5]), torch.tensor([1, 0, 1, 1], dtype=torch.int8))
    result = apply(aten.cov.default, x)
    assert (result.data.item(), result.data.dtype, result.valid.item()) == (4.0, torch.float32, True)
    assert apply(aten.corrcoef.default, x).data.item() == 1.0
    constant = Dense(torch.full((2, 5), 0.1), torch.tensor([[1, 1, 0, 1, 1]], dtype=torch.int8))
    assert (apply(aten.cov.default, constant).data.diagonal() >= 0).all()
