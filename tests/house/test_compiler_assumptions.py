"""What masked_dispatch/torch_internals.py assumes of torch's compiler, by the numbers in its docstring."""

from __future__ import annotations

import contextvars
import inspect
from typing import Any

import pytest
import torch
import torch._dynamo  # which parts of the compiler expect to be there
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

import masked_dispatch as md
from assumptions import assumed
from masked_dispatch.compiler_internals import (
    before_export_unwraps,
    break_graphs_at,
    constant_in_graphs,
    exported_arguments,
    fused_multiply_add,
    guard_on,
    keep_whole,
    mark_dynamic,
    outside_of_graphs,
    pending_sizes,
    sizes_to_be_found,
    uncompiled,
    under_compile,
    while_compiling,
)


def test_8_code_may_be_kept_from_dynamo() -> None:
    from masked_dispatch.compiler_internals import never_compiled

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
    # That AOTAutograd refuses such inputs where a graph writes to them:
    # test_a_view_and_its_base_as_inputs_of_a_region_that_writes_are_refused in test_compile_writes.py.


def test_11_runtime_tangents_go_through_one_function() -> None:
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd
    from torch._functorch._aot_autograd.schemas import SubclassCreationMeta

    with assumed("AOTDispatchAutograd.process_runtime_tangent(x, meta, …) coerces runtime tangents"):
        parameters = list(inspect.signature(AOTDispatchAutograd.process_runtime_tangent).parameters)
        assert parameters[:2] == ["x", "meta"]
        assert "original_subclass_type" in SubclassCreationMeta.__dataclass_fields__


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


def test_25_what_was_compiled_is_found_again() -> None:
    module = torch.nn.Linear(1, 1)
    with assumed("what torch.compile returns holds what it was given"):
        assert uncompiled(torch.compile(setting_now)) is setting_now
        assert uncompiled(torch.compile(module)) is module
        assert uncompiled(module) is module


def test_27_dynamo_has_a_method_for_new_tensor_that_may_decline() -> None:
    from torch._dynamo.variables.tensor import TensorVariable

    with assumed("Dynamo's method for x.new_tensor takes the call's arguments, and None records the call"):
        parameters = list(inspect.signature(TensorVariable.method_new_tensor).parameters)
        assert parameters[:2] == ["self", "tx"]
        x = md.masked_tensor(torch.ones(2), torch.tensor([True, False]))
        run = torch.compile(lambda x: x.new_tensor([1.0, 2.0]), backend="eager", fullgraph=True)
        assert md.is_masked_tensor(run(x))
        assert type(run(torch.ones(2))) is Tensor


def test_27_dynamo_has_a_method_for_assignment_by_index() -> None:
    from torch._dynamo.variables.tensor import TensorVariable

    recorded: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        recorded.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def write(x: Tensor) -> Tensor:
        y = x.clone()
        y[1] = 2.0
        return y

    with assumed("Dynamo's method for x[i] = value takes the index and the value"):
        owner: Any = TensorVariable
        method = getattr(owner, "method___setitem__", None) or owner.mp_ass_subscript_impl
        assert list(inspect.signature(method).parameters) == ["self", "tx", "key", "value"]
        x = md.masked_tensor(torch.ones(2), torch.tensor([True, False])).to_sparse()
        assert torch.compile(write, backend=backend, fullgraph=True)(x).sum() == 3
        assert "_written" in recorded


def test_28_sizes_in_between_are_pending_until_they_are_taken_off() -> None:
    library, pending = torch.library.Library("assumption27", "DEF"), []
    library.define("count(Tensor x) -> Tensor")

    def count(x: Tensor) -> Tensor:
        chosen = x[x.nonzero()[:, 0]]
        pending.append(len(pending_sizes()))
        pending_sizes().clear()
        return chosen.sum()

    library.impl("count", count, "CompositeImplicitAutograd")
    torch.compiler.reset()
    with assumed("a size that is taken off the list need not be one of the result"):
        run = torch.compile(lambda x: torch.ops.assumption27.count(x), backend="eager", fullgraph=True)
        assert run(torch.tensor([0.0, 2.0, 3.0])) == 5
    with assumed("Dynamo lists the sizes that depend on data as pending"):
        assert max(pending) > 0


SETTING: contextvars.ContextVar[int] = contextvars.ContextVar("setting")


@constant_in_graphs
def setting_now() -> int:
    return SETTING.get()


def hold_for_this_setting(context: Any) -> None:
    guard_on(setting_now, context)


def calls_compiled(function: Any, kept: Any) -> list[Any]:
    """The calls in the graphs of `function`, which asks while it is traced that `kept` be kept whole."""

    class Telling(TwoTensor):
        def __tensor_flatten__(self) -> Any:
            keep_whole([kept])
            return super().__tensor_flatten__()

    def backend(graph: Any, inputs: Any) -> Any:
        called.extend(node.target for node in graph.graph.nodes if node.op.startswith("call"))
        return graph

    called: list[Any] = []
    torch._dynamo.reset()
    found = torch.compile(function, backend=backend)(Telling(torch.ones(2), torch.ones(2)))
    assert torch.equal(found.a, torch.ones(2).sin())
    return called


# Two tests with functions of their own: what is never to be compiled is remembered by its code.
def test_31_tracing_begins_anew_when_a_function_is_to_be_kept_whole() -> None:
    def inner(x: Tensor) -> Tensor:
        return x.sin()

    def outer(x: Tensor) -> Tensor:
        return inner(x)

    with assumed("an exception raised while Dynamo traces makes it trace again"):
        assert calls_compiled(outer, kept=inner) == [inner]


