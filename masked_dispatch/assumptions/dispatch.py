"""What masked_dispatch/torch_internals.py assumes of torch, by the numbers in its docstring.

Most checks use torch alone and a bare wrapper. So if one fails after an upgrade of torch, torch has changed there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.library import Library
from torch.testing import _comparison
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from masked_dispatch.api.construct import masked_tensor
from masked_dispatch.assumptions.checks import (
    NAMESPACE,
    assumed,
    assumption,
    expect,
    expect_equal,
    raises,
    replaced,
    wrapper_class,
)
from masked_dispatch.autograd import dense
from masked_dispatch.tensor.file_format import VERSION, load
from masked_dispatch.torch_internals import (
    NumberFormatter,
    default_collate_fn_map,
    default_device_type,
    exchange_function,
    in_forward_mode,
    plainly,
    print_options,
    python_function_of,
    register_kernel,
    serve_higher_order_operators,
    tracking_views_and_versions,
    with_facts,
)

KEY = DispatchKeySet(DispatchKey.PreDispatch)
functorch: Any = torch._C._functorch


def carrier(seen: list[Any]) -> Any:
    """A wrapper that carries the key and nothing else, and notes what is called below the kernels."""
    return wrapper_class(lambda func: seen.append(("below", func)), _extra_dispatch_keys=KEY)


def without_key(keyset: DispatchKeySet) -> DispatchKeySet:
    return DispatchKeySet.from_raw_repr(keyset.raw_repr() & ~KEY.raw_repr())


def library() -> contextlib.AbstractContextManager[Library]:
    """Where a check defines operators, which are gone afterwards."""
    return torch.library._scoped_library(NAMESPACE, "FRAGMENT")


@contextlib.contextmanager
def composite_operator(carriers: type, seen: list[Any]) -> Iterator[Any]:
    """An operator that is composed of others and has a kernel at PreDispatch; both note what they meet."""

    def composed(x: Tensor) -> Tensor:
        seen.append(("decomposed", type(x)))
        return torch.sin(x)

    def kernel(keyset: DispatchKeySet, x: Any) -> Tensor:
        seen.append(("kernel", type(x), functorch.maybe_current_level()))
        if isinstance(x, carriers):
            held: Tensor = x.held  # type: ignore[attr-defined]
            return held.cos()
        return operator.default.redispatch(without_key(keyset), x)

    with library() as made:
        made.define("composite(Tensor x) -> Tensor")
        made.impl("composite", composed, "CompositeImplicitAutograd")
        made.impl("composite", composed, "FuncTorchBatched")  # or vmap warns that it knows no faster way
        made.impl("composite", kernel, "PreDispatch", with_keyset=True)
        operator: Any = getattr(torch.ops, NAMESPACE).composite
        yield operator


@assumption(1, "a kernel at PreDispatch is called above functorch, autocast, autograd and decompositions", silent=True)
def kernels_at_predispatch_come_before_everything_else() -> None:
    seen: list[Any] = []
    carriers = carrier(seen)
    with composite_operator(carriers, seen) as composite:
        x = carriers.of(torch.zeros(2), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            expect_equal(composite(x).tolist(), [1, 1])
        torch.func.vmap(lambda r: (composite(x), r)[1])(torch.ones(3))
        # As in torch.func.grad, which loads the compiler.
        functorch._grad_increment_nesting()
        try:
            composite(x)
        finally:
            functorch._grad_decrement_nesting()
        expect_equal(seen, [("kernel", carriers, None), ("kernel", carriers, 1), ("kernel", carriers, 1)])


@assumption(2, "PreDispatch falls through for tensors that do not carry it", silent=True)
def plain_tensors_fall_through() -> None:
    seen: list[Any] = []
    with composite_operator(carrier(seen), seen) as composite:
        x = torch.ones(2, requires_grad=True)
        composite(x).sum().backward()
        torch.func.vmap(composite)(torch.ones(2, 2))
        expect_equal({entry[0] for entry in seen}, {"decomposed"})


@assumption(3, "a call redispatched with the received keyset, PreDispatch removed, goes to autograd")
def a_kernel_may_hand_on_with_the_key_removed() -> None:
    seen: list[Any] = []
    carriers = carrier(seen)

    def hand_on(keyset: DispatchKeySet, x: Tensor) -> Tensor:
        seen.append(("kernel", type(x)))
        return operator.redispatch(without_key(keyset), x)

    with library() as made:
        made.define("handed_on(Tensor x) -> Tensor")
        made.impl("handed_on", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_autograd(f"{NAMESPACE}::handed_on", lambda ctx, g: g * 2, lib=made)
        made.impl("handed_on", hand_on, "PreDispatch", with_keyset=True)
        operator: Any = getattr(torch.ops, NAMESPACE).handed_on.default
        y = operator(carriers.of(torch.ones(2), requires_grad=True))
        expect_equal(seen[0], ("kernel", carriers))
        expect_equal(seen[1], ("below", operator))
        expect(y.grad_fn is not None)
        expect(isinstance(y, carriers), type(y))


@assumption(4, "a hook on an autograd node replaces what it hands on", silent=True)
def hooks_on_nodes_replace_gradients() -> None:
    x = torch.ones(3, requires_grad=True)
    y: Any = x.view(3)
    y.grad_fn.register_hook(lambda gradients, _: tuple(g * 10 for g in gradients))
    y.sum().backward()
    gradient: Any = x.grad
    expect_equal(gradient.tolist(), [10.0] * 3)


@assumption(5, "ADInplaceOrView, let in again in __torch_dispatch__, makes views and bumps versions")
def views_and_versions_are_tracked_again_below_autograd() -> None:
    views: list[tuple[bool, int]] = []

    def look() -> None:
        plain = torch.ones(3)
        views.append((plain[0]._is_view(), (plain.add_(1), plain._version)[1]))

    class Looking(Tensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            look()
            with tracking_views_and_versions():
                look()
            return torch.ones(3)

    Tensor._make_wrapper_subclass(Looking, (3,)).exp()
    expect_equal(views, [(False, 0), (True, 1)])


@assumption(6)
def functorch_leaves_traces_by_which_it_is_known() -> None:
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    front = DispatchKey.FuncTorchDynamicLayerFrontMode
    hooks: Any = torch._C._autograd
    state: dict[str, Any] = {}

    def look() -> bool:
        state["level"] = functorch.maybe_current_level()
        state["front excluded"] = excluded(front)
        state["hooks"] = hooks._saved_tensors_hooks_is_enabled()
        state["message"] = hooks._saved_tensors_hooks_get_disabled_error_message()
        return False

    handed = masked_tensor(torch.ones(2, 3))
    with replaced(dense, "hidden_in_transform", look):
        with assumed("vmap runs what it wraps at its own level, with its front key excluded"):
            torch.func.vmap(torch.sum)(handed)
            expect_equal(state["level"], 1)
            expect(state["front excluded"])
        with assumed("grad runs what it wraps outside of its level, with saved-tensor hooks disabled in its name"):
            torch.func.grad(lambda x: x.sum())(handed)
            expect_equal(state["level"], None)
            expect(not state["hooks"])
            expect(state["message"].startswith("torch.func"), state["message"])
    with assumed("neither is so for what a transform meets at its own level"):
        torch.func.vmap(lambda r: (state.update(front=excluded(front)), r)[1])(torch.ones(2))
        expect(not state["front"])
        expect(hooks._saved_tensors_hooks_is_enabled())
    with assumed("what has outlived its level has a level above any, or is known as dead"):
        kept: list[Tensor] = []

        def keep(row: Tensor) -> Tensor:
            kept.append(row)
            return row.sum()

        torch.func.vmap(keep)(torch.ones(2))
        torch.func.grad(keep)(torch.ones(2))
        levels = [functorch.maybe_get_level(t) for t in kept]
        expect_equal(levels, [1, -2])
        expect_equal(functorch.maybe_get_level(torch.ones(2)), -1)


@assumption(7)
def subclasses_are_made_by_way_of_detach() -> None:
    class Subclass(Tensor):
        pass

    aten = torch.ops.aten
    for op in (aten.detach.default, aten.alias.default):
        expect(not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "PreDispatch"), op)
    with assumed(
        "a subclass can be made of a plain tensor while PreDispatch is in force, as it is where export traces"
    ):
        x = torch.ones(2)
        with torch._C._IncludeDispatchKeyGuard(DispatchKey.PreDispatch):
            types = type(Tensor._make_subclass(Subclass, x)), type(x.as_subclass(Subclass))
        expect_equal(types, (Subclass, Subclass))


@assumption(10, "_functionalize_unsafe_set gives a wrapper the storage of another")
def aliasing_is_noticed_by_storage() -> None:
    wrap = carrier([]).of
    a, b = wrap(torch.ones(2)), wrap(torch.ones(2))
    expect(a.untyped_storage()._cdata != b.untyped_storage()._cdata)
    torch._functionalize_unsafe_set(b, a)
    expect_equal(a.untyped_storage()._cdata, b.untyped_storage()._cdata)


@assumption(12, "higher-order operators keep kernels by key, and compute theirs from non_fallthrough_keys")
def higher_order_operators_take_a_kernel_at_predispatch() -> None:
    x = carrier([]).of(torch.ones(2))
    serve_higher_order_operators()  # those that have come since the import too
    compute: Any = torch._ops._compute_keyset
    for operator in torch._ops._higher_order_ops.values():
        expect(isinstance(operator.py_kernels, dict), operator)
        expect(DispatchKey.PreDispatch in operator.py_kernels, operator)
        keys = compute((x,), {}, operator.non_fallthrough_keys)
        expect_equal(keys.highestPriorityTypeId(), DispatchKey.PreDispatch)
        keys = compute((x,), {}, operator.non_fallthrough_keys.remove(DispatchKey.PreDispatch))
        expect(keys.highestPriorityTypeId() != DispatchKey.PreDispatch, operator)


@assumption(14, "a wrapper's storage raises once _set_throw_on_mutable_data_ptr has been called")
def a_storage_can_be_told_to_raise() -> None:
    x = carrier([]).of(torch.ones(2))
    torch._C._set_throw_on_mutable_data_ptr(x)
    with raises(RuntimeError):
        Tensor.data_ptr(x)


@assumption(18, "default_collate looks up how to collate by type, a subclass of Tensor under Tensor")
def collation_is_looked_up_by_type() -> None:
    class Derived(Tensor):
        pass

    asked: list[type] = []

    def collate(batch: Any, *, collate_fn_map: Any) -> None:
        asked.append(type(batch[0]))

    with mock.patch.dict(default_collate_fn_map, {Tensor: collate}):
        default_collate([torch.ones(1).as_subclass(Derived)])
        default_collate([torch.ones(1)])
        expect_equal(asked, [Derived, Tensor])


@assumption(21)
def printing_has_options_a_formatter_and_line_breaks() -> None:
    values = torch.tensor([1.5, -22.0])
    with assumed("_tensor_str formats numbers by the tensor they are in, and breaks lines before facts"):
        formatter = NumberFormatter(values)
        expect_equal([formatter.format(v.item()).strip() for v in values], ["1.5000", "-22.0000"])
        expect_equal(len(formatter.format(1.5)), formatter.width())
        with torch._tensor_str.printoptions(threshold=4, edgeitems=1, linewidth=20):
            options = print_options()
            expect_equal((options.threshold, options.edgeitems, options.linewidth), (4, 1, 20))
            text = with_facts("t([1, 2]", ["a=1", "long=123456"], 2, False)
            expect_equal(text, "t([1, 2], a=1,\n  long=123456)")
        expect_equal(default_device_type(), "cpu")
    with assumed("modes are disabled while torch prints"), FakeTensorMode():
        inside = type(torch.ones(1))
        expect(inside is FakeTensor, inside)
        with plainly():
            inside = type(torch.ones(1))
        expect(inside is Tensor, inside)


@assumption(22, "forward_ad._current_level is negative outside of forward mode")
def forward_mode_has_a_level() -> None:
    expect(not in_forward_mode())
    with torch.autograd.forward_ad.dual_level():
        expect(in_forward_mode())
    expect(not in_forward_mode())


@assumption(26, "assert_close compares tensors with TensorLikePair, by its method compare")
def assert_close_compares_tensors_with_one_class() -> None:
    pair: Any = _comparison.TensorLikePair
    source = inspect.getsource(_comparison.assert_close)
    expect(re.search(r"pair_types=\([^)]*\bTensorLikePair\b", source))
    expect_equal(inspect.unwrap(pair.compare).__module__, _comparison.__name__)
    expect(callable(pair.compare))
    expect(callable(pair._fail))


def doubled(x: Tensor) -> Tensor:
    return x * 2


@assumption(30, "torch.jit makes ScriptFunctions, which know what they were compiled from, and ScriptMethods")
def torchscript_is_called_by_two_types() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # which it is since torch 2.14
        scripted: Any = torch.jit.script(doubled)
        expect(isinstance(scripted, torch._C.ScriptFunction), type(scripted))
        expect(python_function_of(scripted) is doubled)
        expect(python_function_of(torch.jit.trace(doubled, torch.ones(2))) is doubled)
        method: Any = torch.jit.script(torch.nn.ReLU()).forward
        expect(isinstance(method, torch._C.ScriptMethod), type(method))
        expect_equal(method.name, "forward")
        expect(python_function_of(method) is None)


@assumption(33)
def what_traces_replace() -> None:
    callers: list[str] = []

    def adding(number: int) -> Callable[..., Tensor]:
        def kernel(keyset: Any, x: Tensor) -> Tensor:
            callers.append(sys._getframe(1).f_code.co_filename)
            return x + number

        return kernel

    with (
        assumed("a kernel may be a partial, whose function is called from here and can be exchanged"),
        library() as made,
    ):
        made.define("traced(Tensor x) -> Tensor")
        op: Any = getattr(torch.ops, NAMESPACE).traced.default
        x = masked_tensor(torch.ones(2), None)
        place = functools.partial(adding(1))
        register_kernel(made, op.name(), place)
        expect_equal(op(x).sum().item(), 4)
        exchange_function(place, adding(2))
        expect_equal(op(x).sum().item(), 6)
        expect_equal(callers, [torch._ops.__file__] * 2)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.metadata["forward"] = True
            return x * 2

    with assumed("the engine looks backward up when it calls it, and passes the node, whose metadata it keeps"):
        metadata: list[Any] = []
        y = Doubled.apply(torch.ones(2, requires_grad=True))
        backward: Any = staticmethod(lambda ctx, grad: metadata.append(dict(ctx.metadata)))
        Doubled.backward = backward  # type: ignore[method-assign]
        y.sum().backward()
        expect_equal(metadata, [{"forward": True}])


@assumption(43, "_AutoDispatchBelowAutograd lets a leaf that requires grad be written to")
def below_autograd_a_leaf_may_be_written_to() -> None:
    class Again(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    for mode in (contextlib.nullcontext(), Again()):
        leaf = torch.ones(2, requires_grad=True)
        with raises(RuntimeError, match="a leaf Variable that requires grad"):
            leaf.copy_(torch.zeros(2))
        with mode, torch._C._AutoDispatchBelowAutograd():
            leaf.copy_(torch.zeros(2))
        expect((leaf.is_leaf, leaf.requires_grad) == (True, True), leaf)
        expect_equal(leaf._version, 1)
        expect_equal(leaf.tolist(), [0, 0])


@assumption(
    45, "x[i] = v writes a tensor v with index_put_, copy_ or fill_, as the nodes of autograd show", silent=True
)
def a_tensor_without_dimensions_is_written_by_assignments() -> None:
    written: list[str] = []
    at_column = torch.tensor([1])
    for index in (torch.tensor([True, False]), torch.tensor([0]), (slice(None), at_column), (at_column, 1), 0):
        x = torch.ones(2, 2, requires_grad=True).clone()
        x[index] = torch.tensor(0.0)
        node = x.grad_fn
        written.append(type(node).__name__ if node is not None else "")
    expect(set(written) <= {"IndexPutBackward0", "CopySlices"}, written)


@assumption(48, "an object of a file in the older format is written below _legacy_save, and read below _legacy_load")
def older_files_are_written_and_read_by_functions_of_python() -> None:
    content = io.BytesIO()
    with raises(ValueError, match="older file format"):
        torch.save(masked_tensor(torch.ones(2)), content, _use_new_zipfile_serialization=False)
    content = io.BytesIO()
    torch.save(_Loaded(), content, _use_new_zipfile_serialization=False)
    for weights_only in (False, True):
        content.seek(0)
        with raises(ValueError, match="older file format"):
            torch.load(content, weights_only=weights_only)


class _Loaded:
    """What is saved as a masked tensor, by itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return load, (VERSION, "dense")
