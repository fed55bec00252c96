"""Sample calls of torch.distributions: parameters by hand, methods and pairs of kl_divergence from torch itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributions as D
from torch import Tensor
from torch.distributions.kl import _KL_REGISTRY

from op_registry.conformance.sample import Sample, start_all_random_numbers

BATCH = 4

NOT_CALLED = {
    "distributions.Distribution": "a base class",
    "distributions.ExponentialFamily": "a base class",
    "distributions.Transform": "a base class",
    "distributions.register_kl": "a decorator",
    "distributions.biject_to": "makes transforms of constraints",
    "distributions.transform_to": "makes transforms of constraints",
    "distributions.identity_transform": "a transform without a parameter",
}

Make = Callable[..., D.Distribution]


@contextlib.contextmanager
def arguments_are_validated() -> Iterator[None]:
    """Within the block, distributions validate arguments. (torch.compile turns this off for the process.)"""
    before = D.Distribution._validate_args
    D.Distribution.set_default_validate_args(True)
    try:
        yield
    finally:
        D.Distribution.set_default_validate_args(before)


def parameters() -> dict[str, tuple[Make, tuple[Tensor, ...]]]:
    """For each distribution, the function that makes it from tensors with the batch dimension in front."""
    start_all_random_numbers()
    real = torch.randn(BATCH, 3)
    positive, other = torch.rand(BATCH, 3) + 0.5, torch.rand(BATCH, 3) + 0.5
    share = torch.rand(BATCH, 3) * 0.8 + 0.1
    rows = torch.rand(BATCH, 3) + 0.1
    rows = rows / rows.sum(-1, keepdim=True)
    factor = torch.eye(3).expand(BATCH, 3, 3).contiguous() * 2 + 0.1
    triangle = torch.linalg.cholesky(factor)
    count = torch.tensor(6)
    of_one_positive = (D.Chi2, D.Dirichlet, D.Exponential, D.HalfCauchy, D.HalfNormal, D.Poisson)
    of_location_and_scale = (D.Cauchy, D.Gumbel, D.Laplace, D.LogNormal, D.LogisticNormal, D.Normal, D.VonMises)
    return {
        **{kind.__name__: (kind, (share,)) for kind in (D.Bernoulli, D.ContinuousBernoulli, D.Geometric)},
        **{kind.__name__: (kind, (positive,)) for kind in of_one_positive},
        **{kind.__name__: (kind, (positive, other)) for kind in (D.Beta, D.Gamma, D.Kumaraswamy)},
        **{kind.__name__: (kind, (real, positive)) for kind in of_location_and_scale},
        "Binomial": (lambda p: D.Binomial(count, p), (share,)),
        "Categorical": (lambda p: D.Categorical(logits=p), (real,)),
        "FisherSnedecor": (lambda a, b: D.FisherSnedecor(a, b), (positive + 4, other + 4)),
        "GeneralizedPareto": (lambda m, s, c: D.GeneralizedPareto(m, s, c), (real, positive, share / 4)),
        "Independent": (lambda m, s: D.Independent(D.Normal(m, s), 1), (real, positive)),
        "InverseGamma": (lambda a, b: D.InverseGamma(a + 3, b), (positive, other)),
        "LKJCholesky": (lambda c: D.LKJCholesky(3, c), (positive[:, 0],)),
        "LowRankMultivariateNormal": (
            lambda m, f, d: D.LowRankMultivariateNormal(m, f, d), (real, torch.randn(BATCH, 3, 2), positive)
        ),
        "MixtureSameFamily": (
            lambda w, m, s: D.MixtureSameFamily(D.Categorical(logits=w), D.Normal(m, s)), (real, real + 1, positive)
        ),
        "Multinomial": (lambda p: D.Multinomial(6, logits=p), (real,)),
        "MultivariateNormal": (lambda m, t: D.MultivariateNormal(m, scale_tril=t), (real, triangle)),
        "NegativeBinomial": (lambda p: D.NegativeBinomial(count, p), (share,)),
        "OneHotCategorical": (lambda p: D.OneHotCategorical(logits=p), (real,)),
        "OneHotCategoricalStraightThrough": (lambda p: D.OneHotCategoricalStraightThrough(logits=p), (real,)),
        "Pareto": (lambda s, a: D.Pareto(s, a + 2), (positive, other)),
        "RelaxedBernoulli": (lambda p: D.RelaxedBernoulli(torch.tensor(0.5), p), (share,)),
        "RelaxedOneHotCategorical": (lambda p: D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=p), (real,)),
        "StudentT": (lambda d, m, s: D.StudentT(d + 3, m, s), (positive, real, other)),
        "Uniform": (lambda low, width: D.Uniform(low, low + width), (real, positive)),
        "Weibull": (lambda s, c: D.Weibull(s, c), (positive, other + 1)),
        "Wishart": (lambda t: D.Wishart(torch.tensor(5.0), scale_tril=t), (triangle,)),
        "TransformedDistribution": (
            lambda m, s: D.TransformedDistribution(D.Normal(m, s), [D.ExpTransform()]), (real, positive)
        ),
    }  # fmt: skip


def transforms() -> dict[str, tuple[D.Transform, Tensor]]:
    """A transform of each kind with an argument."""
    x = torch.randn(BATCH, 3)
    without_parameters = (
        D.AbsTransform, D.CorrCholeskyTransform, D.ExpTransform, D.SigmoidTransform, D.SoftmaxTransform,
        D.SoftplusTransform, D.StickBreakingTransform, D.TanhTransform,
    )  # fmt: skip
    return {
        **{kind.__name__: (kind(), x) for kind in without_parameters},
        "AffineTransform": (D.AffineTransform(1.0, 2.0), x),
        "CatTransform": (D.CatTransform([D.ExpTransform(), D.AffineTransform(1.0, 2.0)], 1, [1, 2]), x),
        "ComposeTransform": (D.ComposeTransform([D.AffineTransform(1.0, 2.0), D.ExpTransform()]), x),
        "CumulativeDistributionTransform": (D.CumulativeDistributionTransform(D.Normal(0.0, 1.0)), x),
        "IndependentTransform": (D.IndependentTransform(D.ExpTransform(), 1), x),
        "LowerCholeskyTransform": (D.LowerCholeskyTransform(), torch.randn(BATCH, 3, 3)),
        "PositiveDefiniteTransform": (D.PositiveDefiniteTransform(), torch.randn(BATCH, 3, 3)),
        "PowerTransform": (D.PowerTransform(torch.tensor(2.0)), x.abs() + 0.1),
        "ReshapeTransform": (D.ReshapeTransform(torch.Size((3,)), torch.Size((3, 1))), x),
        "StackTransform": (
            D.StackTransform([D.ExpTransform(), D.AffineTransform(1.0, 2.0), D.TanhTransform()], 1), x
        ),
    }  # fmt: skip


def samples_of_distribution(name: str) -> list[Sample]:
    """Calls of ``distributions.NAME.method``, or of ``distributions.kl_divergence``."""
    _, kind, *method = name.split(".")
    start_all_random_numbers()
    if kind == "kl_divergence":
        return [_divergence(p, q, number) for number, (p, q) in enumerate(pairs())]
    if kind in parameters():
        return _of_method(kind, method[0])
    if kind in transforms() and method:
        return _of_transform(kind, method[0])
    return []


def pairs() -> list[tuple[str, str]]:
    """The pairs of distributions for which torch has a formula."""
    names = [(p.__name__, q.__name__) for p, q in _KL_REGISTRY]
    return sorted((p, q) for p, q in names if p in parameters() and q in parameters())


def _divergence(p: str, q: str, number: int) -> Sample:
    (make_p, given_p), (make_q, given_q) = parameters()[p], parameters()[q]
    given_q = tuple(t.clone() for t in given_q)

    @arguments_are_validated()
    def divergence(*given: Tensor) -> Tensor:
        return D.kl_divergence(make_p(*given[: len(given_p)]), make_q(*given[len(given_p) :]))

    return Sample(divergence, (*given_p, *given_q), {}, number, torch.float32)


def _of_method(kind: str, method: str) -> list[Sample]:
    make, given = parameters()[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = make(*given).sample()
    if method in ("log_prob", "cdf", "icdf"):
        value = torch.rand(value.shape) * 0.8 + 0.1 if method == "icdf" else value

        @arguments_are_validated()
        def evaluate(value: Tensor, *given: Tensor) -> Any:
            return getattr(make(*given), method)(value)

        return [Sample(evaluate, (value, *given), {}, 0, torch.float32)]

    @arguments_are_validated()
    def ask(*given: Tensor) -> Any:
        found = getattr(make(*given), method)
        return found() if callable(found) else found

    return [Sample(ask, given, {}, 0, torch.float32)]


def _of_transform(kind: str, method: str) -> list[Sample]:
    transform, x = transforms()[kind]
    y = transform(x)
    calls: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "forward": (lambda x: transform(x), (x,)),
        "inverse": (lambda y: transform.inv(y), (y,)),
        "log_abs_det_jacobian": (lambda x, y: transform.log_abs_det_jacobian(x, y), (x, y)),
    }
    fn, args = calls[method]
    return [Sample(fn, args, {}, 0, torch.float32)]
