"""torch.distributed's collectives (`c10d` operators) of masked tensors.

Each function has the arguments of one operator. It agrees with the other ranks on the tensors, starts the messages,
and returns a function (`Finish`) that waits for the messages and writes the results.

Law: reductions combine the valid contributions, and an element to which no rank contributes is invalid; all other
collectives move the mask with the data. A plain tensor beside masked ones is valid everywhere, and a plain output is
updated: it keeps its own values where the result is invalid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from masked_dispatch.distributed.agreement import Description, agree, described
from masked_dispatch.distributed.fields import digest_of_mask, packed_size
from masked_dispatch.distributed.operands import (
    is_partial,
    owns_memory,
    problem_of_outputs,
    record_of,
    write,
)
from masked_dispatch.distributed.records import (
    Masks,
    Moved,
    exchanged,
    joined,
    joined_masks,
    moved,
    problem_of_reduction,
    reduced,
)
from masked_dispatch.distributed.transport import Eager
from op_registry.records.dense import Dense

Finish = Callable[[], None]


def name_of(op: Any) -> str:
    """Return a reduction's name in lower case; torch passes its number to operators."""
    return ReduceOp.RedOpType(int(op)).name.lower()


def start(
    group: ProcessGroup,
    call: str,
    sent: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    shown: Sequence[str] | None = None,
    problem: str | None = None,
    pairwise: bool = False,
    mask: Tensor | None = None,
) -> list[Description]:
    """Agree with the other ranks. `shown` describes what must be equal on all ranks, by default the sent tensors.

    pairwise  compare only each sent tensor with the one that its receiver expects
    mask      the validity of the reduced tensor; if it is equal on all ranks, they need not send it
    """
    problem = problem or problem_of_outputs(outputs)
    device = (*sent, *outputs)[0].device
    texts = tuple([described(tensor) for tensor in sent] if shown is None else shown)
    expected = tuple(described(tensor) for tensor in outputs) if pairwise else None
    mine = Description(call, texts, is_partial(sent), problem, expected, mask=digest_of_mask(mask))
    return agree(group, mine, device)


def any_partial(everyone: Sequence[Description]) -> bool:
    return any(description.partial for description in everyone)


def masks_to_reduce(everyone: Sequence[Description]) -> Masks:
    """Return what the descriptions say about the masks, before any rank sends its mask."""
    if not any_partial(everyone):
        return Masks.NONE
    digests = {description.mask for description in everyone}
    return Masks.EQUAL if len(digests) == 1 and None not in digests else Masks.ANY


def reducing_problem(op: str, tensor: Tensor) -> str | None:
    return problem_of_reduction(op, tensor.dtype)


def after_all(finishes: Sequence[Finish]) -> Finish:
    def finish() -> None:
        for one in finishes:
            one()

    return finish


def one_by_one(collective: Callable[..., Finish]) -> Callable[..., Finish]:
    """Turn a collective of a one-tensor list into one of several tensors."""
    return lambda tensors, *options: after_all([collective([tensor], *options) for tensor in tensors])


def pair_by_pair(collective: Callable[..., Finish]) -> Callable[..., Finish]:
    """Turn a collective of one output and one input into one of several outputs and inputs."""

    def coalesced(outputs: Sequence[Tensor], inputs: Sequence[Tensor], *options: object) -> Finish:
        return after_all([collective(*pair, *options) for pair in zip(outputs, inputs, strict=True)])

    return coalesced


def gathered_one_by_one(all_gather: Callable[..., Finish]) -> Callable[..., Finish]:
    """Turn all_gather into one of several inputs: each rank's list of outputs has one output for each input."""

    def coalesced(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], group: ProcessGroup) -> Finish:
        of_inputs = zip(*outputs, strict=True)
        pairs = zip(of_inputs, inputs, strict=True)
        return after_all([all_gather([list(targets)], [tensor], group) for targets, tensor in pairs])

    return coalesced


def broadcast(tensors: Sequence[Tensor], group: ProcessGroup, root: int) -> Finish:
    (tensor,) = tensors
    everyone = start(group, f"broadcast from rank {root} of the group", tensors, tensors)
    transport, mine = Eager(group), group.rank() == root
    record = record_of(tensor)

    def send(data: Tensor) -> Any:
        return transport.broadcast(data if mine else torch.empty_like(data), root)

    arriving = moved([record], everyone[root].partial, send)

    def finish() -> None:
        arrived = arriving.split([tensor.shape])
        if not mine:
            write(tensor, arrived[0])

    return finish


