"""The one module that touches torch's private dispatch surface (checked on torch 2.11–2.13).

What it relies on, each with a test of the same number in tests/test_torch_assumptions.py:

 1. a wrapper subclass may carry the ``PreDispatch`` key, and kernels registered there receive the exact overload,
    above functorch, autocast and autograd, before CompositeImplicit operators decompose
 2. the key falls through for tensors that do not carry it, so plain tensors never meet these kernels outside of tracing
 3. a kernel may hand a call on by removing the key from the keyset that it *received* (rebuilding one drops keys that
    torch needs, and crashes); autograd then records the call with the wrapper as its output
 4. autograd nodes accept hooks that replace the gradients that they hand on
 5. below autograd, views and version counters of inner tensors are tracked once ADInplaceOrView is let in again
 6. functorch runs what vmap wraps with its front key excluded, and what grad wraps with saved-tensor hooks disabled in
    the name of torch.func; a tensor of a level that has ended has another level than any that runs
 7. torch makes tensor subclasses by way of detach, which therefore has no kernel at PreDispatch
 8. code objects may be marked as none of Dynamo's business
 9. Dynamo evaluates ``__metadata_guard__`` on each input before every run of a graph, with a deep copy of the flatten
    context from when it was compiled
10. a view's wrapper may be given the storage of its base's, and AOTAutograd refuses overlapping inputs by it
11. AOTAutograd hands each runtime tangent of a region to one function (`accept_unused_outputs`)
12. higher-order operators look up kernels by key, and take one for PreDispatch
13. make_fx is a dispatch mode that knows which tensors it follows
14. a wrapper's storage can be told to raise where its address is asked for
15. AOTAutograd's functional tensors hold a value of the graph that no later write changes, and it runs a function once
    before it records it
16. the autograd engine adds the gradients of what is used more than once with ``aten.add.Tensor``, and nobody's Python
    frame stands between that and the function that calls the engine, or, in the thread that the engine has for a
    device, the thread's beginning
17. it adds to a ``.grad`` that is there by ``aten.add_.Tensor``, in a node that knows the leaf as its ``variable``
18. ``default_collate`` looks up how to collate in a table by type, a subclass of Tensor under Tensor
19. the node that the engine evaluates in a thread can be asked for, with a dict of notes that it was given when it was
    recorded
20. Dynamo traces no ContextVar.get: it calls a function marked as constant once, and a graph may be given a guard of
    one's own while it is compiled

Should torch withdraw the key: the same rules can be entered from ``__torch_function__``, at 1.3 µs more per call and
without what C++ composites call (evidence: a shim that excludes the keys above Python, lets torch parse the arguments
and meets the exact overload in ``__torch_dispatch__``).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch._C import DispatchKey
from torch._C import DispatchKeySet as DispatchKeySet  # named in the signature of every kernel
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.library import Library
from torch.utils import _pytree
from torch.utils.data._utils.collate import default_collate_fn_map as default_collate_fn_map

from op_registry.errors import MaskedSemanticsError
from op_registry.rule import takes_tensor

PRE_DISPATCH = DispatchKeySet(DispatchKey.PreDispatch)
_PRE_DISPATCH_BITS = PRE_DISPATCH.raw_repr()
_INPLACE_OR_VIEW_BITS = DispatchKeySet(DispatchKey.ADInplaceOrView).raw_repr()
_from_bits = DispatchKeySet.from_raw_repr

# The current functorch level, or None outside of any transform.
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level

_autograd: Any = torch._C._autograd
_saved_tensors_hooks_enabled: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_DEAD = -2  # what functorch says of a tensor whose level has ended
_AOT = ("torch._functorch._aot_autograd", "torch._functorch.aot_autograd")

# Which run of the autograd engine this is in, -1 for none; and the function that calls the engine.
engine_run: Callable[[], int] = torch._C._current_graph_task_id
_Function = TypeVar("_Function", bound=Callable[..., Any])

_ENGINE_CALL = torch.autograd.graph._engine_run_backward.__code__

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
no_torch_function = torch._C._disabled_torch_function_impl

# torch's own nested structures, as its transforms take them apart; _pytree has no public name.
tree_flatten, tree_unflatten, tree_map = _pytree.tree_flatten, _pytree.tree_unflatten, _pytree.tree_map


def under_transform() -> bool:
    """Whether a functorch transform (vmap, grad, jvp …) is running."""
    return transform_level() is not None


def outside_of_transforms() -> bool:
    """Whether no transform of torch.func is running, not even one that has stepped aside to run what it wraps."""
    return transform_level() is None and _saved_tensors_hooks_enabled() and not _dispatch_modes()


def hidden_in_transform() -> bool:
    """Whether the masked tensor that a kernel meets was handed to a transform of torch.func, which wraps it.

    vmap runs what it wraps with its own way in closed; grad and vjp step aside first, but have switched saved-tensor
    hooks off, in their own name, until they are done.
    """
    if transform_level() is not None:
        return torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.FuncTorchDynamicLayerFrontMode)
    if _saved_tensors_hooks_enabled():
        return False
    return (torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() or "").startswith("torch.func")


def beyond_transform(tensor: torch.Tensor) -> bool:
    """Whether `tensor` belongs to a functorch level that has ended."""
    level: int = torch._C._functorch.maybe_get_level(tensor)
    return level == _DEAD or level > (transform_level() or 0)


def called_by_functorch(depth: int) -> bool:
    """Whether torch's own implementation of its transforms has called the kernel `depth` frames above this function."""
    frame = _caller(depth + 1)
    name = frame.f_globals.get("__name__", "") if frame is not None else ""
    return isinstance(name, str) and name.startswith("torch._functorch.") and not name.startswith(_AOT)


