"""Masked tensors as arguments and results of functions of jax: nodes of jax's pytrees, whose leaves are data and mask.

torchax maps the leaves of what crosses to jax: to arrays and back. Between, a node holds arrays, or what stands for
them in a trace, and no masked tensor: a `Carrier`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from masked_dispatch.tensor.masked_tensor import MaskedTensor, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torchax.tensors import OnJax
from op_registry import MaskedSemanticsError


@dataclass(frozen=True)
class Carrier:
    """Data and validity of a masked tensor, as arrays of jax or what stands for them."""

    children: tuple[Any, ...]


def register_with_jax() -> None:
    """Make masked tensors and carriers nodes of jax's pytrees."""
    from jax.tree_util import register_pytree_node

    register_pytree_node(OnJax, lambda x: ((x._data, x._validity), None), assembled)
    register_pytree_node(Carrier, lambda carrier: (carrier.children, None), assembled)
    for kind in (MaskedTensor, SparseMaskedTensor):
        register_pytree_node(kind, refused, assembled)


def assembled(_: None, children: Sequence[Any]) -> MaskedTensor | Carrier:
    """A masked tensor of torchax tensors, a carrier of anything else."""
    data, validity = children
    if isinstance(data, Tensor) and (validity is None or isinstance(validity, Tensor)):
        return wrap(data, validity)
    return Carrier(tuple(children))


def refused(x: MaskedTensor) -> Any:
    """A masked tensor that does not hold torchax tensors."""
    raise MaskedSemanticsError(
        f"a function of jax got a masked tensor of shape {tuple(x.shape)} on {x.device}, stored as "
        f"{x.storage_layout}: it takes densely stored ones, made of torchax tensors. Pass x.to_dense().to('jax')."
    )
