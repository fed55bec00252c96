"""Contractions with sparse operands, by their equation: the sum of products, and what is added to it.

Law: that of dense storage. An added operand and the sum are added elementwise: valid, and stored, where both are. What
is added to a sparse operand is computed only where that stores elements (torch's `sampled_addmm`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from op_registry.autocast import autocast_on
from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels
from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.dense import Dense
from op_registry.records.dims import Number
from op_registry.records.dtypes import accumulation_dtype
from op_registry.sparse import products
from op_registry.sparse.compose import call_broadcast
from op_registry.sparse.lowering import OnCall
from op_registry.sparse.plans import planned
from op_registry.sparse.products import Own
from op_registry.sparse.record import NotLowered, Sparse, with_sparse_dims

aten = torch.ops.aten

AnyStorage = Dense | Sparse


class Sum(NamedTuple):
    """The plan of a sum of products.

    factors  the names and labels of its two factors
    added    the name of what is added, if anything is
    result   the labels of the result
    shared   dimensions of both factors that have one label, and whether they broadcast
    """

    factors: list[tuple[str, Own]]
    added: str | None
    result: Own
    shared: list[tuple[int, int, bool]]


def by_equation(c: Bound) -> Any:
    """A contraction whose sparse operands have no dense dimensions; products are rounded once to half precision."""
    plan = sum_of_call(c)
    dtype = dtype_of(c, plan)
    wide = accumulation_dtype(dtype)
    if wide is dtype:
        return summed(c, plan)
    return cast(summed(c.map(lambda r: cast(r, wide), (Dense, Sparse)), plan), dtype)


def by_elements(c: Bound) -> Any:
    """The same after listing the valid elements of dense dimensions one by one."""
    return by_equation(c.map(lambda x: with_sparse_dims(x, x.ndim), Sparse))


@planned
def sum_of_call(c: Bound, labels: Labels | None) -> Sum:
    """The factors of a call, and what they are multiplied along."""
    if labels is None:
        raise NotLowered("its operands have other dimensions than its rule states")
    if not labels.is_sum_of_products:
        raise NotLowered("it is no sum of products alone")
    tensors = c.tensors
    for name, x in tensors.items():
        if isinstance(x, Sparse) and x.dense_sizes:
            raise NotLowered(f"dimension {x.pattern.ndim} of its operand `{name}` is dense, behind sparse ones")
    factors = [(name, labels.operands[name]) for name in tensors if name not in labels.added]
    if len(factors) != 2 or len(labels.added) > 1:
        raise NotLowered("it has not two factors")
    (_, own), (_, theirs) = factors
    for (name, mine), others in zip(factors, (theirs, own), strict=True):
        for d, label in enumerate(mine):
            if label in labels.roles and label not in others:
                raise NotLowered(f"it sums its operand `{name}` alone along dimension {d}")
    shared = [(d, theirs.index(label), isinstance(label, int)) for d, label in enumerate(own) if label in theirs]
    return Sum(factors, next(iter(labels.added), None), labels.results[0], shared)


def dtype_of(c: Bound, plan: Sum) -> torch.dtype:
    """The dtype of all operands; NotLowered if torch computes in another one."""
    dtypes = [c.named[name].dtype for name, _ in plan.factors]
    if plan.added is not None:
        dtypes.append(c.named[plan.added].dtype)
    dtype: torch.dtype = dtypes[0]
    if dtypes.count(dtype) < len(dtypes) or dtype is torch.bool:
        raise NotLowered(f"its operands have the dtypes {', '.join(map(str, dtypes))}")
    if autocast_on(c.named[plan.factors[0][0]].device):
        raise NotLowered("autocast chooses another dtype")
    if not (dtype.is_floating_point or dtype.is_complex) and float in (type(c.named.get(n)) for n in ("alpha", "beta")):
        raise NotLowered("torch rounds fractional factors of integers")
    return dtype


def factors_of(c: Bound, plan: Sum) -> list[tuple[Any, Own]]:
    """The factors with their labels: None for a dimension of size 1 that broadcasts over the other factor's.

    NotLowered for sizes that torch refuses, or that are 0.
    """
    factors = [(c.named[name], own) for name, own in plan.factors]
    sizes = [x.pattern.sizes if isinstance(x, Sparse) else x.data.shape for x, _ in factors]
    for (name, _), mine in zip(plan.factors, sizes, strict=True):
        if known_to_hold(math.prod(mine) == 0):
            raise NotLowered(f"its operand `{name}` of shape {tuple(mine)} is empty")
    for *dims, broadcasts in plan.shared:
        size, other = (mine[d] for mine, d in zip(sizes, dims, strict=True))
        if known_to_hold(size == other):
            continue
        one = next((n for n, mine in enumerate((size, other)) if broadcasts and known_to_hold(mine == 1)), None)
        if one is not None:
            x, own = factors[one]
            factors[one] = x, (*own[: dims[one]], None, *own[dims[one] + 1 :])
        elif known_to_hold(size != other):
            name, _ = plan.factors[0]
            raise NotLowered(
                f"dimension {dims[0]} of its operand `{name}` has size {size}, and {other} in another operand"
            )
    return factors


def summed(c: Bound, plan: Sum) -> AnyStorage:
    """``beta * added + alpha * product``; with ``beta=0``, the added operand takes no part."""
    factors, result = factors_of(c, plan), plan.result
    added = None if plan.added is None or c.named.get("beta", 1) == 0 else c.named[plan.added]
    if plan.added is not None:
        shape, smaller = shape_of(factors, result), tuple(c.named[plan.added].shape)
        pairs = zip(smaller[::-1], shape[::-1], strict=False)
        if any(known_to_hold(mine != 1) and known_to_hold(mine != size) for mine, size in pairs):
            where = f"its operand `{plan.added}` of shape {smaller} does not broadcast"
            raise NotLowered(f"{where} to the result's, {shape}")
    (x, own), (y, theirs) = factors if isinstance(factors[0][0], Sparse) else factors[::-1]
    product: AnyStorage
    if isinstance(x, Dense):
        if isinstance(added, Sparse) and added.ndim == len(result) and added.shape == shape:
            return sampled_sum(c)
        product = without_added(c, plan, shape)
    else:
        multiply = products.sparse_by_sparse if isinstance(y, Sparse) else products.sparse_by_dense
        product = scaled(multiply(x, own, y, theirs, result), c.named.get("alpha", 1))
    if added is None:
        return product
    return call_broadcast(aten.add.Tensor, scaled(added, c.named.get("beta", 1)), product)


def sampled_sum(c: Bound) -> Sparse:
    """``beta * added + alpha * product`` where the added operand stores elements; elsewhere the sum is invalid."""
    plan, alpha, beta = sum_of_call(c), c.named.get("alpha", 1), c.named.get("beta", 1)
    x: Sparse = c.named[str(plan.added)]
    (a, own), (b, theirs) = factors_of(c, plan)
    product, flat = products.sampled(x, a, own, b, theirs, plan.result), x.flat
    data = alpha * product.data + (beta * flat.data if beta != 0 else 0)
    return x.folded(Dense(data, product.validity).masked_by(flat.full_validity))


def without_added(c: Bound, plan: Sum, shape: tuple[int, ...]) -> Dense:
    """The contraction of dense factors by its rule, with nothing added."""
    name = str(plan.added)
    if "beta" not in c:
        return c.with_(**{name: None}).run()  # type: ignore[no-any-return]
    nothing = torch.zeros((), dtype=c[name].dtype, device=c[name].device).expand(shape)
    return c.with_(**{name: Dense(nothing), "beta": 0}).run()  # type: ignore[no-any-return]


def shape_of(factors: Sequence[tuple[AnyStorage, Own]], result: Own) -> tuple[int, ...]:
    """The shape of the product."""
    sizes = {label: size for x, own in factors for label, size in zip(own, x.shape, strict=True)}
    return tuple(sizes[label] for label in result)


def scaled(x: AnyStorage, factor: Number) -> AnyStorage:
    """A record times a number."""
    if factor == 1:
        return x
    if isinstance(x, Dense):
        return x.like(x.filled(0) * factor)
    return x.like(x.values.like(x.values.filled(0) * factor))


def cast(record: AnyStorage, dtype: torch.dtype) -> AnyStorage:
    """A record in another dtype."""
    if isinstance(record, Sparse):
        return record.like(record.values.like(record.values.data.to(dtype)))
    return record.like(record.data.to(dtype))


BY_EQUATION, BY_ELEMENTS = OnCall(by_equation, of_dims=True), OnCall(by_elements, of_dims=True)
