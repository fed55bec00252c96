"""Ways of being wrong: the mutations of rules that test the laws themselves.

A way gets a :class:`Call` of a rule, runs the right rule, and changes its result or its operands. It records whether it
changed anything observable (``call.changed``): a way that never does does not fit the rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.compare import Tolerance, first_difference
from op_registry.conformance.plain_torch import weighted_sum
from op_registry.conformance.sample import tree_leaves, tree_map
from op_registry.dimensions.labels import Dimensions, Labels, tensors_in
from op_registry.errors import MaskedSemanticsError
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_int8
from op_registry.rule import Run
from op_registry.sparse.permuted import Permuted, to_dense
from op_registry.sparse.record import Sparse

# The dtypes in which data under a mask can be NaN.
NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass
class Call:
    """One call of a right rule."""

    run: Run
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # What the way stores from one call to the next.
    memory: dict[Any, Any]
    changed: bool = False

    def result(self) -> Any:
        return self.run(*self.args, **self.kwargs)

    def records(self) -> list[Dense]:
        """Every dense record among the arguments, and the values of every sparse record."""
        leaves = (_values(leaf) for leaf in tree_leaves((self.args, self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Dense)]

    def partial(self) -> list[Dense]:
        """The records with invalid elements; none while tracing, when masks have no values."""
        return [r for r in self.records() if some_invalid(r)]

    def with_records(self, change: Callable[[Dense, int], Dense]) -> Any:
        """The right rule's result with every record replaced by `change(record, number)`, numbered as in `records`."""
        number = itertools.count()

        def changed(leaf: object) -> Any:
            if isinstance(leaf, Permuted):
                return leaf.like(changed(leaf.base))
            if isinstance(leaf, Sparse):
                return leaf.like(change(leaf.values, next(number)))
            return change(leaf, next(number)) if isinstance(leaf, Dense) else leaf

        args, kwargs = tree_map(changed, (self.args, self.kwargs))
        return self.run(*args, **kwargs)


def _values(leaf: object) -> object:
    if isinstance(leaf, Permuted):
        return leaf.base.values
    return leaf.values if isinstance(leaf, Sparse) else leaf


def some_invalid(record: Dense) -> bool:
    valid = record.valid
    return valid is not None and not being_traced(valid) and record.data.numel() > 0 and not bool(valid.all())


def some_valid(record: Dense) -> bool:
    valid = record.valid
    return record.data.numel() > 0 and (valid is None or being_traced(valid) or bool(valid.any()))


def hidden(records: Sequence[Dense]) -> Tensor:
    """A number that depends on all data under the masks, and on nothing else."""
    parts = []
    for r in records:
        assert r.valid is not None
        parts.append(torch.where(r.valid, torch.zeros((), dtype=r.dtype), r.data).sum().real.to(torch.float64))
    return torch.stack(parts).sum()


# The wrong labels of a call, given its right ones and its tensors by name; None if the way does not fit the call.
Restate = Callable[[Labels, Mapping[str, Any]], Labels | None]


@dataclass(frozen=True)
class Way:
    """A way of being wrong, by name; `laws` are tried first, because they are expected to notice it.

    restate  what a wrong statement of dimensions says; the rule's run is then right, and "dims" is the only law
    """

    name: str
    change: Callable[[Call], Any] = field(repr=False)
    laws: tuple[str, ...] = ()
    restate: Restate | None = field(default=None, repr=False)

    def mutated(self, run: Run, changes: Changes) -> Run:
        """`run`, made wrong in this way; `changes` counts its calls, and those in which it changed something."""
        memory: dict[Any, Any] = {}

        def mutant(*args: Any, **kwargs: Any) -> Any:
            call = Call(run, args, kwargs, memory)
            changes.calls += 1
            try:
                return self.change(call)
            finally:
                changes.changed += call.changed

        return mutant


@dataclass
class Changes:
    """How often a mutant ran, and how often it changed something observable."""

    calls: int = 0
    changed: int = 0


@dataclass(frozen=True)
class Restated(Dimensions):
    """A statement made wrong; `changes` counts the calls whose labels are wrong."""

    right: Dimensions
    restate: Restate
    changes: Changes = field(repr=False, hash=False, compare=False)

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        right = self.right.labels(op, named)
        wrong = None if right is None else self.restate(right, tensors_in(op, named))
        self.changes.calls += 1
        self.changes.changed += wrong is not None
        return right if wrong is None else wrong

    def __str__(self) -> str:
        return f"made wrong: {self.right}"


