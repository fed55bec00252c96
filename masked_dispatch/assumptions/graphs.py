"""What masked_dispatch/compiler_internals.py assumes of AOTAutograd, inductor, make_fx and export.

By the numbers in torch_internals.py. The compiler is loaded when the first of these runs.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from masked_dispatch.assumptions.checks import (
    assumed,
    assumption,
    assumption_about_graphs,
    expect,
    expect_equal,
    replaced,
)
from masked_dispatch.compiler_internals import (
    WRITING_COPIES,
    before_export_unwraps,
    constant_in_graphs,
    exported_arguments,
    fused_multiply_add,
    pending_sizes,
    sizes_to_be_found,
)
from masked_dispatch.torch_internals import as_value, place_in_graph


@assumption(11, "AOTDispatchAutograd.process_runtime_tangent(x, meta, ...) coerces runtime tangents")
def runtime_tangents_go_through_one_function() -> None:
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd
    from torch._functorch._aot_autograd.schemas import SubclassCreationMeta

    owner: Any = AOTDispatchAutograd
    expect_equal(list(inspect.signature(owner.process_runtime_tangent).parameters)[:2], ["x", "meta"])
    fields = list(SubclassCreationMeta.__dataclass_fields__)
    expect("original_subclass_type" in fields, fields)


@assumption(13, "make_fx is the PROXY mode, and has a slot for each tensor that it follows")
def make_fx_knows_which_tensors_it_follows() -> None:
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, make_fx

    constant = torch.ones(2)
    proxy_mode: Any = torch._C._TorchDispatchModeKey.PROXY

    def function(x: Tensor) -> Tensor:
        mode: Any = torch._C._get_dispatch_mode(proxy_mode)
        expect(get_proxy_slot(x, mode.tracer, None) is not None)
        expect(get_proxy_slot(constant, mode.tracer, None) is None)
        return x * constant

    make_fx(function)(torch.ones(2))
    expect(torch._C._get_dispatch_mode(proxy_mode) is None)
    expect_equal(torch._C._len_torch_dispatch_stack(), 0)


@assumption(15, "a FunctionalTensor's value stays when it is written to, and AOTAutograd runs before it records")
def a_functional_tensor_holds_a_value_until_it_is_written_to() -> None:
    from functorch.compile import aot_function, nop  # type: ignore[import-untyped]

    calls: list[str] = []
    graphs: list[Any] = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(type(x).__name__)
        y = x + 1
        before = as_value(y)
        expect_equal(place_in_graph(before[1:]), place_in_graph(y[1:]))
        expect(place_in_graph(y[1:]) != place_in_graph(y[:1]))
        expect(place_in_graph(y.clone()) != place_in_graph(y))
        y.mul_(2)
        return before, y

    def keep(graph: Any, _: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    expect(place_in_graph(torch.ones(2)) is None)
    before, after = aot_function(function, fw_compiler=keep, bw_compiler=nop)(torch.ones(2))
    expect_equal((before.tolist(), after.tolist()), ([2, 2], [4, 4]))
    expect_equal(graphs, [[torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor]])
    expect_equal(calls[:2], ["FunctionalTensor"] * 2)
    expect(as_value(before).data_ptr() != before.data_ptr())


@assumption(23)
def inductor_has_a_table_of_lowerings_and_a_fused_multiply_add() -> None:
    from torch._dynamo.variables import tensor
    from torch._inductor import ir, lowering

    with assumed("inductor's lowerings are in a table by overload, and are registered, or call the operator"):
        expect(torch.ops.aten.exp.default in lowering.lowerings)
        expect(callable(lowering.fallback_handler))
        expect(callable(lowering.register_lowering))
        expect(callable(lowering.to_dtype))
    with assumed("inductor tells inputs of a graph from computed values"):
        expect(callable(ir.StorageBox.is_input_buffer))
        expect(callable(ir.BaseView.unwrap_view))
    with assumed("prims.fma(a, b, c) is a * b + c"):
        a, b, c = torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([4.0])
        expect_equal(fused_multiply_add()(a, b, c).item(), 10.0)
    with assumed("Dynamo records as a copy_ what these methods of TensorVariable are called for"):
        methods = [(name, f) for name, f in vars(tensor.TensorVariable).items() if inspect.isfunction(f)]
        copying = [name for name, f in methods if 'call_method(tx, "copy_"' in inspect.getsource(f)]
        expect(sorted(copying) in ([], sorted(WRITING_COPIES)), copying)


@assumption_about_graphs(36)
def the_arguments_of_an_export_and_what_it_decomposes_are_seen() -> None:
    from torch._functorch._aot_autograd import subclass_parametrization

    @constant_in_graphs
    def look() -> None:
        seen.extend(exported_arguments())

    class Telling(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            look()
            return super().forward(x)

    name = "unwrap_tensor_subclass_parameters"
    for strict in (False, True):
        seen: list[Any] = []
        split: list[torch.nn.Module] = []
        x = torch.ones(2, 2)
        with (
            warnings.catch_warnings(),
            replaced(subclass_parametrization, name, getattr(subclass_parametrization, name)),
        ):
            warnings.simplefilter("ignore", FutureWarning)  # torch's own LeafSpec
            before_export_unwraps.__wrapped__(split.append)  # which replaces it, and would remember what it was given
            program = torch.export.export(Telling(2, 2), (x,), strict=strict)
            with assumed("the arguments of torch.export are in the frame of its function"):
                expect(seen, f"none, strict={strict}")
                expect(all(argument is x for argument in seen), seen)
            with assumed("what is decomposed goes through unwrap_tensor_subclass_parameters"):
                program.run_decompositions()
                expect(split, f"none, strict={strict}")
        expect_equal(exported_arguments(), [])


@assumption_about_graphs(40, "a compiled region makes the views that it returns with gen_alias_from_base")
def views_that_a_region_returns_are_made_by_one_function() -> None:
    from torch._functorch._aot_autograd import runtime_wrappers

    made: list[tuple[Any, ...]] = []
    owner: Any = runtime_wrappers
    original = owner.gen_alias_from_base

    def noting(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return original(*args, **kwargs)

    with replaced(owner, "gen_alias_from_base", noting):
        names = list(inspect.signature(original).parameters)
        expect_equal(names[:3], ["aliased_base_tensor", "target_meta_tensor", "target_requires_grad"])
        x = torch.arange(6.0).reshape(2, 3)
        y = torch.compile(lambda x: x.t(), backend="aot_eager")(x)
        expect_equal(y.data_ptr(), x.data_ptr())
        ((base, target, requires_grad, *_),) = made
        expect(base is x, base)
        expect_equal(tuple(target.shape), (3, 2))
        expect(not requires_grad)


@assumption(44, "a size that depends on data is found where it stands alone, not in a sum")
def a_size_that_depends_on_data_is_found_where_it_stands_alone() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        first, second = (mode.from_tensor(torch.ones(3)).nonzero() for _ in range(2))
        pending = list(pending_sizes())
        expect_equal(len(pending), 2)
        size: Any = first.shape[0]
        expect_equal(sizes_to_be_found([first], pending), {size.node.expr})
        expect_equal(sizes_to_be_found([first, second], pending), set(pending))
        expect_equal(sizes_to_be_found([torch.cat([first, second])], pending), set())
