"""Operators that broadcast, called with hybrid COO operands and others of fewer, more and different dimensions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

import masked_dispatch as md
from op_registry import registry
from op_registry.conformance.compare import difference
from op_registry.laws.categories import ELEMENTWISE

DTYPES = (torch.float32, torch.int64, torch.bool)
HYBRID = (2, 1, 2, 1)
OTHERS = ((), (1,), (4,), (2, 1), (1, 3), (2, 1, 4), (2, 3, 1, 4), (1, 2, 1, 2, 1), (3, 2, 1, 1, 4))
# torch's kernels take operands of one shape, and do not check it.
OF_ONE_SHAPE = ("aten._prelu_kernel.default", "aten._standard_gamma_grad.default")


def operands_of(op: OpOverload) -> int:
    return sum(str(argument.type) == "Tensor" for argument in op._schema.arguments)


@functools.cache
def broadcasting() -> dict[str, OpOverload]:
    """Every elementwise rule's operator that has several tensor operands and takes operands that broadcast."""
    found = {str(op): op for op in registry if registry.written(op).category is ELEMENTWISE and operands_of(op) > 1}
    found["aten.where.self"] = torch.ops.aten.where.self
    return {n: op for n, op in found.items() if n not in OF_ONE_SHAPE and dtypes_of(op) is not None}


def called(op: OpOverload, operands: Sequence[Tensor]) -> Tensor:
    """The operator on its tensor operands, with 1 for each number that it asks for; its first result."""
    given: Iterator[Tensor] = iter(operands)
    args: list[Any] = []
    for argument in op._schema.arguments:
        if str(argument.type) == "Tensor":
            args.append(next(given))
        elif argument.kwarg_only or argument.has_default_value():
            break
        else:
            args.append(1)
    named = {"rounding_mode": "floor"} if op is torch.ops.aten.div.Tensor_mode else {}
    result = op(*args, *given, **named)
    return result[0] if isinstance(result, tuple) else result


def values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 3 + 0.1).to(dtype)


@functools.cache
def dtypes_of(op: OpOverload) -> tuple[torch.dtype, ...] | None:
    """The first dtypes in which plain torch broadcasts the operands of an operator; None if there are none."""
    for dtypes in itertools.product(DTYPES, repeat=operands_of(op)):
        try:
            operands = [values((2, 1) if n else (4,), dtype, n) for n, dtype in enumerate(dtypes)]
            result = called(op, operands)
        except Exception:  # whatever torch raises of what it does not take
            continue
        if result.shape == (2, 4):
            return dtypes
    return None


def masked(data: Tensor, seed: int) -> md.MaskedTensor:
    mask = torch.rand(data.shape, generator=torch.Generator().manual_seed(seed + 50)) < 0.7
    return md.masked_tensor(data, mask)


def faults(op: OpOverload, others: Sequence[tuple[int, ...]] = OTHERS) -> Iterator[str]:
    """How results with a hybrid operand differ from those on dense storage; "" for each that does not."""
    dtypes = dtypes_of(op)
    assert dtypes is not None
    for position, sparse_dim, other, beside in itertools.product(
        range(len(dtypes)), (1, 2, 3), others, ("plain", "masked", "hybrid")
    ):
        shapes = [HYBRID if n == position or (beside == "hybrid" and n != 0) else other for n in range(len(dtypes))]
        dense: list[Tensor] = [values(s, d, n) for n, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
        dense = [t if beside == "plain" and n != position else masked(t, n) for n, t in enumerate(dense)]
        stored = [
            t.to_sparse(sparse_dim=sparse_dim) if isinstance(t, md.MaskedTensor) and t.shape == HYBRID else t
            for t in dense
        ]
        where = f"{op} {shapes} {beside}, operand {position} with sparse_dim={sparse_dim}"
        want = called(op, dense).to_dense()
        try:
            got = called(op, stored).to_dense()
        except Exception as error:
            yield f"{where}: {error!r}"
            continue
        if got.shape != want.shape or not torch.equal(got.get_mask(), want.get_mask()):
            yield f"{where}: another mask"
        else:
            found = difference(got.get_data(), want.get_data(), want.get_mask())
            yield f"{where}: {found}" if found else ""
