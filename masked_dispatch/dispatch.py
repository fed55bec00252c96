"""How a call gets to its rule.

A call with a masked argument arrives at a kernel at PreDispatch, above autograd. What happens there, first match wins:

1. view             torch's own view node on the wrapper; its data and mask are viewed below autograd
2. rule             open the arguments, run the rule on plain tensors, close the results
3. written back     in-place and out= forms: the functional form, then assigned (masked self) or updated (plain self)
4. each of a list   _foreach_ forms: the single-tensor form on each element
5. decomposes       torch's own decomposition, whose pieces arrive here again
6. nothing          MaskedSemanticsError, from `below_autograd`, where operators without a kernel end up

Below autograd (`__torch_dispatch__`) arrive views, copies and what has no kernel. No operator that autograd has recorded
with the formula of the plain operator may pass there: that gradient would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch._ops import OpOverload
from torch.library import Library

from masked_dispatch.gradient import closed, fitted, masked_gradient, opened
from masked_dispatch.interception import (
    composite_overloads,
    in_forward_mode,
    metadata_only,
    redispatch,
    register_kernel,
    tracking_views_and_versions,
    under_transform,
)
from masked_dispatch.messages import no_rule
from masked_dispatch.tensor import MaskedTensor, wrap
from masked_dispatch.validity import lent_validity, make_view_family, write_validity
from op_registry import MaskedSemanticsError, registry, resolve
from op_registry.categories import ELEMENTWISE
from op_registry.records import Dense, being_traced, fill_where_invalid, intersect, set_transform_probe
from op_registry.rule import Rule, Run
from op_registry.variants import changes_metadata, functional_form, is_foreach, is_inplace, is_out, is_view, single_form

aten = torch.ops.aten
Kernel = Callable[..., Any]


def has_masked(args: Any) -> bool:
    """Whether a masked tensor is among `args`, through lists."""
    for a in args:
        if isinstance(a, MaskedTensor):
            return True
        if isinstance(a, (list, tuple)) and has_masked(a):
            return True
    return False


def open_argument(value: Any) -> Any:
    """An argument as rules take it: records in place of tensors."""
    if isinstance(value, MaskedTensor):
        return opened(value)
    if isinstance(value, Tensor):
        return Dense(value, None)
    if isinstance(value, (list, tuple)):
        return [open_argument(v) for v in value]
    return value


def close_result(value: Any) -> Any:
    """A rule's result as callers take it: masked tensors in place of records."""
    if isinstance(value, Dense):
        return closed(value)
    if isinstance(value, (list, tuple)):
        return type(value)(close_result(v) for v in value)
    return value


def run_rule(run: Run, args: Any, kwargs: Any) -> Any:
    """Open, run, close."""
    if kwargs:
        kwargs = {k: open_argument(v) for k, v in kwargs.items()}
    return close_result(run(*[open_argument(a) for a in args], **kwargs))


# ------------------------------------------------------------------------------------------------ 2. rules


