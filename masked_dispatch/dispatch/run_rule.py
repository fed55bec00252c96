"""Run a rule: turn arguments into records, run the rule on them, turn its results into masked tensors.

With a sparsely stored argument, a call is served by the first of these that can:

1. lowering   runs the lowering of the rule or of its category (op_registry.sparse.lowering)
2. dense      converts the sparse arguments to dense storage and calls again, if the current policy allows it
3. error      raises MaskedSemanticsError, with the operator, the layouts and the alternatives
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.weak import WeakTensorKeyDictionary

from masked_dispatch.autograd.dense import follow_plain, unwrap, wrap_record
from masked_dispatch.autograd.reached import MASKED, join, joined
from masked_dispatch.autograd.sparse import strided_operand, unwrap_any, unwrap_sparse, wrap_any, wrap_sparse_record
from masked_dispatch.compiler_internals import modes_in_force, pending_sizes, sizes_to_be_found
from masked_dispatch.dispatch.assign import assign_below
from masked_dispatch.dispatch.kernel_table import Kernel
from masked_dispatch.distributed_internals import (
    constants_replicated,
    is_mixed_with_distributed,
    is_refused_by_all_ranks,
)
from masked_dispatch.engine_internals import frames_to_caller
from masked_dispatch.policies import check_allowed, densifying, warn_of_dense_operands
from masked_dispatch.tensor.checks import values_unknown
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import DispatchKeySet, redispatch, tree_flatten, under_transform
from op_registry import registry
from op_registry.bound import bind_by_name
from op_registry.errors import InvalidValueError, MaskedSemanticsError
from op_registry.extents.run import has_extent, run_with_extents
from op_registry.extents.writes import united
from op_registry.laws.categories import ELEMENTWISE, LOSS, REFUSED
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.divided import is_divided, undivided
from op_registry.records.sums import accumulate
from op_registry.rule import Rule, Run
from op_registry.schema import written_arguments
from op_registry.sparse.layout import OF_TORCH
from op_registry.sparse.lowering import run_sparsely
from op_registry.sparse.permuted import RECORDS, AnyRecord, sum_of_any_order, to_dense
from op_registry.sparse.record import NotLowered


def rule_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """A kernel that runs the rule, unwrapping and wrapping differentiably."""
    run, steps, unchanged = rule.bind(op), rule.traits.data_sizes, rule.traits.unchanged
    on_sparse = lowered_and_written if written_arguments(op) else lowered

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if unchanged is not None and unchanged(*args[1:], **kwargs):
            return args[0]
        storage = storage_among(args)
        if kwargs:
            storage = max(storage, storage_among(kwargs.values()))
        if storage == DENSE:
            arguments = (op, run, rule, args, kwargs)
            return run_in_steps(run_rule, arguments, {}) if steps else run_rule(*arguments)
        return redispatch(op, keyset, args, kwargs) if storage == PLAIN else on_sparse(op, args, kwargs)

    return remembering(kernel) if op in SELECTING else kernel


def run_rule(op: OpOverload, run: Run, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Unwrap, run, wrap. If the rule returns one of its argument records, the result is that argument itself."""
    if modes_in_force():
        return run_in_steps(_run_rule, (op, run, rule, args, kwargs), {})
    return _run_rule(op, run, rule, args, kwargs)


