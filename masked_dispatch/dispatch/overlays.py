"""The backward of operators that ran inside overlays of the registry.

Rules are plain differentiable torch, so their nodes do not depend on overlays; nor do nodes of views, whose formulas
run on plain gradients. torch's own nodes of writes do: their formulas call operators on masked gradients, later, in any
thread that the engine uses. Such a node stores the overlays under which autograd recorded it, and a kernel that its
formula calls applies exactly these. (masked_dispatch/scopes.py serves Python code in backward.)
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from masked_dispatch.engine_internals import called_by_engine, current_node, engine_run
from op_registry import registry
from op_registry.registry import Scope

_KEY = "masked_dispatch.overlays"
_CURRENT_OVERLAYS = contextlib.nullcontext()


def remember_overlays(written: Tensor) -> None:
    """Store the current overlays on the node that has just recorded a write to a tensor, or to a view's base."""
    if not registry.ever_overlaid or not registry.scope:
        return
    node: Any = (written if written._base is None else written._base).grad_fn
    if node is not None:
        node.metadata[_KEY] = registry.scope


def overlays_of_caller(depth: int) -> contextlib.AbstractContextManager[None]:
    """For the kernel `depth` frames up: the overlays of the node whose formula called it, else the current ones."""
    if not registry.ever_overlaid or engine_run() < 0 or not called_by_engine(depth + 1):
        return _CURRENT_OVERLAYS
    node = current_node()  # None in callbacks that the engine runs after a node, as DistributedDataParallel's reducer
    remembered: Scope = () if node is None else node.metadata.get(_KEY, ())
    return registry.within(remembered)
