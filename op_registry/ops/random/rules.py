"""Random operators.

Law: as torch, drawn for every element, so that masks don't change the stream of random numbers; valid where the input
is. Values under the mask must not change the stream either, nor make the call raise, so invalid parameters of a
distribution are filled with a value that is always allowed.

Law of torch.distributions of vectors and matrices: a constructor makes a row (`loc`, `cov_diag`) or a matrix with an
invalid element invalid as a whole, Wishart's also where `df` is invalid. It copies such a parameter alone. So do
`log_prob` of LKJCholesky (with matrices) and of LowRankMultivariateNormal (with rows), and the transforms
PositiveDefiniteTransform, CorrCholeskyTransform and StickBreakingTransform. Draws, `log_prob`, moments, `kl_divergence`
and entropy of that one distribution of a batch are then invalid, but for the entropy if the hole is in `loc`.

Law of dropout: of a packed batch, it draws for the padded batch, in its shape and order. So with one seed the same
elements, and inside attention the same weights, are dropped in every layout. (But for a padded batch that is not
contiguous, as the attention of torch.nn returns one: torch draws in memory order.) In the other sparse layouts, dropout
needs dense storage.

The in-place generators (`normal_`, `uniform_` …) are assignments: they are written back from their functional forms,
whose results are valid everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    ASSIGNMENT,
    RANDOM,
    Bound,
    Dense,
    Elementwise,
    Equation,
    NotLowered,
    Number,
    Permuted,
    Sparse,
    as_bool,
    elementwise,
    intersect,
    masked_rule,
    on_call,
    on_device_of,
    packet_name,
    replaced,
    run_elementwise,
    shown,
    whole_validity,
)
from op_registry.dimensions.slices import LastDims
from op_registry.records.fill import hand_on
from op_registry.traits import Traits

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------------------------ dropout


def drops_nothing(p: float, train: bool) -> bool:
    """Whether torch's dropout returns its input whatever that is."""
    return 0 <= p <= 1 and (p == 0 or not train)


@masked_rule(
    aten.dropout,
    aten.feature_dropout,
    aten.alpha_dropout,
    aten.feature_alpha_dropout,
    category=RANDOM,
    takes_op=True,
    unchanged=drops_nothing,
)
def dropout(op: OpOverload, input: Dense, p: float, train: bool) -> Dense:
    """Drops valid and invalid elements alike; where nothing can be dropped, the input itself, as in torch."""
    if drops_nothing(p, train) or (0 <= p <= 1 and input.data.numel() == 0):
        return input
    dropped = op(input.data, p, train)
    if op in (aten.dropout.default, aten.feature_dropout.default):  # the alpha forms shift what they keep
        hand_on(input.data, dropped, input.validity)
    return input.like(dropped)


@masked_rule(aten.native_dropout, category=RANDOM)
def native_dropout(input: Dense, p: float, train: bool | None) -> tuple[Dense, Dense]:
    """Dropout, and the mask of elements that it kept."""
    result, kept = aten.native_dropout(input.data, p, train)
    return input.like(result), input.like(kept)


# torch.distributions calls these in the backward of samples.
_standard_gamma_grad = elementwise(aten._standard_gamma_grad.default)
_dirichlet_grad = elementwise(aten._dirichlet_grad.default, neutral=0.5)
native_dropout_backward = elementwise(aten.native_dropout_backward.default, derivative="bilinear")


# ------------------------------------------------------------------------------- distributions with tensor parameters


def drawn(op: OpOverload, *args: Any, allowed: Number, **kwargs: Any) -> Any:
    """Elementwise, with parameters replaced by `allowed` wherever the result is invalid."""
    return run_elementwise(op, *args, _traits=Traits(traps=True, neutral=allowed), **kwargs)


@masked_rule(aten.bernoulli.default, category=RANDOM)
def bernoulli(self: Dense, *, generator: torch.Generator | None = None) -> Any:
    """1 with the input as probability, else 0."""
    return drawn(aten.bernoulli.default, self, generator=generator, allowed=0)


@masked_rule(aten.poisson, category=RANDOM)
def poisson(self: Dense, generator: torch.Generator | None = None) -> Any:
    """The input is the rate; a rate of 0 draws nothing."""
    return drawn(aten.poisson.default, self, generator, allowed=0)


@masked_rule(aten.binomial, category=RANDOM)
def binomial(count: Dense, prob: Dense, generator: torch.Generator | None = None) -> Any:
    """Valid where both parameters are."""
    return drawn(aten.binomial.default, count, prob, generator, allowed=0)


@masked_rule(aten._standard_gamma, category=RANDOM)
def _standard_gamma(self: Dense, generator: torch.Generator | None = None) -> Any:
    """The input is the concentration."""
    return drawn(aten._standard_gamma.default, self, generator, allowed=1)


@masked_rule(aten._sample_dirichlet, category=RANDOM, dims=LastDims(1))
def _sample_dirichlet(self: Dense, generator: torch.Generator | None = None) -> Any:
    """All or nothing for each row; an incomplete row draws like a row of ones."""
    whole = whole_validity(self, (-1,))
    return Dense(aten._sample_dirichlet(replaced(self, whole, 1), generator), whole)


