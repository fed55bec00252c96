"""torch.distributed's collectives of sparsely stored masked tensors, packed batches included; they densify nothing.

They have the semantics of collectives.py. The ranks send their entries (entries.py), and tell each other the number of
entries first. Reductions gather the entries of all ranks, and each rank combines those it needs on the union of the
patterns; torch's own reductions would need one common pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from masked_dispatch.distributed.agreement import Description, agree, described
from masked_dispatch.distributed.collectives import (
    Finish,
    gathered_one_by_one,
    one_by_one,
    pair_by_pair,
    problem_of_list,
    problem_of_numbers,
    problem_of_splits,
    reducing_problem,
    sizes_do_not_fit,
)
from masked_dispatch.distributed.entries import Entries, Form, combined, decoded, encoded, entries_of, form_of
from masked_dispatch.distributed.entries import record_of_entries as rebuilt
from masked_dispatch.distributed.operands import problem_of_outputs
from masked_dispatch.distributed.transport import Awaited, Eager
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, wrap_sparse
from op_registry.sparse.record import Sparse

Arrived = Callable[[], list[Entries]]
# A callback that receives the number of contributions to each element of a reduction.
Counted = Callable[[Sparse], None]


def stored_record(tensor: Tensor) -> Sparse:
    """Return the record of a sparsely stored tensor that is not a view; problem_of_sparse refuses views."""
    assert isinstance(tensor, SparseMaskedTensor)
    record = tensor.record
    assert isinstance(record, Sparse)
    return record


class Parcel:
    """A sparse tensor to send: its form and its entries."""

    def __init__(self, tensor: Tensor) -> None:
        record = stored_record(tensor)
        self.form = form_of(record)
        self.entries = entries_of(record)

    def __len__(self) -> int:
        return len(self.entries.keys)

    @property
    def partial(self) -> bool:
        return self.entries.values.validity is not None


class Call:
    """One collective: the result of the agreement, and the transport.

    sent     the tensors that this rank sends
    form     the form of the inputs, or of the output on a rank that sends nothing
    """

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        sent: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        shown: Sequence[str] | None = None,
        problem: str | None = None,
        pairwise: bool = False,
    ) -> None:
        problem = problem or problem_of_sparse(sent, outputs) or problem_of_outputs(outputs)
        parcels = [] if problem else [Parcel(tensor) for tensor in sent]
        device = (*sent, *outputs)[0].device
        mine = Description(
            name,
            tuple([described(tensor) for tensor in sent] if shown is None else shown),
            any(parcel.partial for parcel in parcels),
            problem,
            tuple(described(tensor) for tensor in outputs) if pairwise else None,
            tuple(map(len, parcels)),
        )
        self.everyone = agree(group, mine, device)
        self.group, self.rank, self.transport, self.device = group, group.rank(), Eager(group), device
        self.parcels = parcels
        self.outputs = outputs

    def form(self, number: int = 0) -> Form:
        return self.parcels[number].form if self.parcels else form_of(stored_record(self.outputs[number]))

    def message(self, number: int = 0, size: int | None = None) -> Tensor:
        """Encode a parcel as bytes, padded with zeros to `size`."""
        parcel = self.parcels[number]
        message = encoded(parcel.entries, parcel.form, self.everyone[self.rank].partial)
        return message if size is None else torch.nn.functional.pad(message, (0, size - len(message)))

    def size(self, rank: int, number: int = 0, form: Form | None = None) -> int:
        """Return the number of bytes of a rank's parcel."""
        description = self.everyone[rank]
        return sum((form or self.form()).sizes_in_bytes(description.entries[number], description.partial))

    def decoded(self, message: Tensor, rank: int, number: int = 0, form: Form | None = None) -> Entries:
        description = self.everyone[rank]
        return decoded(message, form or self.form(), description.entries[number], description.partial)

    def from_all(self, send: Callable[[Tensor], Awaited], here: bool = True) -> Arrived:
        """Send the first parcel of every rank, padded to one length; ranks that receive none get an empty result."""
        ranks = range(len(self.everyone))
        longest = max(self.size(rank) for rank in ranks)
        arriving = send(self.message(size=longest))

        def arrived() -> list[Entries]:
            messages = arriving()
            return [self.decoded(messages[r * longest : (r + 1) * longest], r) for r in ranks] if here else []

        return arrived

    def exchanged(self) -> Arrived:
        """Send a parcel to each rank, and receive one from each."""
        ranks = range(len(self.everyone))
        forms = [parcel.form for parcel in self.parcels]
        if self.outputs and len(self.outputs) == len(forms):
            forms = [form_of(stored_record(output)) for output in self.outputs]
        sizes = [self.size(r, self.rank, forms[r]) for r in ranks]
        messages = [self.message(number) for number in ranks]
        arriving = self.transport.all_to_all(torch.cat(messages), sizes, [len(message) for message in messages])

        def arrived() -> list[Entries]:
            parts = arriving().split(sizes)
            return [self.decoded(parts[r], r, self.rank, forms[r]) for r in ranks]

        return arrived


