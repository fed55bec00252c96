"""What masked_dispatch/torch_internals.py assumes of torch, one test for each number in its docstring.

Most use torch alone and a bare subclass: where one fails after torch has been upgraded, that is what has changed.
"""

from __future__ import annotations

import contextvars
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.library import Library
from torch.utils.data import default_collate

import masked_dispatch as md
from masked_dispatch.torch_internals import (
    NumberFormatter,
    constant_in_graphs,
    default_collate_fn_map,
    fused_multiply_add,
    guard_on,
    in_forward_mode,
    mark_dynamic,
    print_options,
    summarized_data,
    while_compiling,
)

KEY = DispatchKeySet(DispatchKey.PreDispatch)


@contextmanager
def assumed(what: str) -> Iterator[None]:
    """Say which torch it is that no longer does `what`."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"torch {torch.__version__} no longer holds that {what}: {error}") from error


class Carrier(Tensor):
    """A wrapper that carries the key and nothing else."""

    inner: Tensor

    @staticmethod
    def of(inner: Tensor, requires_grad: bool = False) -> Carrier:
        wrapper: Carrier = Tensor._make_wrapper_subclass(
            Carrier, inner.shape, dtype=inner.dtype, requires_grad=requires_grad, _extra_dispatch_keys=KEY
        )
        wrapper.inner = inner
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        met.append(("below", func))
        raw = torch.utils._pytree.tree_map_only(Carrier, lambda t: t.inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, Carrier.of, func(*raw[0], **raw[1]))


def watched(told: Callable[[Any], None]) -> type[Carrier]:
    """A wrapper without the key, which tells of every operator that is called on it."""

    class Watched(Carrier):
        @staticmethod
        def of(inner: Tensor, requires_grad: bool = False) -> Watched:
            wrapper: Watched = Tensor._make_wrapper_subclass(Watched, inner.shape, requires_grad=requires_grad)
            wrapper.inner = inner
            return wrapper

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            told(func)
            raw = torch.utils._pytree.tree_map_only(Watched, lambda t: t.inner, (args, kwargs or {}))
            return torch.utils._pytree.tree_map_only(Tensor, Watched.of, func(*raw[0], **raw[1]))

    return Watched


def in_the_engine() -> bool:
    """Asked in what `watched` tells: whether the autograd engine itself called the operator."""
    caller = sys._getframe(3)  # above this function, what was told and __torch_dispatch__
    return caller.f_code is torch.autograd.graph._engine_run_backward.__code__


library = Library("assumptions", "DEF")
met: list[Any] = []


def _composite(x: Tensor) -> Tensor:
    met.append(("decomposed", type(x)))
    return torch.sin(x)


def _kernel(keyset: DispatchKeySet, x: Tensor) -> Tensor:
    met.append(("kernel", type(x), torch._C._functorch.maybe_current_level()))
    if isinstance(x, Carrier):
        return x.inner.cos()
    rest = DispatchKeySet.from_raw_repr(keyset.raw_repr() & ~KEY.raw_repr())
    result: Tensor = torch.ops.assumptions.composite.default.redispatch(rest, x)
    return result


library.define("composite(Tensor x) -> Tensor")
library.impl("composite", _composite, "CompositeImplicitAutograd")
library.impl("composite", _kernel, "PreDispatch", with_keyset=True)
composite = torch.ops.assumptions.composite


@pytest.fixture(autouse=True)
def nothing_met() -> None:
    met.clear()


def test_1_kernels_at_predispatch_come_before_everything_else() -> None:
    with assumed("a kernel at PreDispatch is called above functorch, autocast, autograd and decompositions"):
        x = Carrier.of(torch.zeros(2), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(composite(x), torch.ones(2))
        torch.func.vmap(lambda r: (composite(x), r)[1])(torch.ones(3))
        torch.func.grad(lambda r: (composite(x), r.sum())[1])(torch.ones(3))
        assert met == [("kernel", Carrier, None), ("kernel", Carrier, 1), ("kernel", Carrier, 1)]


def test_2_plain_tensors_fall_through() -> None:
    with assumed("PreDispatch falls through for tensors that do not carry it"):
        x = torch.ones(2, requires_grad=True)
        composite(x).sum().backward()
        torch.func.vmap(composite)(torch.ones(2, 2))
        assert {entry[0] for entry in met} == {"decomposed"}


def test_3_a_kernel_may_hand_on_with_the_key_removed() -> None:
    def hand_on(keyset: DispatchKeySet, x: Tensor) -> Tensor:
        met.append(("kernel", type(x)))
        rest = DispatchKeySet.from_raw_repr(keyset.raw_repr() & ~KEY.raw_repr())
        result: Tensor = torch.ops.assumptions.mine.default.redispatch(rest, x)
        return result

    library.define("mine(Tensor x) -> Tensor")
    library.impl("mine", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_autograd("assumptions::mine", lambda ctx, g: g * 2, lib=library)
    library.impl("mine", hand_on, "PreDispatch", with_keyset=True)
    with assumed("a call redispatched with the received keyset, PreDispatch removed, goes to autograd"):
        x = Carrier.of(torch.ones(2), requires_grad=True)
        y = torch.ops.assumptions.mine(x)
        assert met[0] == ("kernel", Carrier)
        assert met[1] == ("below", torch.ops.assumptions.mine.default)
        assert y.grad_fn is not None
        assert isinstance(y, Carrier)


def test_4_hooks_on_nodes_replace_gradients() -> None:
    with assumed("a hook on an autograd node replaces what it hands on"):
        x = torch.ones(3, requires_grad=True)
        y = x.view(3)
        y.grad_fn.register_hook(lambda gradients, _: tuple(g * 10 for g in gradients))
        y.sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 10.0))


def test_5_views_and_versions_are_tracked_again_below_autograd() -> None:
    from masked_dispatch.torch_internals import tracking_views_and_versions

    found = []

    class Looking(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            plain = torch.ones(3)
            found.append((plain[0]._is_view(), (plain.add_(1), plain._version)[1]))
            with tracking_views_and_versions():
                plain = torch.ones(3)
                found.append((plain[0]._is_view(), (plain.add_(1), plain._version)[1]))
            return torch.ones(3)

    with assumed("ADInplaceOrView, let in again in __torch_dispatch__, makes views and bumps versions"):
        Tensor._make_wrapper_subclass(Looking, (3,)).exp()
        assert found == [(False, 0), (True, 1)]


def test_6_functorch_leaves_traces_by_which_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    front = DispatchKey.FuncTorchDynamicLayerFrontMode
    hooks = torch._C._autograd
    found: dict[str, Any] = {}

    def look() -> bool:
        found["level"] = torch._C._functorch.maybe_current_level()
        found["front excluded"] = excluded(front)
        found["hooks"] = hooks._saved_tensors_hooks_is_enabled()
        found["message"] = hooks._saved_tensors_hooks_get_disabled_error_message()
        return False

    monkeypatch.setattr("masked_dispatch.autograd.dense.hidden_in_transform", look)
    handed = md.masked_tensor(torch.ones(2, 3))
    with assumed("vmap runs what it wraps at its own level, with its front key excluded"):
        torch.func.vmap(torch.sum)(handed)
        assert found["level"] == 1
        assert found["front excluded"]
    with assumed("grad runs what it wraps outside of its level, with saved-tensor hooks disabled in its name"):
        torch.func.grad(lambda x: x.sum())(handed)
        assert found["level"] is None
        assert not found["hooks"]
        assert found["message"].startswith("torch.func")
    monkeypatch.undo()
    with assumed("neither is so for what a transform meets at its own level"):
        torch.func.vmap(lambda r: (found.update(front=excluded(front)), r)[1])(torch.ones(2))
        assert not found["front"]
        assert hooks._saved_tensors_hooks_is_enabled()
    with assumed("what has outlived its level has a level above any, or is known as dead"):
        kept: list[Tensor] = []
        torch.func.vmap(lambda r: (kept.append(r), r)[1])(torch.ones(2))
        torch.func.grad(lambda r: (kept.append(r), r.sum())[1])(torch.ones(2))
        levels = [torch._C._functorch.maybe_get_level(t) for t in kept]
        assert levels == [1, -2]
        assert torch._C._functorch.maybe_get_level(torch.ones(2)) == -1


def test_7_subclasses_are_made_by_way_of_detach() -> None:
    class Subclass(Tensor):
        pass

    aten = torch.ops.aten
    for op in (aten.detach.default, aten.alias.default):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "PreDispatch"), op
    with assumed(
        "a subclass can be made of a plain tensor while PreDispatch is in force, as it is where export traces"
    ):
        x = torch.ones(2)
        with torch._C._IncludeDispatchKeyGuard(DispatchKey.PreDispatch):
            assert type(Tensor._make_subclass(Subclass, x)) is Subclass
            assert type(x.as_subclass(Subclass)) is Subclass


def test_8_code_may_be_kept_from_dynamo() -> None:
    from masked_dispatch.torch_internals import never_compiled

    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph.code)
        return graph

    def inner(x: Tensor) -> Tensor:
        return torch.sin(x)

    @never_compiled
    def middle(x: Tensor) -> Tensor:
        return inner(x)

    def outer(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return list(map(middle, [x]))[0]  # noqa: RUF015 - called from C, as a kernel is

    with assumed("a code object that is marked SKIP, and all that it calls, runs uncompiled"):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(middle, backend=backend)(torch.zeros(2)), torch.zeros(2))
        assert not [code for code in compiled if "sin" in code]


def test_9_guards_see_each_input_before_every_run() -> None:
    seen = []

    class Context:
        def __deepcopy__(self, memo: Any) -> Context:
            copy = Context()
            copy.original = self
            return copy

    class Guarded(Tensor):
        inner: Tensor

        @staticmethod
        def of(inner: Tensor) -> Guarded:
            wrapper: Guarded = Tensor._make_wrapper_subclass(Guarded, inner.shape, dtype=inner.dtype)
            wrapper.inner, wrapper.context = inner, Context()
            return wrapper

        def __tensor_flatten__(self) -> Any:
            return ["inner"], self.context

        @staticmethod
        def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Guarded:
            return Guarded.of(inner["inner"])

        @classmethod
        def __metadata_guard__(cls, expected: Any, actual: Any) -> bool:
            seen.append((expected.original, actual))
            return True

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*[a.inner if isinstance(a, Guarded) else a for a in args], **(kwargs or {}))
            return Guarded.of(result)

    with assumed("__metadata_guard__ is asked about every input, with a copy of the context that was compiled for"):
        torch._dynamo.reset()
        run = torch.compile(lambda x: x.sin(), backend="eager", fullgraph=True)
        first, second = Guarded.of(torch.ones(2)), Guarded.of(torch.ones(2))
        run(first)
        assert (first.context, first.context) in seen  # before its first run, too
        seen.clear()
        run(second)
        assert seen == [(first.context, second.context)]


def test_10_aliasing_is_noticed_by_storage() -> None:
    with assumed("_functionalize_unsafe_set gives a wrapper the storage of another"):
        a, b = Carrier.of(torch.ones(2)), Carrier.of(torch.ones(2))
        assert a.untyped_storage()._cdata != b.untyped_storage()._cdata
        torch._functionalize_unsafe_set(b, a)
        assert a.untyped_storage()._cdata == b.untyped_storage()._cdata
    # That AOTAutograd refuses such inputs where a graph writes to them:
    # test_a_view_and_its_base_as_inputs_of_a_region_that_writes_are_refused in test_compile.py.


def test_11_runtime_tangents_go_through_one_function() -> None:
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd
    from torch._functorch._aot_autograd.schemas import SubclassCreationMeta

    with assumed("AOTDispatchAutograd.process_runtime_tangent(x, meta, …) coerces runtime tangents"):
        parameters = list(inspect.signature(AOTDispatchAutograd.process_runtime_tangent).parameters)
        assert parameters[:2] == ["x", "meta"]
        assert "original_subclass_type" in SubclassCreationMeta.__dataclass_fields__


def test_12_higher_order_operators_take_a_kernel_at_predispatch() -> None:
    from masked_dispatch.torch_internals import serve_higher_order_operators

    with assumed("higher-order operators keep kernels by key, and compute theirs from non_fallthrough_keys"):
        x = Carrier.of(torch.ones(2))
        serve_higher_order_operators()  # those that have come since the import too
        for operator in torch._ops._higher_order_ops.values():
            assert isinstance(operator.py_kernels, dict)
            assert DispatchKey.PreDispatch in operator.py_kernels
            keys = torch._ops._compute_keyset((x,), {}, operator.non_fallthrough_keys)
            assert keys.highestPriorityTypeId() == DispatchKey.PreDispatch
            keys = torch._ops._compute_keyset((x,), {}, operator.non_fallthrough_keys.remove(DispatchKey.PreDispatch))
            assert keys.highestPriorityTypeId() != DispatchKey.PreDispatch


def test_13_make_fx_knows_which_tensors_it_follows() -> None:
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, make_fx

    constant = torch.ones(2)

    def function(x: Tensor) -> Tensor:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
        assert get_proxy_slot(x, mode.tracer, None) is not None
        assert get_proxy_slot(constant, mode.tracer, None) is None
        return x * constant

    with assumed("make_fx is the PROXY mode, and has a slot for each tensor that it follows"):
        make_fx(function)(torch.ones(2))
        assert torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None
        assert torch._C._len_torch_dispatch_stack() == 0


def test_14_a_storage_can_be_told_to_raise() -> None:
    with assumed("a wrapper's storage raises once _set_throw_on_mutable_data_ptr has been called"):
        x = Carrier.of(torch.ones(2))
        torch._C._set_throw_on_mutable_data_ptr(x)
        with pytest.raises(RuntimeError):
            Tensor.data_ptr(x)


def test_15_a_functional_tensor_holds_a_value_until_it_is_written_to() -> None:
    from functorch.compile import aot_function, nop

    from masked_dispatch.torch_internals import as_value

    calls, graphs = [], []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(type(x).__name__)
        y = x + 1
        before = as_value(y)
        y.mul_(2)
        return before, y

    def keep(graph: Any, _: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    with assumed("a FunctionalTensor's value stays when it is written to, and AOTAutograd runs before it records"):
        before, after = aot_function(function, fw_compiler=keep, bw_compiler=nop)(torch.ones(2))
        assert (before.tolist(), after.tolist()) == ([2, 2], [4, 4])
        assert graphs == [[torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor]]
        assert calls[:2] == ["FunctionalTensor"] * 2
        assert as_value(before).data_ptr() != before.data_ptr()


def test_16_the_engine_adds_by_itself() -> None:
    # Its thread for a device, in which no frame is below that: tests_on_reference_device.py.
    frames = []

    def told(func: Any) -> None:
        if torch._C._current_graph_task_id() != -1 and "add" in str(func):
            frames.append((func, in_the_engine()))

    wrap = watched(told).of
    add = torch.ops.aten.add.Tensor
    with assumed("the engine calls add itself, in _engine_run_backward's frame, and hooks in their own"):
        for create_graph in (False, True):
            x = wrap(torch.ones(2), True)
            y = x * 2
            torch.autograd.grad((y.exp() + y.sin()).sum(), x, create_graph=create_graph)
            assert frames == [(add, True)]
            frames.clear()
        y = wrap(torch.ones(2), True) * 2
        y.register_hook(lambda gradient: gradient + gradient)
        y.sum().backward()
        assert frames == [(add, False)]
        assert torch._C._current_graph_task_id() == -1


def test_17_the_node_that_keeps_a_gradient_knows_its_leaf() -> None:
    leaf = torch.ones(2, requires_grad=True)
    seen = []

    def told(func: Any) -> None:
        if func is torch.ops.aten.add_.Tensor:
            seen.append((in_the_engine(), torch._C._current_autograd_node().variable is leaf))

    with assumed("the engine writes into .grad by add_, in a node that has the leaf as its variable"):
        leaf.grad = watched(told).of(torch.zeros(2))
        (leaf * 2).sum().backward()
        assert seen == [(True, True)]
        assert getattr(torch._C._current_autograd_node(), "variable", None) is None


def test_18_collation_is_looked_up_by_type() -> None:
    class Derived(Tensor):
        pass

    asked: list[type] = []
    before = default_collate_fn_map[Tensor]
    default_collate_fn_map[Tensor] = lambda batch, *, collate_fn_map: asked.append(type(batch[0]))
    try:
        with assumed("default_collate looks up how to collate by type, a subclass of Tensor under Tensor"):
            default_collate([torch.ones(1).as_subclass(Derived)])
            default_collate([torch.ones(1)])
            assert asked == [Derived, Tensor]
    finally:
        default_collate_fn_map[Tensor] = before


def test_19_a_node_keeps_notes_for_when_it_is_evaluated() -> None:
    noted = []

    def told(func: Any) -> None:
        if func is torch.ops.aten.neg.default:
            noted.append(torch._C._current_autograd_node().metadata.get("note"))

    with assumed("the node that is evaluated can be asked for, and keeps what its metadata was given"):
        leaf = torch.ones(2, requires_grad=True)
        negative = -leaf
        negative.grad_fn.metadata["note"] = "recorded here"
        torch.autograd.grad(negative, leaf, watched(told).of(torch.ones(2)))
        assert noted == ["recorded here"]


def test_20_a_graph_is_given_a_guard_while_it_is_compiled() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def region(x: Tensor) -> Tensor:
        while_compiling(hold_for_this_setting)
        return x * setting_now()

    torch.compiler.reset()
    run = torch.compile(region, backend=backend, fullgraph=True)
    found = []
    with assumed("a function marked constant is called once, and comptime hands over what takes a guard"):
        for value in (2, 3, 2, 3):
            token = SETTING.set(value)
            found.append(run(torch.ones(1)).item())
            SETTING.reset(token)
        assert (found, len(graphs)) == ([2, 3, 2, 3], 2)


def test_21_printing_has_options_a_summary_and_a_formatter() -> None:
    values = torch.tensor([1.5, -22.0])
    with assumed("_tensor_str formats numbers by the tensor they are in, and summarizes large tensors"):
        formatter = NumberFormatter(values)
        assert [formatter.format(v.item()).strip() for v in values] == ["1.5000", "-22.0000"]
        assert len(formatter.format(1.5)) == formatter.width()
        with torch._tensor_str.printoptions(threshold=4, edgeitems=1, linewidth=60):
            options = print_options()
            assert (options.threshold, options.edgeitems, options.linewidth) == (4, 1, 60)
            assert summarized_data(torch.arange(10.0)).tolist() == [0.0, 9.0]


def test_22_forward_mode_has_a_level() -> None:
    with assumed("forward_ad._current_level is negative outside of forward mode"):
        assert not in_forward_mode()
        with torch.autograd.forward_ad.dual_level():
            assert in_forward_mode()
        assert not in_forward_mode()


def test_23_inductor_has_a_table_of_lowerings_and_a_fused_multiply_add() -> None:
    from torch._inductor import ir, lowering

    with assumed("inductor's lowerings are in a table by overload, and are registered, or call the operator"):
        assert torch.ops.aten.exp.default in lowering.lowerings
        assert callable(lowering.fallback_handler)
        assert callable(lowering.register_lowering)
        assert callable(lowering.to_dtype)
    with assumed("inductor tells inputs of a graph from computed values"):
        assert callable(ir.StorageBox.is_input_buffer)
        assert callable(ir.BaseView.unwrap_view)
    with assumed("prims.fma(a, b, c) is a · b + c"):
        a, b, c = torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([4.0])
        assert fused_multiply_add()(a, b, c).item() == 10.0


def test_24_dimensions_are_marked_as_dynamic() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    run = torch.compile(torch.sin, backend=backend, fullgraph=True)
    with assumed("a marked dimension is dynamic from the first compilation on"):
        for size in (5, 6, 7):
            x = torch.ones(size, 2)
            mark_dynamic(x, 0)
            run(x)
        assert len(graphs) == 1


SETTING: contextvars.ContextVar[int] = contextvars.ContextVar("setting")


@constant_in_graphs
def setting_now() -> int:
    return SETTING.get()


def hold_for_this_setting(context: Any) -> None:
    guard_on(setting_now, context)
