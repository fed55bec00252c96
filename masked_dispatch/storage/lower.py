"""A call with sparsely stored arguments: the operator's sparse run, else the same call on dense storage.

1. sparse run   the rule's lowering, or its category's (op_registry.lowering)
2. dense        the sparse arguments stored densely and the call made again, if the policy in force allows it
3. nothing      MaskedSemanticsError, naming the operator, the layouts, and the ways out
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.gradient import closed
from masked_dispatch.storage.boundary import closed_sparse, open_any, opened_sparse
from masked_dispatch.storage.policy import check_allowed
from masked_dispatch.storage.wrapper import SparselyStored
from masked_dispatch.storage.writes import store
from op_registry import resolve
from op_registry.accumulate import accumulate
from op_registry.categories import REFUSED
from op_registry.lowering import run_sparsely
from op_registry.records import Dense, map_tensors
from op_registry.sparse import NotLowered, Sparse, united
from op_registry.turned import AnyRecord, Turned, to_dense


def lowered(op: OpOverload, args: Any, kwargs: Any, below: bool = False) -> Any:
    """The result of a call of which an argument is stored sparsely; `below` autograd, derivatives are not looked at."""
    meaning = resolve(op)
    why = "it has no rule of its own"
    if meaning.rule is not None and meaning.base is op:
        enter = _raw if below else open_any
        records = [map_tensors(enter, a, Tensor) for a in args]
        named = {k: map_tensors(enter, v, Tensor) for k, v in kwargs.items()}
        try:
            result = run_sparsely(op, meaning.rule, records, named)
        except NotLowered as reason:
            why = str(reason)
        else:
            for argument, record in zip(args, records, strict=True):
                if record is result:
                    return argument  # a rule that gives back what it was given means the argument itself
            return map_tensors(_close, result, (Dense, Sparse, Turned))
        if meaning.rule.category is REFUSED:
            return meaning.rule.bind(op)(*args, **kwargs)
    return _densely(op, args, kwargs, why)


def _raw(tensor: Tensor) -> AnyRecord:
    if isinstance(tensor, SparselyStored):
        return tensor.record
    return open_any(tensor)


def _close(record: AnyRecord) -> Tensor:
    return closed(record) if isinstance(record, Dense) else closed_sparse(record)


def _densely(op: OpOverload, args: Any, kwargs: Any, why: str) -> Any:
    found: list[SparselyStored] = []
    map_tensors(found.append, [*args, *kwargs.values()], SparselyStored)
    check_allowed(str(op), found, why)
    dense_args = map_tensors(stored_densely, args, SparselyStored)
    dense_kwargs = {k: map_tensors(stored_densely, v, SparselyStored) for k, v in kwargs.items()}
    result = op(*dense_args, **dense_kwargs)
    if op._schema.is_mutable:
        _write_back(op, (args, kwargs), (dense_args, dense_kwargs))
    return result


def _write_back(op: OpOverload, given: Any, dense: Any) -> None:
    """What an operator wrote into arguments that were stored densely for it, stored as they are."""
    (args, kwargs), (dense_args, dense_kwargs) = given, dense
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        here = position < len(args)
        mine = args[position] if here else kwargs.get(argument.name)
        theirs = dense_args[position] if here else dense_kwargs.get(argument.name)
        several = isinstance(mine, (list, tuple))
        for target, source in zip(mine if several else [mine], theirs if several else [theirs], strict=True):
            if isinstance(target, SparselyStored):
                store(target, source.detach())


def stored_densely(tensor: SparselyStored) -> Tensor:
    """The same tensor with every element stored; differentiable."""
    return closed(to_dense(opened_sparse(tensor)))


def accumulated(tensors: list[Tensor]) -> Tensor:
    """The sum of what is there, of which some is stored sparsely; sparse as long as all of it is."""
    records = [open_any(t) for t in tensors]
    turned = [r for r in records if isinstance(r, Turned)]
    try:
        if all(isinstance(r, Sparse) for r in records):
            return closed_sparse(united(records))  # type: ignore[arg-type]
        if turned and len(turned) == len(records) and len({r.order for r in turned}) == 1:
            return closed_sparse(turned[0].like(united([r.base for r in turned])))
    except NotLowered as reason:
        check_allowed("accumulate", [t for t in tensors if isinstance(t, SparselyStored)], str(reason))
    return closed(accumulate([r if isinstance(r, Dense) else to_dense(r) for r in records]))
