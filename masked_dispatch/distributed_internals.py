"""The module that uses private parts of torch.distributed (checked on torch 2.11–2.13).

What it assumes has numbers 32 and 39 in torch_internals.py, and tests in tests/house/test_torch_assumptions.py.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

if distributed.is_available():
    from torch._C._distributed_c10d import PythonCallbackWork
    from torch.distributed import distributed_c10d

# How a functional collective gets its group.
Group: TypeAlias = "str | distributed.ProcessGroup | torch.ScriptObject"


def work_that_calls(wait: Callable[[timedelta], bool]) -> distributed.Work:
    """A Work whose `wait(timeout)` is the function."""
    return PythonCallbackWork(wait)


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