WAYS: dict[str, Way] = {}


def way(name: str, *laws: str) -> Callable[[Callable[[Call], Any]], Callable[[Call], Any]]:
    """Decorator: registers a way of being wrong."""

    def register(change: Callable[[Call], Any]) -> Callable[[Call], Any]:
        WAYS[name] = Way(name, change, laws)
        return change

    return register


def restating(name: str) -> Callable[[Restate], Restate]:
    """Decorator: registers a wrong statement of dimensions."""

    def register(restate: Restate) -> Restate:
        WAYS[name] = Way(name, Call.result, ("dims",), restate)
        return restate

    return register


Change = Callable[[Dense, Call], Dense | None]
Fits = Callable[[Dense, Call], bool]


def on_results(name: str, *laws: str, where: Fits = lambda result, call: True) -> Callable[[Change], Change]:
    """Decorator: registers a change of each result (the values of a sparse one), which returns None for no change.

    where  which results it fits
    """

    def register(change: Change) -> Change:
        def on_all(call: Call) -> Any:
            def on_one(leaf: object) -> Any:
                if isinstance(leaf, Permuted):
                    return leaf.like(on_one(leaf.base))
                if isinstance(leaf, Sparse):
                    values = on_one(leaf.values)
                    return leaf if values is leaf.values else leaf.like(values)
                if type(leaf) is not Tensor and not isinstance(leaf, Dense):
                    return leaf
                # A plain result has values to change, but no mask.
                result = leaf if isinstance(leaf, Dense) else Dense(leaf)
                record = change(result, call) if where(result, call) else None
                if record is None:
                    return leaf
                call.changed |= isinstance(leaf, Dense) or record.data is not leaf
                return record if isinstance(leaf, Dense) else record.data

            return tree_map(on_one, call.result())

        way(name, *laws)(on_all)
        return change

    return register


def leaky(call: Call) -> list[Dense]:
    return [r for r in call.partial() if r.dtype in NUMBERS]


def reads_hidden_numbers(result: Dense, call: Call) -> bool:
    """Whether a result is of numbers, and such an operand is partly invalid."""
    return bool(leaky(call)) and result.dtype in NUMBERS and some_valid(result)


def has_a_gradient(result: Dense, call: Call) -> bool:
    differentiable = result.data.requires_grad and torch.is_grad_enabled() and not being_traced(result.data)
    return differentiable and some_valid(result)


# -------------------------------------------- ways of being wrong: the mutations of rules that test the laws themselves

# --------------------------------------------------------------------------------------------------------- the mask


@on_results("mask lost")
def mask_lost(result: Dense, call: Call) -> Dense | None:
    """Everything is valid."""
    return Dense(result.data) if some_invalid(result) else None


@on_results("mask too large")
def mask_too_large(result: Dense, call: Call) -> Dense | None:
    """One invalid element is revived."""
    return _flipped(result, True) if some_invalid(result) else None


@on_results("mask too small")
def mask_too_small(result: Dense, call: Call) -> Dense | None:
    """One valid element is lost."""
    if result.valid is not None and being_traced(result.valid):
        return None
    return _flipped(result, False) if call.partial() and some_valid(result) else None


def _flipped(result: Dense, to: bool) -> Dense:
    """The result with the mask's first element that differs from `to` set to it."""
    valid = torch.ones(result.shape, dtype=torch.bool) if result.valid is None else result.valid.expand(result.shape)
    flat = valid.clone().reshape(-1)
    flat[int((flat != to).nonzero()[0, 0])] = to
    return Dense(result.data, as_int8(flat.reshape(result.shape)))


@way("a plain result")
def plain_result(call: Call) -> Any:
    """Plain tensors are returned instead of records."""
    result = call.result()
    call.changed = any(isinstance(leaf, Dense) and some_invalid(leaf) for leaf in tree_leaves(result))
    return tree_map(lambda leaf: leaf.data if isinstance(leaf, Dense) else leaf, result) if call.changed else result


