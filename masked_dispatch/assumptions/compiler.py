"""What masked_dispatch/compiler_internals.py assumes of Dynamo, by the numbers in torch_internals.py.

The compiler is loaded when the first of these runs. What is assumed of the stages after Dynamo is in graphs.py.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from masked_dispatch.api.construct import is_masked_tensor, masked_tensor
from masked_dispatch.assumptions.checks import (
    NAMESPACE,
    assumed,
    assumption,
    assumption_about_graphs,
    expect,
    expect_equal,
    raises,
    replaced,
)
from masked_dispatch.compiler_internals import (
    break_graphs_at,
    constant_in_graphs,
    guard_on,
    keep_whole,
    mark_dynamic,
    never_compiled,
    outside_of_graphs,
    pending_sizes,
    uncompiled,
    under_compile,
    while_compiling,
)
from op_registry.older_torch import records_new_tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_own_code(function: _Function) -> _Function:
    """Decorator: give the function a code object of its own, in a file that is not this library's.

    torch remembers by its code object that a function must not be compiled, and all runs of a check would share one.
    Dynamo leaves functions of this library's files alone (49).
    """
    function.__code__ = function.__code__.replace(co_filename="a check.py")
    return function


def keeping(graphs: list[Any]) -> Callable[..., Any]:
    """A backend that keeps the graphs and runs them as they are."""

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    return backend


@assumption_about_graphs(8, "a code object that is marked SKIP, and all that it calls, runs uncompiled")
def code_may_be_kept_from_dynamo() -> None:
    graphs: list[Any] = []

    @with_own_code
    def inner(x: Tensor) -> Tensor:
        return torch.sin(x)

    @never_compiled
    @with_own_code
    def middle(x: Tensor) -> Tensor:
        return inner(x)

    expect_equal(torch.compile(middle, backend=keeping(graphs))(torch.zeros(2)).tolist(), [0, 0])
    expect_equal([graph.code for graph in graphs if "sin" in graph.code], [])


@assumption_about_graphs(49, "of files that Dynamo is told of, it traces what traced code calls, and nothing else")
def frames_of_files_are_left_alone() -> None:
    def of_this_library(x: Tensor) -> Tensor:
        return torch.sin(x)

    def outside(x: Tensor) -> Tensor:
        return of_this_library(x)

    calls = {"inside": of_this_library, "outside": torch.compiler.disable(with_own_code(outside), recursive=False)}
    traced = {}
    for where, call in calls.items():

        @with_own_code
        def region(x: Tensor, call: Callable[[Tensor], Tensor] = call) -> Tensor:
            return call(x.cos())

        graphs: list[Any] = []
        torch.compile(region, backend=keeping(graphs))(torch.zeros(2))
        traced[where] = [name for graph in graphs for name in ("cos", "sin") if name in graph.code]
    expect_equal(traced, {"inside": ["cos", "sin"], "outside": ["cos"]})


@assumption_about_graphs(
    9, "__metadata_guard__ is asked about every input, with a copy of the context that was compiled for"
)
def guards_see_each_input_before_every_run() -> None:
    seen: list[tuple[Any, Any]] = []

    class Context:
        original: Context

        def __deepcopy__(self, memo: Any) -> Context:
            copy = Context()
            copy.original = self
            return copy

    class Guarded(Tensor):
        held: Tensor
        context: Context

        @staticmethod
        def of(inner: Tensor) -> Guarded:
            wrapper: Guarded = Tensor._make_wrapper_subclass(Guarded, inner.shape, dtype=inner.dtype)
            wrapper.held, wrapper.context = inner, Context()
            return wrapper

        def __tensor_flatten__(self) -> Any:
            return ["held"], self.context

        @staticmethod
        def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Guarded:
            return Guarded.of(inner["held"])

        @classmethod
        def __metadata_guard__(cls, expected: Any, actual: Any) -> bool:
            seen.append((expected.original, actual))
            return True

        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*[a.held if isinstance(a, Guarded) else a for a in args], **(kwargs or {}))
            return Guarded.of(result)

    run = torch.compile(lambda x: x.sin(), backend="eager", fullgraph=True)
    first, second = Guarded.of(torch.ones(2)), Guarded.of(torch.ones(2))
    run(first)
    expect((first.context, first.context) in seen, seen)  # before its first run, too
    seen.clear()
    run(second)
    expect_equal(seen, [(first.context, second.context)])
    # That AOTAutograd refuses such inputs where a graph writes to them:
    # test_a_view_and_its_base_as_inputs_of_a_region_that_writes_are_refused in test_compile_writes.py.


SETTING: contextvars.ContextVar[int] = contextvars.ContextVar("setting")


@constant_in_graphs
def setting_now() -> int:
    return SETTING.get()


def hold_for_this_setting(context: Any) -> None:
    guard_on(setting_now, context)


@assumption_about_graphs(20, "a function marked constant is called once, and comptime hands over what takes a guard")
def a_graph_is_given_a_guard_while_it_is_compiled() -> None:
    graphs: list[Any] = []

    def region(x: Tensor) -> Tensor:
        while_compiling(hold_for_this_setting)
        return x * setting_now()

    run = torch.compile(region, backend=keeping(graphs), fullgraph=True)
    results = []
    for value in (2, 3, 2, 3):
        token = SETTING.set(value)
        try:
            results.append(run(torch.ones(1)).item())
        finally:
            SETTING.reset(token)
    expect_equal((results, len(graphs)), ([2, 3, 2, 3], 2))


@assumption_about_graphs(24, "a marked dimension is dynamic from the first compilation on")
def dimensions_are_marked_as_dynamic() -> None:
    graphs: list[Any] = []
    run = torch.compile(torch.sin, backend=keeping(graphs), fullgraph=True)
    for size in (5, 6, 7):
        x = torch.ones(size, 2)
        mark_dynamic(x, 0)
        run(x)
    expect_equal(len(graphs), 1)


@assumption(25, "what torch.compile returns holds what it was given")
def what_was_compiled_is_found_again() -> None:
    @with_own_code
    def function() -> None: ...

    module = torch.nn.Linear(1, 1)
    expect(uncompiled(torch.compile(function)) is function)
    expect(uncompiled(torch.compile(module)) is module)
    expect(uncompiled(module) is module)


@assumption_about_graphs(27, "Dynamo's method for x.new_tensor takes the call's arguments, and None records the call")
def dynamo_has_a_method_for_new_tensor_that_may_decline() -> None:
    from torch._dynamo.variables.tensor import TensorVariable

    owner: Any = TensorVariable
    if not records_new_tensor(owner):
        expect_equal(list(inspect.signature(owner.method_new_tensor).parameters)[:2], ["self", "tx"])
    x = masked_tensor(torch.ones(2), torch.tensor([True, False]))
    run = torch.compile(lambda x: x.new_tensor([1.0, 2.0]), backend="eager", fullgraph=True)
    expect(is_masked_tensor(run(x)))
    expect(type(run(torch.ones(2))) is Tensor)


@assumption_about_graphs(27, "Dynamo's method for x[i] = value takes the index and the value")
def dynamo_has_a_method_for_assignment_by_index() -> None:
    from torch._dynamo.variables.tensor import TensorVariable

    graphs: list[Any] = []

    def write(x: Tensor) -> Tensor:
        y = x.clone()
        y[1] = 2.0
        return y

    owner: Any = TensorVariable
    method = getattr(owner, "method___setitem__", None) or owner.mp_ass_subscript_impl
    expect_equal(list(inspect.signature(method).parameters), ["self", "tx", "key", "value"])
    x: Any = masked_tensor(torch.ones(2), torch.tensor([True, False])).to_sparse()
    expect_equal(torch.compile(write, backend=keeping(graphs), fullgraph=True)(x).sum().item(), 3)
    recorded = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    expect("_written" in recorded, recorded)


@assumption_about_graphs(28)
def sizes_in_between_are_pending_until_they_are_taken_off() -> None:
    pending: list[int] = []

    def count(x: Tensor) -> Tensor:
        chosen = x[x.nonzero()[:, 0]]
        pending.append(len(pending_sizes()))
        pending_sizes().clear()
        return chosen.sum()

    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library:
        library.define("count(Tensor x) -> Tensor")
        library.impl("count", count, "CompositeImplicitAutograd")
        operator: Any = getattr(torch.ops, NAMESPACE).count
        with assumed("a size that is taken off the list need not be one of the result"):
            run = torch.compile(lambda x: operator(x), backend="eager", fullgraph=True)
            expect_equal(run(torch.tensor([0.0, 2.0, 3.0])).item(), 5)
        with assumed("Dynamo lists the sizes that depend on data as pending"):
            expect(max(pending) > 0, pending)


def calls_compiled(function: Any, kept: Any) -> list[Any]:
    """The calls in the graphs of `function`, which asks while it is traced that `kept` be kept whole."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Telling(TwoTensor):
        def __tensor_flatten__(self) -> Any:
            keep_whole([kept])
            return super().__tensor_flatten__()

    graphs: list[Any] = []
    result = torch.compile(function, backend=keeping(graphs))(Telling(torch.ones(2), torch.ones(2)))
    expect(torch.equal(result.a, torch.ones(2).sin()), result.a)
    return [node.target for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]


