"""torch.distributed's collectives (`c10d` operators) of masked tensors.

Each function has the arguments of one operator behind the kind of call that its tensors' storage takes, `Call` or
`SparseCall`. It agrees with the other ranks on the tensors, starts the messages, and returns a function (`Finish`) that
waits for the messages and writes the results.

Law: reductions combine the valid contributions, and an element to which no rank contributes is invalid; all other
collectives move the mask with the data. A plain tensor beside masked ones is valid everywhere, and a plain output is
updated: it keeps its own values where the result is invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from masked_dispatch.distributed.agreement import described
from masked_dispatch.distributed.calls import Call, Counted, Finish
from masked_dispatch.distributed.records import problem_of_reduction
from op_registry import MaskedSemanticsError

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
    return call.writes([] if call.rank == root else tensors, call.broadcast(root))


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
