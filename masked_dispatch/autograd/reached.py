"""What a gradient reached, carried backward beside the gradient.

Masking after an operator is as good as masking before it: an element gets nothing back through results that are all
invalid, by a mask given later or by another operand's. At such a result the gradient is 0, but the derivative there may
be infinite, and torch's formula multiplies. So the operands of a call need to know which of its results were *reached*:
those that are valid, and whose gradient is valid and came from something reached.

The nodes of `Wrap` and `Unwrap` know of one another by a :class:`Call`. Which elements of an operand are reached
follows from the dimensions that the rule states: along a batch dimension, those at an index where a result is; along
others, all of the slice. What moves elements says it by its own derivative. A gradient that reached less than its mask
says carries what it reached. Where all valid results are reached and their mask is that of the operand, nothing is
narrower, and nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import GradientEdge

from masked_dispatch.engine_internals import current_node, engine_run
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.bound import bind_by_name
from op_registry.dimensions.labels import Elementwise, tensors_in
from op_registry.laws import categories as laws
from op_registry.records.dense import Dense
from op_registry.records.dims import with_leading_dims
from op_registry.records.spread import OF_LOSSES, OF_PRODUCTS, anywhere, broadcast_back, is_met_everywhere, spread
from op_registry.records.validity import as_int8, intersect, is_same_memory, unite
from op_registry.rule import Category, Rule
from op_registry.sparse.permuted import AnyRecord, Permuted, to_dense
from op_registry.sparse.record import Sparse

M = TypeVar("M", bound=MaskedTensor)
RECORDS = (Dense, Sparse, Permuted)


def _names(*categories: Category) -> frozenset[str]:
    return frozenset(category.name for category in categories)


# Their derivative moves or adds up gradients, so it tells which elements were reached.
# (Sets of names: comparing categories compares all of their fields.)
_MOVING = _names(laws.MOVEMENT, laws.JOIN, laws.INDEXING, laws.ASSIGNMENT, laws.ACCUMULATION)
# If an operand is the only masked one, each of its valid elements has a valid result.
_KEEPING = _MOVING | _names(
    laws.REDUCTION, laws.SCAN, laws.NORMALIZATION, laws.SORTING, laws.POOLING, laws.CONTRACTION, laws.RANDOM, laws.LOSS,
    laws.ATTENTION, laws.RECURRENT,
)  # fmt: skip
_recording = torch.is_grad_enabled
# Operands whose elements meet along dimensions that no result has.
_MEETING = {laws.LOSS.name: OF_LOSSES, laws.CONTRACTION.name: OF_PRODUCTS}
# What a sparse result's gradient reached is stored densely for operands of other patterns, up to so many elements.
_MOST_STORED = 1 << 26


class _Nothing:
    """What was reached where no gradient has arrived."""


NOTHING = _Nothing()


class Operand:
    """Stands for a tensor argument of a call: what backward needs to find which of its elements were reached.

    validity  its mask, if it is stored densely
    later     what is also reached through the formulas that a backward with `create_graph` has recorded
    """

    __slots__ = ("later", "ndim", "shape", "validity")

    def __init__(self, record: AnyRecord) -> None:
        self.shape, self.ndim = record.shape, record.ndim
        self.validity = record.validity if isinstance(record, Dense) else None
        self.later: Any = NOTHING


class Call:
    """A call as the nodes of its operands and results know it in backward.

    arguments  with an Operand for each tensor
    arrived    for each result: in which run of the engine its gradient arrived, and what that reached: None for
               everything, int8 that broadcasts to the result, a record of it, or a dict of what it reached of operands
    elementwise  whether an element of the result is that of the operands' at its place
    passes_zeros  whether a gradient of 0 gives an operand 0, whatever its elements are
    keeping    whether everything valid in its operand is reached if everything valid in its results is
    """

    __slots__ = ("arguments", "arrived", "elementwise", "keeping", "op", "passes_zeros", "rule")

    def __init__(self, rule: Rule | None, op: OpOverload | None) -> None:
        self.rule, self.op = rule, op
        self.arguments: tuple[Sequence[Any], Mapping[str, Any]] = (), {}
        self.arrived: dict[int, tuple[int, Any]] = {}
        self.keeping = self.passes_zeros = False
        self.elementwise = rule is None or type(rule.dims) is Elementwise

    def arrive(
        self, node: Any, grad: Tensor, reached: Tensor | None, whole: bool, stored: AnyRecord | None = None
    ) -> None:
        """Say what a gradient of a result reached.

        node    the result's
        grad    the gradient, plain; of a sparse result, of its values
        whole   whether that is all that is valid in the result
        stored  a sparse result whose valid values are those reached
        """
        found: Any = reached if stored is None else stored
        if whole and self.keeping:
            found = None
        elif node.operands is not None and reached is not None:
            found = _moved_back(node, grad, reached)
        self.arrived[node.result] = engine_run(), found

    def reached(
        self,
        operand: Operand,
        own: Tensor | None,
        of_result: Callable[[int, Any], Tensor | None],
        of_stored: Callable[[Tensor | None], Tensor | None] = lambda part: part,
    ) -> Tensor | None:
        """What of an operand with the mask `own` was reached: int8 that broadcasts to its data; None: all valid ones.

        of_result  what is reached through a result, from its number and what is reached of it
        of_stored  of a sparse operand: what of its stored values a part of the operand is
        """
        run, total = engine_run(), operand.later
        if total is NOTHING and len(self.arrived) == 1 and (self.elementwise or self.keeping) and not _recording():
            ((result, (when, reached)),) = self.arrived.items()
            if when == run and (reached is None or reached is own):
                return None  # the usual case
        met = None if self.elementwise or self.keeping else of_stored(self._met(operand, own))
        for result, (when, reached) in self.arrived.items():
            if when != run:
                continue
            if isinstance(reached, dict):
                reached = reached.get(operand, NOTHING)
            elif reached is not None and not is_same_memory(reached, own):
                reached = of_result(result, reached)
            if reached is not NOTHING:
                reached = intersect(None if is_same_memory(reached, own) else reached, met)
                total = reached if total is NOTHING else unite(total, reached)
        if _recording():
            operand.later = total
        return None if total is NOTHING else total

    def of_operand(self, operand: Operand, result: int, reached: Tensor) -> Tensor | None:
        """What of an operand is reached, given what of a result is; None for everything."""
        if self.elementwise:
            return broadcast_back(reached, operand.shape)
        labels, names = self._labels()
        if labels is not None and len(labels.results) > result and len(labels.results[result]) == reached.ndim:
            return spread(reached, labels.results[result], labels, names[operand], operand.shape)
        found = anywhere(reached, range(reached.ndim))  # nothing is stated: any result may depend on any element
        return found.view((1,) * operand.ndim)

    def _labels(self) -> tuple[Any, dict[Any, str]]:
        """The labels of the call, and the names of its operands; None where its rule states none."""
        if self.op is None or self.rule is None or self.rule.dims is None:
            return None, {}
        named = bind_by_name(self.op, *self.arguments)
        return self.rule.dims.labels(self.op, named), {t: name for name, t in tensors_in(self.op, named).items()}

    def _met(self, operand: Operand, own: Tensor | None) -> Tensor | None:
        """Which elements meet a valid one of each other operand along dimensions that no result has; None: all."""
        shared = _MEETING.get(self.rule.category.name) if self.rule is not None else None
        if shared is None:
            return None
        labels, names = self._labels()
        if labels is None or (shared is OF_PRODUCTS and not labels.is_sum_of_products):
            return None
        mine, found = labels.operands[names[operand]], None
        for other, name in names.items():
            if other is operand or other.validity is None or {name, names[operand]} & {*labels.added}:
                continue
            dims, validity = labels.operands[name], with_leading_dims(other.validity, other.ndim - other.validity.ndim)
            if not (is_same_memory(validity, own) and dims == mine) and not is_met_everywhere(
                Dense(validity.expand(other.shape), validity), dims, mine
            ):
                found = intersect(found, spread(validity, dims, labels, names[operand], operand.shape, shared))
        return found


def _moved_back(node: Any, grad: Tensor, reached: Tensor) -> dict[Operand, Tensor]:
    """What of each operand is reached, by the derivative of a call that moves or adds up elements."""
    edge, *_ = node.next_functions
    ones = reached.expand(grad.shape).to(grad.dtype)
    edges = [GradientEdge(n, 0) for n in node.operands]
    with torch.enable_grad():
        found = torch.autograd.grad([GradientEdge(*edge)], edges, [ones], retain_graph=True, allow_unused=True)
    pairs = zip(node.operands, found, strict=True)
    return {n.operand: as_int8(g != 0) for n, g in pairs if g is not None}


def stored_densely(reached: Any) -> Tensor | None:
    """What of a result is reached as a dense int8 tensor; None, for everything, if that would be too large."""
    if isinstance(reached, Tensor):
        return reached
    if math.prod(reached.shape) > _MOST_STORED:
        return None
    dense = to_dense(reached)
    return dense.data.new_ones(dense.shape, dtype=torch.int8) if dense.validity is None else dense.full_validity


def narrowed(record: AnyRecord, reached: Tensor | None) -> AnyRecord:
    """A gradient's record, valid where it has reached something."""
    if reached is None:
        return record
    if isinstance(record, Dense):
        return record.masked_by(reached)
    base = record.base if isinstance(record, Permuted) else record
    base = base.like(base.values.masked_by(reached))
    return record.like(base) if isinstance(record, Permuted) else base


