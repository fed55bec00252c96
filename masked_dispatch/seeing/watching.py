"""Install recorders around kernels, modules and backward while a trace is open.

Calls without an open trace have no overhead: the first trace replaces kernels, methods and hooks when it opens, and the
last one restores them when it ends.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from masked_dispatch import policies
from masked_dispatch.autograd.dense import Unwrap, Wrap
from masked_dispatch.autograd.sparse import SparseUnwrap, SparseWrap
from masked_dispatch.compiler_internals import dynamo_is_loaded, never_compiled, uncompiled
from masked_dispatch.densification import on_densify
from masked_dispatch.dispatch.kernel_table import Kernel, kernel_table
from masked_dispatch.dispatch.run_rule import has_masked
from masked_dispatch.engine_internals import delegating, engine_called_in, engine_run
from masked_dispatch.process import Lock
from masked_dispatch.seeing.recorder import Recorder
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.torch_internals import remove_module_hook
from op_registry.extents import slices
from op_registry.sparse.convert import on_dense

_recorders: contextvars.ContextVar[tuple[Recorder, ...]] = contextvars.ContextVar("masked_dispatch.traces", default=())
# The recorders of all threads.
_active: list[Recorder] = []
_lock = Lock()
_installed = contextlib.ExitStack()
_KEY = "masked_dispatch.trace"
# The listeners of other modules, which they call while a call runs, and the method of a recorder that listens.
_LISTENERS: tuple[tuple[list[Any], Callable[[Recorder, Any], None]], ...] = (
    (on_densify, lambda recorder, event: recorder.densified(event)),
    (on_dense, lambda recorder, event: recorder.stored_densely(event)),
    (policies.listeners, lambda recorder, event: recorder.mask_dropped(event)),
    (slices.listeners, lambda recorder, event: recorder.batch_end(event)),
)
# Whether compiled functions run uncompiled yet; False until the process loads the compiler.
_stance_is_set = [False]


def recorders_here() -> Sequence[Recorder]:
    """Return the recorders of this thread or task; in a thread of autograd's engine, those of the waiting threads."""
    own = _recorders.get()
    if own:
        return [recorder for recorder in own if recorder.active]
    if engine_run() < 0 or engine_called_in(threading.get_ident()):
        return ()
    return [recorder for recorder in _active if engine_called_in(recorder.thread)]


@contextlib.contextmanager
def recording_calls(recorder: Recorder) -> Iterator[None]:
    """Record the calls of this thread or task inside the block, and the backward that it starts."""
    _start(recorder)
    _recorders.set((*_recorders.get(), recorder))
    try:
        yield
    finally:
        _recorders.set(tuple(other for other in _recorders.get() if other is not recorder))
        _stop(recorder)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """No recorder sees the calls of the block, which a check makes for itself."""
    before = _recorders.set(())
    try:
        yield
    finally:
        _recorders.reset(before)


def _start(recorder: Recorder) -> None:
    with _lock.here:
        if not _active:
            _install()
        _active.append(recorder)


def _stop(recorder: Recorder) -> None:
    with _lock.here:
        recorder.active = False
        _active.remove(recorder)
        if not _active:
            _installed.close()


def _install() -> None:
    with contextlib.ExitStack() as stack:
        if dynamo_is_loaded():
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        _stance_is_set[0] = dynamo_is_loaded()
        stack.enter_context(_kernels_watched())
        stack.enter_context(_backward_watched())
        stack.enter_context(_modules_watched())
        for listeners, method in _LISTENERS:
            stack.enter_context(_listening(listeners, method))
        _installed.push(stack.pop_all())


def _run_uncompiled_from_now_on() -> None:
    """Make compiled functions run uncompiled from their next call on, in a trace that opened before the compiler."""
    with _lock.here:
        if _active and not _stance_is_set[0]:
            _stance_is_set[0] = True
            _installed.enter_context(torch.compiler.set_stance("force_eager"))


@contextlib.contextmanager
def _listening(listeners: list[Any], method: Callable[[Recorder, Any], None]) -> Iterator[None]:
    def listener(event: Any) -> None:
        for recorder in recorders_here():
            method(recorder, event)

    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


# --------------------------------------------------------------------------------------------------------- operators