def called_by_engine(depth: int) -> bool:
    """Whether the autograd engine has called the kernel `depth` frames above this function.

    Then no backward, hook or formula in Python has. On the CPU the next frame is the one that has called the engine; in
    the threads that run backwards on other devices there is none.
    """
    frame = _caller(depth + 1)
    return frame is None or frame.f_code is _ENGINE_CALL


def _caller(depth: int) -> FrameType | None:
    """The frame that has called the kernel `depth` frames above this function; None where no Python has."""
    frame = sys._getframe(depth).f_back
    while frame is not None and frame.f_code in _passing_on:
        frame = frame.f_back
    return frame


# Code of kernels that only choose another kernel, which is to see who has called them.
_passing_on: set[CodeType] = set()


def passing_on(kernel: _Function) -> _Function:
    """Decorator: a kernel that chooses another one and calls it; it is not taken for the caller of that one."""
    _passing_on.add(kernel.__code__)
    return kernel


def current_node() -> Any:
    """The autograd node that is being evaluated in this thread."""
    return torch._C._current_autograd_node()


def leaf_accumulated_into() -> torch.Tensor | None:
    """The leaf into whose `.grad` the autograd engine is adding at this moment, in the node that this runs in."""
    leaf: torch.Tensor | None = getattr(current_node(), "variable", None)
    return leaf


def in_forward_mode() -> bool:
    """Whether forward-mode AD is on, outside of functorch."""
    return forward_ad._current_level >= 0


def redispatch(op: OpOverload, keyset: DispatchKeySet, args: Any, kwargs: Any) -> Any:
    """The call as torch would have gone on with it, had there been no kernel at PreDispatch."""
    return op.redispatch(without_pre_dispatch(keyset), *args, **kwargs)


def without_pre_dispatch(keyset: DispatchKeySet) -> DispatchKeySet:
    """The received keyset without the key at which our kernels stand."""
    return _from_bits(keyset.raw_repr() & ~_PRE_DISPATCH_BITS)


