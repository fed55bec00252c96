"""The module that uses private parts of torch.distributed.

What it assumes has numbers 32, 39, 41 and 42 in torch_internals.py, and checks in assumptions/distributed.py.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed
from torch._ops import OpOverload
from torch.nn.parallel import DistributedDataParallel

if distributed.is_available():
    from torch._C._distributed_c10d import PythonCallbackWork
    from torch.distributed import distributed_c10d

# How a functional collective gets its group.
Group: TypeAlias = "str | distributed.ProcessGroup | torch.ScriptObject"


def work_that_calls(wait: Callable[[timedelta], bool]) -> distributed.Work:
    """A Work whose `wait(timeout)` is the function."""
    held: list[distributed.Work] = []

    def waited(timeout: timedelta) -> bool:
        held.clear()
        return wait(timeout)

    # Operators return the C++ object, of which Python makes torch's class again unless this object is still there. So
    # it stays until somebody waits, as torch keeps the functional collectives that nobody has waited for.
    held.append(_waiting_work()(waited))
    return held[0]


@functools.cache
def _waiting_work() -> Any:
    class WaitingWork(PythonCallbackWork):
        """torch completes the future of such a Work in `wait` and nowhere else: who asks for the future waits."""

        def get_future(self) -> Any:
            self.wait()
            return super().get_future()

    return WaitingWork


def collective_named(name: str) -> OpOverload | None:
    """An operator of torch.distributed; None for one that this torch lacks."""
    packet: Any = getattr(torch.ops.c10d, name, None)
    return None if packet is None else packet.default


def boxed_work(work: distributed.Work) -> Any:
    """A Work as operators return it."""
    return work.boxed()


def inside_data_parallel() -> bool:
    """Whether the forward of a DistributedDataParallel is running."""
    return DistributedDataParallel._active_ddp_module is not None


def process_group_of(boxed: distributed.ProcessGroup | torch.ScriptObject) -> distributed.ProcessGroup:
    """The process group in an operator's argument."""
    return boxed if isinstance(boxed, distributed.ProcessGroup) else distributed.ProcessGroup.unbox(boxed)


def process_group_named(group: Group) -> distributed.ProcessGroup:
    """The process group that a functional collective gets, by name or as it is."""
    c10d: Any = distributed_c10d
    return c10d._resolve_process_group(group) if isinstance(group, str) else process_group_of(group)


def waited_for(tensor: Tensor) -> Tensor:
    """A tensor that has arrived, in place of torch's wrapper around one that may not have."""
    if getattr(tensor, "elem", None) is None:
        return tensor
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return waited


def placing_module() -> Any:
    """The module whose `distribute_tensor` places parameters and buffers that a module's `partition_fn` leaves."""
    return importlib.import_module("torch.distributed.tensor._api")


# The methods of styles that place one input, and all outputs.
PREPARING = (("PrepareModuleInput", "_prepare_input_arg"), ("PrepareModuleOutput", "_prepare_out_fn"))


def is_mixed_with_distributed(error: RuntimeError) -> bool:
    """Whether DTensor has refused to compute with a plain tensor, of which it cannot know what other ranks have."""
    return "got mixed torch.Tensor and DTensor" in str(error)


def is_refused_by_all_ranks(error: RuntimeError) -> bool:
    """Whether DTensor has refused an operator for how its operands are placed, before any rank computed a part of it.

    What a rank's own part is refused for, such as having no elements, the other ranks do not know of.
    """
    return any(text in str(error) for text in ("Sharding propagation failed", "does not have a sharding strategy"))


def constants_replicated() -> AbstractContextManager[None]:
    """Inside, DTensor takes plain tensors for tensors that all ranks have."""
    experimental: Any = importlib.import_module("torch.distributed.tensor.experimental")
    scope: AbstractContextManager[None] = experimental.implicit_replication()
    return scope
