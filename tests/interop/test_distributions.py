"""torch.distributions of vectors and matrices with a hole in a parameter or a value: that element of the batch has no
answer, and the others have what plain torch gives for the batch."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributions as D
from torch import Tensor

import masked_dispatch as md
from distributions_of_matrices import BATCH, DRAWS, KINDS, SIZE, made, parameters, with_hole, without_first
from masked_dispatch.interop.outside_dispatch import METHODS
from padded_slices import GARBAGE, same

HOLES = [(kind, name) for kind, (_, names) in KINDS.items() for name in names]


def drawn(distribution: D.Distribution) -> Tensor:
    """Draws with one seed; the first draw of Wishart's loop, which looks at whether its draws are singular."""
    torch.manual_seed(1)
    return distribution.sample((DRAWS,)) if isinstance(distribution, D.LKJCholesky) else distribution.rsample((DRAWS,))


@pytest.mark.filterwarnings("ignore:Singular sample detected")  # torch's, of plain parameters too
@pytest.mark.parametrize(
    ("kind", "name", "hidden"), [(*hole, GARBAGE[n % len(GARBAGE)]) for n, hole in enumerate(HOLES)]
)
def test_draws_and_likelihoods_of_the_others(kind: str, name: str, hidden: float) -> None:
    given = parameters()
    hole = with_hole(name, given[name], hidden)
    holey, plain = made(kind, given, **{name: hole}), made(kind, given)
    draws = drawn(plain)
    same(holey.log_prob(draws), plain.log_prob(draws), without_first(torch.Size((DRAWS, BATCH)), 1))
    found = drawn(holey)
    valid = without_first(draws.shape, 1)
    assert torch.equal(found.get_mask(), valid)
    if not isinstance(plain, (D.Wishart, D.LKJCholesky)):  # rejection consumes the stream as the replacement does
        same(found, draws, valid)
        found.sum().backward()
        assert hole.grad is not None
        assert torch.equal(hole.grad.get_mask(), hole.get_mask())
        gradient = hole.grad.to_tensor(0)
        assert gradient.isfinite().all()
        assert not gradient[0].any()


OF_MATRICES = ("variance", "stddev", "covariance_matrix", "precision_matrix")
# A distribution, its parameter with a hole, and what it is asked for.
ASKED = [
    *((kind, KINDS[kind][1][1], what) for kind in KINDS if kind != "LKJ" for what in OF_MATRICES),
    *((kind, KINDS[kind][1][1], what) for kind in KINDS if "Wishart" in kind for what in ("mean", "mode")),
    *((kind, KINDS[kind][1][1], "scale_tril") for kind in ("normal, covariance", "normal, precision", "low rank")),
    *((kind, name, "entropy") for kind, name in HOLES if kind != "LKJ" and name != "loc"),
]


@pytest.mark.parametrize(("kind", "name", "what"), ASKED)
def test_moments_and_entropy_need_the_whole_matrix(kind: str, name: str, what: str) -> None:
    given = parameters()
    plain, holey = made(kind, given), made(kind, given, **{name: with_hole(name, given[name])})
    wanted, found = getattr(plain, what), getattr(holey, what)
    if what == "entropy":
        wanted, found = wanted(), found()
    same(found, wanted, without_first(wanted.shape, 0))


@pytest.mark.parametrize("name", ["covariance_matrix", "scale_tril", "precision_matrix"])
def test_a_matrix_and_its_degrees_of_freedom_may_both_have_a_hole(name: str) -> None:
    given = parameters()
    degrees = md.masked_tensor(given["df"], torch.tensor([True, False, True]))
    holey = D.Wishart(degrees, **{name: with_hole(name, given[name])})
    wanted = D.Wishart(given["df"], **{name: given[name]}).mean
    same(holey.mean, wanted, torch.tensor([False, False, True])[:, None, None].expand(wanted.shape))