def rule_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """A kernel that runs the rule, opened and closed differentiably."""
    run = rule.bind(op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        return run_rule(run, args, kwargs)

    return kernel


def elementwise_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """The rule's kernel with a short way for the commonest calls: one or two operands, and no derivative asked for."""
    general = rule_kernel(op, rule)
    traps = rule.traits.get("traps", False)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and type(args[0]) is MaskedTensor and not in_forward_mode():
            x = args[0]
            quiet = not torch.is_grad_enabled()
            if len(args) == 1:
                if quiet or not x.requires_grad:
                    return wrap(op(x._data), x._validity if x._family is None else lent_validity(x))
            elif len(args) == 2 and not traps:
                y = args[1]
                if type(y) is MaskedTensor:
                    if (
                        quiet or not (x.requires_grad or y.requires_grad or under_transform() or being_traced(x._data))
                    ) and x.shape == y.shape:
                        a, b = lent_validity(x), lent_validity(y)
                        return wrap(op(x._data, y._data), a if a is b else intersect(a, b))
                elif not isinstance(y, Tensor) and (quiet or not x.requires_grad):
                    return wrap(op(x._data, y), lent_validity(x))
        return general(keyset, *args, **kwargs)

    return kernel


# ------------------------------------------------------------------------------------------------ 1. views


def view_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """torch's own view node, so that `_base`, version counters and in-place under autograd are torch's own."""
    run = rule.bind(op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        base = args[0]
        if not isinstance(base, MaskedTensor):
            return redispatch(op, keyset, args, kwargs)
        if under_transform():
            return run_rule(run, args, kwargs)
        view = redispatch(op, keyset, args, kwargs)
        first = view[0] if isinstance(view, (list, tuple)) and view else view
        if isinstance(first, Tensor) and first.requires_grad and first.grad_fn is not None:
            remember_mask(first.grad_fn, lent_validity(base))
        return view

    return kernel


def remember_mask(node: Any, validity: Tensor | None) -> None:
    """Let the gradient that a view's node hands to its base have the mask of the base."""
    if validity is None:
        return

    def remask(gradients: Any, _: Any) -> Any:
        return tuple(None if g is None else masked_gradient(g, validity) for g in gradients)

    node.register_hook(remask)


def view_below(op: OpOverload, run: Run, args: Any, kwargs: Any) -> Any:
    """The view itself: of data and validity both, in one family with its base."""
    base = args[0]
    if being_traced(base._data):
        return _join(base, run(Dense(base._data, base._validity), *args[1:], **kwargs))
    with tracking_views_and_versions():
        return _join(base, run(Dense(base._data, base._validity), *args[1:], **kwargs))


def _join(base: MaskedTensor, result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_join(base, r) for r in result)
    view = wrap(result.data, fitted(result))
    if result.data.dtype is base.dtype:
        make_view_family(base, view)
    return view


# ------------------------------------------------------------------------- 3. in-place and out= forms, written back


def inplace_kernel(op: OpOverload, compute: Callable[..., Any]) -> Kernel:
    """`compute` is the functional form; its result is assigned to a masked self and updates a plain one."""

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        target = args[0]
        result = compute(*args, **kwargs)
        check_fits(op, target, result)
        if not isinstance(target, MaskedTensor):
            return update(target, result)
        if under_transform():
            assign_below(target, result)
            return target
        if op is aten.copy_.default:
            redispatch(op, keyset, (target, result), {})
        else:
            aten.copy_.default.redispatch(_without_pre_dispatch(keyset), target, result)
        return target

    return kernel


def _without_pre_dispatch(keyset: DispatchKeySet) -> DispatchKeySet:
    from masked_dispatch.interception import _PRE_DISPATCH_BITS

    return DispatchKeySet.from_raw_repr(keyset.raw_repr() & ~_PRE_DISPATCH_BITS)


def check_fits(op: OpOverload, target: Tensor, result: Tensor) -> None:
    """An in-place form must keep shape and dtype; torch's own words where it does not."""
    if result.shape != target.shape:
        raise RuntimeError(
            f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(result.shape)} (in {op})"
        )
    if not torch.can_cast(result.dtype, target.dtype) and op is not aten.copy_.default:
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {target.dtype} (in {op})")


def update(target: Tensor, result: Tensor) -> Tensor:
    """A plain tensor takes the valid values of `result` and keeps its own elsewhere."""
    if isinstance(result, MaskedTensor):
        record = opened(result)
        result = record.data
        if record.validity is not None:
            result = fill_where_invalid(result.to(target.dtype), record.validity, target)
    return target.copy_(result)


def assign_below(target: MaskedTensor, source: Tensor) -> None:
    """Write values and validity, below autograd."""
    if isinstance(source, MaskedTensor):
        target._data.copy_(source._data)
        write_validity(target, lent_validity(source))
    else:
        target._data.copy_(source)
        write_validity(target, None)


def out_kernel(op: OpOverload, compute: Callable[..., Any], names: tuple[str, ...]) -> Kernel:
    """`compute` is the functional form; its results are written to the tensors given as out=."""

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        targets = [kwargs.pop(name) for name in names]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*targets, *args) if isinstance(t, Tensor)):
            raise RuntimeError(
                f"{op._schema.name.removeprefix('aten::')}(): functions with out=... arguments don't support automatic "
                "differentiation, but one of the arguments requires grad."
            )
        results = compute(*args, **kwargs)
        for target, result in zip(targets, results if len(names) > 1 else [results], strict=True):
            if target.shape != result.shape and target.numel() == 0:
                target.resize_(result.shape)
            check_fits(op, target, result)
            target.copy_(result)
        return targets[0] if len(names) == 1 else tuple(targets)

    return kernel


