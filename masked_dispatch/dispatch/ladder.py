"""How a call reaches its rule.

A call with a masked argument arrives at a kernel at PreDispatch, above autograd. The first match decides what the
kernel does (2 to 6 are the rungs 1 to 5 of docs/architecture.md; views have a path of their own):

1. view             makes torch's own view node on the wrapper; below autograd we view data and mask
2. rule             unwraps the arguments, runs the rule on plain tensors, wraps the results; a composite rule calls
                    other operators and gets the arguments unchanged; each of its operators has its own kernel
3. written back     in-place and out= forms: runs the functional form, then assigns to a masked self or updates a plain
4. each of a list   _foreach_ forms: runs the single-tensor form on each element
5. decomposes       runs torch's own decomposition; each of its operators has its own kernel
6. nothing          raises MaskedSemanticsError, in `below_autograd`, where operators without a kernel arrive

Views, copies and all operators without a kernel arrive below autograd (`__torch_dispatch__`). There we refuse an
operator that autograd has recorded with the plain operator's formula: its gradient would be wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch import scopes
from masked_dispatch.autograd.dense import plain_gradient
from masked_dispatch.autograd.engine import needs_plain_gradient
from masked_dispatch.autograd.reached import carry_nothing, joined
from masked_dispatch.autograd.sparse import strided_operands, unwrap_any, wrap_any
from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.dispatch.assign import assign_below, change_metadata_below, record_below, update
from masked_dispatch.dispatch.control_flow import CONTROL_FLOW
from masked_dispatch.dispatch.fast_paths import elementwise_kernel, reduction_kernel, rows_kernel
from masked_dispatch.dispatch.kernel_table import Kernel, kernel_table
from masked_dispatch.dispatch.run_rule import (
    SPARSE,
    has_masked,
    lowered,
    lowered_and_written,
    lowered_by,
    masked_arguments,
    rule_kernel,
    run_in_steps,
    run_rule,
    storage_among,
    writing_back,
)
from masked_dispatch.dispatch.views import metadata_kernel, strided_view_below, view_below, view_kernel
from masked_dispatch.dispatch.writes import (
    factory_out_kernel,
    filling_kernel,
    foreach_kernel,
    inplace_kernel,
    out_kernel,
    resizing_kernel,
)
from masked_dispatch.engine_internals import called_by_engine, calling_frame, carries_older_vmap, delegating, engine_run
from masked_dispatch.process import Lock
from masked_dispatch.scopes import overlays_of_caller
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.messages import (
    no_rule,
    passed_to_torch_func,
    returned_to_torch_func,
)
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import (
    DispatchKeySet,
    aten_names,
    higher_order,
    place_in_graph,
    recording,
    redispatch,
    schema_of,
    serve_higher_order_operators,
    stands_for_value_of_graph,
    tracking_views_and_versions,
    transform_or_forward_mode,
    under_transform,
    values_in_transform,
)
from op_registry import MaskedSemanticsError, registry, resolve
from op_registry.extents.found import there_too
from op_registry.extents.writes import of_target
from op_registry.laws.categories import COMPOSITE, ELEMENTWISE, REDUCTION, REFUSED
from op_registry.records.tracing import being_traced, set_transform_probes
from op_registry.registry import Caller
from op_registry.resolve import Meaning, decomposes
from op_registry.rule import Rule
from op_registry.schema import (
    changes_metadata,
    functional_call,
    functional_form,
    is_inplace,
    is_like_factory,
    is_out,
    is_view,
    mutable_forms,
    written_arguments,
)


def kernel_of(meaning: Meaning) -> Kernel:
    """The kernel for what an overload means: the ladder of the module's docstring."""
    op, rule, base = meaning.op, meaning.rule, meaning.base
    if rule is not None and rule.category is REFUSED:
        refusal = rule_kernel(op, rule)
        return resizing_kernel(op, refusal) if op in RESIZING and has_builtin_meaning(meaning) else refusal
    if rule is not None and rule.category is COMPOSITE:
        return composite_rule_kernel(op, rule)
    if changes_metadata(op) and has_builtin_meaning(meaning):
        return metadata_kernel(op)
    if rule is not None and base is op:
        if is_view(op) and not decomposes(op):
            return view_kernel(op, rule)
        if rule.category is ELEMENTWISE:
            return elementwise_kernel(op, rule)
        if rule.category.by_rows and rule.dims is not None:
            return rows_kernel(op, rule)
        if is_like_factory(op):
            return unrecorded(rule_kernel(op, rule))
        return reduction_kernel(op, rule) if rule.category is REDUCTION else rule_kernel(op, rule)
    if base is not None and (rule is not None or is_out(op)):
        compute = functional_call(op)
        if not is_inplace(op):
            exact = rule is not None and rule.traits.exact_out
            return out_kernel(op, compute, written_arguments(op), exact)
        category = None if rule is None else rule.category
        kernel = filling_kernel(op, compute) if op in FILLING else inplace_kernel(op, compute, category)
        return kernel if schema_of(op).returns else returning_nothing(kernel)
    if meaning.kind == "each of a list":
        return foreach_kernel(op)
    if meaning.kind == "written back":
        return factory_out_kernel(op)
    if meaning.kind != "decomposes":
        return passing_kernel(op)
    return shaped_like(decomposing_kernel(op)) if op in _SHAPED_LIKE else decomposing_kernel(op)


