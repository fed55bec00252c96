"""The module that uses private parts of the autograd engine, and finds callers on the stack.

torch_internals.py numbers its assumptions; assumptions/engine.py checks them.
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
from masked_dispatch.replacements import no_call, put, replace

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

    If so, no Python backward, hook or formula called it. On the CPU the next frame called the engine; threads that run
    backwards on other devices have no next frame.
    """
    frame = _caller(depth + 1)
    return frame is None or frame.f_code is _ENGINE_CALL


def engine_called_in(thread: int) -> bool:
    """Whether the thread with that identifier is inside a call of the autograd engine."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not _ENGINE_CALL:
        frame = frame.f_back
    return frame is not None


def calling_frame(depth: int) -> FrameType | None:
    """The Python frame that called the kernel `depth` frames above this function; skips frames of function modes."""
    frame = _caller(depth + 1)
    while frame is not None and (frame.f_code.co_name == "__torch_function__" or frame.f_code in _delegating_code):
        frame = frame.f_back
    return frame


def frames_to_caller() -> list[tuple[str, FrameType | None]]:
    """The frames of this library's and torch's code, innermost first, each with the name of its module. The last item
    is the caller's frame that called them, or ``("", None)`` in a thread of the autograd engine.
    """
    found: list[tuple[str, FrameType | None]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        found.append((name, frame))
        if is_the_callers(name):
            return found
        frame = frame.f_back
    return [*found, ("", None)]


def is_the_callers(module: str) -> bool:
    """Whether code of this module counts as the caller's."""
    return bool(module) and module.partition(".")[0] not in _NOT_THE_CALLER


# Modules whose frames do not count as the caller's: this library, torch, and the standard library between them.
_NOT_THE_CALLER = {"masked_dispatch", "op_registry", "torch", *sys.stdlib_module_names} - {"__main__"}
# Modes, which see every call, methods of tensors that torch writes in Python, and the compiler that traces a call.
AROUND_CALLS = (
    "torch.overrides", "torch.utils.", "torch._ops", "torch._tensor", "torch._dynamo", "torch._compile",
    "torch._utils_internal",
)  # fmt: skip
# Replaces the caller's file name if there is no caller.
NO_CALLER = "<backward in a thread of the autograd engine>"


def _caller(depth: int) -> FrameType | None:
    """The frame that called the kernel `depth` frames above this function; None if no Python code called it."""
    frame = sys._getframe(depth).f_back
    while frame is not None and frame.f_code in _delegating_code:
        frame = frame.f_back
    return frame


# Code of kernels that only select another kernel; the selected kernel needs to know who called them.
_delegating_code: set[CodeType] = set()


def delegating(kernel: _Function) -> _Function:
    """Decorator for a kernel that selects and calls another kernel: it does not count as the other's caller."""
    _delegating_code.add(kernel.__code__)
    return kernel


def current_node() -> Any:
    """The autograd node that the engine is evaluating in this thread."""
    return torch._C._current_autograd_node()


def leaf_accumulated_into() -> torch.Tensor | None:
    """The leaf whose `.grad` the autograd engine is accumulating into in the current node, if any."""
    return getattr(current_node(), "variable", None)


def run_later_within(
    current: Callable[[], object], within: Callable[[Any], contextlib.AbstractContextManager[None]], outside: object
) -> None:
    """From now on, run Python code that autograd calls later under the state that was current at recording time.

    current   returns the current state; the context within(state) sets another one
    outside   the state of everything recorded before

    This applies to the backward of autograd functions, and to functions that a checkpoint recomputes.
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

    # A property also serves earlier checkpoints, whose instance dict has the function under the same name.
    put(checkpoint._CheckpointFrame, "recompute_fn", property(get, keep))


# Whether a tensor is a batch of torch's older vmap, which `is_grads_batched` and `jacobian(vectorize=True)` use.
carries_older_vmap: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def let_older_vmap_return(
    kind: type, parts: Callable[[Any], tuple[Any, Any]], whole: Callable[[Any, Any], Any]
) -> None:
    """Let functions that torch's older vmap runs return tensors of `kind`, a wrapper that it does not know.

    parts  splits a tensor into its inner tensor, which carries the batch dimension, and a part that all examples share
    whole  joins the two again; the tensor then has its batch dimension in front
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
    """From now on, `call(apply, function, *arguments, **keywords)` calls autograd functions; `apply` is torch's own.

    `relies(function, *arguments, **keywords)` says which calls need it. Classes that took torch's `apply` before keep
    it (op_registry/records/fill.py).
    """
    not_compiled(replace(torch.autograd.Function, "apply", call, relies, always=True))


# Modules of torch whose functions pass gradients on unread: to the graph of a compiled region, and to the engine as
# roots. The code that they call converts gradients itself.
HAND_GRADIENTS_ON = ("torch._functorch._aot_autograd", "torch.utils.checkpoint")


def become_node_of(node: Any, function: Any, derived: Any) -> bool:
    """Turn a node that a call of `function` made into a node of the class `derived`; False for other nodes."""
    if type(node) is not function._backward_cls:
        return False
    node.__class__ = derived._backward_cls
    return True