def join(
    rule: Rule | None,
    op: OpOverload | None,
    given: tuple[Sequence[Any], Mapping[str, Any]],
    records: tuple[Sequence[Any], Mapping[str, Any]],
    results: Any,
    moving: bool = False,
) -> None:
    """Let the nodes of a call's operands and results know of one another, if somebody differentiates it.

    rule, op  None: each element of the result is that of the operand at its place; if `moving`, of another
    given     the arguments, positional and by keyword, of which `records` are those that the rule has got
    """
    if type(results) is MaskedTensor:
        nodes: list[Any] = [results.grad_fn]
    else:
        nodes = []
        for result in results if isinstance(results, (list, tuple)) else (results,):
            if not isinstance(result, MaskedTensor) and (not isinstance(result, Tensor) or result.requires_grad):
                return  # what gradients of plain results reach is not known
            nodes.append(result.grad_fn if isinstance(result, MaskedTensor) else None)
    if not any(map(_is_ours, nodes)):
        return
    call, operands, masked = Call(rule, op), [], 0

    def stand_in(value: Any, record: Any) -> Any:
        nonlocal masked
        if isinstance(record, RECORDS):
            operand = Operand(record)
            if isinstance(value, MaskedTensor):
                masked += 1
                node: Any = _data_of(record).grad_fn
                if _is_ours(node):
                    node.call, node.operand = call, operand
                    operands.append(node)
            return operand
        if isinstance(record, (list, tuple)):
            return [stand_in(v, r) for v, r in zip(value, record, strict=True)]
        return record

    (args, kwargs), (of_args, of_kwargs) = given, records
    positional = [stand_in(v, r) for v, r in zip(args, of_args, strict=True)]
    call.arguments = positional, {name: stand_in(kwargs[name], r) for name, r in of_kwargs.items()} if kwargs else {}
    if not operands:
        return
    category = "" if rule is None else rule.category.name
    moving = moving or category in _MOVING
    if masked == 1 and rule is not None and category in _KEEPING:
        call.keeping = rule.slices is None or rule.slices.number is None
    call.passes_zeros = moving or (rule is not None and call.elementwise and rule.traits.derivative == "linear")
    for n, node in enumerate(nodes):
        if _is_ours(node):
            node.call, node.result, node.operands = call, n, operands if moving else None