def problem_of_sparse(sent: Sequence[Tensor], outputs: Sequence[Tensor]) -> str | None:
    """Say why sparsely stored tensors cannot take part in a collective; None if they can."""
    for tensor in sent:
        if not isinstance(tensor, SparseMaskedTensor):
            return (
                f"a tensor of shape {tuple(tensor.shape)} is stored densely, and another one of this call sparsely. "
                "Store them alike, x.to_layout(layout) or x.to_dense()."
            )
    for tensor in (*sent, *outputs):
        if isinstance(tensor, SparseMaskedTensor) and tensor._order is not None:
            return not_by_itself(tensor)
    for output in outputs:
        if isinstance(output, SparseMaskedTensor) and output._stands_for_a_view:
            return not_by_itself(output)
    return None


def not_by_itself(tensor: SparseMaskedTensor) -> str:
    return (
        f"a tensor of shape {tuple(tensor.shape)} is a view of one that is stored as {tensor.storage_layout}. Store it "
        "by itself: x.to_layout(torch.sparse_coo)."
    )


def write(target: Tensor, record: Sparse) -> None:
    """Replace `target` by the received record, in the storage of `target`; update a plain `target`."""
    with torch.no_grad():
        target.copy_(wrap_sparse(record))


def write_rows(target: Tensor, arrived: Sequence[Entries], form: Form) -> None:
    """Concatenate the rows of all ranks, and write them to one tensor."""
    parts: list[Tensor] = [wrap_sparse(rebuilt(entries, form)) for entries in arrived]
    with torch.no_grad():
        target.copy_(torch.cat(parts))


def write_each(targets: Sequence[Tensor], arrived: Sequence[Entries], form: Form) -> None:
    for target, entries in zip(targets, arrived, strict=True):
        write(target, rebuilt(entries, form))


# -------------------------------------------------------------------------------------------------------- reductions


def write_reduced(
    target: Tensor, arrived: Sequence[Entries], op: str, form: Form, counted: Counted | None = None
) -> None:
    total = combined(arrived, op, form)
    write(target, rebuilt(total.entries, form))
    if counted is not None:
        counted(total.numbers(form))


def all_reduce(tensors: Sequence[Tensor], group: ProcessGroup, op: str, counted: Counted | None = None) -> Finish:
    (tensor,) = tensors
    call = Call(group, f"all_reduce {op.upper()}", tensors, tensors, problem=reducing_problem(op, tensor))
    arrived = call.from_all(call.transport.all_gather)
    return lambda: write_reduced(tensor, arrived(), op, call.form(), counted)


all_reduce_coalesced = one_by_one(all_reduce)


def reduce(tensors: Sequence[Tensor], group: ProcessGroup, op: str, root: int) -> Finish:
    (tensor,) = tensors
    name = f"reduce {op.upper()} to rank {root} of the group"
    call = Call(group, name, tensors, tensors, problem=reducing_problem(op, tensor))
    arrived = call.from_all(lambda data: call.transport.gather(data, root), here=group.rank() == root)

    def finish() -> None:
        parts = arrived()
        if parts:
            write_reduced(tensor, parts, op, call.form())

    return finish


def reduce_scatter(
    outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], group: ProcessGroup, op: str
) -> Finish:
    (output,), (parts,) = outputs, inputs
    return _reduce_scatter("reduce_scatter", output, parts, group, op, problem_of_list(parts, group.size(), output))


def reduce_scatter_tensor(
    output: Tensor, tensor: Tensor, group: ProcessGroup, op: str, counted: Counted | None = None
) -> Finish:
    problem = problem_of_rows("the input", tensor, "the output", output, group.size())
    parts = [tensor] if problem else tensor.split(output.shape[0])
    return _reduce_scatter("reduce_scatter_tensor", output, list(parts), group, op, problem, counted)


reduce_scatter_tensor_coalesced = pair_by_pair(reduce_scatter_tensor)


def _reduce_scatter(
    name: str,
    output: Tensor,
    parts: Sequence[Tensor],
    group: ProcessGroup,
    op: str,
    problem: str | None,
    counted: Counted | None = None,
) -> Finish:
    shown = [described(part) for part in parts[:1]]
    problem = reducing_problem(op, output) or problem
    call = Call(group, f"{name} {op.upper()}", parts, [output], shown=shown, problem=problem)
    arrived = call.exchanged()
    return lambda: write_reduced(output, arrived(), op, call.form(), counted)


# --------------------------------------------------------------------------------------------------------- movements


def broadcast(tensors: Sequence[Tensor], group: ProcessGroup, root: int) -> Finish:
    (tensor,) = tensors
    call = Call(group, f"broadcast from rank {root} of the group", tensors, tensors)
    mine = group.rank() == root
    message = call.message() if mine else torch.empty(call.size(root), dtype=torch.uint8, device=call.device)
    arriving = call.transport.broadcast(message, root)

    def finish() -> None:
        message = arriving()
        if not mine:
            write(tensor, rebuilt(call.decoded(message, root), call.form()))

    return finish