def metadata_kernel(op: OpOverload) -> Kernel:
    """In-place forms that change shape or strides only (transpose_, squeeze_ …): data, validity and wrapper alike."""

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return redispatch(op, keyset, args, kwargs)

    return kernel


def change_metadata_below(op: OpOverload, args: Any, kwargs: Any) -> MaskedTensor:
    """transpose_ and its like, applied to the data, the expanded validity and the wrapper."""
    tensor: MaskedTensor = args[0]
    validity = Dense(tensor._data, tensor._validity).full_validity
    data = tensor._data.alias() if hasattr(tensor._data, "alias") else tensor._data.detach()
    data = getattr(aten, op._schema.name.partition("::")[2].removesuffix("_"))(data, *args[1:], **kwargs)
    if validity is not None:
        validity = getattr(aten, op._schema.name.partition("::")[2].removesuffix("_"))(validity, *args[1:], **kwargs)
    tensor._data, tensor._validity = data, validity
    with metadata_only():
        op(*args, **kwargs)
    return tensor


# ------------------------------------------------------------------------------------------------ 4. lists


def foreach_kernel(op: OpOverload) -> Kernel:
    """The single-tensor form on each element, in lists that may mix plain and masked tensors."""
    single = single_form(op)
    assert single is not None
    name = op._schema.name.partition("::_foreach_")[2].removesuffix("_")
    arguments = [a.name for a in op._schema.arguments]
    listed = {a.name for a in op._schema.arguments if str(a.type).startswith("List[")}

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        given = dict(zip(arguments, args, strict=False)) | kwargs
        results = []
        for i in range(len(args[0])):
            one = {k: v[i] if k in listed else v for k, v in given.items()}
            results.append(_call_single(single, name, one))
        return None if op._schema.is_mutable else results

    return kernel


def _call_single(single: Any, name: str, given: dict[str, Any]) -> Any:
    """Call with the single form's own names: addcmul's scalars become value=, the rest goes by position."""
    values = dict(given)
    keywords = {}
    if name in ("addcmul", "addcdiv"):
        for key in ("value", "scalars"):
            if key in values:
                keywords["value"] = values.pop(key)
    if name in ("add", "sub") and "alpha" in values:
        keywords["alpha"] = values.pop("alpha")
    return single(*values.values(), **keywords)


# --------------------------------------------------------------------------------------------- 5. decompositions


def composite_kernel(op: OpOverload) -> Kernel:
    """torch's own decomposition, above autograd and functorch, so that its pieces arrive here again."""

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        return op.decompose(*args, **kwargs)

    return kernel


# ----------------------------------------------------------------------------------------------- below autograd