@way("NaN, valid, for nothing valid")
def nan_for_nothing(call: Call) -> Any:
    """If no operand has a valid element, results are NaN and valid."""
    result, records = call.result(), call.records()
    nothing_valid = bool(call.partial()) and not any(some_valid(r) for r in records if r.validity is not None)

    def on_one(leaf: object) -> Any:
        if not nothing_valid or not isinstance(leaf, Dense) or leaf.dtype not in NUMBERS or not some_invalid(leaf):
            return leaf
        call.changed = True
        return Dense(torch.full_like(leaf.data, float("nan")))

    return tree_map(on_one, result)


@way("forgets the other operands' masks")
def other_masks_forgotten(call: Call) -> Any:
    """Every operand but the first counts as all valid."""
    result = call.with_records(lambda r, n: Dense(r.data) if n else r)
    call.changed = any(some_invalid(r) for r in call.records()[1:]) and _results_differ(result, call.result())
    return result


@way("forgets the first operand's mask")
def first_mask_forgotten(call: Call) -> Any:
    """The first operand counts as all valid."""
    result = call.with_records(lambda r, n: r if n else Dense(r.data))
    call.changed = any(some_invalid(r) for r in call.records()[:1]) and _results_differ(result, call.result())
    return result


def _results_differ(mine: object, theirs: object) -> bool:
    """Whether two results differ in a mask or in a valid value, in any storage."""
    one, other = ([_observed(_as_dense(leaf)) for leaf in tree_leaves(result)] for result in (mine, theirs))
    return first_difference("result", one, other, Tolerance()) is not None


def _observed(leaf: object) -> object:
    if isinstance(leaf, Dense):
        full = torch.ones(leaf.shape, dtype=torch.bool)
        return leaf.data.detach(), full if leaf.valid is None else leaf.valid.expand(leaf.shape)
    return (leaf, None) if isinstance(leaf, Tensor) else leaf


def _as_dense(leaf: object) -> object:
    return to_dense(leaf) if isinstance(leaf, (Sparse, Permuted)) else leaf


# ------------------------------------------------------------------------------------------------------- the values


@on_results("values off by one")
def off_by_one(result: Dense, call: Call) -> Dense | None:
    """Every value is changed."""
    return result.like(_other(result.data)) if some_valid(result) else None


@on_results("values of scalars off by one")
def scalars_off(result: Dense, call: Call) -> Dense | None:
    """Every value of 0-d results is changed."""
    return result.like(_other(result.data)) if result.ndim == 0 and some_valid(result) else None


@on_results("values off by one in part of the calls")
def partial_calls_off(result: Dense, call: Call) -> Dense | None:
    """Every value is changed if an operand has an invalid element."""
    return result.like(_other(result.data)) if call.partial() and some_valid(result) else None


def _other(data: Tensor) -> Tensor:
    if data.dtype is torch.bool:
        return ~data
    if data.dtype not in NUMBERS:
        return data + 1
    # Off by more than rounding at any magnitude; NaN and ±inf become 0.
    return torch.where(data.isfinite(), data + data.abs() + 1, torch.zeros((), dtype=data.dtype))


@on_results("another dtype")
def another_dtype(result: Dense, call: Call) -> Dense | None:
    """The same values, wider or narrower."""
    wider = {torch.float32: torch.float64, torch.float64: torch.float32, torch.int64: torch.int32}.get(result.dtype)
    return None if wider is None else result.like(result.data.to(wider))


@on_results("another shape")
def another_shape(result: Dense, call: Call) -> Dense | None:
    """The result has an additional dimension of size 1."""
    return result.map(lambda t: t.unsqueeze(0))


@way("sevens for holes")
def sevens_for_holes(call: Call) -> Any:
    """Invalid elements count as a valid 7: a wrong identity. The mask is right."""
    return _holes_filled(call, 7)


@way("zeros for holes")
def zeros_for_holes(call: Call) -> Any:
    """Invalid elements count as a valid 0: a mean divides by the number of all elements. The mask is right."""
    return _holes_filled(call, 0)


def _holes_filled(call: Call, number: int) -> Any:
    result = call.result()
    if not call.partial():
        return result
    wrong = call.with_records(lambda r, n: Dense(r.filled(bool(number) if r.dtype is torch.bool else number)))

    def on_one(right_leaf: object, wrong_leaf: object) -> Any:
        if not isinstance(right_leaf, Dense) or not isinstance(wrong_leaf, Dense):
            return right_leaf
        if right_leaf.shape != wrong_leaf.shape:
            return right_leaf
        wrong_values = right_leaf.like(wrong_leaf.data)
        call.changed |= some_valid(right_leaf) and _results_differ(right_leaf, wrong_values)
        return wrong_values

    wrong_leaves = iter(tree_leaves(wrong))
    return tree_map(lambda leaf: on_one(leaf, next(wrong_leaves, None)), result)


