"""Send plain tensors between ranks, either by torch.distributed's functions or by its functional operators.

All tensors are one-dimensional. Each method starts a collective and returns a function that waits for the result. The
functional operators are differentiable and traceable, but lack `reduce`, `gather` and `scatter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, ReduceOp

from masked_dispatch.distributed_internals import Group
from op_registry.older_torch import all_gather_single, reduce_scatter_single

Awaited = Callable[[], Tensor]


def awaited(work: Any, result: Tensor) -> Awaited:
    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return result

    return wait


class Eager:
    """Call torch.distributed's public functions asynchronously; reductions overwrite their operand."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.ranks = group.size()

    def all_reduce(self, data: Tensor, op: str) -> Awaited:
        return awaited(distributed.all_reduce(data, _op(op), group=self.group, async_op=True), data)

    def reduce(self, data: Tensor, op: str, root: int) -> Awaited:
        work = distributed.reduce(data, op=_op(op), group=self.group, group_dst=root, async_op=True)
        return awaited(work, data)

    def reduce_scatter(self, data: Tensor, op: str) -> Awaited:
        out = data.new_empty(len(data) // self.ranks)
        return awaited(reduce_scatter_single()(out, data, op=_op(op), group=self.group, async_op=True), out)

    def all_gather(self, data: Tensor) -> Awaited:
        out = data.new_empty(self.ranks * len(data))
        work = all_gather_single()(in_bytes(out), in_bytes(data), group=self.group, async_op=True)
        return awaited(work, out)

    def broadcast(self, data: Tensor, root: int) -> Awaited:
        work = distributed.broadcast(in_bytes(data), group=self.group, group_src=root, async_op=True)
        return awaited(work, data)

    def gather(self, data: Tensor, root: int) -> Awaited:
        out = data.new_empty(self.ranks, len(data) if self.group.rank() == root else 0)
        parts = list(in_bytes(out)) if self.group.rank() == root else None
        work = distributed.gather(in_bytes(data), parts, group=self.group, group_dst=root, async_op=True)
        return awaited(work, out.flatten())

    def scatter(self, data: Tensor, root: int) -> Awaited:
        """Scatter the root's `data`, which holds the parts of all ranks; on other ranks, it has the size of a part."""
        parts = list(in_bytes(data).view(self.ranks, -1)) if self.group.rank() == root else None
        out = data if parts is None else data.new_empty(len(data) // self.ranks)
        work = distributed.scatter(in_bytes(out), parts, group=self.group, group_src=root, async_op=True)
        return awaited(work, out)

    def all_to_all(self, data: Tensor, received: Sequence[int], sent: Sequence[int]) -> Awaited:
        size = data.element_size()
        out = data.new_empty(sum(received))
        work = distributed.all_to_all_single(
            in_bytes(out),
            in_bytes(data),
            [n * size for n in received],
            [n * size for n in sent],
            group=self.group,
            async_op=True,
        )
        return awaited(work, out)


class Functional:
    """Call torch's functional collectives, which torch differentiates."""

    def __init__(self, group_name: Group, ranks: int) -> None:
        self.group_name = group_name
        self.ranks = ranks

    def all_reduce(self, data: Tensor, op: str) -> Awaited:
        return self._awaited(torch.ops._c10d_functional.all_reduce(data, op, self.group_name))

    def reduce_scatter(self, data: Tensor, op: str) -> Awaited:
        ops = torch.ops._c10d_functional
        return self._awaited(ops.reduce_scatter_tensor(data, op, self.ranks, self.group_name))

    def all_gather(self, data: Tensor) -> Awaited:
        return self._awaited(torch.ops._c10d_functional.all_gather_into_tensor(data, self.ranks, self.group_name))

    def broadcast(self, data: Tensor, root: int) -> Awaited:
        return self._awaited(torch.ops._c10d_functional.broadcast(data, root, self.group_name))

    def all_to_all(self, data: Tensor, received: Sequence[int], sent: Sequence[int]) -> Awaited:
        ops = torch.ops._c10d_functional
        return self._awaited(ops.all_to_all_single(data, list(received), list(sent), self.group_name))

    @staticmethod
    def _awaited(started: Tensor) -> Awaited:
        return lambda: torch.ops._c10d_functional.wait_tensor(started)


def in_bytes(data: Tensor) -> Tensor:
    """View the memory as bytes, so that movements support every dtype."""
    return data.view(torch.uint8)


def _op(name: str) -> Any:
    return getattr(ReduceOp, name.upper())
