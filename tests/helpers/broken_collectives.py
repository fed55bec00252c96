"""Collectives that are wrong on purpose, in one way at a time: the comparisons with one process notice each.

The laws of op_registry run in one process, so that the table of mutants (op_registry/conformance/mutants.py) has
no line for collectives. All ranks make every call, also after one that fails, and then agree on whether one failed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

import masked_dispatch as md
from masked_collectives import of_all, of_rank
from masked_dispatch.distributed import calls, records, sparse_calls, training
from op_registry.records.dense import Dense
from process_groups import Check
from table_of_collectives import KINDS, Trial, compared

Call = Callable[[int, int], None]
CHECKS: dict[str, Check] = {}


# ----------------------------------------------------------------------------------- calls, which are of one collective


def of_table(name: str, kind: str = "dense", op: str = "SUM") -> Call:
    """A call of the table of collectives, which raises where a result is not what it has to be."""
    return lambda rank, ranks: compared(Trial(rank, ranks, KINDS[kind], op), name, "eager")


def over_ranks(rank: int, ranks: int, name: str) -> None:
    of_one_process: Any = {"mean": torch.mean, "var": torch.var, "count": lambda x: x.count()}[name]
    found = getattr(md.distributed, name)(of_rank(rank))
    md.testing.assert_close(found, of_one_process(torch.stack(of_all(ranks))))


OPS = ("SUM", "AVG", "PRODUCT")
DENSE: dict[str, Call] = {
    **{f"all_reduce {op}": of_table("all_reduce", op=op) for op in OPS},
    **{f"reduce_scatter {op}": of_table("reduce_scatter", op=op) for op in ("SUM", "AVG")},
    **{name: of_table(name) for name in ("broadcast", "all_gather", "all_to_all")},
    "all_gather into plain tensors": of_table("all_gather", "dense into plain"),
}
SPARSE: dict[str, Call] = {
    **{f"all_reduce {op} of CSR": of_table("all_reduce", "csr", op) for op in OPS},
    "all_reduce SUM of BSR": of_table("all_reduce", "bsr"),  # stores invalid elements
}
STATISTICS: dict[str, Call] = {name: functools.partial(over_ranks, name=name) for name in ("mean", "var", "count")}


def holds(call: Call, rank: int, ranks: int) -> bool:
    try:
        call(rank, ranks)
    except (AssertionError, RuntimeError):  # a mask of another shape is no mask
        return False
    return True


def noticed(calls: dict[str, Call], rank: int, ranks: int) -> set[str]:
    """The calls that are not on all ranks what they have to be."""
    wrong = torch.tensor([not holds(call, rank, ranks) for call in calls.values()], dtype=torch.int64)
    distributed.all_reduce(wrong)
    return {name for name, w in zip(calls, wrong.tolist(), strict=True) if w}


# ------------------------------------------------------------------------------------------------- ways of being wrong


def with_garbage(record: Dense, op: str) -> Tensor:
    return record.data.reshape(-1).to(records.wire_dtype(op, record.dtype)).clone()


def by_the_world(total: Tensor, op: str, divisor: Any, dtype: torch.dtype) -> Tensor:
    return (total / distributed.get_world_size() if op == "avg" else total).to(dtype)


def one_mask(everyone: Any) -> records.Masks:
    return records.Masks.EQUAL


def all_valid(record: Dense) -> Tensor:
    return torch.ones(record.data.numel(), dtype=torch.int8)


def lost_on_the_last(record: Dense) -> Tensor:
    last = distributed.get_rank() == distributed.get_world_size() - 1
    return all_valid(record) if last else VALIDITY_OF(record)


def everywhere(fields: Tensor, width: int, elements: int) -> Tensor:
    return torch.ones(elements, dtype=torch.int8)


def where_all_contribute(fields: Tensor, width: int, elements: int) -> Tensor:
    numbers = records.unpack(fields, width, elements)
    return (numbers == distributed.get_world_size()).to(torch.int8)


def masks_in_another_order(send: Callable[..., calls.Arrived]) -> Callable[..., calls.Arrived]:
    def sent(*args: Any) -> calls.Arrived:
        arrived = send(*args)

        def in_another_order() -> list[Dense]:
            records = arrived()
            validities = [record.validity for record in records]
            return [Dense(r.data, v) for r, v in zip(records, [*validities[1:], *validities[:1]], strict=True)]

        return in_another_order

    return sent


def without_a_mask(target: Tensor, record: Dense) -> None:
    WRITE(target, Dense(record.data, None))


def first_rank_alone(parts: Any, op: str, *form: Any) -> Any:
    return COMBINED(parts[:1], op, *form)


def of_all_elements(x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    return torch.tensor(x.numel())


def of_garbage(x: Any, dim: Any, keepdim: bool) -> Tensor:
    total: Tensor = x.get_data().sum()
    return total


VALIDITY_OF, WRITE, COMBINED = records.validity_of, calls.write, sparse_calls.combined

# For each way: the calls that may notice it, and what is put where.
WAYS: dict[str, tuple[dict[str, Call], list[tuple[Any, str, Any]]]] = {
    "data under the mask is reduced": (DENSE, [(records, "contribution", with_garbage)]),
    "data under the mask is reduced in place": (
        DENSE,
        [(records, "identity_in_place", lambda record, op: record.data)],
    ),
    "invalid elements contribute zeros": (DENSE, [(records, "identity_of", lambda op, dtype: 0)]),
    "averages divide by the number of ranks": (DENSE, [(records, "result_of", by_the_world)]),
    "averages in place divide by the number of ranks": (
        DENSE,
        [(records, "per_piece", lambda divisor, pieces: [distributed.get_world_size()] * len(pieces))],
    ),
    "what nobody contributes is valid": (DENSE, [(records, "present", everywhere)]),
    "what one rank lacks is invalid": (DENSE, [(records, "present", where_all_contribute)]),
    "masks do not travel": (DENSE, [(calls, "any_partial", lambda everyone: False)]),
    "masks that differ are taken for one": (DENSE, [(calls, "masks_to_reduce", one_mask)]),
    "masks travel as if all were valid": (DENSE, [(records, "validity_of", all_valid)]),
    "the mask of one rank is lost": (DENSE, [(records, "validity_of", lost_on_the_last)]),
    "masks arrive in another order": (
        DENSE,
        [(calls.Call, way, masks_in_another_order(getattr(calls.Call, way))) for way in ("gathered", "exchanged")],
    ),
    "what is written loses its mask": (DENSE, [(calls, "write", without_a_mask)]),
    "sparse: invalid elements contribute zeros": (SPARSE, [(sparse_calls, "identity_of", lambda op, dtype: 0)]),
    "sparse: averages divide by the number of ranks": (SPARSE, [(sparse_calls, "result_of", by_the_world)]),
    "sparse: the other ranks' entries are lost": (SPARSE, [(sparse_calls, "combined", first_rank_alone)]),
    "sparse: the mask of one rank is lost": (SPARSE, [(sparse_calls, "validity_of", lost_on_the_last)]),
    "statistics count all elements": (STATISTICS, [(training, "counted", of_all_elements)]),
    "statistics sum what is under the mask": (STATISTICS, [(training, "summed", of_garbage)]),
}  # fmt: skip


def check_that_it_is_noticed(rank: int, ranks: int, way: str) -> None:
    calls, replacements = WAYS[way]
    with contextlib.ExitStack() as stack:
        for where, name, wrong in replacements:
            stack.enter_context(mock.patch.object(where, name, wrong))
        found = noticed(calls, rank, ranks)
    assert found, f"no call of {list(calls)} notices it"


def check_the_right_ones(rank: int, ranks: int) -> None:
    assert noticed({**DENSE, **SPARSE, **STATISTICS}, rank, ranks) == set()


CHECKS["broken collectives: the right ones"] = check_the_right_ones
for way in WAYS:
    CHECKS[f"broken collectives: {way}"] = functools.partial(check_that_it_is_noticed, way=way)