def below_autograd(cls: type, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`__torch_dispatch__`: views and writes that came down through autograd, and whatever has no kernel above it."""
    kwargs = kwargs or {}
    if op is aten.copy_.default and isinstance(args[0], MaskedTensor):
        with tracking_views_and_versions():
            assign_below(args[0], args[1])
        return args[0]
    meaning = resolve(op)
    if is_view(op) and meaning.rule is not None and isinstance(args[0], MaskedTensor):
        return view_below(op, meaning.rule.bind(op), args, kwargs)
    if changes_metadata(op) and isinstance(args[0], MaskedTensor):
        return change_metadata_below(op, args, kwargs)
    if meaning.kind == "missing":
        raise MaskedSemanticsError(no_rule(op, args, kwargs))
    if torch.is_grad_enabled() and _any_requires_grad([*args, *kwargs.values()]):
        raise MaskedSemanticsError(
            f"{op} reached masked tensors below autograd, which has recorded the derivative of the plain operator for it; "
            "that would be wrong under a mask. Please report how it was called."
        )
    if meaning.rule is not None and meaning.base is op:
        return run_rule(meaning.rule.bind(op), args, kwargs)
    return op(*args, **kwargs) if meaning.kind != "decomposes" else op.decompose(*args, **kwargs)


def _any_requires_grad(values: Any) -> bool:
    for v in values:
        if isinstance(v, Tensor) and v.requires_grad:
            return True
        if isinstance(v, (list, tuple)) and _any_requires_grad(v):
            return True
    return False


# ---------------------------------------------------------------------------------------------------- kernels


class Kernels:
    """One kernel for each overload with a meaning, registered once and exchanged when its rule changes."""

    def __init__(self) -> None:
        self._libraries: dict[str, Library] = {}
        self._current: dict[OpOverload, Kernel] = {}

    def install(self, op: OpOverload) -> None:
        """Make sure that calls of `op` arrive at the kernel of its present meaning."""
        kernel = self._make(op)
        known = op in self._current
        self._current[op] = kernel
        if known:
            return
        current = self._current

        def enter(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            return current[op](keyset, *args, **kwargs)

        namespace = op.namespace
        if namespace not in self._libraries:
            self._libraries[namespace] = Library(namespace, "IMPL")
        register_kernel(self._libraries[namespace], op, enter)

    def _make(self, op: OpOverload) -> Kernel:
        meaning = resolve(op)
        if changes_metadata(op):
            return metadata_kernel(op)
        if meaning.kind == "rule":
            assert meaning.rule is not None
            if is_view(op):
                return view_kernel(op, meaning.rule)
            if meaning.rule.category is ELEMENTWISE and meaning.rule.takes_op:
                return elementwise_kernel(op, meaning.rule)
            return rule_kernel(op, meaning.rule)
        if meaning.kind == "written back":
            base = meaning.base
            assert base is not None
            if is_inplace(op):
                return inplace_kernel(op, base)
            return out_kernel(op, base, tuple(a.name for a in op._schema.arguments if a.alias_info is not None))
        if meaning.kind == "each of a list":
            return foreach_kernel(op)
        if meaning.kind == "decomposes":
            return composite_kernel(op)
        return self._no_rule(op)

    def _no_rule(self, op: OpOverload) -> Kernel:
        def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            if not has_masked(args) and not has_masked(kwargs.values()):
                return redispatch(op, keyset, args, kwargs)
            raise MaskedSemanticsError(no_rule(op, args, kwargs))

        return kernel

    def follow_registry(self) -> None:
        """Install kernels for every rule there is and will be, its derived forms, and every composite operator."""
        for op in composite_overloads():
            self.install(op)
        variants = _variants_by_functional_form()
        for op in _foreach_overloads():
            self.install(op)

        def changed(op: OpOverload) -> None:
            self.install(op)
            for variant in variants.get(op, ()):
                self.install(variant)

        registry.listen(changed)


def _aten_overloads() -> list[OpOverload]:
    overloads = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet, _, overload = name[len("aten::") :].partition(".")
            op = getattr(getattr(aten, packet, None), overload or "default", None)
            if op is not None:
                overloads.append(op)
    return overloads


def _variants_by_functional_form() -> dict[OpOverload, list[OpOverload]]:
    variants: dict[OpOverload, list[OpOverload]] = {}
    for op in _aten_overloads():
        base = functional_form(op) if op._schema.is_mutable else None
        if base is not None and not is_foreach(op):
            variants.setdefault(base, []).append(op)
    return variants


def _foreach_overloads() -> list[OpOverload]:
    return [op for op in _aten_overloads() if is_foreach(op) and not is_out(op) and single_form(op) is not None]


kernels = Kernels()


def install() -> None:
    """Let masked tensors be dispatched: called once, when the package is imported."""
    set_transform_probe(under_transform)
    MaskedTensor.__torch_dispatch__ = classmethod(below_autograd)  # type: ignore[assignment,method-assign]
    kernels.follow_registry()
