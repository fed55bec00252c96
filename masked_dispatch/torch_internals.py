"""The module that uses torch's private dispatch machinery. Three others use private parts of the compiler
(compiler_internals.py), the autograd engine (engine_internals.py) and torch.distributed (distributed_internals.py).

They assume the following of the releases in versions.py; assumptions/ has a check with the same number for each:

 1. a wrapper subclass may carry the ``PreDispatch`` key, and kernels registered for that key receive the exact
    overload, above functorch, autocast and autograd, before CompositeImplicit operators decompose
 2. the key falls through for tensors that do not carry it, so plain tensors never reach these kernels outside tracing
 3. a kernel may redispatch a call by removing the key from the keyset that it *received* (building a new one drops keys
    that torch needs, and crashes); autograd then records the call with the wrapper as its output
 4. autograd nodes accept hooks that replace the gradients they produce
 5. below autograd, views and version counters of inner tensors are tracked once ADInplaceOrView is re-enabled
 6. functorch runs functions under vmap with its front key excluded, and functions under grad with saved-tensor hooks
    disabled in the name of torch.func; a tensor of a level that has ended has a level different from any running one
 7. torch creates tensor subclasses through detach, which therefore has no kernel at PreDispatch
 8. Dynamo skips code objects that are marked so
 9. Dynamo evaluates ``__metadata_guard__`` on each input before every run of a graph, with a deep copy of the flatten
    context from compile time
10. a view's wrapper may share the storage of its base's wrapper, by which AOTAutograd detects overlapping inputs
11. AOTAutograd passes each runtime tangent of a region to one function (`accept_unused_outputs`)
12. higher-order operators look up kernels by key, and accept a kernel for PreDispatch
13. make_fx is a dispatch mode that knows which tensors it tracks
14. a wrapper's storage can be made to raise when its address is requested
15. AOTAutograd's functional tensors hold a graph value that later writes do not change, and AOTAutograd runs a function
    once before it records it
16. the autograd engine sums the gradients of a tensor used more than once with ``aten.add.Tensor``, and no Python
    frame lies between that call and the function that calls the engine, or, in the thread that the engine has for a
    device, the start of the thread
17. the engine accumulates into an existing ``.grad`` with ``aten.add_.Tensor``, in a node whose ``variable`` is the
    leaf
18. ``default_collate`` looks up its functions in a table by type, a subclass of Tensor under Tensor
19. Python can read the node that the engine is evaluating in a thread, with the metadata dict attached when autograd
    recorded it
20. Dynamo does not trace ContextVar.get; it calls a function marked as constant once, and accepts a custom guard for
    the graph that it is compiling
21. torch prints tensors with the options, the number formatter and the line breaks of ``torch._tensor_str``, without
    dispatch modes
22. ``forward_ad._current_level`` is negative unless forward-mode AD is on
23. inductor keeps its lowerings in a table by overload, and they can distinguish graph inputs from computed values;
    importing its primitives defines the fused multiply-add ``prims.fma``, with which Dynamo writes in-place arithmetic
    as a ``copy_`` since 2.12, in the methods of its tensor variable that `arithmetic_written_as_a_copy` names
24. Dynamo has a function that marks a dimension of a tensor as dynamic
25. the result of torch.compile holds the original callable, as ``_torchdynamo_orig_callable`` or ``_orig_mod``
26. ``torch.testing.assert_close`` compares two tensors with `compare` of the class ``TensorLikePair`` of its module
27. since 2.12 Dynamo writes x.new_tensor(data) as torch.tensor(data), in a method whose result None means "record the
    call", which since 2.14 the table ``tp_methods`` holds; Dynamo's method for x[i] = value is ``method___setitem__``,
    since 2.14 ``mp_ass_subscript_impl``, and records a call without results
28. Dynamo runs an operator on fake tensors, and expects every size that depends on data, which ``ShapeEnv`` lists as
    pending, to be a size of its result
29. calling an autograd function makes its node, and the engine calls its backward by ``BackwardCFunction.apply``
    (``apply_boxed``); calling a checkpoint makes a ``_CheckpointFrame``, which keeps the function to recompute as
    ``recompute_fn``
30. ``__call__`` of ``ScriptFunction`` or ``ScriptMethod`` calls code that TorchScript compiled; a ``ScriptFunction``
    holds its Python function, for the compiler to inline
31. Dynamo has a table of how it traces each function; code that it runs while tracing can raise Dynamo's own exceptions
    to restart the trace or to leave a function uncompiled
32. the operators of torch.distributed take a ProcessGroup, a ReduceOp and a Work as script objects, which their classes
    unbox and box, and ``PythonCallbackWork`` is a Work whose ``wait`` calls a function with the timeout and completes
    its future; while an object of a subclass lives, callers get that object; a custom operator wraps the result of a
    functional collective
33. a kernel may be a partial, which adds no Python frame to the call and whose function can be exchanged; the engine
    looks the backward of an autograd function up in its class when it calls it, with the metadata of its node; a
    removed hook on all modules that took keyword arguments leaves its number behind
34. the result of torch.compile runs through a function ``compile_wrapper`` of ``torch._dynamo.eval_frame``
35. torch's older vmap removes the batch dimension of results in ``torch._vmap_internals._unwrap_batched``, and always
    puts it in front
36. the frame of ``torch.export._trace._export`` holds the arguments of torch.export; decomposition calls
    ``unwrap_tensor_subclass_parameters``, which it looks up at each call
37. before 2.14 Dynamo fails for a plain tensor whose `.grad` is a wrapper; it breaks the graph at a function that is
    marked as disabled
38. an exception of Dynamo's class Unsupported that an operator raises on fake tensors breaks the graph;
    ``torch._dynamo.utils.run_node`` runs operators, and raises RuntimeError from other exceptions
39. while a DistributedDataParallel runs its forward, its class holds it as ``_active_ddp_module``
40. a compiled region makes the views that it returns with ``gen_alias_from_base`` of ``runtime_wrappers``, looked up
    when the region is compiled
41. ``distribute_module`` places parameters with ``distribute_tensor`` of ``torch.distributed.tensor._api``;
    PrepareModuleInput and PrepareModuleOutput place with methods of their own
42. DTensor refuses a plain operand with an error text of its own, and accepts it inside ``implicit_replication``; the
    result of a functional collective holds the tensor as ``elem``
43. inside ``_AutoDispatchBelowAutograd`` autograd neither records nor refuses a write to a leaf that requires grad,
    even if a mode calls the write again
44. ``_free_unbacked_symbols_with_path`` finds the pending sizes (28) that are a size by themselves, not in a sum
45. ``x[i] = v`` writes a tensor v by assignments (``index_put_``, ``copy_``, ``fill_``); since 2.15 it also writes a
    number with ``masked_fill_`` or ``index_fill_``
46. the operators of torch.distributed are in ``torch.ops.c10d``; since 2.15 gather_single calls one of its own
47. the class method ``apply`` of ``torch.autograd.Function`` calls autograd functions, and outside of functorch ends
    with that of ``_FunctionBase``; a node looks backward and jvp up in its class's ``_forward_cls``, and may become a
    node of a derived class; Dynamo prepares the tracing of a backward in
    ``AutogradFunctionApplyVariable.prepare_fn_vt``
48. torch.save writes its older file format in ``torch.serialization._legacy_save``, and torch.load reads it in
    ``_legacy_load``, as Python functions
49. Dynamo has a list of files whose frames it leaves alone, and one of those whose functions it traces all the same
    where traced code calls them; before 2.12 it asks a function of trace_rules instead

If torch withdraws the key, ``__torch_function__`` can call the same rules, at 1.3 µs more per call and without the
operators that C++ composites call (evidence: a shim that excludes the keys above Python, lets torch parse the arguments
and receives the exact overload in ``__torch_dispatch__``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C import DispatchKey
from torch._C import DispatchKeySet as DispatchKeySet  # named in the signature of every kernel
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.library import Library
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import _comparison
from torch.utils import _python_dispatch, _pytree
from torch.utils.data._utils.collate import collate as collate
from torch.utils.data._utils.collate import default_collate_fn_map as default_collate_fn_map
from torch.utils.hooks import RemovableHandle

from op_registry.errors import MaskedSemanticsError
from op_registry.records.validity import writes_of_graphs_to_masks

if TYPE_CHECKING:
    from torch._dynamo.comptime import ComptimeContext as ComptimeContext

PRE_DISPATCH = DispatchKeySet(DispatchKey.PreDispatch)
_INPLACE_OR_VIEW_BITS = DispatchKeySet(DispatchKey.ADInplaceOrView).raw_repr()
_AUTOGRAD_BITS = DispatchKeySet(DispatchKey.AutogradFunctionality).raw_repr()
_from_bits = DispatchKeySet.from_raw_repr

# The current functorch level, or None outside of any transform.
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level

_autograd: Any = torch._C._autograd
_saved_tensors_hooks_enabled: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# How many modes see calls of torch's functions.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_traced_by_jit: Callable[[], bool] = torch._C._is_tracing
_DEAD = -2  # the level functorch reports for a tensor whose level has ended

# Whether two plain tensors have the same storage.
share_memory: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
no_torch_function = torch._C._disabled_torch_function_impl

# The pytree functions that torch's transforms use; _pytree has no public name.
tree_flatten, tree_unflatten, tree_map = _pytree.tree_flatten, _pytree.tree_unflatten, _pytree.tree_map
broadcast_to_leaves: Callable[[Any, Any], list[Any] | None] = _pytree._broadcast_to_and_flatten


# The class method with which an autograd function's own `apply` ends, outside of functorch.
apply_outside_of_functorch: Any = torch._C._FunctionBase.__dict__["apply"]  # type: ignore[attr-defined]


def under_transform() -> bool:
    """Whether a functorch transform (vmap, grad, jvp …) is running."""
    return transform_level() is not None


def plain_eager() -> bool:
    """Whether nothing but eager autograd is active: no forward mode, torch.func transform, dispatch mode or jit trace.

    Also False inside a transform that suspends itself to run the function it wraps.
    """
    return (
        forward_ad._current_level < 0
        and transform_level() is None
        and _saved_tensors_hooks_enabled()
        and not _dispatch_modes()
        and not _traced_by_jit()
    )


def hidden_in_transform() -> bool:
    """Whether the masked tensor that reaches a kernel was passed directly to a torch.func transform, which wraps it.

    vmap runs its function with its own front key excluded; grad and vjp suspend themselves first, but
    disable saved-tensor hooks, in their own name, until they return.
    """
    if transform_level() is not None:
        return torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.FuncTorchDynamicLayerFrontMode)
    if _saved_tensors_hooks_enabled():
        return False
    return (torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() or "").startswith("torch.func")


def outlived_transform(tensor: torch.Tensor) -> bool:
    """Whether `tensor` belongs to a functorch level that has ended."""
    level: int = torch._C._functorch.maybe_get_level(tensor)
    return level == _DEAD or level > (transform_level() or 0)


def mapped_dim(tensor: torch.Tensor) -> int | None:
    """The dimension of an argument over which the innermost vmap maps; None if it does not map over one."""
    functorch = torch._C._functorch
    if not functorch.is_batchedtensor(tensor) or functorch.maybe_get_level(tensor) != transform_level():
        return None
    return int(functorch.maybe_get_bdim(tensor))


def values_in_transform(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor inside functorch transforms, of all examples of a vmap."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def remove_module_hook(handle: RemovableHandle) -> None:
    """Remove a hook on all modules, and torch's note that the hook took keyword arguments."""
    handle.remove()
    torch.nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)