def never_compiled(function: _Function) -> _Function:
    """`function` itself, which Dynamo will run as it is, with all that it calls, where a compiled function breaks off.

    Costs nothing: it is a note on the code object. (When Dynamo traces a call of it, it still looks inside.)
    """
    action = torch._C._dynamo.eval_frame._FrameAction.SKIP
    strategy = torch._C._dynamo.eval_frame._FrameExecStrategy(action, action)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def constant_in_graphs(function: _Function) -> _Function:
    """Decorator: Dynamo calls `function` once, as it is, and takes what it returns for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def while_compiling(function: Callable[[Any], None]) -> None:
    """Called in code that Dynamo traces: `function` is called now, as it is, with what Dynamo knows by then."""
    from torch._dynamo.comptime import comptime

    comptime(function)


def guard_on(read: Callable[[], Any], context: Any) -> None:
    """What is being compiled may be used only as long as `read` returns what it does now.

    Dynamo reads no ContextVar, and so guards on none. `context` is what `while_compiling` hands over.
    """
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard

    now = read()

    def unchanged(_: Any) -> bool:
        return bool(read() == now)

    def add(builder: Any, guard: Guard) -> None:
        builder.guard_manager.root.add_lambda_guard(unchanged, [f"{read.__qualname__}() == {now!r}"], None)

    context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.guards.add(Guard(GlobalStateSource(), add))


def register_kernel(library: Library, op: OpOverload, kernel: Callable[..., Any]) -> None:
    """Register `kernel(keyset, *args, **kwargs)` for `op` at PreDispatch, in place of an earlier one."""
    with warnings.catch_warnings():
        # Exchanging a kernel for a rule's successor is what we mean to do.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        name = op.name().partition("::")[2]
        library.impl(name, never_compiled(kernel), "PreDispatch", with_keyset=True, allow_override=True)


def direct_call(op: OpOverload) -> Callable[..., Any]:
    """The quickest way to call `op` from Python with positional arguments: torch's own binding where there is one."""
    name = op._schema.name.removeprefix("aten::")
    binding = getattr(torch._C._VariableFunctions, name, None) if op.namespace == "aten" else None
    return binding or op._op


def tracking_views_and_versions() -> contextlib.AbstractContextManager[Any]:
    """Inside ``__torch_dispatch__``: let inner tensors become proper views and bump their version counters.

    Below autograd both are switched off, and what a rule saved for backward would not notice being overwritten.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set().raw_repr() & ~_INPLACE_OR_VIEW_BITS
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _from_bits(excluded))


# A context in which an operator is applied to the wrapper itself: shape and strides change, nothing is computed.
metadata_only = torch._C._DisableTorchDispatch


def recording() -> bool:
    """Whether make_fx is recording what real tensors go through: their values are there, but not to be looked at."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def recorded_as_constant(data: torch.Tensor, wrapper: torch.Tensor) -> bool:
    """Whether make_fx knows `wrapper` as an input of its graph, and would bake the `data` in it in as a constant."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None:
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    return get_proxy_slot(wrapper, mode.tracer, None) is not None and get_proxy_slot(data, mode.tracer, None) is None


def as_value(tensor: torch.Tensor) -> torch.Tensor:
    """What `tensor` holds now, for a graph to keep: a later write to `tensor` does not reach it, and it costs nothing.

    AOTAutograd's tensors stand for a value until they are written to, then for the next one. (Dynamo's, which only
    carry shapes, are copied.)
    """
    if isinstance(tensor, FunctionalTensor):
        return FunctionalTensor.to_functional(tensor.from_functional())
    return tensor.clone()


def make_data_pointer_raise(tensor: torch.Tensor) -> None:
    """A wrapper has no memory of its own; let data_ptr() and dlpack say so instead of handing out address 0."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def open_higher_order_operators() -> None:
    """Say what higher-order operators do that are given masked tensors; torch has no kernel for them at PreDispatch.

    1. checkpoint, autocast and grad-mode regions: they go on without the key, and what they run meets our kernels
    2. nested_compile_region: the region is run in place, where it is
    3. those that need a kernel of their own for tensors that are not plain (cond, scan …): refused

    Serves those that exist by now: called at import, and again before a graph is traced.
    """
    for name, operator in torch._ops._higher_order_ops.items():
        if DispatchKey.PreDispatch in operator.py_kernels:
            continue
        if name == "invoke_subgraph":
            kernel = _run_in_place
        elif operator.py_kernels or name == "custom_function_call":
            kernel = _refusal(name)
        else:
            kernel = _going_on(operator)
        operator.py_impl(DispatchKey.PreDispatch)(kernel)


