"""torch's functional collectives (`_c10d_functional` operators) of masked tensors.

They have the semantics of collectives.py, return new tensors, and are differentiable as torch's are: they fill, reduce
and move plain tensors, on which torch's own operators record the derivative. In a graph the ranks cannot agree first,
as a graph cannot wait for an answer: they always send masks, and mismatches raise torch's errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.dispatch.kernel_table import Kernel, kernel_table
from masked_dispatch.dispatch.run_rule import has_masked, unwrap_argument
from masked_dispatch.distributed import sparse_functional
from masked_dispatch.distributed.agreement import described
from masked_dispatch.distributed.calls import Call as EagerCall
from masked_dispatch.distributed.calls import any_partial, replace_extent
from masked_dispatch.distributed.collectives import problem_of_splits
from masked_dispatch.distributed.extents import Known, split_rows, statement_of
from masked_dispatch.distributed.messages import Functional
from masked_dispatch.distributed.records import Masks, Send, exchanged, in_one, moved, problem_of_reduction, reduced
from masked_dispatch.distributed_internals import Group, process_group_named
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import DispatchKeySet, redispatch
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced


class Call:
    """One functional collective: the result of the agreement, and the transport."""

    def __init__(
        self,
        name: str,
        tensor: Tensor,
        group: Group,
        *,
        problem: str | None = None,
        shown: Sequence[str] | None = None,
        root: int | None = None,
        apart: bool = False,
    ) -> None:
        process_group = process_group_named(group)
        self.ranks = process_group.size()
        record: Any = unwrap_argument(tensor)
        if root not in (None, process_group.rank()):
            record = Dense(record.data, record.validity)
        self.record = record
        self.send = Functional(group, self.ranks)
        traced = being_traced(record.data)
        self.partial = True
        # In a graph, all ranks are taken to know the same.
        self.known = Known.of(statement_of(record))
        self.known_of_each = [self.known] * self.ranks
        # Narrower fields are unpacked with a table, which a graph cannot hold as a constant.
        self.narrow = not traced
        self.width = 8 if traced else 1
        if not traced:
            with torch.no_grad():
                agreed = EagerCall(
                    process_group, name, [tensor], [], shown=shown, problem=problem, root=root, apart=apart
                )
                self.partial = any_partial(agreed.everyone)
                self.known = agreed.known if root is None else Known.of(agreed.statement(root))
                self.known_of_each = agreed.known_of_each()

    def reduced(self, records: Sequence[Dense], op: str, send: Send) -> MaskedTensor:
        masks = Masks.ANY if self.partial else Masks.NONE
        return wrap_record(reduced(records, op, self.ranks, masks, send, self.narrow, extent=self.known)())


def by_storage(sparse: Callable[..., Tensor]) -> Callable[[Callable[..., MaskedTensor]], Callable[..., Any]]:
    """Decorate the function for dense storage, so that it calls `sparse` for sparse storage."""

    def decorated(dense: Callable[..., MaskedTensor]) -> Callable[..., Any]:
        @functools.wraps(dense)
        def served(tensor: Tensor, *args: Any) -> Any:
            return (sparse if isinstance(tensor, SparseMaskedTensor) else dense)(tensor, *args)

        return served

    return decorated


@by_storage(sparse_functional.all_reduce)
def all_reduce(tensor: Tensor, reduce_op: str, group: Group) -> MaskedTensor:
    op = reduce_op.lower()
    call = Call(f"all_reduce {op.upper()}", tensor, group, problem=problem_of_reduction(op, tensor.dtype))
    return call.reduced([call.record], op, call.send.all_reduce)


@by_storage(sparse_functional.reduce_scatter_tensor)
def reduce_scatter_tensor(tensor: Tensor, reduce_op: str, group_size: int, group: Group) -> MaskedTensor:
    op = reduce_op.lower()
    rows = tensor.shape[0] if tensor.ndim else 0
    problem = problem_of_reduction(op, tensor.dtype)
    if rows % group_size:
        problem = f"the input of shape {tuple(tensor.shape)} has {rows} rows, which {group_size} ranks do not divide"
    call = Call(f"reduce_scatter_tensor {op.upper()}", tensor, group, problem=problem)
    parts = _rows(call.record, [rows // group_size] * group_size)
    return call.reduced(parts, op, call.send.reduce_scatter)


@by_storage(sparse_functional.all_gather_into_tensor)
def all_gather_into_tensor(tensor: Tensor, group_size: int, group: Group) -> MaskedTensor:
    call = Call("all_gather_into_tensor", tensor, group, apart=True)
    arriving = moved([call.record], call.partial, call.send.all_gather, call.width, call.known)
    arriving.known = call.known_of_each
    shape = (call.ranks * tensor.shape[0], *tensor.shape[1:]) if tensor.ndim else (call.ranks,)
    return wrap_record(in_one(arriving.split([tensor.shape] * call.ranks), shape))


@by_storage(sparse_functional.broadcast)
def broadcast(tensor: Tensor, src: int, group: Group) -> MaskedTensor:
    call = Call(f"broadcast from rank {src} of the group", tensor, group, root=src)
    arriving = moved([call.record], call.partial, lambda data: call.send.broadcast(data, src), call.width, call.known)
    return wrap_record(arriving.split([tensor.shape])[0])


def _rows(record: Any, sizes: Sequence[int]) -> list[Dense]:
    """Split a record's rows into parts of these sizes."""
    full, extents = record.full_validity, split_rows(record, sizes)
    data = record.data.split(list(sizes))
    masks = [None] * len(data) if full is None else full.split(list(sizes))
    return [Dense(*part) for part in zip(data, masks, extents, strict=True)]