@masked_rule(
    aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor, category=RANDOM, takes_op=True
)
def normal(op: OpOverload, *parameters: Any, generator: torch.Generator | None = None) -> Any:
    """Valid where mean and standard deviation are."""
    return drawn(op, *parameters, generator=generator, allowed=1)


# torch accepts only int64 for out=, which its kernel for meta tensors does not check.
@masked_rule(aten.multinomial, category=RANDOM, exact_out=True, dims=Equation("*k->*N"))
def multinomial(
    self: Dense, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Dense:
    """Draws among the valid categories of each row.

    A row without valid categories draws from all of them, and is invalid. Without replacement, so are the draws after
    the valid categories are used up.
    """
    weights = self.filled(0)
    if self.validity is not None and self.ndim > 0:
        any_valid = self.any_valid(-1, keepdim=True)
        assert any_valid is not None
        weights = torch.where(as_bool(any_valid), weights, 1)
    index = aten.multinomial(weights, num_samples, replacement, generator=generator)
    validity = self.full_validity
    return Dense(index, None if validity is None else validity.gather(-1, index))


# ------------------------------------------------------------------------------------------------------------- *_like


@masked_rule(
    aten.rand_like,
    aten.randn_like,
    aten.randint_like.default,
    aten.randint_like.generator,
    aten.randint_like.low_dtype,
    aten.randint_like.low_generator_dtype,
    category=RANDOM,
    takes_op=True,
)
def rand_like(op: OpOverload, self: Dense, *limits: int, **options: Any) -> Dense:
    """Drawn for every element, under the mask of the input, which moves to the device of the result."""
    data = op(self.data, *limits, **options)
    return Dense(data, on_device_of(data, self.validity))


@masked_rule(aten.randint_like.Tensor, aten.randint_like.Tensor_generator, category=RANDOM, takes_op=True)
def randint_like(op: OpOverload, self: Dense, high: Dense, **options: Any) -> Dense:
    """The limit is a 0-d tensor; where it is invalid, so is the whole result."""
    data = op(self.data, high.filled(1), **options)
    return Dense(data, on_device_of(data, intersect(self.validity, high.validity)))


# ------------------------------------------------------------------------ functional forms of the in-place generators


@masked_rule(
    aten.cauchy,
    aten.exponential,
    aten.geometric,
    aten.log_normal,
    aten.normal_functional,
    aten.random,
    aten.uniform,
    aten.bernoulli.p,
    category=ASSIGNMENT,
    dims=Elementwise(),
    takes_op=True,
)
def uniform(op: OpOverload, self: Dense, *parameters: Number, **options: Any) -> Dense:
    """New values everywhere, all valid."""
    in_place = packet_name(op).removesuffix("_functional") + "_"
    return Dense(getattr(torch.empty_like(self.data), in_place)(*parameters, **options))


@masked_rule(aten.bernoulli.Tensor, category=ASSIGNMENT, dims=Elementwise())
def bernoulli_tensor(self: Dense, p: Dense, *, generator: torch.Generator | None = None) -> Dense:
    """New values everywhere, valid where their probability is."""
    return Dense(torch.empty_like(self.data).bernoulli_(p.filled(0), generator=generator), p.validity)


# ---------------------------------------------------------------- dropout on packed batches, drawn for the padded batch

# Storage does not change the stream of random numbers: numbers are drawn for every element of the padded batch, and the
# stored rows use theirs. Only packed storage guarantees that the padded batch is of a moderate size.


@dropout.lowering(Sparse)
@dropout.lowering(Permuted)
@on_call
def dropout_of_packed(c: Bound) -> Sparse | Permuted:
    """Draw random numbers for the whole padded batch; each stored row uses its own.

    torch draws in memory order, which for a permuted tensor is that of its base.
    """
    (input, _), p = shown(c.input), c.p
    if drops_nothing(p, c.train) or (0 <= p <= 1 and 0 in input.shape):
        return c.input  # type: ignore[no-any-return]
    by_channel = c.op is aten.feature_dropout.default and isinstance(c.input, Sparse)
    if not input.pattern.layout.of_sequences or not (by_channel or c.op is aten.dropout.default):
        raise NotLowered("it draws a random number for every element or channel, stored or not")
    values = _dropped(c, input)
    return c.input.like(values if isinstance(c.input, Sparse) else input.like(values))  # type: ignore[no-any-return]


def _dropped(c: Bound, input: Sparse) -> Dense:
    """The values of a packed record with the dropout that is drawn for the padded batch."""
    op, p, values = c.op, c.p, input.values.data
    if not 0 <= p < 1:
        return dropout.run(op, input.values, p, c.train)  # drops everything, or raises torch's error
    sizes = input.pattern.sizes
    dense = input.dense_sizes if op is aten.dropout.default else (1,) * len(input.dense_sizes)
    if values.device.type == "cpu":  # torch's steps on CPU, the last two for the stored rows alone
        padded = values.new_empty((*sizes, *dense)).bernoulli_(1 - p).flatten(0, 1)
        factors = padded.index_select(0, input.pattern.positions()).div_(1 - p)
    else:
        padded = aten.dropout(values.new_ones((*sizes, *dense)), p, True).flatten(0, 1)
        factors = padded.index_select(0, input.pattern.positions())
    return input.values.like(values * factors)