def test_31_the_function_at_hand_runs_uncompiled_when_it_is_to_be_kept_whole() -> None:
    def outer(x: Tensor) -> Tensor:
        return x.sin()

    with assumed("an exception raised while Dynamo traces makes it run the function uncompiled"):
        assert calls_compiled(outer, kept=outer) == []


def test_34_what_torch_compile_returns_is_on_the_stack() -> None:
    with assumed("what torch.compile returns runs by a function compile_wrapper of torch._dynamo.eval_frame"):
        assert not under_compile()
        with torch.compiler.set_stance("force_eager"):
            assert torch.compile(under_compile, backend="eager")()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own LeafSpec, in export
@pytest.mark.parametrize("strict", [False, True])
def test_36_the_arguments_of_an_export_and_what_it_decomposes_are_seen(strict: bool) -> None:
    class Telling(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            look()
            return super().forward(x)

    @torch._dynamo.assume_constant_result
    def look() -> None:
        seen.extend(exported_arguments())

    seen: list[Any] = []
    split: list[torch.nn.Module] = []
    before_export_unwraps(split.append)
    x = torch.ones(2, 2)
    program = torch.export.export(Telling(2, 2), (x,), strict=strict)
    with assumed("the arguments of torch.export are in the frame of its function"):
        assert seen
        assert all(argument is x for argument in seen), seen
    with assumed("what is decomposed goes through unwrap_tensor_subclass_parameters"):
        program.run_decompositions()
        assert split
    assert exported_arguments() == []


def test_37_a_plain_tensor_with_a_wrapper_as_its_gradient_is_not_compiled() -> None:
    """Before torch 2.14. Once this is the oldest, steps of masked_dispatch.optim may be compiled."""

    def step() -> None:
        with torch.no_grad():
            p.sub_(0.1)

    p = torch.nn.Parameter(torch.ones(2))
    p.grad = TwoTensor(torch.ones(2), torch.ones(2))
    torch._dynamo.reset()
    if torch.__version__ >= "2.14":
        with assumed("Dynamo compiles it since torch 2.14"):
            torch.compile(step, backend="aot_eager")()
            assert torch.equal(p.detach(), torch.full((2,), 0.9))
    else:
        with pytest.raises(AssertionError, match="Expected SubclassSymbolicContext"):
            torch.compile(step, backend="aot_eager")()
    before = p.detach().clone()
    with assumed("a function that is marked to be disabled runs outside of graphs"):
        torch.compile(lambda: outside_of_graphs(step)(), backend="aot_eager")()
        assert torch.equal(p.detach(), before - 0.1)


class Refusing(RuntimeError):
    pass


@pytest.mark.parametrize("fullgraph", [False, True])
def test_38_an_exception_of_an_operator_breaks_the_graph(fullgraph: bool) -> None:
    library = torch.library.Library("assumption38", "FRAGMENT")
    name = f"refuse_{fullgraph}"
    library.define(f"{name}(Tensor x) -> Tensor")

    def refuse(x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise Refusing("not in a graph")
        return x + 1

    library.impl(name, refuse, "CompositeImplicitAutograd")
    operator = getattr(torch.ops.assumption38, name)
    break_graphs_at(Refusing)
    torch._dynamo.reset()
    run = torch.compile(lambda x: operator(x * 2) * 3, backend="eager", fullgraph=fullgraph)
    if fullgraph:
        with pytest.raises(Refusing, match="not in a graph"):
            run(torch.ones(2))
        return
    with assumed("Dynamo breaks graphs at its class Unsupported"):
        assert torch.equal(run(torch.ones(2)), torch.full((2,), 9.0))


def test_40_views_that_a_region_returns_are_made_by_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch._aot_autograd import runtime_wrappers

    made: list[tuple[Any, ...]] = []
    original = runtime_wrappers.gen_alias_from_base

    def noting(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return original(*args, **kwargs)

    with assumed("a compiled region makes the views that it returns with gen_alias_from_base"):
        names = list(inspect.signature(original).parameters)
        assert names[:3] == ["aliased_base_tensor", "target_meta_tensor", "target_requires_grad"]
        monkeypatch.setattr(runtime_wrappers, "gen_alias_from_base", noting)
        torch._dynamo.reset()
        x = torch.arange(6.0).reshape(2, 3)
        y = torch.compile(lambda x: x.t(), backend="aot_eager")(x)
        assert y.data_ptr() == x.data_ptr()
        ((base, target, requires_grad, *_),) = made
        assert base is x
        assert target.shape == (3, 2)
        assert not requires_grad


def test_44_a_size_that_depends_on_data_is_found_where_it_stands_alone() -> None:
    shapes = ShapeEnv()
    with (
        assumed("a size that depends on data is found where it stands alone, not in a sum"),
        FakeTensorMode(shape_env=shapes) as mode,
    ):
        first, second = (mode.from_tensor(torch.ones(3)).nonzero() for _ in range(2))
        pending = list(pending_sizes())
        assert len(pending) == 2
        assert sizes_to_be_found([first], pending) == {first.shape[0].node.expr}
        assert sizes_to_be_found([first, second], pending) == set(pending)
        assert sizes_to_be_found([torch.cat([first, second])], pending) == set()
