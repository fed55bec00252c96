"""What a gradient reached, carried backward beside the gradient.

Masking after an operator is as good as masking before it: an element gets nothing back through results that are all
invalid, by a mask given later or by another operand's. At such a result the gradient is 0, but the derivative there may
be infinite, and torch's formula multiplies. So the operands of a call need to know which of its results were *reached*:
those that are valid, and whose gradient is valid and came from something reached.

A :class:`Call` on the node of a result's `Wrap` keeps what that takes, without data. Where all valid results are
reached and their mask is that of the operands, nothing is narrower: nothing else is done. From the first gradient on
that reached less, the nodes of operands (`Unwrap`) know the call too, and their gradients carry what they reached. It
follows from the dimensions that the rule states: along a batch dimension, an operand's elements at an index where a
result is; along others, all of the slice. What moves elements says it by its own derivative.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import GradientEdge

from masked_dispatch.engine_internals import current_node, engine_run
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry.bound import bind_by_name
from op_registry.dimensions.labels import Elementwise, tensors_in
from op_registry.laws import categories as laws
from op_registry.older_torch import next_functions
from op_registry.records.arguments import with_leading_dims
from op_registry.records.dense import Dense
from op_registry.records.sums import OF_LOSSES, OF_PRODUCTS, anywhere, broadcast_back, is_met_everywhere, spread
from op_registry.records.tracing import may_be_read
from op_registry.records.validity import as_int8, intersect, is_same_memory, unite
from op_registry.rule import Category, Rule
from op_registry.sparse.permuted import RECORDS, AnyRecord, Permuted, to_dense

M = TypeVar("M", bound=MaskedTensor)
MASKED = (MaskedTensor, SparseMaskedTensor)
_OF_OPERANDS = ("UnwrapBackward", "SparseUnwrapBackward")
_OF_PLAIN = "BesideBackward"
# Each element of what they get is in one of their parts. They keep no tensors, so they can run again.
_TAKING_APART = [f"{name}Backward0{copy}" for name in ("Split", "SplitWithSizes", "Unbind") for copy in ("", "_copy")]


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
Moving = Literal["", "some", "all"]


class Operand:
    """Stands for a tensor argument of a call: what backward needs to find which of its elements were reached.

    validity  its mask, if it is stored densely
    node      of its `Unwrap`, if it has one. (A node in Python does not keep the graph below it.)
    later     what is also reached through the formulas that a backward with `create_graph` has recorded

    It has no `__init__`, for each call makes one for each tensor, and most are never read.
    """

    __slots__ = ("later", "node", "shape", "validity")
    later: Any
    node: Any
    shape: Sequence[int]
    validity: Tensor | None

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Call:
    """A call as the nodes of its operands and results know it in backward.

    Nodes of results know it from the start; those of operands if less than all of one of them was reached.

    arguments  with an Operand for each tensor
    operands   those that are masked
    plain      those that are not, if their gradients have to be 0 where nothing is reached
    moving     whether it moves elements, for calls without a rule: not, "some" of them, or "all" of the valid ones
    several    whether it has several results
    arrived    for each result: in which run of the engine its gradient arrived, and what that reached: None for
               everything, int8 that broadcasts to the result, a record of it, a dict of what it reached of operands,
               or the node of a part that is reached as a whole
    """

    __slots__ = ("arguments", "arrived", "linked", "moving", "op", "operands", "plain", "rule", "several")
    arguments: tuple[Sequence[Any], Mapping[str, Any]]
    arrived: dict[int, tuple[int, Any]]
    linked: list[Operand] | None
    moving: Moving
    op: OpOverload | None
    operands: list[Operand]
    plain: list[Operand]
    rule: Rule | None
    several: bool

    @property
    def category(self) -> str:
        return "" if self.rule is None else self.rule.category.name

    @property
    def elementwise(self) -> bool:
        """Whether an element of the result is that of the operands' at its place."""
        return self.rule is None or type(self.rule.dims) is Elementwise

    @property
    def moves(self) -> bool:
        return bool(self.moving) or self.category in _MOVING

    @property
    def passes_zeros(self) -> bool:
        """Whether a gradient of 0 gives an operand 0, whatever its elements are."""
        linear = self.rule is not None and self.rule.traits.derivative == "linear"
        return (linear and self.elementwise) or self.moves

    @property
    def keeping(self) -> bool:
        """Whether everything valid in its operand is reached if everything valid in one of its results is."""
        rule = self.rule
        if rule is None:
            return self.moving == "all"
        if self.operands[1:] or rule.category.name not in _KEEPING or (self.several and self.moves):
            return False
        return getattr(rule.dims, "number", None) is None  # else results are of some elements only

    def link(self) -> None:
        """Let the nodes of operands know the call."""
        if self.linked is None:
            followed = (*self.operands, *self.plain)
            self.linked = [operand for operand in followed if operand.node and operand.node.call is None]
            for operand in self.linked:
                operand.later, operand.node.call, operand.node.operand = NOTHING, self, operand

    def needs(self, node: Any, grad: Tensor) -> bool:
        """Whether operands have to know what a gradient reached of the result with this node: not all, perhaps."""
        validity, pattern = node.validity, node.pattern
        zeros = self.passes_zeros
        # (What was reached does not matter to a leaf that gets 0 where nothing was.)
        if zeros and all(operand.node is None or _is_of_leaf(operand.node) for operand in self.operands):
            return False
        if type(grad) is MaskedTensor:
            own = grad._stored_validity if grad._family is None else grad._validity
            if grad._reached is not None or (own is not validity and not self._converts_all(own, validity)):
                return True
        elif type(grad) is SparseMaskedTensor:
            stored = grad._kept.now
            if grad._reached is not None or stored.pattern is not pattern or grad._order != node.order:
                return True
            if stored.validity is not None or validity is not None:
                return True
        elif type(grad) is not Tensor:
            return True
        if self.several or _recording():
            return True
        for operand in self.operands:
            other = operand.node
            if other is None:
                continue
            stored_alike = other.pattern is pattern and other.order == node.order
            if stored_alike and (operand if pattern is None else other).validity is validity:
                continue
            if self.keeping:
                return False
            if pattern is not None or other.pattern is not None:
                return True
            if zeros and _is_of_leaf(other):
                continue
            if not is_same_memory(operand.validity, validity):
                return True
        return bool(self.operands[1:]) and self.category in _MEETING

    def _converts_all(self, own: Tensor | None, validity: Tensor | None) -> bool:
        """Whether it is a conversion, of whose result the mask of a gradient leaves out nothing.

        Reading two masks costs a pass; all nodes below following what was reached, many.
        """
        if self.moving != "all" or own is None or validity is None or not may_be_read(own, validity):
            return False
        return torch.equal(*torch.broadcast_tensors(own, validity))

    def arrive(
        self, node: Any, grad: Tensor, reached: Tensor | None, whole: bool, stored: AnyRecord | None = None
    ) -> None:
        """Say what a gradient of a result reached.

        node    the result's
        grad    the gradient, plain; of a sparse result, of its values
        whole   whether that is all that is valid in the result
        stored  a sparse result whose valid values are those reached
        """
        found: Any = None
        all_of_operand = whole and self.keeping
        if not all_of_operand or _recording():
            self.link()
        if not all_of_operand:
            found = reached if stored is None else stored
            if self.linked and self.moves and (self.several or reached is not None):
                is_part = whole and self._takes_apart(node.next_functions[0][0])
                found = weakref.ref(node) if is_part else self._moved_back(node, grad, reached)
        self.arrived[node.result] = engine_run(), found

    def _takes_apart(self, function: Any) -> bool:
        """Whether a function between the nodes of results and operands only takes an operand apart."""
        if type(function).__name__ not in _TAKING_APART:
            return False
        return any(operand.node is function.next_functions[0][0] for operand in self.operands)

    def _moved_back(self, node: Any, grad: Any, reached: Tensor | None) -> dict[Operand, Tensor]:
        """What of each operand is reached, by the derivative of a call that moves or adds up elements.

        grad  the result's gradient, or what tells its shape, dtype and device
        """
        edge, *_ = node.next_functions
        marks = torch.ones((), dtype=torch.int8, device=grad.device) if reached is None else reached
        ones = _marked(marks.expand(grad.shape), grad.dtype)
        operands = [operand for operand in self.linked or [] if next_functions(operand.node)]
        edges = [GradientEdge(operand.node, 0) for operand in operands]
        with torch.enable_grad():
            found = torch.autograd.grad([GradientEdge(*edge)], edges, [ones], retain_graph=True, allow_unused=True)
        return {operand: as_int8(g != 0) for operand, g in zip(operands, found, strict=True) if g is not None}

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
        arrived = {result: reached for result, (when, reached) in self.arrived.items() if when == run}
        parts = sum(isinstance(part, weakref.ref) for part in arrived.values())
        for result, reached in arrived.items():
            if isinstance(reached, weakref.ref):
                reached = self._reached_by_part(reached(), parts)
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

    def _reached_by_part(self, node: Any, number: int) -> dict[Operand, Tensor] | None:
        """What a part that is reached as a whole reaches of operands; None for everything, if all parts are."""
        function, n = node.next_functions[0]
        of_parts = function._input_metadata
        return None if number == len(of_parts) else self._moved_back(node, of_parts[n], node.validity)

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
        shared = _MEETING.get(self.category)
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


