"""This module uses private parts of torch.distributed.

torch_internals.py lists its assumptions under 32, 39, 41 and 42, and assumptions/distributed.py checks them.
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

# The types in which a functional collective receives its group.
Group: TypeAlias = "str | distributed.ProcessGroup | torch.ScriptObject"


def work_that_calls(wait: Callable[[timedelta], bool]) -> distributed.Work:
    """Return a Work whose `wait(timeout)` calls the function."""
    held: list[distributed.Work] = []

    def waited(timeout: timedelta) -> bool:
        held.clear()
        return wait(timeout)

    # Operators return the C++ object. Python wraps it in torch's own class, unless our Python object is still alive. So
    # `held` keeps our object alive until the first wait, just as torch keeps functional collectives alive until then.
    held.append(_waiting_work()(waited))
    return held[0]


@functools.cache
def _waiting_work() -> Any:
    class WaitingWork(PythonCallbackWork):
        """A Work whose `get_future` waits first, because torch completes the future of such a Work only in `wait`."""

        def get_future(self) -> Any:
            self.wait()
            return super().get_future()

    return WaitingWork


def collective_named(name: str) -> OpOverload | None:
    """Return an operator of torch.distributed; None if this version of torch lacks it."""
    packet: Any = getattr(torch.ops.c10d, name, None)
    return None if packet is None else packet.default


def boxed_work(work: distributed.Work) -> Any:
    """Box a Work, as operators return it."""
    return work.boxed()


def inside_data_parallel() -> bool:
    """Return whether a forward of DistributedDataParallel is running."""
    return DistributedDataParallel._active_ddp_module is not None


def process_group_of(boxed: distributed.ProcessGroup | torch.ScriptObject) -> distributed.ProcessGroup:
    """Unbox the process group in an operator's argument."""
    return boxed if isinstance(boxed, distributed.ProcessGroup) else distributed.ProcessGroup.unbox(boxed)


def process_group_named(group: Group) -> distributed.ProcessGroup:
    """Return the process group of a functional collective, which takes it by name or as an object."""
    c10d: Any = distributed_c10d
    return c10d._resolve_process_group(group) if isinstance(group, str) else process_group_of(group)


def waited_for(tensor: Tensor) -> Tensor:
    """Wait for a tensor that may be torch's wrapper of a pending result, and return it without the wrapper."""
    if getattr(tensor, "elem", None) is None:
        return tensor
    return torch.ops._c10d_functional.wait_tensor(tensor)


def placing_module() -> Any:
    """Return the module whose `distribute_tensor` places parameters and buffers that `partition_fn` has not placed."""
    return importlib.import_module("torch.distributed.tensor._api")


# These methods of styles place one input, and all outputs.
PREPARING = (("PrepareModuleInput", "_prepare_input_arg"), ("PrepareModuleOutput", "_prepare_out_fn"))


def is_mixed_with_distributed(error: RuntimeError) -> bool:
    """Return whether DTensor refused a plain tensor, because other ranks may hold different values."""
    return "got mixed torch.Tensor and DTensor" in str(error)


def is_refused_by_all_ranks(error: RuntimeError) -> bool:
    """Return whether DTensor refused the placements of an operator: then all ranks raise, before any of them computes.

    An error about one rank's own part, such as an empty part, is only raised on that rank.
    """
    return any(text in str(error) for text in ("Sharding propagation failed", "does not have a sharding strategy"))


def constants_replicated() -> AbstractContextManager[None]:
    """Return a context in which DTensor treats plain tensors as replicated on all ranks."""
    experimental: Any = importlib.import_module("torch.distributed.tensor.experimental")
    return experimental.implicit_replication()
