"""Kernels of torch's `c10d` operators, and replacements for the ProcessGroup methods with nested lists of tensors.

torch.distributed's functions call methods of a ProcessGroup, which call `c10d` operators with lists of tensors. The
dispatcher finds a masked tensor in a list, so a kernel at PreDispatch gets the call, like every other operator's, even
if DDP makes it in C++. The dispatcher does not search lists of lists, such as the outputs of all_gather and gather and
the inputs of reduce_scatter and scatter. If only those are masked, the replaced method of the group handles the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch._ops import OpOverload

from masked_dispatch.dispatch.kernel_table import Kernel, kernel_table
from masked_dispatch.dispatch.run_rule import PLAIN, SPARSE, has_masked, storage_among
from masked_dispatch.distributed import collectives, point_to_point
from masked_dispatch.distributed.calls import Call, Finish
from masked_dispatch.distributed.sparse_calls import SparseCall
from masked_dispatch.distributed.works import work_for
from masked_dispatch.distributed_internals import boxed_work, collective_named, process_group_of
from masked_dispatch.replacements import replace
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import DispatchKeySet, redispatch, schema_of

Collective = Callable[..., Finish]

# Each operator maps to its collective, and to the index of the argument that it returns beside a Work, or None.
SERVED: dict[str, tuple[Collective, int | None]] = {
    "allreduce_": (collectives.all_reduce, 0),
    "allreduce_coalesced_": (collectives.all_reduce_coalesced, None),
    "reduce_": (collectives.reduce, None),
    "reduce_scatter_": (collectives.reduce_scatter, 0),
    "_reduce_scatter_base_": (collectives.reduce_scatter_tensor, 0),
    "reduce_scatter_tensor_coalesced_": (collectives.reduce_scatter_tensor_coalesced, None),
    "broadcast_": (collectives.broadcast, 0),
    "allgather_": (collectives.all_gather, 0),
    "allgather_coalesced_": (collectives.all_gather_coalesced, None),
    "_allgather_base_": (collectives.all_gather_into_tensor, 0),
    "allgather_into_tensor_coalesced_": (collectives.all_gather_into_tensor_coalesced, None),
    "gather_": (collectives.gather, None),
    "gather_into_tensor_": (collectives.gather_into_tensor, 0),
    "scatter_": (collectives.scatter, 0),
    "alltoall_": (collectives.all_to_all, 0),
    "alltoall_base_": (collectives.all_to_all_single, None),
    "send": (point_to_point.send, None),
    "recv_": (point_to_point.recv, None),
    "recv_any_source_": (point_to_point.recv_any_source, None),
}

# These arguments do not affect the result: messages are asynchronous here, use the group's timeout, and each process
# has one tensor.
_NOT_PASSED_ON = ("async_op", "timeout", "sparse_indices", "root_tensor")


def collective_kernel(op: OpOverload, collective: Collective, returned: int | None) -> Kernel:
    """Return a kernel that starts the collective and returns a Work, whose `wait()` finishes it."""
    names = [argument.name for argument in schema_of(op).arguments]

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        storage = storage_among(given.values())
        if storage == PLAIN:
            return redispatch(op, keyset, args, kwargs)
        given["process_group"] = process_group_of(given["process_group"])
        if "reduce_op" in given:
            given["reduce_op"] = collectives.name_of(given["reduce_op"].op())
        passed_on = (given[n] for n in names if n in given and n not in _NOT_PASSED_ON)
        work = boxed_work(started_for(storage, collective, *passed_on))
        return work if returned is None else (args[returned], work)

    return kernel


def started(collective: Collective, *args: object) -> distributed.Work:
    """Start the collective for the storage of its tensors."""
    return started_for(storage_among(args), collective, *args)


def started_for(storage: int, collective: Collective, *args: object) -> distributed.Work:
    """Start the collective without autograd: torch's collectives are not differentiable either."""
    with torch.no_grad():
        if storage == SPARSE:
            return work_for(collective(SparseCall, *map(complex_again, args)))
        return work_for(collective(Call, *args))


def complex_again(argument: Any) -> Any:
    """Undo torch.distributed's real views of complex sparse tensors, in lists too."""
    if isinstance(argument, (list, tuple)):
        return [complex_again(item) for item in argument]
    if isinstance(argument, SparseMaskedTensor) and argument._real_view_of is not None:
        return argument._real_view_of
    return argument


# Each method of a process group maps to its collective, and to a function that picks the arguments from its options.
_LISTS_OF_LISTS: dict[str, tuple[Collective, Callable[[Any], tuple[object, ...]]]] = {
    "allgather": (collectives.all_gather, lambda options: ()),
    "gather": (collectives.gather, lambda options: (options.rootRank,)),
    "scatter": (collectives.scatter, lambda options: (options.rootRank,)),
    "reduce_scatter": (collectives.reduce_scatter, lambda options: (collectives.name_of(options.reduceOp.op),)),
}


def is_unseen(
    group: distributed.ProcessGroup, outputs: Sequence[Any], inputs: Sequence[Any], *options: Any, **named: Any
) -> bool:
    """Return whether only nested lists contain masked tensors."""
    seen = any(isinstance(tensor, MaskedTensor) for tensor in (*outputs, *inputs))
    return not seen and has_masked((outputs, inputs))


def of_lists(collective: Collective, chosen: Callable[[Any], tuple[object, ...]]) -> Callable[..., distributed.Work]:
    """Return the replacement for a process group's method, for nested lists of masked tensors beside plain tensors."""

    def start(
        method: Callable[..., Any],
        group: distributed.ProcessGroup,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        *options: Any,
        **named: Any,
    ) -> distributed.Work:
        (given,) = (*options, *named.values())
        return started(collective, outputs, inputs, group, *chosen(given))

    return start


def install() -> None:
    """The package calls this once, on import."""
    for name, (collective, returned) in SERVED.items():
        op = collective_named(name)
        if op is not None:
            kernel_table.put(op, collective_kernel(op, collective, returned))
    for name, (collective, chosen) in _LISTS_OF_LISTS.items():
        replace(distributed.ProcessGroup, name, of_lists(collective, chosen), is_unseen)
