"""torch.distributed's collectives (`c10d` operators) of masked tensors, and the kernels that receive its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch._ops import OpOverload
from torch.distributed import ProcessGroup, ReduceOp

from masked_dispatch.dispatch.kernel_table import Kernel, kernel_table
from masked_dispatch.dispatch.run_rule import PLAIN, SPARSE, has_masked, storage_among
from masked_dispatch.distributed import point_to_point
from masked_dispatch.distributed.agreement import described
from masked_dispatch.distributed.calls import Call, Counted, Finish, work_for
from masked_dispatch.distributed.records import problem_of_reduction
from masked_dispatch.distributed.sparse_calls import SparseCall
from masked_dispatch.distributed_internals import boxed_work, collective_named, process_group_of
from masked_dispatch.replacements import replace
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import DispatchKeySet, redispatch, schema_of
from op_registry import MaskedSemanticsError
from op_registry.records.dense import map_tensors

Storage = type[Call]


def name_of(op: Any) -> str:
    """Return a reduction's name in lower case; torch passes its number to operators."""
    return ReduceOp.RedOpType(int(op)).name.lower()


def after_all(finishes: Sequence[Finish]) -> Finish:
    def finish() -> None:
        for one in finishes:
            one()

    return finish


def one_by_one(collective: Callable[..., Finish]) -> Callable[..., Finish]:
    """Turn a collective of a one-tensor list into one of several tensors."""
    return lambda of, tensors, *options: after_all([collective(of, [tensor], *options) for tensor in tensors])


def pair_by_pair(collective: Callable[..., Finish]) -> Callable[..., Finish]:
    """Turn a collective of one output and one input into one of several outputs and inputs."""

    def coalesced(of: Storage, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *options: object) -> Finish:
        return after_all([collective(of, *pair, *options) for pair in zip(outputs, inputs, strict=True)])

    return coalesced


# -------------------------------------------------------------------------------------------------------- reductions


def all_reduce(
    of: Storage, tensors: Sequence[Tensor], group: ProcessGroup, op: str, counted: Counted | None = None
) -> Finish:
    (tensor,) = tensors
    problem = problem_of_reduction(op, tensor.dtype)
    call = of(group, f"all_reduce {op.upper()}", tensors, tensors, problem=problem, one_mask=True)
    return call.reduces(tensor, op, counted=counted)


all_reduce_coalesced = one_by_one(all_reduce)


def reduce(of: Storage, tensors: Sequence[Tensor], group: ProcessGroup, op: str, root: int) -> Finish:
    (tensor,) = tensors
    name, problem = f"reduce {op.upper()} to rank {root} of the group", problem_of_reduction(op, tensor.dtype)
    return of(group, name, tensors, tensors, problem=problem, one_mask=True).reduces(tensor, op, root)


def reduce_scatter(
    of: Storage, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], group: ProcessGroup, op: str
) -> Finish:
    (output,), (parts,) = outputs, inputs
    problem = problem_of_list(parts, group.size(), output)
    return _reduce_scatter(of, "reduce_scatter", output, parts, group, op, problem)


def reduce_scatter_tensor(
    of: Storage, output: Tensor, tensor: Tensor, group: ProcessGroup, op: str, counted: Counted | None = None
) -> Finish:
    problem = of.problem_of_rows("the input", tensor, "the output", output, group.size())
    parts = [tensor]
    if problem is None:
        parts, problem = divided(tensor, lambda: of.parts(tensor, output, group.size()))
    return _reduce_scatter(of, "reduce_scatter_tensor", output, parts, group, op, problem, counted)


reduce_scatter_tensor_coalesced = pair_by_pair(reduce_scatter_tensor)


def _reduce_scatter(
    of: Storage,
    name: str,
    output: Tensor,
    parts: Sequence[Tensor],
    group: ProcessGroup,
    op: str,
    problem: str | None,
    counted: Counted | None = None,
) -> Finish:
    shown = [described(part) for part in parts[:1]]
    problem = problem_of_reduction(op, output.dtype) or problem
    call = of(group, f"{name} {op.upper()}", parts, [output], shown=shown, problem=problem)
    return call.reduces(output, op, scattered=True, counted=counted)