def _run_rule(op: OpOverload, run: Run, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = kwargs
    if kwargs:
        kwargs = {k: unwrap_argument(v) for k, v in kwargs.items()}
    if rule.traits.sparse_factors and has_sparse_factor(args):
        with contextlib.suppress(RuntimeError):  # torch multiplies only some layouts, from some sides
            return wrap_result(run(*[unwrap_factor(a) for a in args], **kwargs), rule)
    records = [unwrap_argument(a) for a in args]
    if rule.category is ELEMENTWISE and rule.traits.derivative != "linear":
        follow_plain(args, records)
    if has_extent(records) or (kwargs and has_extent(kwargs.values())):
        run = functools.partial(run_with_extents, run, rule, op)
    try:
        result = run(*records, **kwargs)
    except RuntimeError as error:
        name_selections(error, args)
        name_pairs(error)
        result = run_again(error, run, records, kwargs)
    if type(result) is Dense:
        for argument, record in zip(args, records, strict=True):
            if record is result:
                return argument
        wrapped = wrap_record(result)
    else:
        wrapped = wrap_result(result, rule)
    if type(wrapped) not in MASKED or wrapped.requires_grad:
        join(rule, op, (args, given), (records, kwargs), wrapped)
    return wrapped


# The storage of a call's arguments: the maximum over all arguments.
PLAIN, DENSE, SPARSE = 0, 1, 2


def storage_among(args: Iterable[object]) -> int:
    """SPARSE if `args`, or lists in it, contain a sparsely stored tensor; else DENSE if a masked one; else PLAIN."""
    storage = PLAIN
    for a in args:
        if isinstance(a, MaskedTensor):
            if isinstance(a, SparseMaskedTensor):
                return SPARSE
            storage = DENSE
        elif isinstance(a, (list, tuple)):
            nested = storage_among(a)
            if nested == SPARSE:
                return SPARSE
            storage = max(storage, nested)
    return storage


def has_masked(args: Iterable[object]) -> bool:
    """Whether `args`, or lists in it, contain a masked tensor."""
    return storage_among(args) != PLAIN


def masked_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """The masked arguments of a call, by name, with shape and dtype."""
    named = {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
    return ", ".join(
        f"{name} of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
        for name, value in named.items()
        for tensor in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(tensor, MaskedTensor)
    )


def unwrap_argument(value: object) -> object:
    """Convert an argument for a rule: records instead of tensors."""
    if isinstance(value, MaskedTensor):
        return unwrap(value)
    if isinstance(value, Tensor):
        return Dense(strided_operand(value), None)
    if isinstance(value, (list, tuple)):
        return [unwrap_argument(v) for v in value]
    return value


def is_sparse_factor(value: object) -> bool:
    """Whether products can take an argument as a torch.sparse tensor: without grad, for the gradient would differ."""
    return (
        isinstance(value, Tensor)
        and value.layout is not torch.strided
        and value.layout in OF_TORCH
        and not (value.requires_grad and torch.is_grad_enabled())
    )


def has_sparse_factor(args: Sequence[object]) -> bool:
    """Whether a product takes an operand as a torch.sparse tensor; in torch.func, only a product of matrices does."""
    return any(is_sparse_factor(a) for a in args) and not (
        under_transform() and any(isinstance(a, Tensor) and a.ndim != 2 for a in args)
    )


def unwrap_factor(value: object) -> object:
    """Convert an argument for a rule that multiplies torch.sparse tensors directly."""
    return Dense(value, None) if is_sparse_factor(value) else unwrap_argument(value)  # type: ignore[arg-type]


def wrap_result(value: object, rule: Rule) -> Any:
    """Convert a rule's result for the caller: masked tensors instead of records.

    Raises TypeError for a plain tensor, unless it has no elements or the rule declares that result as plain.
    """
    if isinstance(value, tuple):
        return type(value)(_wrap_records(v, rule, n) for n, v in enumerate(value))
    return _wrap_records(value, rule, 0)


def _wrap_records(value: object, rule: Rule, result: int) -> Any:
    if isinstance(value, Dense):
        return wrap_record(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrap_records(v, rule, result) for v in value)
    refuse_plain(value, rule, result)
    return value


def refuse_plain(value: object, rule: Rule, result: int) -> None:
    """TypeError for a plain tensor, unless it has no elements or the rule declares that result as plain."""
    if isinstance(value, Tensor) and not rule.is_plain(result) and not _known_to_be_empty(value):
        raise TypeError(
            f"the rule of {rule.name} [{rule.where}] returned a plain tensor of shape {tuple(value.shape)}, which "
            "would lose the mask; a rule returns Dense(data, validity). A rule may return plain results (a count, "
            "indices) if its category is QUERY or if it declares them: masked_rule(..., plain=(1,))."
        )


def _known_to_be_empty(value: Tensor) -> bool:
    """Whether a tensor has no elements. This does not compare symbolic sizes, which would add a guard."""
    return any(type(size) is int and size == 0 for size in value.shape)


# ------------------------------------------------------------------------------------------------ with sparse arguments


def lowered(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], below: bool = False) -> Any:
    """The result of a call with sparsely stored arguments; `below`: the call comes from below autograd."""
    return lowered_by(registry.get(op), op, args, kwargs, op, below)


def lowered_and_written(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], below: bool = False) -> Any:
    """The same of an operator that writes to its arguments."""
    return lowered_by(registry.get(op), op, args, kwargs, writing_back(op, args, kwargs, op), below)