def joined(tensor: Tensor, record: AnyRecord, result: M, moving: bool = False) -> M:
    """The result of a conversion of one tensor, whose elements it has at their places, or `moving` them."""
    join(None, None, ((tensor,), {}), ((record,), {}), result, moving)
    return result


def _is_ours(node: Any) -> bool:
    """Whether a node is one of `Unwrap` or `Wrap`, or of their sparse kin, and no call knows it yet."""
    return getattr(node, "call", NOTHING) is None


def _data_of(record: AnyRecord) -> Tensor:
    """The data of a record, which its operand's node has made."""
    if isinstance(record, Dense):
        return record.data
    return (record.base if isinstance(record, Permuted) else record).values.data


# ------------------------------------------------------------------------------------------------ what gradients carry


def carry(grad: Any, reached: Tensor | None) -> Any:
    """The gradient, which carries what it reached in this run of the engine; None: all that is valid in it."""
    if reached is not None and isinstance(grad, MaskedTensor):
        grad._reached = engine_run(), _state_of(grad), reached
    return grad


def carried(grad: Tensor) -> Tensor | None:
    """What a gradient reached: int8 that broadcasts to its data; None for all that is valid in it."""
    if not isinstance(grad, MaskedTensor) or grad._reached is None:
        return None
    when, state, reached = grad._reached
    return reached if when == engine_run() and state == _state_of(grad) else None


def _state_of(grad: MaskedTensor) -> tuple[int, int]:
    """What a write to a gradient changes, as a hook may do, or the node of an in-place write."""
    return grad._version, id(getattr(grad, "_pattern", None))


def carry_nothing(grad: Any) -> Any:
    """The gradient of what reaches nothing."""
    if not isinstance(grad, MaskedTensor):
        return grad
    data = _data_of(grad._printed_record)
    return carry(grad, torch.zeros((1,) * data.ndim, dtype=torch.int8, device=data.device))


def what_views_reached(grads: Sequence[Tensor | None], masks: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What gradients of views with these masks reached, in their dtypes and shapes; empty if that is all of it."""
    if torch.compiler.is_dynamo_compiling() or all(g is None or carried(g) is None for g in grads):
        return []
    found: list[Tensor | None] = []
    for grad, validity in zip(grads, masks, strict=True):
        reached = None if grad is None else intersect(carried(grad), validity)
        if grad is not None and reached is not None:
            found.append(reached.expand(grad.shape).to(grad.dtype))
        else:
            found.append(None if grad is None else torch.ones(grad.shape, dtype=grad.dtype, device=grad.device))
    return found


def moved_back_by_view(reached: Sequence[Tensor | None]) -> Tensor:
    """What of the base is reached through the views of the node that runs."""
    with torch.no_grad():
        found = current_node()(*reached)
    return as_int8(found != 0)
