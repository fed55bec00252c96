"""The leaves of nested arguments and results, and a copy with each of them replaced.

torch.utils._pytree does the same, and handles every container but tuples, lists and dicts here: its lookup of each
leaf's type took half of the time of a run of the laws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Every leaf in `tree`, in order: what is no container, or what `is_leaf` accepts."""
    found: list[Any] = []
    _collect(tree, is_leaf, found)
    return found


def _collect(tree: Any, is_leaf: Callable[[Any], bool] | None, found: list[Any]) -> None:
    kind = type(tree)
    if kind is Tensor or (is_leaf is not None and is_leaf(tree)):
        found.append(tree)
    elif kind is tuple or kind is list:
        for item in tree:
            _collect(item, is_leaf, found)
    elif kind is dict:
        for item in tree.values():
            _collect(item, is_leaf, found)
    elif _is_another_container(tree):
        found += _pytree.tree_leaves(tree, is_leaf)
    else:
        found.append(tree)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of `tree` with `function` of each leaf in its place."""
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


def _is_another_container(tree: Any) -> bool:
    """Named tuples, torch's own kinds of results, and whatever is registered."""
    return isinstance(tree, tuple) or type(tree) in _pytree.SUPPORTED_NODES
