"""Refuse writes whose operands overlap with the target wherever torch refuses them, with torch's error text.

torch's kernels read such an operand while they overwrite it. We compute the result first, so ours would be right, but a
program that works only on masked tensors would be a trap (P1: the same errors).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import (
    schema_of,
    share_memory,
    under_transform,
)
from op_registry.records.tracing import being_traced

OVERLAP = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory "
    "location. Please clone() the tensor before performing the operation."
)
# Operators whose operands may not share any element with the target. Operands of elementwise operators and of `copy_`
# may lie exactly where the result goes. For other operators, torch leaves the effect of an overlap open.
WITHOUT_ANY_OVERLAP = (
    "index_add_", "index_copy_", "index_fill_", "index_put_", "index_reduce_", "put_", "scatter_", "scatter_add_",
    "scatter_reduce_",
)  # fmt: skip
# Elementwise operators that read their operands before they write; others so read the `value` with which they fill.
READ_BEFOREHAND = ("ldexp_",)


class OverlapCheck:
    """Raises torch's error if an operand of an in-place operator overlaps with the target.

    whole   whether an operand may lie exactly where the result goes
    active  whether torch checks this operator
    reads   the numbers of the operands that it reads while it writes
    puts    whether it is an assignment by index tensors, which may be a fill
    """

    __slots__ = ("active", "puts", "reads", "whole")

    def __init__(self, op: OpOverload, elementwise: bool) -> None:
        schema = schema_of(op)
        name = schema.name.partition("::")[2]
        self.whole = name not in WITHOUT_ANY_OVERLAP
        self.active = not self.whole or name == "copy_" or (elementwise and name not in READ_BEFOREHAND)
        self.reads = [n for n, argument in enumerate(schema.arguments) if n and argument.name != "value"]
        self.puts = name == "index_put_"

    def __call__(self, target: Tensor, args: Sequence[Any]) -> None:
        written = _in_memory(target)
        if written is None or under_transform():
            return
        mask = _mask_of_fill(*args) if self.puts else None
        if mask is not None:
            _check(target, written, [mask], whole=True)
        else:
            _check(target, written, [args[n] for n in self.reads if n < len(args)], self.whole)


def _mask_of_fill(target: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """The index of an index_put_ that torch runs as masked_fill_, with a number that it reads before."""
    given = [index for index in indices if index is not None]
    if accumulate or len(given) != 1 or given[0].dtype not in (torch.bool, torch.uint8):
        return None
    fills = given[0].device == target.device and values.device.type == "cpu" and values.numel() == 1
    return given[0] if fills else None


def _check(target: Tensor, written: Tensor, operands: Iterable[object], whole: bool) -> None:
    for operand in operands:
        if isinstance(operand, (list, tuple)):
            _check(target, written, operand, whole)
        elif isinstance(operand, Tensor) and not (whole and operand is target):
            read = _in_memory(operand)
            if read is not None and share_memory(written, read) and _forbids(written, read, operand is target, whole):
                raise RuntimeError(OVERLAP)


def _forbids(a: Tensor, b: Tensor, same: bool, whole: bool) -> bool:
    """Whether two tensors of one storage overlap by torch's own test (ATen/MemoryOverlap.cpp); unsure means no."""
    if same or not (a.numel() and b.numel() and is_packed(a) and is_packed(b)):
        return same
    if _addresses(a) == _addresses(b):
        return not (whole and a.stride() == b.stride())
    return _overlap(a, b)


def refuse_overlapping_outputs(op: OpOverload, outputs: Iterable[object]) -> None:
    """Raise, as torch does since 2.15 for aminmax, if the write to one out= tensor would overwrite another."""
    in_memory = [_in_memory(output) for output in outputs if isinstance(output, Tensor)]
    for a, b in itertools.combinations([t for t in in_memory if t is not None and t.numel()], 2):
        if share_memory(a, b) and is_packed(a) and is_packed(b) and _overlap(a, b):
            raise ValueError(f"{schema_of(op).name.partition('::')[2]}(): out= tensors must not overlap.")


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """The addresses at which a packed tensor begins and ends."""
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    (first, first_end), (second, second_end) = _addresses(a), _addresses(b)
    return first < second_end and second < first_end


def _in_memory(tensor: Tensor) -> Tensor | None:
    """The plain tensor with the values of a dense tensor; None if it has no memory to compare."""
    if isinstance(tensor, SparseMaskedTensor):
        return None
    data = tensor._data if isinstance(tensor, MaskedTensor) else tensor
    return None if being_traced(data) else data


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a piece of memory without gaps, each once, in some order of its dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def check_outputs_on_meta(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Mapping[str, Tensor]
) -> None:
    """Make the same call on meta tensors: torch itself refuses outputs of wrong dtypes or overlapping memory."""
    # Found by what shares memory: an address is 0 on some devices, and in the memory of some CUDA graphs.
    storages: list[tuple[Tensor, torch.UntypedStorage]] = []

    def on_meta(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [on_meta(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, SparseMaskedTensor):  # it shares memory with no other argument of a dense call
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        data = value._data if isinstance(value, MaskedTensor) else value.detach()
        storage = next((s for t, s in storages if share_memory(t, data)), None)
        if storage is None:
            storage = torch.UntypedStorage(data.untyped_storage().nbytes(), device="meta")
            storages.append((data, storage))
        empty = torch.empty(0, dtype=data.dtype, device="meta")
        return empty.set_(storage, data.storage_offset(), data.shape, data.stride())  # type: ignore[call-overload]

    meta_outputs = {name: on_meta(output) for name, output in outputs.items()}
    # We cannot check an operator without a meta kernel.
    with contextlib.suppress(NotImplementedError):
        op(*[on_meta(a) for a in args], **{k: on_meta(v) for k, v in kwargs.items()}, **meta_outputs)


def shares_memory(target: Tensor, args: Sequence[object]) -> bool:
    """Whether an argument has the same storage as `target`."""
    inputs = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor)]
    return any(share_memory(data_of(t), data_of(target)) for t in inputs)


def data_of(tensor: Tensor) -> Tensor:
    """The plain tensor that holds the values of a tensor, masked or plain."""
    if isinstance(tensor, SparseMaskedTensor):
        return tensor._kept_values
    return tensor._data if isinstance(tensor, MaskedTensor) else tensor
