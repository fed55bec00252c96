"""Systems of equations, all or nothing for each column of the solution, against plain torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from padded_slices import GARBAGE, matrices, same, wrapped

aten = torch.ops.aten


def systems() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Matrices (4, 3, 3) of which two are whole, and right-hand sides (4, 3, 2) of which one column has a hole."""
    a, a_mask = matrices()
    b = torch.randn(4, 3, 2, dtype=torch.float64)
    b_mask = torch.ones(b.shape, dtype=torch.bool)
    b_mask[2, 1, 0] = False
    return a, a_mask, b, b_mask


SOLVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "solve": torch.linalg.solve,
    "solve from the right": lambda a, b: torch.linalg.solve(a, b.mT, left=False).mT,
    "lstsq": lambda a, b: torch.linalg.lstsq(a, b).solution,
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky(a)),
    "lu_solve": lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
}


@pytest.mark.parametrize("hidden", GARBAGE)
@pytest.mark.parametrize("name", SOLVES)
def test_a_column_depends_on_its_matrix_and_itself(name: str, hidden: float) -> None:
    a, a_mask, b, b_mask = systems()
    x, y = wrapped(a, a_mask, hidden), wrapped(b, b_mask, hidden)
    columns = torch.tensor([[True, True], [False, False], [False, True], [False, False]])[:, None, :].expand(4, 3, 2)
    result = SOLVES[name](x, y)
    plain_a, plain_b = a.clone().requires_grad_(), b.clone().requires_grad_()
    wanted = SOLVES[name](plain_a, plain_b)
    same(result, wanted, columns)
    mine = torch.autograd.grad(result.square().sum(), (x, y))
    theirs = torch.autograd.grad(wanted[columns].square().sum(), (plain_a, plain_b))
    same(mine[0], theirs[0], a_mask)
    same(mine[1], theirs[1], b_mask)


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize(("upper", "unitriangular"), itertools.product([True, False], repeat=2))
def test_a_triangular_solve_reads_one_triangle(upper: bool, unitriangular: bool) -> None:
    a, _, b, b_mask = systems()
    read = torch.ones(3, 3, dtype=torch.bool)
    read = read.triu(int(unitriangular)) if upper else read.tril(-int(unitriangular))
    x, y = wrapped(a, read.expand(a.shape), math.nan), wrapped(b, b_mask, math.nan)
    options = {"upper": upper, "unitriangular": unitriangular}
    wanted = torch.linalg.solve_triangular(a, b, **options)
    columns = b_mask.all(1, keepdim=True)
    result = torch.linalg.solve_triangular(x, y, **options)
    same(result, wanted, columns)
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.get_data()[x.get_mask()].isfinite().all()
    solved, copied = torch.triangular_solve(y, x, upper, False, unitriangular)
    same(solved, wanted, columns)
    assert not copied.get_mask().any()


def test_pivots_out_of_range_are_not_read() -> None:
    a, _, b, _ = systems()
    factors, pivots = torch.linalg.lu_factor(a)
    known = torch.tensor([True, False, True, True])[:, None].expand(pivots.shape)
    hidden = md.masked_tensor(torch.where(known, pivots, 1_000_000), known)
    same(torch.linalg.lu_solve(factors, hidden, b), torch.linalg.solve(a, b), known[:, :1, None])
    for mine, plain in zip(torch.lu_unpack(factors, hidden), torch.lu_unpack(factors, pivots), strict=True):
        same(mine, plain, known[:, :1, None])


def test_least_squares_drop_no_equation_by_themselves() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 5, 3), torch.randn(2, 5, 2)
    mask = torch.ones(b.shape, dtype=torch.bool)
    mask[1, 0, 1] = False
    found = torch.linalg.lstsq(a, wrapped(b, mask, math.nan), driver="gelsd")
    wanted = torch.linalg.lstsq(a, b, driver="gelsd")
    same(found.solution, wanted.solution, mask.all(1, keepdim=True))
    same(found.residuals, wanted.residuals, mask.all(1))
    same(found.rank, wanted.rank, torch.tensor(True))
    same(found.singular_values, wanted.singular_values, torch.tensor(True))


def test_a_normal_distribution_with_padded_rows() -> None:
    torch.manual_seed(0)
    rows, mask = torch.randn(3, 4), torch.tensor([[True] * 4, [True, False, True, True], [False] * 4])
    covariance = torch.randn(4, 4)
    covariance = covariance @ covariance.mT + torch.eye(4)
    normal = torch.distributions.MultivariateNormal(torch.zeros(4), covariance)
    x = wrapped(rows, mask, 0.0)
    likelihood = normal.log_prob(x)
    same(likelihood, normal.log_prob(rows), mask.all(1))
    likelihood.sum().backward()
    assert x.grad is not None
    alone = rows[:1].clone().requires_grad_()
    normal.log_prob(alone).sum().backward()
    assert alone.grad is not None
    same(x.grad, torch.cat([alone.grad, torch.zeros(2, 4)]), mask)
