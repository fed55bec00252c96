"""An invented library for the mutants: an operator of each kind, its right rule, and oracles and samples if needed.

Operators are defined by torch.library.custom_op in a namespace of their own. Rules are registered by category where the
category has a run, and as functions otherwise. Importing this module defines the operators; `register` registers the
rule of one of them, in the caller's overlay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.oracles.call import Expected
from op_registry.dimensions.equation import Equation
from op_registry.dimensions.movements import Along
from op_registry.dimensions.slices import Slices
from op_registry.laws import categories, words
from op_registry.laws.whole_slices import whole_slices
from op_registry.records.dense import Dense
from op_registry.records.dtypes import lowest
from op_registry.records.validity import intersect
from op_registry.rule import Rule

NAMESPACE = "op_registry_mutants"
MATMUL = Equation("*mk,*kn->*mn", "*mk,k->*m", "k,*kn->*n", "k,k->")


def _defined(function: Callable[..., Tensor], differentiable: bool = True) -> OpOverload:
    """A custom operator that runs `function`, on fake tensors too; with the derivative of `function`."""
    operator = torch.library.custom_op(f"{NAMESPACE}::{function.__name__}", function, mutates_args=())
    operator.register_fake(lambda *args, **kwargs: torch.empty_like(function(*args, **kwargs)))
    if differentiable:
        operator.register_autograd(functools.partial(_derivative, function), setup_context=_save_inputs)
    return operator._opoverload


def _save_inputs(ctx: Any, inputs: Sequence[object], output: object) -> None:
    """The tensors, and the other inputs at their places."""
    ctx.save_for_backward(*(i for i in inputs if isinstance(i, Tensor)))
    ctx.others = [None if isinstance(i, Tensor) else i for i in inputs]


def _derivative(function: Callable[..., Tensor], ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The derivative of the operators in which the function is written; it can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        tensors = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in ctx.saved_tensors]
        remaining = iter(tensors)
        result = function(*(next(remaining) if i is None else i for i in ctx.others))
        found = iter(torch.autograd.grad(result, tensors, grad, create_graph=again))
    return tuple(next(found) if i is None else None for i in ctx.others)


# ------------------------------------------------------------------------------------------------------ the operators


def soft_sign(x: Tensor) -> Tensor:
    return x / (1 + x.abs())


def blend(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight + weight


def total(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return x.sum(dim, keepdim)


def peak(values: Tensor, axis: int) -> Tensor:
    return values.amax(axis)


def running(x: Tensor, dim: int) -> Tensor:
    return x.cumsum(dim)


def reversed_copy(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim)


def product(left: Tensor, right: Tensor) -> Tensor:
    return torch.matmul(left, right)


def centered(x: Tensor, dim: int) -> Tensor:
    return x - x.mean(dim, keepdim=True)


def whitened(x: Tensor) -> Tensor:
    return x - x.sum() / max(x.numel(), 1)


def forbidden(x: Tensor) -> Tensor:
    return x.flatten().flip(0).reshape(x.shape)


def gram(x: Tensor) -> Tensor:
    return x @ x.mT


def poured(x: Tensor, places: Tensor, source: Tensor) -> Tensor:
    return x.masked_scatter(places > 0, source)


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape)


def glued(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], -1)


def picked(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition > 0, a, b)


def positives(x: Tensor) -> Tensor:
    return (x > 0).sum()


SOFT_SIGN = _defined(soft_sign)
BLEND = _defined(blend)
TOTAL = _defined(total)
PEAK = _defined(peak, False)
RUNNING = _defined(running)
REVERSED = _defined(reversed_copy)
PRODUCT = _defined(product)
CENTERED = _defined(centered)
WHITENED = _defined(whitened)
FORBIDDEN = _defined(forbidden, False)
GRAM = _defined(gram)
POURED = _defined(poured, False)
NOISY = _defined(noisy, False)
GLUED = _defined(glued)
PICKED = _defined(picked, False)
POSITIVES = _defined(positives, False)


# ---------------------------------------------------------------------------------------------------------- the rules


def _peak() -> Rule:
    @words.masked_rule(PEAK, category=categories.REDUCTION, dims=Slices(dim="axis"))
    def peak_rule(values: Dense, axis: int) -> Dense:
        return Dense(PEAK(values.filled(lowest(values.dtype)), axis), values.any_valid(axis))

    return peak_rule


def _centered() -> Rule:
    @words.masked_rule(CENTERED, category=categories.NORMALIZATION, dims=Slices("each"))
    def centered_rule(x: Dense, dim: int) -> Dense:
        if x.valid is None:
            return Dense(CENTERED(x.data, dim))
        mask = x.valid.expand(x.shape)
        mean = x.filled(0).sum(dim, keepdim=True) / mask.sum(dim, keepdim=True).clamp(min=1)
        return x.like(x.filled(0) - mean)

    @centered_rule.oracle
    def by_slices(x: Expected, dim: int) -> Expected:
        if not x.ndim:
            return Expected(x.data - x.data, x.mask)
        slices = []
        for values, valid in zip(_slices(x.data, dim), _slices(x.mask, dim), strict=True):
            mean = values[valid].mean()
            slices.append(torch.where(valid, torch.where(valid, values, 0) - mean, 0) if valid.any() else values * 0)
        moved = x.data.movedim(dim, -1).shape
        return Expected(torch.stack(slices).reshape(moved).movedim(-1, dim) if slices else x.data, x.mask)

    return centered_rule


def _slices(data: Tensor, dim: int) -> Tensor:
    """(slices, size of the dimension)."""
    return data.movedim(dim, -1).reshape(-1, data.shape[dim])


def _gram() -> Rule:
    rule = whole_slices(GRAM, dims=Equation("*MK->*MN"))

    @rule.samples
    def batches(make: Callable[..., Tensor]) -> list[tuple[Tensor, ...]]:
        return [(make(shape),) for shape in ((4, 2, 3), (2, 3, 2, 2), (3, 4))]

    return rule


def _poured() -> Rule:
    @words.masked_rule(POURED, category=categories.ASSIGNMENT)
    def poured_rule(x: Dense, places: Dense, source: Dense) -> Dense:
        written = places.filled(0)  # an invalid place is not written, and takes nothing
        data = POURED(x.data, written, source.data)
        if x.validity is None and source.validity is None:
            return Dense(data)
        ones = [torch.ones(r.shape, dtype=torch.int8) if r.valid is None else r.full_validity for r in (x, source)]
        return Dense(data, POURED(ones[0], written, ones[1]))

    @poured_rule.oracle
    def by_hand(x: Expected, places: Expected, source: Expected) -> Expected:
        data, mask = x.data.flatten().clone(), x.mask.flatten().clone()
        values, valid = source.data.flatten(), source.mask.flatten()
        written = ((places.data > 0) & places.mask).flatten().nonzero().flatten()
        for n, place in enumerate(written.tolist()):
            data[place], mask[place] = values[n], valid[n]
        return Expected(data.reshape(x.shape), mask.reshape(x.shape))

    @poured_rule.samples
    def of_one_shape(make: Callable[..., Tensor]) -> list[tuple[Tensor, ...]]:
        return [(make(shape), make(shape), make(shape)) for shape in ((5,), (3, 4), (2, 3, 4))]

    return poured_rule


def _noisy() -> Rule:
    @words.masked_rule(NOISY, category=categories.RANDOM)
    def noisy_rule(x: Dense) -> Dense:
        return x.like(NOISY(x.data))

    return noisy_rule


def _glued() -> Rule:
    @words.masked_rule(GLUED, category=categories.JOIN, dims=Equation("*a,*b->*C", joined="ab"))
    def glued_rule(a: Dense, b: Dense) -> Dense:
        if a.validity is None and b.validity is None:
            return Dense(GLUED(a.data, b.data))
        validities = [torch.ones(r.shape, dtype=torch.int8) if r.valid is None else r.full_validity for r in (a, b)]
        return Dense(GLUED(a.data, b.data), torch.cat(validities, -1))  # type: ignore[arg-type]

    return glued_rule


def _picked() -> Rule:
    @words.masked_rule(PICKED, category=categories.CHOICE)
    def picked_rule(condition: Dense, a: Dense, b: Dense) -> Dense:
        result = PICKED(condition.filled(0), a.data, b.data)
        if condition.validity is None and a.validity is None and b.validity is None:
            return Dense(result)
        ones = torch.ones(result.shape, dtype=torch.int8)
        first, second = (ones if r.full_validity is None else r.full_validity.expand(result.shape) for r in (a, b))
        chosen = torch.where(condition.filled(0) > 0, first, second)
        return Dense(result, intersect(condition.validity, chosen))

    @picked_rule.oracle
    def by_hand(condition: Expected, a: Expected, b: Expected) -> Expected:
        chosen = condition.data > 0
        mask = torch.where(chosen, a.mask.expand(chosen.shape), b.mask.expand(chosen.shape)) & condition.mask
        return Expected(torch.where(chosen, a.data, b.data), mask)

    @picked_rule.samples
    def of_one_shape(make: Callable[..., Tensor]) -> list[tuple[Tensor, ...]]:
        return [(make(shape), make(shape), make(shape)) for shape in ((), (5,), (3, 4), (2, 3, 4))]

    return picked_rule


def _positives() -> Rule:
    @words.masked_rule(POSITIVES, category=categories.QUERY)
    def positives_rule(x: Dense) -> Tensor:
        return POSITIVES(x.filled(0))

    @positives_rule.oracle
    def by_hand(x: Expected) -> Tensor:
        return (x.data[x.mask] > 0).sum()

    return positives_rule


# A function that registers the rule of the operator of each kind.
RULES: dict[str, Callable[[], Rule]] = {
    "elementwise": lambda: words.elementwise(SOFT_SIGN),
    "elementwise, of two": lambda: words.elementwise(BLEND),
    "reduction": lambda: words.reduction(TOTAL, identity=0),
    "reduction, by hand": _peak,
    "scan": lambda: words.scan(RUNNING, identity=0),
    "movement": lambda: words.movement(REVERSED, dims=Along("moved")),
    "contraction": lambda: words.contraction(PRODUCT, dims=MATMUL),
    "normalization": _centered,
    "whole slices": _gram,
    "assignment": _poured,
    "opaque": lambda: words.opaque(WHITENED),
    "refused": lambda: words.refused(FORBIDDEN, reason="it reverses all elements", instead="Use torch.flip"),
    "random": _noisy,
    "join": _glued,
    "choice": _picked,
    "query": _positives,
}


def register(kind: str) -> Rule:
    """Register the right rule of the operator of a kind in the innermost overlay."""
    return RULES[kind]()