def all_gather(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], group: ProcessGroup) -> Finish:
    (targets,), (tensor,) = outputs, inputs
    call = Call(group, "all_gather", inputs, targets, problem=problem_of_list(targets, group.size(), tensor))
    arrived = call.from_all(call.transport.all_gather)
    return lambda: write_each(targets, arrived(), call.form())


all_gather_coalesced = gathered_one_by_one(all_gather)


def all_gather_into_tensor(output: Tensor, tensor: Tensor, group: ProcessGroup) -> Finish:
    problem = problem_of_rows("the output", output, "the input", tensor, group.size())
    call = Call(group, "all_gather_into_tensor", [tensor], [output], problem=problem)
    arrived = call.from_all(call.transport.all_gather)
    return lambda: write_rows(output, arrived(), call.form())


all_gather_into_tensor_coalesced = pair_by_pair(all_gather_into_tensor)


def gather(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], group: ProcessGroup, root: int) -> Finish:
    (tensor,), mine = inputs, group.rank() == root
    targets = list(outputs[0]) if mine else []
    problem = problem_of_list(targets, group.size(), tensor) if mine else None
    call = Call(group, f"gather to rank {root} of the group", inputs, targets, problem=problem)
    arrived = call.from_all(lambda data: call.transport.gather(data, root), here=mine)
    return lambda: write_each(targets, arrived(), call.form())


def gather_into_tensor(output: Tensor, tensor: Tensor, group: ProcessGroup, root: int) -> Finish:
    """Gather into the root's output; on other ranks, torch passes a placeholder as the output."""
    here = group.rank() == root
    problem = problem_of_rows("the output", output, "the input", tensor, group.size()) if here else None
    name = f"gather_into_tensor to rank {root} of the group"
    call = Call(group, name, [tensor], [output] if here else [], problem=problem)
    arrived = call.from_all(lambda data: call.transport.gather(data, root), here=here)

    def finish() -> None:
        entries = arrived()
        if here:
            write_rows(output, entries, call.form())

    return finish


def scatter(outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], group: ProcessGroup, root: int) -> Finish:
    (output,), mine = outputs, group.rank() == root
    parts = list(inputs[0]) if mine else []
    problem = problem_of_list(parts, group.size(), output) if mine else None
    name = f"scatter from rank {root} of the group"
    call = Call(group, name, parts, outputs, shown=[described(output)], problem=problem)
    longest = max(call.size(root, number) for number in range(group.size()))
    buffer = torch.empty(longest, dtype=torch.uint8, device=call.device)
    sent = torch.cat([call.message(number, longest) for number in range(len(parts))]) if mine else buffer
    arriving = call.transport.scatter(sent, buffer, root)
    return lambda: write(output, rebuilt(call.decoded(arriving(), root, group.rank()), call.form()))


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: ProcessGroup) -> Finish:
    problem = problem_of_numbers(outputs, inputs, group.size())
    return _all_to_all("all_to_all", list(outputs), list(inputs), group, problem)


def _all_to_all(
    name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: ProcessGroup, problem: str | None
) -> Finish:
    if any(not isinstance(output, SparseMaskedTensor) for output in outputs):
        problem = problem or "every output has to be stored as what it receives: x.to_layout(layout)"
    call = Call(group, name, inputs, outputs, problem=problem, pairwise=True)
    arrived = call.exchanged()

    def finish() -> None:
        for output, entries in zip(outputs, arrived(), strict=True):
            write(output, rebuilt(entries, form_of(stored_record(output))))

    return finish


def all_to_all_single(
    output: Tensor, tensor: Tensor, group: ProcessGroup, received: Sequence[int] = (), sent: Sequence[int] = ()
) -> Finish:
    ranks = group.size()
    problem = problem_of_splits("output", output, received, ranks) or problem_of_splits("input", tensor, sent, ranks)
    if problem is not None:
        return _all_to_all("all_to_all_single", [output], [tensor], group, problem)
    inputs = tensor.split(list(sent) or tensor.shape[0] // ranks)
    parts = [_by_itself(part) for part in output.split(list(received) or output.shape[0] // ranks)]
    finish = _all_to_all("all_to_all_single", parts, list(inputs), group, None)

    def write_whole() -> None:
        finish()
        with torch.no_grad():
            output.copy_(torch.cat(parts))

    return write_whole


def _by_itself(part: Tensor) -> Tensor:
    """Copy a part of a tensor; the collective writes to the copy before it writes to the tensor."""
    return wrap_sparse(part.record) if isinstance(part, SparseMaskedTensor) else part


def problem_of_rows(large: str, larger: Tensor, small: str, smaller: Tensor, ranks: int) -> str | None:
    """Say why the larger tensor does not have the smaller one's rows once for each rank; None if it does."""
    fits = larger.ndim == smaller.ndim > 0 and larger.shape == (ranks * smaller.shape[0], *smaller.shape[1:])
    return None if fits else sizes_do_not_fit(large, larger, small, smaller, ranks) + ", one after the other"