def transform_or_forward_mode() -> bool:
    """Whether a functorch transform is running, or forward-mode AD outside of functorch."""
    return forward_ad._current_level >= 0 or transform_level() is not None


def in_forward_mode() -> bool:
    """Whether forward-mode AD is on, outside of functorch."""
    return forward_ad._current_level >= 0


def redispatch(op: OpOverload, keyset: DispatchKeySet, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Continue the call as torch would without a kernel at PreDispatch."""
    return op._handle.redispatch_boxed(keyset.remove(DispatchKey.PreDispatch), *args, **kwargs)


def without_pre_dispatch(keyset: DispatchKeySet) -> DispatchKeySet:
    """The received keyset without our kernels' key."""
    return keyset.remove(DispatchKey.PreDispatch)


def tracks_writes(op: OpOverload) -> bool:
    """Whether torch raises version counters and rebases views in a kernel of `op` itself.

    A composite operator has no such kernel, and the keyset that its kernel receives lacks the key.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "ADInplaceOrView")


def keyset_for_write(keyset: DispatchKeySet, target: torch.Tensor) -> DispatchKeySet:
    """The keyset for a write to `target` on behalf of an operator that does not track writes itself."""
    bits = without_pre_dispatch(keyset).raw_repr()
    excluded = torch._C._dispatch_tls_local_exclude_set().raw_repr()
    return _from_bits(bits | (torch._C._dispatch_keys(target).raw_repr() & _INPLACE_OR_VIEW_BITS & ~excluded))


def copy_unrecorded(keyset: DispatchKeySet, target: torch.Tensor, source: torch.Tensor) -> None:
    """Write without autograd, which neither records nor refuses it, even if a compiler's mode calls the write again."""
    below = _from_bits(keyset_for_write(keyset, target).raw_repr() & ~_AUTOGRAD_BITS)
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.aten.copy_.default.redispatch(below, target, source)


def register_kernel(library: Library, name: str, kernel: Callable[..., Any], with_keyset: bool = True) -> None:
    """Register `kernel(keyset, *args, **kwargs)` at PreDispatch for the overload with that qualified name."""
    library.impl(name.partition("::")[2], kernel, "PreDispatch", with_keyset=with_keyset, allow_override=False)


def exchange_function(place: functools.partial[Any], function: Callable[..., Any]) -> None:
    """Let a partial without arguments call another function from now on, in one step."""
    place.__setstate__((function, (), {}, None))  # type: ignore[attr-defined]


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """The operator's schema: its name, arguments and returns."""
    return op._schema


def direct_call(op: OpOverload) -> Callable[..., Any]:
    """The fastest way to call `op` from Python with positional arguments: torch's own binding where it has one."""
    name = schema_of(op).name.removeprefix("aten::")
    binding = getattr(torch._C._VariableFunctions, name, None) if op.namespace == "aten" else None
    return binding or op._op


# Inside ``__torch_dispatch__``: a context that makes inner views real views and bumps version counters. Both are off
# below autograd, where torch would not notice that a write overwrites a tensor saved for backward.
tracking_views_and_versions: Callable[[], contextlib.AbstractContextManager[Any]] = functools.partial(
    torch._C._SetExcludeDispatchKeyGuard, DispatchKey.ADInplaceOrView, False
)

# A context in which operators bypass subclasses and dispatch modes. Inside it we can change a wrapper's own shape and
# strides (the wrapper holds no data), and copy a plain tensor while Dynamo makes fake tensors.
without_torch_dispatch = torch._C._DisableTorchDispatch


def recording() -> bool:
    """Whether make_fx is recording on real tensors: they have values, but nobody may inspect them."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def stands_for_value_of_graph(tensor: torch.Tensor) -> bool:
    """Whether nobody may read the values of a subclass instance, not even in eager code.

    Some subclasses implement a device in Python, and have real values as on a GPU. A wrapper has the values of its
    inner tensors.
    """
    known = _values_by_type(type(tensor))
    if known is not None:
        return not known
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = [getattr(tensor, name) for name in names]
    return any(type(t) is not torch.Tensor and stands_for_value_of_graph(t) for t in inner)


def is_value_of_graph(tensor: torch.Tensor) -> bool:
    """Whether a tensor itself, and not one inside it, is a value of a graph that is being traced."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor))


# Libraries whose tensors' values we never read: a distributed tensor has some values in other processes, torchax may
# hold jax tracers, and rules read a masked tensor's values from its record.
_NEVER_ASKED = ("torch.distributed.tensor", "torchax", "masked_dispatch")


@functools.cache
def _values_by_type(kind: type) -> bool | None:
    """Whether tensors of a subclass have values; None if this depends on their inner tensors."""
    libraries = tuple(f"{name}." for name in _NEVER_ASKED)
    if issubclass(kind, (FakeTensor, FunctionalTensor)) or any(
        f"{base.__module__}.".startswith(libraries) for base in kind.__mro__
    ):
        return False
    return None if hasattr(kind, "__tensor_flatten__") else True


def recorded_as_constant(data: torch.Tensor, wrapper: torch.Tensor) -> bool:
    """Whether make_fx tracks `wrapper` as a graph input but not its `data`, which it would bake in as a constant."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None:
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    return get_proxy_slot(wrapper, mode.tracer, None) is not None and get_proxy_slot(data, mode.tracer, None) is None


def as_value(tensor: torch.Tensor) -> torch.Tensor:
    """The current value of `tensor` in a traced graph: later writes to `tensor` do not change it, at no cost.

    AOTAutograd's functional tensors refer to one value until they are written to, then to the next. (Dynamo's, which
    only carry shapes, are copied.)
    """
    if isinstance(tensor, FunctionalTensor):
        value = FunctionalTensor.to_functional(tensor.from_functional())
        _remember_source(value, tensor)
        return value
    return tensor.clone()


class _Source(NamedTuple):
    """Whose value a storage has, since a number of writes. (While a weak reference exists, its address is its own.)"""

    own: StorageWeakRef
    source: StorageWeakRef
    writes: int


_sources: dict[int, _Source] = {}


def _remember_source(value: torch.Tensor, tensor: torch.Tensor) -> None:
    own = StorageWeakRef(value.untyped_storage())
    for address in [address for address, source in list(_sources.items()) if source.own.expired()]:
        _sources.pop(address, None)
    _sources[own.cdata] = _Source(own, StorageWeakRef(tensor.untyped_storage()), writes_of_graphs_to_masks())


def place_in_graph(tensor: torch.Tensor) -> Hashable:
    """Where a mask lies in AOTAutograd's functional memory: masks at equal places are equal. None for other tensors.

    A value lies where the tensor does that it was taken from, until a graph writes to a mask. Two arguments of a graph
    never lie at one place: they may share memory now, and not when it runs again.
    """
    if type(tensor) is not FunctionalTensor:
        return None
    storage = tensor.untyped_storage()._cdata
    while (found := _sources.get(storage)) is not None and found.writes == writes_of_graphs_to_masks():
        storage = found.source.cdata
    sizes, strides = map(_written, tensor.shape), map(_written, tensor.stride())
    steps = tuple((n, 0 if n == 1 else stride) for n, stride in zip(sizes, strides, strict=True))
    return storage, tensor.dtype, _written(tensor.storage_offset()), steps


def _written(size: int | torch.SymInt) -> Hashable:
    """A size as it is written: comparing symbols asks whether they are equal for all values, and takes longer."""
    return size if type(size) is int else size.node.expr  # type: ignore[union-attr]


def copied_back_by_aot(data: torch.Tensor) -> bool:
    """Whether a write to `data` is the copy that ends AOTAutograd's graph, and not a write of the program.

    The program itself writes to functional tensors; the graph then copies their final values into its inputs.
    """
    return recording() and not isinstance(data, FunctionalTensor)


# A wrapper has no memory of its own: this makes data_ptr() and dlpack raise instead of returning address 0.
make_data_pointer_raise: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr


# Higher-order operators that take masked operands, by name. The function gets the operator, which takes plain operands,
# and the arguments.
higher_order: dict[str, Callable[..., Any]] = {}


def serve_higher_order_operators() -> None:
    """Define what higher-order operators do with masked tensors; torch has no kernel for them at PreDispatch.

    1. checkpoint, autocast and grad-mode regions: redispatched without the key, so that their bodies reach our kernels
    2. nested_compile_region: runs the region inline
    3. those in `higher_order` (cond, scan): take the masked operands apart
    4. others that need a kernel of their own for tensors that are not plain: refused

    This covers the operators defined so far, so we call it at import, and again before a graph is traced.
    """
    for name, operator in torch._ops._higher_order_ops.items():
        if DispatchKey.PreDispatch in operator.py_kernels:
            continue
        if name == "invoke_subgraph":
            kernel = _run_inline
        elif name in higher_order:
            kernel = functools.partial(higher_order[name], operator)
        elif operator.py_kernels or name == "custom_function_call":
            kernel = _refusal(name)
        else:
            kernel = _redispatching(operator)
        operator.py_impl(DispatchKey.PreDispatch)(kernel)


def _run_inline(subgraph: Callable[..., Any], _: object, *operands: Any) -> Any:
    return subgraph(*operands)


def _redispatching(operator: HigherOrderOperator) -> Callable[..., Any]:
    def without_key(*args: Any, **kwargs: Any) -> Any:
        # Excluding the key would also hide the operators inside the body from our kernels.
        keys = operator.non_fallthrough_keys
        operator.non_fallthrough_keys = keys.remove(DispatchKey.PreDispatch)
        try:
            return operator(*args, **kwargs)
        finally:
            operator.non_fallthrough_keys = keys

    return without_key


_WAYS_OUT = {
    "flex_attention": "torch.nn.functional.scaled_dot_product_attention does, and a block mask is an attn_mask there: "
    "torch.nn.attention.flex_attention.create_mask(mask_mod, B, H, Q, K).",
}
_PASS_PARTS = (
    "Pass x.get_data() and x.get_mask(), make the masked tensor inside with as_masked_tensor(data, mask), and return "
    "y.to_tensor(fill) and y.get_mask()."
)


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        way_out = _WAYS_OUT.get(name, _PASS_PARTS)
        raise MaskedSemanticsError(f"torch.ops.higher_order.{name} takes no masked tensors. {way_out}")

    return refuse


# The callables that torch.jit.script, torch.jit.trace and torch.jit.load return: functions, and methods of modules.
TORCHSCRIPT_CALLABLES: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)


def python_function_of(compiled: Any) -> Callable[..., Any] | None:
    """The Python function that TorchScript compiled; None for methods, and for functions loaded from a file."""
    return getattr(compiled, "_torchdynamo_inline", None)


def print_options() -> Any:
    """The options of torch.set_printoptions: threshold, edgeitems, linewidth."""
    return torch._tensor_str.PRINT_OPTS


# NumberFormatter(values) formats single numbers as torch does in a tensor of these values: width(), format(number).
NumberFormatter: Any = torch._tensor_str._Formatter

# with_facts(text, facts, indent, force_newline) appends facts to the text, and breaks lines at linewidth.
with_facts: Callable[[str, Sequence[str], int, bool], str] = torch._tensor_str._add_suffixes

# The device type of the default tensor type, which torch does not print.
default_device_type: Callable[[], str] = torch._C._get_default_device


# A context that disables the current dispatch modes.
without_dispatch_modes: Callable[[], contextlib.AbstractContextManager[Any]] = _python_dispatch._disable_current_modes


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Hide printing from autograd, dispatch modes and torch function modes."""
    with torch.no_grad(), without_dispatch_modes(), torch._C.DisableTorchFunction():
        yield