def writing_back(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], run: Run) -> Run:
    """`run` on dense copies of a call's arguments: what it writes to a copy, the argument is given, as it is stored."""

    def on_dense(*dense_args: Any, **dense_kwargs: Any) -> Any:
        result = run(*dense_args, **dense_kwargs)
        given, copies = bind_by_name(op, args, kwargs), bind_by_name(op, dense_args, dense_kwargs)
        for name in written_arguments(op):
            is_list = isinstance(given[name], (list, tuple))
            pairs = zip(given[name], copies[name], strict=True) if is_list else [(given[name], copies[name])]
            for target, source in pairs:
                if isinstance(target, SparseMaskedTensor):
                    assign_below(target, source.detach())
        return result

    return on_dense


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
        call = (op, rule, args, records, named, kwargs)
        try:
            result = run_in_steps(_run_lowering, call, {}) if modes_in_force() else _run_lowering(*call)
        except NotLowered as reason:
            why = str(reason)
        else:
            if densifying().when == "warn" and rule.category in (ELEMENTWISE, LOSS):
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
    return on_dense(*dense_args, **dense_kwargs)


def stored_densely(tensor: SparseMaskedTensor) -> Tensor:
    """The same tensor in dense storage; differentiable."""
    record = unwrap_sparse(tensor)
    return joined(tensor, record, wrap_record(to_dense(record)), moving="all")


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


# ----------------------------------------------------------------------------------------- several operators in a graph

Part = Tensor | torch.SymInt | torch.SymFloat | torch.SymBool


