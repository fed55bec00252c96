"""Masked tensors as arguments and results of functions of jax: nodes of jax's pytrees.

Their leaves are data, mask and the booleans of an extent. torchax maps the leaves of what crosses to jax: to arrays and
back. Between, a node holds arrays, or what stands for them in a trace, and no masked tensor: a `Carrier`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torchax.tensors import OnJax
from op_registry import MaskedSemanticsError
from op_registry.extents.factors import Along, Extent, Factor

# What each factor of an extent knows of each dimension, and whether the mask is the extent; None without one.
Known = tuple[tuple[tuple[Along, ...], ...], bool] | None


@dataclass(frozen=True)
class Carrier:
    """Data, validity and booleans of a masked tensor, as arrays of jax or what stands for them."""

    children: tuple[Any, ...]
    known: Known


def register_with_jax() -> None:
    """Make masked tensors and carriers nodes of jax's pytrees."""
    from jax.tree_util import register_pytree_node

    register_pytree_node(OnJax, taken_apart, assembled)
    register_pytree_node(Carrier, lambda carrier: (carrier.children, carrier.known), assembled)
    for kind in (MaskedTensor, SparseMaskedTensor):
        register_pytree_node(kind, refused, assembled)


def taken_apart(x: OnJax) -> tuple[tuple[Any, ...], Known]:
    """The leaves of a masked tensor, and what is known of its extent without reading one."""
    extent = x._extent
    if extent is None:
        return (x._data, x._validity), None
    theres = (None if factor.said is None else factor.there for factor in extent.factors)
    return (x._data, x._validity, *theres), (extent.known, extent.is_mask)


def assembled(known: Known, children: Sequence[Any]) -> MaskedTensor | Carrier:
    """A masked tensor of torchax tensors, a carrier of anything else."""
    data, validity, *theres = children
    if not isinstance(data, Tensor) or not all(t is None or isinstance(t, Tensor) for t in (validity, *theres)):
        return Carrier(tuple(children), known)
    if known is None:
        return wrap(data, validity)
    along, is_mask = known
    return with_extent(wrap(data, validity), Extent(tuple(map(Factor, along, theres)), is_mask))


def refused(x: MaskedTensor) -> Any:
    """A masked tensor that does not hold torchax tensors."""
    raise MaskedSemanticsError(
        f"a function of jax got a masked tensor of shape {tuple(x.shape)} on {x.device}, stored as "
        f"{x.storage_layout}: it takes densely stored ones, made of torchax tensors. Pass x.to_dense().to('jax')."
    )
