"""The module that uses private parts of the autograd engine, and reads from the stack who calls.

What it assumes has numbers in torch_internals.py, and checks in assumptions/engine.py.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import _vmap_internals
from torch.utils import checkpoint

from masked_dispatch.compiler_internals import not_compiled
from masked_dispatch.replacements.replacing import no_call, put, replace

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The current run of the autograd engine, -1 for none; and the code of the function that calls the engine.
engine_run: Callable[[], int] = torch._C._current_graph_task_id
_ENGINE_CALL = torch.autograd.graph._engine_run_backward.__code__
AOT_AUTOGRAD = ("torch._functorch._aot_autograd", "torch._functorch.aot_autograd")


def called_by_functorch(depth: int) -> bool:
    """Whether torch's implementation of its transforms called the kernel `depth` frames above this function."""
    frame = _caller(depth + 1)
    name = frame.f_globals.get("__name__", "") if frame is not None else ""
    return isinstance(name, str) and name.startswith("torch._functorch.") and not name.startswith(AOT_AUTOGRAD)


def called_by_engine(depth: int) -> bool:
    """Whether the autograd engine itself called the kernel `depth` frames above this function.

    If so, no Python backward, hook or formula did. On the CPU the next frame is the one that called the engine; in the
    threads that run backwards on other devices there is none.
    """
    frame = _caller(depth + 1)
    return frame is None or frame.f_code is _ENGINE_CALL


def engine_called_in(thread: int) -> bool:
    """Whether the thread of that identifier has called the autograd engine, which has not returned."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not _ENGINE_CALL:
        frame = frame.f_back
    return frame is not None


def calling_frame(depth: int) -> FrameType | None:
    """The Python frame that called the kernel `depth` frames above this function, through whatever function modes."""
    frame = _caller(depth + 1)
    while frame is not None and (frame.f_code.co_name == "__torch_function__" or frame.f_code in _delegating_code):
        frame = frame.f_back
    return frame


def frames_to_caller() -> list[tuple[str, FrameType | None]]:
    """The frames of this library's and of torch's code, innermost first, each with the name of its module; and then
    the frame of the caller's own code that called them, ``("", None)`` in a thread of the autograd engine.
    """
    found: list[tuple[str, FrameType | None]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        found.append((name, frame))
        if name and name.partition(".")[0] not in _NOT_THE_CALLER:
            return found
        frame = frame.f_back
    return [*found, ("", None)]


# Whose frames are not the caller's: this library, torch, and what they call through.
_NOT_THE_CALLER = {"masked_dispatch", "op_registry", "torch", *sys.stdlib_module_names} - {"__main__"}
# In place of the caller's file, where there is none.
NO_CALLER = "<backward in a thread of the autograd engine>"


def _caller(depth: int) -> FrameType | None:
    """The frame that called the kernel `depth` frames above this function; None if no Python did."""
    frame = sys._getframe(depth).f_back
    while frame is not None and frame.f_code in _delegating_code:
        frame = frame.f_back
    return frame


# Code of kernels that only select another kernel, which needs to know who called them.
_delegating_code: set[CodeType] = set()


def delegating(kernel: _Function) -> _Function:
    """Decorator for a kernel that selects another one and calls it: it does not count as that one's caller."""
    _delegating_code.add(kernel.__code__)
    return kernel


def current_node() -> Any:
    """The autograd node that is being evaluated in this thread."""
    return torch._C._current_autograd_node()


def leaf_accumulated_into() -> torch.Tensor | None:
    """The leaf whose `.grad` the autograd engine is accumulating into in the current node, if any."""
    leaf: torch.Tensor | None = getattr(current_node(), "variable", None)
    return leaf


def run_later_within(
    current: Callable[[], object], within: Callable[[Any], contextlib.AbstractContextManager[None]], outside: object
) -> None:
    """From now on, run what autograd calls later in Python within what was current when it was recorded.

    current   the state in force; within(state) puts one in force inside a block
    outside   the state of what has been recorded before

    This is about the backward of autograd functions, and about what a checkpoint computes again.
    """

    @not_compiled
    def remember(recorded: Any, *_: object) -> None:
        state = current()
        if state != outside:
            recorded.__dict__[_RECORDED_WITHIN] = state

    @not_compiled
    def run_as_recorded(recorded: Any, run: Callable[..., Any], *args: Any) -> Any:
        state = recorded.__dict__.get(_RECORDED_WITHIN, outside)
        if state == current():
            return run(*args)
        with within(state):
            return run(*args)

    _remember_in_functions(remember, run_as_recorded)
    _remember_in_checkpoints(remember, run_as_recorded)


