"""What masked_dispatch/distributed_internals.py assumes of torch, by the numbers in torch_internals.py.

Nothing where torch was built without torch.distributed or without gloo.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from masked_dispatch.assumptions.checks import Check, assumed, assumption, expect, expect_equal, raises, replaced
from masked_dispatch.distributed.collectives import SERVED
from masked_dispatch.distributed_internals import (
    boxed_work,
    collective_named,
    constants_replicated,
    inside_data_parallel,
    is_mixed_with_distributed,
    process_group_named,
    process_group_of,
    waited_for,
    work_that_calls,
)

# As text, because their import takes as long as that of torch.
FUNCTIONAL = "torch.distributed._functional_collectives"


def assumption_about_groups(number: int, what: str = "") -> Callable[[Check], Check]:
    """Decorator: register a check where this torch has what it starts."""
    available = distributed.is_available() and distributed.is_gloo_available()
    return assumption(number, what) if available else lambda check: check


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """The default process group, of this process alone."""
    c10d: Any = distributed
    made = c10d.PrefixStore("one rank", c10d.HashStore())
    distributed.init_process_group("gloo", store=made, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@assumption_about_groups(32)
def collectives_get_script_objects() -> None:
    received: list[Any] = []
    waited: list[Any] = []

    def wait(timeout: timedelta) -> bool:
        waited.append(timeout)
        return True

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.c10d.allreduce_.default:
                received.extend(args)
                return args[0], boxed_work(work_that_calls(wait))
            return func(*args, **(kwargs or {}))

    try:
        with one_rank():
            group: Any = distributed.group.WORLD
            with assumed("operators of torch.distributed get script objects, which unbox, and return a Work of ours"):
                with Noting():
                    work: Any = distributed.all_reduce(torch.ones(2), distributed.ReduceOp.AVG, async_op=True)
                expect(process_group_of(received[1]) is group, received)
                expect(process_group_named(group.group_name) is group, group.group_name)
                expect_equal(distributed.ReduceOp.RedOpType(received[2].op()), distributed.ReduceOp.AVG)
                expect_equal(waited, [])
                expect(work is not None)
                expect(not distributed.Work.get_future(work).done())
                expect(work.get_future().done())
                expect(work.wait())
                expect_equal(len(waited), 2)
            with assumed("a custom operator wraps what a functional collective returns"):
                functional = importlib.import_module(FUNCTIONAL)
                result = torch.ops._c10d_functional._wrap_tensor_autograd(torch.ones(2))
                expect(type(result) is functional.AsyncCollectiveTensor, type(result))
    finally:
        # The class above is garbage in a cycle. If a forked process collected the group with it, it would wait for the
        # group's threads, which it does not have.
        received.clear()
        gc.collect()


@assumption_about_groups(46, "torch.distributed's functions call operators of torch.ops.c10d by these names")
def collectives_are_operators() -> None:
    missing = {name for name in SERVED if collective_named(name) is None}
    expect_equal(missing, set() if hasattr(distributed, "gather_single") else {"gather_into_tensor_"})


@assumption_about_groups(39, "DistributedDataParallel keeps the module whose forward is running in _active_ddp_module")
def data_parallel_says_that_its_forward_is_running() -> None:
    seen: list[bool] = []

    class Asking(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(inside_data_parallel())
            return super().forward(x)

    with one_rank():
        parallel = torch.nn.parallel.DistributedDataParallel(Asking(2, 2))
        parallel(torch.ones(2))
        expect_equal(seen, [True])
        expect(not inside_data_parallel())


@assumption_about_groups(41)
def modules_are_placed_by_functions_that_are_looked_up() -> None:
    placed: list[Tensor] = []

    class Placed(Exception):
        pass

    def noting(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        placed.append(tensor)
        raise Placed

    with assumed("distribute_module places parameters with distribute_tensor of its own module"):
        api = importlib.import_module("torch.distributed.tensor._api")
        module = torch.nn.Linear(2, 2)
        with one_rank(), replaced(api, "distribute_tensor", noting):
            mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
            with raises(Placed):
                api.distribute_module(module, mesh)
        expect(torch.equal(placed[0], module.weight), placed)
    with assumed("PrepareModuleInput and PrepareModuleOutput place with methods of their own"):
        style = importlib.import_module("torch.distributed.tensor.parallel.style")
        expect(callable(style.PrepareModuleInput._prepare_input_arg))
        expect(callable(style.PrepareModuleOutput._prepare_out_fn))


@assumption_about_groups(42)
def distributed_tensors_refuse_plain_ones_in_words_of_their_own() -> None:
    tensors = importlib.import_module("torch.distributed.tensor")
    with one_rank():
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        x = tensors.distribute_tensor(torch.arange(4.0), mesh, [tensors.Replicate()])
        with assumed("DTensor refuses plain tensors in these words, and takes them inside implicit_replication"):
            with raises(RuntimeError) as refused:
                x + torch.arange(4.0)
            expect(is_mixed_with_distributed(refused.error), refused.error)
            with constants_replicated():
                expect_equal((x + torch.arange(4.0)).to_local().tolist(), [0, 2, 4, 6])
        with assumed("what a functional collective returns holds the tensor as elem"):
            functional = importlib.import_module(FUNCTIONAL)
            arriving = functional.all_reduce(torch.ones(2), "sum", mesh)
            expect(isinstance(arriving.elem, Tensor), arriving.elem)
            expect(type(waited_for(arriving)) is Tensor, type(waited_for(arriving)))
            expect_equal(waited_for(arriving).tolist(), [1, 1])