@assumption_about_graphs(31, "an exception raised while Dynamo traces makes it trace again")
def tracing_begins_anew_when_a_function_is_to_be_kept_whole() -> None:
    @with_own_code
    def inner(x: Tensor) -> Tensor:
        return x.sin()

    def outer(x: Tensor) -> Tensor:
        return inner(x)

    expect_equal(calls_compiled(outer, kept=inner), [inner])


@assumption_about_graphs(31, "an exception raised while Dynamo traces makes it run the function uncompiled")
def the_function_at_hand_runs_uncompiled_when_it_is_to_be_kept_whole() -> None:
    @with_own_code
    def outer(x: Tensor) -> Tensor:
        return x.sin()

    expect_equal(calls_compiled(outer, kept=outer), [])


@assumption_about_graphs(
    34, "what torch.compile returns runs by a function compile_wrapper of torch._dynamo.eval_frame"
)
def what_torch_compile_returns_is_on_the_stack() -> None:
    expect(not under_compile())
    with torch.compiler.set_stance("force_eager"):
        expect(torch.compile(under_compile, backend="eager")())


@assumption_about_graphs(37)
def a_plain_tensor_with_a_wrapper_as_its_gradient_is_not_compiled() -> None:
    """Before torch 2.14. Once this is the oldest, steps of masked_dispatch.optim may be compiled."""
    from torch.testing._internal.two_tensor import TwoTensor

    @with_own_code
    def step() -> None:
        with torch.no_grad():
            p.sub_(0.1)

    p = torch.nn.Parameter(torch.ones(2))
    p.grad = TwoTensor(torch.ones(2), torch.ones(2))
    if torch.__version__ >= "2.14":
        with assumed("Dynamo compiles it since torch 2.14"):
            torch.compile(step, backend="aot_eager")()
            expect(torch.equal(p.detach(), torch.full((2,), 0.9)), p)
    else:
        with raises(AssertionError, match="Expected SubclassSymbolicContext"):
            torch.compile(step, backend="aot_eager")()
    before = p.detach().clone()
    with assumed("a function that is marked to be disabled runs outside of graphs"):
        torch.compile(lambda: outside_of_graphs(step)(), backend="aot_eager")()
        expect(torch.equal(p.detach(), before - 0.1), p)


@assumption_about_graphs(38)
def an_exception_of_an_operator_breaks_the_graph() -> None:
    from torch._dynamo import utils

    class Refusing(RuntimeError):
        pass

    def refuse(x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise Refusing("not in a graph")
        return x + 1

    with (
        replaced(utils, "run_node", utils.run_node),
        torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library,
    ):
        break_graphs_at.__wrapped__(Refusing)  # which replaces it, and would not do so a second time
        library.define("refuse(Tensor x) -> Tensor")
        library.impl("refuse", refuse, "CompositeImplicitAutograd")
        operator: Any = getattr(torch.ops, NAMESPACE).refuse

        def region(x: Tensor) -> Tensor:
            return operator(x * 2) * 3

        with assumed("with fullgraph=True such an exception reaches the caller"), raises(Refusing, "not in a graph"):
            torch.compile(region, backend="eager", fullgraph=True)(torch.ones(2))
        torch.compiler.reset()
        with assumed("Dynamo breaks graphs at its class Unsupported"):
            expect_equal(torch.compile(region, backend="eager")(torch.ones(2)).tolist(), [9.0, 9.0])