# --------------------------------------------------------------------------------------------------------- movements


def broadcast(of: Storage, tensors: Sequence[Tensor], group: ProcessGroup, root: int) -> Finish:
    call = of(group, f"broadcast from rank {root} of the group", tensors, tensors, root=root)
    return call.writes(tensors if call.receives(root) else [], call.broadcast(root))


def all_gather(
    of: Storage, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], group: ProcessGroup
) -> Finish:
    (targets,), (tensor,) = outputs, inputs
    call = of(group, "all_gather", inputs, targets, problem=problem_of_list(targets, group.size(), tensor), apart=True)
    return call.writes(targets, call.gathered())


def all_gather_coalesced(
    of: Storage, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], group: ProcessGroup
) -> Finish:
    """Gather several inputs: each rank's list of outputs has one output for each input."""
    pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
    return after_all([all_gather(of, [list(targets)], [tensor], group) for targets, tensor in pairs])


def all_gather_into_tensor(of: Storage, output: Tensor, tensor: Tensor, group: ProcessGroup) -> Finish:
    problem = of.problem_of_rows("the output", output, "the input", tensor, group.size())
    call = of(group, "all_gather_into_tensor", [tensor], [output], problem=problem, apart=True)
    return call.writes_whole(output, call.gathered())


all_gather_into_tensor_coalesced = pair_by_pair(all_gather_into_tensor)


def gather(
    of: Storage, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], group: ProcessGroup, root: int
) -> Finish:
    (tensor,), here = inputs, group.rank() == root
    targets = list(outputs[0]) if here else []
    problem = problem_of_list(targets, group.size(), tensor) if here else None
    call = of(group, f"gather to rank {root} of the group", inputs, targets, problem=problem, apart=True)
    return call.writes(targets, call.gathered(root))


def gather_into_tensor(of: Storage, output: Tensor, tensor: Tensor, group: ProcessGroup, root: int) -> Finish:
    """Gather into the root's output; on other ranks, torch passes a placeholder as the output."""
    here = group.rank() == root
    problem = of.problem_of_rows("the output", output, "the input", tensor, group.size()) if here else None
    name = f"gather_into_tensor to rank {root} of the group"
    call = of(group, name, [tensor], [output] if here else [], problem=problem, apart=True)
    return call.writes_whole(output, call.gathered(root))


def scatter(
    of: Storage, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], group: ProcessGroup, root: int
) -> Finish:
    (output,), here = outputs, group.rank() == root
    parts = list(inputs[0]) if here else []
    problem = problem_of_list(parts, group.size(), output) if here else None
    name = f"scatter from rank {root} of the group"
    call = of(group, name, parts, outputs, shown=[described(output)], problem=problem, root=root)
    return call.writes(outputs, call.scattered(root))


def all_to_all(of: Storage, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: ProcessGroup) -> Finish:
    problem = problem_of_numbers(outputs, inputs, group.size())
    call = of(group, "all_to_all", inputs, outputs, problem=problem, pairwise=True)
    return call.writes(outputs, call.exchanged())


def all_to_all_single(
    of: Storage,
    output: Tensor,
    tensor: Tensor,
    group: ProcessGroup,
    received: Sequence[int] = (),
    sent: Sequence[int] = (),
) -> Finish:
    ranks = group.size()
    problem = problem_of_splits("output", output, received, ranks) or problem_of_splits("input", tensor, sent, ranks)
    outputs = [output] if problem else of.rows(output, received, ranks)
    inputs = [tensor]
    if problem is None:
        inputs, problem = divided(tensor, lambda: of.rows(tensor, sent, ranks))
    call = of(group, "all_to_all_single", inputs, outputs, problem=problem, pairwise=True)
    return call.writes_whole(output, call.exchanged())


