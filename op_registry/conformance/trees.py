"""The leaves of nested arguments and results, and a copy with each of them replaced.

torch.utils._pytree does the same, but its lookup of each leaf's type took half the time of a conformance run. So it is
used only for containers other than tuples, lists and dicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree


def tree_leaves(tree: object, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Every leaf in `tree`, in order: whatever is not a container, or is accepted by `is_leaf`."""
    leaves: list[Any] = []
    _collect(tree, is_leaf, leaves)
    return leaves


def _collect(tree: Any, is_leaf: Callable[[Any], bool] | None, leaves: list[Any]) -> None:
    kind = type(tree)
    if kind is Tensor or (is_leaf is not None and is_leaf(tree)):
        leaves.append(tree)
    elif kind is tuple or kind is list:
        for item in tree:
            _collect(item, is_leaf, leaves)
    elif kind is dict:
        for item in tree.values():
            _collect(item, is_leaf, leaves)
    elif _is_another_container(tree):
        leaves += _pytree.tree_leaves(tree, is_leaf)
    else:
        leaves.append(tree)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of `tree` with each leaf replaced by `function` of it."""
    kind = type(tree)
    if kind is Tensor:
        return function(tree)
    if kind is tuple:
        return tuple([tree_map(function, item) for item in tree])
    if kind is list:
        return [tree_map(function, item) for item in tree]
    if kind is dict:
        return {key: tree_map(function, item) for key, item in tree.items()}
    return _pytree.tree_map(function, tree) if _is_another_container(tree) else function(tree)


def _is_another_container(tree: object) -> bool:
    """Whether it is a named tuple, one of torch's return types, or a registered pytree node."""
    return isinstance(tree, tuple) or type(tree) in _pytree.SUPPORTED_NODES