def _is_of_leaf(node: Any) -> bool:
    functions = next_functions(node)
    return not functions or type(functions[0][0]).__name__ == "AccumulateGrad"


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
    moving: Moving = "",
) -> None:
    """Let the nodes of results know the call, if somebody differentiates it.

    rule, op  None: each element of the result is that of the operand at its place; if `moving`, of another
    moving    as of the call
    given     the arguments, positional and by keyword, of which `records` are those that the rule has got
    """
    several, nodes = False, []
    if type(results) in MASKED:
        nodes = [results.grad_fn] if results.requires_grad else []
    else:
        several = True
        for result in results if isinstance(results, (list, tuple)) else (results,):
            if not isinstance(result, MaskedTensor) and (not isinstance(result, Tensor) or result.requires_grad):
                return  # what gradients of plain results reach is not known
            nodes.append(result.grad_fn if isinstance(result, MaskedTensor) else None)
    call = None
    for n, node in enumerate(nodes):
        if getattr(node, "call", NOTHING) is None:
            if call is None:
                call = Call()
                call.rule, call.op, call.moving, call.several = rule, op, moving, several
                call.operands, call.plain, call.arrived, call.linked = [], [], {}, None
                (args, kwargs), (of_args, of_kwargs) = given, records
                call.arguments = _stand_ins(args, of_args, call), {}
                if kwargs:
                    named = _stand_ins([kwargs[name] for name in of_kwargs], of_kwargs.values(), call)
                    call.arguments = call.arguments[0], dict(zip(of_kwargs, named, strict=True))
            node.call, node.result = call, n


