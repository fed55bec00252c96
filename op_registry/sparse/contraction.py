"""Contractions with sparse operands, by their equation: the sum of products, and what is added to it.

Law: that of dense storage. An added operand and the sum are added elementwise: valid, and stored, where both are. What
is added to a sparse operand is computed only where that stores elements (torch's `sampled_addmm`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from op_registry.autocast import autocast_on
from op_registry.bound import Bound
from op_registry.dimensions import Dimension, Labels
from op_registry.records.dense import Dense
from op_registry.records.dims import Number, known_to_hold
from op_registry.records.dtypes import accumulation_dtype
from op_registry.sparse import products
from op_registry.sparse.compose import call_broadcast
from op_registry.sparse.elements import valid_elements
from op_registry.sparse.layout import COO
from op_registry.sparse.lowering import OnCall
from op_registry.sparse.products import Own
from op_registry.sparse.record import NotLowered, Sparse, from_coordinates

aten = torch.ops.aten

AnyStorage = Dense | Sparse


def by_equation(c: Bound) -> Any:
    """A contraction whose sparse operands have no dense dimensions; products are rounded once to half precision."""
    labels = c.labels
    reason = why_dense(c, labels)
    if reason is not None:
        raise NotLowered(reason)
    assert labels is not None
    dtype = next(iter(c.tensors.values())).dtype
    wide = accumulation_dtype(dtype)
    if wide is dtype:
        return summed(c, labels)
    return cast(summed(c.map(lambda r: cast(r, wide), (Dense, Sparse)), labels), dtype)


def by_elements(c: Bound) -> Any:
    """The same after listing the valid elements of dense dimensions one by one."""
    return by_equation(c.map(without_dense_dims, Sparse))


def why_dense(c: Bound, labels: Labels | None) -> str | None:
    """Why a call cannot run by its equation; None if it can."""
    if labels is None:
        return "its operands have other dimensions than its rule states"
    if not labels.is_sum_of_products:
        return "it is no sum of products alone"
    tensors = c.tensors
    for name, x in tensors.items():
        if isinstance(x, Sparse) and x.dense_sizes:
            return f"dimension {x.pattern.ndim} of its operand `{name}` is dense, behind sparse ones"
    if len(tensors) - len(labels.added) != 2 or len(labels.added) > 1:
        return "it has not two factors"
    if len({x.dtype for x in tensors.values()}) > 1 or any(x.dtype is torch.bool for x in tensors.values()):
        return f"its operands have the dtypes {', '.join(str(x.dtype) for x in tensors.values())}"
    if autocast_on(next(iter(tensors.values())).device):
        return "autocast chooses another dtype"
    return _misfit(c, labels, tensors)


def _misfit(c: Bound, labels: Labels, tensors: Mapping[str, AnyStorage]) -> str | None:
    """What torch refuses, or would compute in another way, in the sizes and options of a call."""
    dtype = next(iter(tensors.values())).dtype
    if not (dtype.is_floating_point or dtype.is_complex) and any(
        type(c.named.get(n)) is float for n in ("alpha", "beta")
    ):
        return "torch rounds fractional factors of integers"
    sizes: dict[Dimension, int] = {}
    for name, x in tensors.items():
        if name in labels.added:
            continue
        others = {label for other in tensors if other != name for label in labels.operands[other]}
        for d, (label, size) in enumerate(zip(labels.operands[name], x.shape, strict=True)):
            if known_to_hold(size == 0):
                return f"dimension {d} of its operand `{name}` is empty"
            if label in labels.roles and label not in others:
                return f"it sums its operand `{name}` alone along dimension {d}"
            broadcasts = isinstance(label, int) and any(known_to_hold(n == 1) for n in (size, sizes.get(label, size)))
            if known_to_hold(size != sizes.setdefault(label, size)) and not broadcasts:
                return f"dimension {d} of its operand `{name}` has size {size}, and {sizes[label]} in another operand"
            if known_to_hold(sizes[label] == 1):
                sizes[label] = size
    shape = tuple(sizes[label] for label in labels.results[0])
    for name in labels.added:
        theirs = tuple(tensors[name].shape)
        pairs = zip(theirs[::-1], shape[::-1], strict=False)
        if any(known_to_hold(mine != 1) and known_to_hold(mine != size) for mine, size in pairs):
            return f"its operand `{name}` of shape {theirs} does not broadcast to the result's, {shape}"
    return None


def summed(c: Bound, labels: Labels) -> AnyStorage:
    """``beta * added + alpha * product``; with ``beta=0``, the added operand takes no part."""
    added = next((c[name] for name in labels.added if c.named.get("beta", 1) != 0), None)
    factors, result = factors_of(c, labels), labels.results[0]
    stored = sorted(factors, key=lambda factor: isinstance(factor[0], Dense))
    (x, own), (y, theirs) = stored
    product: AnyStorage
    if isinstance(x, Dense):
        if isinstance(added, Sparse) and added.ndim == len(result) and added.shape == shape_of(factors, result):
            return sampled_sum(c, labels)
        product = without_added(c, labels, shape_of(factors, result))
    elif isinstance(y, Sparse):
        product = scaled(products.sparse_by_sparse(x, own, y, theirs, result), c.named.get("alpha", 1))
    else:
        product = scaled(products.sparse_by_dense(x, own, y, theirs, result), c.named.get("alpha", 1))
    if added is None:
        return product
    total: AnyStorage = call_broadcast(aten.add.Tensor, scaled(added, c.named.get("beta", 1)), product)
    return total


def sampled_sum(c: Bound, labels: Labels) -> Sparse:
    """``beta * added + alpha * product`` where the added operand stores elements; elsewhere the sum is invalid."""
    (name,), alpha, beta = labels.added, c.named.get("alpha", 1), c.named.get("beta", 1)
    x: Sparse = c[name]
    (a, own), (b, theirs) = factors_of(c, labels)
    product, flat = products.sampled(x, a, own, b, theirs, labels.results[0]), x.flat
    data = alpha * product.data + (beta * flat.data if beta != 0 else 0)
    return x.folded(Dense(data, product.validity).masked_by(flat.full_validity))


def without_added(c: Bound, labels: Labels, shape: tuple[int, ...]) -> Dense:
    """The contraction of dense factors by its rule, with nothing added."""
    (name,) = labels.added
    if "beta" not in c:
        return c.with_(**{name: None}).run()  # type: ignore[no-any-return]
    nothing = torch.zeros((), dtype=c[name].dtype, device=c[name].device).expand(shape)
    return c.with_(**{name: Dense(nothing), "beta": 0}).run()  # type: ignore[no-any-return]


def factors_of(c: Bound, labels: Labels) -> list[tuple[Any, Own]]:
    """The factors with their labels: None for a dimension of size 1 that broadcasts over the other factor's."""
    named = [(c[name], labels.operands[name]) for name in c.tensors if name not in labels.added]
    wide = {label for x, own in named for label, size in zip(own, x.shape, strict=True) if not known_to_hold(size == 1)}
    return [
        (
            x,
            tuple(
                None if known_to_hold(size == 1) and label in wide else label
                for label, size in zip(own, x.shape, strict=True)
            ),
        )
        for x, own in named
    ]


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


def without_dense_dims(x: Sparse) -> Sparse:
    """The same elements without dense dimensions: their valid elements are stored one by one."""
    if not x.dense_sizes:
        return x
    flat, coordinates = valid_elements(x)
    return from_coordinates(COO, coordinates, flat, tuple(x.shape))


BY_EQUATION, BY_ELEMENTS = OnCall(by_equation, of_dims=True), OnCall(by_elements, of_dims=True)