@way("a part counts as the whole")
def part_for_whole(call: Call) -> Any:
    """A line with a valid element counts as whole: what is missing in it is a valid 0."""

    def completed(r: Dense, number: int) -> Dense:
        if r.valid is None or not r.ndim:
            return r
        lines = r.valid.expand(r.shape).any(-1, keepdim=True).expand(r.shape)
        return Dense(r.filled(0), as_int8(lines))

    result = call.with_records(completed)
    call.changed = bool(call.partial()) and _results_differ(result, call.result())
    return result


@way("remembers the first call")
def remembers(call: Call) -> Any:
    """The first result for these shapes is returned in every later call."""
    key = str([(tuple(r.shape), r.dtype) for r in call.records()])
    if any(being_traced(r.data) for r in call.records()):
        return call.result()
    call.changed = key in call.memory
    return call.memory.setdefault(key, call.result())


@way("another value when compiled", "P7")
def wrong_when_traced(call: Call) -> Any:
    """Values are off by one in a compiled graph."""
    result = call.result()

    def on_one(leaf: object) -> Any:
        if not isinstance(leaf, Dense) or not being_traced(leaf.data):
            return leaf
        call.changed = True
        return leaf.like(_other(leaf.data))

    return tree_map(on_one, result)


@way("reads the mask in Python", "P7")
def reads_the_mask(call: Call) -> Any:
    """The mask's values decide which operators run: a graph break, or a graph that is wrong for another mask."""
    for r in call.records():
        if r.validity is not None and being_traced(r.validity):
            call.changed = True
            if bool((r.validity != 0).all()):
                return call.with_records(lambda record, n: Dense(record.data))
    return call.result()


# ------------------------------------------------------------------------------------------------ data under the mask


@on_results("garbage leaks into values", where=reads_hidden_numbers)
def leak(result: Dense, call: Call) -> Dense | None:
    """Data under the mask is added to the result."""
    return result.like(result.data + hidden(leaky(call)).to(result.dtype))


@on_results("hidden NaN leaks", where=reads_hidden_numbers)
def nan_leak(result: Dense, call: Call) -> Dense | None:
    """Data under the mask is multiplied by 0 and added to the result."""
    return result.like(result.data + (0 * hidden(leaky(call))).to(result.dtype))


@on_results("garbage leaks into the mask", where=reads_hidden_numbers)
def mask_leak(result: Dense, call: Call) -> Dense | None:
    """Hidden NaN makes results invalid."""
    valid = torch.ones(result.shape, dtype=torch.bool) if result.valid is None else result.valid
    return Dense(result.data, as_int8(valid & ~hidden(leaky(call)).isnan()))


@on_results("garbage leaks into gradients", "P3", "P5", where=reads_hidden_numbers)
def gradient_leak(result: Dense, call: Call) -> Dense | None:
    """The values are right; the gradient depends on data under the mask."""
    if not result.data.requires_grad or not torch.is_grad_enabled():
        return None
    number = torch.nan_to_num(hidden(leaky(call)).detach(), 3.0, 2.0, 1.0).clamp(-4, 4).to(result.dtype)
    return result.like(result.data + number * (result.data - result.data.detach()))


@way("raises on hidden NaN")
def raises_on_nan(call: Call) -> Any:
    """Whether it raises depends on data under the mask."""
    records = leaky(call)
    call.changed = bool(records)
    if records and bool(hidden(records).isnan()):
        raise ValueError("an operand has a NaN under its mask")
    return call.result()


@on_results("NaN under the result's mask")
def nan_under_the_mask(result: Dense, call: Call) -> Dense | None:
    """The result's data is NaN where it is invalid, which must not be observable."""
    if not some_invalid(result) or result.dtype not in NUMBERS:
        return None
    assert result.valid is not None
    return result.like(torch.where(result.valid, result.data, torch.full((), float("nan"), dtype=result.dtype)))


# ---------------------------------------------------------------------------------------------------- the operands