def _stand_ins(values: Iterable[Any], records: Iterable[Any], call: Call) -> list[Any]:
    """The arguments of a call, without data: an Operand for each tensor; the call gets those to follow."""
    found = [*records]
    for n, value in enumerate(values):
        record = found[n]
        kind = type(record)
        if kind in RECORDS:
            operand = found[n] = Operand()
            operand.shape, operand.validity, operand.node = value.shape, None, None
            if kind is Dense:
                operand.validity = record.validity
            if type(value) in MASKED:
                call.operands += [operand]
                node = _data_of(record).grad_fn
                if type(node).__name__ in _OF_OPERANDS:
                    operand.node = node
            elif kind is Dense and type(node := record.data.grad_fn).__name__ == _OF_PLAIN:
                call.plain += [operand]
                operand.node = node
        elif kind is list or kind is tuple:
            found[n] = _stand_ins(value, record, call)
    return found


def joined(tensor: Tensor, record: AnyRecord, result: M, moving: Moving = "") -> M:
    """The result of a conversion of one tensor, whose elements it has at their places, or `moving` some, or all."""
    join(None, None, ((tensor,), {}), ((record,), {}), result, moving)
    return result


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
    if type(grad) not in MASKED or grad._reached is None:  # type: ignore[attr-defined]
        return None
    when, state, reached = grad._reached  # type: ignore[attr-defined]
    return reached if when == engine_run() and state == _state_of(grad) else None  # type: ignore[arg-type]


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
    for grad in grads:
        if getattr(grad, "_reached", None) is not None:
            break
    else:
        return []
    if torch.compiler.is_dynamo_compiling() or all(g is None or carried(g) is None for g in grads):
        return []
    found: list[Tensor | None] = []
    for grad, validity in zip(grads, masks, strict=True):
        reached = None if grad is None else intersect(carried(grad), validity)
        if grad is not None and reached is not None:
            found.append(_marked(reached.expand(grad.shape), grad.dtype))
        else:
            found.append(
                None
                if grad is None
                else _marked(torch.ones(grad.shape, dtype=torch.int8, device=grad.device), grad.dtype)
            )
    return found


def _marked(reached: Tensor, dtype: torch.dtype) -> Tensor:
    """What a gradient of a dtype reached, in it; in both parts of a complex number, which a view may take apart."""
    marks = reached.to(dtype)
    return marks * (1 + 1j) if marks.is_complex() else marks


def moved_back_by_view(reached: Sequence[Tensor | None]) -> Tensor:
    """What of the base is reached through the views of the node that runs."""
    with torch.no_grad():
        found = current_node()(*reached)
    return as_int8(found != 0)