@contextlib.contextmanager
def _kernels_watched() -> Iterator[None]:
    below = MaskedTensor.__dict__["__torch_dispatch__"]
    called_below = below.__func__

    @never_compiled
    @delegating
    def watched_below(
        cls: type,
        op: OpOverload,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        opened = _begin(op, args, kwargs or {})
        try:
            result = called_below(cls, op, types, args, kwargs)
        except BaseException as error:
            _failed(opened, error)
            raise
        _end(opened, result)
        return result

    kernel_table.watch(_watched)
    MaskedTensor.__torch_dispatch__ = classmethod(watched_below)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        MaskedTensor.__torch_dispatch__ = below
        kernel_table.unwatch()


def _watched(op: OpOverload, kernel: Kernel, before_arguments: int) -> Kernel:
    @delegating
    def call(*args: Any, **kwargs: Any) -> Any:
        opened = _begin(op, args[before_arguments:], kwargs)
        try:
            result = kernel(*args, **kwargs)
        except BaseException as error:
            _failed(opened, error)
            raise
        _end(opened, result)
        return result

    return call


def _begin(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Start the record of the call in each recorder; return pairs of recorder and record."""
    recorders = recorders_here()
    if not recorders or not (has_masked(args) or has_masked(kwargs.values())):
        return []
    opened = [(recorder, recorder.begin(op, args, kwargs)) for recorder in recorders]
    if recorders[0].saw_graph and not _stance_is_set[0]:
        _run_uncompiled_from_now_on()
    return [(recorder, event) for recorder, event in opened if event is not None]


def _end(opened: list[Any], result: object) -> None:
    for recorder, event in opened:
        recorder.end(event, result)
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                _mark(tensor.grad_fn, recorder, event.call.number)


def _failed(opened: list[Any], error: BaseException) -> None:
    for recorder, event in opened:
        recorder.failed(event, error)


# ----------------------------------------------------------------------------------------------------------- modules


@contextlib.contextmanager
def _modules_watched() -> Iterator[None]:
    before = register_module_forward_pre_hook(_before_module)
    after = register_module_forward_hook(_after_module, with_kwargs=True, always_call=True)
    # Suppress torch's warning that hooks of compiled modules run twice; `_before_module` ignores the second.
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
    ignored = warnings.filters[0]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # other code may have restored earlier filters
            warnings.filters.remove(ignored)  # type: ignore[attr-defined]
        remove_module_hook(before)
        remove_module_hook(after)


def _before_module(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling():
        return
    for recorder in recorders_here() if uncompiled(module) is module else ():
        recorder.enter_module(module, args)


def _after_module(module: torch.nn.Module, args: tuple[Any, ...], *kwargs_and_result: Any) -> None:
    if torch.compiler.is_compiling():
        return
    # If the module has raised, torch leaves the keyword arguments out.
    kwargs, result = kwargs_and_result if len(kwargs_and_result) == 2 else ({}, None)
    for recorder in recorders_here():
        recorder.leave_module(module, kwargs, result)


# ---------------------------------------------------------------------------------------------------------- backward


def _mark(node: Any, recorder: Recorder, number: int) -> None:
    """Store on an autograd node the number of the call that recorded it."""
    if _KEY not in node.metadata:
        node.metadata[_KEY] = weakref.WeakKeyDictionary()
    node.metadata[_KEY].setdefault(recorder, number)


@contextlib.contextmanager
def _backward_watched() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for wrap in (Wrap, SparseWrap):
            stack.enter_context(_replaced(wrap, "backward", _watched_backward("result")))
        for unwrap in (Unwrap, SparseUnwrap):
            stack.enter_context(_replaced(unwrap, "forward", _watched_unwrap))
            stack.enter_context(_replaced(unwrap, "backward", _watched_backward("operand")))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, around: Callable[[Any], Any]) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, staticmethod(never_compiled(around(original.__func__))))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _watched_unwrap(forward: Callable[..., Any]) -> Callable[..., Any]:
    def unwrap(ctx: Any, *args: Any) -> Any:
        for recorder in recorders_here():
            number = recorder.current()
            if number is not None:
                _mark(ctx, recorder, number)
        return forward(ctx, *args)

    return unwrap


def _watched_backward(of: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def around(backward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(ctx: Any, grad: Any) -> Any:
            recorders = recorders_here()
            started = time.perf_counter()
            result = backward(ctx, grad)
            seconds = time.perf_counter() - started
            for recorder in recorders if grad is not None else ():
                number = ctx.metadata.get(_KEY, {}).get(recorder)
                recorder.gradient(of, number, grad, result, seconds)
            return result

        return watched

    return around
