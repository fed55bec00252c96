"""What masked_dispatch/torch_internals.py assumes of torch, one test for each number in its docstring.

Those about the compiler are in test_compiler_assumptions.py, those about the autograd engine in
test_engine_assumptions.py.
Most use torch alone and a bare subclass: where one fails after torch has been upgraded, that is what has changed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch._C import DispatchKey, DispatchKeySet
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.library import Library
from torch.testing import _comparison
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

import masked_dispatch as md
from assumptions import assumed
from masked_dispatch.distributed_internals import (
    boxed_work,
    constants_replicated,
    inside_data_parallel,
    is_mixed_with_distributed,
    process_group_named,
    process_group_of,
    waited_for,
    work_that_calls,
)
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
    with_facts,
)

KEY = DispatchKeySet(DispatchKey.PreDispatch)


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


def test_10_aliasing_is_noticed_by_storage() -> None:
    with assumed("_functionalize_unsafe_set gives a wrapper the storage of another"):
        a, b = Carrier.of(torch.ones(2)), Carrier.of(torch.ones(2))
        assert a.untyped_storage()._cdata != b.untyped_storage()._cdata
        torch._functionalize_unsafe_set(b, a)
        assert a.untyped_storage()._cdata == b.untyped_storage()._cdata


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


def test_14_a_storage_can_be_told_to_raise() -> None:
    with assumed("a wrapper's storage raises once _set_throw_on_mutable_data_ptr has been called"):
        x = Carrier.of(torch.ones(2))
        torch._C._set_throw_on_mutable_data_ptr(x)
        with pytest.raises(RuntimeError):
            Tensor.data_ptr(x)


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


def test_21_printing_has_options_a_formatter_and_line_breaks() -> None:
    values = torch.tensor([1.5, -22.0])
    with assumed("_tensor_str formats numbers by the tensor they are in, and breaks lines before facts"):
        formatter = NumberFormatter(values)
        assert [formatter.format(v.item()).strip() for v in values] == ["1.5000", "-22.0000"]
        assert len(formatter.format(1.5)) == formatter.width()
        with torch._tensor_str.printoptions(threshold=4, edgeitems=1, linewidth=20):
            options = print_options()
            assert (options.threshold, options.edgeitems, options.linewidth) == (4, 1, 20)
            assert with_facts("t([1, 2]", ["a=1", "long=123456"], 2, False) == "t([1, 2], a=1,\n  long=123456)"
        assert default_device_type() == "cpu"
    with assumed("modes are disabled while torch prints"), FakeTensorMode():
        assert isinstance(torch.ones(1), FakeTensor)
        with plainly():
            assert type(torch.ones(1)) is torch.Tensor


def test_22_forward_mode_has_a_level() -> None:
    with assumed("forward_ad._current_level is negative outside of forward mode"):
        assert not in_forward_mode()
        with torch.autograd.forward_ad.dual_level():
            assert in_forward_mode()
        assert not in_forward_mode()


def test_26_assert_close_compares_tensors_with_one_class() -> None:
    source = inspect.getsource(_comparison.assert_close)
    with assumed("assert_close compares tensors with TensorLikePair, looked up in its module at the call"):
        assert re.search(r"pair_types=\([^)]*\bTensorLikePair\b", source)
        assert _comparison.TensorLikePair.__mro__[1].__name__ == "TensorLikePair"
        assert callable(_comparison.TensorLikePair.compare)
        assert callable(_comparison.TensorLikePair._fail)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_30_torchscript_is_called_by_two_types() -> None:
    with assumed("torch.jit makes ScriptFunctions, which know what they were compiled from, and ScriptMethods"):
        scripted = torch.jit.script(doubled)
        assert isinstance(scripted, torch._C.ScriptFunction)
        assert python_function_of(scripted) is doubled
        assert python_function_of(torch.jit.trace(doubled, torch.ones(2))) is doubled
        method = torch.jit.script(torch.nn.ReLU()).forward
        assert isinstance(method, torch._C.ScriptMethod)
        assert method.name == "forward"
        assert python_function_of(method) is None


def test_32_collectives_get_script_objects() -> None:
    made = distributed.PrefixStore("assumptions", distributed.HashStore())
    received: list[Any] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.c10d.allreduce_.default:
                received.extend(args)
                return args[0], boxed_work(work_that_calls(lambda timeout: bool(waited.append(timeout)) or True))
            return func(*args, **(kwargs or {}))

    waited: list[Any] = []
    distributed.init_process_group("gloo", store=made, rank=0, world_size=1)
    try:
        group = distributed.group.WORLD
        assert group is not None
        with assumed("operators of torch.distributed get script objects, which unbox, and return a Work of ours"):
            with Noting():
                work = distributed.all_reduce(torch.ones(2), distributed.ReduceOp.AVG, async_op=True)
            assert process_group_of(received[1]) is group
            assert process_group_named(group.group_name) is group
            assert distributed.ReduceOp.RedOpType(received[2].op()) == distributed.ReduceOp.AVG
            assert waited == []
            assert work is not None
            assert not distributed.Work.get_future(work).done()
            assert work.get_future().done()
            assert work.wait()
            assert len(waited) == 2
        with assumed("a custom operator wraps what a functional collective returns"):
            functional = importlib.import_module("torch.distributed._functional_collectives")
            result = torch.ops._c10d_functional._wrap_tensor_autograd(torch.ones(2))
            assert type(result) is functional.AsyncCollectiveTensor
    finally:
        distributed.destroy_process_group()
        # The class above is garbage in a cycle. If a forked process collected the group with it, it would wait for the
        # group's threads, which it does not have.
        received.clear()
        gc.collect()


def test_33_what_traces_replace() -> None:
    made = Library("masked_dispatch_assumption", "DEF")
    made.define("f(Tensor x) -> Tensor")
    op, x = torch.ops.masked_dispatch_assumption.f.default, md.masked_tensor(torch.ones(2), None)
    with assumed("a kernel may be a partial, whose function is called from here and can be exchanged"):
        callers: list[str] = []

        def adding(number: int) -> Callable[..., Tensor]:
            def kernel(keyset: Any, x: Tensor) -> Tensor:
                callers.append(sys._getframe(1).f_code.co_filename)
                return x + number

            return kernel

        place = functools.partial(adding(1))
        library = Library(op.namespace, "IMPL")
        register_kernel(library, op.name(), place)
        assert op(x).sum().item() == 4
        exchange_function(place, adding(2))
        assert op(x).sum().item() == 6
        assert callers == [torch._ops.__file__] * 2

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.metadata["forward"] = True
            return x * 2

    with assumed("the engine looks backward up when it calls it, and passes the node, whose metadata it keeps"):
        found: list[Any] = []
        y = Doubled.apply(torch.ones(2, requires_grad=True))
        Doubled.backward = staticmethod(lambda ctx, grad: found.append(dict(ctx.metadata)))  # type: ignore[assignment]
        y.sum().backward()
        assert found == [{"forward": True}]


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """The default process group, of this process alone."""
    made = distributed.PrefixStore("one rank", distributed.HashStore())
    distributed.init_process_group("gloo", store=made, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_39_data_parallel_says_that_its_forward_is_running() -> None:
    seen: list[bool] = []

    class Asking(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(inside_data_parallel())
            return super().forward(x)

    with one_rank(), assumed("DistributedDataParallel keeps the module whose forward is running in _active_ddp_module"):
        parallel = torch.nn.parallel.DistributedDataParallel(Asking(2, 2))
        parallel(torch.ones(2))
        assert seen == [True]
        assert not inside_data_parallel()


def test_41_modules_are_placed_by_functions_that_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[Tensor] = []

    class Placed(Exception):
        pass

    def noting(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        placed.append(tensor)
        raise Placed

    with assumed("distribute_module places parameters with distribute_tensor of its own module"):
        api = importlib.import_module("torch.distributed.tensor._api")
        monkeypatch.setattr(api, "distribute_tensor", noting)
        module = torch.nn.Linear(2, 2)
        with one_rank():
            mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
            with pytest.raises(Placed):
                api.distribute_module(module, mesh)
        assert torch.equal(placed[0], module.weight)
    with assumed("PrepareModuleInput and PrepareModuleOutput place with methods of their own"):
        style = importlib.import_module("torch.distributed.tensor.parallel.style")
        assert callable(style.PrepareModuleInput._prepare_input_arg)
        assert callable(style.PrepareModuleOutput._prepare_out_fn)


def test_42_distributed_tensors_refuse_plain_ones_in_words_of_their_own() -> None:
    tensors = importlib.import_module("torch.distributed.tensor")
    with one_rank():
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        x = tensors.distribute_tensor(torch.arange(4.0), mesh, [tensors.Replicate()])
        with assumed("DTensor refuses plain tensors in these words, and takes them inside implicit_replication"):
            with pytest.raises(RuntimeError) as refused:
                x + torch.arange(4.0)
            assert is_mixed_with_distributed(refused.value)
            with constants_replicated():
                assert (x + torch.arange(4.0)).to_local().tolist() == [0, 2, 4, 6]
        with assumed("what a functional collective returns holds the tensor as elem"):
            functional = importlib.import_module("torch.distributed._functional_collectives")
            arriving = functional.all_reduce(torch.ones(2), "sum", mesh)
            assert isinstance(arriving.elem, Tensor)
            assert type(waited_for(arriving)) is Tensor
            assert waited_for(arriving).tolist() == [1, 1]


def test_43_below_autograd_a_leaf_may_be_written_to() -> None:
    class Again(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with assumed("_AutoDispatchBelowAutograd lets a leaf that requires grad be written to"):
        for mode in (contextlib.nullcontext(), Again()):
            leaf = torch.ones(2, requires_grad=True)
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
                leaf.copy_(torch.zeros(2))
            with mode, torch._C._AutoDispatchBelowAutograd():
                leaf.copy_(torch.zeros(2))
            assert leaf.is_leaf
            assert leaf.requires_grad
            assert leaf._version == 1
            assert leaf.tolist() == [0, 0]