aten = torch.ops.aten
Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def decomposing_kernel(op: OpOverload) -> Kernel:
    """torch's own decomposition, above autograd and functorch, so that its operators arrive here in turn."""

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        with overlays_of_caller(1):
            return run_in_steps(op.decompose, *strided_arguments(args, kwargs))

    return kernel


def composite_rule_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """A rule that calls other operators, which arrive here in turn."""
    run, takes_sparse = rule.bind(op), rule.traits.sparse_factors

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        with overlays_of_caller(1):
            return run_in_steps(run, *((args, kwargs) if takes_sparse else strided_arguments(args, kwargs)))

    return kernel


def strided_arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call that becomes several calls, with torch.sparse tensors converted for them."""
    return strided_operands(args), dict(zip(kwargs, strided_operands(kwargs.values()), strict=True))


def passing_kernel(op: OpOverload) -> Kernel:
    """For an overload without a meaning: torch itself calls some of these; below autograd we refuse users' calls."""

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return redispatch(op, keyset, args, kwargs)

    return kernel


def unrecorded(kernel: Kernel) -> Kernel:
    """For factories (zeros_like, rand_like …), which torch's bindings call below autograd: they have no derivative.

    Reading an argument's node raises there if the argument is a view of a tensor written to since.
    """

    def kernel_without_grad(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return kernel(keyset, *args, **kwargs)

    return kernel_without_grad


# Results have the shape of another operand, whose extent they take.
_SHAPED_LIKE = (aten.expand_as.default, aten.broadcast_tensors.default)


def has_builtin_meaning(meaning: Meaning) -> bool:
    """Whether no overlay or replacement changed the overload's rule, so that operator-specific code applies."""
    return meaning.rule is None or (meaning.base is not None and registry.written(meaning.base) is meaning.rule)


def returning_nothing(kernel: Kernel) -> Kernel:
    """For in-place operators whose schema returns nothing, like those of torch.library.custom_op."""

    def without_result(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> None:
        kernel(keyset, *args, **kwargs)

    return without_result


cached_kernel_of = functools.lru_cache(maxsize=4096)(kernel_of)


def resolving_kernel(op: OpOverload) -> Kernel:
    """Resolves the overload at each call, under the caller's overlays: for overloads that an overlay ever changed."""

    @delegating
    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        with overlays_of_caller(1):
            return cached_kernel_of(resolve(op))(keyset, *args, **kwargs)

    return kernel


def inner_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """The kernel of a rule that applies inside one Python function (op_registry/laws/inside.py)."""
    if rule.category is COMPOSITE:
        return composite_rule_kernel(op, rule)
    run, general = rule.bind(op), rule_kernel(op, rule)

    def on_dense(*args: Any, **kwargs: Any) -> Any:
        return run_rule(op, run, rule, args, kwargs)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if storage_among([*args, *kwargs.values()]) == SPARSE:
            on_copies = writing_back(op, args, kwargs, on_dense) if schema_of(op).is_mutable else on_dense
            return lowered_by(rule, op, args, kwargs, on_copies)
        return general(keyset, *args, **kwargs)

    return kernel


def kernel_by_caller(op: OpOverload, ordinary: Kernel) -> Kernel:
    """Finds the Python function that calls the operator, and uses the operator's rule inside that function."""
    rules = dict(registry.inside(op))
    kernels = {caller: inner_kernel(op, rule) for caller, rule in rules.items()}
    packages = tuple(caller for caller in rules if isinstance(caller, str))

    @delegating
    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        frame = calling_frame(1)
        if frame is not None:
            caller: Caller = frame.f_code
            if packages and caller not in kernels:
                caller = package_of(frame.f_globals.get("__name__", ""), packages)
            if caller in kernels and rules[caller].holds(frame.f_locals):
                return kernels[caller](keyset, *args, **kwargs)
        return ordinary(keyset, *args, **kwargs)

    return kernel


@functools.lru_cache(maxsize=4096)
def package_of(module: str, packages: tuple[str, ...]) -> str:
    """The package among `packages` that a module lies in; the module itself if it lies in none of them."""
    return next((p for p in packages if module == p or module.startswith(f"{p}.")), module)


@never_compiled
def below_autograd(
    cls: type,
    op: OpOverload,
    types: Iterable[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """`__torch_dispatch__`: serves views and writes that passed through autograd, and operators without a kernel."""
    if SparseMaskedTensor in types:
        return sparse_below(op, args, kwargs or {})
    handler = _handlers.get(op)
    if handler is None:
        handler = handler_below(resolve(op))
        if not resolved_per_call(op):
            _handlers[op] = handler
    return handler(args, kwargs or {})


def sparse_below(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same for sparse storage: a write replaces the stored tensors, everything else returns a new tensor."""
    if op is aten.copy_.default:
        if isinstance(args[0], SparseMaskedTensor):
            assign_below(args[0], args[1])
        elif isinstance(args[0], MaskedTensor):
            with tracking_views_and_versions():
                assign_below(args[0], args[1]._stored_densely())
        else:
            update(args[0], args[1])
        return args[0]
    if op in WITHOUT_KERNEL and has_builtin_meaning(resolve(op)):
        return args[0].detached()
    if changes_metadata(op):
        raise MaskedSemanticsError(
            f"{op} changes the shape or strides of a masked tensor of shape {tuple(args[0].shape)} in place, and it is "
            f"stored as {args[0].storage_layout}: its indices would have to be recomputed. Use the form that returns a "
            "tensor."
        )
    serve = lowered_and_written if schema_of(op).is_mutable else lowered
    return serve(op, args, kwargs, below=True)


# Cache of the handlers that below_autograd uses without overlays, by overload; a changed rule clears it.
_handlers: dict[OpOverload, Handler] = {}


@functools.lru_cache(maxsize=4096)
def handler_below(meaning: Meaning) -> Handler:
    """The handler that serves an overload below autograd."""
    op, rule = meaning.op, meaning.rule

    def copy_(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(args[0], MaskedTensor):
            return run_below(args, kwargs)
        with tracking_views_and_versions():
            assign_below(args[0], args[1])
        return args[0]

    def view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return view_below(run, rule, op, args, kwargs) if isinstance(args[0], MaskedTensor) else run_below(args, kwargs)

    def detach(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return plain_gradient(args[0], None) if needs_plain_gradient(args[0], 2) else view(args, kwargs)

    def strided_view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return view(args, kwargs) if being_traced(args[0]._data) else strided_view_below(*args, **kwargs)

    def run_below(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() and any_requires_grad([*args, *kwargs.values()]):
            raise MaskedSemanticsError(
                f"{op} reached masked tensors below autograd, which has recorded the derivative of the plain operator; "
                "under a mask that would be wrong. Please report how it was called."
            )
        if rule is not None and meaning.base is op:
            return run(*args, **kwargs) if rule.category is COMPOSITE else run_rule(op, run, rule, args, kwargs)
        return op.decompose(*args, **kwargs) if meaning.kind == "decomposes" else op(*args, **kwargs)

    run = rule.bind(op) if rule is not None and meaning.base is op else _run_without_rule
    if op is aten.copy_.default:
        return copy_
    if op is aten.detach.default:
        return detach
    if op is aten.as_strided.default and has_builtin_meaning(meaning):
        return strided_view
    if changes_metadata(op) and has_builtin_meaning(meaning):
        return functools.partial(change_metadata_below, op)
    if meaning.kind == "missing":
        return functools.partial(refuse_without_rule, op)
    return view if is_view(op) and rule is not None else run_below


def refuse_without_rule(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raise for an overload without a meaning."""
    raise MaskedSemanticsError(no_rule(op, masked_arguments(args, kwargs)))


def _run_without_rule(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("only overloads with a rule of their own run below autograd")


def any_requires_grad(values: Iterable[object]) -> bool:
    """Whether a tensor in `values`, or in lists in it, requires grad."""
    for v in values:
        if isinstance(v, Tensor) and v.requires_grad:
            return True
        if isinstance(v, (list, tuple)) and any_requires_grad(v):
            return True
    return False


# torch calls these while it creates a tensor subclass, even when export traces plain tensors inside vmap, and must be
# the first to give the result a Python object. So they have no kernel above autograd, and need none: detach has no
# derivative, and users do not call alias.
WITHOUT_KERNEL = (aten.detach.default, aten.alias.default)


FILLING = (aten.fill_.Scalar, aten.zero_.default)  # fill_.Tensor refuses expanded tensors, as copy_ does
RESIZING = (aten.resize_.default, aten.resize_as_.default)


def resolved_per_call(op: OpOverload) -> bool:
    """Whether an overlay has ever given a rule to the overload, or to its base overload."""
    return not registry.ever_overlaid.isdisjoint((op, functional_form(op)))


def make_kernel(op: OpOverload) -> Kernel:
    """The kernel for the overload's current meaning."""
    kernel = resolving_kernel(op) if resolved_per_call(op) else kernel_of(resolve(op))
    kernel = kernel_by_caller(op, kernel) if registry.inside(op) else kernel
    return called_with_gradients(op, kernel)


def follow_registry() -> None:
    """Serve every operator of torch, with or without a rule, and every other operator that has or will have a rule."""
    without = {op.name() for op in WITHOUT_KERNEL}
    kernel_table.serve((name for name in aten_names() if name not in without), make_kernel)
    registry.listen(_changed)
    for op in registry:
        if op.namespace != "aten":
            _changed(op)


_changing = Lock()


def _changed(op: OpOverload) -> None:
    """After a change of the overload's rule, make its kernel, and the kernels of its derived forms, again."""
    if op.namespace == "aten" and op in kernel_table:
        forms = [form for form in kernel_table.made if form is op or functional_form(form) is op]
    else:
        forms = [op, *mutable_forms(op)]
    with _changing.here:
        if op in registry.ever_overlaid:
            scopes.remember()
        for form in forms:
            if form not in WITHOUT_KERNEL:
                kernel_table.put(form, make_kernel(form))
        _handlers.clear()


def dual_kernel(op: OpOverload) -> Kernel:
    """Forward mode's own operators: torch.func's jvp calls them on its inputs and outputs."""
    refusal = passed_to_torch_func if op is aten._make_dual.default else returned_to_torch_func

    def kernel(keyset: DispatchKeySet, tensor: Tensor, *args: Any) -> Any:
        if under_transform() and isinstance(tensor, MaskedTensor):
            raise MaskedSemanticsError(refusal(tensor))
        return redispatch(op, keyset, (tensor, *args), {})

    return kernel


def install() -> None:
    """Install all kernels; the package calls this once, at import."""
    set_transform_probes(
        transform_or_forward_mode,
        under_transform,
        recording,
        stands_for_value_of_graph,
        carries_older_vmap,
        values_in_transform,
        place_in_graph,
    )
    MaskedTensor.__torch_dispatch__ = classmethod(below_autograd)  # type: ignore[assignment,method-assign]
    follow_registry()
    higher_order.update(CONTROL_FLOW)
    serve_higher_order_operators()
    for op in (aten._make_dual.default, aten._unpack_dual.default):
        kernel_table.put(op, dual_kernel(op))


# ------------------------------------------------------------------------------------------- results shaped like others


def shaped_like(decompose: Kernel) -> Kernel:
    """The kernel of an operator whose results take their shapes from its tensors: `expand_as`, `broadcast_tensors`.

    A result takes the extent of a tensor, too, along dimensions whose positions this numbers and its own source does
    not. `decompose` computes the results, as torch does.
    """

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        result = decompose(keyset, *args, **kwargs)
        if isinstance(result, Tensor):
            return _with_extent_of(result, *args, *kwargs.values())
        (tensors,) = args or kwargs.values()
        return [_with_extents_of(r, tensor, tensors) for r, tensor in zip(result, tensors, strict=True)]

    return kernel


def _with_extents_of(result: Tensor, source: Tensor, targets: Sequence[Tensor]) -> Tensor:
    for target in targets:
        if target is not source and target.ndim == result.ndim:
            result = _with_extent_of(result, source, target)
    return result


def _with_extent_of(result: Tensor, source: Tensor, target: Tensor) -> Tensor:
    if not isinstance(target, MaskedTensor) or target._extent is None:
        return result
    for factor in of_target(record_below(target), record_below(source)):
        record = unwrap_any(result)
        result = joined(result, record, wrap_any(there_too(record, factor)))
    return result


# ----------------------------------------------------------------------------------------- with gradients of the engine


def gradient_storing_kernel(kernel: Kernel, store: Callable[..., Tensor]) -> Kernel:
    """The kernel of an operator that the engine also calls to make a `.grad` from a gradient; `store` does that."""

    @delegating
    def storing_or(keyset: DispatchKeySet, x: Any, *args: Any, **kwargs: Any) -> Any:
        if needs_plain_gradient(x, 1):
            return store(x, *args, **kwargs)
        return kernel(keyset, x, *args, **kwargs)

    return storing_or


def _copy_for_plain_leaf(grad: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    return plain_gradient(grad, None).clone(memory_format=memory_format or torch.preserve_format)


def _zeros_for_plain_leaf(grad: Tensor, size: list[int], stride: list[int], **options: Any) -> Tensor:
    """Memory into which the engine then copies the gradient: an update, so that invalid elements stay zero."""
    options["device"] = options.get("device") or grad.device
    options["dtype"] = options.get("dtype") or grad.dtype
    return torch.empty_strided(size, stride, **options).zero_()


# Besides `detach`, the engine calls these to make a `.grad` from a gradient (torch's accumulate_grad.h).
_STORING_GRADIENTS: dict[OpOverload, Callable[..., Tensor]] = {
    aten.clone.default: _copy_for_plain_leaf,
    aten.new_empty_strided.default: _zeros_for_plain_leaf,
}


def kernel_of_zeros(kernel: Kernel) -> Kernel:
    """The kernel of `zeros_like`, with which the engine also makes the gradient of what `copy_` has overwritten."""

    @delegating
    def zeros(keyset: DispatchKeySet, x: Any, *args: Any, **kwargs: Any) -> Any:
        made = kernel(keyset, x, *args, **kwargs)
        return carry_nothing(made) if engine_run() >= 0 and called_by_engine(1) else made

    return zeros


def called_with_gradients(op: OpOverload, kernel: Kernel) -> Kernel:
    """The kernel of an operator, if the engine calls it too: one that does what the engine needs."""
    if op is aten.zeros_like.default:
        return kernel_of_zeros(kernel)
    store = _STORING_GRADIENTS.get(op)
    return kernel if store is None else gradient_storing_kernel(kernel, store)
