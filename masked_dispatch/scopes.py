"""The scopes of this library: overlays of the registry (`windows` among them), `densify` and `updates`.

What autograd runs later belongs to the scopes in which it was recorded: the backward of an autograd function, and what
a checkpoint computes again. But a scope is the value of a ContextVar, in the thread and for the time of its block, and
backward runs at another time, perhaps in another thread. So the values are stored with the recorded function,
and put in force again when it runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

from masked_dispatch.engine_internals import called_by_engine, current_node, engine_run, run_later_within
from op_registry.registry import Scope, registry

# The value of each kind of scope.
Scopes = tuple[object, ...]


class Kind(NamedTuple):
    """A kind of scope: the value in force, how to put one in force inside a block, and the value outside all blocks."""

    current: Callable[[], object]
    within: Callable[[Any], contextlib.AbstractContextManager[None]]
    outside: object


_kinds = [Kind(lambda: registry.scope, registry.within, ())]


def add_kind(variable: ContextVar[Any], outside: object) -> None:
    """Let the values of `variable` be remembered; to be called when its module is imported."""

    @contextlib.contextmanager
    def within(value: object) -> Iterator[None]:
        token = variable.set(value)
        try:
            yield
        finally:
            variable.reset(token)

    _kinds.append(Kind(variable.get, within, outside))


def current() -> Scopes:
    """The scopes in force for the caller."""
    return tuple(kind.current() for kind in _kinds)


def outside() -> Scopes:
    """The scopes in force where none has been entered."""
    return tuple(kind.outside for kind in _kinds)


@contextlib.contextmanager
def within(scopes: Scopes) -> Iterator[None]:
    """Put exactly these scopes in force inside the block."""
    with contextlib.ExitStack() as stack:
        for kind, value in zip(_kinds, scopes, strict=True):
            stack.enter_context(kind.within(value))
        yield


@functools.cache
def remember() -> None:
    """From now on, remember scopes with what autograd records: called before a scope is entered, of any kind.

    So programs without scopes do not pay for them, and what was recorded before this call was recorded outside.
    """
    run_later_within(current, within, outside())


# --------------------------------------------------------------------------------------------------- torch's own nodes
# Rules are plain differentiable torch, so their nodes do not depend on overlays; nor do nodes of views, whose formulas
# run on plain gradients. torch's own nodes of writes do: their formulas call operators on masked gradients, later, in
# any thread that the engine uses. Such a node stores the overlays under which autograd recorded it, and a kernel that
# its formula calls applies exactly these.

_KEY = "masked_dispatch.overlays"
_AS_THEY_ARE = contextlib.nullcontext()


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
        return _AS_THEY_ARE
    node = current_node()  # None in callbacks that the engine runs after a node, as DistributedDataParallel's reducer
    remembered: Scope = () if node is None else node.metadata.get(_KEY, ())
    return registry.within(remembered)