def all_reduce(tensors: Sequence[Tensor], group: ProcessGroup, op: str) -> Finish:
    (tensor,) = tensors
    record, call, problem = record_of(tensor), f"all_reduce {op.upper()}", reducing_problem(op, tensor)
    everyone = start(group, call, tensors, tensors, problem=problem, mask=record.validity)
    transport, masks = Eager(group), masks_to_reduce(everyone)
    total = reduced([record], op, transport.ranks, masks, transport.all_reduce, overwritten=owns_memory(tensor))
    return lambda: write(tensor, total())


all_reduce_coalesced = one_by_one(all_reduce)


def reduce(tensors: Sequence[Tensor], group: ProcessGroup, op: str, root: int) -> Finish:
    (tensor,) = tensors
    call = f"reduce {op.upper()} to rank {root} of the group"
    record, problem = record_of(tensor), reducing_problem(op, tensor)
    everyone = start(group, call, tensors, tensors, problem=problem, mask=record.validity)
    transport = Eager(group)
    send = functools.partial(transport.reduce, root=root)
    total = reduced([record], op, transport.ranks, masks_to_reduce(everyone), send)

    def finish() -> None:
        result = total()
        if group.rank() == root:
            write(tensor, result)

    return finish


def reduce_scatter(
    outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], group: ProcessGroup, op: str
) -> Finish:
    (output,), (parts,) = outputs, inputs
    problem = reducing_problem(op, output) or problem_of_list(parts, group.size(), output)
    return _reduce_scatter("reduce_scatter", output, list(parts), group, op, problem)


def reduce_scatter_tensor(output: Tensor, tensor: Tensor, group: ProcessGroup, op: str) -> Finish:
    ranks, problem = group.size(), reducing_problem(op, output)
    parts = [tensor]
    if tensor.numel() != ranks * output.numel():
        problem = problem or sizes_do_not_fit("the input", tensor, "the output", output, ranks)
    elif ranks > 1:
        parts = list(tensor.contiguous().view(ranks, *output.shape))
    return _reduce_scatter("reduce_scatter_tensor", output, parts, group, op, problem)


reduce_scatter_tensor_coalesced = pair_by_pair(reduce_scatter_tensor)


def _reduce_scatter(
    call: str, output: Tensor, parts: Sequence[Tensor], group: ProcessGroup, op: str, problem: str | None
) -> Finish:
    shown = [described(part) for part in parts[:1]]
    everyone = start(group, f"{call} {op.upper()}", parts, [output], shown=shown, problem=problem)
    transport = Eager(group)
    records = [record_of(part) for part in parts]
    total = reduced(records, op, transport.ranks, masks_to_reduce(everyone), transport.reduce_scatter)
    return lambda: write(output, total())


def all_gather(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], group: ProcessGroup) -> Finish:
    (targets,), (tensor,) = outputs, inputs
    problem = problem_of_list(targets, group.size(), tensor)
    everyone = start(group, "all_gather", inputs, targets, problem=problem)
    return _all_gather(tensor, list(targets), group, any_partial(everyone))


def all_gather_into_tensor(output: Tensor, tensor: Tensor, group: ProcessGroup) -> Finish:
    ranks = group.size()
    fits = output.numel() == ranks * tensor.numel()
    problem = None if fits else sizes_do_not_fit("the output", output, "the input", tensor, ranks)
    everyone = start(group, "all_gather_into_tensor", [tensor], [output], problem=problem)
    arriving = moved([record_of(tensor)], any_partial(everyone), Eager(group).all_gather)
    return lambda: write(output, stacked(_split_by_rank(arriving, tensor.shape, ranks)))


all_gather_into_tensor_coalesced = pair_by_pair(all_gather_into_tensor)
all_gather_coalesced = gathered_one_by_one(all_gather)


def _all_gather(tensor: Tensor, targets: Sequence[Tensor], group: ProcessGroup, partial: bool) -> Finish:
    arriving = moved([record_of(tensor)], partial, Eager(group).all_gather)
    return lambda: write_each(targets, _split_by_rank(arriving, tensor.shape, group.size()))


def _split_by_rank(arriving: Moved, shape: torch.Size, ranks: int) -> list[Any]:
    return arriving.split([shape] * ranks)