def name_of_node(tensor: torch.Tensor) -> str | None:
    """The name of the node that made a tensor, as torch prints it; None for a leaf."""
    try:
        node = tensor.grad_fn
    except RuntimeError:  # a view made without grad mode and written to in place
        return "Invalid"
    if node is None:
        return None
    name = type(node).__name__
    return node.name().rsplit("::", 1)[-1] if name == "CppFunction" else name


# share_storage(view, base) gives a view's wrapper the (empty) storage of its base's wrapper, by which compilers detect
# that two inputs of a graph overlap.
share_storage: Callable[[torch.Tensor, torch.Tensor], None] = torch._functionalize_unsafe_set


# torch.testing.assert_close compares two tensors, `actual` and `expected`, with `compare` of this class.
PairOfTensors: Any = _comparison.TensorLikePair


def aten_names() -> list[str]:
    """The qualified names of aten's overloads that take a tensor. (Making their OpOverloads would take long.)"""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return [name for name in names if "Tensor" in _arguments_of(name)]


def _arguments_of(name: str) -> str:
    """The part of an overload's schema before its results, as text."""
    packet, _, overload = name.partition(".")
    return str(torch._C._get_schema(packet, overload)).partition(") -> ")[0]


def overload_named(name: str) -> OpOverload:
    """The overload with a qualified name such as aten::add.Tensor."""
    packet, _, overload = name.partition(".")
    namespace, _, operator = packet.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")
