"""A call with sparsely stored arguments: the operator's sparse run, else the same call on dense storage.

1. sparse run   the rule's lowering, or its category's (op_registry.sparse.lowering)
2. dense        the sparse arguments stored densely and the call made again, if the policy in force allows it
3. nothing      MaskedSemanticsError, naming the operator, the layouts, and the ways out
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.autograd.sparse import unwrap_any, unwrap_sparse, wrap_sparse_record
from masked_dispatch.densify_policy import check_allowed
from masked_dispatch.dispatch.sparse_writes import store
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import schema_of
from op_registry import resolve
from op_registry.categories import REFUSED
from op_registry.records.accumulate import accumulate
from op_registry.records.dense import Dense, map_tensors
from op_registry.sparse.lowering import run_sparsely
from op_registry.sparse.permuted import AnyRecord, Permuted, to_dense
from op_registry.sparse.record import NotLowered, Sparse, sum_of_union


def lowered(op: OpOverload, args: Any, kwargs: Any, below: bool = False) -> Any:
    """The result of a call of which an argument is stored sparsely; `below` autograd, derivatives are not looked at."""
    meaning = resolve(op)
    why = "it has no rule of its own"
    if meaning.rule is not None and meaning.base is op:
        enter = _raw if below else unwrap_any
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
            return map_tensors(_close, result, (Dense, Sparse, Permuted))
        if meaning.rule.category is REFUSED:
            return meaning.rule.bind(op)(*args, **kwargs)
    return _densely(op, args, kwargs, why)


def _raw(tensor: Tensor) -> AnyRecord:
    if isinstance(tensor, SparseMaskedTensor):
        return tensor.record
    return unwrap_any(tensor)


def _close(record: AnyRecord) -> Tensor:
    return wrap_record(record) if isinstance(record, Dense) else wrap_sparse_record(record)


def _densely(op: OpOverload, args: Any, kwargs: Any, why: str) -> Any:
    found: list[SparseMaskedTensor] = []
    map_tensors(found.append, [*args, *kwargs.values()], SparseMaskedTensor)
    check_allowed(str(op), found, why)
    dense_args = map_tensors(stored_densely, args, SparseMaskedTensor)
    dense_kwargs = {k: map_tensors(stored_densely, v, SparseMaskedTensor) for k, v in kwargs.items()}
    result = op(*dense_args, **dense_kwargs)
    if schema_of(op).is_mutable:
        _write_back(op, (args, kwargs), (dense_args, dense_kwargs))
    return result


def _write_back(op: OpOverload, given: Any, dense: Any) -> None:
    """What an operator wrote into arguments that were stored densely for it, stored as they are."""
    (args, kwargs), (dense_args, dense_kwargs) = given, dense
    for position, argument in enumerate(schema_of(op).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        here = position < len(args)
        mine = args[position] if here else kwargs.get(argument.name)
        theirs = dense_args[position] if here else dense_kwargs.get(argument.name)
        several = isinstance(mine, (list, tuple))
        for target, source in zip(mine if several else [mine], theirs if several else [theirs], strict=True):
            if isinstance(target, SparseMaskedTensor):
                store(target, source.detach())


def stored_densely(tensor: SparseMaskedTensor) -> Tensor:
    """The same tensor with every element stored; differentiable."""
    return wrap_record(to_dense(unwrap_sparse(tensor)))


def accumulate_sparse(tensors: list[Tensor]) -> Tensor:
    """The sum of what is there, of which some is stored sparsely; sparse as long as all of it is."""
    records = [unwrap_any(t) for t in tensors]
    turned = [r for r in records if isinstance(r, Permuted)]
    try:
        if all(isinstance(r, Sparse) for r in records):
            return wrap_sparse_record(sum_of_union(records))  # type: ignore[arg-type]
        if turned and len(turned) == len(records) and len({r.order for r in turned}) == 1:
            return wrap_sparse_record(turned[0].like(sum_of_union([r.base for r in turned])))
    except NotLowered as reason:
        check_allowed("accumulate", [t for t in tensors if isinstance(t, SparseMaskedTensor)], str(reason))
    return wrap_record(accumulate([r if isinstance(r, Dense) else to_dense(r) for r in records]))