def divided(tensor: Tensor, divide: Callable[[], list[Tensor]]) -> tuple[list[Tensor], str | None]:
    """Return the parts of a tensor, or the reason why it has none: rows that number the positions of a sample."""
    try:
        return divide(), None
    except MaskedSemanticsError as reason:
        return [tensor], str(reason)


def problem_of_list(parts: Sequence[Tensor], ranks: int, like: Tensor) -> str | None:
    """Say why a list does not hold one matching tensor for each rank; None if it does."""
    if len(parts) != ranks:
        return f"it needs a list of {ranks} tensors, one for each rank; got {len(parts)}"
    for number, part in enumerate(parts):
        if (part.dtype, part.shape) != (like.dtype, like.shape):
            return f"tensor {number} of the list has {described(part)}, and the other argument {described(like)}"
    return None


def problem_of_numbers(outputs: Sequence[Tensor], inputs: Sequence[Tensor], ranks: int) -> str | None:
    """Say why an all_to_all lacks one input and one output for each rank; None if it has them."""
    if len(inputs) == len(outputs) == ranks:
        return None
    return f"it needs {ranks} inputs and outputs, one for each rank; got {len(inputs)} and {len(outputs)}"


def problem_of_splits(name: str, tensor: Tensor, splits: Sequence[int], ranks: int) -> str | None:
    """Say why the splits do not divide a tensor between the ranks; None if they do."""
    rows = tensor.shape[0] if tensor.ndim else 0
    if splits and (len(splits) != ranks or sum(splits) != rows):
        return f"the {name} of shape {tuple(tensor.shape)} is split into {list(splits)} rows, for {ranks} ranks"
    if not splits and rows % ranks:
        return f"the {name} of shape {tuple(tensor.shape)} has {rows} rows, which {ranks} ranks do not divide"
    return None


# ---------------------------------- kernels, and replacements for the ProcessGroup methods with nested lists of tensors

Collective = Callable[..., Finish]

# Each operator maps to its collective, and to the index of the argument that it returns beside a Work, or None.
SERVED: dict[str, tuple[Collective, int | None]] = {
    "allreduce_": (all_reduce, 0),
    "allreduce_coalesced_": (all_reduce_coalesced, None),
    "reduce_": (reduce, None),
    "reduce_scatter_": (reduce_scatter, 0),
    "_reduce_scatter_base_": (reduce_scatter_tensor, 0),
    "reduce_scatter_tensor_coalesced_": (reduce_scatter_tensor_coalesced, None),
    "broadcast_": (broadcast, 0),
    "allgather_": (all_gather, 0),
    "allgather_coalesced_": (all_gather_coalesced, None),
    "_allgather_base_": (all_gather_into_tensor, 0),
    "allgather_into_tensor_coalesced_": (all_gather_into_tensor_coalesced, None),
    "gather_": (gather, None),
    "gather_into_tensor_": (gather_into_tensor, 0),
    "scatter_": (scatter, 0),
    "alltoall_": (all_to_all, 0),
    "alltoall_base_": (all_to_all_single, None),
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
            given["reduce_op"] = name_of(given["reduce_op"].op())
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
            return work_for(collective(SparseCall, *map_tensors(complex_again, args, SparseMaskedTensor)))
        return work_for(collective(Call, *args))


def complex_again(tensor: SparseMaskedTensor) -> SparseMaskedTensor:
    """Undo torch.distributed's real view of a complex sparse tensor."""
    return tensor if tensor._real_view_of is None else tensor._real_view_of


# Each method of a process group maps to its collective, and to a function that picks the arguments from its options.
_LISTS_OF_LISTS: dict[str, tuple[Collective, Callable[[Any], tuple[object, ...]]]] = {
    "allgather": (all_gather, lambda options: ()),
    "gather": (gather, lambda options: (options.rootRank,)),
    "scatter": (scatter, lambda options: (options.rootRank,)),
    "reduce_scatter": (reduce_scatter, lambda options: (name_of(options.reduceOp.op),)),
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