_RECORDED_WITHIN = "_masked_dispatch_recorded_within"


def _remember_in_functions(remember: Callable[[Any], None], run_as_recorded: Callable[..., Any]) -> None:
    node: Any = torch.autograd.function.BackwardCFunction

    @not_compiled
    def init(original: Callable[..., None], recorded: Any, *args: Any) -> None:
        original(recorded, *args)
        remember(recorded)

    @not_compiled
    def apply(original: Callable[..., Any], recorded: Any, *grads: Any) -> Any:
        return run_as_recorded(recorded, original, recorded, *grads)

    replace(node, "__init__", init, no_call, always=True)
    for name in ("apply", "apply_boxed"):
        if hasattr(node, name):
            not_compiled(replace(node, name, apply, no_call, always=True))


def _remember_in_checkpoints(remember: Callable[[Any], None], run_as_recorded: Callable[..., Any]) -> None:
    def get(frame: Any) -> Callable[..., Any]:
        return functools.partial(run_as_recorded, frame, frame.__dict__["recompute_fn"])

    def keep(frame: Any, compute: Callable[..., Any]) -> None:
        frame.__dict__["recompute_fn"] = compute
        remember(frame)

    # A property, so that checkpoints from before, which have it in the same place, are served too.
    put(checkpoint._CheckpointFrame, "recompute_fn", property(get, keep))


# Whether a tensor carries torch's older vmap, which `is_grads_batched` and `jacobian(vectorize=True)` use.
carries_older_vmap: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def let_older_vmap_return(
    kind: type, parts: Callable[[Any], tuple[Any, Any]], whole: Callable[[Any, Any], Any]
) -> None:
    """Let functions that torch's older vmap runs return tensors of `kind`, a wrapper that it knows nothing of.

    parts  the tensor inside, which carries the batch dimension, and what is the same for all of the batch
    whole  the opposite, of the tensor with its batch dimension in front
    """

    def has_such(outputs: Any, *args: Any, **options: Any) -> bool:
        return any(isinstance(output, kind) for output in (outputs if isinstance(outputs, tuple) else (outputs,)))

    def unwrap_batched(original: Callable[..., Any], outputs: Any, out_dims: Any, *rest: Any, **options: Any) -> Any:
        listed = list(outputs) if isinstance(outputs, tuple) else [outputs]
        taken = [parts(output) if isinstance(output, kind) else (output, None) for output in listed]
        inner = tuple(tensor for tensor, _ in taken) if isinstance(outputs, tuple) else taken[0][0]
        found = original(inner, out_dims, *rest, **options)
        results = found if isinstance(outputs, tuple) else (found,)
        results = tuple(
            whole(result, same) if isinstance(output, kind) else result
            for result, output, (_, same) in zip(results, listed, taken, strict=True)
        )
        return results if isinstance(outputs, tuple) else results[0]

    replace(_vmap_internals, "_unwrap_batched", unwrap_batched, has_such)


def call_functions_by(call: Callable[..., Any], relies: Callable[..., bool]) -> None:
    """From now on, let `call(apply, function, *arguments, **keywords)` call autograd functions, by torch's `apply`.

    `relies(function, *arguments, **keywords)` tells the calls that need it. Classes that have taken torch's `apply`
    before keep it (op_registry/records/own_function.py).
    """
    not_compiled(replace(torch.autograd.Function, "apply", call, relies, always=True))


# Functions of torch that hand gradients on unread: to the graph of a compiled region, and to the engine as roots. What
# they call has boundaries of its own.
HAND_GRADIENTS_ON = ("torch._functorch._aot_autograd", "torch.utils.checkpoint")


def become_node_of(node: Any, function: Any, derived: Any) -> bool:
    """Let the node of a call of `function` be one of a class derived from that; False if it is another node."""
    if type(node) is not function._backward_cls:
        return False
    node.__class__ = derived._backward_cls
    return True
