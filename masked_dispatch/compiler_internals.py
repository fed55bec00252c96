"""The module that uses private parts of torch's compiler.

torch_internals.py numbers its assumptions; assumptions/compiler.py and assumptions/graphs.py check them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from masked_dispatch.process import when_imported
from masked_dispatch.replacements import is_replaced, no_call, replace
from op_registry import older_torch

if TYPE_CHECKING:
    from torch._dynamo.comptime import ComptimeContext
    from torch._inductor.ir import TensorBox

_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """Decorator: after a graph break, Dynamo runs `function` and everything it calls uncompiled.

    This costs nothing per call: it marks the code object. (Dynamo still inlines a call that it traces.)
    """
    action = torch._C._dynamo.eval_frame._FrameAction.SKIP
    strategy = torch._C._dynamo.eval_frame._FrameExecStrategy(action, action)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def not_compiled(function: _Function) -> _Function:
    """Decorator: after a graph break, Dynamo runs `function` uncompiled, and compiles what it calls."""
    actions = torch._C._dynamo.eval_frame._FrameAction
    strategy = torch._C._dynamo.eval_frame._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def outside_of_graphs(function: _Function) -> _Function:
    """Decorator: a call of `function` breaks the graph; `function` and everything it calls run uncompiled.

    torch.compiler.disable does the same, but would load the compiler here.
    """
    disable: Any = torch._compile._disable_dynamo
    return disable(function)


def constant_in_graphs(function: _Function) -> _Function:
    """Decorator: Dynamo calls `function` once while tracing, and treats the result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def trace_only_calls_of(*packages: str) -> None:
    """Let Dynamo trace functions of these packages where traced code calls them, and leave their other frames alone.

    After a graph break, Dynamo compiles whatever Python runs: also functions that the autograd engine or a graph calls,
    in which it would break the graph while they build a tensor. It leaves torch's own files and those of the module
    `copy` alone in the same way. This imports nothing: Dynamo is told when a program imports it.
    """

    def tell() -> None:
        rules = sys.modules["torch._dynamo.trace_rules"]
        for package in packages:
            rules.add(package)
        folders = tuple(f"{Path(sys.modules[package].__path__[0]).as_posix()}/" for package in packages)
        older_torch.trace_where_called(rules, folders, replace)

    when_imported("torch._dynamo.trace_rules", tell)


def while_compiling(function: Callable[[ComptimeContext], None]) -> None:
    """Call `function` at compile time from code that Dynamo traces, with Dynamo's state at that point."""
    from torch._dynamo.comptime import comptime

    comptime(function)


def guard_on(read: Callable[[], object], context: ComptimeContext) -> None:
    """Guard the graph being compiled on `read` returning the same value as now.

    Dynamo itself does not guard on ContextVars. `context` is the argument that `while_compiling` passes.
    """
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard

    value_at_compile_time = read()

    def unchanged(_: object) -> bool:
        return bool(read() == value_at_compile_time)

    def add(builder: Any, guard: Guard) -> None:
        text = f"{read.__qualname__}() == {value_at_compile_time!r}"
        builder.guard_manager.root.add_lambda_guard(unchanged, [text], None)

    context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.guards.add(Guard(GlobalStateSource(), add))


# Callbacks that run whenever a masked tensor enters a graph that is being traced; higher-level packages register them.
before_tracing: list[Callable[[], None]] = []


def prepare_for_tracing() -> None:
    """Run the callbacks registered for tracing."""
    for prepare in before_tracing:
        prepare()


def dynamo_is_loaded() -> bool:
    """Whether Dynamo has been imported, without which nothing is compiled."""
    return "torch._dynamo" in sys.modules


def keep_whole(functions: Iterable[Callable[..., Any]]) -> None:
    """Tell Dynamo, which is loaded, to record calls of these functions in its graph and never to trace through them.

    If Dynamo is tracing, it may already have looked one of them up, so it restarts the trace. If it is tracing one of
    these functions itself, that function runs uncompiled, now and later.
    """
    dynamo: Any = torch._dynamo
    kept, rules = dynamo.variables.TorchInGraphFunctionVariable, dynamo.trace_rules
    traced = [f for f in functions if kept not in (rules.lookup(f), rules.lookup_callable(f))]
    for function in traced:
        torch.compiler.allow_in_graph(function)
        never_compiled(inspect.unwrap(function))
    translator = getattr(dynamo.symbolic_convert.tls, "current_tx", None)
    if traced and translator is not None:
        if translator.output.root_tx.f_code in [inspect.unwrap(function).__code__ for function in traced]:
            raise dynamo.exc.SkipFrame("it has rules inside it, which hold where it is run")
        raise dynamo.exc.UnspecializeRestartAnalysis(restart_reason="functions traced through are now kept whole")