def _run_in_place(subgraph: Callable[..., Any], _: Any, *operands: Any) -> Any:
    return subgraph(*operands)


def _going_on(operator: Any) -> Callable[..., Any]:
    def without_key(*args: Any, **kwargs: Any) -> Any:
        # Not by excluding the key, which would hide what the operator runs from our kernels too.
        keys = operator.non_fallthrough_keys
        operator.non_fallthrough_keys = keys.remove(DispatchKey.PreDispatch)
        try:
            return operator(*args, **kwargs)
        finally:
            operator.non_fallthrough_keys = keys

    return without_key


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise MaskedSemanticsError(
            f"torch.ops.higher_order.{name} takes no masked tensors. Hand in x.get_data() and x.get_mask(), make the "
            "masked tensor inside with as_masked_tensor(data, mask), and return y.to_tensor(fill) and y.get_mask()."
        )

    return refuse


# Called whenever a masked tensor enters a graph that is being traced: what lies above says what is to be done then.
before_tracing: list[Callable[[], None]] = []


def prepare_for_tracing() -> None:
    """Let everybody prepare who has something to prepare before a graph is traced."""
    for prepare in before_tracing:
        prepare()


# share_storage(view, base): a view's wrapper has the storage (empty as it is) of its base's, by which compilers notice
# that two inputs of a graph overlap.
share_storage: Callable[[torch.Tensor, torch.Tensor], None] = torch._functionalize_unsafe_set


def accept_unused_outputs(made_of_plain: dict[type, Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Let a compiled region return masked outputs that the loss does not depend on: ``return loss, hidden``.

    For such an output the autograd engine hands plain zeros to the region's backward, which was traced for a tangent of
    the output's type and refuses them (pytorch#173123). `made_of_plain` says, for each type of output, how a plain
    tensor becomes such a tangent: plain zeros are a masked tangent that is valid everywhere.
    Called while a graph with masked tensors is traced, so that nothing is imported for those who never compile. The
    test is test_unused_masked_output in tests/test_compile.py; a torch whose method looks otherwise is left alone.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    owner: Any = runtime_wrappers.AOTDispatchAutograd
    original = getattr(owner, "process_runtime_tangent", None)
    if original is None or getattr(original, "_accepts_unused_masked_outputs", False):
        return
    if list(inspect.signature(original).parameters)[:2] != ["x", "meta"]:
        return

    @functools.wraps(original)
    def process_runtime_tangent(x: Any, meta: Any, *rest: Any, **kwargs: Any) -> Any:
        adopt = made_of_plain.get(getattr(meta, "original_subclass_type", None))  # type: ignore[arg-type]
        if adopt is not None and not _is_wrapper_subclass(x):
            x = adopt(x)
        return original(x, meta, *rest, **kwargs)

    process_runtime_tangent._accepts_unused_masked_outputs = True  # type: ignore[attr-defined]
    owner.process_runtime_tangent = staticmethod(process_runtime_tangent)


def _is_wrapper_subclass(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return True
    return torch.utils._python_dispatch.is_traceable_wrapper_subclass(value) and not isinstance(value, FunctionalTensor)


def aten_overloads() -> Iterator[OpOverload]:
    """Every aten overload that takes a tensor."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if op is not None and takes_tensor(op):
                yield op