def test_entropy_does_not_depend_on_the_mean() -> None:
    given = parameters()
    normal = made("normal, triangle", given, loc=with_hole("loc", given["loc"]))
    assert torch.equal(normal.entropy(), made("normal, triangle", given).entropy())


NORMALS = ("normal, covariance", "normal, triangle", "low rank")
OF_NORMALS = [hole for hole in HOLES if hole[0] in NORMALS]


@pytest.mark.parametrize(
    ("kind", "name", "other"), [(*hole, NORMALS[(n + 1) % len(NORMALS)]) for n, hole in enumerate(OF_NORMALS)]
)
def test_divergences(kind: str, name: str, other: str) -> None:
    given = parameters()
    holey, plain, second = (
        made(kind, given, **{name: with_hole(name, given[name])}),
        made(kind, given),
        made(other, {n: t + 1 if n == "loc" else t * 2 for n, t in given.items()}),
    )
    valid = without_first(torch.Size((BATCH,)), 0)
    same(D.kl_divergence(holey, second), D.kl_divergence(plain, second), valid)
    same(D.kl_divergence(second, holey), D.kl_divergence(second, plain), valid)


@pytest.mark.filterwarnings("ignore:Singular sample detected")
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_with_a_hole(kind: str) -> None:
    plain = made(kind, parameters())
    value = drawn(plain)[0]
    same(plain.log_prob(with_hole("value", value)), plain.log_prob(value), without_first(torch.Size((BATCH,)), 0))


ROW = torch.linspace(-1, 1, 6, dtype=torch.float64).repeat(BATCH, 1)
TRANSFORMS: dict[str, tuple[D.Transform, Tensor]] = {
    "to a positive definite matrix": (D.PositiveDefiniteTransform(), parameters()["covariance_matrix"] / SIZE),
    "to a Cholesky factor": (D.CorrCholeskyTransform(), ROW),
    "to a simplex": (D.StickBreakingTransform(), ROW),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    transform, x = TRANSFORMS[name]
    y = transform(x)
    found, valid = transform(with_hole("x", x)), without_first(y.shape, 0)
    if name == "to a Cholesky factor":
        valid[0] = torch.ones_like(y[0]).triu(1).bool()  # zeros, and the 1 in the corner, whatever x is
        valid[0, 0, 0] = True
    same(found, y, valid)
    hole, x = with_hole("y", y), transform.inv(y)
    valid = without_first(x.shape, 0)
    if name == "to a positive definite matrix":
        valid[0] = torch.ones_like(x[0]).triu(1).bool()  # zeros, whatever y is
    same(transform.inv(hole), x, valid)
    if name != "to a positive definite matrix":  # which has none in torch
        wanted = transform.log_abs_det_jacobian(x, y)
        valid = without_first(wanted.shape, 0)
        same(transform.log_abs_det_jacobian(with_hole("x", x), y), wanted, valid)
        same(transform.log_abs_det_jacobian(x, with_hole("y", y)), wanted, valid)


def test_whole_parameters_share_memory() -> None:
    """A parameter of which every row is valid or invalid as a whole is not copied: later writes show, as in torch."""
    loc = md.masked_tensor(torch.zeros(2, 3), torch.tensor([[True], [False]]))
    normal = D.MultivariateNormal(loc, torch.eye(3))
    loc[0] = 5.0
    assert normal.mean[0].tolist() == [5.0] * 3


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_stored_sparsely(layout: str) -> None:
    given = parameters()
    value = torch.randn(BATCH, SIZE, dtype=torch.float64)
    hole = with_hole("loc", given["loc"])
    stored = hole.detach().to_layout(getattr(torch, layout))
    found = D.MultivariateNormal(stored, given["covariance_matrix"]).log_prob(value)
    same(found, made("normal, covariance", given).log_prob(value), without_first(found.shape, 0))


def test_the_arguments_are_those_of_torch() -> None:
    for owner, methods in METHODS.items():
        for name, slices in methods.items():
            assert set(slices) <= set(inspect.signature(getattr(owner, name)).parameters), (owner, name)