def gather(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], group: ProcessGroup, root: int) -> Finish:
    (tensor,) = inputs
    targets = list(outputs[0]) if group.rank() == root else []
    problem = problem_of_list(targets, group.size(), tensor) if group.rank() == root else None
    everyone = start(group, f"gather to rank {root} of the group", inputs, targets, problem=problem)
    send = functools.partial(Eager(group).gather, root=root)
    arriving = moved([record_of(tensor)], any_partial(everyone), send)

    def finish() -> None:
        arrived = _split_by_rank(arriving, tensor.shape, group.size() if targets else 0)
        write_each(targets, arrived)

    return finish


def gather_into_tensor(output: Tensor, tensor: Tensor, group: ProcessGroup, root: int) -> Finish:
    """Gather into the root's output; on other ranks, torch passes a placeholder as the output."""
    ranks, here = group.size(), group.rank() == root
    fits = not here or output.numel() == ranks * tensor.numel()
    problem = None if fits else sizes_do_not_fit("the output", output, "the input", tensor, ranks)
    call = f"gather_into_tensor to rank {root} of the group"
    everyone = start(group, call, [tensor], [output] if here else [], problem=problem)
    send = functools.partial(Eager(group).gather, root=root)
    arriving = moved([record_of(tensor)], any_partial(everyone), send)

    def finish() -> None:
        arrived = _split_by_rank(arriving, tensor.shape, ranks if here else 0)
        if here:
            write(output, stacked(arrived))

    return finish


def scatter(outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], group: ProcessGroup, root: int) -> Finish:
    (output,) = outputs
    parts = list(inputs[0]) if group.rank() == root else []
    problem = problem_of_list(parts, group.size(), output) if group.rank() == root else None
    call = f"scatter from rank {root} of the group"
    everyone = start(group, call, parts, outputs, shown=[described(output)], problem=problem)
    transport = Eager(group)
    data = torch.empty(output.numel(), dtype=output.dtype, device=output.device)
    masks = torch.empty(packed_size(output.numel(), 1), dtype=torch.uint8, device=output.device)
    records = [record_of(part) for part in parts]

    def sent(buffer: Tensor, join: Callable[[], Tensor]) -> Any:
        return transport.scatter(join() if parts else buffer, buffer, root)

    arriving = Moved(
        sent(data, lambda: joined([record.data.reshape(-1) for record in records])),
        sent(masks, lambda: joined_masks(records)) if everyone[root].partial else None,
    )
    return lambda: write(output, arriving.split([output.shape])[0])


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: ProcessGroup) -> Finish:
    problem = problem_of_numbers(outputs, inputs, group.size())
    return _all_to_all("all_to_all", list(outputs), list(inputs), group, problem)


def all_to_all_single(
    output: Tensor, tensor: Tensor, group: ProcessGroup, received: Sequence[int] = (), sent: Sequence[int] = ()
) -> Finish:
    ranks = group.size()
    problem = problem_of_splits("output", output, received, ranks) or problem_of_splits("input", tensor, sent, ranks)
    if problem is not None:
        return _all_to_all("all_to_all_single", [output], [tensor], group, problem)
    outputs = output.split(list(received) or output.shape[0] // ranks) if ranks > 1 else [output]
    inputs = tensor.split(list(sent) or tensor.shape[0] // ranks) if ranks > 1 else [tensor]
    return _all_to_all("all_to_all_single", list(outputs), list(inputs), group, None)


def _all_to_all(
    call: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: ProcessGroup, problem: str | None
) -> Finish:
    everyone = start(group, call, inputs, outputs, problem=problem, pairwise=True)
    transport, partial = Eager(group), any_partial(everyone)
    records = [record_of(tensor) for tensor in inputs]
    received, sent = [t.numel() for t in outputs], [t.numel() for t in inputs]
    arriving = exchanged(records, received, sent, partial, transport.all_to_all)
    return lambda: write_each(outputs, arriving.split([t.shape for t in outputs]))


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


def sizes_do_not_fit(large: str, larger: Tensor, small: str, smaller: Tensor, ranks: int) -> str:
    return (
        f"{large} of shape {tuple(larger.shape)} needs {ranks} times the elements of {small} of shape "
        f"{tuple(smaller.shape)}, one part for each rank"
    )


def stacked(records: Sequence[Dense]) -> Dense:
    """Stack records of one shape."""
    data = torch.stack([record.data for record in records])
    validities = [record.validity for record in records if record.validity is not None]
    return Dense(data, torch.stack(validities) if validities else None)


def write_each(targets: Sequence[Tensor], records: Sequence[Dense]) -> None:
    for target, record in zip(targets, records, strict=True):
        write(target, record)