def run_in_steps(run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of `run`, which calls several operators.

    When Dynamo runs it on fake tensors, it expects every data-dependent size in the result. This removes from Dynamo's
    list the sizes that only intermediate tensors have, or that the result has only in a sum. (Later stages record each
    operator that `run` calls.)
    """
    pending = pending_sizes()
    kept = set(pending)
    try:
        result = run(*args, **kwargs)
        if len(pending) > len(kept):
            kept |= sizes_to_be_found(_parts_of(result), pending)
    finally:
        pending[:] = [size for size in pending if size in kept]
    return result


def _parts_of(result: object) -> list[Part]:
    """The tensors and numbers in a result, with each masked tensor replaced by its parts."""
    found: list[Part] = []
    for leaf in tree_flatten(result)[0]:
        if isinstance(leaf, MaskedTensor):
            found += [getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]]
        elif isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            found.append(leaf)
    return found


# ---------------------------------------------------------------------------------------------- errors about selections

SELECTING = frozenset((torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default))
# Maps a selected tensor to the mask that selected it, as long as the caller holds both.
_masks: Any = WeakTensorKeyDictionary()


def remembering(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an operator that selects."""

    @functools.wraps(kernel)
    def selecting(keyset: Any, x: Any, by: Any, **kwargs: Any) -> Any:
        result = kernel(keyset, x, by, **kwargs)
        for mask in _masks_among(by if isinstance(by, (list, tuple)) else (by,)):
            if not values_unknown(mask._data):
                _masks[result] = weakref.ref(mask)
        return result

    return selecting


def _masks_among(indices: Iterable[object]) -> Iterator[MaskedTensor]:
    """The indices that are dense boolean masks with a stored validity."""
    for index in indices:
        if type(index) is MaskedTensor and index.dtype is torch.bool and index._validity is not None:
            yield index


def name_selections(error: RuntimeError, operands: Iterable[object]) -> None:
    """Add to an error about sizes, before the caller raises it again, which operand a mask with holes selected."""
    if "must match" not in str(error):
        return
    for operand in operands:
        if not isinstance(operand, Tensor) or operand not in _masks:
            continue
        mask = _masks[operand]()
        holes = 0 if mask is None else mask.numel() - int(mask.count())
        if holes:
            error.args = (
                f"{error}. The operand of shape {tuple(operand.shape)} was selected by a mask of shape "
                f"{tuple(mask.shape)} in which {holes} entries are invalid, and these select nothing: select the other "
                "operand by the same mask, or say what they stand for, x[mask.to_tensor(True)]",
            )


# -------------------------------------------------------------------------------------------- errors of other libraries

# Libraries that read values or sizes of their arguments; none of them supports masks.
MEASURES = frozenset(("ignite", "sklearn", "torcheval", "torchmetrics"))


def name_pairs(error: RuntimeError) -> None:
    """Add a hint to an error about an invalid value, before the caller raises it again: what to pass to the library."""
    if not isinstance(error, InvalidValueError):
        return
    library = frames_to_caller()[-1][0].partition(".")[0]
    if library in MEASURES:
        error.args = (
            f"{error} {library} asked, which knows no masks: pass it what is valid, "
            "*masked_dispatch.metrics.valid_pairs(predicted, target)",
        )


# ------------------------------------------------------------------------------------------------- distributed operands


def run_again(error: RuntimeError, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a rule again after its first run raised an error; raise that error if no operand is distributed.

    A rule's own constants are not distributed, and equal on all ranks. If DTensor refuses an operand's placement, or
    does not implement an operator, every rank runs the rule on whole operands. That needs all ranks; an error on one
    rank alone stays an error.
    """
    tensors: list[Tensor] = []
    map_tensors(lambda operand: tensors.append(operand.data), [*args, *kwargs.values()], (Dense, Tensor))
    divided = [tensor for tensor in tensors if is_divided(tensor)]
    numbers = [tensor for tensor in tensors if tensor.numel() == 1 and not is_divided(tensor)]
    if not divided or len(divided) + len(numbers) < len(tensors):
        raise error
    if is_mixed_with_distributed(error):
        try:
            with constants_replicated():
                return run(*args, **kwargs)
        except RuntimeError as refused:
            error = refused
    if isinstance(error, MaskedSemanticsError) or not is_refused_by_all_ranks(error):
        raise error
    positional, named = map_tensors(whole, (list(args), list(kwargs.items())), (Dense, Tensor))
    result = run(*positional, **dict(named))
    return map_tensors(lambda part: on_all_ranks(part, divided[0]), result, (Dense, Tensor))


def whole(operand: Any) -> Any:
    """An operand, gathered from all ranks, as plain tensors; differentiable."""
    if isinstance(operand, Dense):
        return operand.map(whole)
    return undivided(operand).to_local() if is_divided(operand) else operand  # type: ignore[attr-defined]


def on_all_ranks(result: Any, like: Any) -> Any:
    """Wrap a result that every rank has computed in a distributed tensor."""
    if isinstance(result, Dense):
        return result.map(lambda tensor: on_all_ranks(tensor, like))
    tensors = importlib.import_module("torch.distributed.tensor")
    replicated = [tensors.Replicate()] * len(like.placements)
    return tensors.DTensor.from_local(result, like.device_mesh, replicated, run_check=False)
