"""group_norm, and the channels of a record of shape (N, C, *), dense or stored, in which it and batch_norm are written.

Law: statistics over the valid elements; valid where the input and the channel's parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    NORMALIZATION,
    AnyRecord,
    Bound,
    Dense,
    Equation,
    NotLowered,
    Sparse,
    aligned_validity,
    masked_slices,
    on_call,
    to_dense,
    unravel,
    valid_in_all,
)
from op_registry.autocast import result_dtype
from op_registry.bound import bind_by_name
from op_registry.ops.normalization.norms import affine, standardised, with_validity
from op_registry.records.layout import reshape_validity
from op_registry.records.slices import DenseSlices, Moments, Over
from op_registry.sparse.layout import COO
from op_registry.sparse.record import pattern_of
from op_registry.sparse.segments import Segments
from op_registry.sparse.slicewise import at_elements

aten = torch.ops.aten


class Channels:
    """A dense record of shape (N, C, *): its elements, slices of them, and parameters by channel.

    x         the record
    elements  its elements, in whatever shape they are stored
    """

    def __init__(self, x: Any) -> None:
        self.x = x
        self.elements: Dense = x

    def slices(self, dims: Sequence[int]) -> Over:
        """The slices over these dimensions of the record."""
        return DenseSlices(tuple(dims))

    def groups(self, number: int) -> tuple[Dense, Over]:
        """The elements, in another shape, with their slices by groups of channels."""
        x, shape = self.x, (self.x.shape[0], number, self.x.shape[1] // number, *self.x.shape[2:])
        validity = aligned_validity(with_validity(x))
        assert validity is not None
        split = Dense(x.data.reshape(shape), reshape_validity(validity, x.shape, shape))
        return split, DenseSlices(tuple(range(2, split.ndim)))

    def parameter(self, p: Any) -> Dense | None:
        """What belongs to the channel of each element; it broadcasts."""
        return None if p is None else p.map(lambda t: t.reshape((1, -1) + (1,) * (self.x.ndim - 2)))

    def shown(self, elements: Dense) -> Any:
        """A record of other elements."""
        return elements


class StoredChannels(Channels):
    """The same of a sparse record. Its statistics are sums by segment; parameters are read where it stores something.

    Raises NotLowered for a record that is dense or empty.
    """

    def __init__(self, x: AnyRecord) -> None:
        if not isinstance(x, Sparse) or x.ndim < 2 or 0 in x.shape:
            raise NotLowered("only the first operand may be sparse, of two or more dimensions and not empty")
        self.x = x
        self.elements = x.flat

    def slices(self, dims: Sequence[int]) -> Over:
        sparse = self.x.pattern.ndim
        return Segments(self.x, [d for d in dims if d < sparse], [d - sparse + 1 for d in dims if d >= sparse])

    def groups(self, number: int) -> tuple[Dense, Over]:
        pattern, flat = self.x.pattern, self.elements
        if pattern.ndim < 2:
            raise NotLowered("it works along dimension 1, dense here, by groups")
        sizes = (pattern.sizes[0], number, pattern.sizes[1] // number, *pattern.sizes[2:])
        of_groups = pattern.cached(
            ("groups", number), lambda: pattern_of(COO, unravel(pattern.positions(), sizes), sizes)
        )
        return flat, Segments(Sparse(flat, of_groups), range(2, of_groups.ndim), range(1, flat.ndim))

    def parameter(self, p: Any) -> Dense | None:
        shape = (-1,) + (1,) * (self.x.ndim - 2)
        return None if p is None else at_elements(p.map(lambda t: t.reshape(shape)), self.x)

    def shown(self, elements: Dense) -> Any:
        return self.x.folded(elements)


def with_dense_parameters(c: Bound) -> Mapping[str, Any]:
    """The arguments, with weight and bias dense. Running statistics are written to: NotLowered for sparse ones."""
    if any(isinstance(c.named.get(name), Sparse) for name in ("running_mean", "running_var")):
        raise NotLowered("running statistics are stored sparsely")
    given = {name: c.named.get(name) for name in ("weight", "bias")}
    return {**c.named, **{name: to_dense(x) for name, x in given.items() if x is not None}}


def check_shapes(op: OpOverload, c: Channels, named: Mapping[str, Any], fit: bool) -> None:
    """Parameters that are none of the channels, and arguments that do not `fit`: torch's error; NotLowered if stored.

    torch gets copies, so that nothing is written.
    """
    parameters = [p for name, p in named.items() if isinstance(p, Dense) and name != "input"]
    if fit and c.x.ndim >= 2 and all(p.shape == c.x.shape[1:2] for p in parameters):
        return
    if isinstance(c.x, Sparse):
        raise NotLowered("the shapes do not match, or torch refuses it")
    op(**{name: value.data.clone() if isinstance(value, Dense) else value for name, value in named.items()})


def dtype_by_channel(norm: Callable[..., Tensor], x: Dense, *parameters: Dense | None) -> torch.dtype:
    """The dtype in which torch returns `norm`, a function of two elements of a channel and its parameters."""

    def one_slice() -> Any:
        return norm(x.data.new_zeros((2, 1)), *(None if p is None else p.data.new_zeros(1) for p in parameters))

    return result_dtype(x, parameters, one_slice)


def by_own_statistics(
    c: Channels, x: Dense, over: Over, weight: Dense | None, bias: Dense | None, eps: float | Tensor, dtype: torch.dtype
) -> tuple[Any, Moments, Tensor]:
    """`x`, the elements, standardised over slices, scaled and shifted by channel; the moments; 1 / the deviations."""
    values, m, scale = standardised(x, over, eps)
    weight, bias = c.parameter(weight), c.parameter(bias)
    values = affine(values.reshape(c.elements.shape), weight, bias).to(dtype)
    return c.shown(Dense(values, valid_in_all(c.elements, weight, bias))), m, scale


# ----------------------------------------------------------------------------------------------------------- group_norm


def of_dense(op: OpOverload, x: Dense, *args: Any, **kwargs: Any) -> Any:
    """Standardised over each group of channels, scaled and shifted by channel.

    native_group_norm also returns each group's statistics, which are differentiable, unlike those of layer_norm.
    """
    return by_groups(op, Channels(x), bind_by_name(op, (x, *args), kwargs))


group_norm = masked_slices(
    aten.group_norm,
    category=NORMALIZATION,
    dims=Equation("n(gC)*,(gC),(gC)->n(gC)*", sizes={"g": "num_groups"}, each="*"),
)(of_dense)
native_group_norm = masked_slices(
    aten.native_group_norm,
    category=NORMALIZATION,
    dims=Equation("n(gC)*,(gC),(gC)->n(gC)*,ng,ng", sizes={"g": "group"}, each="*"),
)(of_dense)


@group_norm.lowering(Sparse)
@native_group_norm.lowering(Sparse)
@on_call
def group_norm_of_stored(c: Bound) -> Any:
    return by_groups(c.op, StoredChannels(c.first), with_dense_parameters(c))


def by_groups(op: OpOverload, c: Channels, named: Mapping[str, Any]) -> Any:
    native = "group" in named
    number, weight, bias = named["group" if native else "num_groups"], named["weight"], named["bias"]
    check_shapes(op, c, named, c.x.ndim >= 2 and number >= 1 and c.x.shape[1] % number == 0)
    x = c.elements
    dtype = x.dtype if native else dtype_by_channel(lambda x, *p: aten.group_norm(x, 1, *p), x, weight, bias)
    result, m, scale = by_own_statistics(c, *c.groups(number), weight, bias, named["eps"], dtype)
    if not native:
        return result
    exists = m.exists.expand(m.mean.shape)
    of_parameters = next((p.dtype for p in (weight, bias) if p is not None), x.dtype)
    shape = (c.x.shape[0], number)
    statistics = (t.expand(m.mean.shape).reshape(shape).to(of_parameters) for t in (m.mean, scale))
    return (result, *(Dense(t, exists.reshape(shape)) for t in statistics))