@by_storage(sparse_functional.all_to_all_single)
def all_to_all_single(tensor: Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> MaskedTensor:
    """Exchange rows between ranks; `received` and `sent` are the numbers of rows for each rank."""
    ranks = process_group_named(group).size()
    problem = problem_of_splits("input", tensor, sent, ranks)
    row = described(tensor[:0]) if tensor.ndim else described(tensor)
    call = Call("all_to_all_single", tensor, group, problem=problem, shown=[row], apart=True)
    parts = _rows(call.record, sent)
    shapes = [torch.Size((rows, *tensor.shape[1:])) for rows in received]
    known = call.known_of_each, [call.known] * len(sent)
    exchange = exchanged(parts, shapes, call.partial, call.send.all_to_all, call.width, known)
    return wrap_record(in_one(exchange.split(shapes), (sum(received), *tensor.shape[1:])))


def replaced(target: Tensor, arrived: MaskedTensor) -> Tensor:
    """Write what has arrived, with its extent; a graph asserts that the target has the same."""
    if isinstance(target, MaskedTensor) and not being_traced(target._stored_tensors[0]):
        replace_extent(target, arrived._extent)
    return target.copy_(arrived)


def all_reduce_(tensor: Tensor, reduce_op: str, group: Group) -> Tensor:
    return replaced(tensor, all_reduce(tensor, reduce_op, group))


def broadcast_(tensor: Tensor, src: int, group: Group) -> Tensor:
    return replaced(tensor, broadcast(tensor, src, group))


def all_gather_into_tensor_out(tensor: Tensor, group_size: int, group: Group, *, out: Tensor) -> Tensor:
    return replaced(out, all_gather_into_tensor(tensor, group_size, group))


def reduce_scatter_tensor_out(tensor: Tensor, reduce_op: str, group_size: int, group: Group, *, out: Tensor) -> Tensor:
    return replaced(out, reduce_scatter_tensor(tensor, reduce_op, group_size, group))


def each(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Apply the function to each tensor, for operators that take a list of tensors."""
    return lambda tensors, *args: [function(tensor, *args) for tensor in tensors]


def as_it_is(tensor: Tensor) -> Tensor:
    """Return the tensor, which has arrived already."""
    return tensor


SERVED: dict[str, Callable[..., Any]] = {
    "_c10d_functional::all_reduce": all_reduce,
    "_c10d_functional::all_reduce_": all_reduce_,
    "_c10d_functional::all_reduce_coalesced": each(all_reduce),
    "_c10d_functional::all_reduce_coalesced_": each(all_reduce_),
    "_c10d_functional::all_gather_into_tensor": all_gather_into_tensor,
    "_c10d_functional::all_gather_into_tensor_out": all_gather_into_tensor_out,
    "_c10d_functional::all_gather_into_tensor_coalesced": each(all_gather_into_tensor),
    "_c10d_functional::reduce_scatter_tensor": reduce_scatter_tensor,
    "_c10d_functional::reduce_scatter_tensor_out": reduce_scatter_tensor_out,
    "_c10d_functional::reduce_scatter_tensor_coalesced": each(reduce_scatter_tensor),
    "_c10d_functional::all_to_all_single": all_to_all_single,
    "_c10d_functional::broadcast": broadcast,
    "_c10d_functional::broadcast_": broadcast_,
    "_c10d_functional::wait_tensor": as_it_is,
    "_c10d_functional_autograd::all_gather_into_tensor": all_gather_into_tensor,
    "_c10d_functional_autograd::reduce_scatter_tensor": reduce_scatter_tensor,
    "_c10d_functional_autograd::all_to_all_single": all_to_all_single,
}


def functional_kernel(op: OpOverload, function: Callable[..., Any]) -> Kernel:
    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        return function(*args, **kwargs)

    return kernel


# torch's module of functional collectives defines `_wrap_tensor_autograd`, and may not have been imported yet.
_library = Library("_c10d_functional", "IMPL")


def not_wrapped(keyset: DispatchKeySet, tensor: Tensor) -> Tensor:
    """Return a masked tensor without torch's wrapper for pending results, because its data has arrived."""
    if isinstance(tensor, MaskedTensor):
        return tensor
    return redispatch(torch.ops._c10d_functional._wrap_tensor_autograd.default, keyset, (tensor,), {})


def install() -> None:
    """The package calls this once, on import."""
    for name, function in SERVED.items():
        namespace, _, operator = name.partition("::")
        op = getattr(getattr(torch.ops, namespace), operator).default
        kernel_table.put(op, functional_kernel(op, function))
    _library.impl("_wrap_tensor_autograd", never_compiled(not_wrapped), "PreDispatch", with_keyset=True)
