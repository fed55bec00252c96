"""A call with sparsely stored arguments: the operator's lowering, else the same call on dense storage.

1. lowering   runs the lowering of the rule or of its category (op_registry.sparse.lowering)
2. dense      converts the sparse arguments to dense storage and calls again, if the current policy allows it
3. error      raises MaskedSemanticsError, with the operator, the layouts and the alternatives
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.autograd.dense import follow_plain, wrap_record
from masked_dispatch.autograd.reached import MASKED, join, joined
from masked_dispatch.autograd.sparse import unwrap_any, unwrap_sparse, wrap_any, wrap_sparse_record
from masked_dispatch.densify_policy import check_allowed, current, warn_of_dense_operands
from masked_dispatch.dispatch.plain_results import refuse_plain
from masked_dispatch.dispatch.sparse_writes import store
from masked_dispatch.dispatch.steps import run_in_steps
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import schema_of
from op_registry import registry
from op_registry.extents.run import has_extent, run_with_extents
from op_registry.extents.writes import united
from op_registry.laws.categories import ELEMENTWISE, LOSS, REFUSED
from op_registry.records.accumulate import accumulate
from op_registry.records.dense import Dense, map_tensors
from op_registry.rule import Rule, Run
from op_registry.sparse.lowering import run_sparsely
from op_registry.sparse.permuted import RECORDS, AnyRecord, sum_of_any_order, to_dense
from op_registry.sparse.record import NotLowered

# The positional and keyword arguments of a call.
Arguments = tuple[Sequence[Any], Mapping[str, Any]]


def lowered(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], below: bool = False) -> Any:
    """The result of a call with sparsely stored arguments; `below`: the call comes from below autograd."""
    return lowered_by(registry.get(op), op, args, kwargs, op, below)


def lowered_by(
    rule: Rule | None,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    on_dense: Run,
    below: bool = False,
) -> Any:
    """The same with a given rule; `on_dense` makes the call on dense storage."""
    why = "it has no rule of its own"
    if rule is not None:
        to_record = _unwrap_below if below else unwrap_any
        records = [map_tensors(to_record, a, Tensor) for a in args]
        named = {k: map_tensors(to_record, v, Tensor) for k, v in kwargs.items()}
        if rule.category is ELEMENTWISE and rule.traits.derivative != "linear" and not below:
            follow_plain(args, records)
        try:
            result = run_in_steps(_run_lowering, (op, rule, args, records, named, kwargs), {})
        except NotLowered as reason:
            why = str(reason)
        else:
            if current().when == "warn" and rule.category in (ELEMENTWISE, LOSS):
                tensors = [a for a in args if isinstance(a, Tensor)]
                sparse = [t for t in tensors if isinstance(t, SparseMaskedTensor)]
                warn_of_dense_operands(str(op), sparse, [t for t in tensors if not isinstance(t, SparseMaskedTensor)])
            return result
        if rule.category is REFUSED:
            return rule.bind(op)(*args, **kwargs)
    return _run_densely(op, args, kwargs, why, on_dense)


def _run_lowering(
    op: OpOverload,
    rule: Rule,
    args: Sequence[Any],
    records: list[Any],
    named: dict[str, Any],
    given: Mapping[str, Any],
) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        return run_sparsely(op, rule, args, kwargs)

    if has_extent(records) or has_extent(named.values()):
        result = run_with_extents(run, rule, op, *records, **named)
    else:
        result = run(*records, **named)
    for argument, record in zip(args, records, strict=True):
        if record is result:
            return argument  # if a rule returns its argument, the result is the tensor itself
    for n, value in enumerate(result if isinstance(result, tuple) else [result]):
        refuse_plain(value, rule, n)
    wrapped = map_tensors(wrap_any, result, RECORDS)
    if type(wrapped) not in MASKED or wrapped.requires_grad:
        join(rule, op, (args, given), (records, named), wrapped)
    return wrapped


def _unwrap_below(tensor: Tensor) -> AnyRecord:
    if isinstance(tensor, SparseMaskedTensor):
        return tensor.record
    return unwrap_any(tensor)


def _run_densely(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], why: str, on_dense: Run) -> Any:
    operands: list[SparseMaskedTensor] = []
    map_tensors(operands.append, [*args, *kwargs.values()], SparseMaskedTensor)
    check_allowed(str(op), operands, why)
    dense_args = map_tensors(stored_densely, args, SparseMaskedTensor)
    dense_kwargs = {k: map_tensors(stored_densely, v, SparseMaskedTensor) for k, v in kwargs.items()}
    result = on_dense(*dense_args, **dense_kwargs)
    if schema_of(op).is_mutable:
        _write_back(op, (args, kwargs), (dense_args, dense_kwargs))
    return result


def _write_back(op: OpOverload, original: Arguments, dense: Arguments) -> None:
    """Copy an operator's writes from dense copies of its arguments to the arguments, in their own layouts."""
    (args, kwargs), (dense_args, dense_kwargs) = original, dense
    for position, argument in enumerate(schema_of(op).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if position < len(args):
            targets, sources = args[position], dense_args[position]
        elif argument.name in kwargs:
            targets, sources = kwargs[argument.name], dense_kwargs[argument.name]
        else:
            continue
        is_list = isinstance(targets, (list, tuple))
        for target, source in zip(targets, sources, strict=True) if is_list else [(targets, sources)]:
            if isinstance(target, SparseMaskedTensor):
                store(target, source.detach())


def stored_densely(tensor: SparseMaskedTensor) -> Tensor:
    """The same tensor in dense storage; differentiable."""
    record = unwrap_sparse(tensor)
    return joined(tensor, record, wrap_record(to_dense(record)), moving=True)


def accumulate_sparse(tensors: list[Tensor]) -> Tensor:
    """The sum of the valid contributions, at least one of them sparse; the result is sparse if all are."""
    records = [unwrap_any(t) for t in tensors]
    try:
        if not any(isinstance(r, Dense) for r in records):
            total = wrap_sparse_record(united(sum_of_any_order(records), records))  # type: ignore[arg-type]
            join(None, None, (tensors, {}), (records, {}), total)
            return total
    except NotLowered as reason:
        check_allowed("accumulate", [t for t in tensors if isinstance(t, SparseMaskedTensor)], str(reason))
    dense = [r if isinstance(r, Dense) else to_dense(r) for r in records]
    wrapped = wrap_record(united(accumulate(dense), dense))
    join(None, None, (tensors, {}), (records, {}), wrapped)
    return wrapped