def under_compile() -> bool:
    """Whether this thread's stack contains a function that torch.compile returned."""
    frame = sys._getframe(1) if dynamo_is_loaded() else None
    while frame is not None and not (
        frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
    ):
        frame = frame.f_back
    return frame is not None


class TracedFrame(NamedTuple):
    """A frame of code that Dynamo traces: what a warning needs of it."""

    f_code: CodeType
    f_lineno: int
    f_globals: dict[str, Any]


def frames_being_traced() -> Iterator[TracedFrame]:
    """The frames of the code that Dynamo is tracing in this thread, innermost first."""
    dynamo: Any = torch._dynamo if dynamo_is_loaded() else None
    root = dynamo and getattr(dynamo.symbolic_convert.tls, "current_tx", None)
    traced = root and root.output.current_tx
    while traced is not None:
        yield TracedFrame(traced.f_code, traced.lineno, traced.f_globals)
        traced = traced.parent


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Tell Dynamo, which is loaded, to expect different sizes of `dim`."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


@functools.cache
def break_graphs_at(kind: type[RuntimeError]) -> None:
    """Let Dynamo, which is loaded, break the graph where an operator on fake tensors raises an exception of `kind`. The
    operator then runs, and may raise, outside the graph; with fullgraph=True the exception reaches the caller.

    The exception raised is an instance of `kind` and of the class at which Dynamo breaks graphs. Dynamo turns other
    exceptions into a TorchRuntimeError.
    """
    from torch._dynamo import utils
    from torch._dynamo.exc import Unsupported

    class Refused(kind, Unsupported):  # type: ignore[misc, valid-type]
        def __init__(self, message: str) -> None:
            Unsupported.__init__(self, message, gb_type="refused by masked_dispatch")

    Refused.__name__ = Refused.__qualname__ = kind.__name__
    Refused.__module__ = kind.__module__

    def run_node(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            cause = error if error.__cause__ is None else error.__cause__
            if isinstance(cause, kind):
                raise Refused(str(cause)) from cause
            raise

    replace(utils, "run_node", run_node, no_call, always=True)


@functools.cache
def know_storages_of(kind: type) -> None:
    """Let Dynamo, which is loaded, compare the inner tensors of operands of `kind` when while_loop checks aliasing."""
    from torch._dynamo.variables import higher_order_ops

    def get_tensor_storages(original: Callable[[Any], set[Any]], tensor: Any) -> set[Any]:
        names, _ = tensor.__tensor_flatten__()
        return set().union(*(original(getattr(tensor, name)) for name in names))

    replace(higher_order_ops, "get_tensor_storages", get_tensor_storages, lambda tensor: isinstance(tensor, kind))
    older_torch.take_apart_operands_of(kind, replace)


@functools.cache
def record_new_tensor_of(kind: type) -> None:
    """Let Dynamo, which is loaded, record x.new_tensor(data) as a call of x's own method if x is of `kind`."""
    from torch._dynamo.variables.tensor import TensorVariable

    if older_torch.records_new_tensor(TensorVariable):
        return

    def own(variable: Any, *args: Any, **kwargs: Any) -> bool:
        return isinstance(variable.proxy.node.meta.get("example_value"), kind)

    method_new_tensor = replace(TensorVariable, "method_new_tensor", lambda *args, **kwargs: None, own)
    by_name: Any = getattr(TensorVariable, "tp_methods", None)
    if by_name is not None:  # torch 2.14 looks methods up in this table
        by_name["new_tensor"] = type(by_name["new_tensor"])(method_new_tensor)


@functools.cache
def record_writes_of(kind: type, method: str) -> None:
    """Let Dynamo, which is loaded, record x[i] = value, for x of `kind`, as x.method(i, value), which returns x.

    Dynamo's own record returns nothing. If the write gives x sizes that depend on data, later stages could not match
    them to a result, and would look for them in the gradient of x.
    """
    from torch._dynamo.utils import proxy_args_kwargs
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.tensor import TensorVariable

    # torch 2.14 renamed it to the second.
    name = next(n for n in ("method___setitem__", "mp_ass_subscript_impl") if hasattr(TensorVariable, n))

    def own(variable: Any, *args: Any) -> bool:
        return isinstance(variable.proxy.node.meta.get("example_value"), kind)

    def set_item(original: Callable[..., Any], self: Any, tx: Any, key: Any, value: Any) -> Any:
        arguments = proxy_args_kwargs([self, key, value], {})
        wrap_fx_proxy(tx, tx.output.create_proxy("call_method", method, *arguments))
        self.synchronize_attributes(tx)
        return ConstantVariable.create(None)

    replace(TensorVariable, name, set_item, own)


def fused_multiply_add() -> OpOverload:
    """inductor's fma(a, b, c), a · b + c; importing inductor's primitives defines it."""
    import torch._inductor.inductor_prims

    return torch.ops.prims.fma.default


WRITING_COPIES = ("method_add_", "method_addcdiv_", "method_addcmul_")


def arithmetic_written_as_a_copy(frames: Iterable[FrameType]) -> bool:
    """Whether Dynamo made this call of `copy_`, with these frames around it, to record in-place arithmetic."""
    return any(
        f.f_code.co_name in WRITING_COPIES and f.f_globals["__name__"] == "torch._dynamo.variables.tensor"
        for f in frames
    )


def register_bool_to_int8_lowering(op: OpOverload) -> None:
    """Register inductor's lowering of `op`, which copies a bool tensor to int8, if inductor is loaded.

    The lowering calls the operator for graph inputs and their views, and converts computed values inline.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or op in lowering.lowerings:
        return
    call_operator = lowering.fallback_handler(op, add_to_fallback_set=False)

    def lower(mask: TensorBox) -> TensorBox:
        if _is_graph_input(mask):
            return call_operator(mask)
        # Convert by way of int32: inductor does not vectorize a comparison that it narrows directly to one byte.
        return lowering.to_dtype(lowering.to_dtype(mask, torch.int32), torch.int8)

    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def _is_graph_input(value: TensorBox) -> bool:
    """Whether an inductor value is an input of the graph, or a view of one."""
    from torch._inductor.ir import BaseView, StorageBox

    node = value.data
    if isinstance(node, BaseView):
        node = node.unwrap_view()
    return isinstance(node, StorageBox) and node.is_input_buffer()


def accept_unused_outputs(tangent_from_plain: dict[type, Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Let a compiled region return masked outputs that the loss does not depend on: ``return loss, hidden``.

    For such an output the autograd engine passes plain zeros to the region's backward, which was traced for a tangent
    of the output's type and refuses them (pytorch#173123). `tangent_from_plain` maps an output type to a function that
    converts a plain tensor to such a tangent: plain zeros become a masked tangent that is valid everywhere.
    We call this while tracing a graph with masked tensors, so that programs that never compile import nothing.
    test_unused_masked_output in tests/thorough/dispatch/test_compile.py tests it. If torch's method has another
    signature, this function does nothing.
    """
    import torch._dynamo  # imported later, it and the module below would import one another
    from torch._functorch._aot_autograd import runtime_wrappers

    owner: Any = runtime_wrappers.AOTDispatchAutograd
    original = getattr(owner, "process_runtime_tangent", None)
    if original is None or is_replaced(owner, "process_runtime_tangent"):
        return
    if list(inspect.signature(original).parameters)[:2] != ["x", "meta"]:
        return

    def is_plain_for_masked(x: object, meta: object, *rest: Any, **kwargs: Any) -> bool:
        wanted: Any = getattr(meta, "original_subclass_type", None)
        return wanted in tangent_from_plain and isinstance(x, torch.Tensor) and not _is_wrapper_subclass(x)

    def process_runtime_tangent(original: Callable[..., Any], x: Any, meta: Any, *rest: Any, **kwargs: Any) -> Any:
        return original(tangent_from_plain[meta.original_subclass_type](x), meta, *rest, **kwargs)

    replace(owner, "process_runtime_tangent", process_runtime_tangent, is_plain_for_masked)


@functools.cache
def place_views_of(kind: type, place: Callable[[Any, Any], Any], finish: Callable[[Any, Any], Any]) -> None:
    """Let a compiled region return views of arguments of `kind` at their own storage offsets.

    place   the view of an argument that has the size, strides and offset of what the region returned
    finish  gives the view whatever else the region returned, and returns it

    torch 2.14 adds the argument's offset to the view's offset if the two have separate storages, which wrapper
    subclasses always have.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    def is_own_view(base: Any, target: Any, *rest: Any, **kwargs: Any) -> bool:
        return issubclass(type(base), kind) and target._base is None

    def gen_alias_from_base(
        original: Callable[..., Any], base: Any, target: Any, requires_grad: bool, *rest: Any, **kwargs: Any
    ) -> Any:
        if target.dtype is not base.dtype:
            return finish(original(base, target, requires_grad, *rest, **kwargs), target)
        view = place(base, target)
        if base.requires_grad and not requires_grad:
            return finish(view.detach(), target)
        return finish(view.requires_grad_() if requires_grad and not view.requires_grad else view, target)

    replace(runtime_wrappers, "gen_alias_from_base", gen_alias_from_base, is_own_view)


@functools.cache
def give_plain_gradients(kind: type, plain: Callable[..., Any], refusal: Callable[[Any], str | None]) -> None:
    """Let Dynamo, which is loaded, trace backwards of autograd functions with plain gradients for results of `kind`.

    plain    the operator that makes a gradient plain
    refusal  says why a result's gradient cannot be plain in a graph, and so breaks the graph; None if it can
    """
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables import VariableTracker, higher_order_ops

    class WithPlainGradients(VariableTracker):
        """A backward that receives plain gradients."""

        def __init__(self, backward: Any) -> None:
            super().__init__()
            self.backward = backward

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            given = [_made_plain(tx, arg) if _is_of(kind, arg) else arg for arg in args]
            return self.backward.call_function(tx, given, kwargs)

    def _made_plain(tx: Any, gradient: Any) -> Any:
        build = VariableTracker.build
        return build(tx, plain).call_function(tx, [gradient, build(tx, None)], {})

    def prepare_fn_vt(original: Callable[..., Any], self: Any, tx: Any, ctx: Any, method: str, results: Any) -> Any:
        function, given = original(self, tx, ctx, method, results)
        masked = [result for result in results if _is_of(kind, result)] if method == "backward" else []
        for result in masked:
            reason = refusal(_example_of(result))
            if reason is not None:
                raise Unsupported(reason, gb_type="refused by masked_dispatch")
        return (WithPlainGradients(function), given) if masked else (function, given)

    owner = higher_order_ops.AutogradFunctionApplyVariable
    replace(owner, "prepare_fn_vt", prepare_fn_vt, no_call, always=True)


def _example_of(variable: Any) -> Any:
    return variable.as_proxy().node.meta.get("example_value")


def _is_of(kind: type, variable: Any) -> bool:
    return bool(variable.is_tensor()) and isinstance(_example_of(variable), kind)


def _is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, FakeTensor):
        return True
    is_wrapper = torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
    return is_wrapper and not isinstance(tensor, FunctionalTensor)


@contextlib.contextmanager
def without_compiler_warnings() -> Iterator[None]:
    """Suppress the warnings that Dynamo logs where a graph breaks."""
    log = logging.getLogger("torch._dynamo")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


# The number of active dispatch modes; Dynamo, for example, activates one to run code on fake tensors.
modes_in_force: Callable[[], int] = torch._C._len_torch_dispatch_stack


def pending_sizes() -> list[Any]:
    """The data-dependent sizes of the operator that Dynamo runs on fake tensors; callers change the list itself."""
    if not modes_in_force():
        return []
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return [] if mode is None or mode.shape_env is None else mode.shape_env.pending_fresh_unbacked_symbols


def sizes_to_be_found(
    values: Sequence[torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool], pending: Sequence[Any]
) -> set[Any]:
    """The pending sizes that a graph can read from these values: a size or number is that symbol by itself."""
    from torch.fx.experimental.symbolic_shapes import _free_unbacked_symbols_with_path

    return set(_free_unbacked_symbols_with_path(list(values), (), pending=set(pending)))


def check_dtype_in_graph(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise if a tensor has another dtype; graphs keep the operator that checks this."""
    torch.ops.aten._assert_tensor_metadata.default(tensor, dtype=dtype)


def exported_arguments() -> list[Any]:
    """The leaves of the arguments that the caller passed to torch.export, if it is running.

    We read them from the frame of torch.export's own function, the last place that separates them from parameters.
    """
    export: Any = sys.modules.get("torch.export._trace")
    if export is None:
        return []
    code, frame = inspect.unwrap(export._export).__code__, sys._getframe(1).f_back
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return []
    return torch.utils._pytree.tree_leaves((frame.f_locals["args"], frame.f_locals["kwargs"] or {}))


@functools.cache
def before_export_unwraps(split: Callable[[torch.nn.Module], object]) -> None:
    """Call `split(module)` before run_decompositions replaces wrapper parameters by their inner tensors.

    torch makes every inner tensor require grad if the parameter does, and a mask cannot require grad.
    """
    from torch._functorch._aot_autograd import subclass_parametrization

    def unwrap_parameters(
        original: Callable[[torch.nn.Module], torch.nn.Module], module: torch.nn.Module
    ) -> torch.nn.Module:
        split(module)
        return original(module)

    replace(subclass_parametrization, "unwrap_tensor_subclass_parameters", unwrap_parameters, no_call, always=True)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The callable that torch.compile compiled into `function`; `function` itself if it is not compiled."""
    given: Callable[..., Any] | None = getattr(function, "_orig_mod", None)
    if given is None:
        given = getattr(function, "_torchdynamo_orig_callable", None)
    return function if given is None else given