@way("writes to its operand")
def writes_operand(call: Call) -> Any:
    """The first operand's data is modified."""
    result = call.result()
    for record in call.records()[:1]:
        if not being_traced(record.data) and record.data.numel():
            call.changed = True
            record.data.detach().copy_(_other(record.data.detach()))
    return result


@way("writes under its operand's mask")
def writes_hidden(call: Call) -> Any:
    """Invalid elements are filled in place, in what may be the caller's memory."""
    result = call.result()
    for record in call.partial():
        assert record.valid is not None
        call.changed = True
        record.data.detach().copy_(record.filled(0).detach())
    return result


@way("revives its operand")
def writes_mask(call: Call) -> Any:
    """The operand's mask is set to all True in place."""
    result = call.result()
    for record in call.partial():
        assert record.validity is not None
        call.changed = True
        record.validity.detach().fill_(1)
    return result


# -------------------------------------------------------------------------------------------------------- refusals


@way("refuses what is partly valid")
def refuses_partial(call: Call) -> Any:
    """It refuses calls that have a result, with the right exception."""
    result = call.result()
    if call.partial() and any(isinstance(leaf, (Dense, Sparse, Tensor)) for leaf in tree_leaves(result)):
        call.changed = True
        raise MaskedSemanticsError(f"{getattr(call.run, '__name__', '')} refuses partly valid operands")
    return result


@way("raises on what is partly valid")
def raises_partial(call: Call) -> Any:
    """It raises an error that plain torch does not raise."""
    result = call.result()
    call.changed = bool(call.partial())
    if call.changed:
        raise ZeroDivisionError("an operand is partly valid")
    return result


# -------------------------------------------------------------------------------------------------------- gradients


@on_results("gradient cut", "P5", "P3", where=has_a_gradient)
def gradient_cut(result: Dense, call: Call) -> Dense | None:
    """The result has no derivative."""
    return result.like(result.data.detach())


@on_results("gradient doubled", "P5", "P3", where=has_a_gradient)
def gradient_doubled(result: Dense, call: Call) -> Dense | None:
    """The values are right, the gradient is doubled."""
    return result.like(result.data + (result.data - result.data.detach()))


@on_results("gradient wrong where something is invalid", "P5", "P3", where=has_a_gradient)
def gradient_of_partial(result: Dense, call: Call) -> Dense | None:
    """The values are right, the gradient is doubled if an operand is partly valid (a mean divided by the wrong n)."""
    return gradient_doubled(result, call) if call.partial() else None


class _DifferentiableOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.detach() * 1


@way("second derivative cut", "P5")
def second_cut(call: Call) -> Any:
    """The gradient is right, but detached. (That changes nothing for a linear operator.)"""

    def once(record: Dense, number: int) -> Dense:
        if not record.data.requires_grad or being_traced(record.data):
            return record
        call.changed = True
        return record.like(_DifferentiableOnce.apply(record.data))

    result = call.with_records(once)
    call.changed = call.changed and torch.is_grad_enabled() and _curved(call)
    return result


def _curved(call: Call) -> bool:
    """Whether the second derivative of the right rule is nonzero in this call, computed on copies."""
    inputs: list[Tensor] = []

    def copied(record: Dense, number: int) -> Dense:
        data = record.data.detach().clone()
        if record.data.requires_grad:
            inputs.append(data.requires_grad_())
        return Dense(data, None if record.validity is None else record.validity.clone())

    with torch.random.fork_rng(devices=[]):
        records = [_as_dense(leaf) for leaf in tree_leaves(call.with_records(copied))]
    scalar = weighted_sum([(r.data, r.valid) for r in records if isinstance(r, Dense)])
    if scalar is None:
        return False
    first = torch.autograd.grad(scalar, inputs, create_graph=True, allow_unused=True)
    first_scalar = weighted_sum([(g, None) for g in first if g is not None])
    if first_scalar is None:
        return False
    second = torch.autograd.grad(first_scalar, inputs, allow_unused=True)
    return any(g is not None and bool(g.any()) for g in second)


@way("no gradient for the first operand", "P5", "P3")
def first_gradient_cut(call: Call) -> Any:
    """The first operand that requires grad is detached."""
    first = next((n for n, r in enumerate(call.records()) if r.data.requires_grad), -1)
    if first < 0 or not torch.is_grad_enabled() or being_traced(call.records()[first].data):
        return call.result()
    result = call.with_records(lambda r, n: r.like(r.data.detach()) if n == first else r)
    call.changed = True
    return result
